"""Our own schema: the fields of a job and a ``custom_id``.

In: ``{"custom_id": "r1", "prompt": "…"}``, with any field of `GenerationJob` but its ``id``.
Out: ``{"custom_id": "r1", "result": {…}, "error": null}``, or an error and no result.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tidemill_contracts.wire import (
    GenerationJob,
    GenerationResult,
    InvalidMessage,
    JobError,
    encode_job,
)
from tidemill_producer.batch.rows import (
    BadLine,
    CustomId,
    OutputRow,
    Row,
    custom_id_of,
    decode_line,
    invalid,
)


class _RowFields(GenerationJob, frozen=True, kw_only=True, forbid_unknown_fields=True):
    custom_id: CustomId


class _OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    custom_id: str | None
    result: GenerationResult | None = None
    error: JobError | None = None
    line: int | UnsetType = UNSET
    """The line of the input, from 1, where that line is not a job."""


class _Ending(msgspec.Struct, frozen=True):
    error: Any
    custom_id: str | None = None


_row_decoder = msgspec.json.Decoder(_RowFields)
_ending_decoder = msgspec.json.Decoder(_Ending)
_encoder = msgspec.json.Encoder()


class TidemillFormat:
    """Rows in our own schema; failed ones stand between the others."""

    name = "tidemill"
    errors_apart = False

    def read(self, raw: bytes, line: int, run_id: str) -> Row | BadLine:
        """One line of the input."""
        try:
            fields = decode_line(raw, _row_decoder)
            if fields.id is not None:
                raise invalid("Object contains unknown field `id` (use `custom_id`) - at `$`")
            values = {name: getattr(fields, name) for name in GenerationJob.__struct_fields__}
            job = GenerationJob(**{**values, "id": f"{run_id}:{line}"})
            encode_job(job)
        except InvalidMessage as error:
            return BadLine(line, custom_id_of(raw), error.error)
        return Row(line, fields.custom_id, job)

    def encode(self, row: OutputRow) -> bytes:
        """One line of the output."""
        line = _OutputLine(
            custom_id=row.custom_id, result=row.result, error=row.error, line=row.line
        )
        return _encoder.encode(line) + b"\n"

    def custom_id_of(self, output_line: bytes) -> str | None:
        """Whose line of an output this is."""
        return custom_id_of(output_line)

    def is_ok(self, output_line: bytes) -> bool:
        """Whether the row succeeded."""
        try:
            return _ending_decoder.decode(output_line).error is None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
