"""Which rows the next step runs, and how many tokens of each.

A step has one token budget. Rows that decode come first, then rows in the middle of their
prompt, then waiting rows (`line` says whose turn it is) while rows, tokens and pages last. With a
target for the time per output token, prompts get only what steps that decode have time for.

A row that needs a page when none is free preempts the lowest-ranked running row, which gives its
pages up and is computed again later. The highest-ranked row is never preempted and can hold the
whole pool, so there is always a row that makes progress. A row that has been preempted too often
goes first, but only when it and all that run fit to their ends: then nothing is preempted.

A row starts with the pages that others have computed for the same beginning. Where a row
that prefills is about to complete the next such page, it waits for the next step, so that a
file of rows with one stem computes it once.

What is left of a step when all that is planned may go to guesses of what decode rows write next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tidemill_contracts.wire import ErrorCode, JobError
from tidemill_worker.engine.budget import Budget, PrefillShare
from tidemill_worker.engine.fairness import OUTPUT_WEIGHT, PROMPT_WEIGHT, FairShare
from tidemill_worker.engine.line import MAX_PREEMPTIONS, WaitingLine
from tidemill_worker.engine.pages import BlockTables, PagePool
from tidemill_worker.engine.prefix_cache import PrefixCache
from tidemill_worker.engine.row import Row
from tidemill_worker.engine.speculation import Speculator
from tidemill_worker.engine.steptime import StepTimeModel

_OUTPUT_DECAY = 1 / 16
"""Weight of the latest row in the mean length of an output."""

_SOUND_ERRORS = frozenset(
    {ErrorCode.CANCELLED, ErrorCode.EXPIRED, ErrorCode.INVALID_JOB, ErrorCode.INVALID_GRAMMAR}
)
"""Errors that say nothing against the pages that the row has filled."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `length` tokens of a row's prompt (or, after a preemption, of all it knows).

    Behind its last known token there may be guesses of those that follow.
    """

    row: Row
    length: int
    drafts: Sequence[int] = ()

    @property
    def size(self) -> int:
        """Tokens to compute."""
        return self.length + len(self.drafts)

    @property
    def token_ids(self) -> list[int]:
        start = self.row.computed
        return [*self.row.token_ids[start : start + self.length], *self.drafts]

    @property
    def told(self) -> range:
        """Places of the chunk whose logits are needed because the row tells of its prompt: from
        the first that is untold to the chunk's end. Empty for most chunks."""
        row = self.row
        if not row.untold:
            return range(0)
        return range(max(row.computed, row.untold.start), row.computed + self.length)

    @property
    def places(self) -> range:
        """Places whose logits are needed: the last one, and those that are told of or come before
        a draft."""
        end = self.row.computed + self.size
        return self.told or range(end - 1 - len(self.drafts), end)


@dataclass(slots=True)
class StepPlan:
    """One step: decode rows compute one token each and what is guessed of the next, chunks
    several."""

    decode: list[Row] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)
    drafts: dict[Row, list[int]] = field(default_factory=dict)
    """Of decode rows; those without any are left out."""

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
    def draft_tokens(self) -> int:
        return sum(map(len, self.drafts.values()))

    @property
    def tokens(self) -> int:
        return len(self.decode) + sum(chunk.length for chunk in self.prefill) + self.draft_tokens


class Scheduler:
    """Admission, the running rows and their pages, and what is left to do."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_rows: int,
        max_step_tokens: int,
        max_model_len: int,
        prefix_caching: bool = True,
        target_tpot_s: float | None = None,
        max_drafts: int = 0,
        max_logit_rows: int = 0,
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
        self.fair = FairShare()
        self.line = WaitingLine(self.fair)
        self.step_time = StepTimeModel()
        self._prefill_share = PrefillShare(self.step_time, target_tpot_s)
        self._speculator = Speculator(self.step_time, max_drafts, max_logit_rows)
        self._mean_output: float | None = None
        """Generated tokens of a finished row, the latest ones counting most."""
        self._arrivals = 0

    @property
    def waiting(self) -> int:
        return len(self.line)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.line)

    @property
    def capacity(self) -> int:
        """Tokens of the longest row that can ever finish: the context, or the whole pool.

        The last token of a row is sampled but never computed, so it needs no room.
        """
        return min(self.max_model_len, self.pool.total * self.pool.page_size + 1)

    def rows(self) -> Iterator[Row]:
        yield from self.running
        yield from self.line

    def holds(self, row: Row) -> bool:
        """Whether the row runs or waits here."""
        return row.table_index >= 0 or row in self.line

    def late(self, now: float) -> list[Row]:
        """Rows whose deadline has passed; all of them must be removed."""
        running = [row for row in self.running if row.deadline is not None and row.deadline <= now]
        return running + self.line.expired(now)

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
        """Puts a row in line. It must fit: see `refusal`."""
        row.arrival = self._arrivals
        self._arrivals += 1
        self.fair.arrive(row.tenant)
        self._put_in_line(row)

    def remove(self, row: Row) -> None:
        """Takes a row out wherever it stands; no page is held by it any more.

        Its full pages stay in the cache unless its error casts doubt on them.
        """
        if row.table_index >= 0:
            if row.error is not None and row.error.code not in _SOUND_ERRORS:
                self.cache.forget(row)
            else:
                self.cache.insert(row)
            self._charge(row, 0)  # for drafts that its last step has accepted
            self._stop(row)
        else:
            self._take_out_of_line(row)
        self.cache.close(row)
        self.fair.leave(row.tenant)
        if row.finish_reason is not None:
            mean = self._mean_output
            self._mean_output = (
                row.generated if mean is None else mean + _OUTPUT_DECAY * (row.generated - mean)
            )

    def plan(self, *, may_draft: bool = True) -> StepPlan:
        """The next step. Empty only where there is no work."""
        plan = StepPlan()
        self.cache.look_ahead()
        for row in self.running:
            self.cache.insert(row)
        budget = Budget(self.max_step_tokens)
        self.running.sort(key=lambda row: row.rank)
        # Rows that decode first: they are nearest to freeing their pages.
        decoding = [row for row in self.running if row.remaining == 1]
        prefilling = [row for row in self.running if row.remaining > 1]
        preempted = self._continue(plan, decoding, budget)
        self._prefill_share.limit(budget, len(plan.decode))
        preempted |= self._continue(plan, prefilling, budget)
        # A row that has just lost its pages must not take them back in the same step.
        if not preempted:
            self._admit(plan, budget)
            if may_draft and self._speculator.max_drafts:
                self._draft(plan, budget)
        for row in plan.decode:
            self._charge(row, 1)
        for chunk in plan.prefill:
            self._charge(chunk.row, chunk.length)
        return plan

    def eta_s(self) -> float | None:
        """Seconds until every row is done, if none comes; ``None`` while no step time is known.

        Outputs are taken to be as long as the latest ones were, prompts to share nothing. May be
        called from any thread.
        """
        running, waiting = list(self.running), len(self.line)
        rows = len(running) + waiting
        cost = self.step_time.cost
        if not rows:
            return 0.0
        if cost is None:
            return None
        to_come = [self._expected_output(row) for row in running]
        room = self.line.room / max(1, waiting)
        each = room if self._mean_output is None else min(room, self._mean_output)
        output = sum(to_come) + each * waiting
        prompt = self.line.tokens + sum(row.remaining - 1 for row in running)
        length = (sum(row.known for row in running) + self.line.tokens + output) / rows
        # At least one: rows may move from line to line while they are counted.
        fitting = self.pool.total * self.pool.page_size / max(1.0, length)
        at_once = max(1.0, min(self.max_rows, rows, fitting))
        steps = max(*to_come, each, output / at_once, (prompt + output) / self.max_step_tokens)
        return cost.seconds(output + rows, prompt + output, steps)

    def _expected_output(self, row: Row) -> float:
        """Tokens that a running row will generate yet; at least one."""
        room = float(row.max_len - row.known)
        if self._mean_output is not None:
            room = min(room, self._mean_output - row.generated)
        return max(1.0, room)

    def _charge(self, row: Row, length: int) -> None:
        """Charges its tenant for what a row computes, but not for what it had computed before a
        preemption: that is nobody's wish."""
        end = row.computed + length
        prompt = max(0, min(end, row.prompt_len) - row.charged)
        output = max(0, end - max(row.prompt_len, row.charged))
        self.fair.charge(row.tenant, PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * output)
        row.charged = max(row.charged, end)

    def _continue(self, plan: StepPlan, rows: Iterable[Row], budget: Budget) -> bool:
        """Plans what running rows compute next; True where a row was preempted for that."""
        preempted = False
        for row in rows:
            if row.table_index < 0:
                continue  # preempted by a row before it
            length = min(row.remaining, budget.room)
            if length == 0:
                break
            while not self._grow(row, row.computed + length):
                preempted = True
                if self._preempt_lowest(plan) is row:
                    break
            else:
                budget.take(length)
                plan.add(row, length)
        return preempted

    def _admit(self, plan: StepPlan, budget: Budget) -> None:
        """Starts the rows in line, each at its turn, while rows, tokens and pages last.

        Every prefill of the plan ends in this step: one that does not has used the budget up. So
        a row that is held back for a page is held for one step, and then finds it in the cache.
        """
        coming = {key for chunk in plan.prefill for key in self._keys(chunk)}
        careful = any(row.preemptions >= MAX_PREEMPTIONS for row in self.running)
        held = 0
        while budget.room and len(self.running) < self.max_rows and held < self.max_rows:
            row = self.line.first()
            if row is None:
                break
            shared = self.cache.match(row)
            if self.cache.next_key(row, len(shared)) in coming:
                # Enough for the next step are held at most; a long line is not searched to its end.
                held += 1
                self.line.set_aside(row)
                continue
            careful |= row.preemptions >= MAX_PREEMPTIONS
            if not self._can_start(row, shared, to_the_end=careful):
                break
            self._take_out_of_line(row)
            self._start(row, shared)
            length = min(row.remaining, budget.room)
            self._grow(row, row.computed + length)
            budget.take(length)
            plan.add(row, length)
            coming.update(self._keys(Chunk(row, length)))
        self.line.restore()

    def _draft(self, plan: StepPlan, budget: Budget) -> None:
        """Gives what tokens and pages are left to guesses, and takes neither from anybody."""
        price = self._speculator.price(max(1, len(plan.decode)))
        places = self._speculator.max_logit_rows - plan.rows
        for row in plan.decode:
            # The last token of a row is never computed.
            room = max(0, min(budget.room, places, row.max_len - 1 - row.known))
            drafts = self._speculator.draft(row, price, room)
            pages = self.pool.pages_for(row.known + len(drafts)) - len(row.pages)
            # As for a row that starts, a page for each running row is left over.
            if pages > 0 and self.pool.can_allocate(pages + len(self.running)):
                self._grow(row, row.known + len(drafts))
            drafts = drafts[: len(row.pages) * self.pool.page_size - row.known]
            if drafts:
                plan.drafts[row] = drafts
                budget.take(len(drafts), rows=0)
                places -= len(drafts)

    def _can_start(self, row: Row, shared: list[int], *, to_the_end: bool) -> bool:
        """Whether there are pages for a row of which these are cached: for what it computes
        first, and where asked for all that it and the running rows will ever compute."""
        # A page for each running row is left over: they grow next.
        needed = self.pool.pages_for(row.known) - len(shared) + len(self.running)
        if not self.pool.can_allocate(needed, shared):
            return False
        if not to_the_end:
            return True
        # The last token of a row is never computed.
        rows = [*self.running, row]
        return sum(self.pool.pages_for(row.max_len - 1) for row in rows) <= self.pool.total

    def _start(self, row: Row, shared: list[int]) -> None:
        """Makes a waiting row a running one that has these pages of the cache."""
        self.tables.open(row)
        self.pool.share(shared)
        self.tables.append(row, shared)
        self.cache.open(row)
        self.running.append(row)
        row.computed = len(shared) * self.pool.page_size
        self.cached_tokens += row.computed
        row.charged = max(row.charged, row.computed)
        if row.preemptions == 0 and row.resumed == 0:
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
        self._put_in_line(row)

    def _put_in_line(self, row: Row) -> None:
        self.line.push(row)
        self.cache.expect(row)

    def _take_out_of_line(self, row: Row) -> None:
        self.line.remove(row)
        self.cache.unexpect(row)

    def _preempt_lowest(self, plan: StepPlan) -> Row:
        victim = max(self.running, key=lambda row: row.rank)
        if victim in plan.decode:
            plan.decode.remove(victim)
        plan.prefill = [chunk for chunk in plan.prefill if chunk.row is not victim]
        self._put_back(victim)
        return victim
