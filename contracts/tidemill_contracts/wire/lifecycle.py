"""Where a job is between its enqueuing and its one result, and what its tries came to."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from tidemill_contracts.wire.errors import ErrorCode, JobError


class JobState(StrEnum):
    """Where a job is. The last five are for good, but for a dead job that is queued again."""

    UNKNOWN = "unknown"
    """Never enqueued, or its result expired."""
    DEFERRED = "deferred"
    """It is not due yet."""
    QUEUED = "queued"
    RUNNING = "running"
    """A worker holds it."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """Its deadline passed before there was anything to answer."""
    DEAD = "dead"
    """Given up after too many tries; it is kept among the dead letters."""

    @classmethod
    def of(cls, error: JobError | None) -> JobState:
        """The state of a job that ended so."""
        if error is None:
            return cls.DONE
        return _STATES.get(error.code, cls.FAILED)


_STATES: dict[str, JobState] = {
    ErrorCode.CANCELLED: JobState.CANCELLED,
    ErrorCode.EXPIRED: JobState.EXPIRED,
    ErrorCode.MAX_TRIES_EXCEEDED: JobState.DEAD,
}


class Try(msgspec.Struct, frozen=True, kw_only=True):
    """One time that a job was started and did not end."""

    number: int
    worker: str
    """The worker's name."""
    started_ms: int
    """By Redis's clock, as is `ended_ms`."""
    ended_ms: int
    error: str
    """``worker_died``, or what the try ended with."""


encode_try = msgspec.msgpack.Encoder().encode
decode_try = msgspec.msgpack.Decoder(Try).decode
