"""A JSONL file of text prompts through `tidemill batch`, Redis and one worker.

    python benchmarks/batch.py MODEL_DIR [--rows 64] [--repeats 3]

Prints one JSON line a run and one with the medians. The worker is loaded before the clock
starts; the clock covers the whole command: reading, enqueuing, generating, writing.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import click
from redis.asyncio import Redis
from tokenizers import Tokenizer

from tidemill_contracts import keys
from tidemill_producer.embedded import EmbeddedRedis, EmbeddedWorker
from tidemill_producer.workers import worker_statuses

PROMPT_TOKENS = (32, 512)
NEW_TOKENS = (32, 128)


def make_prompts(path: Path, tokenizer: Tokenizer, rows: int, seed: int = 0) -> None:
    """Prompts of words from the vocabulary, with lengths drawn evenly from `PROMPT_TOKENS`."""
    rng = random.Random(seed)
    words = [w[1:] for w in tokenizer.get_vocab() if w.startswith("Ġ") and w[1:].isalpha()]
    words = sorted(word for word in words if word.isascii())
    with path.open("w") as file:
        for row in range(rows):
            prompt = " ".join(rng.choices(words, k=rng.randint(*PROMPT_TOKENS)))
            sampling = {
                "temperature": 0,
                "ignore_eos": True,
                "max_tokens": rng.randint(*NEW_TOKENS),
            }
            line = {"custom_id": f"row-{row}", "prompt": prompt, "sampling": sampling}
            file.write(json.dumps(line) + "\n")


async def run_once(prompts: Path, output: Path, redis_url: str, max_rows: int) -> dict[str, float]:
    """One timed run of the command; tokens are counted from its output."""
    async with Redis.from_url(redis_url) as redis:
        (before,) = await worker_statuses(redis, keys.DEFAULT_QUEUE)
        started = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tidemill_producer.cli", "batch", str(prompts), str(output),
            "--redis", redis_url, "--overwrite", "--quiet",
        )  # fmt: skip
        code = await process.wait()
        wall_s = time.perf_counter() - started
        await asyncio.sleep(3)  # the next heartbeat carries the final counters
        (after,) = await worker_statuses(redis, keys.DEFAULT_QUEUE)
    if code != 0:
        raise SystemExit(f"tidemill batch ended with {code}")
    usages = [json.loads(line)["result"]["usage"] for line in output.open()]
    prompt_tokens = sum(usage["prompt_tokens"] for usage in usages)
    new_tokens = sum(usage["completion_tokens"] for usage in usages)
    steps = after.steps - before.steps
    return {
        "rows": len(usages),
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "wall_s": round(wall_s, 2),
        "out_tok_s": round(new_tokens / wall_s, 1),
        "total_tok_s": round((prompt_tokens + new_tokens) / wall_s, 1),
        "occupancy": round((after.row_steps - before.row_steps) / (steps * max_rows), 3),
    }


async def measure(model: Path, rows: int, repeats: int, max_rows: int, dtype: str) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as server:
        prompts = Path(folder) / "prompts.jsonl"
        make_prompts(prompts, tokenizer, rows)
        options: dict[str, str | int] = {"max-rows": max_rows, "dtype": dtype}
        options["max-model-len"] = 4096
        async with EmbeddedWorker(server.url, model=str(model), options=options):
            runs = []
            for _ in range(repeats):
                run = await run_once(prompts, Path(folder) / "out.jsonl", server.url, max_rows)
                runs.append(run)
                print(json.dumps(run), flush=True)
    rates = [run["out_tok_s"] for run in runs]
    summary = {
        "model": model.name,
        "dtype": dtype,
        "max_rows": max_rows,
        "median_wall_s": statistics.median(run["wall_s"] for run in runs),
        "median_out_tok_s": statistics.median(rates),
        "median_total_tok_s": statistics.median(run["total_tok_s"] for run in runs),
        "spread": round((max(rates) - min(rates)) / statistics.median(rates), 3),
        "versions": {name: metadata.version(name) for name in ("tidemill", "torch", "redis")},
    }
    print(json.dumps(summary))


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rows", default=64, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--max-rows", default=32, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
def main(model: Path, rows: int, repeats: int, max_rows: int, dtype: str) -> None:
    """Time MODEL (a directory with a tokenizer) on ROWS prompts, REPEATS times."""
    asyncio.run(measure(model, rows, repeats, max_rows, dtype))


if __name__ == "__main__":
    main()
