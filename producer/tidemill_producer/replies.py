"""Hearing of results: one reader for every job that somebody here waits for.

A worker that finishes a job writes the job's id to the reply stream of each producer that asked.
The reader blocks on that stream, fetches the results of the ids that are waited for, and deletes
what it read; the other ids (nobody waits) cost nothing more. A waiter first registers with one
script call, shared by all who came at the same time, which also finds results that are there
already. Should a stream entry get lost, a sweep asks again for every waiter now and then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from functools import partial
from itertools import islice

from redis.exceptions import RedisError

from tidemill_contracts import keys
from tidemill_contracts.connections import backoff, leave_replica, within
from tidemill_contracts.wire import Outcome, TidemillError
from tidemill_contracts.wire.arq_format import decode_outcome
from tidemill_producer.connection import Connection
from tidemill_producer.errors import QueueUnavailable, UnknownJob

log = logging.getLogger("tidemill.producer")

BLOCK_MS = 1000
READ_ENTRIES = 500
"""Stream entries taken at once."""
FETCH_IDS = 100
"""Results fetched, or jobs watched, in one call: each may hold megabytes."""
CLOSE_TIMEOUT_S = 1.0
SWEEP_S = 3.0
SWEEP_IDS = 500
SWEEPS_PER_ROUND = 10
"""With many waiters each is asked for again every ``SWEEP_S · SWEEPS_PER_ROUND`` seconds."""

Waiters = set["asyncio.Future[Outcome]"]


class Replies:
    """Who waits for which job. The tasks start with the first call of `start`."""

    def __init__(self, connection: Connection, queue: str, stream: str) -> None:
        self._connection = connection
        self._queue = queue
        self._stream = stream
        self._waiting: dict[str, Waiters] = {}
        """In the order in which the sweep comes to them."""
        self._unwatched: dict[str, None] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    def start(self) -> None:
        """Start the reader and the sweep. Does nothing the second time."""
        if not self._tasks and not self._closed:
            self._tasks = [self._spawn(self._read()), self._spawn(self._sweep())]

    async def outcome(self, job_id: str) -> Outcome:
        """How the job ended, once it has. Raises `UnknownJob` and `QueueUnavailable`.

        A connection that is lost once the job is registered is waited out.
        """
        if self._closed:
            raise QueueUnavailable("The producer is closed")
        self.start()
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        waiters = self._waiting.setdefault(job_id, set())
        if not waiters:
            self._watch_soon([job_id])
        waiters.add(future)
        try:
            return await future
        finally:
            waiters.discard(future)
            if not waiters and self._waiting.get(job_id) is waiters:
                del self._waiting[job_id]

    async def aclose(self) -> None:
        """Stop listening; whoever still waits gets `QueueUnavailable`. Deletes the stream."""
        self._closed = True
        tasks = [*self._tasks, *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail(list(self._waiting), QueueUnavailable("The producer was closed"))
        if self._tasks:
            try:
                await within(self._connection.redis.delete(self._stream), CLOSE_TIMEOUT_S)
            except (RedisError, OSError) as error:
                log.debug("the reply stream is left to expire: %s", error)

    def _spawn(self, run: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(run, name="tidemill-replies")
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[None]) -> None:
        # These tasks survive every error of Redis; anything else is a fault that waiters must see.
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(list(self._waiting), error)

    async def _read(self) -> None:
        last_id, delays, lost = "0", backoff(), False
        while not self._closed:
            try:
                entries = await self._entries(last_id)
                if lost:
                    log.warning("Redis at %s answers again.", self._connection.where)
                delays, lost = backoff(), False
                if not entries:
                    continue
                await self._fetch([job_id for _, job_id in entries])
                await self._forget([entry_id for entry_id, _ in entries])
                last_id = entries[-1][0]
            except (RedisError, OSError) as error:
                if not lost:
                    log.warning("%s Retrying.", self._connection.explain(error))
                lost, last_id = True, "0"
                await leave_replica(self._connection.reader, error)
                await asyncio.sleep(next(delays))

    async def _entries(self, last_id: str) -> list[tuple[str, str]]:
        """Stream entries after `last_id`, as (entry id, job id)."""
        streams = await within(
            self._connection.reader.xread(
                {self._stream: last_id}, count=READ_ENTRIES, block=BLOCK_MS
            )
        )
        return [
            (entry_id.decode(), fields.get(b"id", b"").decode(errors="replace"))
            for _, entries in streams
            for entry_id, fields in entries
        ]

    async def _fetch(self, job_ids: Iterable[str]) -> None:
        awaited = [job_id for job_id in dict.fromkeys(job_ids) if job_id in self._waiting]
        for some in _chunks(awaited):
            raws = await within(
                self._connection.reader.mget([keys.result_key(job_id) for job_id in some])
            )
            for job_id, raw in zip(some, raws, strict=True):
                if raw is not None:
                    self._settle(job_id, raw)
                else:
                    self._watch_soon([job_id])  # told, but no result: settles what became of it

    async def _forget(self, entry_ids: Sequence[str]) -> None:
        await within(self._connection.reader.xdel(self._stream, *entry_ids))
        await within(self._connection.reader.pexpire(self._stream, keys.REPLY_TTL_MS))

    async def _sweep(self) -> None:
        while not self._closed:
            await asyncio.sleep(SWEEP_S)
            count = max(SWEEP_IDS, len(self._waiting) // SWEEPS_PER_ROUND)
            job_ids = list(islice(self._waiting, count))
            for job_id in job_ids:
                self._waiting[job_id] = self._waiting.pop(job_id)
            try:
                for some in _chunks(job_ids):
                    await within(self._watch(some))
            except (RedisError, OSError) as error:
                log.debug("sweep put off: %s", error)  # the reader says so aloud

    def _watch_soon(self, job_ids: Iterable[str]) -> None:
        self._unwatched.update(dict.fromkeys(job_ids))
        if self._watcher is None:
            self._watcher = self._spawn(self._watch_all())

    async def _watch_all(self) -> None:
        try:
            while self._unwatched:
                some = list(islice(self._unwatched, FETCH_IDS))
                await self._connection.retry(partial(self._watch, some))
                for job_id in some:
                    self._unwatched.pop(job_id, None)
        except QueueUnavailable as error:
            self._fail(list(self._unwatched), error)
            self._unwatched.clear()
        finally:
            self._watcher = None

    async def _watch(self, job_ids: Sequence[str], repeated: bool = False) -> None:
        answers = await self._connection.script("watch")(
            keys=[self._queue], args=[self._stream, *job_ids]
        )
        for job_id, answer in zip(job_ids, answers, strict=True):
            if isinstance(answer, bytes):
                self._settle(job_id, answer)
            elif answer == 0:
                self._fail([job_id], _unknown(job_id))

    def _settle(self, job_id: str, raw: bytes) -> None:
        if job_id not in self._waiting:
            return
        try:
            outcome = decode_outcome(raw, job_id)
        except TidemillError as error:
            self._fail([job_id], error)
            return
        for future in self._waiting.pop(job_id):
            if not future.done():
                future.set_result(outcome)

    def _fail(self, job_ids: Iterable[str], error: BaseException) -> None:
        for job_id in job_ids:
            for future in self._waiting.pop(job_id, ()):
                if not future.done():
                    future.set_exception(error)


def _chunks(job_ids: Sequence[str]) -> Iterable[Sequence[str]]:
    return (job_ids[at : at + FETCH_IDS] for at in range(0, len(job_ids), FETCH_IDS))


def _unknown(job_id: str) -> UnknownJob:
    return UnknownJob(
        f"Neither job {job_id} nor its result is in Redis: it was never enqueued there, or its"
        " result expired"
    )
