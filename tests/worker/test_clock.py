"""A worker's time is Redis's."""

from __future__ import annotations

import time

import pytest
from redis.asyncio import Redis

from tidemill_worker.clock import RedisClock
from tidemill_worker.queue import JobQueue


def test_until_it_is_told_it_is_the_machine_s_own() -> None:
    clock = RedisClock()
    assert not clock.told
    assert clock() == pytest.approx(time.time(), abs=5)


def test_it_goes_on_from_what_it_was_told_whatever_the_machine_s_own_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = RedisClock()
    clock.tell(5_000_000)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    before = clock()
    assert before == pytest.approx(5_000, abs=5)
    time.sleep(0.01)
    assert before < clock() < before + 5


async def test_every_claim_tells_it(redis: Redis) -> None:
    queue = JobQueue(redis, lease_ms=1_000)
    queue.clock.tell(0)
    assert not (await queue.claim(1)).claims
    seconds, _ = await redis.time()
    assert queue.clock() == pytest.approx(seconds, abs=5)
