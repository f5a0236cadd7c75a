"""Which pages hold which tokens, so that rows with the same beginning compute it once.

Only full pages are cached, and only once a row has had finite logits from them: nothing that a
faulty step wrote is ever shared. Pages form chains, each page after the one before it. A page
is looked up by a hash over its chain and its tokens, but a hash is never believed: the page
before it, the tokens and the salt are compared too.

Pages that rows in line begin with are pinned, so that others are evicted before them. This goes
by the hash alone, which is enough for a preference.

One cache belongs to one KV cache of one model, so the model is not part of the key.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tidemill_worker.engine.pages import PagePool
from tidemill_worker.engine.row import Row

PINS_PER_PAGE = 4
"""How far down a long line the cache looks, in pages of its rows for each page of the pool."""
LOOK_AHEAD_PAGES = 1_024
"""Pages to hash in one step at most for rows that wait, the last row's beyond it included."""

PageHash = Callable[[tuple[str | int, tuple[int, ...]]], int]
"""Key of a page from the key of the page before it (the salt, for a row's first page) and its
token ids."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A page that can be shared."""

    page: int
    key: int
    salt: str
    parent: _Entry | None
    """The page before it; ``None`` for a first page."""
    token_ids: list[int]
    children: set[_Entry] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Progress:
    """How far a row's own pages have been dealt with."""

    keys: list[int] = field(default_factory=list)
    """Of its full pages, as far as anybody has asked."""
    known: int = 0
    """Its known tokens when it was admitted: when there are more, logits were finite."""
    pages: int = 0
    """Leading pages whose content is in the cache, in these pages or in equal ones."""
    last: _Entry | None = None
    """The last of them."""


class PrefixCache:
    """The full pages of rows that run or have run, by what is in them."""

    def __init__(self, pool: PagePool, *, enabled: bool = True, page_hash: PageHash = hash) -> None:
        self._pool = pool
        self._enabled = enabled
        self._hash = page_hash
        self._by_key: dict[int, _Entry] = {}
        self._by_page: dict[int, _Entry] = {}
        self._progress: dict[Row, _Progress] = {}
        # Rows in line: those looked at, with how many pages, and those that are not yet.
        self._expected_by: dict[Row, int] = {}
        self._unseen: OrderedDict[Row, None] = OrderedDict()
        self._expected: Counter[int] = Counter()
        """How many rows in line have a page, by its key."""
        self._expected_total = 0
        pool.evict = self._evict

    def __len__(self) -> int:
        """Pages that can be shared, whether a row holds them or not."""
        return len(self._by_page)

    def match(self, row: Row) -> list[int]:
        """Pages with the longest cached beginning of the row's tokens.

        Never its last known token, nor a token of the prompt that is still to be told of: those
        are computed again, for their logits.
        """
        return [entry.page for entry in self._match(row)]

    def open(self, row: Row) -> None:
        """Follows a row that has just been admitted and holds nothing but what `match` gave."""
        if not self._enabled:
            return
        progress = self._progress.setdefault(row, _Progress())
        progress.known = row.known
        progress.pages = len(row.pages)
        progress.last = self._by_page[row.pages[-1]] if row.pages else None

    def insert(self, row: Row) -> None:
        """Enters the pages that a running row has filled since it was last asked.

        Does nothing while the row has no token from this admission: until then nothing shows
        that its logits are finite.
        """
        progress = self._progress.get(row)
        full = row.computed // self._pool.page_size
        if progress is None or full <= progress.pages or row.known <= progress.known:
            return
        while progress.pages < full:
            index, parent = progress.pages, progress.last
            if index > 0 and (parent is None or self._by_page.get(parent.page) is not parent):
                return  # The page before it was forgotten, so nobody could find this one.
            (key,) = self.keys(row, index, index + 1)
            entry = self._by_key.get(key)
            if entry is None:
                entry = self._enter(row, index, key, parent)
            elif not self._holds(entry, row, index, parent):
                return  # Two contents with one hash: the one that came first stays.
            progress.pages, progress.last = index + 1, entry

    def forget(self, row: Row) -> None:
        """Forgets the pages of a running row, shared ones too, and all that continue them."""
        for page in row.pages:
            if page in self._by_page:
                self._remove(self._by_page[page])

    def clear(self) -> None:
        """Forgets every page. What the running rows hold now is not cached later either."""
        for entry in [entry for entry in self._by_page.values() if entry.parent is None]:
            self._remove(entry)
        for progress in self._progress.values():
            progress.pages, progress.last = max(1, progress.pages), None

    def close(self, row: Row) -> None:
        """The row has left for good."""
        self._progress.pop(row, None)

    def expect(self, row: Row) -> None:
        """The row is in line: its pages will be wanted."""
        if self._enabled:
            self._unseen[row] = None

    def look_ahead(self) -> None:
        """Pins the pages of rows in line, the first comers' first, as far as is worth it."""
        left = LOOK_AHEAD_PAGES
        while self._unseen and left > 0 and self._expected_total < PINS_PER_PAGE * self._pool.total:
            row, _ = self._unseen.popitem(last=False)
            keys = self.keys(row, 0, self._shareable(row))
            self._expected_by[row] = len(keys)
            self._expected_total += len(keys)
            left -= len(keys) + 1
            # As in `PagePool.release`: the last page of a stem is evicted first.
            for key in reversed(keys):
                self._expected[key] += 1
                if self._expected[key] == 1 and key in self._by_key:
                    self._pool.pin(self._by_key[key].page)

    def unexpect(self, row: Row) -> None:
        """The row is in line no more."""
        self._unseen.pop(row, None)
        pages = self._expected_by.pop(row, 0)
        self._expected_total -= pages
        for key in reversed(self.keys(row, 0, pages)):
            self._expected[key] -= 1
            if not self._expected[key]:
                del self._expected[key]
                if key in self._by_key:
                    self._pool.unpin(self._by_key[key].page)

    def keys(self, row: Row, start: int, end: int) -> list[int]:
        """Keys of the row's full pages from page `start` up to page `end`."""
        if not self._enabled:
            return []
        keys = self._progress.setdefault(row, _Progress()).keys
        size = self._pool.page_size
        for index in range(len(keys), min(end, row.known // size)):
            before = keys[-1] if keys else row.cache_salt
            keys.append(self._hash((before, tuple(self._token_ids(row, index)))))
        return keys[start:end]

    def next_key(self, row: Row, pages: int) -> int | None:
        """Key of the page that would make a match of `pages` pages longer, if there can be one."""
        keys = self.keys(row, pages, min(pages + 1, self._shareable(row)))
        return keys[0] if keys else None

    def check_integrity(self) -> None:
        """Raises `AssertionError` where the parts of the cache disagree."""
        for page, entry in self._by_page.items():
            assert entry.page == page, "an entry is filed under another's page"
            assert self._by_key.get(entry.key) is entry, "an entry cannot be found"
            if entry.parent is not None:
                assert entry in entry.parent.children, "a page is not known to the one before it"
                assert self._by_page.get(entry.parent.page) is entry.parent, "an orphan"
        assert len(self._by_key) == len(self._by_page), "a key without its page"
        assert self._expected_total == self._expected.total(), "expected pages miscounted"
        wanted = {entry.page for key, entry in self._by_key.items() if self._expected[key]}
        assert wanted == self._pool.pinned, "not what is expected is pinned"

    def _match(self, row: Row) -> list[_Entry]:
        entries: list[_Entry] = []
        for index, key in enumerate(self.keys(row, 0, self._shareable(row))):
            entry = self._by_key.get(key)
            parent = entries[-1] if entries else None
            if entry is None or not self._holds(entry, row, index, parent):
                break
            entries.append(entry)
        return entries

    def _shareable(self, row: Row) -> int:
        """Pages that the longest match could have."""
        return row.reusable // self._pool.page_size

    def _holds(self, entry: _Entry, row: Row, index: int, parent: _Entry | None) -> bool:
        """Whether the entry is the row's page at `index` and comes after `parent`."""
        return (
            entry.parent is parent
            and entry.salt == row.cache_salt
            and entry.token_ids == self._token_ids(row, index)
        )

    def _token_ids(self, row: Row, index: int) -> list[int]:
        size = self._pool.page_size
        return row.token_ids[index * size : (index + 1) * size]

    def _enter(self, row: Row, index: int, key: int, parent: _Entry | None) -> _Entry:
        page = row.pages[index]
        entry = _Entry(page, key, row.cache_salt, parent, self._token_ids(row, index))
        if parent is not None:
            parent.children.add(entry)
        self._by_key[key] = self._by_page[page] = entry
        self._pool.keep(page)
        if key in self._expected:
            self._pool.pin(page)
        return entry

    def _evict(self, page: int) -> None:
        self._remove(self._by_page[page])

    def _remove(self, entry: _Entry) -> None:
        """Removes an entry and all after it, which could not be found without it."""
        if entry.parent is not None:
            entry.parent.children.remove(entry)
        doomed = [entry]
        while doomed:
            entry = doomed.pop()
            doomed.extend(entry.children)
            del self._by_key[entry.key]
            del self._by_page[entry.page]
            self._pool.discard(entry.page)
