"""The messages: jobs, results, errors, and how they are written. No torch, no arq, no Redis."""

from __future__ import annotations

from tidemill_contracts.wire.codec import convert_job, decode_job, decode_json_job, encode_job
from tidemill_contracts.wire.errors import (
    ErrorCode,
    InvalidMessage,
    JobError,
    JobFailed,
    TidemillError,
)
from tidemill_contracts.wire.job import (
    MAX_JOB_BYTES,
    SCHEMA_VERSION,
    ChatMessage,
    GenerationJob,
    SamplingParams,
)
from tidemill_contracts.wire.result import (
    FinishReason,
    GenerationResult,
    Outcome,
    Timings,
    Usage,
)

__all__ = [
    "MAX_JOB_BYTES",
    "SCHEMA_VERSION",
    "ChatMessage",
    "ErrorCode",
    "FinishReason",
    "GenerationJob",
    "GenerationResult",
    "InvalidMessage",
    "JobError",
    "JobFailed",
    "Outcome",
    "SamplingParams",
    "TidemillError",
    "Timings",
    "Usage",
    "convert_job",
    "decode_job",
    "decode_json_job",
    "encode_job",
]
