"""What deterministic mode costs: decode steps and a prefill, with it and without.

    python benchmarks/deterministic.py MODEL_DIR [--dtype bfloat16]

Both run in one process, alternating. Prints one JSON line for each step: medians in ms, their
spread, and the ratio of the medians.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import click
import torch

from tidemill_contracts.models.checkpoint import Checkpoint
from tidemill_contracts.models.contract import Phase, RuntimeConfig, StageInputs
from tidemill_contracts.models.registry import open_model
from tidemill_contracts.models.runtime import RuntimeOptions, plan_runtime
from tidemill_contracts.models.startup import ServedModel, load_model

CONTEXT = 128
"""Tokens of a row in a decode step."""


def step_inputs(model: ServedModel, rows: int, length: int) -> StageInputs:
    """The last `length` tokens of rows of `CONTEXT` tokens, or of whole prompts."""
    size = model.runtime.page_size
    end = max(CONTEXT, length)
    table = torch.arange(rows * (end // size), dtype=torch.int32).view(rows, -1)
    places = torch.arange(end - length, end, dtype=torch.int32)
    slots = table[:, places // size] * size + places % size
    lengths = torch.full((rows,), length, dtype=torch.int32)
    prefills = length > 1
    return StageInputs(
        input_ids=torch.arange(rows * length, dtype=torch.int32) % model.config.vocab_size,
        seq_lens=torch.full((rows,), end, dtype=torch.int32),
        block_table=table,
        slot_mapping=slots.flatten().to(torch.int32),
        logits=torch.zeros(rows, model.contract.hooks.logits_width(model.config)),
        chunk_lens=lengths if prefills else None,
        chunk_offsets=torch.arange(rows, dtype=torch.int32) * length if prefills else None,
    )


def run_ms(model: ServedModel, phase: Phase, inputs: StageInputs) -> float:
    started = time.perf_counter()
    model.stages[phase](inputs)
    return (time.perf_counter() - started) * 1000


def compare(
    ordinary: ServedModel, deterministic: ServedModel, rows: int, length: int, rounds: int
) -> dict[str, object]:
    phase: Phase = "prefill" if length > 1 else "decode"
    inputs = step_inputs(ordinary, rows, length)
    times: tuple[list[float], list[float]] = ([], [])
    for counted in range(-1, rounds):  # the first one only warms up
        for model, found in zip((ordinary, deterministic), times, strict=True):
            taken = run_ms(model, phase, inputs)
            if counted >= 0:
                found.append(taken)
    medians = [statistics.median(found) for found in times]
    spreads = [
        (max(found) - min(found)) / median for found, median in zip(times, medians, strict=True)
    ]
    return {
        "phase": phase,
        "rows": rows,
        "tokens": rows * length,
        "ordinary_ms": round(medians[0], 1),
        "ordinary_spread": round(spreads[0], 2),
        "deterministic_ms": round(medians[1], 1),
        "deterministic_spread": round(spreads[1], 2),
        "ratio": round(medians[1] / medians[0], 2),
    }


@click.command()
@click.argument("model_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]))
@click.option("--threads", type=int)
@click.option("--rounds", default=9, show_default=True)
def main(model_dir: Path, dtype: str | None, threads: int | None, rounds: int) -> None:
    """Time decode steps of 1, 8 and 32 rows and a prompt of 512 tokens, both ways."""
    if threads is not None:
        torch.set_num_threads(threads)
    config, contract = open_model(model_dir)
    options = RuntimeOptions(dtype=dtype, max_model_len=1024, kv_pages=512)
    runtime = plan_runtime(config, contract, options)

    def loaded(runtime: RuntimeConfig) -> ServedModel:
        return load_model(contract, config, runtime, lambda: Checkpoint(model_dir))

    ordinary, deterministic = loaded(runtime), loaded(replace(runtime, deterministic=True))
    for rows, length in ((1, 1), (8, 1), (32, 1), (1, 512)):
        result = compare(ordinary, deterministic, rows, length, rounds)
        name = str(runtime.dtype).removeprefix("torch.")
        print(json.dumps({"model": model_dir.name, "dtype": name, **result}))


if __name__ == "__main__":
    main()
