"""Workers with a real model that stop in the middle of jobs, and others that go on with these."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.worker.conftest import QUEUE, Push
from tests.worker.served import batcher, generate
from tidemill_contracts import keys
from tidemill_contracts.wire import GenerationJob, GenerationResult, SamplingParams
from tidemill_contracts.wire.arq_format import decode_outcome, encode_job_record
from tidemill_contracts.wire.progress import decode_progress
from tidemill_contracts.wire.status import decode_status
from tidemill_producer.embedded import EmbeddedRedis
from tidemill_worker.batcher import Batcher
from tidemill_worker.settings import make_config
from tidemill_worker.worker import TidemillWorker

TOKENS = 120
JOBS = [
    GenerationJob(
        id=f"job-{i}",
        prompt_token_ids=[i + 1, 7, 9],
        sampling=SamplingParams(
            temperature=float(i % 2), seed=i, max_tokens=TOKENS, ignore_eos=True, logprobs=i % 3
        ),
    )
    for i in range(4)
]


@pytest.fixture(scope="module")
def unbroken(tiny_model: Path) -> list[GenerationResult]:
    async def run() -> list[GenerationResult]:
        async with batcher(tiny_model) as model:
            return list(await asyncio.gather(*(generate(model, job) for job in JOBS)))

    return asyncio.run(run())


@asynccontextmanager
async def working(
    redis_url: str, model: Path, *, step_s: float = 0.0, **settings: object
) -> AsyncIterator[tuple[TidemillWorker, Batcher]]:
    """A worker in this event loop whose steps take at least so long; killed at the end, if it has
    not ended."""
    config = make_config(
        {
            "redis_url": redis_url, "model": str(model), "dtype": "float32", "threads": 1,
            "kv_pages": 512, "lease_ms": 2_000, **settings,
        }
    )  # fmt: skip
    worker = TidemillWorker(config, handle_signals=False)
    task = asyncio.create_task(worker.async_run())
    try:
        while worker.state == "loading":
            await asyncio.sleep(0.01)
            assert not task.done(), task
        model_batcher: Batcher = worker.ctx["batcher"]
        step = model_batcher._engine.step

        def slow_step() -> None:
            time.sleep(step_s)
            step()

        if step_s:
            model_batcher._engine.step = slow_step  # type: ignore[method-assign]
        yield worker, model_batcher
    finally:
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await worker.close()


async def push_all(push: Push) -> None:
    for job in JOBS:
        assert job.id is not None
        await push(job.id, record=encode_job_record(job, enqueue_time_ms=0))


async def results(redis: Redis, timeout: float = 30) -> list[GenerationResult]:
    async with asyncio.timeout(timeout):
        while await redis.zcard(QUEUE):
            await asyncio.sleep(0.02)
    found = []
    for job in JOBS:
        raw = await redis.get(keys.result_key(job.id or ""))
        assert raw is not None
        found.append(decode_outcome(raw, job.id or "").unwrap())
    return found


def assert_same(results: list[GenerationResult], unbroken: list[GenerationResult]) -> None:
    for one, other in zip(results, unbroken, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
        for told, also in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert told.logprob == pytest.approx(also.logprob, abs=1e-3)


async def generated(model: Batcher, tokens: int) -> None:
    """Returns once every job has so many tokens."""
    async with asyncio.timeout(30):
        while any(
            (recorder := model.recorder(job.id or "")) is None
            or recorder.gained + sum(recorder._taken) < tokens
            for job in JOBS
        ):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("signals", [1, 2])
async def test_what_does_not_fit_is_handed_back_with_its_tokens_and_another_goes_on(
    redis_url: str,
    redis: Redis,
    push: Push,
    tiny_model: Path,
    unbroken: list[GenerationResult],
    signals: int,
) -> None:
    await push_all(push)
    scores = await redis.zrange(QUEUE, 0, -1, withscores=True)
    drain_timeout = 0.2 if signals == 1 else 60
    async with working(
        redis_url, tiny_model, step_s=0.01, drain_timeout=drain_timeout, checkpoint_tokens=8
    ) as (worker, model):
        await generated(model, 10)
        releases = 0
        release = worker.queue.release

        async def counted(items: list[object]) -> int:
            nonlocal releases
            releases += 1
            return await release(items)  # type: ignore[arg-type]

        worker.queue.release = counted  # type: ignore[method-assign,assignment]
        for _ in range(signals):
            worker.handle_sig(signal.SIGTERM)
        assert worker.main_task is not None
        await asyncio.wait_for(worker.main_task, 20)
        assert releases == 1, "all in one call"
    assert await redis.zrange(QUEUE, 0, -1, withscores=True) == scores, "each where it stood"
    kept = 0
    for job in JOBS:
        pieces = await redis.lrange(keys.progress_key(job.id or ""), 0, -1)
        kept += len(decode_progress(pieces).outputs[0].token_ids)
        assert await redis.get(keys.retry_key(job.id or "")) == b"0", "no try is spent"
    async with working(redis_url, tiny_model) as (_, model):
        done = await results(redis)
        assert model.stats.completion_tokens == len(JOBS) * TOKENS - kept
    assert_same(done, unbroken)
    assert sum(result.usage.resumed_tokens for result in done) == kept >= len(JOBS) * 10
    left = {key.decode() async for key in redis.scan_iter() if b"job-" in key}
    assert left == {keys.result_key(job.id or "") for job in JOBS}


async def test_what_waits_for_a_place_is_handed_back_at_once(
    redis_url: str, redis: Redis, push: Push, tiny_model: Path, unbroken: list[GenerationResult]
) -> None:
    await push_all(push)
    async with working(redis_url, tiny_model, step_s=0.01, max_rows=3) as (worker, model):
        async with asyncio.timeout(20):
            while len(worker.tasks) < 4 or model.rows_running < 3:
                await asyncio.sleep(0.005)
        worker.handle_sig(signal.SIGTERM)
        async with working(redis_url, tiny_model) as (other, _):
            async with asyncio.timeout(20):
                while not await redis.exists(keys.result_key("job-3")):
                    await asyncio.sleep(0.01)
            assert worker.runner.held.claims.keys() == {"job-0", "job-1", "job-2"}
            assert worker.main_task is not None
            await asyncio.wait_for(worker.main_task, 20)
            assert (worker.jobs_complete, other.jobs_complete) == (3, 1)
        assert_same(await results(redis), unbroken)


async def test_a_worker_that_drains_says_so_soon(
    redis_url: str,
    redis: Redis,
    push: Push,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidemill_worker.worker.HEARTBEAT_S", 1_000.0)
    await push_all(push)
    async with working(redis_url, tiny_model, step_s=0.2) as (worker, model):
        await generated(model, 1)
        worker.handle_sig(signal.SIGTERM)
        async with asyncio.timeout(20):
            key = keys.worker_key(QUEUE, worker.config.name)
            while (raw := await redis.get(key)) is None or decode_status(raw).state != "draining":
                await asyncio.sleep(0.02)


async def test_progress_is_kept_by_tokens_and_by_seconds_and_goes_on_by_pieces(
    redis_url: str, redis: Redis, push: Push, tiny_model: Path
) -> None:
    await push_all(push)
    sizes: list[int] = []
    async with working(redis_url, tiny_model, step_s=0.01, checkpoint_tokens=20):
        async with asyncio.timeout(20):
            while len(set(sizes)) < 4:
                sizes.append(await redis.llen(keys.progress_key("job-0")))
                await asyncio.sleep(0.01)
        assert sorted(sizes) == sizes
        pieces = await redis.lrange(keys.progress_key("job-0"), 0, -1)
        assert 0 < await redis.pttl(keys.progress_key("job-0")) <= keys.PROGRESS_TTL_MS
        told = [len(decode_progress([piece]).outputs[0].token_ids) for piece in pieces]
        assert min(told) >= 20
        await results(redis)
    assert not await redis.exists(keys.progress_key("job-0"))
    await push_all(push)
    for job in JOBS:
        await redis.delete(keys.result_key(job.id or ""))
    async with working(
        redis_url, tiny_model, step_s=0.02, checkpoint_tokens=10_000, checkpoint_s=0.5
    ):
        async with asyncio.timeout(20):
            while await redis.llen(keys.progress_key("job-0")) < 2:
                await asyncio.sleep(0.01)


async def test_progress_that_is_lost_on_the_way_is_written_whole_again(
    redis_url: str, redis: Redis, push: Push, tiny_model: Path, unbroken: list[GenerationResult]
) -> None:
    await push_all(push)
    async with working(redis_url, tiny_model, step_s=0.02, checkpoint_tokens=5):
        key = keys.progress_key("job-0")
        async with asyncio.timeout(20):
            while not await redis.exists(key):
                await asyncio.sleep(0.01)
            await redis.delete(key)
            while not await redis.exists(key):
                await asyncio.sleep(0.01)
        (piece,) = await redis.lrange(key, 0, 0)
        tokens = decode_progress([piece]).outputs[0].token_ids
        assert tokens == unbroken[0].token_ids[: len(tokens)]


async def test_a_job_that_was_resumed_goes_on_with_its_pieces_and_may_move_again(
    redis_url: str, redis: Redis, push: Push, tiny_model: Path, unbroken: list[GenerationResult]
) -> None:
    await push_all(push)
    for tokens in (10, 40, 70):
        async with working(
            redis_url, tiny_model, step_s=0.01, drain_timeout=0, checkpoint_tokens=16
        ) as (worker, model):
            await generated(model, tokens)
            worker.handle_sig(signal.SIGTERM)
            assert worker.main_task is not None
            await asyncio.wait_for(worker.main_task, 20)
    assert await redis.llen(keys.progress_key("job-0")) >= 3
    async with working(redis_url, tiny_model):
        done = await results(redis)
    assert_same(done, unbroken)
    assert all(result.usage.resumed_tokens >= 70 for result in done)


async def test_no_checkpoints_where_none_are_wanted(
    redis_url: str, redis: Redis, push: Push, tiny_model: Path
) -> None:
    await push_all(push)
    async with working(
        redis_url, tiny_model, step_s=0.01, drain_timeout=0, checkpoint_tokens=0
    ) as (worker, model):
        await generated(model, 30)
        worker.handle_sig(signal.SIGTERM)
        assert worker.main_task is not None
        await asyncio.wait_for(worker.main_task, 20)
    assert not [key async for key in redis.scan_iter(keys.PROGRESS_PREFIX + "*")]


async def test_redis_that_is_away_while_a_worker_drains_loses_and_doubles_nothing(
    redis_server: EmbeddedRedis,
    redis_url: str,
    push: Push,
    tiny_model: Path,
    unbroken: list[GenerationResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidemill_worker.worker.FINAL_WRITE_S", 1.0)
    await push_all(push)
    async with working(
        redis_url, tiny_model, step_s=0.02, drain_timeout=0.2, checkpoint_tokens=8
    ) as (worker, model):
        await generated(model, 20)
        await asyncio.sleep(1.1)  # appendfsync everysec
        redis_server.kill()
        try:
            worker.handle_sig(signal.SIGTERM)
            assert worker.main_task is not None
            await asyncio.wait_for(worker.main_task, 30)
        finally:
            redis_server.start()
    redis = Redis.from_url(redis_server.url)
    async with working(redis_server.url, tiny_model):
        done = await results(redis)
    await redis.aclose()
    assert_same(done, unbroken)
    assert sum(result.usage.resumed_tokens for result in done) > 0
