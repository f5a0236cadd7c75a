"""Which rows the next step runs, and how many tokens of each.

A step has one token budget. Rows that decode come first, then rows in the middle of their
prompt, then waiting rows while rows, tokens and pages last. A row that needs a page when none
is free preempts the lowest-ranked running row, which gives its pages up and is computed again
later. The highest-ranked row is never preempted and can hold the whole pool, so there is
always a row that makes progress.

A row starts with the pages that others have computed for the same beginning. Where a row
that prefills is about to complete the next such page, it waits for the next step, so that a
file of rows with one stem computes it once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from tidemill_contracts.wire import ErrorCode, JobError
from tidemill_worker.engine.pages import BlockTables, PagePool
from tidemill_worker.engine.prefix_cache import PrefixCache
from tidemill_worker.engine.row import Row

_SOUND_ERRORS = frozenset(
    {ErrorCode.CANCELLED, ErrorCode.EXPIRED, ErrorCode.INVALID_JOB, ErrorCode.INVALID_GRAMMAR}
)
"""Errors that say nothing against the pages that the row has filled."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `length` tokens of a row's prompt (or, after a preemption, of all it knows)."""

    row: Row
    length: int

    @property
    def told(self) -> range:
        """Places of the chunk whose logits are needed because the row tells of its prompt: from
        the first that is untold to the chunk's end. Empty for most chunks."""
        row = self.row
        if not row.untold:
            return range(0)
        return range(max(row.computed, row.untold.start), row.computed + self.length)


@dataclass(slots=True)
class StepPlan:
    """One step: decode rows compute one token each, chunks several."""

    decode: list[Row] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)

    def add(self, row: Row, length: int) -> None:
        """Plans the next `length` tokens of a row."""
        if row.remaining == 1:
            self.decode.append(row)
        else:
            self.prefill.append(Chunk(row, length))

    @property
    def rows(self) -> int:
        return len(self.decode) + len(self.prefill)

    @property
    def tokens(self) -> int:
        return len(self.decode) + sum(chunk.length for chunk in self.prefill)


class Scheduler:
    """Admission, the waiting line, the running rows and their pages."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_rows: int,
        max_step_tokens: int,
        max_model_len: int,
        prefix_caching: bool = True,
    ) -> None:
        self.pool = pool
        self.cache = PrefixCache(pool, enabled=prefix_caching)
        self.cached_tokens = 0
        """Tokens that rows did not compute because their pages were in the cache."""
        self.max_rows = max_rows
        # Every running row must be able to decode in every step.
        self.max_step_tokens = max(max_step_tokens, max_rows)
        self.max_model_len = max_model_len
        self.tables = BlockTables(max_rows, pool.pages_for(max_model_len))
        self.running: list[Row] = []
        self._waiting: list[tuple[tuple[int, int], Row]] = []
        self._arrivals = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._waiting)

    @property
    def capacity(self) -> int:
        """Tokens of the longest row that can ever finish: the context, or the whole pool.

        The last token of a row is sampled but never computed, so it needs no room.
        """
        return min(self.max_model_len, self.pool.total * self.pool.page_size + 1)

    def rows(self) -> Iterator[Row]:
        yield from self.running
        for _, row in self._waiting:
            yield row

    def refusal(self, prompt_len: int, max_tokens: int) -> JobError | None:
        """Why such a row could never finish here, or ``None`` where it can."""
        if prompt_len + max_tokens <= self.capacity:
            return None
        limit = (
            f"the context of {self.max_model_len:,} tokens"
            if self.capacity == self.max_model_len
            else f"the KV cache of {self.pool.total:,} pages of {self.pool.page_size} tokens"
        )
        return JobError.of(
            ErrorCode.PROMPT_TOO_LONG,
            f"The prompt has {prompt_len:,} tokens and {max_tokens:,} more are asked for:"
            f" {prompt_len + max_tokens:,} do not fit {limit}",
        )

    def add(self, row: Row) -> None:
        """Puts an admitted row in line."""
        row.arrival = self._arrivals
        self._arrivals += 1
        heapq.heappush(self._waiting, (row.rank, row))

    def remove(self, row: Row) -> None:
        """Takes a row out wherever it stands; no page is held by it any more.

        Its full pages stay in the cache unless its error casts doubt on them.
        """
        if row.table_index >= 0:
            if row.error is not None and row.error.code not in _SOUND_ERRORS:
                self.cache.forget(row)
            else:
                self.cache.insert(row)
            self._stop(row)
        else:
            self._waiting = [entry for entry in self._waiting if entry[1] is not row]
            heapq.heapify(self._waiting)
        self.cache.close(row)

    def plan(self) -> StepPlan:
        """The next step. Empty only where there is no work."""
        plan = StepPlan()
        for row in self.running:
            self.cache.insert(row)
        budget = self.max_step_tokens
        preempted = False
        self.running.sort(key=lambda row: row.rank)
        # Rows that decode first: they are nearest to freeing their pages.
        for row in sorted(self.running, key=lambda row: row.remaining > 1):
            if row.table_index < 0:
                continue  # preempted by a row before it
            length = min(row.remaining, budget)
            if length == 0:
                break
            while not self._grow(row, row.computed + length):
                preempted = True
                if self._preempt_lowest(plan) is row:
                    break
            else:
                budget -= length
                plan.add(row, length)
        # A row that has just lost its pages must not take them back in the same step.
        if not preempted:
            self._admit(plan, budget)
        return plan

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Starts waiting rows in the order of their rank while rows, tokens and pages last.

        Every prefill of the plan ends in this step: one that does not has used the budget up. So
        a row that is held back for a page is held for one step, and then finds it in the cache.
        """
        coming = {key for chunk in plan.prefill for key in self._keys(chunk)}
        held: list[tuple[tuple[int, int], Row]] = []
        while self._waiting and budget and len(self.running) < self.max_rows:
            row = self._waiting[0][1]
            shared = self.cache.match(row)
            if self.cache.next_key(row, len(shared)) in coming:
                held.append(heapq.heappop(self._waiting))
                if len(held) == self.max_rows:
                    break  # enough for the next step; a long line is not searched to its end
                continue
            # A page for each running row is left over: they grow next.
            needed = self.pool.pages_for(row.known) - len(shared) + len(self.running)
            if not self.pool.can_allocate(needed, shared):
                break
            heapq.heappop(self._waiting)
            self._start(row, shared)
            length = min(row.remaining, budget)
            self._grow(row, row.computed + length)
            budget -= length
            plan.add(row, length)
            coming.update(self._keys(Chunk(row, length)))
        for entry in held:
            heapq.heappush(self._waiting, entry)

    def _start(self, row: Row, shared: list[int]) -> None:
        """Makes a waiting row a running one that has these pages of the cache."""
        self.tables.open(row)
        self.pool.share(shared)
        self.tables.append(row, shared)
        self.cache.open(row)
        self.running.append(row)
        row.computed = len(shared) * self.pool.page_size
        self.cached_tokens += row.computed
        if row.preemptions == 0:
            row.cached = row.computed

    def _stop(self, row: Row) -> None:
        """Makes a running row one that holds nothing."""
        self.running.remove(row)
        self.pool.release(self.tables.close(row))

    def _keys(self, chunk: Chunk) -> list[int]:
        """Keys of the pages that are full after the chunk: all of a prompt's pages enter the
        cache together, when it is computed to its end."""
        full = (chunk.row.computed + chunk.length) // self.pool.page_size
        return self.cache.keys(chunk.row, 0, full)

    def _grow(self, row: Row, tokens: int) -> bool:
        """Makes the row's pages hold `tokens`; False where the pool has too few."""
        pages = self.pool.allocate(self.pool.pages_for(tokens) - len(row.pages))
        if pages is None:
            return False
        self.tables.append(row, pages)
        return True

    def preempt(self, row: Row) -> None:
        """Puts a running row whose K and V its backend has lost back in line.

        Those of other rows are in doubt, so nothing computed until now is shared any more.
        """
        self.drop_cache()
        self._put_back(row)

    def drop_cache(self) -> None:
        """Forgets every cached page; what the running rows hold is not cached later either."""
        self.cache.clear()

    def _put_back(self, row: Row) -> None:
        """Takes a running row's pages and puts it in line, to be computed anew."""
        self.cache.insert(row)
        self._stop(row)
        row.computed = 0
        row.preemptions += 1
        heapq.heappush(self._waiting, (row.rank, row))

    def _preempt_lowest(self, plan: StepPlan) -> Row:
        victim = max(self.running, key=lambda row: row.rank)
        if victim in plan.decode:
            plan.decode.remove(victim)
        plan.prefill = [chunk for chunk in plan.prefill if chunk.row is not victim]
        self._put_back(victim)
        return victim
