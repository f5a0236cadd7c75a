"""Jobs written straight into Redis, a queue to claim them from, and a tiny model."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.tiny import write_tiny_model
from tidemill_contracts import keys
from tidemill_contracts.wire import GenerationJob
from tidemill_contracts.wire.arq_format import encode_job_record
from tidemill_worker.queue import JobQueue

QUEUE = keys.DEFAULT_QUEUE

Push = Callable[..., Awaitable[str]]


@pytest.fixture
def queue(redis: Redis) -> JobQueue:
    return JobQueue(redis, QUEUE, lease_ms=1_000)


@pytest.fixture
def push(redis: Redis) -> Push:
    """Puts a job in the queue, due `due_in_ms` from now; returns its id."""

    async def _push(
        job_id: str = "job",
        *,
        due_in_ms: float = -1_000,
        reply_to: str | None = None,
        record: bytes | None = None,
    ) -> str:
        now_ms = time.time() * 1000
        if record is None:
            record = encode_job_record(
                GenerationJob(id=job_id, prompt="hello"),
                enqueue_time_ms=int(now_ms),
                reply_to=reply_to,
            )
        await redis.set(keys.job_key(job_id), record)
        await redis.zadd(QUEUE, {job_id: now_ms + due_in_ms})
        return job_id

    return _push


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
