"""arq, with msgpack in place of pickle."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import queue_harness as harness
from arq.connections import ArqRedis, RedisSettings, create_pool
from arq.constants import default_queue_name
from arq.jobs import Job
from arq.worker import Worker, func

AT_ONCE = 10
"""Calls of `enqueue_job` under way, as many as were fastest."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class ArqPeer(harness.Peer):
    name = "arq"

    @classmethod
    def add_options(cls, parser: ArgumentParser) -> None:
        parser.add_argument("--max-jobs", type=int, default=1000)
        parser.add_argument("--poll", type=float, default=0.01, help="seconds, also for results")

    @asynccontextmanager
    async def client(self) -> AsyncIterator[harness.Client]:
        pool = await self._pool()
        yield _Client(pool, self.options.poll)
        await pool.aclose()

    async def _pool(self) -> ArqRedis:
        return await create_pool(
            RedisSettings.from_dsn(self.url), job_serializer=_encode, job_deserializer=_decode
        )

    async def work(self, engine: harness.FakeEngine) -> None:
        async def generate(ctx: dict[Any, Any], job: dict[str, Any]) -> str:
            await engine.run(ctx["job_id"])
            return "text"

        worker = Worker(
            functions=[func(generate, name="generate")],
            redis_pool=await self._pool(),
            max_jobs=self.options.max_jobs,
            poll_delay=self.options.poll,
            job_serializer=_encode,
            job_deserializer=_decode,
            handle_signals=False,
        )
        engine.ready()
        await worker.main()


class _Client(harness.Client):
    def __init__(self, pool: ArqRedis, poll_s: float) -> None:
        self._pool = pool
        self._poll_s = poll_s

    async def enqueue(self, job_id: str) -> None:
        await self._pool.enqueue_job("generate", {"prompt": harness.PROMPT}, _job_id=job_id)

    async def enqueue_many(self, job_ids: Sequence[str]) -> None:
        waiting = iter(job_ids)

        async def some() -> None:
            for job_id in waiting:
                await self.enqueue(job_id)

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))

    async def result(self, job_id: str) -> None:
        job = Job(job_id, self._pool, _deserializer=_decode)
        await job.result(poll_delay=self._poll_s)

    async def left(self) -> int:
        return int(await self._pool.zcard(default_queue_name))


if __name__ == "__main__":
    harness.main(ArqPeer)
