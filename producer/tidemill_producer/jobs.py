"""What a producer says of a job: what became of enqueuing or cancelling it, and where it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from tidemill_contracts.wire import GenerationResult, JobState, Outcome
from tidemill_contracts.wire.arq_format import decode_result_record, enqueue_time_of, error_in

if TYPE_CHECKING:
    from tidemill_producer.client import Producer


class Admission(StrEnum):
    """What became of an enqueue."""

    QUEUED = "queued"
    DUPLICATE = "duplicate"
    """A job of that id was queued or running already; nothing was written."""
    FINISHED = "finished"
    """The result of that id exists already; nothing was written."""


class Cancellation(StrEnum):
    """What became of a cancel."""

    CANCELLED = "cancelled"
    """It will not run; its result says ``cancelled``."""
    STOPPED = "stopped"
    """It ran: as `CANCELLED`, and its worker drops it before its next step."""
    ENDED = "ended"
    """It had its result already, which stays."""
    ASKED = "asked"
    """A stock arq worker runs it, and was asked to abort it; it may still finish."""
    UNKNOWN = "unknown"
    """There is no such job; nothing was written, and one of that id may come."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Where a job is. Times are seconds since the Unix epoch, ``None`` where not known."""

    state: JobState
    tries: int = 0
    """How often it was started, the present time included."""
    enqueued_at: float | None = None
    due_at: float | None = None
    """Of a deferred job."""
    started_at: float | None = None
    """Its present or last try."""
    finished_at: float | None = None
    worker: str | None = None
    """Who runs it."""


@dataclass(frozen=True, slots=True)
class JobHandle:
    """A job that was enqueued."""

    id: str
    admission: Admission
    _producer: Producer = field(repr=False)

    async def result(self, timeout: float | None = None) -> GenerationResult:
        """See `Producer.result`."""
        return await self._producer.result(self.id, timeout)

    async def outcome(self, timeout: float | None = None) -> Outcome:
        """See `Producer.outcome`."""
        return await self._producer.outcome(self.id, timeout)

    async def status(self) -> JobStatus:
        """See `Producer.status`."""
        return await self._producer.status(self.id)

    async def cancel(self) -> Cancellation:
        """See `Producer.cancel`."""
        return await self._producer.cancel(self.id)


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a queue holds at most, for all producers; ``None`` is no limit. Jobs that run count."""

    jobs: int | None = None
    bytes: int | None = None
    """Of job records, in Redis's memory."""
    tenant_jobs: int | None = None
    """Of each tenant that has a name."""


def read_status(now_ms: int, answer: Sequence[bytes | int | None]) -> JobStatus:
    """The status from what ``inspect.lua`` says of one job. Raises `UndecodableRecord`."""
    result, score, lease, holder, tries, suspect, in_lane, head, tail = answer
    if isinstance(result, bytes):
        record = decode_result_record(result)
        return JobStatus(
            state=JobState.of(error_in(record)),
            tries=record.job_try,
            enqueued_at=_seconds(record.enqueue_time_ms),
            started_at=_seconds(record.start_ms),
            finished_at=_seconds(record.finish_ms),
        )
    if score is None and lease is None:
        return JobStatus(state=JobState.UNKNOWN)
    assert isinstance(tries, int)
    assert isinstance(head, bytes)
    assert isinstance(tail, bytes)
    enqueued_at = _seconds(enqueue_time_of(head, tail) or 0)
    started_at, worker = None, None
    if isinstance(holder, bytes):
        _, _, claimed_ms, name = holder.decode(errors="replace").split(" ", 3)
        started_at, worker = _seconds(int(claimed_ms)), name
    if isinstance(lease, bytes) and float(lease) >= now_ms:
        return JobStatus(
            state=JobState.RUNNING,
            tries=tries,
            enqueued_at=enqueued_at,
            started_at=started_at,
            worker=worker,
        )
    assert isinstance(score, bytes)
    # What waits in a lane, or is suspect, stands a day late in arq's set.
    deferred = float(score) > now_ms and not (lease or suspect or in_lane)
    return JobStatus(
        state=JobState.DEFERRED if deferred else JobState.QUEUED,
        tries=tries,
        enqueued_at=enqueued_at,
        due_at=float(score) / 1000 if deferred else None,
        started_at=started_at,
    )


def _seconds(ms: int) -> float | None:
    return ms / 1000 if ms else None
