"""Random arrivals, cancellations, deadlines and faults, with every invariant after every step.

The fake model here keeps, for each slot of its KV cache, the token, the salt of the row that
wrote it, whether a fault spoilt it, and which life of the backend wrote it. So a row that reads
anything which is not its own, or not sound, is found out at once. Its calls take time by a clock
of the test, and raise where they are larger than the memory that there is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from tests.worker.engine.conftest import (
    VOCAB,
    Clock,
    expected_tokens,
    expected_tops,
    make_row,
    next_token,
    tops,
)
from tidemill_contracts.models.errors import KVCacheLost
from tidemill_contracts.wire import ErrorCode
from tidemill_worker.engine.budget import MIN_PREFILL_TOKENS, Budget
from tidemill_worker.engine.engine import Engine
from tidemill_worker.engine.line import MAX_PREEMPTIONS
from tidemill_worker.engine.pages import UNUSED, BlockTables, PagePool
from tidemill_worker.engine.prefix_cache import PrefixCache
from tidemill_worker.engine.row import Row
from tidemill_worker.engine.scheduler import Chunk, Scheduler, StepPlan

MIN_STEPS = 100_000
MAX_LEN = 72
MAX_LOSSES = 3
"""As often as the engine computes a row anew: more would fail rows for want of luck."""
STEMS = [[stem + 1] * 5 + list(range(stem, stem + 27)) for stem in range(3)]
AMPLE = 10_000
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError("Unable to allocate 2 GiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
]
HASHES: list[Callable[[object], int]] = [hash, hash, lambda _: 7, lambda page: hash(page) % 5]


class StrictRunner:
    """A fake model that knows who wrote what; its rows' faults are planted by position."""

    def __init__(self, scheduler: Scheduler, max_logit_rows: int, clock: Clock) -> None:
        slots = scheduler.pool.total * scheduler.pool.page_size
        self.scheduler = scheduler
        self.clock = clock
        self.memory = self.least_memory = AMPLE
        """Tokens of the largest call that is possible."""
        self.max_logit_rows = max_logit_rows
        self.decodes_along = False
        self.sampling_kernels = None
        self.told: Counter[tuple[Row, int]] = Counter()
        """How often `score` has told of a place of a row."""
        self.tokens = np.full(slots, -1, np.int64)
        self.salts = np.full(slots, -1, np.int64)
        self.spoilt = np.zeros(slots, np.bool_)
        self.life = np.zeros(slots, np.int64)
        self.losses = 0
        self.raises_at: dict[Row, int] = {}
        self.spoils_at: dict[Row, int] = {}

    def decode(self, rows: Sequence[Row], tables: BlockTables) -> Tensor:
        assert len(rows) <= self.scheduler.max_rows
        self._begin(len(rows), len(rows))
        return self._logits(self._compute(Chunk(row, 1), tables) for row in rows)

    def prefill(self, chunks: Sequence[Chunk], tables: BlockTables) -> Tensor:
        assert not any(chunk.told or chunk.drafts for chunk in chunks)
        self._begin(len(chunks), sum(chunk.size for chunk in chunks))
        return self._logits(self._compute(chunk, tables) for chunk in chunks)

    def score(self, chunks: Sequence[Chunk], tables: BlockTables) -> Tensor:
        told = [(chunk.row, place) for chunk in chunks for place in chunk.told]
        assert any(chunk.told or chunk.drafts for chunk in chunks)
        assert sum(len(chunk.places) for chunk in chunks) <= self.max_logit_rows
        self._begin(len(chunks), sum(chunk.size for chunk in chunks))
        logits = self._logits(self._compute(chunk, tables) for chunk in chunks)
        self.told.update(told)
        return logits

    def _logits(self, rows: Iterable[list[int | None]]) -> Tensor:
        """``[places, vocabulary]``, where a place without a token is not a number."""
        tokens = [token for row in rows for token in row]
        logits = np.zeros((len(tokens), VOCAB), np.float32)
        for line, token in enumerate(tokens):
            logits[line, token or 0] = np.nan if token is None else 1.0
        return torch.from_numpy(logits)

    def _begin(self, rows: int, tokens: int) -> None:
        if tokens > self.memory:
            raise OUT_OF_MEMORY[tokens % len(OUT_OF_MEMORY)]
        self.clock.now += 0.001 * rows + 0.0005 * tokens + 0.004

    def _compute(self, chunk: Chunk, tables: BlockTables) -> list[int | None]:
        row, start = chunk.row, chunk.row.computed
        end = start + chunk.size
        token_ids = [*row.token_ids[:start], *chunk.token_ids]
        assert end < row.max_len, "the last token of a row is never computed"
        size = self.scheduler.pool.page_size
        pages = tables.array[row.table_index, : -(-end // size)].astype(np.int64)
        assert (pages >= 0).all(), "a position has no page"
        slots = (pages[:, None] * size + np.arange(size)).ravel()[:end]
        before, new = slots[:start], slots[start:]
        if (self.life[before] != self.losses).any():
            raise KVCacheLost("planted restart")
        if end > self.raises_at.get(row, MAX_LEN):
            raise RuntimeError("planted fault")
        self.tokens[new] = token_ids[start:]
        salt = len(row.cache_salt)
        self.salts[new] = salt
        self.life[new] = self.losses
        self.spoilt[new] = np.arange(start, end) >= self.spoils_at.get(row, MAX_LEN)
        assert (self.salts[slots] == salt).all(), "a page crossed salts"
        assert self.tokens[slots].tolist() == token_ids, "a page of something else"
        return [
            None if self.spoilt[slots[: place + 1]].any() else next_token(token_ids[: place + 1])
            for place in chunk.places
        ]


class EngineMachine(RuleBasedStateMachine):
    """Does to an engine whatever a worker can do to it."""

    steps = 0
    reused = 0
    preempted = 0
    pinned = 0
    starved = 0
    limited = 0
    drafted = 0
    accepted = 0

    @classmethod
    def missed(cls) -> list[str]:
        """What has never happened yet."""
        kinds = ("reused", "preempted", "pinned", "starved", "limited", "drafted", "accepted")
        return [kind for kind in kinds if not getattr(cls, kind)]

    @initialize(
        pages=st.integers(18, 40),
        max_rows=st.integers(1, 6),
        max_step_tokens=st.integers(1, 40),
        max_logit_rows=st.integers(1, 12),
        max_drafts=st.integers(0, 8),
        decodes_along=st.booleans(),
        prefix_caching=st.sampled_from([True, True, True, False]),
        page_hash=st.sampled_from(HASHES),
        target_tpot_s=st.sampled_from([None, 0.002, 0.012, 0.03]),
    )
    def start(
        self,
        pages: int,
        max_rows: int,
        max_step_tokens: int,
        max_logit_rows: int,
        max_drafts: int,
        decodes_along: bool,
        prefix_caching: bool,
        page_hash: Callable[[object], int],
        target_tpot_s: float | None,
    ) -> None:
        self.pool = PagePool(pages, 4)
        self.scheduler = Scheduler(
            self.pool,
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            max_model_len=MAX_LEN,
            prefix_caching=prefix_caching,
            target_tpot_s=target_tpot_s,
            max_drafts=max_drafts,
            max_logit_rows=max_logit_rows,
        )
        if prefix_caching:
            self.scheduler.cache = PrefixCache(self.pool, page_hash=page_hash)
        self.clock = Clock()
        self.target_tpot_s = target_tpot_s
        self.runner = StrictRunner(self.scheduler, max_logit_rows, self.clock)
        self.runner.decodes_along = decodes_along
        self.delivered: list[Row] = []
        self.engine = Engine(
            self.runner,
            self.scheduler,
            self.delivered.extend,
            clock=self.clock,
            timer=self.clock,
        )
        self.rows: list[Row] = []
        self.plan: StepPlan | None = None
        self.decode_rows = 0
        plan, evict = self.scheduler.plan, self.pool.evict
        limit = self.scheduler._prefill_share.limit

        def remember(*, may_draft: bool) -> StepPlan:
            cost = self.scheduler.step_time.cost
            preempted = sum(row.preemptions for row in self.rows)
            self.plan = plan(may_draft=may_draft)
            if sum(row.preemptions for row in self.rows) > preempted:
                assert not self.plan.drafts, "a guess took what a row was preempted for"
            EngineMachine.drafted += self.plan.draft_tokens
            if target_tpot_s is not None and cost is not None and self.decode_rows:
                prefill = self.plan.tokens - self.decode_rows
                seconds = cost.seconds(self.plan.rows, self.plan.tokens)
                assert prefill <= MIN_PREFILL_TOKENS or seconds <= target_tpot_s + 1e-9
                EngineMachine.limited += 1
            return self.plan

        def remember_rows(budget: Budget, decode_rows: int) -> None:
            self.decode_rows = decode_rows
            limit(budget, decode_rows)

        def check_eviction(page: int) -> None:
            unpinned = self.pool.cached - len(self.pool._cached_pinned)
            assert not (unpinned and page in self.pool.pinned), "a pinned page goes first"
            EngineMachine.pinned += len(self.pool._cached_pinned)
            evict(page)

        self.scheduler.plan = remember  # type: ignore[method-assign]
        self.scheduler._prefill_share.limit = remember_rows  # type: ignore[method-assign]
        self.pool.evict = check_eviction

    @rule(
        count=st.integers(1, 8),
        stem=st.sampled_from(STEMS),
        stem_len=st.integers(0, 32),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
        max_tokens=st.integers(1, 32),
        salt=st.sampled_from(["", "", "", "tenant"]),
        tenant=st.sampled_from(["", "", "a", "b"]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
        patience_s=st.sampled_from([None, None, None, None, None, 0.05, 0.5]),
        fault=st.sampled_from(["", "", "", "", "", "raises", "spoils"]),
        fault_at=st.integers(0, 40),
    )
    def submit(
        self,
        count: int,
        stem: list[int],
        stem_len: int,
        tail: list[int],
        max_tokens: int,
        salt: str,
        tenant: str,
        priority: int,
        prompt_logprobs: int | None,
        patience_s: float | None,
        fault: str,
        fault_at: int,
    ) -> None:
        """Rows with a stem; the last of them may bear a fault from a position on."""
        for index in range(count):
            prompt = [*stem[:stem_len], *tail[index:], index]
            row = make_row(
                prompt,
                max_tokens,
                name=str(len(self.rows)),
                tenant=tenant,
                priority=priority,
                deadline=None if patience_s is None else self.clock.now + patience_s,
                cache_salt=salt,
                enqueued_at=self.clock.now,
                prompt_logprobs=prompt_logprobs,
            )
            self.rows.append(row)
            self.scheduler.add(row)
        if fault == "raises":
            self.runner.raises_at[row] = fault_at
        elif fault == "spoils":
            self.runner.spoils_at[row] = fault_at

    @rule(count=st.integers(1, 40))
    def step(self, count: int) -> None:
        for _ in range(count):
            if not self.scheduler.has_work:
                break
            self._step()

    @precondition(lambda self: self.scheduler.has_work)
    @rule(choice=st.integers(0, 1_000))
    def cancel(self, choice: int) -> None:
        row = self._pick(choice)
        self.engine.abort(row)
        self.engine._take_commands()
        assert row.ended

    @rule(seconds=st.sampled_from([0.01, 0.1, 100.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(tokens=st.sampled_from([0, 1, 2, 7, AMPLE, AMPLE]))
    def change_memory(self, tokens: int) -> None:
        self.runner.memory = tokens
        self.runner.least_memory = min(self.runner.least_memory, tokens)

    @precondition(lambda self: self.runner.losses < MAX_LOSSES)
    @rule()
    def lose_kv_cache(self) -> None:
        self.runner.losses += 1

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "engine"):
            self._check()
            line = self.scheduler.line
            assert (line.first() is None) == (len(line) == 0)
            assert line.tokens == sum(row.known for row in line)
            assert (self.scheduler.eta_s() or 0.0) >= 0.0

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(200 * len(self.rows) + 1):
            if not self.scheduler.has_work:
                break
            self._step()
        assert not self.scheduler.has_work, "the engine makes no progress"
        assert self.pool.free == self.pool.total
        assert sorted(row.id for row in self.delivered) == sorted(row.id for row in self.rows)
        for row in self.rows:
            self._check_outcome(row)
        assert not len(self.scheduler.fair)
        assert not self.scheduler.cache._progress
        assert self.scheduler.line.tokens == self.scheduler.line.room == 0
        EngineMachine.reused += self.scheduler.cached_tokens
        EngineMachine.accepted += self.engine.stats.accepted_draft_tokens
        EngineMachine.preempted += sum(row.preemptions - row.restarts for row in self.rows)
        EngineMachine.starved += sum(
            row.error is not None and row.error.code == ErrorCode.OUT_OF_MEMORY for row in self.rows
        )

    def _pick(self, choice: int) -> Row:
        rows = list(self.scheduler.rows())
        return rows[choice % len(rows)]

    def _step(self) -> None:
        self.engine.step()
        EngineMachine.steps += 1
        assert self.plan is not None
        assert self.plan.rows <= self.scheduler.max_rows
        assert self.plan.tokens <= self.scheduler.max_step_tokens
        assert self.plan.rows or not self.scheduler.has_work, "work waits and nothing runs"
        self._check()

    def _check(self) -> None:
        pool, tables = self.pool, self.scheduler.tables
        assert pool.used + pool.free == pool.total
        pool.check_integrity(self.scheduler.running)
        self.scheduler.cache.check_integrity()
        expected = np.full_like(tables.array, UNUSED)
        for row in self.scheduler.running:
            expected[row.table_index, : len(row.pages)] = row.pages
            assert len(row.pages) <= pool.pages_for(row.max_len - 1)
            assert row.ended or row.remaining >= 1
        assert (tables.array == expected).all(), "block tables and pages disagree"
        cache, line = self.scheduler.cache, self.scheduler.line
        if cache._enabled:
            assert cache._expected_by.keys() | cache._unseen.keys() == line._rows.keys()

    def _check_outcome(self, row: Row) -> None:
        prompt = row.token_ids[: row.prompt_len]
        output = list(row.output_token_ids)
        assert output == expected_tokens(prompt, len(output))
        self._check_told(row, prompt)
        assert 0 <= row.accepted_draft_tokens <= min(row.draft_tokens, row.generated)
        assert row.preemptions - row.restarts <= MAX_PREEMPTIONS
        assert row.restarts <= self.runner.losses, "a lost page was used after the loss was known"
        if row.error is None:
            assert row.finish_reason == ("length" if row.known == row.max_len else "deadline")
        elif row.error.code == ErrorCode.ENGINE_ERROR:
            assert row in self.runner.raises_at, row.error.message
        elif row.error.code == ErrorCode.NONFINITE_LOGITS:
            assert row in self.runner.spoils_at, "a spoilt page reached another row"
        elif row.error.code == ErrorCode.OUT_OF_MEMORY:
            assert self.runner.least_memory == 0, "memory for one token was enough"
        else:
            assert row.error.code in (ErrorCode.CANCELLED, ErrorCode.EXPIRED)

    def _check_told(self, row: Row, prompt: list[int]) -> None:
        """A row that ended well has told of its whole prompt, and of no place twice."""
        wanted = [] if row.sampling.prompt_logprobs is None else expected_tops(prompt)
        found = tops(row)
        assert found == wanted[: len(found)]
        assert row.error is not None or len(found) == len(wanted)
        assert all(count == 1 for (told, _), count in self.runner.told.items() if told is row)
        if row.sampling.prompt_logprobs is not None:
            assert row.cached == 0


@pytest.fixture
def quick(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No threads for tensors of a few hundred numbers, no tracebacks of planted faults."""
    caplog.set_level(logging.CRITICAL, "tidemill.engine")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("quick")
def test_whatever_happens_every_invariant_holds_after_every_step() -> None:
    # Hypothesis decides how many steps an example has, and what happens in it. In a CI it would
    # give every round the same examples.
    while EngineMachine.steps < MIN_STEPS or (
        EngineMachine.missed() and EngineMachine.steps < 2 * MIN_STEPS
    ):
        run_state_machine_as_test(
            EngineMachine,
            settings=settings(
                max_examples=20,
                stateful_step_count=50,
                derandomize=False,
                deadline=None,
                print_blob=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
    assert not EngineMachine.missed()
