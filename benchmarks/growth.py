"""How the time of a decode step grows with its rows and with their context.

    python benchmarks/growth.py out/qwen3-0.6b [--vary rows] >> out/growth.jsonl

Prints one JSON line a point: rows vary at one context, then the context varies at one number of
rows. A step's time is the median of those steps of a run in which all rows decode and none is
prefilled any more. `growth_summary.py` makes a table and plots of the lines.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from engine import Bench
from workloads import Request, rounded

from tidemill_contracts.models.runtime import RuntimeOptions

PAGE_SIZE = 32
STEP_TOKENS = 512
GATHER_MS = 200
"""So that the first step finds all rows there."""


def new_tokens(rows: int, context: int, steps: int) -> int:
    """Enough for `steps` in which all rows decode: the first rows do so already while the last
    ones are prefilled."""
    return steps + 1 + rows * context // STEP_TOKENS


def measure(bench: Bench, rows: int, context: int, steps: int, repeats: int) -> dict[str, Any]:
    """At least `steps` decode steps around a mean context of `context` tokens."""
    rng = random.Random(rows * 100_000 + context)
    new = new_tokens(rows, context, steps)
    length = max(1, context - new // 2)
    prompts = [[rng.randrange(1000, 151_000) for _ in range(length)] for _ in range(rows)]
    medians = []
    for _ in range(repeats):
        _, told = bench.run_timed([Request(prompt, new) for prompt in prompts], GATHER_MS)
        medians.append(1000 * statistics.median(taken for count, taken in told if count == rows))
    middle = statistics.median(medians)
    return {
        "rows": rows,
        "context": context,
        "step_ms": middle,
        "decode_tok_s": 1000 * rows / middle,
        "spread": (max(medians) - min(medians)) / middle,
        "runs": repeats,
    }


@click.command(help="Time decode steps of MODEL, a checkpoint directory.")
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rows", multiple=True, default=(1, 2, 4, 8, 16, 32, 64), show_default=True)
@click.option("--at-context", default=160, show_default=True, help="While the rows vary.")
@click.option(
    "--context", multiple=True, default=(128, 256, 512, 1024, 2048, 4096), show_default=True
)
@click.option("--at-rows", default=8, show_default=True, help="While the context varies.")
@click.option("--steps", default=32, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--kernels", default="auto", type=click.Choice(["auto", "torch"]), show_default=True)
@click.option(
    "--vary",
    "varied",
    multiple=True,
    type=click.Choice(["rows", "context"]),
    default=("rows", "context"),
    show_default=True,
)
def main(
    model: Path,
    rows: Sequence[int],
    at_context: int,
    context: Sequence[int],
    at_rows: int,
    steps: int,
    repeats: int,
    threads: int,
    dtype: str,
    kernels: Any,
    varied: Sequence[str],
) -> None:
    points = {
        "rows": [(count, at_context) for count in rows],
        "context": [(at_rows, length) for length in context],
    }
    points = {axis: points[axis] for axis in varied}
    both = [point for pairs in points.values() for point in pairs]
    lengths = [length + new_tokens(count, length, steps) for count, length in both]
    # A page more for each row: a pool that is just large enough admits the last rows late.
    pages = max(
        count * (1 + -(-length // PAGE_SIZE))
        for (count, _), length in zip(both, lengths, strict=True)
    )
    torch.set_num_threads(threads)
    options = RuntimeOptions(
        dtype=dtype,
        max_model_len=max(lengths),
        max_rows=max(count for count, _ in both),
        max_step_tokens=STEP_TOKENS,
        kv_pages=pages,
        page_size=PAGE_SIZE,
        kernels=kernels,
    )
    bench = Bench(model, options, threads)
    bench.run([Request([1], 1)])
    for axis, pairs in points.items():
        for count, length in pairs:
            found = rounded(measure(bench, count, length, steps, repeats))
            print(json.dumps({"varied": axis, **found}), flush=True)


if __name__ == "__main__":
    main()
