"""Guesses a row's next tokens: those that followed where its last ones stood before.

Prompt lookup, the speculative decoding that needs no second model: a row that copies out of its
prompt, or repeats itself, is guessed well, and any other for next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_MATCH = 2
"""Tokens that must have stood there before."""
MAX_MATCH = 8
"""More of them make no place a better one."""
MAX_TRIED = 16
"""Places that are compared, the latest first: a common pair has any number."""
_WEIGHT = 1 / 4
"""Of the latest guessed token in the hit rate."""


class Lookup:
    """Where each pair of a row's tokens stands, read as the row grows: one entry a token."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._latest: dict[int, int] = {}
        """By a pair, the place after the last one that was read."""
        self._earlier = [0] * MIN_MATCH
        """By the place after a pair, that after the one before of the same pair; 0 for none."""

    def guess(self, count: int) -> list[int]:
        """What followed the longest match of the row's end, of equal ones the latest; nothing
        where its last two tokens are a new pair.

        What reaches the end goes on from the match again, so that a loop is taken to go on.
        """
        place, known = self._find(), len(self._token_ids)
        if not place:
            return []
        return [self._token_ids[place + i % (known - place)] for i in range(count)]

    def _find(self) -> int:
        """The place after the match; 0 where there is none."""
        self._read()
        found, longest = 0, MIN_MATCH - 1
        place = self._earlier[-1]
        for _ in range(MAX_TRIED):
            if not place or longest == MAX_MATCH:
                break
            length = self._match(place)
            if length > longest:
                found, longest = place, length
            place = self._earlier[place]
        return found

    def _read(self) -> None:
        tokens = self._token_ids
        for place in range(len(self._earlier), len(tokens) + 1):
            pair = tokens[place - 2] << 32 | tokens[place - 1]
            self._earlier.append(self._latest.get(pair, 0))
            self._latest[pair] = place

    def _match(self, place: int) -> int:
        """Tokens before the place that are the row's last ones too."""
        tokens, back = self._token_ids, len(self._token_ids) - place
        length = MIN_MATCH
        while length < min(MAX_MATCH, place):
            at = place - 1 - length
            if tokens[at] != tokens[at + back]:
                break
            length += 1
        return length


class Drafter:
    """One row's guesses, and how often they turn out right whether they were computed or not."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.hit_rate = 0.25
        """The chance of a guessed token to be right where those before it are."""
        self._token_ids = token_ids
        self._lookup = Lookup(token_ids)
        self._guess: list[int] = []
        self._guessed_at = 0

    def guess(self, count: int) -> list[int]:
        """So many tokens that may come next, or none at all. Asked once for each of the row's
        steps, it learns from what has come of its last answer."""
        came = self._token_ids[self._guessed_at : self._guessed_at + len(self._guess)]
        for guessed, token in zip(self._guess, came, strict=False):
            self.hit_rate += _WEIGHT * ((guessed == token) - self.hit_rate)
            if guessed != token:
                break
        self._guess, self._guessed_at = self._lookup.guess(count), len(self._token_ids)
        return self._guess
