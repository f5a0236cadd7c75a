"""The page pool and the block tables: who holds which page of the KV cache.

Knows how many rows hold a page, not what is in it: that is `prefix_cache`'s part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tidemill_worker.engine.row import Row

UNUSED = -1


class PagePool:
    """Pages by id. Each is held by one or more rows, or cached, or free.

    A cached page is held by no row but worth keeping for what is in it, until it is needed. A
    pin says that it soon will be shared: it is evicted after all others, but it is evicted.
    """

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self.evict: Callable[[int], None] = self.discard
        """Called when no page is free, with the cached page that has not been used for longest
        (a pinned one only where all are); must `discard` it, and may discard others."""
        self._holders = [0] * total
        self._free = list(range(total - 1, -1, -1))
        self._kept: set[int] = set()
        self._pins: set[int] = set()
        # The cached pages, least recently used first.
        self._cached: dict[int, None] = {}
        self._cached_pinned: dict[int, None] = {}

    @property
    def free(self) -> int:
        """Pages that no row holds: what can be allocated."""
        return len(self._free) + self.cached

    @property
    def cached(self) -> int:
        """The pages among the `free` ones that still hold something worth keeping."""
        return len(self._cached) + len(self._cached_pinned)

    @property
    def used(self) -> int:
        """Pages that rows hold."""
        return self.total - self.free

    @property
    def pinned(self) -> frozenset[int]:
        """Pages to be evicted last, whether a row holds them or not."""
        return frozenset(self._pins)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def can_allocate(self, pages: int, shared: Iterable[int] = ()) -> bool:
        """Whether there are so many pages to allocate after these were shared."""
        return pages + sum(map(self._is_cached, shared)) <= self.free

    def allocate(self, pages: int) -> list[int] | None:
        """Page ids, or ``None`` where there are not enough."""
        if pages > self.free:
            return None
        while len(self._free) < pages:
            self.evict(next(iter(self._cached or self._cached_pinned)))
        taken = [self._free.pop() for _ in range(pages)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to pages that are held already, or cached."""
        for page in pages:
            assert self._holders[page] or self._is_cached(page), "a free page has nothing to share"
            self._cached.pop(page, None)
            self._cached_pinned.pop(page, None)
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Takes a holder from each page. A row's pages are given in the order of its tokens."""
        # Last page first, so that it is evicted first: without it the ones before are of use.
        for page in reversed(pages):
            assert self._holders[page] > 0, "a page is released that nobody holds"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._pins:
                    self._cached_pinned[page] = None
                elif page in self._kept:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """Marks a held page as one to be cached, not freed, when its last holder releases it."""
        self._kept.add(page)

    def discard(self, page: int) -> None:
        """Undoes `keep`: the page is free as soon as no row holds it."""
        self._kept.remove(page)
        self.unpin(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def pin(self, page: int) -> None:
        """Asks that a kept page be evicted after those that are not pinned."""
        self._pins.add(page)
        if page in self._cached:
            del self._cached[page]
            self._cached_pinned[page] = None

    def unpin(self, page: int) -> None:
        """Undoes `pin`."""
        self._pins.discard(page)
        if page in self._cached_pinned:
            del self._cached_pinned[page]
            self._cached[page] = None

    def _is_cached(self, page: int) -> bool:
        return page in self._cached or page in self._cached_pinned

    def check_integrity(self, rows: Iterable[Row]) -> None:
        """Raises `AssertionError` unless every page is free, cached, or held by just these rows,
        and rows that share a page agree in all tokens up to its end."""
        rows = list(rows)
        held = Counter(page for row in rows for page in row.pages)
        assert self._holders == [held[page] for page in range(self.total)], "holders miscounted"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert held.keys().isdisjoint(self._free), "a page is both free and held"
        cached = self._cached.keys() | self._cached_pinned.keys()
        assert held.keys().isdisjoint(cached), "a page is both cached and held"
        assert cached.isdisjoint(self._free), "a page is both free and cached"
        assert cached <= self._kept, "a cached page is not worth keeping"
        assert self._kept.isdisjoint(self._free), "a free page is worth keeping"
        assert self._pins <= self._kept, "a page is pinned that is not worth keeping"
        assert self._cached_pinned.keys() == cached & self._pins, "a pinned page goes first"
        assert len(held) + self.cached + len(self._free) == self.total, "pages leaked"
        meaning: dict[int, tuple[str, list[int]]] = {}
        for row in rows:
            for index, page in enumerate(row.pages):
                if held[page] > 1:
                    content = (row.cache_salt, row.token_ids[: (index + 1) * self.page_size])
                    assert len(content[1]) == (index + 1) * self.page_size, "a shared page grows"
                    assert meaning.setdefault(page, content) == content, (
                        "a page is in two unrelated block tables"
                    )


class BlockTables:
    """The block tables of the running rows as one array, so that a step copies none of them."""

    def __init__(self, max_rows: int, pages_per_row: int) -> None:
        self.array: npt.NDArray[np.int32] = np.full((max_rows, pages_per_row), UNUSED, np.int32)
        self._free = list(range(max_rows - 1, -1, -1))

    def open(self, row: Row) -> None:
        """Gives the row a line; there is one for every row that may run."""
        row.table_index = self._free.pop()

    def append(self, row: Row, pages: list[int]) -> None:
        held = len(row.pages)
        self.array[row.table_index, held : held + len(pages)] = pages
        row.pages.extend(pages)

    def close(self, row: Row) -> list[int]:
        """Takes the line back; returns the pages that the row held."""
        self.array[row.table_index, : len(row.pages)] = UNUSED
        self._free.append(row.table_index)
        row.table_index = UNUSED
        pages, row.pages = row.pages, []
        return pages
