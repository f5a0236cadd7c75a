"""The producer: enqueue generation jobs, await their results.

    async with Producer("redis://127.0.0.1:6379/0") as producer:
        job = await producer.enqueue("The sea is", max_tokens=32)
        result = await job.result(timeout=60)

Not here yet: token streams, cancelling a job, a client without asyncio.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from tidemill_contracts import keys
from tidemill_contracts.wire import (
    GenerationJob,
    GenerationResult,
    InvalidMessage,
    Outcome,
    SamplingParams,
    convert_job,
)
from tidemill_contracts.wire.arq_format import decode_outcome, encode_job_record
from tidemill_contracts.wire.job import JobId
from tidemill_contracts.wire.status import WorkerStatus
from tidemill_producer.errors import ResultTimeout, UnknownJob
from tidemill_producer.workers import worker_statuses

if TYPE_CHECKING:
    from redis.asyncio import Redis

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
DEFAULT_PATIENCE_S = 5.0
MAX_CALL_JOBS = 1000
MAX_CALL_BYTES = 4 * 1024 * 1024
"""One script call takes at most so much, unless a single job is larger: Redis serves nobody
else meanwhile."""


class Admission(StrEnum):
    """What became of an enqueue."""

    QUEUED = "queued"
    DUPLICATE = "duplicate"
    """A job of that id was queued or running already; nothing was written."""
    FINISHED = "finished"
    """The result of that id exists already; nothing was written."""


class JobStatus(StrEnum):
    """Where a job is."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"
    """Never enqueued, or its result expired."""


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


class Producer:
    """Enqueues jobs and hears of their results. Use as an async context manager, or `aclose`.

    It belongs to one event loop; any number of tasks may share it. Redis is first contacted by
    the first call. Every method raises `QueueUnavailable` where Redis cannot be reached for
    `patience_s` seconds or refuses; results that are awaited already outlast any outage.
    """

    def __init__(
        self,
        redis_url: str = DEFAULT_REDIS_URL,
        queue: str = keys.DEFAULT_QUEUE,
        *,
        patience_s: float = DEFAULT_PATIENCE_S,
    ) -> None:
        # redis-py takes longer to import than all the rest: services pay when they use it.
        from tidemill_producer.connection import Connection
        from tidemill_producer.replies import Replies

        self.queue = queue
        self._stream = keys.reply_key(uuid.uuid4().hex)
        self._connection = Connection(redis_url, patience_s=patience_s)
        self._replies = Replies(self._connection, self._stream)

    async def __aenter__(self) -> Producer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop listening and disconnect. Jobs go on, and their results can be fetched later."""
        await self._replies.aclose()
        await self._connection.aclose()

    @property
    def redis(self) -> Redis:
        """The redis-py client in use; answers are bytes."""
        return self._connection.redis

    @property
    def where(self) -> str:
        """The server's URL without its secrets."""
        return self._connection.where

    async def ping(self) -> None:
        """Return if Redis answers. Raises `QueueUnavailable` at once, without trying again."""
        await self._connection.retry(lambda _: self.redis.ping(), patience_s=0)

    async def workers(self) -> list[WorkerStatus]:
        """What the live workers of the queue last said of themselves."""
        return await self._connection.retry(lambda _: worker_statuses(self.redis, self.queue))

    async def enqueue(
        self, job: GenerationJob | str | None = None, /, **fields: object
    ) -> JobHandle:
        """Enqueue one job, once per id.

        `job` is a `GenerationJob`, or a prompt with any fields of `GenerationJob` and
        `SamplingParams` as keywords; without either, `messages` or `prompt_token_ids` must be
        among the keywords. A job without an id gets one. Safe to repeat with the same id.

        Raises `InvalidMessage` (nothing is written) and `QueueUnavailable`.
        """
        encoded = self._encode(_to_job(job, fields))
        (handle,) = await self._enqueue([encoded])
        return handle

    async def enqueue_many(
        self, jobs: Iterable[GenerationJob | str] | AsyncIterable[GenerationJob | str]
    ) -> AsyncIterator[JobHandle]:
        """Enqueue many jobs, in order; iterate over the handles: ``async for job in …``.

        One call to Redis per thousand jobs (or 4 MB), made as the iteration goes on: `jobs` may
        be endless. At the first job that breaks the contract raises `InvalidMessage`, when all
        before it are enqueued.
        """
        chunk: list[_Encoded] = []
        chunk_bytes = 0
        async for job in _aiter(jobs):
            try:
                encoded = self._encode(_to_job(job, {}))
            except InvalidMessage:
                for handle in await self._enqueue(chunk):
                    yield handle
                raise
            if chunk and (
                len(chunk) == MAX_CALL_JOBS or chunk_bytes + len(encoded.record) > MAX_CALL_BYTES
            ):
                for handle in await self._enqueue(chunk):
                    yield handle
                chunk, chunk_bytes = [], 0
            chunk.append(encoded)
            chunk_bytes += len(encoded.record)
        for handle in await self._enqueue(chunk):
            yield handle

    async def result(self, job_id: str, timeout: float | None = None) -> GenerationResult:
        """The job's result, once there is one; `timeout` in seconds.

        Raises `JobFailed` with the job's error, `ResultTimeout`, and `UnknownJob` where neither
        the job nor its result exists (or no longer).
        """
        return (await self.outcome(job_id, timeout)).unwrap()

    async def outcome(self, job_id: str, timeout: float | None = None) -> Outcome:
        """As `result`, with the job's error as a value."""
        _check_id(job_id)
        try:
            async with asyncio.timeout(timeout):
                return await self._replies.outcome(job_id)
        except TimeoutError:
            raise ResultTimeout(
                f"Job {job_id} has no result after {timeout} s; it goes on, and its result can"
                " be awaited again"
            ) from None

    async def status(self, job_id: str) -> JobStatus:
        """Where the job is now."""
        _check_id(job_id)

        async def look(repeated: bool) -> list[bytes | int | None]:
            async with self._connection.redis.pipeline(transaction=True) as pipe:
                pipe.get(keys.result_key(job_id))
                pipe.exists(keys.in_progress_key(job_id))
                pipe.exists(keys.job_key(job_id))
                answers: list[bytes | int | None] = await pipe.execute()
                return answers

        raw, in_progress, queued = await self._connection.retry(look)
        if isinstance(raw, bytes):
            failed = decode_outcome(raw, job_id).error is not None
            return JobStatus.FAILED if failed else JobStatus.DONE
        if not queued:
            return JobStatus.UNKNOWN
        return JobStatus.RUNNING if in_progress else JobStatus.QUEUED

    async def forget(self, job_ids: Sequence[str]) -> None:
        """Delete the results of jobs that nobody will ask for again, before they expire."""
        if job_ids:
            result_keys = [keys.result_key(job_id) for job_id in job_ids]
            await self._connection.retry(lambda _: self.redis.unlink(*result_keys))

    def _encode(self, job: GenerationJob) -> _Encoded:
        if job.id is None:
            job = msgspec.structs.replace(job, id=uuid.uuid4().hex)
        assert job.id is not None
        record = encode_job_record(
            job, enqueue_time_ms=int(time.time() * 1000), reply_to=self._stream
        )
        return _Encoded(job.id, record, job.priority * keys.PRIORITY_STEP_MS)

    async def _enqueue(self, jobs: Sequence[_Encoded]) -> list[JobHandle]:
        if not jobs:
            return []
        # The reply stream would grow for ever if nobody read it.
        self._replies.start()
        args: list[str | bytes | int] = [
            keys.JOB_PREFIX,
            keys.RESULT_PREFIX,
            keys.WAITERS_PREFIX,
            self._stream,
            keys.WAITERS_TTL_MS,
        ]
        for job in jobs:
            args += (job.id, job.record, job.head_start_ms)

        async def write(repeated: bool) -> list[Admission]:
            answers = await self._connection.enqueue_script(
                keys=[self.queue, keys.doorbell_key(self.queue)], args=args
            )
            return [_admission(answer, repeated) for answer in answers]

        admissions = await self._connection.retry(write)
        return [
            JobHandle(job.id, admission, self)
            for job, admission in zip(jobs, admissions, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A job as the enqueue script takes it."""

    id: str
    record: bytes
    head_start_ms: int


def _to_job(job: GenerationJob | str | None, fields: dict[str, object]) -> GenerationJob:
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


def _admission(answer: int, repeated: bool) -> Admission:
    """The script's answer; one that was our own, earlier attempt counts as queued."""
    if answer == 1 or (answer == 4 and repeated):
        return Admission.QUEUED
    return Admission.FINISHED if answer == 2 else Admission.DUPLICATE


def _check_id(job_id: str) -> None:
    try:
        msgspec.convert(job_id, JobId)
    except msgspec.ValidationError as error:
        raise UnknownJob(f"{job_id!r:.200} is not the id of a job: {error}") from None


async def _aiter(
    jobs: Iterable[GenerationJob | str] | AsyncIterable[GenerationJob | str],
) -> AsyncIterator[GenerationJob | str]:
    if isinstance(jobs, AsyncIterable):
        async for job in jobs:
            yield job
    else:
        for job in jobs:
            yield job
