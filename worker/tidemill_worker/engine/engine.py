"""The engine's loop: plan a step, run it, deliver; one thread of its own.

Rows come in through `submit` and leave through the `deliver` callback, each exactly once:
finished, failed or aborted. Rows join and leave at step borders.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from tidemill_contracts.wire import ErrorCode, JobError
from tidemill_worker.engine.calls import Calls, EngineStats, Runner
from tidemill_worker.engine.row import Row
from tidemill_worker.engine.scheduler import Scheduler, StepPlan

logger = logging.getLogger("tidemill.engine")


class Engine:
    """Runs rows to their end.

    `deliver` is called from the engine's thread with the rows that ended in a step; `on_crash`
    when the loop itself has failed and nothing will be delivered any more. `initialise` runs
    first, in the same thread. `clock` gives seconds since the Unix epoch, and `timer` what steps
    are timed with.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        deliver: Callable[[list[Row]], None],
        *,
        max_wait_ms: float = 0.0,
        initialise: Callable[[], None] | None = None,
        on_crash: Callable[[Exception], None] | None = None,
        check_integrity: bool = False,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.stats = EngineStats()
        self._deliver = deliver
        self._max_wait_s = max_wait_ms / 1000
        self._initialise = initialise
        self._on_crash = on_crash
        self._check_integrity = check_integrity
        self._clock = clock
        self._timer = timer
        self._calls = Calls(runner, scheduler, self.stats, clock)
        self._changed = threading.Condition()
        self._incoming: deque[Row] = deque()
        self._aborted: set[Row] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tidemill-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, row: Row) -> None:
        """Puts a row in line. The row must fit: see `Scheduler.refusal`."""
        with self._changed:
            self._incoming.append(row)
            self._changed.notify()

    def abort(self, row: Row) -> None:
        """Ends a row at the next step border with the code ``cancelled``; harmless where it has
        ended already."""
        with self._changed:
            self._aborted.add(row)
            self._changed.notify()

    def stop(self, timeout: float | None = None) -> None:
        """Ends the thread after the step that runs; rows that have not ended stay unanswered."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout)

    @property
    def eta_s(self) -> float | None:
        """Seconds until every row is done, if none comes; ``None`` while that is not known."""
        return self.scheduler.eta_s()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self._initialise is not None:
                self._initialise()
            while self._take_commands():
                self.step()
        except Exception as error:
            # Not a row's fault (those are caught where they happen) but a bug: the state can no
            # longer be trusted, so the owner must let other workers take the jobs over.
            logger.critical("the engine has crashed", exc_info=error)
            if self._on_crash is not None:
                self._on_crash(error)

    def _take_commands(self) -> bool:
        """Waits until there is work; False when the engine is to stop."""
        with self._changed:
            if not self.scheduler.has_work:
                while not (self._incoming or self._stopping):
                    self._aborted.clear()
                    self._changed.wait()
                self._gather()
            if self._stopping:
                return False
            incoming, self._incoming = list(self._incoming), deque()
            aborted, self._aborted = self._aborted, set()
        for row in incoming:
            self.scheduler.add(row)
        if aborted:
            error = JobError.of(ErrorCode.CANCELLED, "The job was cancelled")
            self._fail([row for row in aborted if self.scheduler.holds(row)], error)
        return True

    def _gather(self) -> None:
        """Holds the first arrival of an idle engine a moment, so that a batch can form."""
        until = time.monotonic() + self._max_wait_s
        while not self._stopping and len(self._incoming) < self.scheduler.max_rows:
            left = until - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                return

    def step(self) -> None:
        """Runs one step and delivers the rows that ended in it."""
        self._expire()
        # Where memory is short, none of it is for guesses.
        plan = self.scheduler.plan(may_draft=not self._calls.short_of_memory)
        now = self._clock()
        for row in (*plan.decode, *(chunk.row for chunk in plan.prefill)):
            row.scheduled_at = row.scheduled_at or now
        started = self._timer()
        if self._calls.run(plan):
            taken = self._timer() - started
            self.scheduler.step_time.observe(plan.rows, plan.tokens, taken, plan.draft_tokens)
        self._count(plan)
        self._release([row for row in self.scheduler.running if row.ended])
        if self._check_integrity:
            self.scheduler.pool.check_integrity(self.scheduler.running)

    def _count(self, plan: StepPlan) -> None:
        self.stats.steps += 1
        self.stats.row_steps += plan.rows
        self.stats.prompt_tokens += sum(chunk.length for chunk in plan.prefill)
        self.stats.cached_tokens = self.scheduler.cached_tokens
        self.stats.last_step_at = self._clock()

    def _expire(self) -> None:
        """Ends rows whose deadline has passed, with what they have where they have something."""
        late = self.scheduler.late(self._clock())
        for row in late:
            if row.known > row.prompt_len:
                row.finish_reason = "deadline"
            else:
                row.error = JobError.of(
                    ErrorCode.EXPIRED, "The deadline passed before the first token"
                )
        self._release(late)

    def _fail(self, rows: Iterable[Row], error: JobError) -> None:
        rows = list(rows)
        for row in rows:
            row.error = error
        self._release(rows)

    def _release(self, rows: list[Row]) -> None:
        if not rows:
            return
        now = self._clock()
        for row in rows:
            row.finished_at = now
            self.scheduler.remove(row)
        self._deliver(rows)
