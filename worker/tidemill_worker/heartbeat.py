"""What the worker says about itself: a status under its key, every second or so."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from redis.asyncio import Redis

from tidemill_contracts import keys
from tidemill_contracts.wire.status import WorkerState, WorkerStatus, encode_status
from tidemill_worker.clock import RedisClock
from tidemill_worker.generator import Figures
from tidemill_worker.settings import WorkerConfig

STATUS_TTL_MS = 10_000
FORGET_MS = 60_000
"""After so long without a word a worker is no longer listed."""


class Heartbeat:
    """One worker's status in Redis."""

    def __init__(self, redis: Redis, config: WorkerConfig, clock: RedisClock) -> None:
        self._redis = redis
        self._config = config
        self._clock = clock
        self._started_at = time.time()
        self._pruned_ms = 0

    async def write(
        self,
        figures: Figures,
        state: WorkerState,
        *,
        jobs_done: int,
        jobs_failed: int,
        results_held: int,
        redis: str,
    ) -> None:
        status = self._status(
            figures,
            state,
            jobs_done=jobs_done,
            jobs_failed=jobs_failed,
            results_held=results_held,
            redis=redis,
        )
        now_ms = int(self._clock() * 1000)
        workers = keys.workers_key(self._config.queue)
        await self._redis.set(
            keys.worker_key(self._config.queue, status.id), encode_status(status), px=STATUS_TTL_MS
        )
        await self._redis.zadd(workers, {status.id: now_ms})
        # By a clock that Redis has not told of, the others may only seem dead.
        if self._clock.told and now_ms - self._pruned_ms > FORGET_MS:
            await self._redis.zremrangebyscore(workers, "-inf", now_ms - FORGET_MS)
            self._pruned_ms = now_ms

    async def remove(self) -> None:
        """Says goodbye: this worker is no longer among the queue's."""
        name, queue = self._config.name, self._config.queue
        await self._redis.delete(keys.worker_key(queue, name))
        await self._redis.zrem(keys.workers_key(queue), name)

    def _status(self, figures: Figures, state: WorkerState, **counts: Any) -> WorkerStatus:
        return WorkerStatus(
            id=self._config.name,
            state=state,
            max_rows=self._config.max_rows,
            **asdict(figures),
            **counts,
            started_at=self._started_at,
            updated_at=time.time(),
        )
