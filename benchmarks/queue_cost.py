"""What Redis, arq's worker and the batcher cost: a workload through them beside the engine alone.

    python benchmarks/queue_cost.py out/qwen3-0.6b [--workload W1] [--rounds 5]

In turns, each in a process of its own with the same threads, rows, step tokens and KV cache: the
engine alone (`engine.py --serve`), held still while it is not its turn; and `tidemill worker` on an
embedded Redis, to which a `Producer` in this process sends the same prompts as token ids and
awaits every result. The clock of the second covers enqueuing, claiming, gathering (the worker's
default of 5 ms), generating, turning tokens into text where the model has a tokenizer, and the
results' way back. The prefix cache is off in both.

`of_engine` is the engine's time over the queue's, of each pair of neighbours; the bar for its
median is 0.97.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path

import click
import workloads
from contenders import HERE, OURS, Contender, Served, end_as_interrupted
from workloads import Request, rounded

from tidemill_contracts.wire import GenerationJob, SamplingParams
from tidemill_producer import Producer
from tidemill_producer.embedded import EmbeddedRedis, EmbeddedWorker

BAR = 0.97
PAGE_SIZE = 32


async def through_queue(producer: Producer, requests: list[Request], vocabulary: int) -> float:
    """Seconds from the first enqueue to the last result."""
    jobs = [
        GenerationJob(
            prompt_token_ids=[token % vocabulary for token in request.prompt],
            sampling=SamplingParams(temperature=0, max_tokens=request.new_tokens, ignore_eos=True),
        )
        for request in requests
    ]
    started = time.perf_counter()
    handles = [handle async for handle in producer.enqueue_many(jobs)]
    results = await asyncio.gather(*(handle.result() for handle in handles))
    taken = time.perf_counter() - started
    for request, result in zip(requests, results, strict=True):
        assert result.usage.completion_tokens == request.new_tokens
    await producer.forget([handle.id for handle in handles])
    return taken


async def measure(
    model: Path, name: str, rounds: int, threads: int, sizes: dict[str, int], timeout_s: float
) -> None:
    requests = workloads.workload(name)
    vocabulary = json.loads((model / "config.json").read_bytes())["vocab_size"]
    same = {"max-rows", "max-step-tokens", "max-model-len"}
    options: dict[str, str | int] = {key: sizes[key] for key in same}
    options |= {"kv-pages": sizes["kv-tokens"] // PAGE_SIZE, "page-size": PAGE_SIZE}
    options |= {"threads": threads, "dtype": "bfloat16"}
    alone = [word for key, value in sizes.items() for word in (f"--{key}", str(value))]
    os.environ["TIDEMILL_PREFIX_CACHING"] = "0"
    with EmbeddedRedis() as server:
        async with (
            EmbeddedWorker(server.url, model=str(model), options=options),
            Producer(server.url) as producer,
        ):
            contender = Contender(OURS, sys.executable, HERE / "engine.py", alone)
            engine = Served(contender, model, threads, timeout_s)
            try:
                await _rounds(engine, producer, name, requests, vocabulary, rounds, timeout_s)
            finally:
                engine.end()


async def _rounds(
    engine: Served,
    producer: Producer,
    name: str,
    requests: list[Request],
    vocabulary: int,
    rounds: int,
    timeout_s: float,
) -> None:
    warm = [Request(request.prompt[:64], 4) for request in workloads.workload("D8")]
    runs = []
    for number in range(rounds):
        run: dict[str, float] = {}
        # Each goes first in every other round.
        for step in (number, number + 1):
            if step % 2:
                await through_queue(producer, warm, vocabulary)
                run["queue_s"] = await through_queue(producer, requests, vocabulary)
            else:
                found = await asyncio.to_thread(engine.run, name, timeout_s)
                run["engine_s"] = found["wall_s"]
        run["of_engine"] = run["engine_s"] / run["queue_s"]
        runs.append(run)
        print(json.dumps(rounded(dict(run))), flush=True)
    fractions = [run["of_engine"] for run in runs]
    summary = {
        "summary": name,
        **{key: statistics.median(run[key] for run in runs) for key in runs[0]},
        "least": min(fractions),
        "most": max(fractions),
        "bar": BAR,
        "runs": rounds,
    }
    print(json.dumps(rounded(summary)))


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--workload", "name", default="W1", show_default=True, help="Or W1:8, its short form."
)
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--max-rows", default=64, show_default=True)
@click.option("--max-step-tokens", default=512, show_default=True)
@click.option("--max-model-len", default=4096, show_default=True)
@click.option("--kv-tokens", default=51_200, show_default=True, help="Size of each KV cache.")
@click.option("--timeout", default=600.0, show_default=True, help="Seconds of a run.")
def main(
    model: Path,
    name: str,
    rounds: int,
    threads: int,
    max_rows: int,
    max_step_tokens: int,
    max_model_len: int,
    kv_tokens: int,
    timeout: float,
) -> None:
    """Time a workload on MODEL, a checkpoint directory, through the queue and without it."""
    if workloads.is_decode(name):
        raise click.BadParameter("whole files only: W1, W2 or P")
    end_as_interrupted()
    sizes = {
        "max-rows": max_rows,
        "max-step-tokens": max_step_tokens,
        "max-model-len": max_model_len,
        "kv-tokens": kv_tokens,
    }
    asyncio.run(measure(model, name, rounds, threads, sizes, timeout))


if __name__ == "__main__":
    main()
