"""Dead letters: jobs that were given up, with what their tries came to.

They are kept for thirty days from when they died, and may be queued again or dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec

from tidemill_contracts import keys
from tidemill_contracts.wire import GenerationJob, TidemillError, Try, decode_job
from tidemill_contracts.wire.arq_format import decode_job_record
from tidemill_contracts.wire.lifecycle import decode_try

if TYPE_CHECKING:
    from tidemill_producer.connection import Connection


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One job that was given up."""

    id: str
    died_at: float
    """Seconds since the Unix epoch, by Redis's clock."""
    history: list[Try]
    """Its tries, the oldest first, the last twenty at most."""
    record: bytes = field(repr=False)
    """As it was in the queue."""

    @property
    def job(self) -> GenerationJob | None:
        """What was asked for; ``None`` where the record cannot be read."""
        try:
            return decode_job(bytes(decode_job_record(self.record).args[0]))
        except (TidemillError, IndexError):
            return None


class DeadLetters:
    """The dead letters of one queue. Every method raises `QueueUnavailable`."""

    def __init__(self, connection: Connection, queue: str) -> None:
        self._connection = connection
        self._queue = queue

    async def count(self) -> int:
        return int(
            await self._connection.retry(
                lambda _: self._connection.redis.zcard(keys.dead_key(self._queue))
            )
        )

    async def ids(self, limit: int = 100, offset: int = 0) -> list[str]:
        """Those that died last come first."""
        key = keys.dead_key(self._queue)
        found = await self._connection.retry(
            lambda _: self._connection.redis.zrevrange(key, offset, offset + limit - 1)
        )
        return [raw.decode(errors="surrogateescape") for raw in found]

    async def get(self, job_id: str) -> DeadLetter | None:
        """The letter of one job, ``None`` where it is not dead (or no longer kept)."""

        async def read(repeated: bool) -> tuple[bytes | None, float | None, list[bytes]]:
            name, redis = self._raw(job_id), self._connection.redis
            history: list[bytes] = await cast(
                "Any", redis.lrange(cast("str", keys.DEAD_HISTORY_PREFIX.encode() + name), 0, -1)
            )
            died_ms = await redis.zscore(keys.dead_key(self._queue), name)
            # Last, so that a letter that is found was complete.
            return await redis.get(keys.DEAD_PREFIX.encode() + name), died_ms, history

        record, died_ms, history = await self._connection.retry(read)
        if record is None or died_ms is None:
            return None
        return DeadLetter(job_id, died_ms / 1000, _tries(history), record)

    async def list(self, limit: int = 100, offset: int = 0) -> Sequence[DeadLetter]:
        """Those that died last come first."""
        letters = [await self.get(job_id) for job_id in await self.ids(limit, offset)]
        return [letter for letter in letters if letter is not None]

    async def requeue(self, job_ids: Sequence[str]) -> dict[str, bool]:
        """Queue dead jobs again, as new jobs: their results and tries are forgotten.

        Says of each whether it was queued: not where it is not dead, nor where its id was
        enqueued anew since. Safe to repeat.
        """
        answers = await self._run("requeue", job_ids)
        return {job_id: flag == 1 for job_id, flag in zip(job_ids, answers, strict=True)}

    async def drop(self, job_ids: Sequence[str]) -> int:
        """Forget dead jobs; their results stay. Returns how many there were."""
        return int(await self._run("drop", job_ids) if job_ids else 0)

    async def _run(self, name: str, job_ids: Sequence[str]) -> Any:
        script = self._connection.script(name)
        ids = [self._raw(job_id) for job_id in job_ids]
        return await self._connection.retry(lambda _: script(keys=[self._queue], args=ids))

    def _raw(self, job_id: str) -> bytes:
        return keys.tagged(job_id, self._queue).encode(errors="surrogateescape")


def _tries(history: Sequence[bytes]) -> list[Try]:
    tries = []
    for raw in history:
        try:
            tries.append(decode_try(raw))
        except msgspec.DecodeError:
            continue
    return tries
