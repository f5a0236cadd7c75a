"""The producer's side of Redis: connections, retries, and errors that name the server.

Two pools: one shared by all calls, one connection that only the reply reader blocks on. Answers
are bytes, whatever the URL says; redis-py's own retries are off, because ours must know whether
an earlier attempt may have got through.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tidemill_contracts.scripts import load_script
from tidemill_contracts.urls import mask_url
from tidemill_producer.errors import QueueUnavailable

T = TypeVar("T")

MAX_CONNECTIONS = 8
CONNECT_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 15.0
"""Longer than any of our calls takes, and than the reader's block."""
FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 2.0

TRANSIENT = (RedisConnectionError, RedisTimeoutError, ReadOnlyError, OSError)
"""What a restart or a failover looks like (``LOADING`` is a connection error in redis-py)."""
LOGIN_REFUSED = (AuthenticationError, AuthorizationError)
"""Connection errors to redis-py; trying again changes nothing."""


class Connection:
    """Redis as the producer uses it."""

    def __init__(self, url: str, *, patience_s: float) -> None:
        """`patience_s`: how long `retry` keeps trying. Raises `QueueUnavailable` for a bad URL."""
        self.where = mask_url(url)
        self.patience_s = patience_s
        try:
            self.redis = open_client(url, max_connections=MAX_CONNECTIONS)
            self.reader = open_client(url, max_connections=1)
        except ValueError as error:
            raise QueueUnavailable(f"{self.where} is not a Redis URL: {error}") from error
        self._scripts: dict[str, AsyncScript] = {}

    def script(self, name: str) -> AsyncScript:
        """One of the queue's scripts, to be called with ``keys`` and ``args``."""
        if name not in self._scripts:
            self._scripts[name] = self.redis.register_script(load_script(name))
        return self._scripts[name]

    async def retry(
        self, do: Callable[[bool], Awaitable[T]], *, patience_s: float | None = None
    ) -> T:
        """What `do` returns, tried again over a restart of Redis for `patience_s`.

        `do` is told whether an earlier attempt may have got through. Raises `QueueUnavailable`.
        """
        give_up_at = time.monotonic() + (self.patience_s if patience_s is None else patience_s)
        repeated = False
        for delay_s in backoff():
            try:
                return await within(do(repeated))
            except LOGIN_REFUSED as error:
                raise self.explain(error) from error
            except TRANSIENT as error:
                if time.monotonic() + delay_s > give_up_at:
                    raise self.explain(error) from error
            except RedisError as error:
                raise self.explain(error) from error
            repeated = True
            await asyncio.sleep(delay_s)
        raise AssertionError("backoff() never ends")

    def explain(self, error: Exception) -> QueueUnavailable:
        """The error for a person: which server, what happened, what to do."""
        if isinstance(error, LOGIN_REFUSED):
            remedy = "refused the login", "Check the user and the password in the URL."
        elif isinstance(error, ReadOnlyError):
            remedy = "is a read-only replica", "Use the URL of the primary."
        elif isinstance(error, TRANSIENT):
            remedy = "cannot be reached", "Is it running, and is the URL right?"
        elif isinstance(error, ResponseError) and "maxmemory" in str(error):
            remedy = "is full", "Raise its maxmemory, or wait until workers drained the queue."
        else:
            remedy = "refused a command", "Is it Redis 6.2 or newer, and are all commands allowed?"
        happened, advice = remedy
        what = str(error).rstrip(".") or type(error).__name__
        return QueueUnavailable(f"Redis at {self.where} {happened}: {what}. {advice}")

    async def aclose(self) -> None:
        await self.reader.aclose()
        await self.redis.aclose()


async def within(call: Awaitable[T]) -> T:
    """The answer of one call. Raises `TimeoutError` where a server hangs.

    In place of redis-py's ``socket_timeout``, which uses `asyncio.wait_for`: in Python 3.11 that
    may swallow the cancellation of whoever calls.
    """
    async with asyncio.timeout(CALL_TIMEOUT_S):
        return await call


def backoff() -> Iterator[float]:
    """Seconds to wait before each next attempt, without end; jittered, so that a thousand
    producers do not come back in the same instant."""
    delay_s = FIRST_DELAY_S
    while True:
        yield delay_s * random.uniform(0.5, 1.0)
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)


def open_client(url: str, *, max_connections: int) -> Redis:
    """A client with our habits; connects with its first command. `ValueError` for a bad URL."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=None,  # callers queue for a connection for as long as it takes
        protocol=2,
        retry=Retry(NoBackoff(), 0),
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=None,  # see `within`
    )
    pool.connection_kwargs["decode_responses"] = False
    return Redis.from_pool(pool)
