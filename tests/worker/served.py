"""A model that serves jobs without a queue."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tidemill_contracts.wire import GenerationJob, GenerationResult
from tidemill_worker.batcher import Batcher
from tidemill_worker.settings import make_config


@asynccontextmanager
async def batcher(model: Path, **settings: object) -> AsyncIterator[Batcher]:
    """In float32 on one thread unless the settings say otherwise."""
    config = make_config(
        {"model": str(model), "dtype": "float32", "threads": 1, "kv_pages": 512, **settings}
    )
    started = await Batcher.start(config)
    try:
        yield started
    finally:
        await started.close()


async def generate(model: Batcher, job: GenerationJob) -> GenerationResult:
    return await model.generate(job, job.id or "job", time.time())
