"""The worker: arq's, with its own way to pick jobs, hold them and answer them.

arq gives the job format, the settings, the hooks and the command line. What replaces its main
loop: jobs are claimed by one script call for as many as there is room for, an idle worker waits
at a doorbell instead of polling, leases are renewed while a job runs, results are written once,
and a Redis that goes away is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from arq.connections import RedisSettings, create_pool
from arq.utils import ms_to_datetime
from arq.worker import Function, Retry, Worker, func
from redis.exceptions import RedisError

from tidemill_contracts import keys
from tidemill_contracts.urls import mask_url
from tidemill_contracts.wire import (
    ErrorCode,
    GenerationResult,
    JobError,
    JobFailed,
    TidemillError,
    decode_job,
)
from tidemill_contracts.wire.arq_format import (
    GENERATE,
    JobRecord,
    UndecodableRecord,
    decode_job_record,
    deserializer,
    encode_result_record,
    error_of,
    serializer,
)
from tidemill_contracts.wire.status import WorkerState, WorkerStatus, encode_status
from tidemill_worker.batcher import Batcher
from tidemill_worker.functions import Context, generate, shutdown, startup
from tidemill_worker.queue import Claim, Finished, JobQueue, Release
from tidemill_worker.results import FIRST_BACK_OFF_S, MAX_BACK_OFF_S, ResultWriter
from tidemill_worker.settings import SettingsError, WorkerConfig

logger = logging.getLogger("tidemill.worker")

IDLE_WAIT_S = 1.0
"""How often an idle worker looks at a queue whose doorbell nobody rings, as stock arq clients
do not."""
HEARTBEAT_S = 2.0
MIN_HEARTBEAT_S = 0.3
STATUS_TTL_MS = 10_000
HEALTH_CHECK_INTERVAL_S = 10
FINAL_WRITE_S = 5.0
"""How long a worker that stops keeps trying to hand jobs and results back to Redis."""


class RedisUnreachable(TidemillError):
    """Redis does not answer when the worker starts."""


class TidemillWorker(Worker):
    """An arq worker that claims jobs in batches and holds them by leases."""

    def __init__(self, config: WorkerConfig, *, ctx: Context | None = None, **options: Any) -> None:
        self.config = config
        self.queue: JobQueue
        self._results: ResultWriter
        self._held: dict[str, Claim] = {}
        self._finishing: set[str] = set()
        self._lost: set[str] = set()
        self._task_ended = asyncio.Event()
        self._idle = asyncio.Event()
        self._drain = asyncio.Event()
        self._hand_back = asyncio.Event()
        self._state: WorkerState = "loading"
        self._started_at = time.time()
        super().__init__(
            **{
                "functions": [func(generate, name=GENERATE)],
                "on_startup": startup,
                "on_shutdown": shutdown,
                "health_check_interval": HEALTH_CHECK_INTERVAL_S,
                **options,
            },
            queue_name=config.queue,
            redis_settings=redis_settings(config),
            max_jobs=config.claim_limit,
            max_tries=config.max_tries,
            keep_result=config.result_ttl,
            burst=config.burst,
            job_serializer=serializer,
            job_deserializer=deserializer,
            ctx={**(ctx or {}), "config": config},
        )

    async def main(self) -> None:
        """Start up, serve until told to drain, shut down."""
        if self._pool is None:
            self._pool = await _connect(self.config)
        self.ctx["redis"] = self.pool
        self.queue = JobQueue(
            self.pool,
            self.queue_name,
            lease_ms=self.config.lease_ms,
            result_ttl_ms=int(self.config.result_ttl * 1000),
        )
        self._results = ResultWriter(self.queue)
        if self.on_startup:
            await self.on_startup(self.ctx)
        self._state = "ready"
        background = [
            asyncio.create_task(self._results.run(), name="write-results"),
            asyncio.create_task(self._every(self.config.lease_ms / 3000, self._renew)),
            asyncio.create_task(self._beat()),
        ]
        serve = asyncio.create_task(self._serve(), name="serve")
        crashed: list[asyncio.Future[None]] = []
        if isinstance(batcher := self.ctx.get("batcher"), Batcher):
            crashed.append(batcher.crashed)
        logger.info("ready, at most %d jobs at once from %s", self.max_jobs, self.queue_name)
        try:
            await asyncio.wait({serve, *background, *crashed}, return_when=asyncio.FIRST_COMPLETED)
            for ended in (*crashed, *background):
                if ended.done():
                    await ended  # raises what it failed with
            await serve
        finally:
            serve.cancel()
            with contextlib.suppress(TimeoutError, RedisError, OSError):
                # A worker that has crashed has spent the try; one that drains has not.
                await asyncio.wait_for(
                    self._release_all(refund=self._drain.is_set()), FINAL_WRITE_S
                )
            with contextlib.suppress(TimeoutError, RedisError, OSError):
                await asyncio.wait_for(self._say_goodbye(), FINAL_WRITE_S)
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)

    async def _serve(self) -> None:
        await self._claim_until_drained()
        if not self.tasks:
            return
        self._state = "draining"
        logger.info(
            "draining: %d jobs run, at most %.0fs more", len(self.tasks), self.config.drain_timeout
        )
        hand_back = asyncio.create_task(self._hand_back.wait())
        running = asyncio.create_task(asyncio.wait(list(self.tasks.values())))
        await asyncio.wait(
            {hand_back, running},
            timeout=self.config.drain_timeout,
            return_when=asyncio.FIRST_COMPLETED,
        )
        hand_back.cancel()
        running.cancel()

    async def _claim_until_drained(self) -> None:
        back_off = FIRST_BACK_OFF_S
        while not self._drain.is_set():
            self._task_ended.clear()
            room = self.max_jobs - len(self.tasks)
            if room <= 0:
                await self._first_of(self._task_ended.wait())
                continue
            try:
                claims, next_due_ms = await self.queue.claim(room)
                for claim in claims:
                    self._start(claim)
                if not claims:
                    if self.burst and not self.tasks and not await self.queue.depth():
                        return
                    wait_s = IDLE_WAIT_S
                    if next_due_ms is not None:
                        wait_s = min(wait_s, next_due_ms / 1000)
                    await self._first_of(self.queue.wait(wait_s))
                back_off = FIRST_BACK_OFF_S
            except (RedisError, OSError) as error:
                logger.warning("cannot claim jobs, next try in %.2fs: %s", back_off, error)
                await self._first_of(asyncio.sleep(back_off))
                back_off = min(back_off * 2, MAX_BACK_OFF_S)

    async def _first_of(self, awaitable: Awaitable[object]) -> None:
        """Awaits it, or the order to drain, whichever comes first."""
        waiting = asyncio.ensure_future(awaitable)
        drain = asyncio.create_task(self._drain.wait())
        try:
            await asyncio.wait({waiting, drain}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result()
        finally:
            for task in (waiting, drain):
                task.cancel()
            await asyncio.gather(waiting, drain, return_exceptions=True)

    def _start(self, claim: Claim) -> None:
        known = claim.id in self.tasks
        # A job that this worker still runs after its lease ran out goes on under the new one.
        self._held[claim.id] = claim
        if known:
            return
        task = asyncio.create_task(self._run_claim(claim.id), name=f"job {claim.id}")
        self.tasks[claim.id] = task

        def ended(_: asyncio.Task[None]) -> None:
            self.tasks.pop(claim.id, None)
            self._held.pop(claim.id, None)
            self._finishing.discard(claim.id)
            self._lost.discard(claim.id)
            self._task_ended.set()
            if not self.tasks:
                self._idle.set()

        task.add_done_callback(ended)

    async def _run_claim(self, job_id: str) -> None:
        """Runs a claimed job and answers it, or hands it back where it asks for that."""
        claim = self._held[job_id]
        started_ms = time.time_ns() // 1_000_000
        record: JobRecord | None = None
        value: object
        try:
            record = self._open(claim)
            value = await self._call(claim, record)
            success = True
        except asyncio.CancelledError:
            if job_id in self._lost:
                logger.warning("⊘ %s its lease went to another worker", job_id)
                return
            raise
        except Retry as retry:
            await self._retry(job_id, retry)
            return
        except Exception as error:
            value = error_of(error)
            success = False
            if value.code == ErrorCode.INTERNAL.value:
                logger.exception("! %s failed", job_id)
        function = record.function if record else GENERATE
        enqueued_ms = record.enqueue_time_ms if record else started_ms
        finished_ms = time.time_ns() // 1_000_000
        result = encode_result_record(
            value,
            success=success,
            job_id=job_id.encode(errors="replace").decode(),
            queue_name=self.queue_name,
            function=function,
            job_try=claim.tries,
            enqueue_time_ms=enqueued_ms,
            start_ms=started_ms,
            finish_ms=finished_ms,
        )
        written = await self._write(job_id, result, record.reply_to if record else None)
        self._log_end(job_id, (finished_ms - started_ms) / 1000, value, written)
        if success:
            self.jobs_complete += 1
        else:
            self.jobs_failed += 1
        if self.after_job_end:
            await self.after_job_end(self._job_context(claim, enqueued_ms))

    async def _write(self, job_id: str, result: bytes, reply_to: str | None) -> bool:
        """Writes the result under whatever claim this worker has on the job; False where it has
        none any more."""
        self._finishing.add(job_id)
        while True:
            claim = self._held[job_id]
            if await self._results.write(Finished(claim, result, reply_to)):
                return True
            if self._held[job_id] is claim:
                return False
            # After an outage the job was claimed again, by this worker, while the write waited.

    def _open(self, claim: Claim) -> JobRecord:
        """The claimed job's record. Raises `JobFailed` where it must not or cannot be run."""
        if claim.payload is None:
            raise JobFailed.of(ErrorCode.PAYLOAD_LOST, "Redis no longer holds the job's payload")
        try:
            record = decode_job_record(claim.payload)
        except UndecodableRecord as error:
            raise JobFailed.of(ErrorCode.UNDECODABLE, f"The payload is {error}") from error
        if claim.tries > self.max_tries:
            raise JobFailed.of(
                ErrorCode.MAX_TRIES_EXCEEDED,
                f"The job was started {claim.tries - 1} times and never finished",
            )
        if record.function not in self.functions:
            raise JobFailed.of(
                ErrorCode.UNKNOWN_FUNCTION,
                f"This worker has no function {record.function!r}, only"
                f" {', '.join(sorted(self.functions))}",
            )
        return record

    async def _call(self, claim: Claim, record: JobRecord) -> object:
        """What the job's function returns."""
        args: list[object]
        if record.function == GENERATE and len(record.args) == 1 and not record.kwargs:
            args, kwargs = [decode_job(bytes(record.args[0]))], {}
        else:
            args = [msgspec.msgpack.decode(arg) for arg in record.args]
            kwargs = {name: msgspec.msgpack.decode(arg) for name, arg in record.kwargs.items()}
        function = self.functions[record.function]
        context = self._job_context(claim, record.enqueue_time_ms)
        logger.debug(
            "%6.2fs → %s:%s%s",
            max(0.0, claim.claimed_at_ms - record.enqueue_time_ms) / 1000,
            claim.id,
            record.function,
            f" try={claim.tries}" if claim.tries > 1 else "",
        )
        if self.on_job_start:
            await self.on_job_start(context)
        try:
            # A generation has its deadline; only other people's functions have arq's timeout.
            async with asyncio.timeout(self._timeout_s(function)):
                return await function.coroutine(context, *args, **kwargs)
        finally:
            if self.on_job_end:
                await self.on_job_end(context)

    def _timeout_s(self, function: Any) -> float | None:
        if isinstance(function, Function) and function.name == GENERATE:
            return function.timeout_s
        timeout_s: float | None = function.timeout_s
        return self.job_timeout_s if timeout_s is None else timeout_s

    def _job_context(self, claim: Claim, enqueue_time_ms: int) -> Context:
        return {
            **self.ctx,
            "job_id": claim.id,
            "job_try": claim.tries,
            "enqueue_time": ms_to_datetime(enqueue_time_ms),
            "score": claim.score,
        }

    def _log_end(self, job_id: str, seconds: float, value: object, written: bool) -> None:
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

    async def _retry(self, job_id: str, retry: Retry) -> None:
        """Hands a job back that asked to be run again, later."""
        delay_ms = retry.defer_score or 1
        logger.info("↻ %s again in %.2fs", job_id, delay_ms / 1000)
        self.jobs_retried += 1
        release = Release(self._held[job_id], delay_ms=delay_ms, refund=False)
        while True:
            try:
                await self.queue.release([release])
                return
            except (RedisError, OSError) as error:
                logger.warning("cannot hand %s back yet: %s", job_id, error)
                await asyncio.sleep(MAX_BACK_OFF_S)

    async def _release_all(self, *, refund: bool) -> None:
        """Stops what still runs and hands it back at once; results on their way are written."""
        for job_id, task in self.tasks.items():
            if job_id not in self._finishing:
                task.cancel()
        unfinished = [claim for id_, claim in self._held.items() if id_ not in self._finishing]
        if unfinished:
            released = await self.queue.release([Release(c, refund=refund) for c in unfinished])
            logger.info("handed %d jobs back", released)
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def _every(self, seconds: float, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._logging_trouble(action)
            await asyncio.sleep(seconds)

    async def _logging_trouble(self, action: Callable[[], Awaitable[None]]) -> None:
        """Does it; Redis trouble is logged, since the next time will try again."""
        try:
            await action()
        except (RedisError, OSError) as error:
            name = getattr(action, "__name__", "action").strip("_")
            logger.warning("%s: %s", name, error)

    async def _beat(self) -> None:
        """Heartbeats, and one more soon after the last job has ended: whoever waited for it
        wants the counters with it."""
        while True:
            await self._logging_trouble(self._heartbeat)
            await asyncio.sleep(MIN_HEARTBEAT_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S - MIN_HEARTBEAT_S):
                    await self._idle.wait()
            self._idle.clear()

    async def _renew(self) -> None:
        if not self._held:
            return
        claims = list(self._held.values())
        for job_id in await self.queue.renew(claims):
            task = self.tasks.get(job_id)
            if task is not None and job_id not in self._finishing:
                self._lost.add(job_id)
                task.cancel()

    async def _heartbeat(self) -> None:
        await self.heart_beat()
        status = self._status()
        if status is None:
            return
        now_ms = int(status.updated_at * 1000)
        workers = keys.workers_key(self.queue_name)
        async with self.pool.pipeline(transaction=True) as pipe:
            pipe.set(
                keys.worker_key(self.queue_name, status.id),
                encode_status(status),
                px=STATUS_TTL_MS,
            )
            pipe.zadd(workers, {status.id: now_ms})
            pipe.zremrangebyscore(workers, "-inf", now_ms - 60_000)
            await pipe.execute()

    async def _say_goodbye(self) -> None:
        async with self.pool.pipeline(transaction=True) as pipe:
            pipe.delete(keys.worker_key(self.queue_name, self.config.name))
            pipe.zrem(keys.workers_key(self.queue_name), self.config.name)
            await pipe.execute()

    def _status(self) -> WorkerStatus | None:
        batcher = self.ctx.get("batcher")
        if not isinstance(batcher, Batcher):
            return None
        runtime, contract, stats = batcher.runner.runtime, batcher.runner.contract, batcher.stats
        return WorkerStatus(
            id=self.config.name,
            state=self._state,
            model=batcher.model_name,
            contract=f"{contract.model} {contract.abi_fingerprint()[:12]}",
            device=str(runtime.device),
            dtype=str(runtime.dtype).removeprefix("torch."),
            max_rows=self.config.max_rows,
            rows_running=batcher.rows_running,
            rows_waiting=batcher.rows_waiting,
            eta_s=batcher.eta_s,
            steps=stats.steps,
            row_steps=stats.row_steps,
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.completion_tokens,
            cached_tokens=stats.cached_tokens,
            jobs_done=self.jobs_complete,
            jobs_failed=self.jobs_failed,
            started_at=self._started_at,
            updated_at=time.time(),
        )

    def handle_sig(self, signum: signal.Signals) -> None:
        """The first signal drains the worker, the second hands back at once what it holds."""
        if self._drain.is_set():
            self._hand_back.set()
        self._drain.set()
        if self._state == "loading" and self.main_task is not None:
            self.main_task.cancel()
        if self.on_stop:
            self.on_stop(signum)

    async def close(self) -> None:
        """Releases what start-up took. The queue's health key stays: other workers live."""
        if self.on_shutdown:
            await self.on_shutdown(self.ctx)
        if self._pool is not None:
            await self._pool.aclose()
            self._pool = None


def redis_settings(config: WorkerConfig) -> RedisSettings:
    """arq's settings for the configured URL, which is not tried yet. Raises `SettingsError`."""
    try:
        return RedisSettings.from_dsn(config.redis_url)
    except (RuntimeError, ValueError) as error:
        raise SettingsError(
            f"redis_url: {mask_url(config.redis_url)} is not a redis://, rediss:// or unix://"
            f" URL: {error}"
        ) from error


async def _connect(config: WorkerConfig) -> Any:
    try:
        return await create_pool(
            redis_settings(config),
            job_serializer=serializer,
            job_deserializer=deserializer,
            default_queue_name=config.queue,
        )
    except (RedisError, OSError) as error:
        raise RedisUnreachable(
            f"Redis does not answer at {mask_url(config.redis_url)}: {error}. Start it, or give"
            " its URL with --redis or TIDEMILL_REDIS_URL"
        ) from error
