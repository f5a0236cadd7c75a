"""What the worker knows of its connection to Redis: whether it answers, and since when not."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tidemill_contracts.connections import CALL_TIMEOUT_S, is_passing, leave_replica, within

logger = logging.getLogger("tidemill.worker")

T = TypeVar("T")

FORGET_S = 60.0
"""A refusal that nobody has met again for so long is over: whoever met it has given up."""


@dataclass(slots=True)
class Trouble:
    """One kind of call that fails."""

    since: float
    """Seconds since the Unix epoch, as is `last`."""
    last: float
    error: str
    unreachable: bool
    """No answer, or one from a server that is starting or changing roles; otherwise Redis refuses
    this kind of call: it is full, say, or cannot write to its disk."""

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).isoformat(timespec="seconds")
        return f"{'unreachable' if self.unreachable else 'refuses'} since {since}: {self.error}"


class RedisLink:
    """Bounds every call in time and notes how it ended. Logs where trouble begins and ends."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._troubles: dict[str, Trouble] = {}

    @property
    def trouble(self) -> Trouble | None:
        """What has been wrong for longest, if anything is."""
        recent = time.time() - FORGET_S
        troubles = (each for each in self._troubles.values() if each.last > recent)
        return min(troubles, key=lambda each: each.since, default=None)

    async def call(self, name: str, call: Awaitable[T], timeout_s: float = CALL_TIMEOUT_S) -> T:
        """What the call returns. Raises redis-py's errors, and `TimeoutError` where Redis hangs."""
        try:
            answer = await within(call, timeout_s)
        except (RedisError, OSError) as error:
            self._note(name, error)
            await leave_replica(self._redis, error)
            raise
        if self._troubles:
            self._clear(name)
        return answer

    def _note(self, name: str, error: Exception) -> None:
        now = time.time()
        what = str(error) or f"no answer ({type(error).__name__})"
        since = self._troubles[name].since if name in self._troubles else now
        first = self.trouble is None
        self._troubles[name] = Trouble(since, now, what, is_passing(error))
        if first:
            logger.warning(
                "Redis %s at %s: %s. What runs goes on, results are kept and tried again, and no"
                " job is claimed meanwhile",
                "is unreachable" if is_passing(error) else "refuses",
                name,
                what,
            )

    def _clear(self, name: str) -> None:
        """This kind of call works again; and if any works, Redis is reachable for all."""
        before = self.trouble
        self._troubles = {
            each: trouble
            for each, trouble in self._troubles.items()
            if each != name and not trouble.unreachable
        }
        if before is not None and self.trouble is None:
            logger.warning("Redis answers again after %.1fs", time.time() - before.since)
