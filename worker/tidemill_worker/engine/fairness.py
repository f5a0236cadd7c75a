"""How much each tenant has been served, so that the one served least comes next.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
(arXiv 2401.00588): a tenant's counter grows with the tokens computed for it, and a tenant that
comes back from idling starts at the least counter of those that were busy. So nobody saves up
credit by staying away; nor is what a tenant had in advance forgotten before the others have
caught up.
"""

from __future__ import annotations

import heapq

PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2
"""What a token counts; both as in the paper, after what API providers charge."""


class FairShare:
    """The counters of the tenants that have rows, and of those that have had more than others."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        """Rows that wait or run; a tenant with none is idle."""
        # Heaps with counters as they were when entered: looked up again before they are believed.
        self._busy: list[tuple[int, str]] = []
        self._entered: set[str] = set()
        self._idle: list[tuple[int, str]] = []
        self._ground = 0
        """Where counters start while nobody has rows."""

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._served)

    def served(self, tenant: str) -> int:
        """The counter of a tenant with rows, in weighted tokens. Never falls."""
        return self._served.get(tenant, 0)

    def arrive(self, tenant: str) -> None:
        """A row of the tenant is put in line for the first time."""
        if tenant not in self._rows:
            floor = self._floor()
            self._forget(floor)
            self._served[tenant] = max(self.served(tenant), floor)
            self._rows[tenant] = 0
            if tenant not in self._entered:
                self._entered.add(tenant)
                heapq.heappush(self._busy, (self._served[tenant], tenant))
        self._rows[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A row of the tenant has left for good."""
        self._rows[tenant] -= 1
        if self._rows[tenant]:
            return
        del self._rows[tenant]
        if self._rows:
            heapq.heappush(self._idle, (self._served[tenant], tenant))
            self._forget(self._floor())
        else:
            # Nobody is left to have been served less: all start anew, from where nobody falls.
            self._ground = max(self._served.values())
            self._served.clear()
            self._busy.clear()
            self._entered.clear()
            self._idle.clear()

    def charge(self, tenant: str, tokens: int) -> None:
        """Counts weighted tokens that are computed for a tenant with rows."""
        self._served[tenant] += tokens

    def _floor(self) -> int:
        """The least counter of a tenant with rows. Never falls."""
        while self._busy:
            served, tenant = self._busy[0]
            if tenant not in self._rows:
                heapq.heappop(self._busy)
                self._entered.remove(tenant)
            elif served < self._served[tenant]:
                heapq.heapreplace(self._busy, (self._served[tenant], tenant))
            else:
                return served
        return self._ground

    def _forget(self, floor: int) -> None:
        """Forgets idle tenants that have had no more than those that are busy."""
        while self._idle and self._idle[0][0] <= floor:
            served, tenant = heapq.heappop(self._idle)
            if tenant not in self._rows and self.served(tenant) == served:
                self._served.pop(tenant, None)
