"""What a job may say, and that what it may not is refused with the path of the field."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill_contracts.wire import (
    MAX_JOB_BYTES,
    ChatMessage,
    ErrorCode,
    GenerationJob,
    InvalidMessage,
    SamplingParams,
    StructuredOutput,
    convert_job,
    decode_job,
    decode_json_job,
    encode_job,
)

NAN = float("nan")

REFUSED: list[tuple[dict[str, object], str]] = [
    ({"prompt": "x", "tempo": 1}, "unknown field `tempo`"),
    ({"prompt": "x", "sampling": {"beams": 4}}, "unknown field `beams` - at `$.sampling`"),
    ({"prompt": "x", "sampling": {"temperature": NAN}}, "`$.sampling.temperature`"),
    ({"prompt": "x", "sampling": {"temperature": -1}}, "`$.sampling.temperature`"),
    ({"prompt": "x", "sampling": {"temperature": float("inf")}}, "`$.sampling.temperature`"),
    ({"prompt": "x", "sampling": {"temperature": True}}, "`$.sampling.temperature`"),
    ({"prompt": "x", "sampling": {"temperature": "0"}}, "`$.sampling.temperature`"),
    ({"prompt": "x", "sampling": {"top_p": 0}}, "`$.sampling.top_p`"),
    ({"prompt": "x", "sampling": {"top_p": 1.01}}, "`$.sampling.top_p`"),
    ({"prompt": "x", "sampling": {"top_p": NAN}}, "`$.sampling.top_p`"),
    ({"prompt": "x", "sampling": {"top_k": -2}}, "`$.sampling.top_k`"),
    ({"prompt": "x", "sampling": {"top_k": 1.5}}, "`$.sampling.top_k`"),
    ({"prompt": "x", "sampling": {"seed": -1}}, "`$.sampling.seed`"),
    ({"prompt": "x", "sampling": {"seed": 2**63}}, "`$.sampling.seed`"),
    ({"prompt": "x", "sampling": {"max_tokens": 0}}, "`$.sampling.max_tokens`"),
    ({"prompt": "x", "sampling": {"max_tokens": 10**9}}, "`$.sampling.max_tokens`"),
    ({"prompt": "x", "sampling": {"ignore_eos": 1}}, "`$.sampling.ignore_eos`"),
    ({"prompt": "x", "sampling": {"min_p": 1.5}}, "`$.sampling.min_p`"),
    ({"prompt": "x", "sampling": {"n": 0}}, "`$.sampling.n`"),
    ({"prompt": "x", "sampling": {"n": 10**6}}, "`$.sampling.n`"),
    ({"prompt": "x", "sampling": {"presence_penalty": -2.1}}, "`$.sampling.presence_penalty`"),
    ({"prompt": "x", "sampling": {"frequency_penalty": NAN}}, "`$.sampling.frequency_penalty`"),
    ({"prompt": "x", "sampling": {"repetition_penalty": 0}}, "`$.sampling.repetition_penalty`"),
    ({"prompt": "x", "sampling": {"logit_bias": {"a": 1.0}}}, "`$.sampling.logit_bias`"),
    ({"prompt": "x", "sampling": {"logit_bias": {5: 101.0}}}, "`$.sampling.logit_bias[...]`"),
    ({"prompt": "x", "sampling": {"allowed_token_ids": []}}, "`$.sampling.allowed_token_ids`"),
    ({"prompt": "x", "sampling": {"bad_words": [""]}}, "`$.sampling.bad_words[0]`"),
    ({"prompt": "x", "sampling": {"stop": ""}}, "`$.sampling.stop`"),
    ({"prompt": "x", "sampling": {"stop": ["a"] * 33}}, "`$.sampling.stop`"),
    ({"prompt": "x", "sampling": {"stop_token_ids": [-1]}}, "`$.sampling.stop_token_ids[0]`"),
    ({"prompt": "x", "sampling": {"logprobs": 10**6}}, "`$.sampling.logprobs`"),
    ({"prompt": "x", "sampling": {"min_tokens": -1}}, "`$.sampling.min_tokens`"),
    ({"prompt": "x", "sampling": {"prompt_logprobs": -1}}, "`$.sampling.prompt_logprobs`"),
    ({"prompt": "x", "sampling": {"prompt_logprobs": 129}}, "`$.sampling.prompt_logprobs`"),
    ({"prompt": "x", "sampling": {"prompt_logprobs": True}}, "`$.sampling.prompt_logprobs`"),
    (
        {"prompt_token_ids": [1] * 2_033, "sampling": {"prompt_logprobs": 128}},
        "2,033 prompt tokens with 129 log probabilities each are more than the 262,144 that one"
        " result may hold - at `$.sampling.prompt_logprobs`",
    ),
    (
        {"prompt": "x", "sampling": {"repetition_detection": {"min_count": 1}}},
        "`$.sampling.repetition_detection.min_count`",
    ),
    ({"prompt": "x", "sampling": {"structured": {}}}, "got none - at `$.sampling.structured`"),
    (
        {"prompt": "x", "sampling": {"structured": {"regex": "a", "json_schema": False}}},
        "got `json_schema` and `regex` - at `$.sampling.structured`",
    ),
    ({"prompt": "x", "sampling": {"structured": {"json_object": False}}}, "got none"),
    ({"prompt": "x", "sampling": {"structured": {"regex": ""}}}, "structured.regex`"),
    ({"prompt": "x", "sampling": {"structured": {"choice": []}}}, "structured.choice`"),
    ({"prompt": "x", "sampling": {"structured": {"choice": ["a", ""]}}}, "choice[1]`"),
    ({"prompt": "x", "sampling": {"structured": {"json_schema": []}}}, "json_schema`"),
    ({"prompt": "x", "sampling": {"structured": {"json_schema": {1: 2}}}}, "json_schema`"),
    (
        {"prompt": "x", "sampling": {"structured": {"json_schema": {"enum": ["x" * 70_000]}}}},
        "`json_schema` has 70,013 bytes, at most 65,536 are allowed - at `$.sampling.structured`",
    ),
    ({"prompt": "x", "sampling": {"structured": {"choice": ["x" * 999] * 99}}}, "are allowed"),
    ({"prompt": "x", "sampling": {"structured": {"lark": "start: A"}}}, "unknown field `lark`"),
    ({"messages": [{"role": "assistant"}]}, "A message needs `content`, or `tool_calls`"),
    ({"messages": [], "chat": {"tools": [{"type": "x"}]}}, "`$.chat.tools[0]"),
    ({"messages": [], "chat": {"thinking_budget": -1}}, "`$.chat.thinking_budget`"),
    ({"messages": [], "chat": {"thinking_budget": True}}, "`$.chat.thinking_budget`"),
    ({"messages": [], "chat": {"thinking_budget": 2**40}}, "`$.chat.thinking_budget`"),
    ({"prompt": "x", "sampling": None}, "`$.sampling`"),
    ({"prompt": 5}, "`$.prompt`"),
    ({"prompt_token_ids": [1, -1]}, "`$.prompt_token_ids[1]`"),
    ({"prompt_token_ids": [2**40]}, "`$.prompt_token_ids[0]`"),
    ({"prompt_token_ids": [True]}, "`$.prompt_token_ids[0]`"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "`$.messages[0].role`"),
    ({"messages": [{"role": "user"}]}, "A message needs `content`"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "unknown field `name`"),
    ({}, "exactly one of `prompt`, `messages` and `prompt_token_ids`, got none"),
    ({"prompt": "x", "messages": []}, "got `prompt` and `messages`"),
    ({"prompt": "x", "id": ""}, "`$.id`"),
    ({"prompt": "x", "id": "a b"}, "`$.id`"),
    ({"prompt": "x", "id": "x" * 129}, "`$.id`"),
    ({"prompt": "x", "id": "žluť"}, "`$.id`"),
    ({"prompt": "x", "priority": 101}, "`$.priority`"),
    ({"prompt": "x", "tenant": "t" * 129}, "`$.tenant`"),
    ({"prompt": "x", "tenant": None}, "`$.tenant`"),
    ({"prompt": "x", "deadline": NAN}, "`$.deadline`"),
    ({"prompt": "x", "deadline": -1.0}, "`$.deadline`"),
    ({"prompt": "x", "metadata": {"k": 1}}, "`$.metadata[...]`"),
    ({"prompt": "x", "metadata": {"k" * 65: "v"}}, "`$.metadata`"),
    ({"prompt": "x", "metadata": {str(i): "" for i in range(17)}}, "`$.metadata`"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED, ids=lambda value: repr(value)[:60])
def test_what_breaks_the_contract_is_refused_with_its_path(
    fields: dict[str, object], said: str
) -> None:
    with pytest.raises(InvalidMessage) as caught:
        decode_job(msgspec.msgpack.encode(fields))
    assert said in str(caught.value)
    assert caught.value.error.code == ErrorCode.INVALID_JOB
    assert not caught.value.error.retryable


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x93\x01", b"\x81\xa6prompt\xa2\xff\xfe", b"\x80"])
def test_bytes_that_are_no_job_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidMessage):
        decode_job(raw)


@pytest.mark.parametrize("raw", ["", "null", "[1,2]", '"x"', "{", '{"prompt": NaN}', "[" * 100_000])
def test_json_that_is_no_job_is_refused(raw: str) -> None:
    with pytest.raises(InvalidMessage):
        decode_json_job(raw)


def test_another_schema_version_is_refused_as_such() -> None:
    with pytest.raises(InvalidMessage, match="Schema version 2 is not supported") as caught:
        convert_job({"prompt": "x", "schema_version": 2})
    assert caught.value.error.code == ErrorCode.UNSUPPORTED_SCHEMA_VERSION


def test_a_struct_built_in_python_is_checked_before_it_is_sent() -> None:
    job = GenerationJob(prompt="x", sampling=SamplingParams(top_k=-7))
    with pytest.raises(InvalidMessage, match=r"\$\.sampling\.top_k"):
        encode_job(job)
    with pytest.raises(InvalidMessage, match="surrogates"):
        encode_job(GenerationJob(prompt="\ud800"))
    with pytest.raises(InvalidMessage, match="cannot be encoded"):
        encode_job(GenerationJob(prompt_token_ids=[2**70]))


def test_a_job_has_a_largest_size() -> None:
    encode_job(GenerationJob(prompt="x" * (MAX_JOB_BYTES - 1_000)))
    with pytest.raises(InvalidMessage, match="at most 8,388,608 are allowed"):
        encode_job(GenerationJob(prompt="x" * MAX_JOB_BYTES))


def test_an_empty_prompt_is_a_valid_message() -> None:
    # Only the worker's tokenizer can tell that a prompt has no tokens.
    assert decode_json_job('{"prompt": ""}').prompt == ""


texts = st.text(st.characters(exclude_categories=["Cs"]))
schemas = st.booleans() | st.dictionaries(
    texts, st.recursive(st.none() | st.integers(-9, 9) | texts, lambda x: st.lists(x, max_size=2))
)
jobs = st.builds(
    GenerationJob,
    id=st.none() | st.from_regex(r"\A[!-~]{1,128}\Z"),
    model=st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
    prompt=st.none(),
    messages=st.none(),
    prompt_token_ids=st.lists(st.integers(0, 2**31 - 1)),
    sampling=st.builds(
        SamplingParams,
        temperature=st.none() | st.floats(0, 10),
        top_p=st.none() | st.floats(0, 1, exclude_min=True),
        top_k=st.none() | st.integers(-1, 2**31 - 1),
        seed=st.none() | st.integers(0, 2**63 - 1),
        max_tokens=st.none() | st.integers(1, 1_000_000),
        ignore_eos=st.booleans(),
        min_p=st.none() | st.floats(0, 1),
        n=st.integers(1, 64),
        presence_penalty=st.floats(-2, 2),
        logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=4),
        stop=st.text("abc", min_size=1, max_size=9)
        | st.lists(st.text("abc", min_size=1, max_size=9), max_size=4),
        logprobs=st.none() | st.integers(0, 128),
        structured=st.none()
        | st.builds(StructuredOutput, json_schema=schemas)
        | st.builds(StructuredOutput, regex=st.text("ab*\\", min_size=1, max_size=9))
        | st.builds(StructuredOutput, choice=st.lists(st.text("ab", min_size=1), min_size=1))
        | st.just(StructuredOutput(json_object=True)),
    ),
    priority=st.integers(-100, 100),
    tenant=st.text("ab ž", max_size=128),
    deadline=st.none() | st.floats(0, 1e11),
    metadata=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=512),
        max_size=16,
    ),
)


@given(jobs)
def test_every_valid_job_survives_msgpack_and_json(job: GenerationJob) -> None:
    assert decode_job(encode_job(job)) == job
    assert decode_json_job(msgspec.json.encode(job)) == job


@given(texts, st.lists(texts, max_size=4))
def test_any_text_survives(prompt: str, turns: list[str]) -> None:
    job = GenerationJob(prompt=prompt)
    assert decode_job(encode_job(job)) == job
    job = GenerationJob(messages=[ChatMessage(role="user", content=turn) for turn in turns])
    assert decode_job(encode_job(job)) == job


@given(st.binary(max_size=400))
def test_no_bytes_raise_anything_but_invalid_message(raw: bytes) -> None:
    for decode in (decode_job, decode_json_job):
        with contextlib.suppress(InvalidMessage):
            assert isinstance(decode(raw), GenerationJob)
