"""How much memory and time it takes to load a model: prepared weights against what is on top.

    python tools/make_checkpoint.py out/qwen3-0.6b --shape 0.6b
    python benchmarks/load.py out/qwen3-0.6b

Run in a process of its own, as peaks are those of the process. Memory is counted as Linux does:
*anonymous* memory is what the process alone holds and what a machine can run out of; the mapped
checkpoint shows as file pages, which the kernel drops whenever it needs the room, and which are
shared with every other worker on the machine.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch

from tidemill_contracts.models.checkpoint import Checkpoint
from tidemill_contracts.models.registry import open_model
from tidemill_contracts.models.runtime import RuntimeOptions, plan_runtime

SAMPLE_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Report:
    prepared_bytes: int
    """What `prepare_weights` returned, tables included."""
    peak_bytes: int
    """Most anonymous memory while preparing, less that before."""
    peak_mapped_bytes: int
    """Most file pages while preparing, less those before."""
    seconds: float

    @property
    def ratio(self) -> float:
        return self.peak_bytes / self.prepared_bytes


class PeakMemory:
    """The process's memory over a stretch of time, sampled every `SAMPLE_SECONDS`."""

    def __init__(self) -> None:
        self._before = _memory()
        self.anonymous = 0
        self.mapped = 0
        self._stop = threading.Event()

    @contextmanager
    def sampled(self) -> Iterator[PeakMemory]:
        thread = threading.Thread(target=self._sample)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()

    def _sample(self) -> None:
        while True:
            last = self._stop.wait(SAMPLE_SECONDS)
            anonymous, mapped = _memory()
            self.anonymous = max(self.anonymous, anonymous - self._before[0])
            self.mapped = max(self.mapped, mapped - self._before[1])
            if last:
                return


def _memory() -> tuple[int, int]:
    """Bytes of anonymous memory and of file pages (proc_pid_status(5), RssAnon and RssFile)."""
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = value
    return int(fields["RssAnon"].split()[0]) * 1024, int(fields["RssFile"].split()[0]) * 1024


def measure(model_dir: Path, options: RuntimeOptions) -> Report:
    """Loads the weights once and lets them go."""
    config, contract = open_model(model_dir, options.quantization)
    runtime = plan_runtime(config, contract, options)
    # What torch sets up on its first copy is none of the model's.
    torch.empty(4, dtype=runtime.dtype).copy_(torch.zeros(4))
    started = time.perf_counter()
    with PeakMemory().sampled() as peak:
        static = contract.hooks.prepare_weights(
            Checkpoint(model_dir), config, runtime, lambda tensor: tensor
        )
    return Report(
        prepared_bytes=static.nbytes,
        peak_bytes=peak.anonymous,
        peak_mapped_bytes=peak.mapped,
        seconds=time.perf_counter() - started,
    )


@click.command(help=__doc__)
@click.argument("model_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Default: the file's.")
@click.option("--quantization", type=click.Choice(["int8"]))
@click.option("--kernels", default="auto", type=click.Choice(["auto", "torch"]), show_default=True)
@click.option("--max-model-len", type=int, help="Default: the model's context.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(model_dir: Path, as_json: bool, **options: Any) -> None:
    report = measure(model_dir, RuntimeOptions(kv_pages=1, **options))
    if as_json:
        click.echo(json.dumps({**asdict(report), "ratio": report.ratio}))
        return
    click.echo(f"prepared        {report.prepared_bytes / 1e6:10.1f} MB")
    click.echo(f"peak anonymous  {report.peak_bytes / 1e6:10.1f} MB  {report.ratio:.3f} x prepared")
    click.echo(f"peak mapped     {report.peak_mapped_bytes / 1e6:10.1f} MB  of the checkpoint")
    click.echo(f"time            {report.seconds:10.1f} s")


if __name__ == "__main__":
    main()
