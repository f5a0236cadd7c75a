"""What is shared, what never is, and what is forgotten."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.worker.engine.conftest import Bench, expected_tokens, make_row
from tidemill_contracts.models.errors import KVCacheLost
from tidemill_contracts.wire import ErrorCode
from tidemill_worker.engine.pages import PagePool
from tidemill_worker.engine.prefix_cache import PrefixCache
from tidemill_worker.engine.row import Row

STEM = list(range(40, 56))
"""Four pages."""


def _bench(page_hash: Callable[[object], int] = hash, **options: int) -> Bench:
    bench = Bench(**options)
    bench.scheduler.cache = PrefixCache(bench.pool, page_hash=page_hash)
    return bench


def _finish(bench: Bench, *rows: Row) -> None:
    """Runs the rows to their end and checks what they say."""
    for row in rows:
        bench.add(row)
    bench.run()
    bench.scheduler.cache.check_integrity()
    for row in rows:
        assert row.error is None
        prompt = row.token_ids[: row.prompt_len]
        assert list(row.output_token_ids) == expected_tokens(prompt, row.max_len - row.prompt_len)


def test_a_second_row_computes_only_what_the_first_has_not() -> None:
    bench = _bench()
    first, second = make_row([*STEM, 1]), make_row([*STEM, 2])
    _finish(bench, first)
    _finish(bench, second)
    assert (first.cached, second.cached) == (0, 16)
    assert bench.scheduler.cached_tokens == 16


def test_generated_tokens_are_shared_too() -> None:
    bench = _bench()
    first = make_row(STEM, 9)
    _finish(bench, first)
    second = make_row([*first.token_ids, 5])
    _finish(bench, second)
    # 24 of the first row's 25 tokens were computed, which are six full pages.
    assert second.cached == 24


def test_the_last_known_token_is_always_computed() -> None:
    bench = _bench()
    first, second = make_row(STEM), make_row(STEM)
    _finish(bench, first)
    _finish(bench, second)
    assert second.cached == 12


def test_only_full_pages_are_shared() -> None:
    bench = _bench()
    _finish(bench, make_row(STEM[:7], 1))
    row = make_row([*STEM[:7], 9, 9])
    _finish(bench, row)
    assert row.cached == 4


@pytest.mark.parametrize("page_hash", [lambda _: 7, lambda page: hash(page) % 2])
def test_a_constant_hash_function_never_shares_a_page(page_hash: Callable[[object], int]) -> None:
    bench = _bench(page_hash)
    for first in range(5):
        _finish(bench, *(make_row([first, second, *STEM], 6) for second in range(5)))
    assert len(bench.scheduler.cache) <= 2


def test_equal_pages_after_different_ones_are_not_the_same() -> None:
    # A hash over a page's own tokens alone would take these for one.
    bench = _bench(lambda page: hash(page[1]))  # type: ignore[index]
    _finish(bench, make_row([1, 1, 1, 1, *STEM]))
    _finish(bench, make_row([2, 2, 2, 2, *STEM]))
    row = make_row([2, 2, 2, 2, *STEM])
    _finish(bench, row)
    assert row.cached == 4


def test_ids_that_differ_by_256_do_not_collide() -> None:
    bench = _bench()
    prompt = [id_ + 256 for id_ in STEM]
    _finish(bench, make_row([*STEM, 1]))
    row = make_row([*prompt, 1])
    _finish(bench, row)
    assert row.cached == 0
    assert list(row.output_token_ids) == expected_tokens([*prompt, 1], 8)


def test_two_salts_never_share() -> None:
    bench = _bench()
    _finish(bench, make_row([*STEM, 1], cache_salt="a"), make_row([*STEM, 2]))
    other, same = make_row([*STEM, 3], cache_salt="b"), make_row([*STEM, 3], cache_salt="a")
    _finish(bench, other, same)
    assert (other.cached, same.cached) == (0, 16)


def test_two_salts_with_one_hash_never_share() -> None:
    bench = _bench(lambda page: hash(page[1]))  # type: ignore[index]
    _finish(bench, make_row([*STEM, 1], cache_salt="a"))
    row = make_row([*STEM, 1], cache_salt="b")
    _finish(bench, row)
    assert row.cached == 0


@pytest.mark.parametrize("max_step_tokens", [1, 5, 64])
def test_cached_equals_uncached(max_step_tokens: int) -> None:
    prompts = [[*STEM[: 3 * n], n, *range(n)] for n in range(6)] * 3
    outputs = []
    for prefix_caching in (True, False):
        bench = Bench(pages=24, max_step_tokens=max_step_tokens)
        if not prefix_caching:
            bench.scheduler.cache = PrefixCache(bench.pool, enabled=False)
        rows = [make_row(prompt, 10) for prompt in prompts]
        _finish(bench, *rows)
        assert (bench.scheduler.cached_tokens > 0) == prefix_caching
        assert (bench.pool.cached > 0) == prefix_caching
        outputs.append([row.token_ids for row in rows])
    assert outputs[0] == outputs[1]


def test_the_least_recently_used_stem_is_evicted_first() -> None:
    bench = _bench(pages=12)
    stems = [[stem] * 12 for stem in range(3)]
    for stem in (*stems, stems[0]):
        _finish(bench, make_row([*stem, 1], 1))
    assert bench.pool.cached == 9
    _finish(bench, make_row([90] * 13, 9))  # six pages: three are free, three must be evicted
    rows = [make_row([*stem, 2], 1) for stem in stems]
    assert [len(bench.scheduler.cache.match(row)) for row in rows] == [3, 0, 3]


def test_a_stem_is_evicted_from_its_end() -> None:
    bench = _bench(pages=8)
    _finish(bench, make_row([*STEM, 1], 1))
    _finish(bench, make_row([90] * 20, 5))  # six pages
    assert len(bench.scheduler.cache.match(make_row([*STEM, 2]))) == 2


def test_a_page_whose_parent_is_forgotten_is_free() -> None:
    bench = _bench()
    cache = bench.scheduler.cache
    first = make_row([*STEM, 1], 1)
    _finish(bench, first, make_row([*STEM[:4], *range(9)], 1))
    assert bench.pool.cached == 6
    (root,) = cache.match(make_row(STEM[:5]))
    bench.pool.evict(root)
    cache.check_integrity()
    assert (len(cache), bench.pool.cached) == (0, 0)
    _finish(bench, make_row([*STEM, 1], 1))
    assert len(cache) == 4


def test_a_stem_longer_than_the_recursion_limit_is_forgotten() -> None:
    pool = PagePool(3_000, 1)
    cache = PrefixCache(pool)
    row = make_row([3] * 3_000, 1)
    cache.open(row)
    row.pages, row.computed = pool.allocate(3_000) or [], 3_000
    row.append(3, now=0.0)
    cache.insert(row)
    assert len(cache) == 3_000
    cache.forget(row)
    pool.release(row.pages)
    assert (len(cache), pool.cached, pool.free) == (0, 0, 3_000)


@pytest.mark.parametrize("at", ["first token", "later"])
def test_pages_of_a_nan_row_are_not_reused(at: str) -> None:
    bench = _bench()
    known = 17 if at == "first token" else 22
    bad = bench.add(make_row([*STEM, 1], name="bad"))
    bench.runner.nan_for = lambda row, place: row.id == "bad" and row.known >= known
    bench.run()
    assert bad.error is not None
    assert bad.error.code == ErrorCode.NONFINITE_LOGITS
    assert (len(bench.scheduler.cache), bench.pool.cached) == (0, 0)
    row = make_row([*STEM, 2])
    _finish(bench, row)
    assert row.cached == 0


def test_pages_that_a_nan_row_shared_are_computed_again() -> None:
    # Nobody can tell which of its pages is the bad one, and a bad stem would fail every row.
    bench = _bench()
    _finish(bench, make_row([*STEM, 1]))
    bad = bench.add(make_row([*STEM, 2], name="bad"))
    bench.runner.nan_for = lambda row, place: row.id == "bad"
    bench.run()
    assert bad.cached == 16
    row = make_row([*STEM, 3])
    _finish(bench, row)
    assert row.cached == 0


def test_a_page_is_not_shared_before_its_row_has_had_finite_logits() -> None:
    bench = _bench(max_step_tokens=4)
    row = bench.add(make_row([*STEM, 1]))
    for _ in range(4):
        bench.engine.step()
    assert row.computed == 16
    bench.scheduler.plan()
    assert len(bench.scheduler.cache) == 0


def test_pages_of_a_row_that_raises_are_not_reused() -> None:
    bench = _bench()
    bench.add(make_row([*STEM, 1], name="bad"))
    bench.runner.raise_for = lambda row: row.id == "bad" and row.known >= 20
    bench.run()
    assert (len(bench.scheduler.cache), bench.pool.cached) == (0, 0)


def test_nothing_that_was_computed_before_a_loss_of_the_kv_cache_is_reused() -> None:
    bench = _bench(max_rows=3)
    _finish(bench, make_row([*STEM, 1]))
    loser = bench.add(make_row([*STEM, 2], 12, name="loser"))
    other = bench.add(make_row([*STEM, 3], 12, name="other"))
    bench.engine.step()
    losses = iter([True, True])  # with the others in its step, then alone

    def lose_once(row: Row) -> bool:
        if row.id == "loser" and next(losses, False):
            raise KVCacheLost("planted restart")
        return False

    bench.runner.raise_for = lose_once
    bench.engine.step()
    assert (loser.restarts, loser.computed) == (1, 0)
    assert len(bench.scheduler.cache) == 0
    for _ in range(4):
        bench.engine.step()
    # The row that lost its pages has filled new ones; the other's are in doubt for ever.
    assert set(bench.scheduler.cache.match(make_row([*STEM, 4]))) <= set(loser.pages)
    bench.run()
    assert list(other.output_token_ids) == expected_tokens([*STEM, 3], 12)
    assert list(loser.output_token_ids) == expected_tokens([*STEM, 2], 12)


def test_a_running_row_with_nothing_cached_yet_caches_nothing_after_a_loss() -> None:
    bench = _bench()
    bench.add(make_row([*STEM, 1]))
    bench.engine.step()
    assert len(bench.scheduler.cache) == 0
    bench.scheduler.drop_cache()
    bench.run()
    assert (len(bench.scheduler.cache), bench.pool.cached) == (0, 0)


def test_drop_cache_frees_every_page() -> None:
    bench = _bench()
    _finish(bench, make_row([*STEM, 1]), make_row([9] * 20))
    assert bench.pool.cached > 0
    bench.scheduler.drop_cache()
    assert (len(bench.scheduler.cache), bench.pool.cached) == (0, 0)
    bench.pool.check_integrity([])


def test_nothing_is_remembered_of_rows_that_have_left() -> None:
    bench = _bench(max_rows=2)
    _finish(bench, *(make_row([*STEM, n]) for n in range(6)))
    assert not bench.scheduler.cache._progress
