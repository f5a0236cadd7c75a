"""A whole run: what it needs is started, the file goes through, everything is ended again.

Exit status: 0 all rows ok, 3 some failed, 128 + signal when interrupted. A run that cannot start,
or is given up, raises; rows that are written stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

from rich.console import Console

from tidemill_contracts.wire import TidemillError
from tidemill_contracts.wire.status import WorkerStatus
from tidemill_producer.batch.config import STREAM, BatchConfig
from tidemill_producer.batch.formats.choose import rows_and_format
from tidemill_producer.batch.formats.streams import open_input
from tidemill_producer.batch.output import OutputFile
from tidemill_producer.batch.progress import Progress, make_progress
from tidemill_producer.batch.rows import count_rows
from tidemill_producer.batch.runner import BatchRun
from tidemill_producer.batch.summary import print_summary
from tidemill_producer.batch.tally import Tally, batch_occupancy
from tidemill_producer.batch.tasks import in_daemon_thread, task_group
from tidemill_producer.client import Producer
from tidemill_producer.embedded import EmbeddedRedis, EmbeddedWorker
from tidemill_producer.errors import BatchError, EmbeddedFailed

OUTAGE_LIMIT_S = 300.0
"""A run is given up when Redis stays away for longer."""
NO_WORKER_AFTER_S = 5.0
WATCH_PERIOD_S = 1.0
STATUS_WAIT_S = 2.0
"""Workers write their counters every second or so."""
INTERRUPTED_GRACE_S = 3.0
"""Nobody will read what an embedded worker could still finish."""
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")

EXIT_OK = 0
EXIT_ROWS_FAILED = 3


def run_batch(config: BatchConfig) -> int:
    """Run the file; returns the exit status. Raises `TidemillError` where it cannot be run."""
    console = Console(stderr=True)
    progress = make_progress(console, quiet=config.quiet)
    session = BatchSession(config, progress)
    try:
        status = asyncio.run(session.run())
    finally:
        progress.close()
    if not config.quiet:
        print_summary(console, session.tally)
    return status


class BatchSession:
    """One run of one file."""

    def __init__(self, config: BatchConfig, progress: Progress) -> None:
        self.config = config
        self.tally = Tally()
        self._progress = progress
        self._run: BatchRun | None = None
        self._server: EmbeddedRedis | None = None
        self._worker: EmbeddedWorker | None = None
        self._signal: int | None = None

    async def run(self) -> int:
        """Until the file is done or somebody stops it; returns the exit status."""
        work = asyncio.ensure_future(self._work())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number, work)
        with _log_as_notes(self._progress):
            try:
                await work
            except asyncio.CancelledError:
                if self._signal is None:
                    raise
                self._progress.note(f"Interrupted. {self._what_there_is()}")
                return 128 + self._signal
            except TidemillError:
                if self._run is not None:
                    self._progress.note(f"Given up. {self._what_there_is()}")
                raise
            finally:
                self.tally.ended = self.tally.ended or time.monotonic()
        return EXIT_ROWS_FAILED if self.tally.failed else EXIT_OK

    async def _work(self) -> None:
        output = OutputFile(self.config.output, overwrite=self.config.overwrite)
        output.check()
        async with contextlib.AsyncExitStack() as stack:
            stream = stack.enter_context(_open_input(self.config))
            self._progress.say(str(self.config))
            counting = asyncio.ensure_future(_count(self.config.input))
            stack.callback(counting.cancel)
            url = self.config.redis_url or await self._start_embedded(stack)
            producer = await stack.enter_async_context(
                Producer(url, self.config.queue, patience_s=OUTAGE_LIMIT_S)
            )
            await producer.ping()
            self.tally.total = await counting
            stack.enter_context(output)
            await self._run_rows(producer, stream, output)

    async def _start_embedded(self, stack: contextlib.AsyncExitStack) -> str:
        """Returns the URL of a server on which a worker is ready."""
        model = self.config.embedded
        assert model is not None
        self._progress.say("Starting a Redis server and a worker …")
        started = time.monotonic()
        self._server = stack.enter_context(EmbeddedRedis())
        self._worker = EmbeddedWorker(
            self._server.url,
            model=model,
            queue=self.config.queue,
            options=self.config.worker_options,
            on_event=self._progress.note,
        )
        stack.push_async_callback(self._stop_worker)
        status = await self._worker.start()
        self._progress.say(
            f"The worker is ready after {time.monotonic() - started:.1f} s:"
            f" {status.model}, {status.dtype} on {status.device}, {status.max_rows} rows a step"
        )
        return self._server.url

    async def _stop_worker(self) -> None:
        assert self._worker is not None
        if self._signal is None:
            await self._worker.stop()
        else:
            await self._worker.stop(INTERRUPTED_GRACE_S)

    async def _run_rows(self, producer: Producer, stream: BinaryIO, output: OutputFile) -> None:
        rows, row_format = await in_daemon_thread(
            partial(rows_and_format, stream, self.config.format, run_id=uuid.uuid4().hex)
        )
        self._run = BatchRun(
            producer, rows, row_format, output, self.tally, window=self.config.window
        )
        before = await producer.workers()
        self.tally.started = time.monotonic()
        async with task_group() as group:
            guards = [group.create_task(self._show()), group.create_task(self._watch(producer))]
            if self._worker is not None:
                guards.append(group.create_task(self._watch_embedded(self._worker)))
            await self._run.run()
            for guard in guards:
                guard.cancel()
        self._progress.show(self.tally)
        self.tally.ended = time.monotonic()
        self.tally.occupancy = batch_occupancy(before, await _fresh_statuses(producer))

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(self._progress.period_s)
            self._progress.show(self.tally)

    async def _watch(self, producer: Producer) -> None:
        """Say so once when no worker is there. Raises where the server is gone for good."""
        alone_since, told = time.monotonic(), False
        while True:
            if self._server is not None and not self._server.is_running:
                raise EmbeddedFailed("The embedded server died")
            if await producer.workers():
                alone_since = time.monotonic()
                if told:
                    self._progress.note("A worker is there now.")
                    told = False
            elif time.monotonic() - alone_since > NO_WORKER_AFTER_S and not told:
                self._progress.note(
                    f"No worker serves queue {producer.queue} of {producer.where}: waiting for"
                    " one. `tidemill worker --model MODEL_DIR --redis URL` starts one."
                )
                told = True
            await asyncio.sleep(WATCH_PERIOD_S)

    async def _watch_embedded(self, worker: EmbeddedWorker) -> None:
        raise await worker.failed()

    def _on_signal(self, number: int, work: asyncio.Future[None]) -> None:
        if self._signal is not None:
            if self._worker is not None:
                self._worker.abandon()
            if self._server is not None:
                self._server.stop(at_once=True)
            os._exit(128 + number)
        self._signal = number
        self.tally.ended = time.monotonic()
        self._progress.note("Stopping … (once more to quit at once)")
        work.cancel()

    def _what_there_is(self) -> str:
        if self._run is None:
            return "No row was run."
        done, total = self.tally.done, self.tally.total
        left = "the rest" if total is None else f"{total - done:,}"
        said = f"Rows done: {done:,}, in {self.config.output}; unfinished: {left}."
        if self._run.in_flight and self._server is None:
            said += (
                f" {self._run.in_flight:,} of these are in the queue: they will run, but their"
                " results go nowhere."
            )
        return said


@contextlib.contextmanager
def _open_input(config: BatchConfig) -> Iterator[BinaryIO]:
    if config.input == STREAM:
        yield sys.stdin.buffer
        return
    if config.output != STREAM and _same_file(config.input, config.output):
        raise BatchError(f"{config.input} is both input and output")
    with open_input(config.input) as stream:
        # Of a pipe, a look would wait for its first bytes.
        if (
            isinstance(stream, io.BufferedReader)
            and stream.seekable()
            and stream.peek(2)[:2] in UTF16_BOMS
        ):
            raise BatchError(f"{config.input} is UTF-16; JSON lines are UTF-8: convert it first")
        yield stream


async def _count(path: str) -> int | None:
    """Rows of a regular file; None for a pipe, which can be read only once."""

    def count() -> int | None:
        if path == STREAM or not os.path.isfile(path):
            return None
        with open_input(path) as stream:
            return count_rows(stream)

    return await in_daemon_thread(count)


async def _fresh_statuses(producer: Producer) -> list[WorkerStatus]:
    """Statuses that are written after now, or after a while the last there are."""
    now, give_up_at = time.time(), time.monotonic() + STATUS_WAIT_S
    while True:
        statuses = await producer.workers()
        fresh = all(status.updated_at >= now for status in statuses)
        if fresh or time.monotonic() > give_up_at:
            return statuses
        await asyncio.sleep(0.1)


def _same_file(one: str, other: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(one, other)
    return False


class _NoteHandler(logging.Handler):
    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.note(record.getMessage())


@contextlib.contextmanager
def _log_as_notes(progress: Progress) -> Iterator[None]:
    """The producer's warnings (a lost connection) as notes."""
    log, handler = logging.getLogger("tidemill.producer"), _NoteHandler(progress)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
