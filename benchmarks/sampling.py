"""What choosing 32 rows' next tokens costs at the full vocabulary, by kernels and in torch.

    python benchmarks/sampling.py [MODEL_DIR] [--rows 32]

Times the sampler, its check for NaN included, on random logits for rows of one kind and for all
kinds mixed. The two ways take turns in one run, and so does a decode step of the model, where one
is given. Prints one JSON line for each kind: medians in ms over the rounds, and the spread.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from deterministic import run_ms, step_inputs

from tidemill_contracts.models.checkpoint import Checkpoint
from tidemill_contracts.models.qwen3.native.sampling import sampling
from tidemill_contracts.models.registry import open_model
from tidemill_contracts.models.runtime import RuntimeOptions, plan_runtime
from tidemill_contracts.models.startup import load_model
from tidemill_worker.engine.row import Row, RowSampling
from tidemill_worker.engine.sampler import sample

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
SETTLE_S = 0.005
"""Before a time is taken: torch's threads look out for more work a while after theirs is done."""


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


def decode_step(model_dir: Path, rows: int) -> Callable[[], float]:
    """A decode step of so many rows; each call gives its time in ms."""
    config, contract = open_model(model_dir)
    options = RuntimeOptions(max_rows=rows, max_model_len=256, kv_pages=8 * rows)
    model = load_model(
        contract, config, plan_runtime(config, contract, options), lambda: Checkpoint(model_dir)
    )
    inputs = step_inputs(model, rows, 1)
    return lambda: run_ms(model, "decode", inputs)


def summary(times: list[float]) -> dict[str, float]:
    median = statistics.median(times)
    return {
        "median_ms": round(median, 1),
        "spread": round((max(times) - min(times)) / median, 2),
    }


def measure(
    name: str,
    rows: list[Row],
    logits: torch.Tensor,
    rounds: int,
    step: Callable[[], float] | None,
) -> None:
    ways = {"kernels": sampling(), "torch": None}
    times: dict[str, list[float]] = {"step": [], **{way: [] for way in ways}}
    for _ in range(rounds):
        for way, kernels in ways.items():
            scratch = logits.clone()
            time.sleep(SETTLE_S)
            started = time.perf_counter()
            sample(scratch, rows, kernels)
            times[way].append((time.perf_counter() - started) * 1000)
        if step is not None:
            times["step"].append(step())
    found = {way: summary(each) for way, each in times.items() if each}
    print(json.dumps({"rows": len(rows), "kind": name, **found}))


@click.command()
@click.argument("model_dir", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--rows", default=32, show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(model_dir: Path | None, rows: int, rounds: int, threads: int) -> None:
    """Time the sampler for ROWS rows of each kind, and of all kinds mixed."""
    torch.set_num_threads(threads)
    step = None if model_dir is None else decode_step(model_dir, rows)
    # As peaked as a trained model's: most of the mass lies on a few hundred tokens.
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    kinds = list(KINDS.values())
    for name, options in KINDS.items():
        measure(name, [make_row(i, options) for i in range(rows)], logits, rounds, step)
    mixed = [make_row(i, kinds[i % len(kinds)]) for i in range(rows)]
    measure("all of these mixed", mixed, logits, rounds, step)


if __name__ == "__main__":
    main()
