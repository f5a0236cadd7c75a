"""A server that has on disk what it acknowledged, and what it has ever written: no double hides
behind a last value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from tidemill_contracts import keys
from tidemill_producer.embedded import EmbeddedRedis


class AppendOnlyServer(EmbeddedRedis):
    """Its append-only file is never rewritten: it is the whole history, over all restarts."""

    def _command(self, binary: Path) -> list[str]:
        # Of an option that is given twice the last one counts.
        return [
            *super()._command(binary),
            *("--appendfsync", "always", "--auto-aof-rewrite-percentage", "0"),
        ]

    @property
    def directory(self) -> Path:
        assert self._directory is not None, "not started"
        return self._directory


@dataclass(slots=True)
class Written:
    """How often what was written of each job; the ids are theirs."""

    results: Counter[str] = field(default_factory=Counter)
    replies: Counter[str] = field(default_factory=Counter)
    """Entries of reply streams."""
    claims: Counter[str] = field(default_factory=Counter)
    orphaned: Counter[str] = field(default_factory=Counter)
    """Times that a job lost its worker."""


def read_written(server: AppendOnlyServer) -> Written:
    """What the server has written until now."""
    (log,) = server.directory.glob("appendonlydir/*.incr.aof")
    written = Written()
    with log.open("rb") as stream:
        for command in _commands(stream):
            _count(command, written)
    return written


def _count(command: list[str], written: Written) -> None:
    match [command[0].upper(), *command[1:]]:
        case ["SET", key, *_] if key.startswith(keys.RESULT_PREFIX):
            written.results[key.removeprefix(keys.RESULT_PREFIX)] += 1
        case ["XADD", key, *_, "id", job_id] if key.startswith(keys.REPLY_PREFIX):
            written.replies[job_id] += 1
        case ["SET", key, *_] if key.startswith(keys.RETRY_PREFIX):
            written.claims[key.removeprefix(keys.RETRY_PREFIX)] += 1
        case ["RPUSH", key, *_] if key.startswith(keys.HISTORY_PREFIX):
            written.orphaned[key.removeprefix(keys.HISTORY_PREFIX)] += 1


def _commands(stream: BinaryIO) -> Iterator[list[str]]:
    while head := stream.readline():
        assert head.startswith(b"*"), head
        yield [_bulk(stream) for _ in range(int(head[1:]))]


def _bulk(stream: BinaryIO) -> str:
    size = int(stream.readline()[1:])
    return stream.read(size + 2)[:-2].decode(errors="replace")
