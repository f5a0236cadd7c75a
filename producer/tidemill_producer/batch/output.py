"""The output file: whole lines, each written at once, so that an end at any time leaves rows."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from types import TracebackType

from tidemill_producer.errors import BatchError

STDOUT = "-"


class OutputFile:
    """Appends lines to a new file, or to stdout for ``-``. Opened on entering."""

    def __init__(self, path: str, *, overwrite: bool) -> None:
        self.path = path
        self._overwrite = overwrite
        self._descriptor = -1
        self._is_regular = False

    def check(self) -> None:
        """Raise `BatchError` if the file could not be opened now. Creates nothing."""
        if self.path == STDOUT:
            return
        path = Path(self.path)
        if path.suffix in (".gz", ".zst"):
            raise BatchError(f"{path}: outputs are not compressed; leave {path.suffix} away")
        if path.is_dir():
            raise BatchError(f"{path} is a folder; name a file")
        if path.exists() and not self._overwrite:
            raise BatchError(
                f"{path} exists; --overwrite replaces it (going on where it ends is not possible"
                " yet)"
            )
        if not path.parent.is_dir():
            raise BatchError(f"The folder {path.parent} of the output does not exist")

    def __enter__(self) -> OutputFile:
        self.check()
        if self.path == STDOUT:
            self._descriptor = os.dup(sys.stdout.fileno())
        else:
            new = os.O_TRUNC if self._overwrite else os.O_EXCL
            try:
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | new, 0o666)
            except OSError as error:
                raise self._cannot_write(error) from error
        self._is_regular = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.sync()
        finally:
            os.close(self._descriptor)

    def write(self, line: bytes) -> None:
        """Append one line. Raises `BatchError`, and takes a half-written line back."""
        written = 0
        try:
            while written < len(line):
                written += os.write(self._descriptor, line[written:] if written else line)
        except OSError as error:
            if written and self._is_regular:
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise self._cannot_write(error) from error

    def sync(self) -> None:
        """Return when all that was written is on disk. Raises `BatchError`."""
        if self._is_regular:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> BatchError:
        return BatchError(f"Cannot write {self.path}: {error.strerror}")
