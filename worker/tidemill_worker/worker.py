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
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any, cast

from arq.connections import ArqRedis
from arq.worker import Worker, func
from redis.exceptions import RedisError

from tidemill_contracts.connections import backoff, within
from tidemill_contracts.wire.arq_format import GENERATE, deserializer, serializer
from tidemill_contracts.wire.status import WorkerState
from tidemill_worker.arq_aborts import ArqAborts
from tidemill_worker.checkpoints import Checkpoints
from tidemill_worker.clock import RedisClock
from tidemill_worker.connect import connect
from tidemill_worker.functions import Context, generate, shutdown, startup
from tidemill_worker.generator import Generator
from tidemill_worker.heartbeat import Heartbeat
from tidemill_worker.queue import JobQueue
from tidemill_worker.results import ResultWriter
from tidemill_worker.running import JobRunner
from tidemill_worker.settings import WorkerConfig

if TYPE_CHECKING:
    from tidemill_worker.progress import Recorder

logger = logging.getLogger("tidemill.worker")

IDLE_WAIT_S = 1.0
"""How often an idle worker looks at a queue whose doorbell nobody rings, as stock arq clients
do not."""
HEARTBEAT_S = 2.0
RETRY_S = 0.5
"""How soon what is done every so often is tried again after Redis did not let it."""
MIN_HEARTBEAT_S = 0.3
CHECKPOINT_CHECK_S = 0.25
"""How often to look which jobs are due for a checkpoint."""
HEALTH_CHECK_INTERVAL_S = 10
ORDERS_WAIT_S = 10.0
ABORT_POLL_S = 1.0
"""How often a worker looks for what arq's `Job.abort` asks; `Producer.cancel` needs no looking."""
FINAL_WRITE_S = 5.0
"""How long a worker that stops keeps trying to hand jobs and results back to Redis."""


class TidemillWorker(Worker):
    """An arq worker that claims jobs in batches and holds them by leases."""

    def __init__(self, config: WorkerConfig, *, ctx: Context | None = None, **options: Any) -> None:
        self.config = config
        self.state: WorkerState = "loading"
        self.queue: JobQueue
        self.results: ResultWriter
        self.runner: JobRunner
        self._heartbeat: Heartbeat
        self._aborts: ArqAborts
        self._clock = RedisClock()
        self._drain = asyncio.Event()
        self._hand_back = asyncio.Event()
        super().__init__(
            **{
                "functions": [func(generate, name=GENERATE)],
                "on_startup": startup,
                "on_shutdown": shutdown,
                "health_check_interval": HEALTH_CHECK_INTERVAL_S,
                **options,
            },
            queue_name=config.queue,
            max_jobs=config.claim_limit,
            max_tries=config.max_tries,
            keep_result=config.result_ttl,
            burst=config.burst,
            job_serializer=serializer,
            job_deserializer=deserializer,
            ctx={**(ctx or {}), "config": config, "clock": self._clock},
        )

    async def main(self) -> None:
        """Start up, serve until told to drain, shut down."""
        if self._pool is None:
            self._pool = cast("ArqRedis", await connect(self.config))
        self.ctx["redis"] = self.pool
        self.queue = JobQueue(
            self.pool,
            self.queue_name,
            worker=self.config.name,
            lease_ms=self.config.lease_ms,
            result_ttl_ms=int(self.config.result_ttl * 1000),
            max_tries=self.config.max_tries,
            clock=self._clock,
        )
        self.results = ResultWriter(self.queue)
        checkpoints = Checkpoints(
            self.queue,
            self._recorder,
            tokens=self.config.checkpoint_tokens,
            seconds=self.config.checkpoint_s,
        )
        self.runner = JobRunner(self, self.queue, self.results, checkpoints)
        self._heartbeat = Heartbeat(self.pool, self.config, self._clock)
        self._aborts = ArqAborts(self.pool, self.queue_name, self.queue.result_ttl_ms)
        if self.on_startup:
            await self.on_startup(self.ctx)
        self.state = "ready"
        background = [
            asyncio.create_task(self.results.run(), name="write-results"),
            asyncio.create_task(self._every(self.config.lease_ms / 3000, self.runner.held.renew)),
            asyncio.create_task(self._every(CHECKPOINT_CHECK_S, self.runner.held.checkpoint)),
            asyncio.create_task(self._beat()),
            asyncio.create_task(self._drop_cancelled(), name="drop-cancelled"),
            asyncio.create_task(self._every(ABORT_POLL_S, self._cancel_for_arq)),
        ]
        serve = asyncio.create_task(self._serve(), name="serve")
        crashed: list[asyncio.Future[None]] = []
        if (batcher := self._generator) is not None:
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
                    self.runner.held.release_all(refund=self._drain.is_set()), FINAL_WRITE_S
                )
            with contextlib.suppress(TimeoutError, RedisError, OSError):
                await asyncio.wait_for(self._heartbeat.remove(), FINAL_WRITE_S)
            await _end(background)

    async def _serve(self) -> None:
        await self._claim_until_drained()
        if not self.tasks:
            return
        self.state = "draining"
        self.runner.held.news.set()
        logger.info(
            "draining: %d jobs run, at most %.0fs more", len(self.tasks), self.config.drain_timeout
        )
        release = asyncio.create_task(self._in_spite_of_redis(self._release_unstarted))
        hand_back = asyncio.create_task(self._hand_back.wait())
        running = asyncio.create_task(asyncio.wait(list(self.tasks.values())))
        await asyncio.wait(
            {hand_back, running},
            timeout=self.config.drain_timeout,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for task in (release, hand_back, running):
            task.cancel()

    async def _release_unstarted(self) -> None:
        """Hands back at once what waits for a place in the batch: another worker may have one."""
        unstarted = [
            job_id
            for job_id in self.tasks
            if (recorder := self._recorder(job_id)) is not None and not recorder.started
        ]
        if unstarted:
            await self.runner.held.release(unstarted)
            logger.info("handed %d jobs back that had not begun", len(unstarted))

    @property
    def _generator(self) -> Generator | None:
        """What start-up has put into the context; nothing where only other functions are served."""
        found: Generator | None = self.ctx.get("batcher")
        return found

    def _recorder(self, job_id: str) -> Recorder | None:
        batcher = self._generator
        return None if batcher is None else batcher.recorder(job_id)

    async def _claim_until_drained(self) -> None:
        held = self.runner.held
        delays, was_away = backoff(), False
        while not self._drain.is_set():
            if not self.results.flowing.is_set():
                await self._first_of(self.results.flowing.wait())
                was_away = True
                continue
            held.task_ended.clear()
            room = held.room(self.max_jobs)
            if room <= 0 or held.alone:
                await self._first_of(held.task_ended.wait())
                continue
            try:
                if was_away:
                    # Leases may have run out meanwhile: nobody shall take these jobs for suspects.
                    await held.renew()
                claimed = await self.queue.claim(room, held=len(self.tasks))
                for claim in claimed.claims:
                    held.start(claim)
                if claimed.empty_yourself:
                    await self._first_of(_within(held.task_ended.wait(), IDLE_WAIT_S))
                elif not claimed.claims:
                    if self.burst and not self.tasks and not await self.queue.depth():
                        return
                    wait_s = IDLE_WAIT_S
                    if claimed.next_due_ms is not None:
                        wait_s = min(wait_s, claimed.next_due_ms / 1000)
                    await self._first_of(self.queue.wait(wait_s))
                delays, was_away = backoff(), False
            except (RedisError, OSError) as error:
                was_away = True
                logger.debug("cannot claim jobs: %s", error)
                await self._first_of(asyncio.sleep(next(delays)))

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

    async def _drop_cancelled(self) -> None:
        """Stops jobs as soon as they are cancelled: their leases are gone by then."""
        delays = backoff()
        while True:
            try:
                if await self.queue.wait_for_orders(ORDERS_WAIT_S):
                    await self.runner.held.renew()
                delays = backoff()
            except (RedisError, OSError) as error:
                logger.debug("cannot listen for orders: %s", error)
                await asyncio.sleep(next(delays))

    async def _cancel_for_arq(self) -> None:
        await self.queue.link.call("aborts", self._aborts.carry_out())

    async def _every(self, seconds: float, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            worked = await self._in_spite_of_redis(action)
            await asyncio.sleep(seconds if worked else min(seconds, RETRY_S))

    async def _in_spite_of_redis(self, action: Callable[[], Awaitable[None]]) -> bool:
        """Does it; False where Redis does not let it, since the next time will try again."""
        try:
            await action()
        except (RedisError, OSError) as error:
            logger.debug("%s: %s", getattr(action, "__name__", "action").strip("_"), error)
            return False
        return True

    async def _beat(self) -> None:
        """Heartbeats, and one more soon after there is news."""
        news = self.runner.held.news
        while True:
            await self._in_spite_of_redis(self._tell_status)
            await asyncio.sleep(MIN_HEARTBEAT_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S - MIN_HEARTBEAT_S):
                    await news.wait()
            news.clear()

    async def _tell_status(self) -> None:
        await within(self.heart_beat())
        if (batcher := self._generator) is not None:
            trouble = self.queue.link.trouble
            write = self._heartbeat.write(
                batcher.figures,
                self.state,
                jobs_done=self.jobs_complete,
                jobs_failed=self.jobs_failed,
                results_held=self.results.unwritten,
                redis="ok" if trouble is None else str(trouble),
            )
            await self.queue.link.call("heartbeat", write)

    def handle_sig(self, signum: signal.Signals) -> None:
        """The first signal drains the worker, the second hands back at once what it holds."""
        if self._drain.is_set():
            self._hand_back.set()
        self._drain.set()
        if self.state == "loading" and self.main_task is not None:
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


async def _end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancels tasks, as often as it takes: one that waits with a timeout may lose a cancellation
    in Python 3.11."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.5)
    await asyncio.gather(*tasks, return_exceptions=True)


async def _within(awaitable: Awaitable[object], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await awaitable
