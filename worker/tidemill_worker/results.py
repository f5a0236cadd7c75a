"""Writes results back: those that end together in one call, each until Redis has it."""

from __future__ import annotations

import asyncio
import logging

from redis.exceptions import RedisError

from tidemill_contracts.connections import backoff
from tidemill_worker.queue import Finished, JobQueue

logger = logging.getLogger("tidemill.worker")

MAX_BATCH = 256


class ResultWriter:
    """Collects finished jobs while a write is under way and writes them with the next one."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        self._pending: list[tuple[Finished, asyncio.Future[bool]]] = []
        self._wake = asyncio.Event()
        self.flowing = asyncio.Event()
        """Clear while Redis does not take results: the worker then claims no more jobs, so that
        what it holds stays bounded."""
        self.flowing.set()

    @property
    def unwritten(self) -> int:
        return len(self._pending)

    async def write(self, finished: Finished) -> bool:
        """Returns once Redis has answered: True where this result was written, False where the
        job had a result or another owner already."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pending.append((finished, future))
        self._wake.set()
        return await future

    async def run(self) -> None:
        """Writes until it is cancelled. While Redis is away it holds what it could not write
        and tries again."""
        delays = backoff()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                batch = self._pending[:MAX_BATCH]
                try:
                    written = await self._queue.finish([finished for finished, _ in batch])
                except (RedisError, OSError) as error:
                    self.flowing.clear()
                    logger.debug("%d results wait for Redis: %s", len(self._pending), error)
                    await asyncio.sleep(next(delays))
                    continue
                self.flowing.set()
                delays = backoff()
                del self._pending[: len(batch)]
                for (_, future), flag in zip(batch, written, strict=True):
                    if not future.done():
                        future.set_result(flag)
