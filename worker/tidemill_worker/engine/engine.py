"""The engine's loop: plan a step, run it, sample, deliver; one thread of its own.

Rows come in through `submit` and leave through the `deliver` callback, each exactly once:
finished, failed or aborted. Rows join and leave at step borders.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from tidemill_contracts.models.errors import KVCacheLost
from tidemill_contracts.wire import ErrorCode, JobError
from tidemill_worker.engine import sampler
from tidemill_worker.engine.logprobs import token_logprobs
from tidemill_worker.engine.pages import BlockTables
from tidemill_worker.engine.row import Row
from tidemill_worker.engine.scheduler import Chunk, Scheduler, StepPlan

logger = logging.getLogger("tidemill.engine")

MAX_RESTARTS = 3
"""How often a row is computed anew after its backend lost the KV cache."""

_Part = TypeVar("_Part", Row, Chunk)


class Runner(Protocol):
    """What the engine needs of a loaded model; all return float32 ``[…, vocabulary]`` logits."""

    @property
    def max_logit_rows(self) -> int:
        """Most places that one call of `score` may tell of."""

    def decode(self, rows: Sequence[Row], tables: BlockTables) -> Tensor:
        """Of each row's last known token."""

    def prefill(self, chunks: Sequence[Chunk], tables: BlockTables) -> Tensor:
        """Of each chunk's last token."""

    def score(self, chunks: Sequence[Chunk], tables: BlockTables) -> Tensor:
        """Of the places that each chunk tells of, chunk after chunk. Only called for rows that
        ask for log probabilities of their prompt."""


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine started. Written by its thread, read by any."""

    steps: int = 0
    row_steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache saved from being computed."""
    last_step_at: float = 0.0
    """Seconds since the Unix epoch."""


class Engine:
    """Runs rows to their end.

    `deliver` is called from the engine's thread with the rows that ended in a step; `on_crash`
    when the loop itself has failed and nothing will be delivered any more. `initialise` runs
    first, in the same thread.
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
    ) -> None:
        self.scheduler = scheduler
        self.stats = EngineStats()
        self._runner = runner
        self._deliver = deliver
        self._max_wait_s = max_wait_ms / 1000
        self._initialise = initialise
        self._on_crash = on_crash
        self._check_integrity = check_integrity
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
            self._fail([row for row in self.scheduler.rows() if row in aborted], error)
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
        self._expire(time.time())
        plan = self.scheduler.plan()
        now = time.time()
        for row in (*plan.decode, *(chunk.row for chunk in plan.prefill)):
            row.scheduled_at = row.scheduled_at or now
        with torch.inference_mode():
            self._run_decode(plan.decode)
            self._run_chunks(plan.prefill)
        self._count(plan)
        self._release([row for row in self.scheduler.running if row.ended])
        if self._check_integrity:
            self.scheduler.pool.check_integrity(self.scheduler.running)

    def _run_decode(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        try:
            logits = self._runner.decode(rows, self.scheduler.tables)
        except Exception as error:
            self._bisect(rows, self._run_decode, error, lambda row: row)
            return
        for row in rows:
            row.computed += 1
        self._sample(rows, logits)

    def _run_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Runs chunks to their ends: in one call, unless rows tell of so much of their prompts that
        the logits would take too much memory at once."""
        left = {chunk.row: chunk.length for chunk in chunks}
        while left:
            plain, telling = self._parts(left)
            self._run_prefill(plain)
            self._run_score(telling)
            for part in (*plain, *telling):
                left[part.row] -= part.length
            # A row may have failed, or lost its K and V and gone back in line.
            left = {
                row: length
                for row, length in left.items()
                if length and not row.ended and row.table_index >= 0
            }

    def _parts(self, left: Mapping[Row, int]) -> tuple[list[Chunk], list[Chunk]]:
        """As much of what is left as one call of prefill, and one of score, may take."""
        room = self._runner.max_logit_rows
        plain: list[Chunk] = []
        telling: list[Chunk] = []
        for row, length in left.items():
            over = max(0, len(Chunk(row, length).told) - room)
            if length == over:
                continue
            part = Chunk(row, length - over)
            room -= len(part.told)
            (telling if part.told else plain).append(part)
        return plain, telling

    def _run_prefill(self, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            return
        try:
            logits = self._runner.prefill(chunks, self.scheduler.tables)
        except Exception as error:
            self._bisect(chunks, self._run_prefill, error, lambda chunk: chunk.row)
            return
        self._advance(chunks, logits)

    def _run_score(self, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            return
        try:
            logits = self._runner.score(chunks, self.scheduler.tables)
        except Exception as error:
            self._bisect(chunks, self._run_score, error, lambda chunk: chunk.row)
            return
        ends = list(accumulate(len(chunk.told) for chunk in chunks))
        for chunk, end in zip(chunks, ends, strict=True):
            self._tell(chunk, logits[end - len(chunk.told) : end])
        self._advance(chunks, logits[[end - 1 for end in ends]])

    def _tell(self, chunk: Chunk, logits: Tensor) -> None:
        """Notes the log probabilities of prompt tokens; `logits` are ``[places, vocabulary]`` of
        those that the chunk tells of."""
        row, places = chunk.row, chunk.told
        if not all(sampler.finite_rows(logits)):
            row.error = _nonfinite(places.stop)
            return
        # The last place of a prompt tells of no token of it, but of the first to be sampled.
        token_ids = row.token_ids[places.start + 1 : places.stop + 1]
        row.prompt_logprobs += token_logprobs(
            logits[: len(token_ids)].log_softmax(dim=1),
            token_ids,
            row.sampling.prompt_logprobs or 0,
            row.sampling.logprob_token_ids,
        )

    def _advance(self, chunks: Sequence[Chunk], logits: Tensor) -> None:
        """Goes on after chunks have run; `logits` are those of their last tokens."""
        for chunk in chunks:
            chunk.row.computed += chunk.length
        # Only a chunk that reaches the last known token has logits worth sampling.
        done = [
            i for i, chunk in enumerate(chunks) if chunk.row.remaining == 0 and not chunk.row.ended
        ]
        if done:
            self._sample([chunks[i].row for i in done], logits[done])

    def _bisect(
        self,
        parts: Sequence[_Part],
        run: Callable[[Sequence[_Part]], None],
        error: Exception,
        row_of: Callable[[_Part], Row],
    ) -> None:
        """Runs the halves of a part of a step that raised, until the bad row is alone.

        Running a row again is harmless: it writes the same K and V to the same slots.
        """
        if len(parts) > 1:
            half = len(parts) // 2
            run(parts[:half])
            run(parts[half:])
            return
        row = row_of(parts[0])
        if isinstance(error, KVCacheLost) and row.restarts < MAX_RESTARTS:
            # Nothing is wrong with the row: its K and V are gone, its tokens are not.
            row.restarts += 1
            self.scheduler.preempt(row)
            return
        logger.error("row %s fails its step", row.id, exc_info=error)
        row.error = JobError.of(
            ErrorCode.ENGINE_ERROR,
            f"The forward pass failed for this job alone, at {row.computed:,} of {row.known:,}"
            f" tokens: {type(error).__name__}: {error}",
        )

    def _sample(self, rows: Sequence[Row], logits: Tensor) -> None:
        finite = sampler.finite_rows(logits)
        if not all(finite):
            good = [i for i, is_finite in enumerate(finite) if is_finite]
            for i, row in enumerate(rows):
                if not finite[i]:
                    row.error = _nonfinite(row.known)
            rows, logits = [rows[i] for i in good], logits[good]
            if not rows:
                return
        sampled = sampler.sample(logits, rows)
        now = time.time()
        for row, choice in zip(rows, sampled, strict=True):
            if choice.token_id < 0:
                if row.grammar is not None and row.grammar.over:
                    row.end_with_grammar()
                    continue
                row.error = JobError.of(
                    ErrorCode.INVALID_JOB,
                    "The job's options bar every token - at `$.sampling`",
                )
                continue
            if choice.logprobs is not None:
                row.logprobs.append(choice.logprobs)
            row.append(choice.token_id, now)
            self.stats.completion_tokens += 1

    def _count(self, plan: StepPlan) -> None:
        self.stats.steps += 1
        self.stats.row_steps += plan.rows
        self.stats.prompt_tokens += sum(chunk.length for chunk in plan.prefill)
        self.stats.cached_tokens = self.scheduler.cached_tokens
        self.stats.last_step_at = time.time()

    def _expire(self, now: float) -> None:
        """Ends rows whose deadline has passed, with what they have where they have something."""
        late = [row for row in self.scheduler.rows() if row.deadline and row.deadline <= now]
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
        now = time.time()
        for row in rows:
            row.finished_at = now
            self.scheduler.remove(row)
        self._deliver(rows)


def _nonfinite(tokens: int) -> JobError:
    return JobError.of(
        ErrorCode.NONFINITE_LOGITS, f"The model gave NaN or infinite logits after {tokens:,} tokens"
    )
