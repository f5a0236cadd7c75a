"""Which rows run in a step, and what a shared stem costs."""

from __future__ import annotations

from tests.worker.engine.conftest import Bench, expected_tokens, make_row
from tidemill_contracts.wire import ErrorCode, JobError
from tidemill_worker.engine.pages import PagePool
from tidemill_worker.engine.prefix_cache import PINS_PER_PAGE
from tidemill_worker.engine.row import Row
from tidemill_worker.engine.scheduler import Scheduler

STEM = list(range(40, 56))
"""Four pages."""


def _stem_rows(bench: Bench, count: int, max_tokens: int = 4) -> list[Row]:
    return [bench.add(make_row([*STEM, n], max_tokens, name=str(n))) for n in range(count)]


def test_a_job_of_nine_pages_in_a_pool_of_eight_is_refused_and_a_small_one_runs() -> None:
    bench = Bench(pages=8, page_size=4)
    error = bench.scheduler.refusal(20, 14)  # 34 tokens, of which 33 are computed
    assert error is not None
    assert error.code == ErrorCode.PROMPT_TOO_LONG
    bench.add(make_row([1, 2], 4))
    bench.run()


def test_a_pool_full_of_cached_pages_still_holds_the_largest_row() -> None:
    bench = Bench(pages=8, page_size=4)
    for prompt in ([1] * 16, [2] * 15, [3] * 30):
        row = bench.add(make_row(prompt, 3))
        bench.run()
        assert list(row.output_token_ids) == expected_tokens(prompt, 3)


def test_rows_of_one_file_compute_their_stem_once() -> None:
    bench = Bench(max_rows=8, max_step_tokens=64)
    rows = _stem_rows(bench, 20)
    bench.run()
    assert [row.cached for row in rows] == [0] + [16] * 19
    assert bench.engine.stats.prompt_tokens <= 17 + 19
    for row in rows:
        assert list(row.output_token_ids) == expected_tokens(row.token_ids[:17], 4)


def test_rows_wait_one_step_for_a_stem_that_is_being_computed() -> None:
    bench = Bench(max_rows=4, max_step_tokens=64)
    first, *others = _stem_rows(bench, 4)
    bench.engine.step()
    assert bench.scheduler.running == [first]
    bench.engine.step()
    assert bench.scheduler.running == [first, *others]


def test_rows_wait_for_a_stem_that_is_computed_in_several_steps() -> None:
    bench = Bench(max_rows=4, max_step_tokens=10)
    first, second = _stem_rows(bench, 2)
    for _ in range(2):
        bench.engine.step()
        assert bench.scheduler.running == [first]
    bench.engine.step()
    assert second.cached == 16


def test_a_row_with_another_beginning_does_not_wait_for_a_stem() -> None:
    bench = Bench(max_rows=4, max_step_tokens=64)
    first, second = _stem_rows(bench, 2)
    other = bench.add(make_row([7] * 9, 4))
    bench.engine.step()
    assert bench.scheduler.running == [first, other]
    bench.engine.step()
    assert second in bench.scheduler.running


def test_a_row_that_waits_for_a_stem_runs_when_the_stem_is_cancelled_or_fails() -> None:
    for fault in ("cancelled", "raises", "preempted"):
        bench = Bench(max_rows=4, max_step_tokens=10)
        first, second = _stem_rows(bench, 2)
        if fault == "raises":
            bench.runner.raise_for = lambda row: row.id == "0"
        bench.engine.step()
        if fault == "cancelled":
            bench.engine._fail([first], JobError.of(ErrorCode.CANCELLED, "The job was cancelled"))
        elif fault == "preempted":
            bench.scheduler.preempt(first)
        bench.run()
        assert list(second.output_token_ids) == expected_tokens([*STEM, 1], 4), fault


def test_a_preempted_row_takes_its_own_pages_up_again() -> None:
    bench = Bench(pages=12, max_rows=4)
    rows = [bench.add(make_row([n] * 9, 24, name=str(n))) for n in range(4)]
    bench.run()
    preempted = [row for row in rows if row.preemptions]
    assert preempted
    assert bench.scheduler.cached_tokens > 0
    # What it shares with itself saves computing, but the prompt was never in the cache.
    assert all(row.cached == 0 for row in preempted)


def test_a_cancelled_row_leaves_its_sound_pages_to_others() -> None:
    bench = Bench()
    (row,) = _stem_rows(bench, 1, max_tokens=30)
    for _ in range(6):
        bench.engine.step()
    bench.engine._fail([row], JobError.of(ErrorCode.CANCELLED, "The job was cancelled"))
    later = bench.add(make_row([*STEM, 5]))
    bench.run()
    assert later.cached == 16


def test_a_stem_outlives_other_rows_while_rows_that_begin_with_it_wait() -> None:
    # One row at a time; between two rows of the file, others fill the pool several times over.
    computed = {}
    for pinning in (True, False):
        bench = Bench(pages=16, max_rows=1, max_step_tokens=64)
        if not pinning:
            bench.scheduler.cache.look_ahead = lambda: None  # type: ignore[method-assign]
        stem_rows = []
        for n in range(6):
            stem_rows.append(bench.add(make_row([*STEM, n], 4, name=f"stem{n}")))
            for other in range(3):
                bench.add(make_row([n * 3 + other] * 20, 4, name=f"other{n}.{other}"))
        bench.run()
        for row in bench.delivered:
            prompt = row.token_ids[: row.prompt_len]
            assert list(row.output_token_ids) == expected_tokens(prompt, 4)
        computed[pinning] = sum(row.prompt_len - row.cached for row in stem_rows)
        assert not bench.pool.pinned
    assert computed == {True: 17 + 5, False: 17 * 6}


def test_pins_never_keep_a_row_from_starting() -> None:
    bench = Bench(pages=17, max_rows=2, max_step_tokens=64)
    stems = [[n] * 16 for n in range(4)]
    for stem in stems:
        bench.add(make_row([*stem, 1], 1))
        bench.run()
    assert bench.pool.cached == 16
    largest = bench.add(make_row([90] * 60, 5, priority=1))
    waiting = [bench.add(make_row([*stem, 2], 1)) for stem in stems]
    bench.step()
    assert len(bench.pool.pinned) < 16
    assert largest in bench.scheduler.running
    bench.run()
    assert all(row.finish_reason == "length" for row in (largest, *waiting))


def test_a_cancelled_row_pins_nothing_any_more() -> None:
    bench = Bench(pages=32, max_rows=1, max_step_tokens=64)
    bench.add(make_row([*STEM, 1], 2))
    bench.run()
    bench.add(make_row([5] * 9, 40))
    waiting = [bench.add(make_row([*STEM, n], 2)) for n in range(2)]
    bench.step()
    assert len(bench.pool.pinned) == 4
    bench.cancel(waiting[0])
    assert len(bench.pool.pinned) == 4
    bench.cancel(waiting[1])
    assert not bench.pool.pinned
    bench.run()


def test_a_long_line_is_looked_at_bit_by_bit() -> None:
    bench = Bench(pages=16, max_rows=1, max_step_tokens=64)
    for n in range(200):
        bench.add(make_row([*STEM, n % 90], 1))
    bench.step()
    cache = bench.scheduler.cache
    assert 0 < cache._expected_total <= PINS_PER_PAGE * 16 + 4
    bench.run()
    assert bench.engine.stats.prompt_tokens == 17
    assert cache._expected_total == 0
    cache.check_integrity()


def test_without_prefix_caching_nothing_is_kept_or_waited_for() -> None:
    bench = Bench()
    scheduler = Scheduler(
        PagePool(64, 4), max_rows=4, max_step_tokens=64, max_model_len=256, prefix_caching=False
    )
    for row in _stem_rows(bench, 4):
        scheduler.add(row)
    assert len(scheduler.plan().prefill) == 4
    for row in list(scheduler.rows()):
        scheduler.remove(row)
    assert (scheduler.pool.cached, scheduler.pool.free) == (0, 64)
