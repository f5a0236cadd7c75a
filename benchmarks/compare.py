"""Ours beside other engines on the same prompts, in turns.

    python benchmarks/compare.py out/qwen3-0.6b \\
        --peer transformers=.venv-transformers/bin/python --peer vllm=.venv-vllm/bin/python

A round measures the machine's ceilings, then runs `benchmarks/engine.py` in this interpreter and
each peer's script of `benchmarks/peers/` in its own, one process at a time; every round begins with
another engine, so that a slow minute of the machine does not always meet the same one. How to
install the peers: `benchmarks/peers/README.md`.

Prints a Markdown table of medians and writes every run to a JSON file after each round. A peer
that fails is reported with its last lines, and the comparison goes on without that run.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Timer
from typing import IO, Any

import ceilings
import click
import workloads

HERE = Path(__file__).parent
OURS = "tidemill"
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
LAST_LINES = 15


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine's script with its interpreter and options."""

    name: str
    python: str
    script: Path
    options: Sequence[str] = ()

    @classmethod
    def parse(cls, text: str) -> Contender:
        """``NAME=PYTHON [OPTION …]``; raises `click.BadParameter`."""
        name, _, rest = text.partition("=")
        python, *options = shlex.split(rest) or [""]
        script = HERE / "peers" / f"{name.partition('-')[0]}_engine.py"
        if not python:
            raise click.BadParameter(f"{text!r} is not NAME=PYTHON")
        if not script.exists():
            scripts = sorted((HERE / "peers").glob("*_engine.py"))
            known = ", ".join(path.stem.removesuffix("_engine") for path in scripts)
            raise click.BadParameter(f"no adapter for {name!r}; there are {known}")
        return cls(name, python, script, options)

    def environment(self, threads: int) -> dict[str, str]:
        """As found, less what tunes BLAS for one machine, and for a peer less our own paths; vLLM
        wants two libraries preloaded."""
        left_out = {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"}
        if self.name != OURS:
            left_out.add("PYTHONPATH")
        env = {name: value for name, value in os.environ.items() if name not in left_out}
        env |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        if self.script.stem == "vllm_engine":
            # The interpreter is a link out of its environment: not resolved, for that reason.
            openmp = Path(self.python).absolute().parents[1] / "lib" / "libiomp5.so"
            env["LD_PRELOAD"] = ":".join(str(p) for p in (TCMALLOC, openmp) if p.exists())
        return env


@dataclass(slots=True)
class Outcome:
    """What one process of an engine told."""

    engine: str
    cold_start_s: float | None = None
    """From the start of the process to its first token, model loaded."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    peak_rss_gib: float = 0
    failure: str | None = None
    """How the process ended and its last lines, where it did not end well."""


def run(contender: Contender, arguments: Sequence[str], threads: int, timeout_s: float) -> Outcome:
    """One process from start to end. It leads a session of its own, which ends with it."""
    command = [contender.python, str(contender.script), *arguments, *contender.options]
    outcome = Outcome(contender.name)
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            process = subprocess.Popen(
                command,
                env=contender.environment(threads),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            outcome.failure = str(error)
            return outcome
        timer = Timer(timeout_s, _end, [process])
        timer.start()
        try:
            assert process.stdout is not None
            for text in process.stdout:
                _take(outcome, json.loads(text), time.perf_counter() - started)
            code = process.wait()
        finally:
            timer.cancel()
            _end(process)
        if code:
            late = time.perf_counter() - started >= timeout_s
            how = f"stopped after {timeout_s:g} s" if late else f"ended with {code}"
            outcome.failure = "\n".join([how, *_last_lines(errors)])
    return outcome


def _take(outcome: Outcome, line: Mapping[str, Any], elapsed_s: float) -> None:
    outcome.peak_rss_gib = max(outcome.peak_rss_gib, line.get("peak_rss_gib", 0))
    if line.get("event") == "ready":
        outcome.cold_start_s = round(elapsed_s, 2)
    elif "workload" in line:
        outcome.runs.append(dict(line))
        figure = _key(line["workload"])
        print(f"  {outcome.engine} {line['workload']}: {figure} {line[figure]}", file=sys.stderr)


def _end(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _last_lines(file: IO[str]) -> list[str]:
    file.seek(0)
    return file.read().splitlines()[-LAST_LINES:]


def _key(workload: str) -> str:
    """What a workload is judged by: less is better in both."""
    return "step_ms" if workload.startswith("D") else "wall_s"


@dataclass(frozen=True, slots=True)
class Figure:
    median: float
    spread: float
    """(max − min) / median."""
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        middle = statistics.median(values)
        return cls(middle, (max(values) - min(values)) / middle, len(values))


def figures(outcomes: Sequence[Outcome], names: Sequence[str]) -> dict[str, dict[str, Figure]]:
    """By workload, then by engine; an engine without a run of a workload is left out there."""
    found: dict[str, dict[str, Figure]] = {}
    for name in names:
        values: dict[str, list[float]] = {}
        for outcome in outcomes:
            for measured in outcome.runs:
                if measured["workload"] == name:
                    values.setdefault(outcome.engine, []).append(measured[_key(name)])
        found[name] = {engine: Figure.of(each) for engine, each in values.items()}
    return found


def table(
    found: Mapping[str, Mapping[str, Figure]], outcomes: Sequence[Outcome], engines: Sequence[str]
) -> str:
    """Markdown; the last column is the fastest peer's time over ours."""
    head = ["workload", *engines, "fastest peer / ours"]
    lines = [head, ["---"] * len(head)]
    for name, by_engine in found.items():
        unit = "ms a step" if _key(name) == "step_ms" else "s"
        cells = [_cell(by_engine.get(engine)) for engine in engines]
        lines.append([f"{name}, {unit}", *cells, _ratio(by_engine)])
    for title, attribute in (("cold start, s", "cold_start_s"), ("peak RSS, GiB", "peak_rss_gib")):
        cells = []
        for engine in engines:
            values = [getattr(o, attribute) for o in outcomes if o.engine == engine]
            values = [value for value in values if value]
            cells.append(f"{statistics.median(values):.2f}" if values else "–")
        lines.append([title, *cells, ""])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "–"
    return f"{figure.median:.2f} ({figure.spread:.0%}, n={figure.runs})"


def _ratio(by_engine: Mapping[str, Figure]) -> str:
    peers = [(f.median, engine) for engine, f in by_engine.items() if engine != OURS]
    if OURS not in by_engine or not peers:
        return "–"
    fastest, engine = min(peers)
    return f"{fastest / by_engine[OURS].median:.2f} × ({engine})"


@click.command(
    help="Compare our engine with other engines on MODEL, a checkpoint directory.",
    epilog="Example: compare.py out/qwen3-0.6b --peer vllm=.venv-vllm/bin/python --peer"
    " 'openvino=.venv-openvino/bin/python --export out/qwen3-0.6b-openvino' --workload D8",
)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="NAME=PYTHON [OPTION …]",
    help="An engine, the interpreter of the environment that it is installed in, and options for"
    " its script in benchmarks/peers/. Repeatable. What follows a dash in NAME tells two apart:"
    " 'vllm-eager=… --eager'.",
)
@click.option("--ours", default="", metavar="OPTIONS", help="Options for benchmarks/engine.py.")
@click.option(
    "--workload",
    "names",
    multiple=True,
    type=click.Choice(workloads.NAMES),
    default=workloads.NAMES,
    show_default=True,
)
@click.option("--rounds", default=3, show_default=True, help="Processes of each engine.")
@click.option("--repeats", default=2, show_default=True, help="Runs of a workload in a process.")
@click.option("--threads", default=2, show_default=True)
@click.option(
    "--timeout", default=1800.0, show_default=True, help="Seconds that a process may take."
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default="out/compare.json",
    show_default=True,
)
def main(
    model: Path,
    peers: Sequence[str],
    ours: str,
    names: Sequence[str],
    rounds: int,
    repeats: int,
    threads: int,
    timeout: float,
    output: Path,
) -> None:
    contenders = [Contender(OURS, sys.executable, HERE / "engine.py", shlex.split(ours))]
    contenders += [Contender.parse(peer) for peer in peers]
    engines = [contender.name for contender in contenders]
    if len(set(engines)) < len(engines):
        raise click.BadParameter("two peers of one name; add a dash and a word to one")
    arguments = [str(model), "--repeats", str(repeats), "--threads", str(threads)]
    arguments += [word for name in names for word in ("--workload", name)]
    record: dict[str, Any] = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": model.name,
        "threads": threads,
        "options": {contender.name: list(contender.options) for contender in contenders},
        "rounds": [],
    }
    outcomes: list[Outcome] = []
    output.parent.mkdir(parents=True, exist_ok=True)
    for number in range(rounds):
        first = number % len(contenders)
        limits = ceilings.measure(threads)
        print(
            f"round {number + 1} of {rounds}: {limits.read_gb_s} GB/s,"
            f" {limits.matrix_tflop_s} TFLOP/s",
            file=sys.stderr,
        )
        told = []
        for contender in contenders[first:] + contenders[:first]:
            told.append(outcome := run(contender, arguments, threads, timeout))
            if outcome.failure is not None:
                print(f"{contender.name} failed: {outcome.failure}", file=sys.stderr)
        outcomes += told
        found = figures(outcomes, names)
        record["rounds"].append(
            {"ceilings": asdict(limits), "processes": [asdict(outcome) for outcome in told]}
        )
        record["figures"] = {
            name: {engine: asdict(figure) for engine, figure in by_engine.items()}
            for name, by_engine in found.items()
        }
        output.write_text(json.dumps(record, indent=2) + "\n")
    print(table(found, outcomes, engines))
    if any(outcome.engine == OURS and outcome.failure for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
