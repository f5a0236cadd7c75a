"""The rows of a batch file: one JSON object a line, in and out.

In: ``{"custom_id": "r1", "prompt": "…"}``, with any field of `GenerationJob` but its ``id``.
Out: ``{"custom_id": "r1", "result": {…}, "error": null}``, or an error and no result. A line that
is no good becomes one error row with its line number; it never stops the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, BinaryIO

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tidemill_contracts.wire import (
    ErrorCode,
    GenerationJob,
    GenerationResult,
    InvalidMessage,
    JobError,
    encode_job,
)

MAX_LINE_BYTES = 64 * 1024 * 1024
"""A job of the largest allowed size fits, with every character escaped."""
UTF8_BOM = b"\xef\xbb\xbf"

CustomId = Annotated[str, Meta(min_length=1, max_length=512)]


@dataclass(frozen=True, slots=True)
class Row:
    """A line that is a job. `line` counts from 1."""

    line: int
    custom_id: str
    job: GenerationJob


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not; `custom_id` where it could be read."""

    line: int
    custom_id: str | None
    error: JobError


class OutputRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the output; exactly one of `result` and `error` is set."""

    custom_id: str | None
    result: GenerationResult | None = None
    error: JobError | None = None
    line: int | UnsetType = UNSET
    """The line of the input, from 1, where that line is not a job."""


class _RowFields(GenerationJob, frozen=True, kw_only=True, forbid_unknown_fields=True):
    custom_id: CustomId


class _CustomIdOnly(msgspec.Struct, frozen=True):
    custom_id: CustomId


_row_decoder = msgspec.json.Decoder(_RowFields)
_custom_id_decoder = msgspec.json.Decoder(_CustomIdOnly)
_output_encoder = msgspec.json.Encoder()


def read_rows(stream: BinaryIO, *, run_id: str) -> Iterator[Row | BadLine]:
    """Every line that is not blank, in order; job ids are ``<run_id>:<line>``.

    Holds one line at a time, and every `custom_id` so far: a second use of one is refused.
    """
    first_lines: dict[str, int] = {}
    for line, raw in _lines(stream):
        try:
            row = _read_row(raw, line, run_id)
            first = first_lines.setdefault(row.custom_id, line)
            if first != line:
                raise _invalid(f"Line {first} has the same `custom_id` - at `$.custom_id`")
        except InvalidMessage as error:
            yield BadLine(line, _custom_id_of(raw), error.error)
        else:
            yield row


def count_rows(stream: BinaryIO) -> int:
    """How many rows `read_rows` will give."""
    return sum(1 for _ in _lines(stream))


def encode_output(row: OutputRow) -> bytes:
    """The row as one line, its newline included."""
    return _output_encoder.encode(row) + b"\n"


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
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


def _read_row(raw: bytes, line: int, run_id: str) -> Row:
    if len(raw) > MAX_LINE_BYTES:
        raise _invalid(f"The line has more than {MAX_LINE_BYTES:,} bytes")
    try:
        fields = _row_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(_explain(str(error), raw)) from error
    if fields.id is not None:
        raise _invalid("Object contains unknown field `id` (use `custom_id`) - at `$`")
    values = {name: getattr(fields, name) for name in GenerationJob.__struct_fields__}
    job = GenerationJob(**{**values, "id": f"{run_id}:{line}"})
    encode_job(job)
    return Row(line, fields.custom_id, job)


def _explain(message: str, raw: bytes) -> str:
    if message == "Input data was truncated" and re.search(rb"\\u[dD][89a-fA-F]", raw):
        return "The line has half of a surrogate pair (`\\ud800` to `\\udfff`), or is cut short"
    return message


def _custom_id_of(raw: bytes) -> str | None:
    try:
        return _custom_id_decoder.decode(raw).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _invalid(message: str) -> InvalidMessage:
    return InvalidMessage(JobError.of(ErrorCode.INVALID_JOB, message))
