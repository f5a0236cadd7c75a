"""One file through the queue: a bounded window of jobs in flight, results written as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

from tidemill_contracts.wire import ErrorCode, JobError, Outcome
from tidemill_contracts.wire.arq_format import UndecodableRecord
from tidemill_producer.batch.formats import RowFormat
from tidemill_producer.batch.output import OutputFile
from tidemill_producer.batch.rows import BadLine, OutputRow, Row
from tidemill_producer.batch.tally import EXPECTED, TASK, Tally
from tidemill_producer.batch.tasks import in_daemon_thread, task_group
from tidemill_producer.client import Producer
from tidemill_producer.errors import BatchError, QueueUnavailable, UnknownJob
from tidemill_producer.jobs import JobHandle

READ_ROWS = 1000
FORGET_ROWS = 500
"""Results are deleted from Redis in such groups, once they are on disk."""


class BatchRun:
    """Feeds rows to the queue and writes what comes back."""

    def __init__(
        self,
        producer: Producer,
        rows: Iterator[Row | BadLine],
        row_format: RowFormat,
        output: OutputFile,
        tally: Tally,
        *,
        window: int,
    ) -> None:
        """`window`: most jobs in flight, enqueued and not yet written."""
        self._producer = producer
        self._rows = rows
        self._format = row_format
        self._output = output
        self._tally = tally
        self._window = window
        self._in_flight = 0
        self._room = asyncio.Event()
        self._on_disk_soon: list[str] = []

    @property
    def in_flight(self) -> int:
        """Jobs in the queue or running."""
        return self._in_flight

    async def run(self) -> None:
        """Return when every row is written.

        Raises `QueueUnavailable` where Redis stays away, `BatchError` where the output cannot be
        written. Cancel it to stop: the rows written so far are whole.
        """
        async with task_group() as group:
            await self._feed(group)
        await self._forget(self._on_disk_soon)

    async def _feed(self, group: asyncio.TaskGroup) -> None:
        while True:
            # A quarter at a time: a window that is topped up by one row costs a call per row.
            while self._window - self._in_flight < max(1, self._window // 4):
                self._room.clear()
                await self._room.wait()
            count = min(READ_ROWS, self._window - self._in_flight)
            try:
                chunk = await in_daemon_thread(partial(_take, self._rows, count))
            except OSError as error:
                raise BatchError(f"Cannot read the input: {error.strerror}") from error
            if not chunk:
                return
            good = []
            for row in chunk:
                if isinstance(row, BadLine):
                    self._write_bad_line(row)
                else:
                    good.append(row)
            self._in_flight += len(good)
            rows = iter(good)
            jobs = (row.job for row in good)
            async for handle in self._producer.enqueue_many(jobs, wait_for_room=True):
                row = next(rows)
                # Only what is needed later: the prompts of a window may be gigabytes.
                expected, task = row.job.metadata.get(EXPECTED), row.job.metadata.get(TASK, "")
                group.create_task(
                    self._finish(group, handle, row.custom_id, row.context, expected, task)
                )

    async def _finish(
        self,
        group: asyncio.TaskGroup,
        handle: JobHandle,
        custom_id: str,
        context: Any,
        expected: str | None,
        task: str,
    ) -> None:
        outcome = await self._outcome(handle)
        row = OutputRow(
            custom_id=custom_id, result=outcome.result, error=outcome.error, context=context
        )
        self._output.write(self._format.encode(row))
        if outcome.result is not None:
            self._tally.add_result(outcome.result)
        elif outcome.error is not None:
            self._tally.add_error(outcome.error)
        if expected is not None:
            text = None if outcome.result is None else outcome.result.text
            self._tally.add_score(expected, task, text)
        self._in_flight -= 1
        self._room.set()
        self._on_disk_soon.append(handle.id)
        if len(self._on_disk_soon) == FORGET_ROWS:
            job_ids, self._on_disk_soon = self._on_disk_soon, []
            group.create_task(self._forget(job_ids))

    async def _outcome(self, handle: JobHandle) -> Outcome:
        try:
            return await handle.outcome()
        except (UnknownJob, UndecodableRecord) as error:
            lost = isinstance(error, UnknownJob)
            code = ErrorCode.PAYLOAD_LOST if lost else ErrorCode.UNDECODABLE
            return Outcome(id=handle.id, error=JobError.of(code, str(error)))

    def _write_bad_line(self, bad: BadLine) -> None:
        row = OutputRow(custom_id=bad.custom_id, error=bad.error, line=bad.line)
        self._output.write(self._format.encode(row))
        self._tally.add_error(bad.error)

    async def _forget(self, job_ids: list[str]) -> None:
        await in_daemon_thread(self._output.sync)
        try:
            await self._producer.forget(job_ids)
        except QueueUnavailable:
            return  # they expire


def _take(rows: Iterator[Row | BadLine], count: int) -> list[Row | BadLine]:
    return list(islice(rows, count))
