"""Outputs that are held to a form, through the batcher and real kernels.

The model's weights are random: whatever is well formed here is so by the grammar alone.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import write_tiny_model
from tests.worker.served import batcher, generate
from tidemill_contracts.wire import (
    ChatMessage,
    ChatOptions,
    ErrorCode,
    GenerationJob,
    JobFailed,
    SamplingParams,
    StructuredOutput,
)
from tidemill_worker.engine.scheduler import Scheduler
from tidemill_worker.text import TextModel

TEMPLATE = (Path(__file__).parent / "templates" / "tasking.jinja").read_text("utf-8")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old", None]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LARK = 'start: "(" NUMBER ")" | "[" NUMBER "," NUMBER "]"\nNUMBER: /[0-9]{1,3}/'
CHOICES = ["yes", 'n"o\\', "perhaps\n", "žluť 👩‍🚒"]


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "random", TEMPLATE)


def _job(prompt: str = "Say", /, **sampling: Any) -> GenerationJob:
    if "structured" in sampling:
        sampling["structured"] = StructuredOutput(**sampling["structured"])
    return GenerationJob(prompt=prompt, sampling=SamplingParams(**{"max_tokens": 120, **sampling}))


def _check_schema(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 150
    assert len(value["tags"]) <= 2
    assert set(value["tags"]) <= {"new", "old", None}


def _check(form: dict[str, Any], text: str | None) -> None:
    assert text is not None
    if "json_schema" in form:
        _check_schema(text)
    elif "regex" in form:
        assert re.fullmatch(form["regex"], text)
    elif "choice" in form:
        assert text in form["choice"]
    elif "grammar" in form:
        assert re.fullmatch(r"\([0-9]{1,3}\)|\[[0-9]{1,3},[0-9]{1,3}\]", text)


FORMS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"regex": r"[a-f]{2,4}-(x|yz)+-[0-9]{3}"},
    {"choice": CHOICES},
    {"grammar": LARK},
]
DRAWS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.5, "seed": 3}]


@pytest.mark.parametrize("draw", DRAWS, ids=["greedy", "sampled"])
async def test_every_form_is_kept_whatever_the_weights_want(
    random_model: Path, draw: dict[str, Any]
) -> None:
    async with batcher(random_model) as model:
        for form in FORMS:
            jobs = [_job(f"Say {i}", structured=form, **draw) for i in range(6)]
            for result in await asyncio.gather(*(generate(model, job) for job in jobs)):
                _check(form, result.text)
                assert result.finish_reason == "stop"


@pytest.mark.parametrize(
    "text", ["e\u0301", "\u212b", "a<|im_end|>b", "<|endoftext|>", "<think>", "\ufffd"], ids=ascii
)
async def test_a_form_holds_text_that_the_tokenizer_would_read_as_something_else(
    random_model: Path, text: str
) -> None:
    """A prompt's text is brought into a normal form, and names of special tokens become these."""
    async with batcher(random_model) as model:
        chosen = await generate(model, _job(structured={"choice": [text, text + "!"]}))
        schema = {"const": f"x {text} y"}
        quoted = await generate(model, _job(structured={"json_schema": schema}))
    assert chosen.text in (text, text + "!")
    assert json.loads(quoted.text or "") == schema["const"]


async def test_any_json_object(random_model: Path) -> None:
    # With the tokens of strings barred, random weights come to an end.
    async with batcher(random_model) as model:
        ids = [i for i, raw in enumerate(model.text.token_bytes) if raw in (b"{", b"}", b" ")]
        job = _job(structured={"json_object": True}, allowed_token_ids=ids, temperature=1, n=4)
        for output in (await generate(model, job)).outputs:
            assert output.finish_reason == "stop"
            assert json.loads(output.text or "") == {}
        for schema in (True, {}):
            text = (await generate(model, _job(structured={"json_schema": schema}))).text
            assert text
            assert not text[0].isspace()


async def test_50_rows_with_one_schema_are_all_valid_and_what_each_is_alone(
    random_model: Path,
) -> None:
    jobs = [
        _job(f"{i}. {'long ' * (i % 7)}", temperature=1, seed=i, structured={"json_schema": SCHEMA})
        for i in range(50)
    ]
    async with batcher(random_model, max_rows=16) as model:
        together = await asyncio.gather(*(generate(model, job) for job in jobs))
    for result in together:
        _check_schema(result.text or "")
    assert len({result.text for result in together}) > 40
    async with batcher(random_model) as model:
        for i in (0, 13, 49):
            alone = await generate(model, jobs[i])
            assert alone.token_ids == together[i].token_ids


async def test_rows_keep_their_place_in_the_form_over_preemptions(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted: list[str] = []
    original = Scheduler._put_back

    def put_back(self: Scheduler, row: Any) -> None:
        if row.generated:
            preempted.append(row.id)
        original(self, row)

    monkeypatch.setattr(Scheduler, "_put_back", put_back)
    jobs = [
        _job(f"Say {i}", temperature=1, seed=i, structured={"json_schema": SCHEMA})
        for i in range(8)
    ]
    async with batcher(random_model) as model:
        roomy = await asyncio.gather(*(generate(model, job) for job in jobs))
    assert not preempted
    async with batcher(random_model, page_size=4, kv_pages=34) as model:
        tight = await asyncio.gather(*(generate(model, job) for job in jobs))
    assert preempted
    assert [result.token_ids for result in tight] == [result.token_ids for result in roomy]


async def test_several_outputs_have_a_form_each(random_model: Path) -> None:
    async with batcher(random_model) as model:
        job = _job(temperature=2, n=4, seed=1, structured={"json_schema": SCHEMA})
        outputs = (await generate(model, job)).outputs
    assert len({output.text for output in outputs}) == 4
    for output in outputs:
        _check_schema(output.text or "")


async def test_what_else_ends_an_output_still_does(random_model: Path) -> None:
    form = {"regex": "[ab]{30}"}
    async with batcher(random_model) as model:
        (a,), (b,) = model.text.tokenise("a"), model.text.tokenise("b")
        draw = {"temperature": 1, "seed": 2, "logit_bias": {a: 20.0, b: 20.0}}
        cut = await generate(model, _job(structured=form, max_tokens=5, **draw))
        assert cut.finish_reason == "length"
        assert re.fullmatch("[ab]+", cut.text or "")
        stopped = await generate(model, _job(structured=form, stop="ab", **draw))
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "ab")
        assert re.fullmatch("b*a*", stopped.text or "")
        by_token = await generate(model, _job(structured=form, stop_token_ids=[b], **draw))
        assert (by_token.finish_reason, by_token.token_ids[-1]) == ("stop", b)
        assert len(by_token.token_ids) < 30


async def test_the_end_comes_only_where_the_form_is_complete(random_model: Path) -> None:
    async with batcher(random_model) as model:
        (eos, *_) = model.text.eos_token_ids = frozenset(model.text.tokenise("<|im_end|>"))
        eager = {"temperature": 0, "logit_bias": {eos: 100.0}}
        early = await generate(model, _job(structured={"regex": "(abc)+"}, **eager))
        assert early.text == "abc"
        assert early.token_ids[-1] == eos
        form = {"regex": "[a-z]*"}
        long = await generate(model, _job(structured=form, min_tokens=9, **eager))
        assert len(long.token_ids) == 10
        assert re.fullmatch("[a-z]+", long.text or "")
        on = await generate(model, _job(structured=form, ignore_eos=True, max_tokens=30, **eager))
        assert (len(on.token_ids), on.finish_reason) == (30, "length")
        for more in ({"ignore_eos": True}, {"min_tokens": 5}):
            nothing = await generate(model, _job(structured={"regex": "(ab){0}"}, **more))
            assert (nothing.text, nothing.token_ids, nothing.finish_reason) == ("", [], "stop")
            over = await generate(model, _job(structured={"choice": CHOICES}, **more, **eager))
            assert over.text in CHOICES
            assert over.finish_reason == "stop"


async def test_other_options_choose_among_what_the_form_allows(random_model: Path) -> None:
    form = {"regex": "[a-h]{12}"}
    async with batcher(random_model) as model:
        free = await generate(model, _job(temperature=0, logprobs=3, max_tokens=1))
        plain = await generate(model, _job(structured=form, temperature=0, logprobs=3))
        assert free.logprobs is not None
        assert plain.logprobs is not None
        assert plain.logprobs[0].top == pytest.approx(free.logprobs[0].top, abs=1e-4)
        varied = await generate(
            model, _job(structured=form, temperature=0, presence_penalty=2, frequency_penalty=2)
        )
        assert re.fullmatch("[a-h]{12}", varied.text or "")
        assert varied.text != plain.text
        barred = await generate(
            model, _job(structured=form, temperature=0, bad_words=list("abcdefg"))
        )
        assert set(barred.text or "") <= set("abcdefgh")
        assert (barred.text or "").endswith("h")
        narrow = await generate(
            model, _job(structured=form, allowed_token_ids=model.text.tokenise("c"))
        )
        assert narrow.text == "c" * 12
        with pytest.raises(JobFailed, match="bar every token") as caught:
            await generate(model, _job(structured=form, allowed_token_ids=[0, 1]))
        assert caught.value.error.code == ErrorCode.INVALID_JOB


def _chat(thinking: bool | None, form: dict[str, Any], **sampling: Any) -> GenerationJob:
    return GenerationJob(
        messages=[ChatMessage(role="user", content="How old?")],
        chat=ChatOptions(enable_thinking=thinking),
        sampling=SamplingParams(structured=StructuredOutput(**form), temperature=1, **sampling),
    )


async def test_in_a_chat_the_form_is_that_of_the_answer(random_model: Path) -> None:
    async with batcher(random_model) as model:
        (think,), (end,) = model.text.tokenise("<think>"), model.text.tokenise("</think>")
        hurry = {"logit_bias": {think: 60.0, end: 90.0}, "max_tokens": 200}
        jobs = [_chat(True, {"json_schema": SCHEMA}, seed=i, **hurry) for i in range(8)]
        for result in await asyncio.gather(*(generate(model, job) for job in jobs)):
            assert result.reasoning is not None
            assert (result.text or "").startswith("<think>")
            _check_schema(result.content or "")
        for result in [await generate(model, _chat(False, form, **hurry)) for form in FORMS]:
            _check(FORMS[0] if "{" in (result.text or "") else {}, result.text)
            assert think not in result.token_ids
            assert result.finish_reason == "stop"


async def test_a_prompt_that_opens_the_think_block(tmp_path: Path) -> None:
    template = "{{ messages[-1].content }}<|im_start|>assistant\n<think>\n"
    async with batcher(write_tiny_model(tmp_path / "model", template)) as model:
        (end,) = model.text.tokenise("</think>")
        job = _chat(
            None, {"json_schema": SCHEMA}, logit_bias={end: 5.0}, max_tokens=300, seed=1, n=8
        )
        answered = [o for o in (await generate(model, job)).outputs if o.finish_reason == "stop"]
        assert any(output.reasoning for output in answered)
        for output in answered:
            _check_schema(output.content or "")
        endless = _chat(None, {"regex": "a"}, logit_bias={end: -100.0}, max_tokens=20)
        assert (await generate(model, endless)).finish_reason == "length"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"type": "intger"}}, "Invalid type: intger"),
    ({"json_schema": {"uniqueItems": True}}, "uniqueItems"),
    ({"json_schema": {"uniqueItems": True, "x-guidance": {"lenient": True}}}, "uniqueItems"),
    ({"json_schema": {"$ref": "https://127.0.0.1/x.json"}}, "does not fetch"),
    ({"json_schema": {"$ref": "#"}}, "No text has this form"),
    ({"json_schema": {"minimum": 2, "maximum": 1, "type": "number"}}, "greater than maximum"),
    ({"json_schema": False}, "No JSON is valid"),
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": r"(a)\1"}, "backreferences"),
    ({"grammar": "start: missing"}, "unknown name"),
    ({"grammar": 'a: "x"'}, "no start rule"),
    (
        # 8 KiB that compile for more than 5 s of CPU time.
        {"json_schema": {"patternProperties": {f"^a{i}[b-z]+$": {} for i in range(400)}}},
        "more than 2 s to compile",
    ),
]


async def test_forms_that_cannot_be_held_to_fail_their_job_only(random_model: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"items": deep}
    async with batcher(random_model) as model:
        tasks = [
            asyncio.create_task(generate(model, _job(structured=form)))
            for form, _ in [*REFUSED, ({"json_schema": deep}, "")]
        ]
        neighbour = _job(structured={"json_schema": SCHEMA}, temperature=1)
        plain = await generate(model, _job(max_tokens=3, ignore_eos=True))
        assert len(plain.token_ids) == 3
        _check_schema((await generate(model, neighbour)).text or "")
        failures = await asyncio.gather(*tasks, return_exceptions=True)
    for failure, (form, said) in zip(failures, [*REFUSED, ({"json_schema": 0}, "")], strict=True):
        assert isinstance(failure, JobFailed), form
        assert failure.error.code == ErrorCode.INVALID_GRAMMAR
        assert said in failure.error.message
        assert failure.error.message.endswith(f"- at `$.sampling.structured.{next(iter(form))}`")
        assert len(failure.error.message) < 400
        assert not failure.error.retryable


async def test_a_grammar_that_fails_in_a_step_fails_its_row_only(random_model: Path) -> None:
    async with batcher(random_model) as model:
        bad = asyncio.create_task(generate(model, _job(structured={"grammar": 'start: "x" start'})))
        jobs = [_job(structured={"json_schema": SCHEMA}, temperature=1) for _ in range(4)]
        for result in await asyncio.gather(*(generate(model, job) for job in jobs)):
            _check_schema(result.text or "")
        with pytest.raises(JobFailed, match="items") as caught:
            await bad
    assert caught.value.error.code == ErrorCode.INVALID_GRAMMAR


async def test_a_model_without_a_tokenizer_holds_to_no_form(tiny_model: Path) -> None:
    async with batcher(tiny_model) as model:
        sampling = SamplingParams(structured=StructuredOutput(regex="a"))
        with pytest.raises(JobFailed, match=r"\$\.sampling\.structured") as caught:
            await generate(model, GenerationJob(prompt_token_ids=[1], sampling=sampling))
    assert caught.value.error.code == ErrorCode.NO_TOKENIZER


async def test_the_demo_model_answers_in_json() -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    schema["additionalProperties"] = False
    async with batcher(Path("demo")) as model:
        job = GenerationJob(
            messages=[ChatMessage(role="user", content="What is 2 + 3?")],
            sampling=SamplingParams(
                temperature=0, max_tokens=60, structured=StructuredOutput(json_schema=schema)
            ),
        )
        result = await generate(model, job)
    assert isinstance(model.text, TextModel)
    text = result.content or ""
    assert text.startswith("{")
    if result.finish_reason == "stop":
        assert type(json.loads(text)["sum"]) is int
