"""Runs one claimed job the way arq does, hooks included, and answers it."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import msgspec
from arq.utils import ms_to_datetime
from arq.worker import Function, Retry, Worker

from tidemill_contracts.wire import (
    MAX_JOB_BYTES,
    ErrorCode,
    GenerationJob,
    GenerationResult,
    JobError,
    JobFailed,
    Try,
    decode_job,
)
from tidemill_contracts.wire.arq_format import (
    GENERATE,
    JobRecord,
    UndecodableRecord,
    decode_job_record,
    encode_result_record,
    error_of,
)
from tidemill_worker.checkpoints import Checkpoints
from tidemill_worker.functions import Context
from tidemill_worker.generator import EngineCrashed
from tidemill_worker.held import HeldJobs
from tidemill_worker.queue import Claim, Finished, JobQueue
from tidemill_worker.results import ResultWriter

logger = logging.getLogger("tidemill.worker")

_MANY_PLACES = 2048
"""Tokens and log probabilities in a result, from which on it is encoded beside the event loop."""


class JobRunner:
    """Gives every claimed job its one end: a result, an error, or back to the queue."""

    def __init__(
        self, worker: Worker, queue: JobQueue, results: ResultWriter, checkpoints: Checkpoints
    ) -> None:
        """`worker` has the functions, the hooks and the counters."""
        self._worker = worker
        self._queue = queue
        self._results = results
        self.held = HeldJobs(queue, worker.tasks, self._run, checkpoints)

    async def _run(self, job_id: str) -> None:
        claim = self.held.claims[job_id]
        started_ms = self._now_ms()
        record: JobRecord | None = None
        job: GenerationJob | None = None
        given_up: Try | None = None
        value: object
        try:
            record = self._open(claim)
            job = _generation(record)
            value = await self._call(claim, record, job)
            success = True
        except asyncio.CancelledError:
            if job_id in self.held.lost:
                logger.warning("⊘ %s was cancelled, or went to another worker", job_id)
                return
            raise
        except EngineCrashed:
            # The worker ends now, and hands this job back with all others.
            await asyncio.get_running_loop().create_future()
            raise
        except Retry as retry:
            delay_ms = retry.defer_score or 1
            logger.info("↻ %s again in %.2fs", job_id, delay_ms / 1000)
            self._worker.jobs_retried += 1
            ended = self._try(claim, f"asked to be run again in {delay_ms / 1000} s")
            await self.held.run_again(job_id, delay_ms=delay_ms, ended=ended)
            return
        except Exception as error:
            value = error_of(error)
            success = False
            if value.code == ErrorCode.MAX_TRIES_EXCEEDED:
                given_up = self._try(claim, value.message)
            if value.code == ErrorCode.INTERNAL.value:
                logger.exception("! %s failed", job_id)
        function = record.function if record else GENERATE
        enqueued_ms = record.enqueue_time_ms if record else started_ms
        finished_ms = self._now_ms()
        encode = partial(
            encode_result_record,
            value,
            success=success,
            job_id=job_id.encode(errors="replace").decode(),
            queue_name=self._queue.name,
            function=function,
            job_try=claim.tries,
            enqueue_time_ms=enqueued_ms,
            start_ms=started_ms,
            finish_ms=finished_ms,
            content=record.content if record else None,
        )
        self.held.finishing.add(job_id)
        # To compress megabytes takes longer than the event loop may stand still.
        result = await asyncio.to_thread(encode) if _is_large(value) else encode()
        written = await self._write(job_id, result, record, job, given_up)
        _log_end(job_id, (finished_ms - started_ms) / 1000, value, written)
        if written and success:
            self._worker.jobs_complete += 1
        elif written:
            self._worker.jobs_failed += 1
        if self._worker.after_job_end:
            await self._worker.after_job_end(self._context(claim, enqueued_ms))

    async def _write(
        self,
        job_id: str,
        result: bytes,
        record: JobRecord | None,
        job: GenerationJob | None,
        given_up: Try | None,
    ) -> bool:
        """Writes the result under whatever claim this worker has on the job; False where it has
        none any more."""
        reply_to = record.reply_to if record else None
        ttl_ms = int(job.result_ttl * 1000) if job and job.result_ttl else None
        while True:
            claim = self.held.claims[job_id]
            if await self._results.write(Finished(claim, result, reply_to, ttl_ms, given_up)):
                return True
            if self.held.claims[job_id] is claim:
                return False
            # After an outage the job was claimed again, by this worker, while the write waited.

    def _now_ms(self) -> int:
        """By Redis's clock."""
        return int(self._queue.clock() * 1000)

    def _try(self, claim: Claim, error: str) -> Try:
        return Try(
            number=claim.tries,
            worker=self._queue.worker,
            started_ms=claim.claimed_at_ms,
            ended_ms=self._now_ms(),
            error=error,
        )

    def _open(self, claim: Claim) -> JobRecord:
        """The claimed job's record. Raises `JobFailed` where it must not or cannot be run."""
        if claim.payload is None and claim.payload_bytes:
            raise JobFailed.of(
                ErrorCode.INVALID_JOB,
                f"The job's record has {claim.payload_bytes:,} bytes; a job may have"
                f" {MAX_JOB_BYTES:,} at most",
            )
        if claim.payload is None:
            raise JobFailed.of(ErrorCode.PAYLOAD_LOST, "Redis no longer holds the job's payload")
        try:
            record = decode_job_record(claim.payload)
        except UndecodableRecord as error:
            raise JobFailed.of(ErrorCode.UNDECODABLE, f"The payload is {error}") from error
        if claim.tries > self._worker.max_tries:
            raise JobFailed.of(
                ErrorCode.MAX_TRIES_EXCEEDED,
                f"The job was started {claim.tries - 1} times and never finished",
            )
        functions = self._worker.functions
        if record.function not in functions:
            raise JobFailed.of(
                ErrorCode.UNKNOWN_FUNCTION,
                f"This worker has no function {record.function!r}, only"
                f" {', '.join(sorted(functions))}",
            )
        return record

    async def _call(self, claim: Claim, record: JobRecord, job: GenerationJob | None) -> object:
        """What the job's function returns."""
        args: list[object]
        if job is not None:
            if job.deadline is not None and job.deadline * 1000 <= claim.claimed_at_ms:
                raise JobFailed.of(
                    ErrorCode.EXPIRED, "The deadline passed before a worker took the job"
                )
            args, kwargs = [job], {}
        else:
            args = [msgspec.msgpack.decode(arg) for arg in record.args]
            kwargs = {name: msgspec.msgpack.decode(arg) for name, arg in record.kwargs.items()}
        function = self._worker.functions[record.function]
        context = self._context(claim, record.enqueue_time_ms)
        logger.debug(
            "%6.2fs → %s:%s%s",
            max(0.0, claim.claimed_at_ms - record.enqueue_time_ms) / 1000,
            claim.id,
            record.function,
            f" try={claim.tries}" if claim.tries > 1 else "",
        )
        if self._worker.on_job_start:
            await self._worker.on_job_start(context)
        try:
            # A generation has its deadline; only other people's functions have arq's timeout.
            timeout_s = self._timeout_s(function)
            if timeout_s is None:
                return await function.coroutine(context, *args, **kwargs)
            async with asyncio.timeout(timeout_s):
                return await function.coroutine(context, *args, **kwargs)
        finally:
            if self._worker.on_job_end:
                await self._worker.on_job_end(context)

    def _timeout_s(self, function: Any) -> float | None:
        if isinstance(function, Function) and function.name == GENERATE:
            return function.timeout_s
        timeout_s: float | None = function.timeout_s
        return self._worker.job_timeout_s if timeout_s is None else timeout_s

    def _context(self, claim: Claim, enqueue_time_ms: int) -> Context:
        return {
            **self._worker.ctx,
            "job_id": claim.id,
            "job_try": claim.tries,
            "enqueue_time": ms_to_datetime(enqueue_time_ms),
            "score": claim.score,
            "progress": claim.progress,
        }


def _generation(record: JobRecord) -> GenerationJob | None:
    """The job of a record that has a generation as its one argument. Raises `InvalidMessage`."""
    if record.function == GENERATE and len(record.args) == 1 and not record.kwargs:
        return decode_job(bytes(record.args[0]))
    return None


def _is_large(value: object) -> bool:
    """Whether the result may have so many bytes that it will be compressed."""
    if not isinstance(value, GenerationResult):
        return False
    outputs = value.outputs or [value]
    places = sum(len(output.token_ids) + len(output.logprobs or []) for output in outputs)
    return places + len(value.prompt_logprobs or []) > _MANY_PLACES


def _log_end(job_id: str, seconds: float, value: object, written: bool) -> None:
    if not written:
        logger.warning("%6.2fs ⊘ %s has a result or an owner already", seconds, job_id)
    elif isinstance(value, GenerationResult):
        logger.info(
            "%6.2fs ← %s ● %s, %d + %d tokens",
            seconds,
            job_id,
            value.finish_reason,
            value.usage.prompt_tokens,
            value.usage.completion_tokens,
        )
    elif isinstance(value, JobError):
        logger.info("%6.2fs ! %s %s: %s", seconds, job_id, value.code, value.message)
    else:
        logger.info("%6.2fs ← %s", seconds, job_id)
