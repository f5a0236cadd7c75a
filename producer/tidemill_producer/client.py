"""The producer: enqueue generation jobs, await their results.

    async with Producer("redis://127.0.0.1:6379/0") as producer:
        job = await producer.enqueue("The sea is", max_tokens=32)
        result = await job.result(timeout=60)

Not here yet: token streams, a client without asyncio.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, cast

import msgspec

from tidemill_contracts import keys
from tidemill_contracts.wire import (
    ErrorCode,
    GenerationJob,
    GenerationResult,
    InvalidMessage,
    JobError,
    Outcome,
)
from tidemill_contracts.wire.arq_format import encode_result_record
from tidemill_contracts.wire.job import JobId
from tidemill_contracts.wire.status import WorkerStatus
from tidemill_producer.dead import DeadLetters
from tidemill_producer.encoding import EncodedJob, due_of, encode, to_job, with_key
from tidemill_producer.errors import JobConflict, QueueFull, ResultTimeout, UnknownJob
from tidemill_producer.jobs import (
    Admission,
    Cancellation,
    JobHandle,
    JobStatus,
    QueueLimits,
    read_status,
)
from tidemill_producer.workers import jobs_per_second, worker_statuses

if TYPE_CHECKING:
    from redis.asyncio import Redis

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
DEFAULT_PATIENCE_S = 5.0
MAX_CALL_JOBS = 1000
MAX_CALL_BYTES = 4 * 1024 * 1024
"""One script call takes at most so much, unless a single job is larger: Redis serves nobody
else meanwhile."""
ROOM_WAIT_S = 0.2, 5.0
"""Least and longest wait before a full queue is tried again."""

_REFUSED = 5
_CONFLICT = 5
_FULL = {
    6: "as many jobs as its limit allows",
    7: "as many bytes of jobs as its limit allows",
    8: "as many jobs of this tenant as its limit allows",
}
_CANCELLATIONS = {
    0: Cancellation.UNKNOWN,
    1: Cancellation.CANCELLED,
    2: Cancellation.STOPPED,
    3: Cancellation.ENDED,
    4: Cancellation.ASKED,
}


class Producer:
    """Enqueues jobs and hears of their results. Use as an async context manager, or `aclose`.

    It belongs to one event loop; any number of tasks may share it. Redis is first contacted by
    the first call. Every method raises `QueueUnavailable` where Redis cannot be reached for
    `patience_s` seconds or refuses; results that are awaited already outlast any outage.

    On a Redis Cluster, and where the queue's name has a part in braces, ids begin with that part:
    it is put in front where it is missing.
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

        self._connection = Connection(redis_url, patience_s=patience_s)
        self.queue = keys.in_one_slot(queue) if self._connection.is_cluster else queue
        self._stream = keys.reply_key(keys.tagged(uuid.uuid4().hex, self.queue))
        self._replies = Replies(self._connection, self.queue, self._stream)
        self.dead = DeadLetters(self._connection, self.queue)
        """Jobs that were given up."""

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
        self,
        job: GenerationJob | str | None = None,
        /,
        *,
        idempotency_key: str | None = None,
        delay: float | None = None,
        run_at: float | None = None,
        **fields: object,
    ) -> JobHandle:
        """Enqueue one job, once per id.

        `job` is a `GenerationJob`, or a prompt with any fields of `GenerationJob` and
        `SamplingParams` as keywords; without either, `messages` or `prompt_token_ids` must be
        among the keywords. A job without an id gets one: of the `idempotency_key`, where there is
        one. Safe to repeat with the same id or key: the handle is then that of the first job.
        `delay` (seconds from now) or `run_at` (seconds since the epoch) says when the job is due,
        by Redis's clock; its deadline and its place count from then on as ever.

        Raises `InvalidMessage`, `JobConflict` where the id or key is that of another content,
        and `QueueFull`: in these cases nothing is written. And `QueueUnavailable`.
        """
        made = to_job(job, fields)
        if idempotency_key is not None:
            made = with_key(made, idempotency_key)
        encoded = self._encode(made, due_of(delay, run_at))
        (handle,) = [handle async for handle in self._enqueue([encoded], wait_for_room=False)]
        return handle

    async def enqueue_many(
        self,
        jobs: Iterable[GenerationJob | str] | AsyncIterable[GenerationJob | str],
        *,
        wait_for_room: bool = False,
    ) -> AsyncIterator[JobHandle]:
        """Enqueue many jobs, in order; iterate over the handles: ``async for job in …``.

        One call to Redis per thousand jobs (or 4 MB), made as the iteration goes on: `jobs` may
        be endless. At the first job that is refused raises what `enqueue` would, when all before
        it are enqueued and none after it. With `wait_for_room` a full queue is waited for.
        """
        chunk: list[EncodedJob] = []
        chunk_bytes = 0
        async for job in _aiter(jobs):
            try:
                encoded = self._encode(to_job(job, {}))
            except InvalidMessage:
                async for handle in self._enqueue(chunk, wait_for_room):
                    yield handle
                raise
            if chunk and (
                len(chunk) == MAX_CALL_JOBS or chunk_bytes + len(encoded.record) > MAX_CALL_BYTES
            ):
                async for handle in self._enqueue(chunk, wait_for_room):
                    yield handle
                chunk, chunk_bytes = [], 0
            chunk.append(encoded)
            chunk_bytes += len(encoded.record)
        async for handle in self._enqueue(chunk, wait_for_room):
            yield handle

    async def result(self, job_id: str, timeout: float | None = None) -> GenerationResult:
        """The job's result, once there is one; `timeout` in seconds.

        Raises `JobFailed` with the job's error, `ResultTimeout`, and `UnknownJob` where neither
        the job nor its result exists (or no longer).
        """
        return (await self.outcome(job_id, timeout)).unwrap()

    async def outcome(self, job_id: str, timeout: float | None = None) -> Outcome:
        """As `result`, with the job's error as a value."""
        job_id = self._full_id(job_id)
        try:
            async with asyncio.timeout(timeout):
                return await self._replies.outcome(job_id)
        except TimeoutError:
            raise ResultTimeout(
                f"Job {job_id} has no result after {timeout} s; it goes on, and its result can"
                " be awaited again"
            ) from None

    async def status(self, job_id: str) -> JobStatus:
        """Where the job is now, how often it was started, and when."""
        job_id = self._full_id(job_id)
        script = self._connection.script("inspect")
        now_ms, *answer = await self._connection.retry(
            lambda _: script(keys=[self.queue], args=[job_id])
        )
        return read_status(now_ms, answer)

    async def cancel(self, job_id: str) -> Cancellation:
        """End a job that nobody wants any more; whoever waits for it gets ``cancelled``.

        One that is queued or deferred will never run; a running one leaves its batch before the
        next step, and what it had is dropped. Safe to repeat, and at any time: there is one result
        in any case, this one or the worker's.
        """
        job_id = self._full_id(job_id)
        script = self._connection.script("cancel")
        now_ms = int(time.time() * 1000)
        record = encode_result_record(
            JobError.of(ErrorCode.CANCELLED, "The job was cancelled"),
            success=False,
            job_id=job_id,
            queue_name=self.queue,
            job_try=0,
            finish_ms=now_ms,
        )
        (answer,) = await self._connection.retry(
            lambda _: script(keys=[self.queue], args=[keys.RESULT_TTL_MS, job_id, record])
        )
        cancellation = _CANCELLATIONS[answer]
        if cancellation is Cancellation.ASKED:
            await self._connection.retry(
                lambda _: self.redis.zadd(keys.ARQ_ABORT, {job_id: now_ms})
            )
        return cancellation

    async def set_limits(self, limits: QueueLimits) -> None:
        """Limit what the queue holds, for all producers, until it is set again."""
        given = {name: n for name, n in msgspec.structs.asdict(limits).items() if n is not None}

        async def write(repeated: bool) -> None:
            key = keys.limits_key(self.queue)
            if given:
                await cast("Awaitable[int]", self.redis.hset(key, mapping=given))
            if others := set(QueueLimits.__struct_fields__) - given.keys():
                await cast("Awaitable[int]", self.redis.hdel(key, *others))

        await self._connection.retry(write)

    async def limits(self) -> QueueLimits:
        """What the queue holds at most."""

        async def read(repeated: bool) -> dict[bytes, bytes]:
            key = keys.limits_key(self.queue)
            return cast("dict[bytes, bytes]", await self.redis.hgetall(key))  # type: ignore[misc]

        raw = await self._connection.retry(read)
        found = {name.decode(): int(value) for name, value in raw.items()}
        return msgspec.convert(found, QueueLimits)

    async def forget(self, job_ids: Sequence[str]) -> None:
        """Delete the results of jobs that nobody will ask for again, before they expire."""
        if job_ids:
            result_keys = [keys.result_key(self._full_id(job_id)) for job_id in job_ids]
            await self._connection.retry(lambda _: self.redis.unlink(*result_keys))

    def _full_id(self, job_id: str) -> str:
        """Raises `UnknownJob` for what cannot be an id."""
        try:
            return msgspec.convert(keys.tagged(job_id, self.queue), JobId)
        except msgspec.ValidationError as error:
            raise UnknownJob(f"{job_id!r:.200} is not the id of a job: {error}") from None

    def _encode(self, job: GenerationJob, due: str = "") -> EncodedJob:
        return encode(job, queue=self.queue, reply_to=self._stream, due=due)

    async def _enqueue(
        self, jobs: Sequence[EncodedJob], wait_for_room: bool
    ) -> AsyncIterator[JobHandle]:
        """Handles of the jobs, written in one call unless the queue is full."""
        while jobs:
            answers, repeated = await self._write(jobs)
            for job, answer in zip(jobs, answers, strict=False):
                if answer < _REFUSED:
                    yield JobHandle(job.id, _admission(answer, repeated), self)
                    continue
                if answer == _CONFLICT:
                    raise JobConflict(
                        f"There is a job {job.id} already, and it asks for something else: use"
                        " another id, or idempotency key",
                        job_id=job.id,
                    )
                wanted = len(jobs) - len(answers) + 1
                wait_s = await self._expected_wait_s(wanted)
                if not wait_for_room:
                    raise QueueFull(
                        f"The queue {self.queue} holds {_FULL[answer]}; room is expected"
                        + (" at a time not known" if wait_s is None else f" in {wait_s:.1f} s"),
                        job_id=job.id,
                        expected_wait_s=wait_s,
                    )
                least, longest = ROOM_WAIT_S
                await asyncio.sleep(min(longest, max(least, wait_s or least)))
            jobs = jobs[len(answers) - (answers[-1] >= _REFUSED) :]

    async def _write(self, jobs: Sequence[EncodedJob]) -> tuple[list[int], bool]:
        """The script's answers, and whether an earlier attempt may have got through."""
        # The reply stream would grow for ever if nobody read it.
        self._replies.start()
        args: list[str | bytes | int] = [self._stream]
        for job in jobs:
            args += job.arguments()

        async def write(repeated: bool) -> tuple[list[int], bool]:
            return await self._connection.enqueue(keys=[self.queue], args=args), repeated

        return await self._connection.retry(write)

    async def _expected_wait_s(self, wanted: int) -> float | None:
        """Seconds until so many jobs have ended, by what the workers say."""
        rate = jobs_per_second(await self.workers())
        return wanted / rate if rate else None


def _admission(answer: int, repeated: bool) -> Admission:
    """The script's answer; one that was our own, earlier attempt counts as queued."""
    if answer == 1 or (answer == 4 and repeated):
        return Admission.QUEUED
    return Admission.FINISHED if answer == 2 else Admission.DUPLICATE


async def _aiter(
    jobs: Iterable[GenerationJob | str] | AsyncIterable[GenerationJob | str],
) -> AsyncIterator[GenerationJob | str]:
    if isinstance(jobs, AsyncIterable):
        async for job in jobs:
            yield job
    else:
        for job in jobs:
            yield job
