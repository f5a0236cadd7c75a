"""Schedules, pages and faults, over a fake model whose answers betray every mix-up."""

from __future__ import annotations

import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.engine.conftest import Bench, expected_tokens, expected_tops, make_row, tops
from tidemill_contracts.models.errors import KVCacheLost
from tidemill_contracts.wire import ErrorCode, JobError
from tidemill_worker.engine.engine import Engine
from tidemill_worker.engine.line import MAX_PREEMPTIONS
from tidemill_worker.engine.row import Row

prompts = st.lists(st.integers(0, 96), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(prompts, st.integers(1, 20), st.integers(-2, 2), st.integers(0, 30)),
        min_size=1,
        max_size=12,
    ),
    pages=st.integers(15, 40),
    max_rows=st.integers(1, 6),
    max_step_tokens=st.integers(1, 24),
)
def test_every_row_ends_once_with_the_tokens_it_has_alone(
    jobs: list[tuple[list[int], int, int, int]], pages: int, max_rows: int, max_step_tokens: int
) -> None:
    bench = Bench(pages=pages, max_rows=max_rows, max_step_tokens=max_step_tokens)
    rows: list[Row] = []
    pending = sorted(enumerate(jobs), key=lambda job: job[1][3])
    for step in range(5_000):
        while pending and pending[0][1][3] <= step:
            index, (prompt, max_tokens, priority, _) = pending.pop(0)
            rows.append(bench.add(make_row(prompt, max_tokens, name=str(index), priority=priority)))
        if not pending and not bench.scheduler.has_work:
            break
        if bench.scheduler.has_work:
            bench.engine.step()
    assert sorted(row.id for row in bench.delivered) == sorted(row.id for row in rows)
    for row in rows:
        assert row.finish_reason == "length"
        prompt = row.token_ids[: row.prompt_len]
        assert list(row.output_token_ids) == expected_tokens(prompt, row.max_len - row.prompt_len)
    assert bench.pool.free == bench.pool.total


@pytest.mark.parametrize("seed", range(3))
def test_a_pool_for_two_rows_and_a_half_finishes_fifty_long_rows(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(pages=25, page_size=4, max_rows=8, max_step_tokens=16)
    rows = [
        bench.add(
            make_row(
                [i, i + 1, i + 2],
                37,
                name=str(i),
                priority=rng.randint(-3, 3),
                tenant=rng.choice("abc"),
            )
        )
        for i in range(50)
    ]
    bench.run()
    # Without a bound the unluckiest row is preempted up to six times here.
    assert max(row.preemptions for row in rows) == MAX_PREEMPTIONS
    for row in rows:
        assert list(row.output_token_ids) == expected_tokens(row.token_ids[:3], 37)


def test_the_first_row_is_never_preempted() -> None:
    bench = Bench(pages=16, page_size=4, max_rows=8)
    rows = [bench.add(make_row([i] * 5, 55, name=str(i))) for i in range(8)]
    bench.run()
    assert rows[0].preemptions == 0
    assert any(row.preemptions for row in rows)


def test_a_row_that_can_never_fit_is_refused_with_the_numbers() -> None:
    bench = Bench(pages=8, page_size=4)
    assert bench.scheduler.refusal(30, 3) is None  # the last token needs no room
    error = bench.scheduler.refusal(30, 4)
    assert error is not None
    assert error.code == ErrorCode.PROMPT_TOO_LONG
    assert "34 do not fit the KV cache of 8 pages of 4 tokens" in error.message


def test_the_largest_row_that_fits_runs() -> None:
    bench = Bench(pages=8, page_size=4)
    row = bench.add(make_row([5] * 30, 3))
    bench.run()
    assert list(row.output_token_ids) == expected_tokens([5] * 30, 3)


def test_higher_priority_runs_first() -> None:
    bench = Bench(max_rows=1)
    for name, priority in (("low", -1), ("middle", 0), ("high", 5), ("late", 0)):
        bench.add(make_row([1], 2, name=name, priority=priority))
    bench.run()
    assert [row.id for row in bench.delivered] == ["high", "middle", "late", "low"]


def test_a_step_that_raises_fails_the_bad_row_alone() -> None:
    bench = Bench(max_rows=8)
    rows = [bench.add(make_row([i, 2, 3], 6, name=str(i))) for i in range(7)]
    bench.runner.raise_for = lambda row: row.id == "3" and row.known >= 5
    bench.run()
    for row in rows:
        if row.id == "3":
            assert row.error is not None
            assert row.error.code == ErrorCode.ENGINE_ERROR
            assert "planted fault" in row.error.message
        else:
            assert list(row.output_token_ids) == expected_tokens(row.token_ids[:3], 6)


def test_a_prompt_that_raises_fails_alone() -> None:
    bench = Bench(max_rows=8, max_step_tokens=64)
    rows = [bench.add(make_row([i] * 9, 3, name=str(i))) for i in range(6)]
    bench.runner.raise_for = lambda row: row.id in ("0", "5")
    bench.run()
    assert [row.id for row in rows if row.error] == ["0", "5"]


def test_a_row_whose_cache_its_backend_lost_is_computed_anew() -> None:
    bench = Bench(max_rows=8)
    rows = [bench.add(make_row([i, 2, 3], 8, name=str(i))) for i in range(4)]
    lost = {"1", "2"}

    def lose_once(row: Row) -> bool:
        if row.known < 6 or row.id not in lost:
            return False
        if row.computed == row.known - 1:
            raise KVCacheLost("planted restart")
        lost.discard(row.id)  # its computation has begun again
        return False

    bench.runner.raise_for = lose_once
    bench.run()
    assert lost == set()
    assert [row.restarts > 0 for row in rows] == [False, True, True, False]
    for row in rows:
        assert list(row.output_token_ids) == expected_tokens(row.token_ids[:3], 8)


def test_a_row_whose_cache_is_lost_again_and_again_fails() -> None:
    bench = Bench()

    def lose(row: Row) -> bool:
        raise KVCacheLost("planted restart")

    bench.runner.raise_for = lose
    row = bench.add(make_row([1, 2], 5))
    bench.run()
    assert row.error is not None
    assert row.error.code == ErrorCode.ENGINE_ERROR
    assert "planted restart" in row.error.message


def test_nonfinite_logits_fail_their_row_only() -> None:
    bench = Bench()
    rows = [bench.add(make_row([i, 2], 5, name=str(i))) for i in range(4)]
    bench.runner.nan_for = lambda row, place: row.id == "1" and place >= 3
    bench.run()
    assert rows[1].error is not None
    assert rows[1].error.code == ErrorCode.NONFINITE_LOGITS
    for row in (rows[0], rows[2], rows[3]):
        assert list(row.output_token_ids) == expected_tokens(row.token_ids[:2], 5)


def test_a_token_of_the_end_set_stops_the_row_and_is_kept() -> None:
    bench = Bench()
    output = expected_tokens([3, 1], 10)
    row = make_row([3, 1], 10)
    row.end_token_ids = frozenset({output[4]})
    bench.add(row)
    bench.run()
    assert row.finish_reason == "stop"
    assert list(row.output_token_ids) == output[: output.index(output[4]) + 1]


class _Threaded:
    """An engine in its own thread."""

    def __init__(self, **options: int) -> None:
        self.bench = Bench(**options)
        self.done = threading.Semaphore(0)
        self.delivered: list[Row] = []
        self.crash: Exception | None = None
        self.engine = Engine(
            self.bench.runner,
            self.bench.scheduler,
            self._deliver,
            max_wait_ms=5,
            on_crash=self._on_crash,
        )
        self.engine.start()

    def _deliver(self, rows: list[Row]) -> None:
        self.delivered.extend(rows)
        for _ in rows:
            self.done.release()

    def _on_crash(self, error: Exception) -> None:
        self.crash = error
        self.done.release()


def test_the_thread_gathers_submissions_and_ends_each_once() -> None:
    threaded = _Threaded(max_rows=8)
    rows = [make_row([i], 5, name=str(i)) for i in range(40)]
    for row in rows:
        threaded.engine.submit(row)
    for _ in rows:
        assert threaded.done.acquire(timeout=10)
    threaded.engine.stop(10)
    assert not threaded.engine.alive
    assert len(set(threaded.delivered)) == 40
    assert threaded.engine.stats.completion_tokens == 200
    # Eight rows at a time: forty rows of five tokens need 25 steps, plus a few ragged ones.
    assert threaded.engine.stats.steps < 60


def test_an_aborted_row_ends_as_cancelled_and_frees_its_pages() -> None:
    threaded = _Threaded()
    row, other = make_row([1], 200, name="a"), make_row([2], 20, name="b")
    threaded.bench.runner.raise_for = lambda _: time.sleep(0.001) is not None
    threaded.engine.submit(row)
    threaded.engine.submit(other)
    threaded.engine.abort(row)
    threaded.engine.abort(row)
    for _ in range(2):
        assert threaded.done.acquire(timeout=10)
    threaded.engine.abort(row)
    threaded.engine.stop(10)
    assert row.error is not None
    assert row.error.code == ErrorCode.CANCELLED
    assert list(other.output_token_ids) == expected_tokens([2], 20)
    assert threaded.bench.pool.free == threaded.bench.pool.total
    assert len(threaded.delivered) == 2


def test_a_bug_in_the_loop_is_reported_and_ends_the_thread() -> None:
    threaded = _Threaded()

    def broken(**_: object) -> None:
        raise RuntimeError("planted bug")

    threaded.bench.scheduler.plan = broken  # type: ignore[method-assign,assignment]
    threaded.engine.submit(make_row([1], 2))
    assert threaded.done.acquire(timeout=10)
    threaded.engine._thread.join(10)
    assert str(threaded.crash) == "planted bug"
    assert not threaded.engine.alive


def _told_once(bench: Bench, row: Row) -> bool:
    """Whether the row's prompt was told of, each place once and in order. The last one tells of
    the first output token, so it may be left to prefill or decode."""
    places = [place for told, place in bench.runner.told if told is row]
    assert len(places) in (row.prompt_len - 1, row.prompt_len)
    in_order = places == list(range(len(places)))
    return in_order and tops(row) == expected_tops(row.token_ids[: row.prompt_len])


@pytest.mark.parametrize("max_step_tokens", [3, 8, 64])
@pytest.mark.parametrize("max_logit_rows", [1, 4, 100])
def test_a_prompt_is_told_of_whole_however_it_is_cut(
    max_step_tokens: int, max_logit_rows: int
) -> None:
    bench = Bench(max_rows=3, max_step_tokens=max_step_tokens)
    bench.runner.max_logit_rows = max_logit_rows
    prompts = [list(range(start, start + 21)) for start in (0, 20, 40)]
    rows = [
        bench.add(make_row(prompt, 5, name=str(i), prompt_logprobs=None if i == 1 else 1))
        for i, prompt in enumerate(prompts)
    ]
    bench.run()
    assert _told_once(bench, rows[0])
    assert rows[1].prompt_logprobs == []
    assert _told_once(bench, rows[2])
    for row, prompt in zip(rows, prompts, strict=True):
        assert list(row.output_token_ids) == expected_tokens(prompt, 5)


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    bench = Bench()
    row = bench.add(make_row([5], 2, prompt_logprobs=1))
    bench.run()
    assert (row.prompt_logprobs, bench.runner.told) == ([], [])
    assert list(row.output_token_ids) == expected_tokens([5], 2)


def test_a_prompt_that_is_told_of_takes_no_page_from_the_cache_but_gives_its_own() -> None:
    bench = Bench()
    stem = list(range(17))
    bench.add(make_row([*stem, 1], 2))
    bench.run()
    row = bench.add(make_row([*stem, 2], 2, prompt_logprobs=1))
    bench.run()
    assert row.cached == 0
    assert _told_once(bench, row)
    new = list(range(40, 57))
    bench.add(make_row([*new, 1], 2, prompt_logprobs=1))
    bench.run()
    later = bench.add(make_row([*new, 2], 2))
    bench.run()
    assert later.cached == 16


def test_a_preempted_prompt_goes_on_where_it_has_told() -> None:
    bench = Bench(pages=10, page_size=4, max_rows=2, max_step_tokens=4)
    first = bench.add(make_row([1, 2], 30))
    bench.engine.step()
    row = bench.add(make_row(list(range(30)), 4, prompt_logprobs=1))
    told = 0
    while row.preemptions == 0:
        told = len(row.prompt_logprobs)
        bench.engine.step()
    assert 0 < told < 29, "this pool must preempt it in its prompt"
    bench.run()
    assert _told_once(bench, row)
    assert list(row.output_token_ids) == expected_tokens(list(range(30)), 4)
    assert list(first.output_token_ids) == expected_tokens([1, 2], 30)


@pytest.mark.parametrize("max_step_tokens", [8, 64], ids=["between steps", "within a step"])
def test_a_prompt_whose_cache_is_lost_goes_on_where_it_has_told(max_step_tokens: int) -> None:
    bench = Bench(max_step_tokens=max_step_tokens)
    rows = [bench.add(make_row([i] * 20, 3, name=str(i), prompt_logprobs=1)) for i in range(2)]

    def lose_once(row: Row) -> bool:
        if row.computed >= 8 and row.restarts == 0:
            raise KVCacheLost("planted restart")
        return False

    bench.runner.raise_for = lose_once
    bench.run()
    for row in rows:
        assert row.restarts == 1
        assert _told_once(bench, row)


def test_a_prompt_that_raises_while_it_is_told_of_fails_alone() -> None:
    bench = Bench(max_rows=8, max_step_tokens=64)
    rows = [bench.add(make_row([i] * 9, 3, name=str(i), prompt_logprobs=1)) for i in range(6)]
    bench.runner.raise_for = lambda row: row.id in ("0", "5") and row.computed > 0
    bench.run()
    assert [row.id for row in rows if row.error] == ["0", "5"]
    assert all(_told_once(bench, row) for row in rows[1:5])


def test_nonfinite_logits_within_a_prompt_fail_its_row_and_are_not_shared() -> None:
    bench = Bench()
    bench.runner.max_logit_rows = 4
    bad = bench.add(make_row([7] * 12, 3, name="bad", prompt_logprobs=1))
    good = bench.add(make_row([8] * 12, 3, name="good", prompt_logprobs=1))
    bench.runner.nan_for = lambda row, place: row is bad and place == 5
    bench.run()
    assert bad.error is not None
    assert bad.error.code == ErrorCode.NONFINITE_LOGITS
    assert _told_once(bench, good)
    later = bench.add(make_row([7] * 12, 3))
    bench.run()
    assert later.cached == 0


def test_a_row_that_is_cancelled_while_it_tells_frees_its_pages() -> None:
    bench = Bench(max_step_tokens=4)
    row = bench.add(make_row(list(range(30)), 3, prompt_logprobs=1))
    bench.engine.step()
    assert row.untold
    bench.engine._fail([row], JobError.of(ErrorCode.CANCELLED, "The job was cancelled"))
    assert bench.pool.free == bench.pool.total
    bench.run()


@pytest.mark.parametrize("along", [True, False])
def test_decode_rows_run_along_with_chunks_where_the_model_gains_by_it(along: bool) -> None:
    bench = Bench(max_step_tokens=16)
    bench.runner.decodes_along = along
    calls: list[tuple[int, int]] = []
    bench.runner.on_call = lambda rows, tokens: calls.append((rows, tokens))
    first = bench.add(make_row([1, 2], 9, name="first"))
    bench.engine.step()
    second = bench.add(make_row(list(range(8)), 3, name="second"))
    calls.clear()
    bench.engine.step()
    assert calls == ([(2, 9)] if along else [(1, 1), (1, 8)])
    bench.run()
    assert list(first.output_token_ids) == expected_tokens([1, 2], 9)
    assert list(second.output_token_ids) == expected_tokens(list(range(8)), 3)
