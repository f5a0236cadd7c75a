"""What holding every argument tuple to its specs costs in a decode step.

    python benchmarks/arg_check.py MODEL_DIR [--rows 8]

Times the check alone and the whole stage in one process, alternating, and prints one JSON line:
medians in microseconds, their spread, and the share of the step.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch

from tidemill_contracts.models.checkpoint import Checkpoint
from tidemill_contracts.models.contract import StageInputs
from tidemill_contracts.models.registry import open_model
from tidemill_contracts.models.runtime import RuntimeOptions, plan_runtime
from tidemill_contracts.models.startup import load_model

CONTEXT = 128


def timed(action: Callable[[], object], repeats: int) -> float:
    """Microseconds of one call, the mean over `repeats` calls."""
    started = time.perf_counter_ns()
    for _ in range(repeats):
        action()
    return (time.perf_counter_ns() - started) / repeats / 1000


@click.command()
@click.argument("model_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rows", default=8, show_default=True)
@click.option("--rounds", default=15, show_default=True)
def main(model_dir: Path, rows: int, rounds: int) -> None:
    """Time the argument check against a decode step of ROWS rows of 128 tokens."""
    config, contract = open_model(model_dir)
    pages = rows * (CONTEXT // 16)
    options = RuntimeOptions(max_model_len=1024, kv_pages=pages, max_rows=rows)
    runtime = plan_runtime(config, contract, options)
    model = load_model(contract, config, runtime, lambda: Checkpoint(model_dir))
    row_ids = torch.arange(rows, dtype=torch.int32)
    table = torch.arange(pages, dtype=torch.int32).view(rows, -1)
    inputs = StageInputs(
        input_ids=row_ids,
        seq_lens=torch.full((rows,), CONTEXT, dtype=torch.int32),
        block_table=table,
        slot_mapping=table[:, -1] * 16 + 15,
        logits=torch.zeros(rows, contract.hooks.logits_width(config)),
    )
    stage = model.stages["decode"]
    stage(inputs)
    args = contract.stage("decode").runtime_args_builder(inputs, model.static, model.cache)
    checks, steps = [], []
    for _ in range(rounds):
        checks.append(timed(lambda: stage._checker.check(args), 1_000))
        steps.append(timed(lambda: stage(inputs), 1))
    check, step = statistics.median(checks), statistics.median(steps)
    result = {
        "model": model_dir.name,
        "rows": rows,
        "check_us": round(check, 2),
        "check_spread": round((max(checks) - min(checks)) / check, 2),
        "step_us": round(step),
        "step_spread": round((max(steps) - min(steps)) / step, 2),
        "share_percent": round(100 * check / step, 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
