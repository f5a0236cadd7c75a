"""The rows of a batch file, one JSON object a line, whatever their format.

A line that is no good becomes one error row with its line number; it never stops the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tidemill_contracts.wire import (
    ErrorCode,
    GenerationJob,
    GenerationResult,
    InvalidMessage,
    JobError,
)

if TYPE_CHECKING:
    from tidemill_producer.batch.formats import RowFormat

MAX_LINE_BYTES = 64 * 1024 * 1024
"""A job of the largest allowed size fits, with every character escaped."""
UTF8_BOM = b"\xef\xbb\xbf"

CustomId = Annotated[str, Meta(min_length=1, max_length=512)]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """A line that is a job. `line` counts from 1."""

    line: int
    custom_id: str
    job: GenerationJob
    context: Any = None
    """What its format needs again to write the answer: small, and can be pickled."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not; `custom_id` where it could be read."""

    line: int
    custom_id: str | None
    error: JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRow:
    """What becomes one line of the output; exactly one of `result` and `error` is set."""

    custom_id: str | None
    result: GenerationResult | None = None
    error: JobError | None = None
    line: int | UnsetType = UNSET
    """The line of the input, from 1, where that line is not a job."""
    context: Any = None
    """That of the `Row`."""


class _CustomIdOnly(msgspec.Struct, frozen=True):
    custom_id: CustomId


_custom_id_decoder = msgspec.json.Decoder(_CustomIdOnly)


def read_rows(
    numbered: Iterable[tuple[int, bytes]], row_format: RowFormat, *, run_id: str
) -> Iterator[Row | BadLine]:
    """Each of those `lines`, in order; job ids are ``<run_id>:<line>``.

    Holds one line at a time, and every `custom_id` so far: a second use of one is refused.
    """
    first_lines: dict[str, int] = {}
    for line, raw in numbered:
        row = row_format.read(raw, line, run_id)
        if isinstance(row, Row):
            first = first_lines.setdefault(row.custom_id, line)
            if first != line:
                message = f"Line {first} has the same `custom_id` - at `$.custom_id`"
                row = BadLine(line, row.custom_id, invalid(message).error)
        yield row


def count_rows(stream: BinaryIO) -> int:
    """How many rows `read_rows` will give."""
    return sum(1 for _ in lines(stream))


def lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, without what ends them, numbered from 1.

    A line of more than `MAX_LINE_BYTES` comes back cut there, with its last byte past the limit.
    """
    line = 0
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        line += 1
        rest = raw
        while len(rest) == MAX_LINE_BYTES + 1 and not rest.endswith(b"\n"):
            rest = stream.readline(MAX_LINE_BYTES + 1)
        if line == 1:
            raw = raw.removeprefix(UTF8_BOM)
        stripped = raw.strip(b" \t\r\n")
        if stripped:
            yield line, raw if len(raw) > MAX_LINE_BYTES else stripped


def decode_line(raw: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Raises `InvalidMessage` for a line that is too long, broken, or has a key twice."""
    if len(raw) > MAX_LINE_BYTES:
        raise invalid(f"The line has more than {MAX_LINE_BYTES:,} bytes")
    try:
        value = decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(_explain(str(error), raw)) from error
    _refuse_double_keys(raw)
    return value


def custom_id_of(raw: bytes) -> str | None:
    """The line's `custom_id`, where it has a good one."""
    try:
        return _custom_id_decoder.decode(raw).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def invalid(message: str) -> InvalidMessage:
    """The error of a line that is not a job."""
    return InvalidMessage(JobError.of(ErrorCode.INVALID_JOB, message))


def _refuse_double_keys(raw: bytes) -> None:
    """msgspec keeps the last value of a key that stands twice: one of them would be ignored."""
    try:
        # Numbers stay text: Python refuses to read an integer of very many digits.
        json.loads(raw, object_pairs_hook=_check_keys, parse_int=str, parse_float=str)
    except RecursionError as error:
        raise invalid("The line is nested too deeply") from error
    except ValueError as error:
        raise invalid(f"JSON is malformed: {error}") from error


def _check_keys(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise invalid(f"Object has the key `{key}` twice")
        seen.add(key)


def _explain(message: str, raw: bytes) -> str:
    if message == "Input data was truncated" and re.search(rb"\\u[dD][89a-fA-F]", raw):
        return "The line has half of a surrogate pair (`\\ud800` to `\\udfff`), or is cut short"
    return message
