"""The machine's limits at this moment: memory bandwidth and the rate of its matrix unit.

    python benchmarks/ceilings.py [--threads 2]

Reads 1 GiB in huge pages, several streams a thread with prefetching; multiplies bf16 tiles that
are loaded from the first cache. The best of five: a limit is what nothing gets past.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click

SOURCE = Path(__file__).with_suffix(".cpp")


@dataclass(frozen=True, slots=True)
class Ceilings:
    threads: int
    read_gb_s: float
    matrix_tflop_s: float
    """0 where there is no matrix unit for bf16."""

    def best(self, other: Ceilings) -> Ceilings:
        return Ceilings(
            self.threads,
            max(self.read_gb_s, other.read_gb_s),
            max(self.matrix_tflop_s, other.matrix_tflop_s),
        )

    def mean(self, other: Ceilings) -> Ceilings:
        return Ceilings(
            self.threads,
            (self.read_gb_s + other.read_gb_s) / 2,
            (self.matrix_tflop_s + other.matrix_tflop_s) / 2,
        )


def measure(threads: int = 2, repeats: int = 5) -> Ceilings:
    command = [str(compiled(SOURCE)), str(threads), str(repeats)]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    return Ceilings(**json.loads(done.stdout))


@cache
def compiled(source: Path) -> Path:
    """A program of one C++ file, built once a process."""
    target = Path(tempfile.mkdtemp(prefix="tidemill-")) / source.stem
    subprocess.run(
        [
            "g++", "-std=c++20", "-O3", "-march=native", "-mprefer-vector-width=512", "-pthread",
            "-Wno-psabi", str(source), "-o", str(target),
        ],
        check=True,
    )  # fmt: skip
    return target


@click.command()
@click.option("--threads", default=2, show_default=True)
@click.option("--repeats", default=5, show_default=True)
def main(threads: int, repeats: int) -> None:
    """Measure this machine."""
    found = measure(threads, repeats)
    print(json.dumps({name: getattr(found, name) for name in Ceilings.__slots__}))


if __name__ == "__main__":
    main()
