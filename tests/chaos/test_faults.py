"""One fault each, and what exactly comes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.chaos.server import AppendOnlyServer, read_written
from tests.chaos.storm import Scale, make_jobs, unbroken
from tests.chaos.workers import WorkerProcess, working
from tidemill_contracts import keys
from tidemill_contracts.wire import ErrorCode
from tidemill_producer import GenerationJob, Producer, SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
SHORT_LEASE = ("--lease-ms", "1500", "--dtype", "float32", "--deterministic")


@pytest.fixture
def server() -> Iterator[AppendOnlyServer]:
    server = AppendOnlyServer()
    with server:
        yield server


async def _enqueue(producer: Producer, jobs: list[GenerationJob]) -> None:
    async for _ in producer.enqueue_many(jobs):
        pass


async def _tokens(producer: Producer, jobs: list[GenerationJob]) -> dict[str, list[int]]:
    results = await asyncio.gather(*(producer.result(job.id or "", 100) for job in jobs))
    return {result.id: result.token_ids for result in results}


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.05)


def _given_up(job_id: str, worker: WorkerProcess) -> bool:
    """Whether a worker that held a job has seen that it is another's, before its result or with
    it."""
    ends = "was cancelled, or went to another worker", "has a result or an owner already"
    return any(f"{job_id} {end}" in worker.said for end in ends)


async def _until_leased(producer: Producer, count: int) -> None:
    async with asyncio.timeout(60):
        while await producer.redis.zcard(keys.leases_key(producer.queue)) < count:
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_worker_that_wakes_after_its_lease_changes_nothing_and_serves_on(
    server: AppendOnlyServer, tmp_path: Path
) -> None:
    jobs = [GenerationJob(id=f"long-{n}", prompt=f"{n} and", sampling=LONG) for n in range(4)]
    expected = await unbroken(jobs)
    async with Producer(server.url) as producer, AsyncExitStack() as stack:
        zombie = await stack.enter_async_context(
            working(server.url, "zombie", tmp_path, *SHORT_LEASE)
        )
        await zombie.until_ready()
        await _enqueue(producer, jobs)
        await _until_leased(producer, len(jobs))
        zombie.pause()
        other = await stack.enter_async_context(
            working(server.url, "other", tmp_path, *SHORT_LEASE)
        )
        assert await _tokens(producer, jobs) == expected
        zombie.resume()
        await _until(lambda: all(_given_up(job.id or "", zombie) for job in jobs))
        other.drain()
        await asyncio.wait_for(other.process.wait(), 60)
        again = GenerationJob(id="again", prompt="0 and", sampling=LONG)
        await _enqueue(producer, [again])
        assert await _tokens(producer, [again]) == {"again": expected["long-0"]}
        (status,) = await producer.workers()
        while (status.rows_running, status.rows_waiting, status.pages_held) != (0, 0, 0):
            await asyncio.sleep(0.1)
            (status,) = await producer.workers()
        assert status.id == "zombie"
    written = read_written(server)
    assert written.results == dict.fromkeys([*expected, "again"], 1)
    assert written.replies == written.results


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_leases_that_run_out_while_the_server_is_away_are_taken_up_after_it(
    server: AppendOnlyServer, tmp_path: Path
) -> None:
    # More than one of the workers takes: the other has the rest.
    jobs = [GenerationJob(id=f"long-{n}", prompt=f"{n} and", sampling=LONG) for n in range(16)]
    expected = await unbroken(jobs)
    async with (
        working(server.url, "dies", tmp_path, *SHORT_LEASE) as dies,
        working(server.url, "lives", tmp_path, *SHORT_LEASE) as lives,
        Producer(server.url, patience_s=60) as producer,
    ):
        await dies.until_ready()
        await lives.until_ready()
        await _enqueue(producer, jobs)
        waiting = asyncio.create_task(_tokens(producer, jobs))
        await _until_leased(producer, len(jobs))
        server.kill()
        dies.kill()
        await asyncio.sleep(2)
        server.start()
        assert await waiting == expected
    written = read_written(server)
    assert written.results == written.replies == dict.fromkeys(expected, 1)
    assert written.orphaned


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("ahead_s", [3600, -3600])
async def test_a_worker_whose_clock_is_an_hour_off_neither_takes_nor_loses_a_job(
    server: AppendOnlyServer, tmp_path: Path, ahead_s: int
) -> None:
    jobs = make_jobs(Scale(seed=1, jobs=80))
    async with (
        working(server.url, "right", tmp_path) as right,
        working(server.url, "skewed", tmp_path, ahead_s=ahead_s) as skewed,
        Producer(server.url) as producer,
    ):
        await right.until_ready()
        await skewed.until_ready()
        await _enqueue(producer, jobs)
        await _tokens(producer, jobs)
        # Time for each to tell of itself, and to take the other for dead.
        await asyncio.sleep(5)
        assert {status.id for status in await producer.workers()} == {"right", "skewed"}
        right.drain()
        await asyncio.wait_for(right.process.wait(), 60)
        # A deadline is one of Redis's clock.
        in_time = await producer.enqueue("1 and", max_tokens=5, deadline=time.time() + 300)
        assert (await in_time.result(60)).finish_reason != "deadline"
        late = await producer.enqueue("1 and", max_tokens=5, deadline=time.time() - 300)
        error = (await late.outcome(60)).error
        assert error is not None
        assert error.code == ErrorCode.EXPIRED
        cut = await producer.enqueue(
            "1 and", n=4, max_tokens=1900, ignore_eos=True, deadline=time.time() + 2
        )
        outcome = await cut.outcome(60)
        if outcome.error is None:
            assert outcome.unwrap().finish_reason == "deadline"
        else:  # a machine so slow that there was no first token
            assert outcome.error.code == ErrorCode.EXPIRED
        # So are the times that are told of jobs.
        status = await in_time.status()
        assert status.started_at is not None
        assert abs(status.started_at - time.time()) < 300
        assert (await in_time.result()).timings.queued_ms < 300_000
    assert set(read_written(server).claims.values()) == {1}
