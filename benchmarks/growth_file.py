"""How the time and memory of `tidemill batch` grow with the rows of a file.

    python benchmarks/growth_file.py [--rows 100 --rows 1000 …] >> out/growth.jsonl

One worker with the demo model (or `--model`), loaded before the clock starts, on an embedded Redis;
files of short text prompts with two new tokens each, so that what is per row and not per token
shows. Prints one JSON line a file: seconds, and the peaks of memory of the command and, since it
was started, of the worker and of Redis.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from redis.asyncio import Redis
from workloads import rounded

from tidemill_producer.embedded import EmbeddedRedis, EmbeddedWorker

NEW_TOKENS = 2


def write_rows(path: Path, rows: int) -> None:
    sampling = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    with path.open("w") as file:
        for row in range(rows):
            line = {"custom_id": f"row-{row}", "prompt": f"{row} + 1 =", "sampling": sampling}
            file.write(json.dumps(line) + "\n")


def run_command(source: Path, target: Path, redis_url: str) -> dict[str, Any]:
    """Seconds of the whole command and the peak of its memory."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [
            sys.executable, "-m", "tidemill_producer.cli", "batch", str(source), str(target),
            "--redis", redis_url, "--overwrite", "--quiet",
        ]
    )  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    taken = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"tidemill batch ended with {process.returncode}")
    return {"wall_s": taken, "command_rss_mib": usage.ru_maxrss / 1024}


async def measure(model: str, sizes: Sequence[int], max_rows: int) -> None:
    options: dict[str, str | int] = {"max-rows": max_rows}
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as server:
        source, target = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        async with EmbeddedWorker(server.url, model=model, options=options) as worker:
            write_rows(source, max_rows)
            await asyncio.to_thread(run_command, source, target, server.url)
            for rows in sizes:
                write_rows(source, rows)
                found = await asyncio.to_thread(run_command, source, target, server.url)
                with target.open() as file:
                    outcomes = [json.loads(line) for line in file]
                assert len(outcomes) == rows
                assert all(len(o["result"]["token_ids"]) == NEW_TOKENS for o in outcomes)
                async with Redis.from_url(server.url) as redis:
                    memory: dict[str, Any] = await redis.info("memory")
                point = {
                    "varied": "file",
                    "rows": rows,
                    **found,
                    "ms_a_row": 1000 * found["wall_s"] / rows,
                    "worker_rss_mib": _peak_mib(worker.pid),
                    "redis_mib": memory["used_memory_peak"] / 2**20,
                }
                print(json.dumps(rounded(point)), flush=True)


def _peak_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


@click.command()
@click.option("--model", default="demo", show_default=True)
@click.option("--rows", "sizes", multiple=True, type=int, default=(100, 1_000, 10_000, 100_000))
@click.option("--max-rows", default=64, show_default=True)
def main(model: str, sizes: Sequence[int], max_rows: int) -> None:
    """Time files of growing size."""
    asyncio.run(measure(model, sizes, max_rows))


if __name__ == "__main__":
    main()
