"""The engine alone: a loaded model, its scheduler and its sampler, without Redis.

    python tools/make_checkpoint.py out/qwen3-0.6b --shape 0.6b
    python benchmarks/engine.py out/qwen3-0.6b --workload W1 --workload D32

Prints one JSON line a run and one with the medians of each workload. The machine's ceilings are
measured before, between and after the runs. `ceiling_fraction` is, for D, the time that reading
weights and KV cache once would take at that bandwidth over the time of a step; for P the rate of
multiplication over that of the matrix unit; for W the time that both together allow over the time
that the file took.
"""

from __future__ import annotations

import json
import resource
import statistics
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import ceilings
import click
import torch
import workloads
from ceilings import Ceilings
from workloads import Request, rounded

from tidemill_contracts.models.runtime import RuntimeOptions
from tidemill_worker.engine.engine import Engine
from tidemill_worker.engine.pages import PagePool
from tidemill_worker.engine.row import Row, RowSampling
from tidemill_worker.engine.runner import ModelRunner
from tidemill_worker.engine.scheduler import Scheduler

GREEDY = RowSampling(temperature=0, top_p=1, top_k=0, seed=0)


class Bench:
    """A loaded model that runs workloads one after another."""

    def __init__(self, model: Path, options: RuntimeOptions, threads: int) -> None:
        self.threads = threads
        self.runner = ModelRunner.load(model, options)
        self.max_rows, self.max_step_tokens = options.max_rows, options.max_step_tokens

    def run(self, requests: Sequence[Request]) -> float:
        """Seconds until the last of the requests, all submitted at once, has ended."""
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
            left -= len(rows)
            if not left:
                done.set()

        def initialise() -> None:
            torch.set_num_threads(self.threads)
            self.runner.warm_up()
            ready.set()

        engine = Engine(self.runner, scheduler, deliver, initialise=initialise)
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
        return taken

    def limit_s(self, name: str, limits: Ceilings) -> float:
        """The least time that the machine allows: of a step for D, of the whole for the others."""
        requests = workloads.workload(name)
        weights = self.runner.model.static.nbytes
        spec = self.runner.contract.hooks.cache_spec(self.runner.config, self.runner.runtime)
        kv_token = spec.bytes_per_page / spec.page_size
        read, flops = limits.read_gb_s * 1e9, (limits.matrix_tflop_s or float("nan")) * 1e12
        if name.startswith("D"):
            # Over the run, a row's mean context is its prompt and half of what it writes.
            context = sum(len(r.prompt) + r.new_tokens / 2 for r in requests)
            return (weights + kv_token * context) / read
        prefill = sum(self._prompt_flops(len(r.prompt)) for r in requests) / flops
        if name == "P":
            return prefill
        # Decode: as many steps as the longest answer takes with all rows side by side, at least.
        steps = max(r.new_tokens for r in requests)
        waves = -(-len(requests) // self.max_rows)
        context = sum(r.new_tokens * (len(r.prompt) + r.new_tokens / 2) for r in requests)
        tokens = sum(r.new_tokens for r in requests)
        moved = weights * steps * waves + kv_token * context
        return prefill + max(moved / read, tokens * 2 * self._parameters() / flops)

    def _parameters(self) -> float:
        """Weights that every token is multiplied with, the head among them."""
        return float(self.runner.model.static.nbytes / self.runner.runtime.dtype.itemsize)

    def _prompt_flops(self, length: int) -> float:
        config = self.runner.config
        head = config.vocab_size * config.hidden_size
        layers = self._parameters() - head
        causal = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
        return length * (2 * layers + causal * length) + 2 * head


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--workload", "names", multiple=True, default=workloads.NAMES, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--max-rows", default=64, show_default=True)
@click.option("--max-step-tokens", default=512, show_default=True)
@click.option("--max-model-len", default=4096, show_default=True)
@click.option("--kv-tokens", default=51_200, show_default=True, help="Size of the KV cache.")
@click.option("--kernels", default="auto", type=click.Choice(["auto", "torch"]), show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
def main(
    model: Path,
    names: Sequence[str],
    repeats: int,
    threads: int,
    max_rows: int,
    max_step_tokens: int,
    max_model_len: int,
    kv_tokens: int,
    kernels: Any,
    dtype: str,
) -> None:
    """Run workloads on MODEL, a checkpoint directory, and print what they took."""
    started = time.perf_counter()
    torch.set_num_threads(threads)
    options = RuntimeOptions(
        dtype=dtype,
        max_model_len=max_model_len,
        max_rows=max_rows,
        max_step_tokens=max_step_tokens,
        kv_pages=kv_tokens // 32,
        page_size=32,
        kernels=kernels,
    )
    bench = Bench(model, options, threads)
    bench.run([Request([1], 1)])
    print(json.dumps({"event": "ready", "seconds": round(time.perf_counter() - started, 2)}))
    limits = ceilings.measure(threads)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            runs[name].append(found := workloads.measure(name, bench.run))
            print(json.dumps(rounded(found)), flush=True)
        limits = limits.best(ceilings.measure(threads, 2))
    for name in names:
        print(json.dumps(rounded(_summary(bench, name, runs[name], limits))), flush=True)


def _summary(
    bench: Bench, name: str, runs: Sequence[dict[str, Any]], limits: Ceilings
) -> dict[str, Any]:
    key = "step_ms" if name.startswith("D") else "wall_s"
    values = [run[key] for run in runs]
    middle = statistics.median(values)
    limit = bench.limit_s(name, limits) * (1000 if key == "step_ms" else 1)
    return {
        "summary": name,
        **{name: statistics.median(run[name] for run in runs) for name in list(runs[0])[1:]},
        "spread": (max(values) - min(values)) / middle,
        "ceiling_fraction": limit / middle,
        "read_gb_s": limits.read_gb_s,
        "matrix_tflop_s": limits.matrix_tflop_s,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "runs": len(runs),
        "versions": {name: metadata.version(name) for name in ("tidemill", "torch")},
    }


if __name__ == "__main__":
    main()
