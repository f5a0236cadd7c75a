"""Fixtures that every suite shares: a real server, flushed before each test."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest
import redis as redis_sync
from redis.asyncio import Redis

from tidemill_producer.embedded import EmbeddedRedis

# Before torch is imported, and for the processes that tests start: the models are too small to
# share out, and threads that wait for each other on a busy machine take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """One server for the whole session. A test that kills it must start it again."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The URL of an empty database."""
    with redis_sync.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A client of that database; answers are bytes."""
    # redis-py 8 has a socket timeout by default, and with one, Python 3.11 may lose a cancellation.
    client = Redis.from_url(redis_url, socket_timeout=None)
    yield client
    await client.aclose()
