"""Carries out what arq's `Job.abort` asks of jobs of this queue.

arq keeps one set of jobs to abort for all queues and takes nothing out of it: there an abort of an
unknown id kills the next job that has it (python-arq/arq#485). Here an abort holds for a job that
was there when it was asked for, and leaves the set once it was looked at. Any worker of the queue
may do it; ids that this queue does not have are left to whose they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from redis.asyncio import Redis

from tidemill_contracts import keys
from tidemill_contracts.scripts import load_script
from tidemill_contracts.wire import ErrorCode, JobError
from tidemill_contracts.wire.arq_format import encode_result_record, enqueue_time_of

MOST_AT_ONCE = 100
CLOCKS_MS = 2_000
"""How far the clock of whoever aborts may be behind that of whoever enqueued."""


class ArqAborts:
    """One worker's look at the set."""

    def __init__(self, redis: Redis, queue: str, result_ttl_ms: int) -> None:
        self._redis = redis
        self._queue = queue
        self._result_ttl_ms = result_ttl_ms
        self._cancel = redis.register_script(load_script("cancel"))

    async def carry_out(self) -> None:
        """Cancels jobs whose abort is asked for. Raises redis-py's own errors."""
        asked = await self._redis.zrevrange(keys.ARQ_ABORT, 0, MOST_AT_ONCE - 1, withscores=True)
        if not asked:
            return
        calls: list[Awaitable[Any]] = []
        for job_id, _ in asked:
            key = keys.JOB_PREFIX.encode() + job_id
            calls += [
                self._redis.zscore(self._queue, job_id),
                self._redis.getrange(key, 0, 15),
                self._redis.getrange(key, -12, -1),
            ]
        answers = await asyncio.gather(*calls)
        known = [
            (job_id, asked_ms, enqueue_time_of(head, tail))
            for (job_id, asked_ms), score, head, tail in zip(
                asked, answers[::3], answers[1::3], answers[2::3], strict=True
            )
            if score is not None
        ]
        args: list[bytes | int] = [self._result_ttl_ms]
        for job_id, asked_ms, enqueued_ms in known:
            if enqueued_ms is None or enqueued_ms <= asked_ms + CLOCKS_MS:
                error = JobError.of(ErrorCode.CANCELLED, "The job was aborted")
                name = job_id.decode(errors="replace")
                args += [
                    job_id,
                    encode_result_record(error, success=False, job_id=name, queue_name=self._queue),
                ]
        if len(args) > 1:
            await self._cancel(keys=[self._queue], args=args)
        if known:
            await self._redis.zrem(keys.ARQ_ABORT, *(job_id for job_id, _, _ in known))
