"""Why a job has no result, and the exceptions that say so.

    TidemillError
    ├── InvalidMessage      a message breaks the wire contract; names the field by its path
    └── JobFailed           the job ended with a `JobError`; raised to whoever awaits its result

Every failure of a job is a `JobError`: a stable code for programs, a message for a person, and
whether trying again can help. Exceptions that belong to one part (the queue cannot be reached, a
contract does not fit) live with that part and derive from `TidemillError`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class ErrorCode(StrEnum):
    """The stable codes of `JobError`. A code is never renamed or reused."""

    # The job itself is at fault: trying again gives the same answer.
    INVALID_JOB = "invalid_job"
    """The job breaks the wire contract: an unknown field, a wrong type, a value out of range."""
    UNSUPPORTED_SCHEMA_VERSION = "unsupported_schema_version"
    """The job was written for a schema version that this worker does not speak."""
    MODEL_NOT_FOUND = "model_not_found"
    """The job names a model that this worker does not serve."""
    NO_TOKENIZER = "no_tokenizer"
    """The model directory has no tokenizer (or no chat template): send token ids instead."""
    TEMPLATE_FAILED = "template_failed"
    """The model's chat template refused the messages."""
    EMPTY_PROMPT = "empty_prompt"
    """The prompt has no tokens."""
    TOKEN_OUT_OF_RANGE = "token_out_of_range"
    """A prompt token id lies outside the model's vocabulary."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """Prompt and requested tokens exceed the context, or the whole KV cache."""
    INVALID_GRAMMAR = "invalid_grammar"
    """The form that the output must have is broken, too complex, or uses what is not supported."""
    NONFINITE_LOGITS = "nonfinite_logits"
    """The model produced NaN or infinite logits for this job."""
    NOT_SUPPORTED = "not_supported"
    """The job asks for what this worker's contract cannot do; the message names the capability."""
    MAX_TRIES_EXCEEDED = "max_tries_exceeded"
    """The workers that ran the job died or gave up too often."""

    # Somebody's decision.
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """The deadline passed before the job finished."""

    # The system is at fault: trying again may help.
    ENGINE_ERROR = "engine_error"
    """The forward pass raised."""
    OUT_OF_MEMORY = "out_of_memory"
    """The worker has not even the memory to compute this job alone, one token at a time."""
    RESULT_NOT_ENCODABLE = "result_not_encodable"
    """A result was computed but cannot be written."""
    RESULT_TOO_LARGE = "result_too_large"
    """A result was computed but has more bytes than a result may have."""
    PAYLOAD_LOST = "payload_lost"
    """The queue holds the job's id but Redis no longer holds its payload."""
    UNDECODABLE = "undecodable"
    """The payload in Redis is not a job at all."""
    UNKNOWN_FUNCTION = "unknown_function"
    """The queue holds a job for an arq function that this worker does not have."""
    INTERNAL = "internal"
    """A fault of the worker; its log has the traceback."""


RETRYABLE = frozenset(
    {
        ErrorCode.ENGINE_ERROR,
        ErrorCode.OUT_OF_MEMORY,
        ErrorCode.PAYLOAD_LOST,
        ErrorCode.INTERNAL,
    }
)

MAX_REPRO_BYTES = 16 * 1024
"""Largest `JobError.repro`, as JSON."""


class JobError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job has no result."""

    code: str
    """One of `ErrorCode`; a reader must accept codes that it does not know yet."""
    message: str
    retryable: bool = False
    """Whether the same job may succeed when it is sent again."""
    repro: dict[str, Any] | UnsetType = UNSET
    """Where a step of the model failed for this job alone: a row for `tidemill batch` that does
    the same again, seed included. Its `metadata` says in which step; at most `MAX_REPRO_BYTES` as
    JSON, and what did not fit is named there under ``left_out``."""

    @classmethod
    def of(cls, code: ErrorCode, message: str) -> JobError:
        return cls(code=code.value, message=message, retryable=code in RETRYABLE)


class TidemillError(Exception):
    """Base of every exception that Tidemill raises on purpose."""


class InvalidMessage(TidemillError):
    """A message breaks the wire contract. `error` carries the code and the path of the field."""

    def __init__(self, error: JobError) -> None:
        super().__init__(error.message)
        self.error = error


class JobFailed(TidemillError):
    """The job ended without a result; `error` says why."""

    def __init__(self, error: JobError) -> None:
        super().__init__(f"{error.code}: {error.message}")
        self.error = error

    @classmethod
    def of(cls, code: ErrorCode, message: str) -> JobFailed:
        return cls(JobError.of(code, message))
