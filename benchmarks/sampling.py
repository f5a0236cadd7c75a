"""What choosing 32 rows' next tokens costs at the full vocabulary.

    python benchmarks/sampling.py [--rows 32]

Times the check for NaN and the sampler on random logits, for rows of one kind and for all kinds
mixed, and prints one JSON line each: median in ms over the rounds, and the spread.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import click
import torch

from tidemill_worker.engine.row import Row, RowSampling
from tidemill_worker.engine.sampler import finite_rows, sample

VOCABULARY = 151_936
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-k 20, top-p 0.95": {"top_k": 20, "top_p": 0.95},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "penalties": {"temperature": 0.0, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    "5 log probabilities": {"temperature": 0.0, "logprobs": 5},
}


def make_row(index: int, options: dict[str, Any]) -> Row:
    sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, **options}
    row = Row(
        id=str(index),
        token_ids=list(range(200)),
        max_len=1_000,
        sampling=RowSampling(seed=index, **sampling),
    )
    row.token_ids += range(500, 600)
    return row


def measure(name: str, rows: list[Row], logits: torch.Tensor, rounds: int) -> None:
    times = []
    for _ in range(rounds):
        scratch = logits.clone()
        started = time.perf_counter()
        finite_rows(scratch)
        sample(scratch, rows)
        times.append((time.perf_counter() - started) * 1000)
    median = statistics.median(times)
    spread = (max(times) - min(times)) / median
    print(
        json.dumps(
            {
                "rows": len(rows),
                "kind": name,
                "median_ms": round(median, 1),
                "spread": round(spread, 2),
            }
        )
    )


@click.command()
@click.option("--rows", default=32, show_default=True)
@click.option("--rounds", default=9, show_default=True)
def main(rows: int, rounds: int) -> None:
    """Time the sampler for ROWS rows of each kind, and of all kinds mixed."""
    # As peaked as a trained model's: most of the mass lies on a few hundred tokens.
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    kinds = list(KINDS.values())
    for name, options in KINDS.items():
        measure(name, [make_row(i, options) for i in range(rows)], logits, rounds)
    mixed = [make_row(i, kinds[i % len(kinds)]) for i in range(rows)]
    measure("all of these mixed", mixed, logits, rounds)


if __name__ == "__main__":
    main()
