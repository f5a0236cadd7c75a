"""The page pool and the block tables: who holds which page of the KV cache."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tidemill_worker.engine.row import Row

UNUSED = -1


class PagePool:
    """Pages by id, each free or held by one row."""

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def can_allocate(self, pages: int) -> bool:
        return pages <= len(self._free)

    def allocate(self, pages: int) -> list[int] | None:
        """Page ids, or ``None`` where there are not enough."""
        if pages > len(self._free):
            return None
        return [self._free.pop() for _ in range(pages)]

    def release(self, pages: Iterable[int]) -> None:
        self._free.extend(pages)

    def check_integrity(self, holders: Iterable[Row]) -> None:
        """Raises `AssertionError` unless every page is free or held by exactly one row."""
        held = [page for row in holders for page in row.pages]
        assert len(set(held)) == len(held), "a page is in two block tables"
        assert set(held).isdisjoint(self._free), "a page is both free and held"
        assert len(held) + len(self._free) == self.total, "pages leaked"


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
