"""For other services: enqueue generation jobs and await their results. No torch, no arq."""

from __future__ import annotations

from tidemill_contracts.wire import (
    ChatMessage,
    GenerationJob,
    GenerationResult,
    InvalidMessage,
    JobError,
    JobFailed,
    JobState,
    Outcome,
    SamplingParams,
    StructuredOutput,
    TidemillError,
    Try,
)
from tidemill_producer.client import Producer
from tidemill_producer.dead import DeadLetter
from tidemill_producer.errors import (
    JobConflict,
    QueueFull,
    QueueUnavailable,
    ResultTimeout,
    UnknownJob,
)
from tidemill_producer.jobs import Admission, Cancellation, JobHandle, JobStatus, QueueLimits

__all__ = [
    "Admission",
    "Cancellation",
    "ChatMessage",
    "DeadLetter",
    "GenerationJob",
    "GenerationResult",
    "InvalidMessage",
    "JobConflict",
    "JobError",
    "JobFailed",
    "JobHandle",
    "JobState",
    "JobStatus",
    "Outcome",
    "Producer",
    "QueueFull",
    "QueueLimits",
    "QueueUnavailable",
    "ResultTimeout",
    "SamplingParams",
    "StructuredOutput",
    "TidemillError",
    "Try",
    "UnknownJob",
]
