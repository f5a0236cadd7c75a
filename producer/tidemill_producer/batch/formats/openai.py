"""The format of the OpenAI Batch API: requests in, responses out.

In: ``{"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}``.
Out: ``{"id": "batch_req_…", "custom_id": "r1", "response": {…}, "error": null}``. A row that
failed has the status code and body of an error there.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tidemill_contracts.wire import InvalidMessage, encode_job
from tidemill_producer.batch.formats.openai_request import read_body
from tidemill_producer.batch.formats.openai_response import error_body, response_body, status_of
from tidemill_producer.batch.rows import (
    BadLine,
    CustomId,
    OutputRow,
    Row,
    custom_id_of,
    decode_line,
)


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: CustomId
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


class _Response(msgspec.Struct, frozen=True):
    status_code: int


class _OutputLine(msgspec.Struct, frozen=True):
    response: _Response | None
    error: Any = None


_line_decoder = msgspec.json.Decoder(_Line)
_output_decoder = msgspec.json.Decoder(_OutputLine)
_encoder = msgspec.json.Encoder()


class OpenAIFormat:
    """Requests to ``/v1/chat/completions`` and ``/v1/completions``."""

    name = "openai"
    errors_apart = True

    def read(self, raw: bytes, line: int, run_id: str) -> Row | BadLine:
        """One line of the input."""
        try:
            fields = decode_line(raw, _line_decoder)
            job, context = read_body(fields.url, fields.body, job_id=f"{run_id}:{line}")
            encode_job(job)
        except InvalidMessage as error:
            return BadLine(line, custom_id_of(raw), error.error)
        return Row(line, fields.custom_id, job, context)

    def encode(self, row: OutputRow) -> bytes:
        """One line of the output, or of the file of errors."""
        if row.result is None:
            assert row.error is not None
            status, body = status_of(row.error), error_body(row.error)
        else:
            status, body = 200, response_body(row.result, row.context)
        request = row.result.id if row.result else row.custom_id or f"line-{row.line}"
        written: dict[str, object] = {
            "id": f"batch_req_{request}",
            "custom_id": row.custom_id,
            "response": {"status_code": status, "request_id": f"req_{request}", "body": body},
            "error": None,
        }
        if isinstance(row.line, int):
            written["line"] = row.line
        return _encoder.encode(written) + b"\n"

    def custom_id_of(self, output_line: bytes) -> str | None:
        """Whose line of an output this is."""
        return custom_id_of(output_line)

    def is_ok(self, output_line: bytes) -> bool:
        """Whether the request succeeded."""
        try:
            line = _output_decoder.decode(output_line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return line.error is None and line.response is not None and line.response.status_code == 200
