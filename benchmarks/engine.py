"""The engine alone: a loaded model, its scheduler and its sampler, without Redis.

    python tools/make_checkpoint.py out/qwen3-0.6b --shape 0.6b
    python benchmarks/engine.py out/qwen3-0.6b --workload W1 --workload D32

Prints one JSON line a run and one with the medians of each workload. The machine's ceilings are
measured before, between and after the runs, and the best of them count: `ceiling_fraction` is the
time that they allow (`floor.py` says how that is reckoned) over the median time that it took.

`rss_of_budget` is the process's peak of resident memory, libraries and the mapped checkpoint
included, over the weights as prepared and the KV cache **as far as its memory was ever touched**;
`anonymous_of_budget` leaves out what is mapped from files, which the system drops when it needs the
room (the checkpoint, while weights are packed); `rss_of_reserved` is the peak over weights and the
whole of the KV cache, which is set aside but not taken until rows use it.

With `--serve` it measures no ceilings: it runs the workloads that standard input names, a line
each, as `compare.py` asks for them.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import ceilings
import click
import numpy as np
import torch
import workloads
from ceilings import Ceilings
from floor import Floor
from workloads import Request, rounded

from tidemill_contracts.models.runtime import RuntimeOptions
from tidemill_worker.engine.engine import Engine
from tidemill_worker.engine.pages import PagePool
from tidemill_worker.engine.row import Row, RowSampling
from tidemill_worker.engine.runner import ModelRunner
from tidemill_worker.engine.scheduler import Scheduler

GREEDY = RowSampling(temperature=0, top_p=1, top_k=0, seed=0)


class TimedEngine(Engine):
    """Notes how long each step takes that decodes and prefills nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.decode_steps: list[tuple[int, float]] = []
        """Rows and seconds."""

    def step(self) -> None:
        prompt_tokens, row_steps = self.stats.prompt_tokens, self.stats.row_steps
        started = time.perf_counter()
        super().step()
        if self.stats.prompt_tokens == prompt_tokens:
            rows = self.stats.row_steps - row_steps
            self.decode_steps.append((rows, time.perf_counter() - started))


class Bench:
    """A loaded model that runs workloads one after another."""

    def __init__(self, model: Path, options: RuntimeOptions, threads: int) -> None:
        self.threads = threads
        self.floor = Floor.of(model)
        self.runner = ModelRunner.load(model, options)
        self.max_rows, self.max_step_tokens = options.max_rows, options.max_step_tokens

    def run(self, requests: Sequence[Request]) -> float:
        """Seconds until the last of the requests, all submitted at once, has ended."""
        return self.run_timed(requests)[0]

    def run_timed(
        self, requests: Sequence[Request], max_wait_ms: float = 0
    ) -> tuple[float, list[tuple[int, float]]]:
        """The same, and the rows and seconds of each step of decode alone."""
        runtime = self.runner.runtime
        scheduler = Scheduler(
            PagePool(runtime.total_kv_pages, runtime.page_size),
            max_rows=self.max_rows,
            max_step_tokens=self.max_step_tokens,
            max_model_len=runtime.max_seq_len,
            prefix_caching=False,
        )
        left = len(requests)
        done, ready = threading.Event(), threading.Event()

        def deliver(rows: Sequence[Row]) -> None:
            nonlocal left
            for row in rows:
                assert row.error is None, row.error
                assert row.known == row.max_len, f"row {row.id} ended early"
            left -= len(rows)
            if not left:
                done.set()

        def initialise() -> None:
            torch.set_num_threads(self.threads)
            self.runner.warm_up()
            ready.set()

        engine = TimedEngine(
            self.runner, scheduler, deliver, max_wait_ms=max_wait_ms, initialise=initialise
        )
        engine.start()
        ready.wait()
        started = time.perf_counter()
        vocabulary = self.runner.config.vocab_size
        for index, request in enumerate(requests):
            prompt = [token % vocabulary for token in request.prompt]
            engine.submit(Row(str(index), prompt, len(prompt) + request.new_tokens, GREEDY))
        done.wait()
        taken = time.perf_counter() - started
        engine.stop()
        return taken, engine.decode_steps

    @property
    def weight_bytes(self) -> int:
        """Of the weights that a decode step reads: all but tables, and but an embedding that is no
        head besides."""
        tensors = self.runner.model.static.named()
        looked_up = {"embed", "rope_cos", "rope_sin"}
        read = {t.data_ptr(): t.nbytes for name, t in tensors.items() if name not in looked_up}
        return sum(read.values())

    @property
    def budget(self) -> Budget:
        cache = self.runner.model.cache
        spec = self.runner.contract.hooks.cache_spec(self.runner.config, self.runner.runtime)
        return Budget(
            weights=self.runner.model.static.nbytes,
            reserved=self.runner.runtime.total_kv_pages * spec.bytes_per_page,
            touched=resident_bytes(cache.k) + resident_bytes(cache.v),
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that a model is to get by with."""

    weights: int
    reserved: int
    """The KV cache's address space."""
    touched: int
    """What of it was ever written, in the system's pages."""

    def describe(self) -> dict[str, float]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "peak_rss_gib": peak / 2**30,
            "rss_of_budget": peak / (self.weights + self.touched),
            "anonymous_of_budget": _anonymous_bytes() / (self.weights + self.touched),
            "rss_of_reserved": peak / (self.weights + self.reserved),
        }


def _anonymous_bytes() -> int:
    """Memory that the process alone holds now (proc_pid_status(5), RssAnon)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def resident_bytes(tensor: torch.Tensor) -> int:
    """What of a tensor's memory is there: bit 63 of each page's entry (proc_pid_pagemap(5))."""
    size = resource.getpagesize()
    first = tensor.data_ptr() // size
    count = (tensor.data_ptr() + tensor.nbytes - 1) // size + 1 - first
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * count), np.uint64)
    return int(np.count_nonzero(entries >> np.uint64(63))) * size


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--workload", "names", multiple=True, default=workloads.NAMES, show_default=True)
@click.option("--serve", is_flag=True, help="Run the workloads that standard input names.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--max-rows", default=64, show_default=True)
@click.option("--max-step-tokens", default=512, show_default=True)
@click.option("--max-model-len", default=4096, show_default=True)
@click.option("--kv-tokens", default=51_200, show_default=True, help="Size of the KV cache.")
@click.option("--kernels", default="auto", type=click.Choice(["auto", "torch"]), show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--quantization", type=click.Choice(["int8"]), help="Of the matrices.")
def main(
    model: Path,
    names: Sequence[str],
    serve: bool,
    repeats: int,
    threads: int,
    max_rows: int,
    max_step_tokens: int,
    max_model_len: int,
    kv_tokens: int,
    kernels: Any,
    dtype: str,
    quantization: Any,
) -> None:
    """Run workloads on MODEL, a checkpoint directory, and print what they took."""
    started = time.perf_counter()
    torch.set_num_threads(threads)
    options = RuntimeOptions(
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        max_rows=max_rows,
        max_step_tokens=max_step_tokens,
        kv_pages=kv_tokens // 32,
        page_size=32,
        kernels=kernels,
    )
    bench = Bench(model, options, threads)
    bench.run([Request([1], 1)])

    def tell(line: dict[str, Any]) -> None:
        print(json.dumps(rounded({**line, **bench.budget.describe()})), flush=True)

    tell(
        {
            "event": "ready",
            "seconds": time.perf_counter() - started,
            "versions": {name: metadata.version(name) for name in ("tidemill", "torch")},
            "weight_bytes": bench.weight_bytes,
        }
    )
    if serve:
        workloads.serve(sys.stdin, bench.run, tell)
        return
    limits = ceilings.measure(threads)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            runs[name].append(found := workloads.measure(name, bench.run))
            tell(found)
        limits = limits.best(ceilings.measure(threads, 2))
    for name in names:
        print(json.dumps(rounded(_summary(bench, name, runs[name], limits))), flush=True)


def _summary(
    bench: Bench, name: str, runs: Sequence[dict[str, Any]], limits: Ceilings
) -> dict[str, Any]:
    key = workloads.figure(name)
    values = [run[key] for run in runs]
    middle = statistics.median(values)
    least = bench.floor.seconds(name, limits, bench.max_rows, bench.weight_bytes)
    return {
        "summary": name,
        **{name: statistics.median(run[name] for run in runs) for name in list(runs[0])[1:]},
        "spread": (max(values) - min(values)) / middle,
        "ceiling_fraction": least * (1000 if key == "step_ms" else 1) / middle,
        "read_gb_s": limits.read_gb_s,
        "matrix_tflop_s": limits.matrix_tflop_s,
        **bench.budget.describe(),
        "runs": len(runs),
    }


if __name__ == "__main__":
    main()
