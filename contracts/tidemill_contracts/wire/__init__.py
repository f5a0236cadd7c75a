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
    ChatOptions,
    FunctionCall,
    GenerationJob,
    RepetitionDetection,
    SamplingParams,
    StructuredOutput,
    Tool,
    ToolCall,
)
from tidemill_contracts.wire.lifecycle import JobState, Try
from tidemill_contracts.wire.receipt import Receipt
from tidemill_contracts.wire.result import (
    Completion,
    FinishReason,
    GenerationResult,
    Outcome,
    ParsedToolCall,
    Timings,
    TokenLogprobs,
    Usage,
)

__all__ = [
    "MAX_JOB_BYTES",
    "SCHEMA_VERSION",
    "ChatMessage",
    "ChatOptions",
    "Completion",
    "ErrorCode",
    "FinishReason",
    "FunctionCall",
    "GenerationJob",
    "GenerationResult",
    "InvalidMessage",
    "JobError",
    "JobFailed",
    "JobState",
    "Outcome",
    "ParsedToolCall",
    "Receipt",
    "RepetitionDetection",
    "SamplingParams",
    "StructuredOutput",
    "TidemillError",
    "Timings",
    "TokenLogprobs",
    "Tool",
    "ToolCall",
    "Try",
    "Usage",
    "convert_job",
    "decode_job",
    "decode_json_job",
    "encode_job",
]
