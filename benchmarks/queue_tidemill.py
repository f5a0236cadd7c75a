"""Our queue for `queue_rates.py`: the worker as it is, but for a model.

Its start-up hook starts a generator that takes a step of a fixed time in place of an engine; all
else is what `tidemill worker` runs: claims, leases and their renewal, results, heartbeats, arq's
hooks.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "peers"))

import queue_harness as harness

from tidemill_contracts import keys
from tidemill_contracts.wire import GenerationJob, GenerationResult
from tidemill_contracts.wire.result import Timings, Usage
from tidemill_producer import Producer
from tidemill_worker.generator import Figures
from tidemill_worker.settings import WorkerConfig
from tidemill_worker.worker import TidemillWorker


class StepGenerator:
    """Generates a word for each job, in the fake engine's time."""

    def __init__(self, engine: harness.FakeEngine) -> None:
        self._engine = engine
        self.crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def figures(self) -> Figures:
        done = len(self._engine.runs)
        return Figures(
            model="fake", contract="fake", device="none", dtype="none", rows_running=0,
            rows_waiting=0, pages_held=0, eta_s=None, steps=done, row_steps=done,
            prompt_tokens=done, completion_tokens=done, cached_tokens=0, draft_tokens=0,
            accepted_draft_tokens=0,
        )  # fmt: skip

    def recorder(self, job_id: str) -> None:
        return None

    async def generate(
        self,
        job: GenerationJob,
        job_id: str,
        enqueued_at: float,
        checkpoint: Sequence[bytes] = (),
    ) -> GenerationResult:
        await self._engine.run(job_id)
        return GenerationResult(
            id=job_id,
            model="fake",
            text="text",
            token_ids=[1],
            finish_reason="stop",
            usage=Usage(prompt_tokens=1, completion_tokens=1),
            timings=Timings(queued_ms=0, first_token_ms=0, total_ms=0),
        )

    async def close(self) -> None:
        self.crashed.cancel()


class Tidemill(harness.Peer):
    name = "tidemill"

    @classmethod
    def add_options(cls, parser: ArgumentParser) -> None:
        parser.add_argument("--max-rows", type=int, default=256)
        parser.add_argument("--log-level", default="warning")

    @asynccontextmanager
    async def client(self) -> AsyncIterator[harness.Client]:
        async with Producer(self.url) as producer:
            yield _Client(producer)

    async def work(self, engine: harness.FakeEngine) -> None:
        logging.basicConfig(level=self.options.log_level.upper())

        async def start(ctx: dict[Any, Any]) -> None:
            ctx["batcher"] = StepGenerator(engine)

        rows = engine.rows if engine.step_s else self.options.max_rows
        config = WorkerConfig(model="fake", redis_url=self.url, max_rows=rows)
        worker = TidemillWorker(config, on_startup=start, handle_signals=False)
        serving = asyncio.create_task(worker.async_run())
        while worker.state == "loading" and not serving.done():  # noqa: ASYNC110
            await asyncio.sleep(harness.POLL_S)
        engine.ready()
        try:
            await serving
        finally:
            await worker.close()


class _Client(harness.Client):
    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    async def enqueue(self, job_id: str) -> None:
        await self._producer.enqueue(GenerationJob(id=job_id, prompt=harness.PROMPT))

    async def enqueue_many(self, job_ids: Sequence[str]) -> None:
        jobs = (GenerationJob(id=job_id, prompt=harness.PROMPT) for job_id in job_ids)
        async for _ in self._producer.enqueue_many(jobs):
            pass

    async def result(self, job_id: str) -> None:
        await self._producer.result(job_id)

    async def left(self) -> int:
        return int(await self._producer.redis.zcard(keys.DEFAULT_QUEUE))


if __name__ == "__main__":
    harness.main(Tidemill)
