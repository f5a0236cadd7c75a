"""Who holds which page: holders are counted, cached pages are evicted in order, nothing leaks."""

from __future__ import annotations

import pytest

from tests.worker.engine.conftest import make_row
from tidemill_worker.engine.pages import UNUSED, BlockTables, PagePool


def _pool_with_cached(*pages: int, total: int = 4) -> PagePool:
    """A pool in which just these pages are cached; they were released in this order."""
    pool = PagePool(total, 4)
    assert pool.allocate(total) == list(range(total))
    for page in pages:
        pool.keep(page)
        pool.release([page])
    pool.release([page for page in range(total) if page not in pages])
    return pool


def test_allocate_answers_none_where_there_are_too_few() -> None:
    pool = PagePool(3, 4)
    assert pool.allocate(2) == [0, 1]
    assert not pool.can_allocate(2)
    assert pool.allocate(2) is None
    assert (pool.used, pool.free, pool.cached) == (2, 1, 0)


def test_a_page_is_free_when_its_last_holder_releases_it() -> None:
    pool = PagePool(2, 4)
    pages = pool.allocate(1)
    assert pages is not None
    pool.share(pages)
    pool.release(pages)
    assert pool.used == 1
    pool.release(pages)
    assert pool.used == 0


def test_a_page_released_twice_is_noticed() -> None:
    pool = PagePool(2, 4)
    pages = pool.allocate(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.release(pages)


def test_a_free_page_cannot_be_shared() -> None:
    with pytest.raises(AssertionError, match="nothing to share"):
        PagePool(2, 4).share([1])


def test_cached_pages_count_as_free_and_are_taken_last() -> None:
    pool = _pool_with_cached(0, 1)
    assert (pool.used, pool.free, pool.cached) == (0, 4, 2)
    assert sorted(pool.allocate(2) or []) == [2, 3]
    assert pool.cached == 2
    assert pool.allocate(2) is not None
    assert pool.cached == 0


def test_the_least_recently_used_page_is_evicted_first() -> None:
    pool = _pool_with_cached(2, 0, 1, 3)
    pool.share([2])
    pool.release([2])
    assert [pool.allocate(1) for _ in range(4)] == [[0], [1], [3], [2]]


def test_the_last_page_of_a_row_is_evicted_before_the_pages_it_follows() -> None:
    pool = PagePool(3, 4)
    pages = pool.allocate(3)
    assert pages is not None
    for page in pages:
        pool.keep(page)
    pool.release(pages)
    assert [pool.allocate(1) for _ in pages] == [[page] for page in reversed(pages)]


def test_pages_about_to_be_shared_are_not_counted_as_room() -> None:
    pool = _pool_with_cached(0, 1)
    assert pool.can_allocate(4)
    assert pool.can_allocate(2, shared=[0, 1])
    assert not pool.can_allocate(3, shared=[0, 1])


def test_a_discarded_page_is_free_at_once_or_when_it_is_released() -> None:
    pool = PagePool(2, 4)
    pages = pool.allocate(2)
    assert pages is not None
    for page in pages:
        pool.keep(page)
    pool.release(pages[:1])
    for page in pages:
        pool.discard(page)
    pool.release(pages[1:])
    assert (pool.free, pool.cached) == (2, 0)


def test_the_integrity_check_finds_a_leak_and_two_unrelated_rows() -> None:
    pool = PagePool(4, 2)
    one, two = make_row([1, 2, 3]), make_row([1, 2, 4])
    one.pages = pool.allocate(1) or []
    pool.check_integrity([one])
    with pytest.raises(AssertionError, match="miscounted"):
        pool.check_integrity([])
    pool.share(one.pages)
    two.pages = list(one.pages)
    pool.check_integrity([one, two])
    two.cache_salt = "other"
    with pytest.raises(AssertionError, match="unrelated"):
        pool.check_integrity([one, two])
    two.cache_salt = ""
    two.token_ids[0] = 9
    with pytest.raises(AssertionError, match="unrelated"):
        pool.check_integrity([one, two])


def test_a_closed_line_is_unused_again() -> None:
    tables = BlockTables(max_rows=2, pages_per_row=4)
    row = make_row([1])
    tables.open(row)
    tables.append(row, [3])
    tables.append(row, [1])
    assert tables.array[row.table_index].tolist() == [3, 1, UNUSED, UNUSED]
    assert tables.close(row) == [3, 1]
    assert (tables.array == UNUSED).all()
    assert row.table_index == UNUSED
