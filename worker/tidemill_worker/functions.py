"""The arq function that runs a generation job, and the hooks that load the model for it.

The same three run under Tidemill's own worker and under stock arq.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from tidemill_contracts.wire import ErrorCode, GenerationJob, GenerationResult, JobFailed
from tidemill_contracts.wire.codec import convert_job
from tidemill_worker.generator import Generator
from tidemill_worker.settings import config_from_env

Context = dict[Any, Any]
"""arq's own type for what it hands to functions and hooks."""


async def startup(ctx: Context) -> None:
    """Loads the model before the first job is claimed."""
    # Takes torch with it, which a worker whose hook starts another generator does not need.
    from tidemill_worker.batcher import Batcher

    config = ctx.get("config") or config_from_env()
    ctx["batcher"] = await Batcher.start(config, ctx.get("clock", time.time))


async def shutdown(ctx: Context) -> None:
    batcher: Generator | None = ctx.pop("batcher", None)
    if batcher is not None:
        await batcher.close()


async def generate(ctx: Context, job: object) -> GenerationResult:
    """Runs one job, given as a `GenerationJob` or as its fields.

    Raises `InvalidMessage` or `JobFailed`.
    """
    batcher: Generator = ctx["batcher"]
    job_id: str = ctx["job_id"]
    enqueued_at: datetime = ctx["enqueue_time"]
    if not isinstance(job, GenerationJob):
        job = convert_job(job)
    if job.id is not None and job.id != job_id:
        raise JobFailed.of(
            ErrorCode.INVALID_JOB,
            f"The job was queued as {job_id!r} but says {job.id!r} - at `$.id`",
        )
    # Stock arq knows of no checkpoints.
    checkpoint = ctx.get("progress", ())
    return await batcher.generate(job, job_id, enqueued_at.timestamp(), checkpoint)
