"""A row can be cancelled, and its deadline can pass, at every point of its life."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.worker.engine.conftest import Bench, Clock, expected_tokens, make_row
from tidemill_contracts.wire import ErrorCode
from tidemill_worker.engine.row import Row

PROMPT = list(range(20, 50))


def _bench(clock: Clock | None = None) -> Bench:
    """Four steps for the prompt, eight tokens at a time."""
    return Bench(max_rows=2, max_step_tokens=8, clock=clock)


def _is_cancelled(bench: Bench, row: Row) -> None:
    assert row.error is not None
    assert row.error.code == ErrorCode.CANCELLED
    assert bench.delivered.count(row) == 1
    assert not bench.scheduler.holds(row)
    assert (row.pages, row.table_index) == ([], -1)


def _finishes(bench: Bench, *rows: Row) -> None:
    bench.run()
    for row in rows:
        prompt = row.token_ids[: row.prompt_len]
        assert list(row.output_token_ids) == expected_tokens(prompt, row.max_len - row.prompt_len)
    assert bench.pool.free == bench.pool.total
    assert len(bench.delivered) == len(set(bench.delivered))


@pytest.mark.parametrize(
    ("steps", "point"),
    [
        (0, lambda row: row.scheduled_at == 0),
        (2, lambda row: 0 < row.computed < row.prompt_len),
        (6, lambda row: row.generated > 1),
    ],
    ids=["queued", "in the middle of its prompt", "in decode"],
)
@pytest.mark.parametrize("times", [1, 2])
def test_a_row_is_cancelled_when(steps: int, point: Callable[[Row], bool], times: int) -> None:
    bench = _bench()
    row = bench.add(make_row(PROMPT, 20, name="row"))
    other = bench.add(make_row([1, 2], 12, name="other"))
    bench.step(steps)
    assert point(row)
    bench.cancel(*[row] * times)
    _is_cancelled(bench, row)
    if times == 2:
        bench.cancel(row)
    _finishes(bench, other)


def test_a_row_is_cancelled_when_preempted() -> None:
    bench = Bench(pages=12, max_rows=4)
    rows = [bench.add(make_row([n] * 9, 24, name=str(n))) for n in range(4)]
    while not any(row.preemptions for row in rows):
        bench.step()
    (row,) = [row for row in rows if row.preemptions]
    bench.cancel(row)
    _is_cancelled(bench, row)
    _finishes(bench, *(other for other in rows if other is not row))


def test_a_row_that_is_cancelled_in_the_step_in_which_it_finishes_has_finished() -> None:
    bench = _bench()
    row, other = make_row([3], 2, name="row"), make_row([1, 2], 12, name="other")
    for each in (row, other):
        bench.add(each)
    bench.step()
    bench.runner.on_call = lambda rows, tokens: bench.engine.abort(row)
    bench.step()
    bench.runner.on_call = lambda rows, tokens: None
    assert row.finish_reason == "length"
    bench.cancel()
    assert row.error is None
    _finishes(bench, row, other)
    assert bench.delivered.count(row) == 1


def test_all_outputs_of_a_job_are_cancelled_wherever_they_stand() -> None:
    bench = _bench()
    outputs = [bench.add(make_row(PROMPT, 20, name=f"job#{n}")) for n in range(4)]
    other = bench.add(make_row([1, 2], 12, name="other"))
    bench.step(6)
    assert {row.table_index >= 0 for row in outputs} == {True, False}
    bench.cancel(*outputs)
    for row in outputs:
        _is_cancelled(bench, row)
    _finishes(bench, other)


def test_cancelling_a_row_that_nobody_has_seen_is_harmless() -> None:
    bench = _bench()
    other = bench.add(make_row([1, 2], 4))
    bench.cancel(make_row([5], 3))
    _finishes(bench, other)
    assert bench.delivered == [other]


def test_a_deadline_that_passes_in_the_queue_expires_the_row_before_any_prefill() -> None:
    clock = Clock()
    bench = _bench(clock)
    others = [bench.add(make_row([n, 2], 12, name=str(n))) for n in range(2)]
    bench.step(2)
    row = bench.add(make_row(PROMPT, 20, deadline=clock.now + 5))
    bench.step()
    clock.now += 5
    bench.step()
    assert row.error is not None
    assert row.error.code == ErrorCode.EXPIRED
    assert (row.scheduled_at, row.computed) == (0, 0)
    _finishes(bench, *others)


def test_a_deadline_that_passes_in_the_middle_of_the_prompt_expires_the_row() -> None:
    clock = Clock()
    bench = _bench(clock)
    row = bench.add(make_row(PROMPT, 20, deadline=clock.now + 5))
    other = bench.add(make_row([1, 2], 12))
    bench.step(2)
    assert 0 < row.computed < row.prompt_len
    clock.now += 6
    bench.step()
    assert row.error is not None
    assert row.error.code == ErrorCode.EXPIRED
    assert row.generated == 0
    _finishes(bench, other)


@pytest.mark.parametrize("preempted", [False, True])
def test_a_deadline_that_passes_in_decode_gives_what_there_is(preempted: bool) -> None:
    clock = Clock()
    bench = _bench(clock)
    row = bench.add(make_row(PROMPT, 20, deadline=clock.now + 5))
    other = bench.add(make_row([1, 2], 12))
    bench.step(6)
    assert row.generated > 1
    if preempted:
        bench.scheduler.preempt(row)
    clock.now += 6
    bench.step()
    assert (row.finish_reason, row.error) == ("deadline", None)
    assert list(row.output_token_ids) == expected_tokens(PROMPT, row.generated)
    _finishes(bench, other)


def test_a_row_that_finishes_in_the_step_in_which_its_deadline_passes_has_finished() -> None:
    clock = Clock()
    bench = _bench(clock)
    row = bench.add(make_row([3], 2, deadline=clock.now + 5))
    bench.step()

    def pass_time(rows: int, tokens: int) -> None:
        clock.now += 6

    bench.runner.on_call = pass_time
    bench.step()
    assert row.finish_reason == "length"
    _finishes(bench, row)
