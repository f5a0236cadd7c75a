"""The producer's side of Redis: retries, and errors that name the server.

Two clients: one shared by all calls, one that only the reply reader blocks on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.commands.core import AsyncScript
from redis.exceptions import (
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from tidemill_contracts.connections import (
    CALL_TIMEOUT_S,
    SentinelRefused,
    backoff,
    is_login_refused,
    is_passing,
    leave_replica,
    open_client,
    within,
)
from tidemill_contracts.keys import FENCE
from tidemill_contracts.scripts import load_script
from tidemill_contracts.urls import BadRedisUrl, mask_url, parse_url
from tidemill_producer.errors import QueueUnavailable

T = TypeVar("T")

MAX_CALLS = 8
"""At once, and so about as many connections; other callers queue."""
REPLICAS_TIMEOUT_MS = 2000
FENCE_TTL_MS = 60_000


class TooFewReplicas(RedisError):
    """A job is written, but not on as many replicas as the URL asks for."""


class Connection:
    """Redis as the producer uses it."""

    def __init__(self, url: str, *, patience_s: float) -> None:
        """`patience_s`: how long `retry` keeps trying. Raises `QueueUnavailable` for a bad URL."""
        self.where = mask_url(url)
        self.patience_s = patience_s
        try:
            self.url = parse_url(url)
            self.redis = open_client(self.url)
            self.reader = open_client(self.url)
        except BadRedisUrl as error:
            raise QueueUnavailable(f"{self.where} is not a Redis URL: {error}") from error
        self._calls = asyncio.Semaphore(MAX_CALLS)
        self._scripts: dict[str, AsyncScript] = {}

    def script(self, name: str) -> AsyncScript:
        """One of the queue's scripts, to be called with ``keys`` and ``args``."""
        if name not in self._scripts:
            self._scripts[name] = self.redis.register_script(load_script(name))
        return self._scripts[name]

    @property
    def is_cluster(self) -> bool:
        return self.url.kind == "cluster"

    async def enqueue(self, *, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        """The answers of the enqueue script, once as many replicas as the URL asks for have what
        it wrote. Raises `TooFewReplicas`, when it is written all the same."""
        script = self.script("enqueue")
        if not self.url.wait_replicas:
            return await script(keys=keys, args=args)
        for last in (False, True):
            # On one connection: a connection waits for its own writes only.
            async with self.redis.pipeline(transaction=False) as pipe:
                pipe.execute_command("EVALSHA", script.sha, len(keys), *keys, *args)
                # An attempt that finds its jobs written by an earlier one, over another connection,
                # would have no write of its own to wait for.
                pipe.set(FENCE, 1, px=FENCE_TTL_MS)
                pipe.execute_command("WAIT", self.url.wait_replicas, REPLICAS_TIMEOUT_MS)
                answers, fence, replicas = await pipe.execute(raise_on_error=False)
            if isinstance(answers, NoScriptError) and not last:
                await self.redis.script_load(script.script)
                continue
            for answer in (answers, fence, replicas):
                if isinstance(answer, Exception):
                    raise answer
            if replicas < self.url.wait_replicas:
                raise TooFewReplicas(
                    f"the jobs are written, but {replicas} of {self.url.wait_replicas} replicas"
                    f" confirmed it within {REPLICAS_TIMEOUT_MS} ms"
                )
            return answers
        raise AssertionError("the second turn returns or raises")

    async def retry(
        self, do: Callable[[bool], Awaitable[T]], *, patience_s: float | None = None
    ) -> T:
        """What `do` returns, tried again over a restart of Redis for `patience_s`.

        `do` is told whether an earlier attempt may have got through. Raises `QueueUnavailable`,
        after at most `patience_s`, or `CALL_TIMEOUT_S` where that is longer and the server hangs.
        """
        give_up_at = time.monotonic() + (self.patience_s if patience_s is None else patience_s)
        repeated = False
        for delay_s in backoff():
            left_s = give_up_at - time.monotonic()
            try:
                async with self._calls:
                    return await within(
                        do(repeated), min(left_s, CALL_TIMEOUT_S) if repeated else CALL_TIMEOUT_S
                    )
            except (RedisError, OSError) as error:
                await leave_replica(self.redis, error)
                passing = is_passing(error) or isinstance(error, TooFewReplicas)
                if not passing or time.monotonic() + delay_s > give_up_at:
                    raise self.explain(error) from error
            repeated = True
            await asyncio.sleep(delay_s)
        raise AssertionError("backoff() never ends")

    def explain(self, error: Exception) -> QueueUnavailable:
        """The error for a person: which server, what happened, what to do."""
        if isinstance(error, SentinelRefused):
            remedy = "has a Sentinel that refused the login", "Check `sentinel_password`."
        elif is_login_refused(error):
            remedy = "refused the login", "Check the user and the password in the URL."
        elif isinstance(error, ReadOnlyError):
            remedy = "is a read-only replica", "Use the URL of the primary."
        elif isinstance(error, TooFewReplicas):
            remedy = "has too few replicas", "Are they up, and is `wait_replicas` in the URL right?"
        elif isinstance(error, NoPermissionError) or "ACL failure" in str(error):
            remedy = "refused a command", "docs/redis.md lists what the user must be allowed."
        elif is_passing(error):
            remedy = "cannot be reached", "Is it running, and is the URL right?"
        elif isinstance(error, ResponseError) and "maxmemory" in str(error):
            remedy = "is full", "Raise its maxmemory, or wait until workers drained the queue."
        elif isinstance(error, ResponseError) and "MISCONF" in str(error):
            remedy = "cannot write to its disk", "Is that full? Its log says more."
        else:
            remedy = "refused a command", "Is it Redis 6.2 or newer, and are all commands allowed?"
        happened, advice = remedy
        what = str(error).rstrip(".") or type(error).__name__
        return QueueUnavailable(f"Redis at {self.where} {happened}: {what}. {advice}")

    async def aclose(self) -> None:
        await self.reader.aclose()
        await self.redis.aclose()
