"""A stand-in for the model whose answer shows every mistake in pages, slots and positions.

Its "KV cache" holds token ids. A row's next token is a hash of the whole sequence as read back
through the row's block table, so a row that reads another's page, a stale page or a page that
was never written answers wrongly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tidemill_contracts.models.qwen3.native.library import NoLibrary
from tidemill_contracts.models.qwen3.native.sampling import sampling
from tidemill_contracts.models.sampling import SamplingKernels
from tidemill_worker.engine.engine import Engine
from tidemill_worker.engine.pages import BlockTables, PagePool
from tidemill_worker.engine.row import Row, RowSampling
from tidemill_worker.engine.scheduler import Chunk, Scheduler

VOCAB = 97
GREEDY = RowSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)


def next_token(tokens: Sequence[int]) -> int:
    """A hash of all tokens decides, mostly to go on as after the latest place of the last one: so
    rows repeat themselves, with slips."""
    value = 7
    for token in tokens:
        value = (value * 31 + int(token) + 1) % 1_000_003
    last = int(tokens[-1])
    if value % 5:
        for place in range(len(tokens) - 2, -1, -1):
            if tokens[place] == last:
                return int(tokens[place + 1])
    return value % VOCAB


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What a row must generate, whatever it is batched with."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def expected_tops(prompt: Sequence[int]) -> list[list[int]]:
    """The likeliest token in each place of a prompt from the second on."""
    return [[next_token(prompt[:place])] for place in range(1, len(prompt))]


def tops(row: Row) -> list[list[int]]:
    """What the row has told of its prompt: of each place, the likeliest tokens."""
    return [list(entry.top) for entry in row.prompt_logprobs]


class Clock:
    """Time that passes when it is told to, in seconds."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class FakeRunner:
    """Keeps token ids in slots; checks the budgets that a plan must keep to."""

    def __init__(self, pool: PagePool, max_rows: int, max_step_tokens: int) -> None:
        self.page_size = pool.page_size
        self.cache = np.full(pool.total * pool.page_size, -1, np.int64)
        self.max_rows = max_rows
        self.max_step_tokens = max_step_tokens
        self.max_logit_rows = 8
        self.decodes_along = False
        self.sampling_kernels = None
        self.told: list[tuple[Row, int]] = []
        """Every row and place of a prompt that `score` has told of."""
        self.raise_for: Callable[[Row], bool] = lambda row: False
        self.nan_for: Callable[[Row, int], bool] = lambda row, place: False
        self.on_call: Callable[[int, int], None] = lambda rows, tokens: None
        """Called with the size of each call before it is computed; may raise."""

    def _slots(self, row: Row, tables: BlockTables, start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        pages = tables.array[row.table_index, positions // self.page_size]
        assert (pages >= 0).all(), "a position has no page"
        return pages * self.page_size + positions % self.page_size

    def _compute(self, chunk: Chunk, tables: BlockTables) -> Tensor:
        """The logits of the chunk's places."""
        row = chunk.row
        end = row.computed + chunk.size
        self.cache[self._slots(row, tables, row.computed, end)] = chunk.token_ids
        seen = self.cache[self._slots(row, tables, 0, end)]
        logits = torch.zeros(len(chunk.places), VOCAB)
        for line, place in enumerate(chunk.places):
            value = torch.nan if self.nan_for(row, place) else 1.0
            logits[line, next_token(seen[: place + 1])] = value
        return logits

    def decode(self, rows: Sequence[Row], tables: BlockTables) -> Tensor:
        assert len(rows) <= self.max_rows
        self.on_call(len(rows), len(rows))
        if any(self.raise_for(row) for row in rows):
            raise RuntimeError("planted fault")
        return torch.cat([self._compute(Chunk(row, 1), tables) for row in rows])

    def prefill(self, chunks: Sequence[Chunk], tables: BlockTables) -> Tensor:
        tokens = sum(chunk.size for chunk in chunks)
        assert tokens <= self.max_step_tokens
        self.on_call(len(chunks), tokens)
        assert not any(chunk.told or chunk.drafts for chunk in chunks)
        if any(self.raise_for(chunk.row) for chunk in chunks):
            raise RuntimeError("planted fault")
        return torch.cat([self._compute(chunk, tables) for chunk in chunks])

    def score(self, chunks: Sequence[Chunk], tables: BlockTables) -> Tensor:
        tokens = sum(chunk.size for chunk in chunks)
        assert tokens <= self.max_step_tokens
        self.on_call(len(chunks), tokens)
        assert any(chunk.told or chunk.drafts for chunk in chunks)
        assert sum(len(chunk.places) for chunk in chunks) <= self.max_logit_rows
        told = [(chunk.row, place) for chunk in chunks for place in chunk.told]
        if any(self.raise_for(chunk.row) for chunk in chunks):
            raise RuntimeError("planted fault")
        self.told += told
        return torch.cat([self._compute(chunk, tables) for chunk in chunks])


class Bench:
    """An engine over the fake model, stepped by hand."""

    def __init__(
        self,
        *,
        pages: int = 64,
        page_size: int = 4,
        max_rows: int = 4,
        max_step_tokens: int = 16,
        target_tpot_s: float | None = None,
        max_drafts: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self.pool = PagePool(pages, page_size)
        self.scheduler = Scheduler(
            self.pool,
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            max_model_len=256,
            target_tpot_s=target_tpot_s,
            max_drafts=max_drafts,
            max_logit_rows=8,
        )
        self.runner = FakeRunner(self.pool, max_rows, self.scheduler.max_step_tokens)
        self.delivered: list[Row] = []
        self.engine = Engine(
            self.runner,
            self.scheduler,
            self.delivered.extend,
            check_integrity=True,
            clock=clock or time.time,
            timer=clock or time.perf_counter,
        )

    def add(self, row: Row) -> Row:
        self.scheduler.add(row)
        return row

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.step()

    def cancel(self, *rows: Row) -> None:
        """As `Engine.abort` does at a step border."""
        for row in rows:
            self.engine.abort(row)
        if self.scheduler.has_work:
            self.engine._take_commands()

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.engine.step()
        assert not self.scheduler.has_work, "the engine makes no progress"
        assert self.pool.free == self.pool.total


def make_row(
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    name: str = "row",
    prompt_logprobs: int | None = None,
    **fields: object,
) -> Row:
    return Row(
        id=name,
        token_ids=list(prompt),
        max_len=len(prompt) + max_tokens,
        sampling=replace(GREEDY, prompt_logprobs=prompt_logprobs),
        **fields,  # type: ignore[arg-type]
    )


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture(params=["torch", "native", "x86-64-v3"])
def kernels(request: pytest.FixtureRequest) -> SamplingKernels | None:
    """What tokens are chosen by: torch, or the C++ library, for this machine or plain."""
    return None if request.param == "torch" else built_kernels(request.param)


@pytest.fixture(params=["native", "x86-64-v3"])
def library(request: pytest.FixtureRequest) -> SamplingKernels:
    """The C++ library alone."""
    return built_kernels(request.param)


def built_kernels(architecture: str) -> SamplingKernels:
    try:
        return sampling(architecture)
    except NoLibrary as reason:
        pytest.skip(str(reason))
