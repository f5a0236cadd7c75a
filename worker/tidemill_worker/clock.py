"""The time by which a worker judges deadlines: Redis's, whatever the machine's own clock says."""

from __future__ import annotations

import time


class RedisClock:
    """Redis's clock, carried on by the monotonic one since Redis last told it; the machine's own
    until then. May be read in any thread."""

    def __init__(self) -> None:
        self.told = False
        self._at_zero = 0.0
        """Redis's time where the monotonic clock says 0."""

    def tell(self, now_ms: int) -> None:
        self._at_zero = now_ms / 1000 - time.monotonic()
        self.told = True

    def __call__(self) -> float:
        """Seconds since the Unix epoch."""
        return self._at_zero + time.monotonic() if self.told else time.time()
