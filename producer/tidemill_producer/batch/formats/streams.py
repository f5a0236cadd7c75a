"""The bytes of an input file: plain, or compressed where its name ends in ``.gz``."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from typing import Any, BinaryIO

from tidemill_producer.errors import BatchError

STREAM = "-"
CHUNK_BYTES = 64 * 1024


def open_input(path: str) -> BinaryIO:
    """The file's bytes, decompressed; ``-`` is stdin. Raises `BatchError`, reading does too."""
    if path == STREAM:
        return sys.stdin.buffer
    if path.endswith(".zst"):
        raise BatchError(f"{path}: zstd is not read; decompress it first, as with `zstd -d`")
    stream = _open(path)
    if not path.endswith(".gz"):
        return stream
    return io.BufferedReader(_Decompressed(path, stream), CHUNK_BYTES)


class _Decompressed(io.RawIOBase):
    """Members one after the other, as one stream."""

    def __init__(self, path: str, stream: BinaryIO) -> None:
        self._path = path
        self._stream = stream
        self._source = gzip.GzipFile(fileobj=stream)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._source.read(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BatchError(f"{self._path} is damaged or cut short: {error}") from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def _open(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise BatchError(f"Cannot read {path}: {error.strerror}") from error
