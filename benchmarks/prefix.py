"""What sharing a common stem saves: a file of rows that begin alike, with and without the cache.

    python benchmarks/prefix.py [MODEL] [--rows 1000] [--stem 512]

Runs the rows through one engine, without Redis, and prints one JSON line for each setting: prompt
tokens of the rows, prompt tokens that were computed, wall time.
"""

from __future__ import annotations

import asyncio
import json
import random
import time

import click

from tidemill_contracts.wire import GenerationJob, SamplingParams
from tidemill_worker.batcher import Batcher
from tidemill_worker.settings import make_config

TAIL = 24
NEW_TOKENS = 8


def make_jobs(rows: int, stem: int, vocabulary: int) -> list[GenerationJob]:
    """Rows of one stem and a tail of their own, as token ids."""
    rng = random.Random(0)
    common = [rng.randrange(vocabulary) for _ in range(stem)]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [
        GenerationJob(
            id=f"row-{row}",
            prompt_token_ids=[*common, *(rng.randrange(vocabulary) for _ in range(TAIL))],
            sampling=sampling,
        )
        for row in range(rows)
    ]


async def measure(model: str, rows: int, stem: int, *, prefix_caching: bool) -> None:
    config = make_config({"model": model, "prefix_caching": prefix_caching, "max_wait_ms": 20})
    batcher = await Batcher.start(config)
    jobs = make_jobs(rows, stem, batcher.text.vocab_size - 64)
    started = time.perf_counter()
    now = time.time()
    results = await asyncio.gather(*(batcher.generate(job, str(job.id), now) for job in jobs))
    wall_s = time.perf_counter() - started
    prompt_tokens = sum(result.usage.prompt_tokens for result in results)
    saved = batcher.stats.cached_tokens
    await batcher.close()
    print(
        json.dumps(
            {
                "model": batcher.model_name,
                "prefix_caching": prefix_caching,
                "rows": rows,
                "stem": stem,
                "prompt_tokens": prompt_tokens,
                "computed": prompt_tokens - saved,
                "saved_percent": round(100 * saved / prompt_tokens, 1),
                "wall_s": round(wall_s, 1),
            }
        ),
        flush=True,
    )


@click.command()
@click.argument("model", default="demo")
@click.option("--rows", default=1_000, show_default=True)
@click.option("--stem", default=512, show_default=True)
def main(model: str, rows: int, stem: int) -> None:
    """Time ROWS rows that share a stem of STEM tokens on MODEL, with and without the cache."""
    for prefix_caching in (True, False):
        asyncio.run(measure(model, rows, stem, prefix_caching=prefix_caching))


if __name__ == "__main__":
    main()
