"""The answer: what a worker gives back.

Unlike jobs, results may gain fields: a reader ignores those that it does not know.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tidemill_contracts.wire.errors import JobError, JobFailed
from tidemill_contracts.wire.job import SCHEMA_VERSION

FinishReason = Literal["stop", "length", "deadline"]
"""``stop``: an end-of-sequence token; ``length``: `max_tokens` or the context is used up;
``deadline``: the job's deadline passed while it ran, and this is what there was."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds since the job was enqueued (since it reached the engine, for `queued_ms`'s end).

    Enqueue time is the producer's clock and the rest the worker's: skew between two machines
    shows in these figures and nowhere else.
    """

    queued_ms: float
    """Until the job was first scheduled in a step."""
    first_token_ms: float
    """Until the first token was sampled (TTFT)."""
    total_ms: float
    """Until the last token was sampled."""


class GenerationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The one result of a job that succeeded."""

    id: str
    model: str
    text: str | None
    """The generated text without special tokens; ``None`` where the model has no tokenizer."""
    token_ids: list[int]
    """The generated ids, the end-of-sequence token included where one ended the job."""
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
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
