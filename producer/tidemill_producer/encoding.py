"""A job as the enqueue script takes it."""

from __future__ import annotations

import hashlib
import time
import uuid
from dataclasses import dataclass

import msgspec

from tidemill_contracts import keys
from tidemill_contracts.wire import GenerationJob, SamplingParams, convert_job
from tidemill_contracts.wire.arq_format import encode_job_record

MAX_DELAY_S = 366 * 24 * 3600


@dataclass(frozen=True, slots=True)
class EncodedJob:
    """What a job is in Redis, and where it goes."""

    id: str
    record: bytes
    priority: int
    due: str
    """``''`` at once, ``'+<ms>'`` so much later, or ms since the epoch."""
    tenant: str

    def arguments(self) -> tuple[str | bytes | int, ...]:
        return self.id, self.record, self.priority, self.due, self.tenant


def encode(job: GenerationJob, *, queue: str, reply_to: str, due: str = "") -> EncodedJob:
    """Gives the job an id where it has none, and the queue's hash tag. Raises `InvalidMessage`."""
    job_id = keys.tagged(uuid.uuid4().hex if job.id is None else job.id, queue)
    if job_id != job.id:
        job = msgspec.structs.replace(job, id=job_id)
    record = encode_job_record(job, enqueue_time_ms=int(time.time() * 1000), reply_to=reply_to)
    return EncodedJob(job_id, record, job.priority, due, job.tenant)


def to_job(job: GenerationJob | str | None, fields: dict[str, object]) -> GenerationJob:
    """The job that `Producer.enqueue` was given. Raises `InvalidMessage` and `TypeError`."""
    if isinstance(job, GenerationJob):
        if fields:
            raise TypeError(f"A GenerationJob takes no further fields, got {', '.join(fields)}")
        return job
    if job is not None:
        fields["prompt"] = job
    sampling = {
        name: fields.pop(name) for name in SamplingParams.__struct_fields__ if name in fields
    }
    if sampling:
        if "sampling" in fields:
            raise TypeError(f"Give `sampling` or {', '.join(sampling)}, not both")
        fields["sampling"] = sampling
    return convert_job(fields)


def with_key(job: GenerationJob, idempotency_key: str) -> GenerationJob:
    """The job under the id that belongs to the key: the same for whoever uses the key."""
    if job.id is not None:
        raise TypeError("Give a job an `id` or an `idempotency_key`, not both")
    digest = hashlib.blake2b(idempotency_key.encode(), digest_size=16).hexdigest()
    return msgspec.structs.replace(job, id=f"key-{digest}")


def due_of(delay: float | None, run_at: float | None) -> str:
    """When a job is due, for the script; `delay` in seconds, `run_at` since the epoch."""
    if delay is not None and run_at is not None:
        raise TypeError("Give `delay` or `run_at`, not both")
    if delay is not None:
        if not 0 <= delay <= MAX_DELAY_S:
            raise ValueError(f"Expected 0 <= `delay` <= {MAX_DELAY_S:,} s, got {delay}")
        return f"+{int(delay * 1000)}" if delay else ""
    if run_at is not None:
        if not 0 <= run_at <= time.time() + MAX_DELAY_S:
            raise ValueError(
                f"Expected `run_at` in seconds since the epoch, a year ahead at most, got {run_at}"
            )
        return str(int(run_at * 1000))
    return ""
