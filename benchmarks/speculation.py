"""What guessing tokens ahead saves, and what it costs where nothing can be guessed.

    python benchmarks/speculation.py out/qwen3-0.6b --rows 8

Decode with guesses and without takes turns in one process, over texts of three kinds: greedy ones
of random weights, which soon go round in loops; ones drawn from 64 tokens, where most pairs have
stood before and nearly every guess is wrong; and ones drawn from the whole vocabulary, where
nothing ever repeats. `--demo` runs questions for the demo model instead, whose answers copy words
out of the prompt. Prints one JSON line for each kind.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import click
import torch

from tidemill_contracts.models.runtime import RuntimeOptions
from tidemill_contracts.wire import ChatMessage, GenerationJob, SamplingParams
from tidemill_worker.batcher import DEMO_MODEL, Batcher
from tidemill_worker.engine.engine import Engine
from tidemill_worker.engine.pages import PagePool
from tidemill_worker.engine.row import Row, RowSampling
from tidemill_worker.engine.runner import ModelRunner
from tidemill_worker.engine.scheduler import Scheduler
from tidemill_worker.settings import make_config

PROMPT = 64
"""Tokens of a prompt, all drawn from the vocabulary."""
KINDS = {
    "loops": RowSampling(temperature=0, top_p=1, top_k=0, seed=0),
    "chance": RowSampling(
        temperature=5, top_p=1, top_k=0, seed=0, allowed_token_ids=range(1000, 1064)
    ),
    "fresh": RowSampling(temperature=1, top_p=1, top_k=0, seed=0),
}


class Side:
    """One engine of two over the same model; only one of them has work at a time."""

    def __init__(self, runner: ModelRunner, threads: int, drafts: int) -> None:
        runtime = runner.runtime
        scheduler = Scheduler(
            PagePool(runtime.total_kv_pages, runtime.page_size),
            max_rows=runtime.max_batch_size,
            max_step_tokens=runtime.max_step_tokens,
            max_model_len=runtime.max_seq_len,
            prefix_caching=False,
            max_drafts=drafts,
            max_logit_rows=runner.max_logit_rows,
        )
        self._done = threading.Event()
        self._left = 0
        self.engine = Engine(
            runner, scheduler, self._deliver, initialise=lambda: torch.set_num_threads(threads)
        )
        self.engine.start()

    def run(self, rows: Sequence[Row]) -> float:
        """Seconds a generated token, from when the last row has its first one."""
        self._left = len(rows)
        self._done.clear()
        for row in rows:
            self.engine.submit(row)
        self._done.wait()
        started = max(row.first_token_at for row in rows)
        return (max(row.finished_at for row in rows) - started) / (rows[0].generated - 1)

    def _deliver(self, rows: list[Row]) -> None:
        assert not any(row.error for row in rows)
        self._left -= len(rows)
        if not self._left:
            self._done.set()


def make_rows(kind: str, count: int, new_tokens: int, vocabulary: int) -> list[Row]:
    rng = random.Random(count)
    return [
        Row(str(n), prompt, PROMPT + new_tokens, KINDS[kind])
        for n in range(count)
        for prompt in [[rng.randrange(1000, vocabulary - 1000) for _ in range(PROMPT)]]
    ]


def summary(times: dict[str, list[float]]) -> dict[str, object]:
    ratios = [off / on for off, on in zip(times["off"], times["on"], strict=True)]
    return {
        "off_ms": round(1000 * statistics.median(times["off"]), 2),
        "on_ms": round(1000 * statistics.median(times["on"]), 2),
        "speedup": round(statistics.median(ratios), 3),
        "speedups": [round(ratio, 3) for ratio in ratios],
    }


def compare(
    runner: ModelRunner, kinds: Sequence[str], rows: int, new_tokens: int, rounds: int, drafts: int
) -> None:
    threads = torch.get_num_threads()
    sides = {"off": Side(runner, threads, 0), "on": Side(runner, threads, drafts)}
    vocabulary = runner.config.vocab_size
    for side in sides.values():  # which learns meanwhile how long steps take
        side.run(make_rows("loops", rows, 48, vocabulary))
    for kind in kinds:
        times: dict[str, list[float]] = {"off": [], "on": []}
        accepted = computed = 0
        for turn in range(rounds):
            tokens = {}
            for name in ("off", "on") if turn % 2 else ("on", "off"):
                made = make_rows(kind, rows, new_tokens, vocabulary)
                times[name].append(sides[name].run(made))
                tokens[name] = [row.token_ids for row in made]
                accepted += sum(row.accepted_draft_tokens for row in made)
                computed += sum(row.draft_tokens for row in made)
            assert tokens["on"] == tokens["off"]
        found = {
            "kind": kind,
            "rows": rows,
            **summary(times),
            "drafts_a_token": round(computed / (rounds * rows * new_tokens), 3),
            "accepted_a_token": round(accepted / (rounds * rows * new_tokens), 3),
        }
        print(json.dumps(found), flush=True)
    for side in sides.values():
        side.engine.stop()


async def compare_demo(questions: str, rows: int, rounds: int, drafts: int) -> None:
    """Runs all of the questions, a JSON object a line, and those of each task."""
    tasks: dict[str, list[GenerationJob]] = {"all": []}
    for line in questions.splitlines():
        asked = json.loads(line)
        if "messages" in asked:
            messages = [ChatMessage(**message) for message in asked["messages"]]
            job = GenerationJob(messages=messages, sampling=SamplingParams(**asked["sampling"]))
            tasks["all"].append(job)
            tasks.setdefault(asked["metadata"]["task"], []).append(job)
    settings = {"model": DEMO_MODEL, "max_rows": rows, "kv_pages": 32 * rows}
    sides = {
        name: await Batcher.start(make_config({**settings, "speculate": count}))
        for name, count in (("off", 0), ("on", drafts))
    }
    for task, jobs in tasks.items():
        times: dict[str, list[float]] = {"off": [], "on": []}
        for turn in range(rounds):
            texts = {}
            for name in ("off", "on") if turn % 2 else ("on", "off"):
                side = sides[name]
                started = time.perf_counter()
                results = await asyncio.gather(
                    *(side.generate(job, str(n), time.time()) for n, job in enumerate(jobs))
                )
                times[name].append(time.perf_counter() - started)
                texts[name] = [result.text for result in results]
                if name == "on":
                    usages = [result.usage for result in results]
            assert texts["on"] == texts["off"]
        tokens = sum(usage.completion_tokens for usage in usages)
        found = {
            "task": task,
            "rows": rows,
            **summary(times),
            "drafts_a_token": round(sum(usage.draft_tokens for usage in usages) / tokens, 3),
            "accepted_a_token": round(
                sum(usage.accepted_draft_tokens for usage in usages) / tokens, 3
            ),
        }
        print(json.dumps(found), flush=True)
    for side in sides.values():
        await side.close()


@click.command()
@click.argument("model", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--demo", type=click.Path(exists=True, path_type=Path), help="Its questions.")
@click.option("--kind", "kinds", multiple=True, default=list(KINDS), show_default=True)
@click.option("--rows", default=8, show_default=True)
@click.option("--new-tokens", default=64, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--drafts", default=8, show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(
    model: Path | None,
    demo: Path | None,
    kinds: Sequence[str],
    rows: int,
    new_tokens: int,
    rounds: int,
    drafts: int,
    threads: int,
) -> None:
    """Time decode with guesses and without on MODEL, a checkpoint directory."""
    torch.set_num_threads(threads)
    if demo is not None:
        asyncio.run(compare_demo(demo.read_text("utf-8"), rows, rounds, drafts))
    if model is not None:
        options = RuntimeOptions(
            dtype="bfloat16", max_model_len=512, max_rows=rows, max_step_tokens=512, kv_pages=512
        )
        compare(ModelRunner.load(model, options), kinds, rows, new_tokens, rounds, drafts)


if __name__ == "__main__":
    main()
