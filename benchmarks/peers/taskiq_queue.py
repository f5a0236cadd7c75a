"""taskiq's stream broker of taskiq-redis, with its Redis result backend."""

from __future__ import annotations

import asyncio
import importlib
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import queue_harness as harness

AT_ONCE = 100
"""Calls of `kiq` under way."""
QUEUE = "taskiq"

taskiq_redis: Any = importlib.import_module("taskiq_redis")
receiver: Any = importlib.import_module("taskiq.api")


class TaskiqPeer(harness.Peer):
    name = "taskiq"

    @classmethod
    def add_options(cls, parser: ArgumentParser) -> None:
        parser.add_argument("--max-jobs", type=int, default=1000)
        parser.add_argument("--poll", type=float, default=0.001, help="seconds, for results")

    def _broker(self, engine: harness.FakeEngine | None = None) -> tuple[Any, Any]:
        backend = taskiq_redis.RedisAsyncResultBackend(self.url, result_ex_time=3600)
        broker = taskiq_redis.RedisStreamBroker(
            self.url, queue_name=QUEUE, consumer_id="0"
        ).with_result_backend(backend)

        async def generate(job_id: str, prompt: str) -> str:
            assert engine is not None
            await engine.run(job_id)
            return "text"

        return broker, broker.register_task(generate, task_name="generate")

    @asynccontextmanager
    async def client(self) -> AsyncIterator[harness.Client]:
        broker, task = self._broker()
        await broker.startup()
        yield _Client(broker, task, self.options.poll)
        await broker.shutdown()

    async def work(self, engine: harness.FakeEngine) -> None:
        broker, _ = self._broker(engine)
        await broker.startup()
        engine.ready()
        await receiver.run_receiver_task(broker, max_async_tasks=self.options.max_jobs)


class _Client(harness.Client):
    def __init__(self, broker: Any, task: Any, poll_s: float) -> None:
        self._broker = broker
        self._task = task
        self._poll_s = poll_s
        self._sent: dict[str, Any] = {}

    async def enqueue(self, job_id: str) -> None:
        kicker = self._task.kicker().with_task_id(job_id)
        self._sent[job_id] = await kicker.kiq(job_id, harness.PROMPT)

    async def enqueue_many(self, job_ids: Sequence[str]) -> None:
        waiting = iter(job_ids)

        async def some() -> None:
            for job_id in waiting:
                await self.enqueue(job_id)

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))

    async def result(self, job_id: str) -> None:
        await self._sent.pop(job_id).wait_result(check_interval=self._poll_s)

    async def left(self) -> int:
        redis = importlib.import_module("redis.asyncio")
        async with redis.Redis(connection_pool=self._broker.connection_pool) as connection:
            groups = await connection.xinfo_groups(QUEUE)
        return sum(group["pending"] + (group["lag"] or 0) for group in groups)


if __name__ == "__main__":
    harness.main(TaskiqPeer)
