"""How long a cold process takes to its first token, beside reading the model's file once.

    python benchmarks/start.py out/qwen3-0.6b [--rounds 5]

In turns: the weights are read from the page cache, once, into one buffer, by one thread (the files
are read beforehand, so no disk is waited for); then a new Python process imports the worker, loads
the model as `tidemill worker` does (`Batcher.start`: contract, checks, packing, KV cache, warm-up)
and generates one token. The time is from before that process is started until it says so. What is
not in it: Redis, and the C++ library's compilation, which an earlier start has done.

Prints a JSON line a round with the child's own account of where the time went, and one with the
medians. The bar is 1.3 times the reading and 2 s.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
from workloads import rounded

BUFFER_BYTES = 8 << 20
BAR_FACTOR, BAR_SECONDS = 1.3, 2.0

CHILD = """
import json, sys, time
began = time.clock_gettime(time.CLOCK_MONOTONIC)
import asyncio
from tidemill_contracts.wire import GenerationJob, SamplingParams
from tidemill_worker.batcher import Batcher
from tidemill_worker.settings import make_config
imported = time.clock_gettime(time.CLOCK_MONOTONIC)

async def main():
    batcher = await Batcher.start(make_config(json.loads(sys.argv[1])))
    loaded = time.clock_gettime(time.CLOCK_MONOTONIC)
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    job = GenerationJob(prompt_token_ids=[1], sampling=sampling)
    result = await batcher.generate(job, "first", time.time())
    assert result.usage.completion_tokens == 1
    print(json.dumps({"began": began, "imported": imported, "loaded": loaded}), flush=True)
    await batcher.close()

asyncio.run(main())
"""


def read_s(files: Sequence[Path]) -> float:
    """Seconds to read them through, into a buffer that is used again and again."""
    buffer = memoryview(bytearray(BUFFER_BYTES))
    started = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def start(settings: dict[str, object]) -> dict[str, float]:
    """Seconds of a cold start, and of its parts."""
    started = time.clock_gettime(time.CLOCK_MONOTONIC)
    command = [sys.executable, "-c", CHILD, json.dumps(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        ended = time.clock_gettime(time.CLOCK_MONOTONIC)
    if process.returncode:
        raise SystemExit(f"the process ended with {process.returncode}")
    told = json.loads(line)
    return {
        "start_s": ended - started,
        "interpreter_s": told["began"] - started,
        "import_s": told["imported"] - told["began"],
        "load_s": told["loaded"] - told["imported"],
        "token_s": ended - told["loaded"],
    }


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--max-model-len", default=4096, show_default=True)
def main(model: Path, rounds: int, threads: int, max_model_len: int) -> None:
    """Time cold starts with MODEL, a checkpoint directory."""
    files = sorted(model.glob("*.safetensors"))
    settings: dict[str, object] = {
        "model": str(model),
        "threads": threads,
        "max_model_len": max_model_len,
    }
    read_s(files)
    start(settings)  # compiles the kernels where nobody has yet
    runs = []
    for _ in range(rounds):
        run = {"read_s": read_s(files), **start(settings)}
        run["bar_s"] = BAR_FACTOR * run["read_s"] + BAR_SECONDS
        runs.append(run)
        print(json.dumps(rounded(run)), flush=True)
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    summary = {
        "summary": model.name,
        **medians,
        "of_bar": statistics.median(run["start_s"] / run["bar_s"] for run in runs),
        "spread": (max(r["start_s"] for r in runs) - min(r["start_s"] for r in runs))
        / medians["start_s"],
        "runs": rounds,
    }
    print(json.dumps(rounded(summary)))


if __name__ == "__main__":
    main()
