"""Which format a file is in."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import BinaryIO

import msgspec

from tidemill_producer.batch.formats import RowFormat
from tidemill_producer.batch.formats.openai import OpenAIFormat
from tidemill_producer.batch.formats.tidemill import TidemillFormat
from tidemill_producer.batch.rows import BadLine, Row, lines, read_rows
from tidemill_producer.errors import BatchError

MOST_HELD_BYTES = 16 * 1024 * 1024
"""Lines that do not tell are held back up to here; then the file is in our own schema."""
_OPENAI_FIELDS = frozenset({"body", "url", "method"})
_OUR_FIELDS = frozenset({"prompt", "messages", "prompt_token_ids"})

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def rows_and_format(
    stream: BinaryIO, name: str, *, run_id: str
) -> tuple[Iterator[Row | BadLine], RowFormat]:
    """The rows of a stream and the format called `name`; for ``auto``, that of its first line
    that tells. Raises `BatchError`."""
    numbered = lines(stream)
    held: list[tuple[int, bytes]] = []
    size = 0
    while name == "auto":
        try:
            found = next(numbered, None)
        except OSError as error:
            raise BatchError(f"Cannot read the input: {error.strerror}") from error
        if found is not None:
            held.append(found)
            size += len(found[1])
            name = _told_by(found[1]) or name
        if name == "auto" and (found is None or size > MOST_HELD_BYTES):
            name = TidemillFormat.name
    row_format: RowFormat = OpenAIFormat() if name == OpenAIFormat.name else TidemillFormat()
    return read_rows(chain(held, numbered), row_format, run_id=run_id), row_format


def _told_by(raw: bytes) -> str | None:
    try:
        fields = _fields_decoder.decode(raw).keys()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if fields & _OUR_FIELDS:
        return TidemillFormat.name
    return OpenAIFormat.name if fields & _OPENAI_FIELDS else None
