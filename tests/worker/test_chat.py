"""Conversations as templates see them, what a model answers taken apart, and how it is sampled."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import tidemill_worker
from tidemill_contracts.models.config import load_config
from tidemill_contracts.wire import (
    ErrorCode,
    GenerationJob,
    JobFailed,
    ParsedToolCall,
    convert_job,
)
from tidemill_worker.chat import Reply, json_object, prompt_opens_thinking, split
from tidemill_worker.defaults import NON_THINKING, THINKING, sampling_defaults
from tidemill_worker.text import TextModel

DEMO = Path(tidemill_worker.__file__).parent / "demo_model"
TEMPLATE = (Path(__file__).parent / "templates" / "tasking.jinja").read_text("utf-8")
DEMO_TEMPLATE = json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"]
OPENS = "{{ messages[-1].content }}<|im_start|>assistant\n<think>\n"
CLOSES = "{{ messages[-1].content }}<|im_start|>assistant\n<think>\n\n</think>\n\n"
PLAIN = "{{ messages[-1].content }}<|im_start|>assistant\n"

USER = {"role": "user", "content": "  Is <b>1 & 2</b> 'rainy'? \n"}
FOLLOW_UP = {"role": "user", "content": "And in Plzeň? /no_think"}
CALLS: list[dict[str, Any]] = [
    {"function": {"name": "weather", "arguments": '{"city":"Plzeň","days":[1,2.50]}'}, "id": "c1"},
    {"function": {"name": "time", "arguments": {"zone": "</tool_call>", "at": None}}},
    {"function": {"name": "odd", "arguments": "not {json"}},
]
TOOLS: list[dict[str, Any]] = [
    {"function": {"name": "weather", "parameters": {"type": "object", "properties": {"ž": {}}}}},
    {"type": "function", "function": {"name": "time", "description": "<now> & 'then'"}},
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [USER],
    "system and history": [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nNo."},
        FOLLOW_UP,
    ],
    "reasoning apart": [USER, {"role": "assistant", "content": "No", "reasoning_content": "\nhm"}],
    "tools": [
        USER,
        {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "tool", "content": "noon"},
    ],
    "two rounds of tools": [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": CALLS[:2]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\ny", "tool_calls": CALLS[1:2]},
        {"role": "tool", "content": "3"},
    ],
    "thoughts of earlier turns": [
        USER,
        {"role": "assistant", "content": "No.", "reasoning_content": "hm"},
        {"role": "system", "content": "In the middle."},
        {"role": "user", "content": "Sure? /think"},
        {"role": "assistant", "content": "<think>hm</think>Yes."},
        FOLLOW_UP,
    ],
    "tools without words": [
        FOLLOW_UP,
        {"role": "assistant", "content": None, "reasoning_content": "x", "tool_calls": CALLS[:1]},
        {"role": "tool", "content": ""},
        {"role": "user", "content": "[result]\n2\n[/result]"},
    ],
}


def _model(
    path: Path, template: str | list[dict[str, str]], generation: dict[str, Any] | None = None
) -> TextModel:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO / name, path / name)
    tokens = {"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**tokens, "chat_template": template}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return TextModel(path, load_config(path))


def _job(messages: list[dict[str, Any]], **chat: Any) -> GenerationJob:
    return convert_job({"messages": messages, "chat": chat})


def _as_sent_to_transformers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With arguments as objects where they are, which transformers leaves to its callers."""
    sent = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls", []):
            parsed = json_object(str(call["function"]["arguments"]))
            call["function"]["arguments"] = parsed or call["function"]["arguments"]
    return list(sent)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return _model(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(DEMO / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )


class TestRendering:
    @pytest.mark.parametrize("thinking", [None, True, False])
    @pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
    @pytest.mark.parametrize("name", CONVERSATIONS)
    def test_is_that_of_transformers(
        self,
        model: TextModel,
        reference: PreTrainedTokenizerFast,
        name: str,
        tools: list[dict[str, Any]],
        thinking: bool | None,
    ) -> None:
        job = _job(CONVERSATIONS[name], tools=tools, enable_thinking=thinking)
        options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        common: dict[str, Any] = {
            "tools": [{"type": "function", "function": tool["function"]} for tool in tools] or None,
            "chat_template": TEMPLATE,
            "add_generation_prompt": True,
        }
        messages = _as_sent_to_transformers(CONVERSATIONS[name])
        expected = reference.apply_chat_template(messages, tokenize=False, **common, **options)
        assert model.render(job) == expected
        ids = reference.apply_chat_template(messages, return_dict=False, **common, **options)
        assert model.encode(job).token_ids == ids

    @pytest.mark.parametrize("name", ["question", "system and history"])
    def test_of_the_demo_model_is_that_of_transformers(
        self, reference: PreTrainedTokenizerFast, name: str
    ) -> None:
        demo = TextModel(DEMO, load_config(DEMO))
        assert demo.render(_job(CONVERSATIONS[name])) == reference.apply_chat_template(
            CONVERSATIONS[name],
            chat_template=DEMO_TEMPLATE,
            tokenize=False,
            add_generation_prompt=True,
        )

    def test_soft_switches_go_through_unchanged(self, model: TextModel) -> None:
        for switch in ("/think", "/no_think"):
            text = model.render(_job([{"role": "user", "content": f"Hi {switch}"}]))
            assert f"user\nHi {switch}<|im_end|>" in text

    def test_valid_argument_text_becomes_an_object_and_other_text_stays(
        self, model: TextModel
    ) -> None:
        text = model.render(_job(CONVERSATIONS["tools"]))
        assert '"arguments": {"city": "Plzeň", "days": [1, 2.5]}}' in text
        assert '"arguments": not {json}' in text

    def test_a_call_without_words_suits_a_template_that_reads_the_words(
        self, tmp_path: Path
    ) -> None:
        model = _model(tmp_path, "{{ 'said: ' + messages[1].content }}")
        assert model.render(_job(CONVERSATIONS["tools without words"][:2])) == "said: "

    def test_a_template_for_tools_is_used_for_jobs_with_tools(self, tmp_path: Path) -> None:
        named = {"default": "plain", "tool_use": "{{ tools[0].function.name }}"}
        model = _model(tmp_path, [{"name": n, "template": t} for n, t in named.items()])
        assert model.render(_job([USER])) == "plain"
        assert model.render(_job([USER], tools=TOOLS)) == "weather"

    @pytest.mark.parametrize("given", [{"prompt": "x"}, {"prompt_token_ids": [1]}])
    def test_chat_options_without_a_chat_are_refused(
        self, model: TextModel, given: dict[str, Any]
    ) -> None:
        job = convert_job({**given, "chat": {"enable_thinking": False}})
        with pytest.raises(JobFailed, match=r"\$\.chat") as caught:
            model.encode(job)
        assert caught.value.error.code == ErrorCode.INVALID_JOB


def _call_text(name: str, arguments: Any, indent: int | None = None) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, indent=indent)
    return f"<tool_call>\n{body}\n</tool_call>"


WEATHER = ParsedToolCall(name="weather", arguments={"city": "Brno"})
WEATHER_TEXT = _call_text("weather", {"city": "Brno"})


class TestSplit:
    @pytest.mark.parametrize(
        ("text", "thinking_open", "reasoning", "content"),
        [
            ("<think>\nhm\n</think>\n\nYes.", False, "hm", "Yes."),
            ("\n<think>hm</think>Yes.\n", False, "hm", "Yes.\n"),
            ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
            ("<think>\n  a\n\nb\n\n", False, "  a\n\nb", ""),
            ("<think>", False, "", ""),
            ("hm\n</think>\n\nYes.", True, "hm", "Yes."),
            ("<think>\nhm\n</think>\n\nYes.", True, "hm", "Yes."),
            ("hm, still", True, "hm, still", ""),
            ("", True, "", ""),
            ("", False, None, ""),
            ("\n\nYes.\n", False, None, "\n\nYes.\n"),
            ("Tags like <think> and </think>", False, None, "Tags like <think> and </think>"),
            ("hm</think>a</think>b", True, "hm", "a</think>b"),
            (f"hm {WEATHER_TEXT}", True, f"hm {WEATHER_TEXT}", ""),
        ],
    )
    def test_thoughts_and_answer(
        self, text: str, thinking_open: bool, reasoning: str | None, content: str
    ) -> None:
        reply = split(text, thinking_open=thinking_open)
        assert reply == Reply(reasoning=reasoning, content=content, tool_calls=[])

    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            (WEATHER_TEXT, "", 1),
            (f"{WEATHER_TEXT}\n{WEATHER_TEXT}", "", 2),
            (f"{WEATHER_TEXT}{WEATHER_TEXT}<|im_end|>", "<|im_end|>", 2),
            (f"I look.\n\n{WEATHER_TEXT}\n", "I look.", 1),
            (f"One {WEATHER_TEXT}\ntwo\n{WEATHER_TEXT}\nthree", "One \ntwo\nthree", 2),
            (_call_text("weather", {"city": "Brno"}, indent=4), "", 1),
            (_call_text("weather", '{"city": "Brno"}'), "", 1),
            (WEATHER_TEXT.replace("\n", ""), "", 1),
            (f"<tool_call>\n{WEATHER_TEXT}", "<tool_call>", 1),
        ],
    )
    def test_calls_are_taken_out_of_the_answer(self, text: str, content: str, calls: int) -> None:
        reply = split(text, thinking_open=False)
        assert reply == Reply(reasoning=None, content=content, tool_calls=[WEATHER] * calls)

    @pytest.mark.parametrize(
        "text",
        [
            "<tool_call>",
            WEATHER_TEXT.removesuffix("</tool_call>"),
            WEATHER_TEXT[:-20],
            "<tool_call>\nweather(Brno)\n</tool_call>",
            "<tool_call>\n[]\n</tool_call>",
            '<tool_call>\n{"name": "f", "arguments": {}} and more\n</tool_call>',
            '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
            '<tool_call>\n{"arguments": {}}\n</tool_call>',
            '<tool_call>\n{"name": "f", "arguments": "none"}\n</tool_call>',
            '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
            '<tool_call>\n{"name": "f", "parameters": {"x": 1}}\n</tool_call>',
            '<tool_call>\n{"name": "f", "arguments": {"x": 1, "x": 2}}\n</tool_call>',
            '<tool_call>\n{"name": "f", "arguments": {"x": NaN}}\n</tool_call>',
            '<tool_call>\n{"name": "f", "arguments": {"x": 1e999}}\n</tool_call>',
            '<tool_call>\n{"name": "f", "arguments": {"x": 99999999999999999999}}\n</tool_call>',
            '<tool_call>\n{"name": "f", "arguments": {"x": "\\ud800"}}\n</tool_call>',
            '<tool_call>\n{"name": "f", "arguments": ' + "[" * 100_000,
            '<tool_call>\n{"name": "f", "arguments": {"x": ' + "9" * 5_000 + "}}\n</tool_call>",
        ],
        ids=lambda text: text[11:60],
    )
    def test_what_is_no_call_stays_in_the_answer(self, text: str) -> None:
        reply = split(text, thinking_open=False)
        assert reply == Reply(reasoning=None, content=text, tool_calls=[])
        assert split(text + WEATHER_TEXT, thinking_open=False).tool_calls[-1:] == [WEATHER]

    def test_arguments_may_be_left_out(self) -> None:
        reply = split('<tool_call>{"name": "now"}</tool_call>', thinking_open=False)
        assert reply.tool_calls == [ParsedToolCall(name="now", arguments={})]

    json_values = st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.sampled_from(["</tool_call>", "<tool_call>\n{", "</think>", '"}\\', "ž\n"]),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text("ab{", max_size=2), inner)
        ),
        max_leaves=6,
    )

    @given(
        reasoning=st.none() | st.sampled_from(["", "hm", "a\n\nb", "<tool_call> in thought"]),
        content=st.sampled_from(["", "Yes.", "a\n\n  b"]),
        calls=st.lists(
            st.tuples(
                st.text("ab_", min_size=1, max_size=3), st.dictionaries(st.text("k "), json_values)
            ),
            max_size=3,
        ),
        indent=st.sampled_from([None, 2]),
        thinking_open=st.booleans(),
    )
    def test_a_reply_as_the_model_writes_it_comes_back(
        self,
        reasoning: str | None,
        content: str,
        calls: list[tuple[str, dict[str, Any]]],
        indent: int | None,
        thinking_open: bool,
    ) -> None:
        thinking_open = thinking_open and reasoning is not None
        thoughts = "" if reasoning is None else f"<think>\n{reasoning}\n</think>\n\n"
        answer = [content] if content else []
        text = thoughts.removeprefix("<think>\n" if thinking_open else "") + "\n".join(
            answer + [_call_text(name, arguments, indent) for name, arguments in calls]
        )
        assert split(text, thinking_open=thinking_open) == Reply(
            reasoning=reasoning,
            content=content,
            tool_calls=[ParsedToolCall(name=name, arguments=args) for name, args in calls],
        )

    pieces = st.sampled_from(
        [
            *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "x", "ž", "\u2028"),
            *('{"name":"f","arguments":{', '"k":"', '"}', "}}", "{", "}", '"', "\\", WEATHER_TEXT),
            '{"name":"f","arguments":{"a":"<tool_call>"}}',
        ]
    )

    @given(st.lists(pieces, max_size=14).map("".join), st.booleans())
    def test_nothing_is_lost_and_nothing_invented(self, text: str, thinking_open: bool) -> None:
        reply = split(text, thinking_open=thinking_open)
        parts = [reply.reasoning or "", reply.content]
        parts += [_call_text(call.name, call.arguments) for call in reply.tool_calls]
        lost = _characters(text)
        lost.subtract(_characters("".join(parts)))
        tags = [Counter[str]()]
        if reply.reasoning is not None:
            end = _characters("</think>")
            begin = _characters("<think>")
            tags += [begin, end, begin + end]
        assert +lost in tags
        assert not -lost

    @pytest.mark.timeout(5)
    def test_thousands_of_broken_calls_take_no_time(self) -> None:
        for text in ("<tool_call>" * 40_000, '<tool_call>\n{"name": "f", ' * 5_000):
            text += "</tool_call>"
            assert split(text, thinking_open=False).content == text

    @given(st.text(), st.booleans())
    def test_any_text_is_taken(self, text: str, thinking_open: bool) -> None:
        reply = split(text, thinking_open=thinking_open)
        assert reply.content in text
        assert (reply.reasoning is not None) >= thinking_open


def _characters(text: str) -> Counter[str]:
    """How often each character stands in it, white space aside."""
    return Counter("".join(text.split()))


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_a_prompt_opens_thinking_only_at_its_end(prompt: str, opens: bool) -> None:
    assert prompt_opens_thinking(prompt) is opens


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
NOT_THINKING = {**CHAT, "chat": {"enable_thinking": False}}
RAW = {"prompt": "Hi"}
HYBRID = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
INSTRUCT = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
TUNED = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05}
GREEDY = {"do_sample": False, "top_k": 5}
PLAIN_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


@pytest.mark.parametrize(
    ("template", "generation", "job", "expected"),
    [
        pytest.param(TEMPLATE, HYBRID, CHAT, THINKING, id="a hybrid thinks"),
        pytest.param(TEMPLATE, HYBRID, NOT_THINKING, NON_THINKING, id="a hybrid told not to"),
        pytest.param(CLOSES, HYBRID, CHAT, NON_THINKING, id="a template that closes the block"),
        pytest.param(OPENS, HYBRID, NOT_THINKING, THINKING, id="a template that always thinks"),
        pytest.param(TEMPLATE, HYBRID, RAW, THINKING, id="a raw prompt follows the config"),
        pytest.param(PLAIN, INSTRUCT, CHAT, NON_THINKING, id="instruct"),
        pytest.param(PLAIN, INSTRUCT, NOT_THINKING, NON_THINKING, id="instruct, told not to"),
        pytest.param(PLAIN, HYBRID, CHAT, THINKING, id="a template without a switch: the config"),
        pytest.param(
            TEMPLATE,
            TUNED,
            NOT_THINKING,
            {**NON_THINKING, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05},
            id="values of its own stay, and gaps are filled",
        ),
        pytest.param(TEMPLATE, {}, CHAT, THINKING, id="no word, thinking"),
        pytest.param(TEMPLATE, {}, NOT_THINKING, NON_THINKING, id="no word, not thinking"),
        pytest.param(PLAIN, None, CHAT, NON_THINKING, id="no file, no switch"),
        pytest.param(
            TEMPLATE, {}, RAW, {**PLAIN_SAMPLING, "temperature": 0.0}, id="no word, raw: greedy"
        ),
        pytest.param(TEMPLATE, {"do_sample": True}, RAW, PLAIN_SAMPLING, id="raw: as it stands"),
        pytest.param(
            TEMPLATE, GREEDY, CHAT, {**PLAIN_SAMPLING, "temperature": 0.0, "top_k": 5}, id="greedy"
        ),
    ],
)
def test_what_a_job_leaves_open_is_sampled_as_the_mode_wants(
    tmp_path: Path,
    template: str,
    generation: dict[str, Any] | None,
    job: dict[str, Any],
    expected: dict[str, float],
) -> None:
    model = _model(tmp_path, template, generation)
    asked = convert_job(job)
    found = sampling_defaults(model, asked, model.encode(asked))
    assert found == {"repetition_penalty": 1.0, **expected}


def test_the_demo_model_is_greedy() -> None:
    demo = TextModel(DEMO, load_config(DEMO))
    asked = convert_job(CHAT)
    assert sampling_defaults(demo, asked, demo.encode(asked))["temperature"] == 0
