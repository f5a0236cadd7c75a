"""Workers die in the middle of a batch: every job gets exactly one result, the right one."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.e2e.conftest import serving
from tests.worker.served import batcher, generate
from tidemill_contracts import keys
from tidemill_contracts.wire.status import decode_status
from tidemill_producer import GenerationJob, Producer, SamplingParams

JOBS = 60


def _jobs() -> list[GenerationJob]:
    rng = random.Random(5)
    return [
        GenerationJob(
            id=f"job-{i}",
            prompt_token_ids=[rng.randrange(500) for _ in range(rng.randint(1, 60))],
            sampling=SamplingParams(
                temperature=float(i % 2), seed=i, max_tokens=rng.randint(20, 60), ignore_eos=True
            ),
        )
        for i in range(JOBS)
    ]


async def _run(redis_url: str, model: Path, *, kills: int) -> dict[str, list[int]]:
    """The tokens of every job; `kills` workers are killed on the way."""
    async with Producer(redis_url) as producer:
        handles = [handle async for handle in producer.enqueue_many(_jobs())]
        answers = asyncio.gather(*(handle.result(timeout=90) for handle in handles))
        for n in range(kills):
            async with serving(redis_url, model, "--max-rows", "8") as worker:
                done = n * JOBS // (kills + 1) // 2
                while await _finished(producer.redis) <= done:
                    await asyncio.sleep(0.01)
                worker.kill()
                await worker.wait()
        async with serving(redis_url, model, "--max-rows", "8"):
            results = await answers
    return {result.id: result.token_ids for result in results}


async def _finished(redis: Redis) -> int:
    return JOBS - int(await redis.zcard(keys.DEFAULT_QUEUE))


@pytest.mark.slow
async def test_killed_workers_neither_lose_nor_double_a_job(
    redis_url: str, redis: Redis, tiny_model: Path
) -> None:
    unbroken = await _run(redis_url, tiny_model, kills=0)
    await redis.flushall()
    assert await _run(redis_url, tiny_model, kills=3) == unbroken
    left = {key.decode() async for key in redis.scan_iter()}
    results = {keys.result_key(job.id or "") for job in _jobs()}
    assert results <= left
    # Of the queue only heartbeats of dead workers are left, and perhaps the mark of one that was
    # emptying itself for suspects. They expire by themselves.
    passing = ("worker", "health", "quarantine")
    assert all(any(word in key for word in passing) for key in left - results), left - results
    assert await redis.ttl(f"{keys.DEFAULT_QUEUE}:quarantine") != -1


@pytest.mark.slow
async def test_two_workers_share_a_queue(redis_url: str, redis: Redis, tiny_model: Path) -> None:
    async with (
        serving(redis_url, tiny_model, "--max-rows", "4", "--worker-id", "a"),
        serving(redis_url, tiny_model, "--max-rows", "4", "--worker-id", "b"),
        Producer(redis_url) as producer,
    ):
        async with asyncio.timeout(60):
            while await redis.zcard(keys.workers_key(keys.DEFAULT_QUEUE)) < 2:
                await asyncio.sleep(0.05)
        handles = [handle async for handle in producer.enqueue_many(_jobs())]
        results = await asyncio.gather(*(handle.result(timeout=60) for handle in handles))
    assert len({result.id for result in results}) == JOBS


@pytest.mark.slow
@pytest.mark.parametrize("gently", [False, True])
async def test_the_next_worker_goes_on_from_the_tokens_of_one_that_stopped(
    redis_url: str, redis: Redis, tiny_model: Path, gently: bool
) -> None:
    jobs = [
        GenerationJob(
            id=f"long-{i}",
            prompt_token_ids=[i, 3, 5],
            sampling=SamplingParams(
                temperature=float(i % 2), seed=i, max_tokens=1000, ignore_eos=True
            ),
            receipt=True,
        )
        for i in range(4)
    ]
    options = ("--checkpoint-tokens", "16", "--drain-timeout", "0", "--max-rows", "4")
    async with batcher(tiny_model) as model:
        unbroken = await asyncio.gather(*(generate(model, job) for job in jobs))
    async with Producer(redis_url) as producer:
        handles = [handle async for handle in producer.enqueue_many(jobs)]
        async with serving(redis_url, tiny_model, *options) as worker:
            async with asyncio.timeout(60):
                while not await redis.exists(keys.progress_key("long-3")):
                    await asyncio.sleep(0.002)
            if gently:
                worker.terminate()
            else:
                worker.kill()
            status = await asyncio.wait_for(worker.wait(), 20)
            assert status == (0 if gently else -signal.SIGKILL)
        async with serving(redis_url, tiny_model, "--worker-id", "second"):
            results = [await handle.result(timeout=90) for handle in handles]
            computed = await _completion_tokens(redis, "second", jobs_done=len(jobs))
    resumed = 0
    for whole, result in zip(unbroken, results, strict=True):
        assert result.token_ids == whole.token_ids
        assert result.receipt == whole.receipt
        assert result.usage.resumed_tokens > 0
        resumed += result.usage.resumed_tokens
    assert computed == sum(len(result.token_ids) for result in results) - resumed


async def _completion_tokens(redis: Redis, worker_id: str, *, jobs_done: int) -> int:
    """Tokens that a worker has generated, as it says itself once it has done so many jobs."""
    async with asyncio.timeout(20):
        while True:
            raw = await redis.get(keys.worker_key(keys.DEFAULT_QUEUE, worker_id))
            if raw is not None and (status := decode_status(raw)).jobs_done == jobs_done:
                return status.completion_tokens
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_worker_that_loads_its_model_ends_at_once_when_told_to(
    redis_url: str, redis: Redis, tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "endless"
    shutil.copytree(tiny_model, model)
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")  # whoever opens it waits for ever
    async with serving(redis_url, model) as worker:
        # Its connection is the last that it does before it loads.
        async with asyncio.timeout(60):
            while len(await redis.client_list()) < 2:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        worker.terminate()
        assert await asyncio.wait_for(worker.wait(), 20) == 0
