"""How jobs end other than by an answer: cancelled, expired, given up; and who must not suffer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
from arq import create_pool
from arq.connections import RedisSettings
from arq.jobs import Job, ResultNotFound
from arq.jobs import JobStatus as ArqStatus
from redis.asyncio import Redis

from tests.worker.conftest import QUEUE, Push
from tests.worker.queue_clock import pass_time
from tests.worker.test_worker import Gate, error_code, gate, outcome, running, until
from tidemill_contracts import keys
from tidemill_contracts.wire import ErrorCode, GenerationJob, JobFailed
from tidemill_contracts.wire.arq_format import GENERATE, deserializer, serializer
from tidemill_producer import Cancellation, JobState, Producer
from tidemill_worker.queue import MAX_RECORD_BYTES, JobQueue, Piece

__all__ = ["gate"]


async def test_a_queued_and_a_deferred_job_are_cancelled_at_once(redis_url: str) -> None:
    async with Producer(redis_url, QUEUE) as one, Producer(redis_url, QUEUE) as two:
        for number, delay in enumerate((None, 60)):
            job = await one.enqueue("x", id=f"job-{number}", delay=delay)
            waiting = asyncio.gather(job.outcome(timeout=10), two.outcome(job.id, timeout=10))
            await asyncio.sleep(0.1)
            assert await two.cancel(job.id) is Cancellation.CANCELLED
            for ended in await waiting:
                assert ended.error is not None
                assert ended.error.code == ErrorCode.CANCELLED
            assert (await job.status()).state is JobState.CANCELLED
            assert await job.cancel() is Cancellation.ENDED


async def test_cancelling_an_unknown_job_leaves_the_next_one_of_that_id_alone(
    redis_url: str, redis: Redis, gate: Gate
) -> None:
    async with Producer(redis_url, QUEUE) as producer, running(redis_url, gate):
        assert await producer.cancel("job") is Cancellation.UNKNOWN
        await redis.zadd(keys.ARQ_ABORT, {"job": time.time() * 1000 - 60_000})
        job = await producer.enqueue("x", id="job")
        assert (await job.result(timeout=10)).text == "done"
    assert gate.cancelled == []


async def test_a_running_job_is_stopped_soon_and_has_one_result(
    redis_url: str, redis: Redis, gate: Gate
) -> None:
    gate.open.clear()
    # Leases so long that only the order, and no renewal, can tell the worker.
    worker_runs = running(redis_url, gate, lease_ms=600_000)
    async with Producer(redis_url, QUEUE) as producer, worker_runs as worker:
        job = await producer.enqueue("x", id="job")
        await producer.enqueue("x", id="neighbour")
        await until(lambda: len(gate.started) == 2)
        assert (await job.status()).worker == worker.config.name
        assert await job.cancel() is Cancellation.STOPPED
        await until(lambda: gate.cancelled == ["job"])
        gate.open.set()
        assert (await producer.result("neighbour", timeout=10)).text == "done"
        with pytest.raises(JobFailed, match="cancelled"):
            await job.result(timeout=10)
        assert worker.jobs_complete == 1


async def test_arqs_abort_ends_queued_and_running_jobs(redis_url: str, gate: Gate) -> None:
    gate.open.clear()
    pool = await create_pool(
        RedisSettings.from_dsn(redis_url),
        job_serializer=serializer,
        job_deserializer=deserializer,
        default_queue_name=QUEUE,
    )
    async with running(redis_url, gate, lease_ms=60_000):
        job = await pool.enqueue_job(GENERATE, {"prompt": "x"})
        assert job is not None
        await until(lambda: gate.started == [job.job_id])
        assert await job.status() is ArqStatus.in_progress
        assert await job.abort(timeout=10, poll_delay=0.05)
        await until(lambda: gate.cancelled == [job.job_id])
        later = await pool.enqueue_job(GENERATE, {"prompt": "x"}, _defer_by=60)
        assert later is not None
        assert await later.status() is ArqStatus.deferred
        assert await later.abort(timeout=10, poll_delay=0.05)
        assert await pool.zcard(keys.ARQ_ABORT) == 0
        unknown = Job("nobody", pool, QUEUE, deserializer)
        with pytest.raises(ResultNotFound):
            await unknown.result(timeout=1)
    # arq makes a deferred job due before it asks: a worker may be quicker than the question.
    assert gate.started[1:] in ([], [later.job_id])
    assert gate.cancelled == gate.started
    await pool.aclose()


async def test_a_job_past_its_deadline_is_never_run(redis_url: str, gate: Gate) -> None:
    async with Producer(redis_url, QUEUE) as producer:
        late = await producer.enqueue("x", deadline=time.time() + 0.2)
        await asyncio.sleep(0.3)
        good = await producer.enqueue("x", deadline=time.time() + 60)
        async with running(redis_url, gate):
            assert (await good.result(timeout=10)).text == "done"
            with pytest.raises(JobFailed, match="deadline"):
                await late.result(timeout=10)
        assert (await late.status()).state is JobState.EXPIRED
    assert gate.started == [good.id]


async def test_a_suspect_runs_alone_and_its_neighbours_do_not_die_twice(
    redis_url: str, redis: Redis, gate: Gate
) -> None:
    dying = JobQueue(redis, QUEUE, lease_ms=60_000, worker="dying")
    async with Producer(redis_url, QUEUE) as producer:
        for n in range(3):
            await producer.enqueue("x", id=f"old-{n}")
        assert len((await dying.claim(3)).claims) == 3
        await pass_time(redis, QUEUE, 61_000)
        most = 0
        at_once = 0

        async def watched(*call: Any) -> Any:
            nonlocal most, at_once
            job_id = call[0]["job_id"]
            at_once += 1
            if job_id.startswith("old"):
                most = max(most, at_once)
            await asyncio.sleep(0.1)
            at_once -= 1
            return await gate(*call)

        gate.open.set()
        async with running(redis_url, watched, lease_ms=60_000):  # type: ignore[arg-type]
            for n in range(4):
                await producer.enqueue("x", id=f"new-{n}")
            for n in range(3):
                assert (await producer.result(f"old-{n}", timeout=20)).text == "done"
            for n in range(4):
                assert (await producer.result(f"new-{n}", timeout=20)).text == "done"
    assert most == 1
    assert gate.started[:3] == ["old-0", "old-1", "old-2"]


async def test_a_suspect_stays_one_when_its_late_worker_only_tells_of_progress(
    redis: Redis, push: Push
) -> None:
    late, other = (JobQueue(redis, QUEUE, lease_ms=60_000) for _ in range(2))
    await push("a", due_in_ms=-2_000)
    await push("b")
    first, second = (await late.claim(2)).claims
    await pass_time(redis, QUEUE, 61_000)
    assert [claim.id for claim in (await other.claim(2)).claims] == ["a"]
    assert await late.checkpoint([Piece(first, 0, b"x"), Piece(second, 0, b"x")]) == [False, True]
    third = JobQueue(redis, QUEUE, lease_ms=60_000)
    assert [(claim.id, claim.suspect) for claim in (await third.claim(2)).claims] == [("b", True)]
    assert await late.renew([second]) == {"b"}


async def test_a_busy_worker_empties_itself_for_a_suspect(
    redis_url: str, redis: Redis, gate: Gate
) -> None:
    gate.open.clear()
    dying = JobQueue(redis, QUEUE, lease_ms=60_000, worker="dying")
    async with Producer(redis_url, QUEUE) as producer:
        await producer.enqueue("x", id="suspect")
        await dying.claim(1)
        async with running(redis_url, gate, lease_ms=60_000):
            await producer.enqueue("x", id="running")
            await until(lambda: gate.started == ["running"])
            await redis.zadd(keys.leases_key(QUEUE), {"suspect": 1})
            await redis.delete(keys.in_progress_key("suspect"))
            await producer.enqueue("x", id="new")
            await asyncio.sleep(0.3)
            assert gate.started == ["running"]
            gate.open.set()
            assert (await producer.result("new", timeout=20)).text == "done"
    assert gate.started.index("suspect") < gate.started.index("new")


async def test_a_job_whose_workers_died_too_often_is_a_dead_letter_until_it_is_queued_again(
    redis_url: str, redis: Redis, gate: Gate
) -> None:
    async with Producer(redis_url, QUEUE) as producer:
        job = await producer.enqueue("poison", id="poison", tenant="t")
        for n in range(2):
            dying = JobQueue(redis, QUEUE, lease_ms=60_000, worker=f"victim {n}", max_tries=2)
            assert len((await dying.claim(1)).claims) == 1
            await pass_time(redis, QUEUE, 61_000)
        async with running(redis_url, gate, max_tries=2, lease_ms=60_000):
            with pytest.raises(JobFailed, match="max_tries_exceeded"):
                await job.result(timeout=10)
            assert (await job.status()).state is JobState.DEAD
            assert gate.started == []
            (letter,) = await producer.dead.list()
            assert letter.job == GenerationJob(id="poison", prompt="poison", tenant="t")
            died = [(each.number, each.worker, each.error) for each in letter.history]
            assert died[:2] == [(1, "victim 0", "worker_died"), (2, "victim 1", "worker_died")]
            assert "started 2 times" in died[2][2]
            assert await producer.dead.count() == 1
            assert await producer.dead.requeue(["poison", "nobody"]) == {
                "poison": True,
                "nobody": False,
            }
            assert (await job.result(timeout=10)).text == "done"
        assert await producer.dead.ids() == []
        assert gate.started == ["poison"]


async def test_a_record_too_large_to_be_a_job_is_not_even_fetched(
    redis_url: str, redis: Redis, push: Push, gate: Gate
) -> None:
    await push("large", record=bytes(MAX_RECORD_BYTES + 1))
    await push("good", due_in_ms=-1)
    async with running(redis_url, gate):
        assert (await outcome(redis, "good")).unwrap()
        assert await error_code(redis, "large") == ErrorCode.INVALID_JOB
    assert gate.started == ["good"]


async def test_a_job_says_how_long_its_result_is_kept(
    redis_url: str, redis: Redis, gate: Gate
) -> None:
    async with Producer(redis_url, QUEUE) as producer, running(redis_url, gate, result_ttl=500):
        short = await producer.enqueue("x", result_ttl=50)
        plain = await producer.enqueue("x")
        await short.result(timeout=10)
        await plain.result(timeout=10)
    assert 40_000 < await redis.pttl(keys.result_key(short.id)) <= 50_000
    assert 400_000 < await redis.pttl(keys.result_key(plain.id)) <= 500_000


async def test_a_large_result_comes_back_whole_to_us_and_to_arq(
    redis_url: str, redis: Redis, gate: Gate
) -> None:
    text = "tide " * 200_000

    async def large(ctx: dict[Any, Any], job: GenerationJob) -> Any:
        result = await gate(ctx, job)
        return msgspec.structs.replace(result, text=text, token_ids=list(range(5_000)))

    worker_runs = running(redis_url, large)  # type: ignore[arg-type]
    async with Producer(redis_url, QUEUE) as producer, worker_runs:
        job = await producer.enqueue("x")
        assert (await job.result(timeout=10)).text == text
    assert await redis.strlen(keys.result_key(job.id)) < len(text) // 10
    fields = await Job(job.id, redis, QUEUE, deserializer).result()
    assert fields["text"] == text
