"""The rows that wait, and whose turn it is.

Rows of one priority are a lane. The lane whose oldest row has waited longest is served first,
where each step of priority counts as a minute of having waited. In a lane the tenant that has
been served least comes next, and of its rows the one with the earliest deadline, then the oldest.
Rows that have been preempted too often go before all lanes.

Whatever is asked costs O(log rows), and O(lanes + tenants that have been served since) for whose
turn it is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

from tidemill_worker.engine.fairness import FairShare
from tidemill_worker.engine.row import Row

MAX_PREEMPTIONS = 3
"""After so many a row goes first, and only where nothing will preempt it again."""

_Key = tuple[float, ...]


class _RowHeap:
    """Rows by a key. Those that are no longer `live` go when they come up, or are too many."""

    def __init__(self, key: Callable[[Row], _Key], live: Callable[[Row], bool]) -> None:
        self._entries: list[tuple[_Key, Row]] = []
        self._key = key
        self._live = live
        self._limit = 64

    def push(self, row: Row) -> None:
        heapq.heappush(self._entries, (self._key(row), row))
        if len(self._entries) > self._limit:
            # A row that came back may be here twice.
            live = {row: key for key, row in self._entries if self._live(row)}
            self._entries = [(key, row) for row, key in live.items()]
            heapq.heapify(self._entries)
            self._limit = 64 + 2 * len(self._entries)

    def first(self) -> Row | None:
        while self._entries:
            row = self._entries[0][1]
            if self._live(row):
                return row
            heapq.heappop(self._entries)
        return None

    def pop(self) -> None:
        heapq.heappop(self._entries)

    def clear(self) -> None:
        self._entries.clear()


class _Lane:
    """The waiting rows of one priority."""

    def __init__(
        self, fair: FairShare, waits: Callable[[Row], bool], ready: Callable[[Row], bool]
    ) -> None:
        self.oldest = _RowHeap(lambda row: row.rank, waits)
        """Rows that are set aside included."""
        self._fair = fair
        self._ready = ready
        self._rows: dict[str, _RowHeap] = {}
        # Tenants by what they had been served when they were entered, in the order they came.
        self._tenants: list[tuple[int, int, str]] = []
        self._entries = 0

    def push(self, row: Row) -> None:
        self.oldest.push(row)
        self.push_ready(row)

    def push_ready(self, row: Row) -> None:
        """As `push`, for a row that never left the lane."""
        rows = self._rows.get(row.tenant)
        if rows is None:
            rows = self._rows[row.tenant] = _RowHeap(_urgency, self._ready)
            self._enter(row.tenant)
        rows.push(row)

    def first(self) -> Row | None:
        """The row whose turn it is; ``None`` where all are set aside."""
        while self._tenants:
            served, _, tenant = self._tenants[0]
            row = self._rows[tenant].first()
            if row is None:
                heapq.heappop(self._tenants)
                del self._rows[tenant]
            elif served < self._fair.served(tenant):
                heapq.heappop(self._tenants)
                self._enter(tenant)
            else:
                return row
        return None

    def _enter(self, tenant: str) -> None:
        heapq.heappush(self._tenants, (self._fair.served(tenant), self._entries, tenant))
        self._entries += 1


class WaitingLine:
    """Every row that waits, each once."""

    def __init__(self, fair: FairShare) -> None:
        self.tokens = 0
        """Known tokens of all rows in line."""
        self.room = 0
        """Tokens that they may generate yet."""
        self._fair = fair
        self._rows: dict[Row, None] = {}
        self._aside: dict[Row, None] = {}
        self._lanes: dict[int, _Lane] = {}
        self._often_preempted = _RowHeap(lambda row: row.rank, self._is_ready)
        self._deadlines = _RowHeap(_urgency, self._rows.__contains__)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __contains__(self, row: Row) -> bool:
        return row in self._rows

    def push(self, row: Row) -> None:
        """Puts a row in line."""
        self._rows[row] = None
        self.tokens += row.known
        self.room += row.max_len - row.known
        if row.deadline is not None:
            self._deadlines.push(row)
        if row.preemptions >= MAX_PREEMPTIONS:
            self._often_preempted.push(row)
            return
        lane = self._lanes.get(row.priority)
        if lane is None:
            lane = _Lane(self._fair, self._rows.__contains__, self._is_ready)
            self._lanes[row.priority] = lane
        lane.push(row)

    def first(self) -> Row | None:
        """The row whose turn it is; ``None`` where there is none, or all are set aside."""
        row = self._often_preempted.first()
        if row is not None:
            return row
        oldest = []
        for priority, lane in list(self._lanes.items()):
            eldest = lane.oldest.first()
            if eldest is None:
                del self._lanes[priority]
            else:
                oldest.append((eldest.rank, lane))
        # Almost always the first lane has a row, so the others need no order.
        while oldest:
            best = min(oldest, key=lambda entry: entry[0])
            row = best[1].first()
            if row is not None:
                return row
            oldest.remove(best)
        return None

    def remove(self, row: Row) -> None:
        """Takes a row out, wherever it stands."""
        del self._rows[row]
        self._aside.pop(row, None)
        self.tokens -= row.known
        self.room -= row.max_len - row.known
        if not self._rows:
            # No row that has left is held on to.
            self._lanes.clear()
            self._often_preempted.clear()
            self._deadlines.clear()

    def set_aside(self, row: Row) -> None:
        """Lets others go before the row until `restore`; it stays in line."""
        self._aside[row] = None

    def restore(self) -> None:
        """Ends what `set_aside` began."""
        aside, self._aside = self._aside, {}
        for row in aside:
            if row.preemptions >= MAX_PREEMPTIONS:
                self._often_preempted.push(row)
            else:
                self._lanes[row.priority].push_ready(row)

    def expired(self, now: float) -> list[Row]:
        """Rows in line whose deadline has passed; all of them must be removed."""
        late: dict[Row, None] = {}
        while (row := self._deadlines.first()) is not None and _urgency(row)[0] <= now:
            late[row] = None
            self._deadlines.pop()
        return list(late)

    def _is_ready(self, row: Row) -> bool:
        return row in self._rows and row not in self._aside


def _urgency(row: Row) -> _Key:
    """Earlier deadlines first, then what has waited longest."""
    return (math.inf if row.deadline is None else row.deadline, *row.rank)
