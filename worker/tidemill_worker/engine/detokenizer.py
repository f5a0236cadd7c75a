"""Token ids to text as they come, never splitting a character.

Works on bytes: a byte-level BPE token is a string of bytes, and UTF-8 is decoded incrementally
over their concatenation. So a character that spans tokens is held back until it is whole, a
literal U+FFFD is a character like any other, and the pieces concatenate to the same text that
decoding everything at once gives.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Detokenizer:
    """The text of one row."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pieces: list[str] = []

    def append(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        # Ids of the padded vocabulary have no bytes; the sampler never draws one.
        raw = self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
        piece = self._decoder.decode(raw)
        if piece:
            self._pieces.append(piece)
        return piece

    @property
    def pieces(self) -> Sequence[str]:
        """What the tokens have completed so far."""
        return self._pieces

    def finish(self) -> str:
        """The whole text; bytes of an unfinished character become U+FFFD."""
        rest = self._decoder.decode(b"", final=True)
        if rest:
            self._pieces.append(rest)
        self._decoder.reset()
        return "".join(self._pieces)
