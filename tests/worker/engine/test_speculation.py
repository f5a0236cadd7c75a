"""Tokens that are guessed and computed ahead: fewer steps, and the same in all else.

The fake model's rows repeat themselves, with slips, so that guesses are right and wrong in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.worker.engine.conftest import Bench, expected_tokens, make_row, next_token
from tidemill_contracts.wire import ErrorCode
from tidemill_worker.engine import sampler
from tidemill_worker.engine.budget import Budget
from tidemill_worker.engine.memory import RECOVER_AFTER
from tidemill_worker.engine.row import Row
from tidemill_worker.engine.scheduler import StepPlan

DRAFTS = 5
LOOP = [11, 12, 13, 11, 12, 13, 11, 12]


@pytest.fixture(params=[False, True], ids=["decode apart", "decode along"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return _bench(decodes_along=request.param)


def _bench(*, decodes_along: bool = True, **options: Any) -> Bench:
    """All drafts pay, however long steps take."""
    bench = Bench(**{"max_rows": 4, "max_step_tokens": 32, "max_drafts": DRAFTS, **options})
    bench.runner.max_logit_rows = bench.scheduler._speculator.max_logit_rows = 24
    bench.runner.decodes_along = decodes_along
    bench.scheduler._speculator.price = lambda rows: 0.0  # type: ignore[method-assign]
    return bench


def _check(rows: Sequence[Row]) -> None:
    for row in rows:
        assert row.error is None
        prompt, output = row.token_ids[: row.prompt_len], list(row.output_token_ids)
        assert output == expected_tokens(prompt, len(output))


def test_rows_that_repeat_themselves_take_fewer_steps_and_come_to_the_same(bench: Bench) -> None:
    rows = [bench.add(make_row([n, *LOOP], 40, name=str(n))) for n in range(3)]
    bench.run()
    _check(rows)
    stats = bench.engine.stats
    accepted = [row.accepted_draft_tokens for row in rows]
    assert stats.accepted_draft_tokens == sum(accepted)
    assert stats.draft_tokens == sum(row.draft_tokens for row in rows) > stats.accepted_draft_tokens
    assert stats.completion_tokens == 120
    assert all(accepted)
    # Each row's first token comes with its prompt, and each later one from a step or a guess.
    assert stats.row_steps == 120 - sum(accepted)
    assert stats.prompt_tokens == 27


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_a_row_ends_at_its_length_within_a_guess_and_computes_nothing_past_it(
    max_tokens: int,
) -> None:
    bench = _bench(pages=5, page_size=4)
    ends: list[int] = []
    score = bench.runner.score

    def noted(chunks: Any, tables: Any) -> torch.Tensor:
        ends.extend(chunk.row.computed + chunk.size for chunk in chunks)
        return score(chunks, tables)

    bench.runner.score = noted  # type: ignore[method-assign]
    row = bench.add(make_row(LOOP, max_tokens))
    bench.run()
    _check([row])
    assert row.generated == max_tokens
    assert all(end < row.max_len for end in ends)


def test_what_is_guessed_after_an_end_is_dropped(bench: Bench) -> None:
    tokens = expected_tokens(LOOP, 40)
    for place, token_id in enumerate(tokens):
        if token_id not in tokens[:place]:
            row = bench.add(make_row(LOOP, 40, end_token_ids=frozenset([token_id])))
            bench.run()
            _check([row])
            assert (row.finish_reason, row.generated) == ("stop", place + 1)


def test_beside_a_prompt_and_one_that_is_told_of(bench: Bench) -> None:
    first = bench.add(make_row(LOOP, 30, name="first"))
    bench.step(3)
    others = [
        bench.add(make_row(list(range(20)), 9, name="prompt")),
        bench.add(make_row(list(range(50, 70)), 9, name="told", prompt_logprobs=1)),
    ]
    bench.run()
    _check([first, *others])
    assert len(others[1].prompt_logprobs) == 19
    assert first.accepted_draft_tokens > 0


def test_guesses_leave_prompts_their_share_of_a_step() -> None:
    bench = _bench(max_step_tokens=8)
    first = bench.add(make_row(LOOP, 30, name="first"))
    bench.step(3)
    second = bench.add(make_row(list(range(40)), 2, name="second"))
    bench.step(4)
    assert second.computed == 4 * 7
    assert first.draft_tokens > 0
    bench.run()
    _check([first, second])


def test_a_guess_takes_no_page_that_a_running_row_needs_next() -> None:
    bench = _bench(pages=20, page_size=4)
    scheduler, draft, grown = bench.scheduler, bench.scheduler._draft, 0

    def checked(plan: StepPlan, budget: Budget) -> None:
        nonlocal grown
        free = bench.pool.free
        draft(plan, budget)
        assert bench.pool.free == free or bench.pool.free >= len(scheduler.running)
        grown += free - bench.pool.free

    scheduler._draft = checked  # type: ignore[method-assign]
    rows = [bench.add(make_row([*LOOP, n], 28, name=str(n))) for n in range(4)]
    bench.run()
    _check(rows)
    assert any(row.preemptions for row in rows)
    assert grown > 0


def test_pages_of_accepted_tokens_are_shared_and_rejected_ones_are_in_none() -> None:
    bench = _bench(pages=40)
    first = bench.add(make_row(LOOP, 60))
    bench.run()
    assert 0 < first.accepted_draft_tokens < first.draft_tokens
    second = bench.add(make_row(first.token_ids, 8))
    bench.run()
    _check([first, second])
    # Its last token was not computed, and the page that it stands in is not full.
    assert second.cached == (first.known - 1) // 4 * 4


def test_drafts_that_raise_are_given_up_and_the_rows_go_on(bench: Bench) -> None:
    def fails(rows: int, tokens: int) -> None:
        if tokens > rows:
            raise RuntimeError("planted fault")

    rows = [bench.add(make_row([*LOOP, n], 20, name=str(n))) for n in range(3)]
    bench.step()
    bench.runner.on_call = fails
    bench.run()
    _check(rows)
    assert bench.engine.stats.draft_tokens == 0


def test_a_row_that_raises_with_a_guess_and_without_fails_alone(bench: Bench) -> None:
    rows = [bench.add(make_row([*LOOP, n], 20, name=str(n))) for n in range(3)]
    bench.runner.raise_for = lambda row: row is rows[1] and row.known > 15
    bench.run()
    _check([rows[0], rows[2]])
    assert rows[1].error is not None
    assert rows[1].error.code == ErrorCode.ENGINE_ERROR


def test_where_memory_is_short_nothing_is_guessed_for_a_while() -> None:
    bench = _bench(max_rows=2)
    rows = [bench.add(make_row([n, *LOOP[:4]], 150, name=str(n))) for n in range(8)]
    drafts: list[int] = []
    """Of each step from the first that has some on, which fails."""

    def fails(rows: int, tokens: int) -> None:
        if drafts or tokens > rows:
            drafts.append(tokens - rows)
        if len(drafts) == 1:
            raise MemoryError

    bench.step()
    bench.runner.on_call = fails
    bench.run()
    _check(rows)
    assert not any(drafts[1 : 1 + RECOVER_AFTER])
    assert bench.engine.stats.draft_tokens > 0


def test_a_spoilt_guess_is_nobodys_fault_and_a_spoilt_token_its_rows() -> None:
    bench = _bench()
    row = bench.add(make_row(LOOP, 30))
    sound = [*LOOP, *expected_tokens(LOOP, 30)]
    last = 25
    tokens: dict[Row, list[int]] = {}

    def spoilt(row: Row, place: int) -> bool:
        seen = [*row.token_ids[: row.computed], *tokens[row]]
        return place == last or seen[: place + 1] != sound[: place + 1]

    score, decode = bench.runner.score, bench.runner.decode

    def noted(chunks: Any, tables: Any) -> torch.Tensor:
        tokens.update((chunk.row, chunk.token_ids) for chunk in chunks)
        return score(chunks, tables)

    def noted_rows(rows: Any, tables: Any) -> torch.Tensor:
        tokens.update((row, row.token_ids[-1:]) for row in rows)
        return decode(rows, tables)

    bench.step()
    bench.runner.score = noted  # type: ignore[method-assign]
    bench.runner.decode = noted_rows  # type: ignore[method-assign]
    bench.runner.nan_for = spoilt
    bench.run()
    assert 0 < row.accepted_draft_tokens < row.draft_tokens
    assert row.error is not None
    assert row.error.code == ErrorCode.NONFINITE_LOGITS
    assert row.error.message == "The model gave NaN or infinite logits after 26 tokens"
    assert row.token_ids == sound[: last + 1]


def test_a_draft_that_cannot_be_sampled_is_computed_anew(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = bench.add(make_row(LOOP, 30))
    bench.step()
    sample = sampler.sample
    calls: list[int] = []
    """How often each step has sampled."""
    bench.runner.on_call = lambda rows, tokens: calls.append(0)

    def fails(*args: Any) -> list[sampler.Sampled | None]:
        calls[-1] += 1
        if calls[-1] == 3:
            raise RuntimeError("planted fault")
        return sample(*args)

    monkeypatch.setattr(sampler, "sample", fails)
    bench.run()
    _check([row])
    assert max(calls) == 3
    assert row.accepted_draft_tokens > 0


def test_the_fake_model_is_guessed_right_and_wrong() -> None:
    tokens = [*LOOP, *expected_tokens(LOOP, 60)]
    repeats = [next_token(tokens[:n]) in tokens[:n] for n in range(len(LOOP), len(tokens))]
    assert set(repeats) == {True, False}
