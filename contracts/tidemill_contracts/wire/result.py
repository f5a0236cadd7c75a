"""The answer: what a worker gives back.

Unlike jobs, results may gain fields: a reader ignores those that it does not know.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tidemill_contracts.wire.errors import JobError, JobFailed
from tidemill_contracts.wire.job import SCHEMA_VERSION
from tidemill_contracts.wire.receipt import Receipt

FinishReason = Literal["stop", "length", "deadline", "repetition"]
"""``stop``: an end-of-sequence token, a stop token or a stop text; ``length``: `max_tokens` or the
context is used up; ``deadline``: the job's deadline passed while it ran, and this is what there
was; ``repetition``: the output repeated itself."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    """Of all outputs together."""
    cached_tokens: int = 0
    """Of the prompt, those whose K and V another job had computed already."""
    reasoning_tokens: int = 0
    """Of a chat's completion, those between ``<think>`` and ``</think>``."""
    resumed_tokens: int = 0
    """Of the completion, those that workers before the one that answered had generated: it went
    on from there."""
    draft_tokens: int = 0
    """Guesses of the completion's tokens that were computed ahead of them."""
    accepted_draft_tokens: int = 0
    """Of the completion, those that took no step of their own because a guess was right."""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds since the job was enqueued.

    Enqueue time is the producer's clock and the rest Redis's: skew between the two shows in these
    figures and nowhere else.
    """

    queued_ms: float
    """Until the job was first scheduled in a step."""
    first_token_ms: float
    """Until the first token was sampled (TTFT)."""
    total_ms: float
    """Until the last token was sampled."""


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities at one place of output or prompt, before temperature and filters."""

    logprob: float
    """Of the token that stands there."""
    top: dict[int, float] = {}
    """Of the likeliest tokens, the likeliest first."""
    listed: dict[int, float] = {}
    """Of the job's `logprob_token_ids`."""


class ParsedToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call that the model asks for."""

    name: str
    arguments: dict[str, Any]


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One output of a job."""

    text: str | None
    """The generated text, without that of a token that ended it; ``None`` where the model has no
    tokenizer."""
    token_ids: list[int]
    """The generated ids, the end-of-sequence token included where one ended the job."""
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop text, or the id among `stop_token_ids`, that ended the output."""
    reasoning: str | None = None
    """Of a chat: what the model thought, without the tags."""
    thinking_truncated: bool = False
    """Of a chat: whether its `thinking_budget` was used up and ended the thoughts."""
    content: str | None = None
    """Of a chat: what it answered, without thoughts and tool calls."""
    tool_calls: list[ParsedToolCall] = []
    logprobs: list[TokenLogprobs] | None = None
    """One entry a generated token, where the job asked for them."""


class GenerationResult(Completion, frozen=True, kw_only=True):
    """The one result of a job that succeeded: its first output, and what all have in common."""

    id: str
    model: str
    usage: Usage
    timings: Timings
    sampling: dict[str, Any] = {}
    """The effective sampling: what the job left open, filled in."""
    outputs: list[Completion] = []
    """Every output, the first included, where the job asked for more than one."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry a prompt token, where the job asked for them; ``None`` for the first token, which
    has nothing before it."""
    receipt: Receipt | None = None
    """Where the job asked for one."""
    schema_version: int = SCHEMA_VERSION


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended: exactly one of `result` and `error` is set."""

    id: str
    result: GenerationResult | None = None
    error: JobError | None = None

    def unwrap(self) -> GenerationResult:
        """The result. Raises `JobFailed` where the job ended with an error."""
        if self.result is None:
            assert self.error is not None
            raise JobFailed(self.error)
        return self.result
