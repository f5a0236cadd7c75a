"""The scripts: who gets a job, who may answer it, and what is left in Redis afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.worker.conftest import QUEUE, Push
from tidemill_contracts import keys
from tidemill_worker.queue import MAX_RECORD_BYTES, Claim, Claimed, Finished, JobQueue, Release


def _finished(claim: Claim, record: bytes = b"result", reply_to: str | None = None) -> Finished:
    return Finished(claim=claim, record=record, reply_to=reply_to)


async def _claim_one(queue: JobQueue) -> Claim:
    (claim,) = (await queue.claim(1)).claims
    return claim


async def test_claims_up_to_the_limit_in_order_of_score(queue: JobQueue, push: Push) -> None:
    for name, age in (("young", -10), ("old", -5_000), ("middle", -100)):
        await push(name, due_in_ms=age)
    first = (await queue.claim(2)).claims
    claimed = await queue.claim(2)
    second, next_due_ms = claimed.claims, claimed.next_due_ms
    assert [claim.id for claim in first] == ["old", "middle"]
    assert [claim.id for claim in second] == ["young"]
    assert first[0].payload is not None
    assert first[0].tries == 1
    assert next_due_ms is not None
    assert 0 < next_due_ms <= queue.lease_ms


async def test_a_claimed_job_is_invisible_until_its_lease_runs_out(
    queue: JobQueue, push: Push
) -> None:
    await push()
    first = await _claim_one(queue)
    assert (await queue.claim(5)).claims == []
    await asyncio.sleep(queue.lease_ms / 1000 + 0.05)
    second = await _claim_one(queue)
    assert (second.id, second.tries) == (first.id, 2)
    assert second.token != first.token


async def test_a_dead_workers_job_comes_before_an_older_backlog(
    queue: JobQueue, push: Push
) -> None:
    await push("held", due_in_ms=-1)
    await _claim_one(queue)
    for i in range(20):
        await push(f"backlog-{i}", due_in_ms=-100_000)
    await asyncio.sleep(queue.lease_ms / 1000 + 0.05)
    assert (await _claim_one(queue)).id == "held"


async def test_a_claim_whose_answer_was_lost_is_taken_up_as_it_was(
    redis: Redis, push: Push, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = JobQueue(redis, QUEUE, lease_ms=60_000)
    await push("large", record=bytes(MAX_RECORD_BYTES + 1))
    await push("small")
    call = queue.link.call

    async def lose(name: str, awaited: Awaitable[Any], *timeout: float) -> Any:
        await call(name, awaited, *timeout)
        raise ConnectionError("cut")

    with monkeypatch.context() as patch:
        patch.setattr(queue.link, "call", lose)
        with pytest.raises(ConnectionError):
            await queue.claim(2)
    claims = {claim.id: claim for claim in (await queue.claim(2)).claims}
    assert {claim.tries for claim in claims.values()} == {1}
    assert claims["small"].payload
    assert claims["large"].payload is None, "too large to be fetched, the second time too"
    assert claims["large"].payload_bytes == MAX_RECORD_BYTES + 1


async def test_renewing_keeps_a_job(queue: JobQueue, push: Push) -> None:
    await push()
    claim = await _claim_one(queue)
    for _ in range(4):
        await asyncio.sleep(queue.lease_ms / 3000)
        assert await queue.renew([claim]) == set()
    assert (await queue.claim(5)).claims == []


async def test_renewing_tells_what_is_lost(queue: JobQueue, push: Push) -> None:
    await push("taken")
    await push("done")
    taken, done = (await queue.claim(2)).claims
    await queue.finish([_finished(done)])
    await asyncio.sleep(queue.lease_ms / 1000 + 0.05)
    await queue.claim(1)
    assert await queue.renew([taken, done]) == {"taken", "done"}


async def test_a_lease_that_ran_out_unclaimed_is_taken_up_again(
    queue: JobQueue, push: Push
) -> None:
    await push()
    claim = await _claim_one(queue)
    await asyncio.sleep(queue.lease_ms / 1000 + 0.05)
    assert await queue.renew([claim]) == set()
    assert (await queue.claim(5)).claims == []


async def test_finishing_leaves_nothing_but_the_result_and_its_reply(
    queue: JobQueue, push: Push, redis: Redis
) -> None:
    await push(reply_to="tidemill:reply:p")
    await redis.sadd(keys.waiters_key("job"), "tidemill:reply:q")
    claim = await _claim_one(queue)
    assert await queue.finish([_finished(claim, reply_to="tidemill:reply:p")]) == [True]
    assert set(await redis.keys()) == {
        b"arq:result:job",
        b"tidemill:reply:p",
        b"tidemill:reply:q",
    }
    assert await redis.get(keys.result_key("job")) == b"result"
    for stream in ("tidemill:reply:p", "tidemill:reply:q"):
        ((_, fields),) = await redis.xrange(stream)
        assert fields == {b"id": b"job"}
        assert 0 < await redis.pttl(stream) <= keys.REPLY_TTL_MS
    assert 0 < await redis.pttl(keys.result_key("job")) <= keys.RESULT_TTL_MS


async def test_the_second_finisher_is_refused(queue: JobQueue, push: Push, redis: Redis) -> None:
    await push()
    zombie = await _claim_one(queue)
    await asyncio.sleep(queue.lease_ms / 1000 + 0.05)
    owner = await _claim_one(queue)
    assert await queue.finish([_finished(zombie, b"zombie")]) == [False]
    assert await queue.finish([_finished(owner, b"owner")]) == [True]
    assert await queue.finish([_finished(zombie, b"zombie")]) == [False]
    assert await queue.finish([_finished(owner, b"again")]) == [False]
    assert await redis.get(keys.result_key("job")) == b"owner"


async def test_a_late_result_counts_where_nobody_else_has_the_job(
    queue: JobQueue, push: Push
) -> None:
    await push()
    claim = await _claim_one(queue)
    await asyncio.sleep(queue.lease_ms / 1000 + 0.05)
    assert await queue.finish([_finished(claim)]) == [True]
    assert (await queue.claim(5)).claims == []


async def test_a_reply_key_of_another_type_does_not_hold_the_result_up(
    queue: JobQueue, push: Push, redis: Redis
) -> None:
    await push("a", reply_to="not-a-stream")
    await redis.set("not-a-stream", "x")
    await push("b")
    claims = (await queue.claim(2)).claims
    assert await queue.finish([_finished(c, reply_to="not-a-stream") for c in claims]) == [
        True,
        True,
    ]


async def test_handing_back_restores_place_and_try(
    queue: JobQueue, push: Push, redis: Redis
) -> None:
    await push("first", due_in_ms=-500)
    await push("second", due_in_ms=-100)
    score = await redis.zscore(QUEUE, "first")
    claim = await _claim_one(queue)
    assert await queue.release([Release(claim)]) == 1
    assert await redis.zscore(QUEUE, "first") == score
    again = await _claim_one(queue)
    assert (again.id, again.tries) == ("first", 1)
    await queue.release([Release(again, refund=False)])
    assert (await _claim_one(queue)).tries == 2


async def test_handing_back_with_a_delay_hides_the_job_that_long(
    queue: JobQueue, push: Push
) -> None:
    await push()
    await queue.release([Release(await _claim_one(queue), delay_ms=300)])
    claimed = await queue.claim(1)
    next_due_ms = claimed.next_due_ms
    assert claimed.claims == []
    assert next_due_ms is not None
    assert 0 < next_due_ms <= 300
    await asyncio.sleep(0.35)
    await _claim_one(queue)


async def test_a_job_that_is_someone_elses_cannot_be_handed_back(
    queue: JobQueue, push: Push
) -> None:
    await push()
    zombie = await _claim_one(queue)
    await asyncio.sleep(queue.lease_ms / 1000 + 0.05)
    await _claim_one(queue)
    assert await queue.release([Release(zombie)]) == 0
    assert (await queue.claim(5)).claims == []


async def test_a_job_that_a_stock_arq_worker_runs_is_left_to_it(
    queue: JobQueue, push: Push, redis: Redis
) -> None:
    await push("arqs", due_in_ms=-5_000)
    await push("ours")
    await redis.set(keys.in_progress_key("arqs"), "1", px=60_000)
    claims = (await queue.claim(5)).claims
    assert [claim.id for claim in claims] == ["ours"]
    assert (await queue.claim(5)).claims == []
    assert await redis.zscore(QUEUE, "arqs") is not None


async def test_an_id_that_is_not_utf8_is_claimed_and_finished(
    queue: JobQueue, redis: Redis
) -> None:
    await redis.zadd(QUEUE, {b"\xff\xfe": 1})
    claim = await _claim_one(queue)
    assert claim.payload is None
    assert await queue.renew([claim]) == set()
    assert await queue.finish([_finished(claim)]) == [True]
    assert await redis.keys() == [b"arq:result:\xff\xfe"]


async def test_a_job_due_later_is_not_claimed_and_its_time_is_told(
    queue: JobQueue, push: Push
) -> None:
    await push(due_in_ms=5_000)
    claimed = await queue.claim(1)
    next_due_ms = claimed.next_due_ms
    assert claimed.claims == []
    assert next_due_ms is not None
    assert 4_000 < next_due_ms <= 5_000
    await queue.redis.flushall()
    assert await queue.claim(1) == Claimed([], None)


async def test_the_doorbell_wakes_one_worker_after_another_while_jobs_remain(
    queue: JobQueue, push: Push, redis: Redis
) -> None:
    for i in range(3):
        await push(f"job-{i}")
    await redis.lpush(keys.doorbell_key(QUEUE), "1")
    woken = 0
    while True:
        started = asyncio.get_running_loop().time()
        await queue.wait(0.2)
        if asyncio.get_running_loop().time() - started > 0.15:
            break
        woken += len((await queue.claim(1)).claims)
    assert woken == 3


async def test_claiming_costs_one_command_however_many_jobs_run_elsewhere(
    queue: JobQueue, push: Push, redis: Redis
) -> None:
    for i in range(300):
        await push(f"running-{i}")
    await queue.claim(300)
    await push("due")
    before = (await redis.info("commandstats")).get("cmdstat_zrangebyscore", {}).get("calls", 0)
    assert (await _claim_one(queue)).id == "due"
    after = (await redis.info("commandstats"))["cmdstat_zrangebyscore"]["calls"]
    assert after - before == 2
