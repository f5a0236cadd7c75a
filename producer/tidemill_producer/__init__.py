"""For other services: enqueue generation jobs and await their results. No torch, no arq."""

from __future__ import annotations

from tidemill_contracts.wire import (
    ChatMessage,
    GenerationJob,
    GenerationResult,
    InvalidMessage,
    JobError,
    JobFailed,
    Outcome,
    SamplingParams,
    StructuredOutput,
    TidemillError,
)
from tidemill_producer.client import Admission, JobHandle, JobStatus, Producer
from tidemill_producer.errors import QueueUnavailable, ResultTimeout, UnknownJob

__all__ = [
    "Admission",
    "ChatMessage",
    "GenerationJob",
    "GenerationResult",
    "InvalidMessage",
    "JobError",
    "JobFailed",
    "JobHandle",
    "JobStatus",
    "Outcome",
    "Producer",
    "QueueUnavailable",
    "ResultTimeout",
    "SamplingParams",
    "StructuredOutput",
    "TidemillError",
    "UnknownJob",
]
