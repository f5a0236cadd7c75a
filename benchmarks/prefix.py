"""What sharing a common stem saves: a file of rows that begin alike, with and without the cache.

    python benchmarks/prefix.py [MODEL] [--rows 1000] [--stem 512] [--others 0] [--kv-pages N]

Runs the rows through one engine, without Redis, and prints one JSON line for each setting: prompt
tokens of the rows, prompt tokens that were computed, wall time. With `--others`, each is followed
by so many rows as long that have nothing in common; with few `--kv-pages` these fill the pool, and
a third setting evicts by last use alone, without pins.
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


def make_jobs(rows: int, stem: int, others: int, vocabulary: int) -> list[GenerationJob]:
    """Rows of one stem and a tail of their own, as token ids, with `others` after each."""
    rng = random.Random(0)

    def random_ids(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    common = random_ids(stem)
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [
        GenerationJob(
            id=f"row-{row}-{other}",
            prompt_token_ids=[*(random_ids(stem) if other else common), *random_ids(TAIL)],
            sampling=sampling,
        )
        for row in range(rows)
        for other in range(1 + others)
    ]


async def measure(
    model: str,
    rows: int,
    stem: int,
    others: int,
    options: dict[str, object],
    *,
    prefix_caching: bool,
    pinning: bool,
) -> None:
    config = make_config(
        {"model": model, "prefix_caching": prefix_caching, "max_wait_ms": 20, **options}
    )
    batcher = await Batcher.start(config)
    if not pinning:
        batcher._scheduler.cache.look_ahead = lambda: None  # type: ignore[method-assign]
    jobs = make_jobs(rows, stem, others, batcher.text.vocab_size - 64)
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
                "pinning": pinning,
                "rows": rows,
                "stem": stem,
                "others": others,
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
@click.option("--others", default=0, show_default=True)
@click.option("--max-rows", default=32, show_default=True)
@click.option("--kv-pages", type=int)
def main(
    model: str, rows: int, stem: int, others: int, max_rows: int, kv_pages: int | None
) -> None:
    """Time ROWS rows that share a stem of STEM tokens on MODEL, with and without the cache."""
    options: dict[str, object] = {"max_rows": max_rows, "kv_pages": kv_pages}
    settings = (
        [(True, True), (True, False), (False, False)] if others else [(True, True), (False, True)]
    )
    for prefix_caching, pinning in settings:
        asyncio.run(
            measure(
                model,
                rows,
                stem,
                others,
                options,
                prefix_caching=prefix_caching,
                pinning=pinning,
            )
        )


if __name__ == "__main__":
    main()
