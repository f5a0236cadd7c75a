"""The worker's side of the queue: claim, renew, finish, release, as scripts on arq's sorted set.

A claim moves a job's score to *now + lease*, so that neither other workers nor stock arq see
it, and notes a token. Only the holder of the token can renew, finish or release the job. All
times are Redis's own.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tidemill_contracts import keys
from tidemill_contracts.connections import CALL_TIMEOUT_S, is_passing
from tidemill_contracts.scripts import load_script
from tidemill_contracts.wire import MAX_JOB_BYTES
from tidemill_contracts.wire.lifecycle import Try, encode_try
from tidemill_worker.clock import RedisClock
from tidemill_worker.link import RedisLink

MIN_RENEW_TIMEOUT_S = 1.0
MAX_RECORD_BYTES = MAX_JOB_BYTES + 64 * 1024
"""Largest record that is worth fetching: no valid job has more."""
MAX_CLAIM_BYTES = 32 * 1024 * 1024
"""A claim takes no further job once it has so many bytes of them."""


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
    """The job record; ``None`` where Redis has lost it, or where it is too large to be fetched."""
    claimed_at_ms: int
    """Redis's clock."""
    progress: Sequence[bytes] = ()
    """How far other workers came: see `tidemill_contracts.wire.progress`."""
    payload_bytes: int = 0
    suspect: bool = False
    """Whether a worker died that had it: it runs alone."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a look at the queue gave."""

    claims: list[Claim]
    next_due_ms: int | None
    """Until the next job is due; ``None`` where there is none."""
    empty_yourself: bool = False
    """Suspects wait, and this worker shall take them once it holds nothing."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A result to be written."""

    claim: Claim
    record: bytes
    reply_to: str | None
    ttl_ms: int | None = None
    """How long it is kept; ``None`` for as long as this queue's results are."""
    given_up: Try | None = None
    """What the last try came to, where the job becomes a dead letter."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a job has gained since its last checkpoint."""

    claim: Claim
    after: int
    """How many pieces the checkpoint has; 0 begins it anew."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """A job to be handed back."""

    claim: Claim
    delay_ms: int = 0
    """0 puts it back where it stood."""
    refund: bool = True
    """Whether this try counts as none."""
    ended: Try | None = None
    """What this try came to, for the job's history."""
    piece: Piece | None = None


class JobQueue:
    """One queue, seen by one worker.

    Every method raises redis-py's own errors, and `TimeoutError` where Redis hangs. `link` says
    whether Redis answers.
    """

    def __init__(
        self,
        redis: Redis,
        queue: str = keys.DEFAULT_QUEUE,
        *,
        worker: str = "",
        lease_ms: int = 15_000,
        result_ttl_ms: int = keys.RESULT_TTL_MS,
        max_tries: int = 5,
        clock: RedisClock | None = None,
    ) -> None:
        """`clock` is told Redis's time with every claim."""
        self.redis = redis
        self.link = RedisLink(redis)
        self.name = queue
        self.worker = worker
        self.lease_ms = lease_ms
        self.result_ttl_ms = result_ttl_ms
        self.max_tries = max_tries
        self.clock = clock or RedisClock()
        self._instance = uuid.uuid4().hex
        self._doorbell = keys.doorbell_key(queue)
        self._orders = keys.orders_key(queue, self._instance)
        self._doubtful: str | None = None
        """The token of a claim whose answer was lost, and which may have got through."""
        self._adopt = redis.register_script(load_script("adopt"))
        self._claim = redis.register_script(load_script("claim"))
        self._renew = redis.register_script(load_script("renew"))
        self._checkpoint = redis.register_script(load_script("checkpoint"))
        self._finish = redis.register_script(load_script("finish"))
        self._release = redis.register_script(load_script("release"))

    async def claim(self, limit: int, *, held: int = 0) -> Claimed:
        """Takes up to `limit` due jobs, for a worker that holds `held` others.

        A suspect comes alone, and only where nothing is held. After a call whose answer was lost,
        first returns what that one took.
        """
        if self._doubtful is not None:
            token = self._doubtful
            adopt = self._adopt(keys=[self.name], args=[self.lease_ms, token, MAX_RECORD_BYTES])
            adopted = self._received(await self.link.call("claim", adopt), token)
            self._doubtful = None
            if adopted.claims:
                return adopted
        token = uuid.uuid4().hex
        claim = self._claim(
            keys=[self.name],
            args=[
                limit,
                self.lease_ms,
                token,
                self._instance,
                self.worker,
                held,
                self.max_tries,
                MAX_RECORD_BYTES,
                MAX_CLAIM_BYTES,
            ],
        )
        try:
            return self._received(await self.link.call("claim", claim), token)
        except (RedisError, OSError) as error:
            if is_passing(error):
                self._doubtful = token
            raise

    def _received(self, reply: list[Any], token: str) -> Claimed:
        self.clock.tell(int(reply[0]))
        return _claimed(reply, token)

    async def wait(self, timeout_s: float) -> None:
        """Sleeps until somebody rings the doorbell, for at most `timeout_s`."""
        await self._pop(self._doorbell, timeout_s)

    async def wait_for_orders(self, timeout_s: float) -> bool:
        """Sleeps until a job that this worker holds is cancelled, for at most `timeout_s`; says
        whether one was. `renew` tells which."""
        if not await self._pop(self._orders, timeout_s):
            return False
        await self.link.call("wait", self.redis.delete(self._orders))
        return True

    async def _pop(self, key: str, timeout_s: float) -> bool:
        # Redis refuses a timeout of 0.0 (it means for ever) and rounds below a millisecond.
        timeout = max(timeout_s, 0.01)
        pop = self.redis.execute_command("BLPOP", key, timeout)  # type: ignore[no-untyped-call]
        return await self.link.call("wait", pop, timeout + CALL_TIMEOUT_S) is not None

    async def renew(self, claims: Iterable[Claim]) -> set[str]:
        """Renews the leases in one call. Returns the ids that are no longer this worker's."""
        args: list[str | bytes | int] = [self.lease_ms]
        for claim in claims:
            args += [_raw(claim.id), claim.token]
        renew = self._renew(keys=[self.name], args=args)
        # So that a lease can be tried for again before it runs out.
        timeout_s = max(MIN_RENEW_TIMEOUT_S, self.lease_ms / 3000)
        lost = await self.link.call("renew", renew, timeout_s)
        return {job_id.decode(errors="surrogateescape") for job_id in lost}

    async def checkpoint(self, pieces: Sequence[Piece]) -> list[bool]:
        """Adds to jobs' progress. False where a job is no longer this worker's, or has other
        progress than this worker thinks."""
        args: list[str | bytes | int] = []
        for piece in pieces:
            args += [_raw(piece.claim.id), piece.claim.token, piece.after, piece.data]
        checkpoint = self._checkpoint(keys=[self.name], args=args)
        added = await self.link.call("checkpoint", checkpoint)
        return [flag == 1 for flag in added]

    async def finish(self, finished: Sequence[Finished]) -> list[bool]:
        """Writes results, each once. False where another result stands already, another worker's
        or that the job was cancelled."""
        args: list[str | bytes | int] = []
        for item in finished:
            args += [
                _raw(item.claim.id),
                item.claim.token,
                item.record,
                self.result_ttl_ms if item.ttl_ms is None else item.ttl_ms,
                item.reply_to or "",
                b"" if item.given_up is None else encode_try(item.given_up),
            ]
        written = await self.link.call("finish", self._finish(keys=[self.name], args=args))
        return [flag == 1 for flag in written]

    async def release(self, releases: Sequence[Release]) -> int:
        """Hands jobs back. Returns how many of them were still this worker's."""
        args: list[str | bytes | int | float] = []
        for item in releases:
            claim, piece = item.claim, item.piece
            args += [
                _raw(claim.id),
                claim.token,
                claim.score,
                item.delay_ms,
                int(item.refund),
                int(claim.suspect),
                b"" if item.ended is None else encode_try(item.ended),
                0 if piece is None else piece.after,
                b"" if piece is None else piece.data,
            ]
        release = self._release(keys=[self.name], args=args)
        return int(await self.link.call("release", release))

    async def depth(self) -> int:
        """Jobs in the queue, those that run included."""
        return int(await self.link.call("depth", self.redis.zcard(self.name)))


def _claimed(reply: list[Any], token: str) -> Claimed:
    now, next_due = int(reply[0]), int(reply[1])
    claims = []
    for i in range(3, len(reply), 6):
        job_id, score, tries, suspect, payload, progress = reply[i : i + 6]
        fetched = payload if isinstance(payload, bytes) else None
        claims.append(
            Claim(
                # An id that is not UTF-8 can be finished all the same: it goes back as it came.
                id=job_id.decode(errors="surrogateescape"),
                token=token,
                score=float(score),
                tries=int(tries),
                payload=fetched,
                claimed_at_ms=now,
                progress=progress,
                payload_bytes=int(payload or 0) if fetched is None else len(fetched),
                suspect=bool(suspect),
            )
        )
    return Claimed(claims, None if next_due < 0 else next_due, bool(reply[2]))


def _raw(job_id: str) -> bytes:
    return job_id.encode(errors="surrogateescape")
