"""How rows are written in files: our own schema and that of the OpenAI Batch API."""

from __future__ import annotations

from typing import Protocol

from tidemill_producer.batch.rows import BadLine, OutputRow, Row


class RowFormat(Protocol):
    """Reads the lines of an input and writes those of its output."""

    @property
    def name(self) -> str: ...

    @property
    def errors_apart(self) -> bool:
        """Whether rows that failed belong into a file of their own."""
        ...

    def read(self, raw: bytes, line: int, run_id: str) -> Row | BadLine:
        """One line of the input, without what ends it; its job's id is ``<run_id>:<line>``."""
        ...

    def encode(self, row: OutputRow) -> bytes:
        """One line of the output, its newline included."""
        ...

    def custom_id_of(self, output_line: bytes) -> str | None:
        """Whose line of an output this is; None where it is of no known row."""
        ...

    def is_ok(self, output_line: bytes) -> bool:
        """Whether it is the line of a row that succeeded."""
        ...
