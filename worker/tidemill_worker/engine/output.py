"""What a row has written so far: its text, the stop texts in it, and whether it repeats itself."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill_worker.engine.detokenizer import Detokenizer


class OutputText:
    """The text of one row, ending where a stop text begins.

    A stop text may lie over token borders, and one may begin another: the one that begins first
    ends the row, and of two that begin together the shorter.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, include_stop: bool = False
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._overlap = max(map(len, stops), default=1) - 1
        """Characters that may begin a stop text which later ones complete."""
        self._tail = ""
        self._tail_start = 0
        """Where the tail begins in the whole text."""
        self._end: int | None = None
        """Where the stop text that has ended the row cuts the whole text."""
        self._pieces_read = 0
        self._taken = 0
        self._untaken = ""

    def append(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Adds a token; returns the stop text that it completes, if any.

        Text that stands before stopping is allowed can neither hold nor begin a stop text.
        """
        piece = self._detokenizer.append(token_id)
        if not self._stops:
            return None
        self._tail += piece
        stop = self._find_stop() if may_stop else None
        self._shorten_tail(self._overlap if may_stop else 0)
        return stop

    def take_delta(self, *, final: bool = False) -> str:
        """The text since the last call, as far as it can no longer change.

        What may begin a stop text is held back, and no more than that; a `final` call gives the
        rest. All deltas together are what `finish` returns.
        """
        if final:
            self._detokenizer.finish()
        pieces = self._detokenizer.pieces
        self._untaken += "".join(pieces[self._pieces_read :])
        self._pieces_read = len(pieces)
        if self._end is not None:
            safe = self._end - self._taken
        else:
            safe = len(self._untaken) - (0 if final else self._held_back())
        delta, self._untaken = self._untaken[:safe], self._untaken[safe:]
        self._taken += len(delta)
        return delta

    def finish(self) -> str:
        """The whole text, cut at the stop text that ended it."""
        text = self._detokenizer.finish()
        return text if self._end is None else text[: self._end]

    def _find_stop(self) -> str | None:
        found = [
            (start, len(stop), stop)
            for stop in self._stops
            if (start := self._tail.find(stop)) >= 0
        ]
        if not found:
            return None
        start, length, stop = min(found)
        self._end = self._tail_start + start + (length if self._include_stop else 0)
        return stop

    def _held_back(self) -> int:
        """Characters at the end that may begin a stop text."""
        longest = min(self._overlap, len(self._tail))
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._tail[-length:]) for stop in self._stops):
                return length
        return 0

    def _shorten_tail(self, keep: int) -> None:
        gone = max(0, len(self._tail) - keep)
        self._tail_start += gone
        self._tail = self._tail[gone:]


class Repetition:
    """Whether the output ends in one pattern over and over."""

    def __init__(self, max_pattern: int, min_count: int) -> None:
        self._max_pattern = max_pattern
        self._min_count = min_count

    def found(self, token_ids: Sequence[int], start: int) -> bool:
        """True where the tokens from `start` on end in `min_count` copies of a pattern of at most
        `max_pattern` tokens."""
        known = len(token_ids)
        for length in range(1, self._max_pattern + 1):
            span = length * self._min_count
            if known - start < span:
                return False
            # A pattern repeats where every token equals the one a pattern's length before it.
            if all(
                token_ids[i] == token_ids[i - length]
                for i in range(known - 1, known - span + length - 1, -1)
            ):
                return True
        return False
