"""The job: what a producer asks for.

Jobs refuse unknown fields: ignoring an option that the worker does not know would give a wrong
answer. Limits are part of the contract, so that a producer refuses before it writes.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

SCHEMA_VERSION = 1

MAX_JOB_BYTES = 8 * 1024 * 1024
"""Largest encoded job, in bytes."""
MAX_PROMPT_TOKENS = 1_048_576
MAX_MESSAGES = 4_096
MAX_TOKEN_ID = 2**31 - 1

JobId = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
"""Printable ASCII without spaces: the id becomes part of Redis keys."""
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose each next token. ``None`` means: as the model's generation config says."""

    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Sample from the smallest set of tokens whose probabilities reach this sum."""
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKEN_ID)] | None = None
    """Sample from this many most likely tokens; 0 or -1 for all of them."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """A seeded job draws the same tokens whatever it is batched with."""
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)] | None = None
    """Most tokens to generate; ``None`` takes the worker's default, clamped to the context."""
    ignore_eos: bool = False
    """Go on to `max_tokens`, past every end-of-sequence token."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class GenerationJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One generation: exactly one of `prompt`, `messages` and `prompt_token_ids` is set."""

    id: JobId | None = None
    """Identifies the job and its result; a producer makes one where it is absent."""
    model: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """The model to use; ``None`` is whatever the worker serves."""
    prompt: str | None = None
    """Text that is tokenised as it stands, without a chat template."""
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    """A conversation for the model's chat template."""
    prompt_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)] | None = None
    sampling: SamplingParams = SamplingParams()
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    """Each step up counts as a minute of having waited already."""
    deadline: Annotated[float, Meta(ge=0, le=1e11)] | None = None
    """When the answer stops being useful, in seconds since the Unix epoch."""
    metadata: Annotated[
        dict[
            Annotated[str, Meta(min_length=1, max_length=64)],
            Annotated[str, Meta(max_length=512)],
        ],
        Meta(max_length=16),
    ] = {}
    """The caller's own notes: at most 16 pairs, keys to 64 and values to 512 characters."""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        given = [
            name
            for name in ("prompt", "messages", "prompt_token_ids")
            if getattr(self, name) is not None
        ]
        if len(given) != 1:
            found = " and ".join(f"`{name}`" for name in given) or "none"
            raise ValueError(
                "Expected exactly one of `prompt`, `messages` and `prompt_token_ids`,"
                f" got {found} - at `$`"
            )
