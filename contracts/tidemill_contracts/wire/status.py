"""What a worker says about itself, as JSON under its key, every second or so."""

from __future__ import annotations

from typing import Literal

import msgspec

WorkerState = Literal["loading", "ready", "draining"]


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Counters count since the worker started; a reader takes differences."""

    id: str
    state: WorkerState
    model: str
    contract: str
    """The contract's model id and fingerprint."""
    device: str
    dtype: str
    max_rows: int
    rows_running: int
    rows_waiting: int
    """Claimed, not yet scheduled."""
    pages_held: int = 0
    """KV pages that rows hold; those that are only cached are free."""
    eta_s: float | None = None
    """Seconds until these rows are done, judged by the latest steps and outputs; ``None`` while
    there have been too few."""
    steps: int
    row_steps: int
    """Rows summed over steps: ``row_steps / (steps · max_rows)`` is the batch occupancy."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache saved from being computed."""
    draft_tokens: int = 0
    """Tokens that were guessed and computed ahead."""
    accepted_draft_tokens: int = 0
    """Completion tokens that took no step of their own, because a guess was right."""
    jobs_done: int
    jobs_failed: int
    results_held: int = 0
    """Finished jobs whose results Redis has not taken yet."""
    redis: str = "ok"
    """Or what is wrong, since when: ``unreachable since 2026-11-30T09:15:02+00:00: …``."""
    started_at: float
    """Seconds since the Unix epoch, as is `updated_at`."""
    updated_at: float


encode_status = msgspec.json.Encoder().encode
decode_status = msgspec.json.Decoder(WorkerStatus).decode
