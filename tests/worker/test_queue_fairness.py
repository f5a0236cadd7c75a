"""Who comes next: priorities that age, tenants that take turns, jobs that are not due yet."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.worker.conftest import QUEUE
from tests.worker.queue_clock import pass_time
from tidemill_contracts import keys
from tidemill_contracts.wire import GenerationJob
from tidemill_producer import JobState, Producer, QueueFull, QueueLimits
from tidemill_worker.queue import JobQueue


@pytest.fixture
def queue(redis: Redis) -> JobQueue:
    return JobQueue(redis, QUEUE, lease_ms=60_000)


@pytest.fixture
async def producer(redis_url: str) -> Producer:
    return Producer(redis_url, QUEUE)


async def _enqueue(producer: Producer, *names: str, tenant: str = "", priority: int = 0) -> None:
    jobs = [GenerationJob(id=n, prompt="x", tenant=tenant, priority=priority) for n in names]
    _ = [handle async for handle in producer.enqueue_many(jobs)]


async def _claim(queue: JobQueue, limit: int) -> list[str]:
    return [claim.id for claim in (await queue.claim(limit)).claims]


async def test_ten_jobs_of_one_tenant_do_not_wait_for_thousands_of_another(
    producer: Producer, queue: JobQueue
) -> None:
    async with producer:
        await _enqueue(producer, *(f"a{n:04}" for n in range(5000)), tenant="a")
        assert await _claim(queue, 4) == ["a0000", "a0001", "a0002", "a0003"]
        await _enqueue(producer, *(f"b{n}" for n in range(10)), tenant="b")
        claimed = await _claim(queue, 20)
    assert sorted(claimed) == [f"a{n:04}" for n in range(4, 14)] + [f"b{n}" for n in range(10)]
    for of in "ab":
        assert [n for n in claimed if n[0] == of] == sorted(n for n in claimed if n[0] == of)


@pytest.mark.parametrize("crowd", ["", "a"])
async def test_jobs_without_a_tenant_are_one_tenant_among_the_others(
    producer: Producer, queue: JobQueue, crowd: str
) -> None:
    other = "" if crowd else "b"
    async with producer:
        await _enqueue(producer, *(f"crowd{n:03}" for n in range(200)), tenant=crowd)
        await _enqueue(producer, *(f"few{n}" for n in range(5)), tenant=other)
        claimed = await _claim(queue, 12)
    assert [name for name in claimed if name.startswith("few")] == [f"few{n}" for n in range(5)]
    assert len(claimed) == 12


async def test_an_idle_worker_runs_low_priority_at_once(
    producer: Producer, queue: JobQueue
) -> None:
    async with producer:
        await _enqueue(producer, "low", priority=-100)
        await _enqueue(producer, "lower", priority=-100, tenant="t")
    assert await _claim(queue, 5) == ["low", "lower"]


async def test_low_priority_ages_past_those_that_come_later(
    producer: Producer, queue: JobQueue, redis: Redis
) -> None:
    async with producer:
        await _enqueue(producer, "low", priority=-2)
        await _enqueue(producer, "plain")
        await pass_time(redis, QUEUE, 130_000)
        await _enqueue(producer, "late")
        await _enqueue(producer, "urgent", priority=3)
    assert await _claim(queue, 5) == ["urgent", "plain", "low", "late"]


async def test_a_deferred_job_joins_when_it_is_due_with_its_priority(
    producer: Producer, queue: JobQueue, redis: Redis
) -> None:
    async with producer:
        soon = await producer.enqueue("x", id="soon", delay=60, priority=1)
        await producer.enqueue("x", id="tenants", delay=60, tenant="t")
        status = await soon.status()
        assert status.state is JobState.DEFERRED
        assert status.due_at is not None
        assert status.enqueued_at is not None
        assert 59 < status.due_at - status.enqueued_at < 61
        await producer.enqueue("x", id="other-time", run_at=status.due_at + 3600)
        assert (await queue.claim(5)).claims == []
        await pass_time(redis, QUEUE, 61_000)
        assert (await soon.status()).state is JobState.QUEUED
        await _enqueue(producer, "plain")
        assert await _claim(queue, 5) == ["soon", "tenants", "plain"]
        with pytest.raises(TypeError):
            await producer.enqueue("x", delay=1, run_at=1)
        with pytest.raises(ValueError, match="delay"):
            await producer.enqueue("x", delay=-1)


async def test_a_key_makes_repeated_calls_one_job(producer: Producer, queue: JobQueue) -> None:
    async with producer:
        one = await producer.enqueue("x", idempotency_key="order 17 żółw")
        two = await producer.enqueue("x", idempotency_key="order 17 żółw")
        other = await producer.enqueue("x", idempotency_key="order 18")
        assert one.id == two.id != other.id
        with pytest.raises(TypeError, match="not both"):
            await producer.enqueue("x", id="a", idempotency_key="k")
    assert len((await queue.claim(5)).claims) == 2


async def test_a_full_queue_says_so_and_what_came_before_is_in(
    producer: Producer, queue: JobQueue
) -> None:
    async with producer:
        await producer.set_limits(QueueLimits(jobs=3))
        assert await producer.limits() == QueueLimits(jobs=3)
        with pytest.raises(QueueFull, match="many jobs") as caught:
            await _enqueue(producer, *"abcde")
        assert caught.value.job_id == "d"
        assert caught.value.expected_wait_s is None
        await producer.enqueue("x", id="a")  # what is there already needs no room
        assert await _claim(queue, 9) == ["a", "b", "c"]
        with pytest.raises(QueueFull):
            await _enqueue(producer, "d")
        await producer.cancel("a")
        await _enqueue(producer, "d")
        await producer.set_limits(QueueLimits())
        await _enqueue(producer, "e")


async def test_limits_of_bytes_and_of_a_tenant(producer: Producer, queue: JobQueue) -> None:
    async with producer:
        await producer.set_limits(QueueLimits(bytes=20_000, tenant_jobs=2))
        with pytest.raises(QueueFull, match="bytes"):
            await producer.enqueue("x" * 20_000)
        await _enqueue(producer, "a", "b", tenant="t")
        with pytest.raises(QueueFull, match="tenant"):
            await _enqueue(producer, "c", tenant="t")
        await _enqueue(producer, "c", tenant="u")
        await producer.cancel("a")
        await _enqueue(producer, "d", tenant="t")
    assert set(await _claim(queue, 9)) == set("bcd")


async def test_a_claim_looks_at_no_more_jobs_than_it_takes(
    producer: Producer, queue: JobQueue, redis: Redis
) -> None:
    async def commands_of_a_claim() -> int:
        await redis.config_resetstat()
        assert len((await queue.claim(8)).claims) == 8
        return sum(s["calls"] for s in (await redis.info("commandstats")).values())

    counts = []
    async with producer:
        for crowd in ("few", "many"):
            for tenant in ("", "t"):
                size = 20 if crowd == "few" else 3000
                names = (f"{crowd}-{tenant}-{n}" for n in range(size))
                await _enqueue(producer, *names, tenant=tenant)
            await queue.claim(8)
            counts.append(await commands_of_a_claim())
    assert counts[1] <= counts[0] + 2


async def test_arqs_own_set_shows_each_job_once(producer: Producer, redis: Redis) -> None:
    async with producer:
        await _enqueue(producer, "a", tenant="t")
        await _enqueue(producer, "b", priority=-3)
        await _enqueue(producer, "c")
        assert await redis.zcard(QUEUE) == 3
        await producer.cancel("a")
        await producer.cancel("b")
        await producer.cancel("c")
    left = {key.decode() async for key in redis.scan_iter()}
    assert {key for key in left if not key.startswith("arq:result:")} <= {
        keys.doorbell_key(QUEUE), f"{QUEUE}:lane:0", f"{QUEUE}:classes",
        f"{QUEUE}:turns:0", f"{QUEUE}:turns:-3",
    }  # fmt: skip
