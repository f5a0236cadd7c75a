"""The jobs that a worker holds: their claims, the tasks that run them, and their leases."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine

from redis.exceptions import RedisError

from tidemill_contracts.connections import backoff
from tidemill_contracts.wire import Try
from tidemill_worker.checkpoints import Checkpoints
from tidemill_worker.queue import Claim, JobQueue, Release

logger = logging.getLogger("tidemill.worker")


class HeldJobs:
    """Starts a task for each claimed job and keeps the job's lease until the task ends."""

    def __init__(
        self,
        queue: JobQueue,
        tasks: dict[str, asyncio.Task[None]],
        run: Callable[[str], Coroutine[object, object, None]],
        checkpoints: Checkpoints,
    ) -> None:
        """`tasks`: where to keep the running tasks by job id; `run` answers a job, or gives it
        up."""
        self._queue = queue
        self._run = run
        self._checkpoints = checkpoints
        self.tasks = tasks
        self.claims: dict[str, Claim] = {}
        self.finishing: set[str] = set()
        """Jobs whose result is on its way to Redis: nothing stops them any more."""
        self.lost: set[str] = set()
        """Jobs that went to somebody else, whose tasks are being stopped."""
        self.task_ended = asyncio.Event()
        self.news = asyncio.Event()
        """Set when the last job has ended, whose counters somebody may wait for, or the worker
        drains; whoever tells of it clears it."""

    def start(self, claim: Claim) -> None:
        known = claim.id in self.tasks
        # A job that this worker still runs after its lease ran out goes on under the new one.
        self.claims[claim.id] = claim
        if known:
            return
        task = asyncio.create_task(self._run(claim.id), name=f"job {claim.id}")
        self.tasks[claim.id] = task

        def ended(_: asyncio.Task[None]) -> None:
            self.tasks.pop(claim.id, None)
            self.claims.pop(claim.id, None)
            self.finishing.discard(claim.id)
            self.lost.discard(claim.id)
            self.task_ended.set()
            if not self.tasks:
                self.news.set()

        task.add_done_callback(ended)

    @property
    def alone(self) -> bool:
        """Whether one of them is suspect: nothing may run beside it."""
        return any(claim.suspect and not self._is_spent(claim) for claim in self.claims.values())

    def _is_spent(self, claim: Claim) -> bool:
        return claim.tries > self._queue.max_tries

    def room(self, most: int) -> int:
        """How many jobs more may be claimed, of `most` that run. Those whose results are being
        written take no room, so that the next ones come meanwhile, up to as many again."""
        held = len(self.tasks)
        return min(most - (held - len(self.finishing)), 2 * most - held)

    async def checkpoint(self) -> None:
        """Keeps the progress of the jobs that are due for it."""
        await self._checkpoints.write(
            {id_: claim for id_, claim in self.claims.items() if id_ not in self.finishing}
        )

    async def renew(self) -> None:
        """Renews every lease in one call, and stops the jobs that are somebody else's by now."""
        if not self.claims:
            return
        for job_id in await self._queue.renew(list(self.claims.values())):
            task = self.tasks.get(job_id)
            if task is not None and job_id not in self.finishing:
                self.lost.add(job_id)
                task.cancel()

    async def run_again(self, job_id: str, *, delay_ms: int, ended: Try) -> None:
        """Hands a job back that asked to be run again; returns once Redis has it."""
        release = Release(self.claims[job_id], delay_ms=delay_ms, refund=False, ended=ended)
        for delay_s in backoff():
            try:
                await self._queue.release([release])
                return
            except (RedisError, OSError) as error:
                logger.debug("cannot hand %s back yet: %s", job_id, error)
            await asyncio.sleep(delay_s)

    async def release(self, job_ids: Collection[str]) -> None:
        """Hands jobs back, with what they have gained and the try, and stops them then."""
        await self._queue.release(self._releases(job_ids, refund=True))
        self._stop(job_ids)

    async def release_all(self, *, refund: bool) -> None:
        """Stops what still runs and hands it back at once, as often as it takes; results on their
        way are written. Without a refund the jobs' last tokens are not trusted either."""
        unfinished = self.claims.keys() - self.finishing
        releases = self._releases(unfinished, refund=refund)
        self._stop(unfinished)
        delays = backoff()
        while releases:
            try:
                released = await self._queue.release(releases)
            except (RedisError, OSError) as error:
                logger.debug("cannot hand %d jobs back yet: %s", len(releases), error)
                await asyncio.sleep(next(delays))
            else:
                logger.info("handed %d jobs back", released)
                break
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    def _releases(self, job_ids: Collection[str], *, refund: bool) -> list[Release]:
        claims = [self.claims[job_id] for job_id in job_ids if job_id not in self.finishing]
        return [
            Release(claim, refund=refund, piece=self._checkpoints.last(claim) if refund else None)
            for claim in claims
        ]

    def _stop(self, job_ids: Collection[str]) -> None:
        for job_id in job_ids:
            task = self.tasks.get(job_id)
            if task is not None and job_id not in self.finishing:
                task.cancel()
