"""Runs the workloads of `benchmarks/workloads.py` through one other engine.

An adapter subclasses `Peer` and hands itself to `main`. It runs in that engine's own environment,
so this module needs nothing but the standard library. Standard output carries JSON lines alone: a
`ready` line with `versions` and `weight_bytes`, then one line a run with the fields of
`benchmarks/engine.py`, `engine` and `peak_rss_gib`. Whatever the engine itself prints goes to
standard error. With `--serve` the workloads to run are read from standard input, a name a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TextIO

# Last, so that no module of the benchmarks stands before one of the engine's own.
sys.path.append(str(Path(__file__).parents[1]))

import workloads
from workloads import Request


class Peer(ABC):
    """A loaded engine: greedy, EOS ignored, no prefix cache."""

    name: ClassVar[str]
    description: ClassVar[str]
    """For `--help`."""

    @classmethod
    @abstractmethod
    def add_options(cls, parser: ArgumentParser) -> None:
        """Options beyond the model, the workloads, the repeats and the threads."""

    @abstractmethod
    def __init__(self, model: Path, options: Namespace) -> None:
        """Loads the model, for `options.threads` threads. Imports of the engine belong in here."""

    @abstractmethod
    def generate(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        """Runs all requests together; the new token ids of each, in the order of the requests."""

    def weight_bytes(self) -> int | None:
        """That one decode step reads; ``None`` where they are those of the model in bf16."""
        return None

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Of the engine and what it computes with."""


def main(peer_class: type[Peer]) -> None:
    options = _parse(peer_class)
    vocabulary = json.loads((options.model / "config.json").read_bytes())["vocab_size"]
    report = _claim_stdout()
    peer = peer_class(options.model, options)

    def run(requests: Sequence[Request]) -> float:
        fitted = [Request([t % vocabulary for t in r.prompt], r.new_tokens) for r in requests]
        started = time.perf_counter()
        rows = peer.generate(fitted)
        taken = time.perf_counter() - started
        for number, (row, request) in enumerate(zip(rows, fitted, strict=True)):
            if len(row) != request.new_tokens:
                raise SystemExit(f"row {number}: {len(row)} new tokens, not {request.new_tokens}")
        return taken

    def tell(line: dict[str, Any]) -> None:
        line = {"engine": peer.name, **line, "peak_rss_gib": _tree_peak_gib()}
        print(json.dumps(workloads.rounded(line)), file=report, flush=True)

    run([Request(workloads.workload("D1")[0].prompt[:16], 1)])
    tell(
        {
            "event": "ready",
            "seconds": _seconds_alive(),
            "versions": peer.versions(),
            "weight_bytes": peer.weight_bytes(),
        }
    )
    names = options.workload or workloads.NAMES
    workloads.serve(
        iter(sys.stdin.readline, "") if options.serve else names * options.repeats,
        run,
        tell,
    )


def _parse(peer_class: type[Peer]) -> Namespace:
    parser = ArgumentParser(
        description=peer_class.description, formatter_class=ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a checkpoint directory")
    parser.add_argument(
        "--workload", action="append", help="a name, or NAME:ROWS; repeatable; none means all"
    )
    parser.add_argument(
        "--serve", action="store_true", help="run the workloads that standard input names"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each workload")
    parser.add_argument("--threads", type=int, default=2)
    peer_class.add_options(parser)
    return parser.parse_args()


def _claim_stdout() -> TextIO:
    """Standard output for our lines; what else writes to it, child processes included, then
    writes to standard error."""
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return own


def _seconds_alive() -> float:
    """Since this process was started, so imports count too."""
    ticks = int(_stat(os.getpid())[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _tree_peak_gib() -> float:
    """The peaks of resident memory of this process and all below it, added up: what they share
    counts once for each."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int(_stat(int(folder.name))[1])
            except OSError:
                continue  # ended meanwhile
    tree = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return sum(map(_peak_kib, tree)) / 2**20


def _stat(pid: int) -> list[str]:
    """The fields after the command's name, which may hold spaces: state, parent, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _peak_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
