"""What a chat model wrote, taken apart: its thoughts, its answer, and the tools it asks for.

Qwen3 writes ``<think>…</think>`` before its answer and Hermes tool calls,
``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, in it. Nothing here raises on what a
model writes, and nothing is lost: what is not well formed is part of the answer.
"""

from __future__ import annotations

import json
import math
import re
from enum import Enum
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta

from tidemill_contracts.wire import ParsedToolCall

THINK, END_THINK = "<think>", "</think>"
CLOSING_SENTENCE = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the"
    f" thinking directly now.\n{END_THINK}\n\n"
)
"""Ends thoughts that have used their budget up: the words that Qwen documents for it in "Thinking
Budget" (QwenLM/Qwen3) and in Qwen3's technical report (arXiv 2505.09388)."""
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_BEFORE_OBJECT = re.compile(r"\s*(?=\{)")
_AFTER_OBJECT = re.compile(rf"\s*{_END_CALL}")
_NOT_KEPT = (ValueError, OverflowError, RecursionError)
"""What decoding JSON, and encoding it for a result, may raise."""


class ThinkBlock(Enum):
    """How a rendered prompt leaves thinking to the model."""

    ABSENT = "absent"
    """The model writes its own ``<think>``, or does not think."""
    OPEN = "open"
    """The prompt ends inside a think block: the output begins with thoughts."""
    CLOSED = "closed"
    """The prompt ends with a finished think block: the output is the answer."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one output."""

    reasoning: str | None
    """Without the tags; ``None`` where there is no think block, empty where it is empty."""
    content: str
    tool_calls: list[ParsedToolCall]


def think_block(prompt_text: str) -> ThinkBlock:
    """How this rendered conversation ends.

    Only the end counts: tags elsewhere are somebody's words, or earlier turns.
    """
    end = prompt_text.rstrip()
    if end.endswith(THINK):
        return ThinkBlock.OPEN
    return ThinkBlock.CLOSED if end.endswith(END_THINK) else ThinkBlock.ABSENT


def prompt_opens_thinking(prompt_text: str) -> bool:
    """Whether the output to this prompt begins inside a think block."""
    return think_block(prompt_text) is ThinkBlock.OPEN


def split(text: str, *, thinking_open: bool) -> Reply:
    """Takes an output apart. Never raises.

    A think block stands at the start, and ends at the first ``</think>``; where that is missing
    the output was cut short, and all of it is reasoning. `thinking_open` says that the prompt has
    written the ``<think>``. Calls are looked for in the answer only. Newlines around the thoughts,
    before the answer and around calls belong to the format and are left out.
    """
    reasoning = None
    start = text.lstrip()
    tagged = start.startswith(THINK)
    if tagged or thinking_open:
        thoughts, _, text = (start[len(THINK) :] if tagged else text).partition(END_THINK)
        reasoning = thoughts.strip("\n")
        text = text.lstrip("\n")
    content, tool_calls = _take_calls(text)
    return Reply(reasoning=reasoning, content=content, tool_calls=tool_calls)


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` is; ``None`` where it is none, or cannot be kept as it is.

    Repeated keys, NaN, infinities, integers past 64 bits and lone surrogates do not go through a
    result unharmed, or not at all.
    """
    try:
        value = _DECODER.decode(text)
        msgspec.msgpack.encode(value)
    except _NOT_KEPT:
        return None
    return value if isinstance(value, dict) else None


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    arguments: dict[str, Any] | str = {}


def _take_calls(text: str) -> tuple[str, list[ParsedToolCall]]:
    calls: list[ParsedToolCall] = []
    kept: list[str] = []
    done = 0
    # A model in a loop may open thousands of calls that it never ends: they are not looked at.
    last = text.rfind(_END_CALL)
    start = text.find(_CALL)
    while 0 <= start < last:
        end = start + len(_CALL)
        found = _call_at(text, end)
        if found is not None:
            call, end = found
            calls.append(call)
            kept.append(text[done:start])
            done = end
        start = text.find(_CALL, end)
    if not calls:
        return text, calls
    kept.append(text[done:])
    return "\n".join(piece.strip("\n") for piece in kept if not piece.isspace() and piece), calls


def _call_at(text: str, start: int) -> tuple[ParsedToolCall, int] | None:
    """The call whose JSON begins at `start`, and where it ends; ``None`` where there is none.

    The JSON is parsed before its end is looked for, since its strings may hold the tags.
    """
    space = _BEFORE_OBJECT.match(text, start)
    if space is None:
        return None
    try:
        value, end = _DECODER.raw_decode(text, space.end())
        call = msgspec.convert(value, _Call)
        msgspec.msgpack.encode(call)
    except _NOT_KEPT:
        return None
    arguments = json_object(call.arguments) if isinstance(call.arguments, str) else call.arguments
    closing = _AFTER_OBJECT.match(text, end)
    if arguments is None or closing is None:
        return None
    return ParsedToolCall(name=call.name, arguments=arguments), closing.end()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("repeated key")
    return members


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is out of range")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse)
