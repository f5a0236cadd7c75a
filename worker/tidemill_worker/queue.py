"""The worker's side of the queue: claim, renew, finish, release, as scripts on arq's sorted set.

A claim moves a job's score to *now + lease*, so that neither other workers nor stock arq see
it, and notes a token. Only the holder of the token can renew, finish or release the job. All
times are Redis's own.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from redis.asyncio import Redis

from tidemill_contracts import keys
from tidemill_contracts.scripts import load_script


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that this worker holds."""

    id: str
    token: str
    score: float
    """Where it stood in the queue, in ms; it returns there when it is handed back."""
    tries: int
    """How often it has been claimed, this time included."""
    payload: bytes | None
    """The job record; ``None`` where Redis has lost it."""
    claimed_at_ms: int
    """Redis's clock."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A result to be written."""

    claim: Claim
    record: bytes
    reply_to: str | None


@dataclass(frozen=True, slots=True)
class Release:
    """A job to be handed back."""

    claim: Claim
    delay_ms: int = 0
    """0 puts it back where it stood."""
    refund: bool = True
    """Whether this try counts as none."""


class JobQueue:
    """One queue, seen by one worker. Every method raises redis-py's own errors."""

    def __init__(
        self,
        redis: Redis,
        queue: str = keys.DEFAULT_QUEUE,
        *,
        lease_ms: int = 15_000,
        result_ttl_ms: int = keys.RESULT_TTL_MS,
    ) -> None:
        self.redis = redis
        self.name = queue
        self.lease_ms = lease_ms
        self.result_ttl_ms = result_ttl_ms
        self._leases = keys.leases_key(queue)
        self._doorbell = keys.doorbell_key(queue)
        self._claim = redis.register_script(load_script("claim"))
        self._renew = redis.register_script(load_script("renew"))
        self._finish = redis.register_script(load_script("finish"))
        self._release = redis.register_script(load_script("release"))

    async def claim(self, limit: int) -> tuple[list[Claim], int | None]:
        """Takes up to `limit` due jobs, those of dead workers first.

        Returns them and the ms until the next job is due, ``None`` where there is none.
        """
        token = uuid.uuid4().hex
        reply = await self._claim(
            keys=[self.name, self._leases, self._doorbell],
            args=[
                limit,
                self.lease_ms,
                token,
                keys.RETRY_TTL_MS,
                keys.JOB_PREFIX,
                keys.IN_PROGRESS_PREFIX,
                keys.RETRY_PREFIX,
            ],
        )
        now, next_due = int(reply[0]), int(reply[1])
        claims = [
            Claim(
                # An id that is not UTF-8 can be finished all the same: it goes back as it came.
                id=reply[i].decode(errors="surrogateescape"),
                token=token,
                score=float(reply[i + 1]),
                tries=int(reply[i + 2]),
                payload=cast("bytes | None", reply[i + 3]),
                claimed_at_ms=now,
            )
            for i in range(2, len(reply), 4)
        ]
        return claims, None if next_due < 0 else next_due

    async def wait(self, timeout_s: float) -> None:
        """Sleeps until somebody rings the doorbell, for at most `timeout_s`."""
        # Redis refuses a timeout of 0.0 (it means for ever) and rounds below a millisecond.
        timeout = max(timeout_s, 0.01)
        await self.redis.execute_command(  # type: ignore[no-untyped-call]
            "BLPOP", self._doorbell, timeout
        )

    async def renew(self, claims: Iterable[Claim]) -> set[str]:
        """Renews the leases in one call. Returns the ids that are no longer this worker's."""
        args: list[str | bytes | int] = [self.lease_ms, keys.IN_PROGRESS_PREFIX]
        for claim in claims:
            args += [_raw(claim.id), claim.token]
        lost = await self._renew(keys=[self.name, self._leases], args=args)
        return {job_id.decode(errors="surrogateescape") for job_id in lost}

    async def finish(self, finished: Sequence[Finished]) -> list[bool]:
        """Writes results, each once. False where another worker's result stands already."""
        args: list[str | bytes | int] = [
            self.result_ttl_ms,
            keys.REPLY_TTL_MS,
            keys.JOB_PREFIX,
            keys.IN_PROGRESS_PREFIX,
            keys.RETRY_PREFIX,
            keys.RESULT_PREFIX,
            keys.WAITERS_PREFIX,
        ]
        for item in finished:
            args += [_raw(item.claim.id), item.claim.token, item.record, item.reply_to or ""]
        written = await self._finish(keys=[self.name, self._leases], args=args)
        return [flag == 1 for flag in written]

    async def release(self, releases: Sequence[Release]) -> int:
        """Hands jobs back. Returns how many of them were still this worker's."""
        args: list[str | bytes | int | float] = [keys.IN_PROGRESS_PREFIX, keys.RETRY_PREFIX]
        for item in releases:
            claim = item.claim
            args += [
                _raw(claim.id), claim.token, claim.score, item.delay_ms, 1 if item.refund else 0
            ]  # fmt: skip
        return int(await self._release(keys=[self.name, self._leases, self._doorbell], args=args))

    async def depth(self) -> int:
        """Jobs in the queue, those that run included."""
        return int(await self.redis.zcard(self.name))


def _raw(job_id: str) -> bytes:
    return job_id.encode(errors="surrogateescape")
