"""Files that are compressed, by their extension: ``.gz``, ``.zst``, or plain.

An output grows by whole members (gzip) or frames (zstd), of whole lines each: what a crash tears is
the last of them, and a reader takes them one after the other as one file.
"""

from __future__ import annotations

import gzip
import importlib
import io
import sys
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from tidemill_producer.errors import BatchError

STREAM = "-"
GZIP_WINDOW_BITS = 31
"""zlib's sign for gzip headers."""
CHUNK_BYTES = 64 * 1024


def open_input(path: str) -> BinaryIO:
    """The file's bytes, decompressed; ``-`` is stdin. Raises `BatchError`, reading does too."""
    if path == STREAM:
        return sys.stdin.buffer
    stream = _open(path)
    if not path.endswith((".gz", ".zst")):
        return stream
    try:
        return io.BufferedReader(_Decompressed(path, stream), CHUNK_BYTES)
    except BatchError:
        stream.close()
        raise


def open_output_encoder(path: str) -> Callable[[bytes], bytes]:
    """What makes whole lines into bytes that can be appended to the file."""
    if path.endswith(".gz"):
        return lambda lines: gzip.compress(lines, 6, mtime=0)
    if path.endswith(".zst"):
        compressor = _zstandard(path).ZstdCompressor()
        return lambda lines: bytes(compressor.compress(lines))
    return bytes


def repair_tail(path: str) -> int:
    """How many bytes of an output are good: up to its last whole line, member or frame."""
    make = _decompressor(path)
    with open(path, "rb") as stream:
        return _whole_lines(stream) if make is None else _whole_members(stream, make)


def _whole_lines(stream: BinaryIO) -> int:
    end = stream.seek(0, io.SEEK_END)
    while end:
        start = max(0, end - CHUNK_BYTES)
        stream.seek(start)
        found = stream.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _whole_members(stream: BinaryIO, make: Callable[[], Any]) -> int:
    good = read = 0
    member = make()
    while chunk := stream.read(CHUNK_BYTES):
        read += len(chunk)
        while chunk:
            try:
                member.decompress(chunk)
            except Exception as error:
                if not _is_damage(error):
                    raise
                return good
            chunk = b""
            if member.eof:
                chunk = member.unused_data
                good = read - len(chunk)
                member = make()
    return good


class _Decompressed(io.RawIOBase):
    """Members one after the other, as one stream."""

    def __init__(self, path: str, stream: BinaryIO) -> None:
        self._path = path
        self._stream = stream
        if path.endswith(".gz"):
            self._source: Any = gzip.GzipFile(fileobj=stream)
        else:
            made = _zstandard(path).ZstdDecompressor()
            self._source = made.stream_reader(stream, read_across_frames=True)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data: bytes = self._source.read(len(buffer))
        except Exception as error:
            if not _is_damage(error):
                raise
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


def _decompressor(path: str) -> Callable[[], Any] | None:
    if path.endswith(".gz"):
        return lambda: zlib.decompressobj(GZIP_WINDOW_BITS)
    if path.endswith(".zst"):
        made = _zstandard(path).ZstdDecompressor()
        return lambda: made.decompressobj()
    return None


def _is_damage(error: Exception) -> bool:
    damage = isinstance(error, EOFError | zlib.error | gzip.BadGzipFile)
    return damage or type(error).__name__ == "ZstdError"


def _zstandard(path: str) -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise BatchError(f"{path}: .zst needs the package `zstandard`") from error
