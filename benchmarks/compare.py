"""Ours beside other engines on the same prompts, in turns.

    python benchmarks/compare.py out/qwen3-0.6b \\
        --peer transformers=.venv-transformers/bin/python --peer vllm=.venv-vllm/bin/python
    python benchmarks/compare.py --summary out/compare.jsonl

A turn takes one workload through every engine, ours again after every two peers (see
`comparison.py`); a round is a turn of each workload, and each turn begins with another peer.
Right before and right after each run the machine's ceilings are probed, for they change from minute
to minute. Engines stay loaded between their turns as long as there is memory, and are stopped
meanwhile (`contenders.py`), so an idle one takes no core. How to install the peers:
`benchmarks/peers/README.md`.

Every run is a line of the output file as soon as it is done. Called again with the same output, it
goes on at the first turn that is not complete; `--summary FILE` prints the tables, of a part too. A
peer that fails is told of with its last lines, and left out after it has failed three times.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ceilings
import click
import workloads
from ceilings import Ceilings
from comparison import Comparison
from contenders import HERE, OURS, Contender, EngineFailed, Garage, end_as_interrupted
from floor import Floor

PROBE_REPEATS = 3
"""The best of so few: of the moment, not of the machine."""
MAX_FAILURES = 3


def turn(peers: Sequence[Contender], ours: Contender, shift: int) -> list[Contender]:
    """Ours, two peers, ours, two peers, …, beginning with another peer for each `shift`."""
    start = shift % len(peers) if peers else 0
    order = [*peers[start:], *peers[:start]]
    found = [ours]
    for index, peer in enumerate(order):
        found.append(peer)
        if index % 2 and index + 1 < len(order):
            found.append(ours)
    return found


@dataclass(slots=True)
class Runner:
    """Measures turns and writes what came of them."""

    garage: Garage
    threads: int
    output: Path
    failures: Counter[str] = field(default_factory=Counter)

    def write(self, event: dict[str, Any]) -> None:
        with self.output.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def turn(self, number: int, workload: str, order: Sequence[Contender]) -> None:
        """Writes `run` and `failure` events, and a `turn` event at its end."""
        here: dict[str, Any] = {"round": number, "workload": workload}
        for position, contender in enumerate(order):
            if self.failures[contender.name] >= MAX_FAILURES:
                continue
            try:
                self._measure({**here, "position": position}, contender)
            except EngineFailed as failure:
                self.failures[contender.name] += 1
                self.write(
                    {
                        "event": "failure",
                        **here,
                        "position": position,
                        "engine": contender.name,
                        "message": str(failure),
                    }
                )
                print(f"{contender.name} failed: {failure}", file=sys.stderr)
        self.write({"event": "turn", **here})

    def _measure(self, here: dict[str, Any], contender: Contender) -> None:
        served, started = self.garage.get(contender)
        if started:
            self.write(
                {
                    "event": "start",
                    "engine": contender.name,
                    "cold_start_s": served.cold_start_s,
                    "versions": served.ready["versions"],
                    "weight_bytes": served.ready["weight_bytes"],
                }
            )
        before = ceilings.measure(self.threads, PROBE_REPEATS)
        found = self.garage.run(contender, here["workload"])
        after = ceilings.measure(self.threads, PROBE_REPEATS)
        self.write(
            {
                "event": "run",
                **here,
                **found,
                "engine": contender.name,
                "at": time.strftime("%H:%M:%S"),
                "before": asdict(before),
                "after": asdict(after),
            }
        )
        print(_line(here, contender.name, found, before, after), file=sys.stderr)


def _line(
    here: dict[str, Any], engine: str, found: dict[str, Any], before: Ceilings, after: Ceilings
) -> str:
    key = workloads.figure(here["workload"])
    limits = before.mean(after)
    return (
        f"round {here['round'] + 1} {here['workload']} {engine}: {key} {found[key]}"
        f" ({limits.read_gb_s:.1f} GB/s, {limits.matrix_tflop_s:.2f} TFLOP/s)"
    )


def turns(
    rounds: int, names: Sequence[str], peers: Sequence[Contender], ours: Contender
) -> Iterator[tuple[int, str, list[Contender]]]:
    for number in range(rounds):
        for index, name in enumerate(names):
            yield number, name, turn(peers, ours, number + index)


def _done(output: Path, head: dict[str, Any]) -> set[tuple[int, str]]:
    """The turns that the output has; writes its head where it is new."""
    if not output.exists() or not output.stat().st_size:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(head) + "\n")
        return set()
    text = output.read_text()
    if not text.endswith("\n"):
        # Cut while it was written.
        output.write_text(text[: text.rfind("\n") + 1])
    known = Comparison.read(output).head
    for key in ("model", "threads", "engines", "max_rows"):
        if known[key] != head[key]:
            raise click.UsageError(
                f"{output} is of another comparison: its {key} is {known[key]!r}, not {head[key]!r}"
            )
    events = [json.loads(line) for line in output.read_text().splitlines()]
    return {(e["round"], e["workload"]) for e in events if e["event"] == "turn"}


@click.command(
    help="Compare our engine with other engines on MODEL, a checkpoint directory.",
    epilog="Example: compare.py out/qwen3-0.6b --peer vllm=.venv-vllm/bin/python --peer"
    " 'openvino=.venv-openvino/bin/python --export out/qwen3-0.6b-openvino' --workload D8",
)
@click.argument(
    "model", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="NAME=PYTHON [OPTION …]",
    help="An engine, the interpreter of the environment that it is installed in, and options for"
    " its script in benchmarks/peers/. Repeatable. What follows a dash in NAME tells two apart:"
    " 'vllm-eager=… --eager'. 'tidemill-…' is another of ours.",
)
@click.option("--ours", default="", metavar="OPTIONS", help="Options for benchmarks/engine.py.")
@click.option(
    "--workload",
    "names",
    multiple=True,
    default=workloads.NAMES,
    show_default=True,
    help="A name, or NAME:ROWS for its first rows.",
)
@click.option("--rounds", default=3, show_default=True, help="Turns of each workload.")
@click.option("--threads", default=2, show_default=True)
@click.option("--max-rows", default=64, show_default=True, help="Of a step, for the floor.")
@click.option(
    "--timeout", default=900.0, show_default=True, help="Seconds that a start or a run may take."
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default="out/compare.jsonl",
    show_default=True,
)
@click.option(
    "--summary",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Print the tables of an output file and end.",
)
@click.option("--against", default=OURS, show_default=True, help="Whose time ratios are over.")
def main(
    model: Path | None,
    peers: Sequence[str],
    ours: str,
    names: Sequence[str],
    rounds: int,
    threads: int,
    max_rows: int,
    timeout: float,
    output: Path,
    summary: Path | None,
    against: str,
) -> None:
    if summary is not None:
        print(Comparison.read(summary).markdown(against))
        return
    if model is None:
        raise click.UsageError("MODEL or --summary is wanted")
    for name in names:
        try:
            workloads.workload(name)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    own = Contender(OURS, sys.executable, HERE / "engine.py", shlex.split(ours))
    others = [Contender.parse(peer) for peer in peers]
    engines = [contender.name for contender in (own, *others)]
    if len(set(engines)) < len(engines):
        raise click.BadParameter("two engines of one name; add a dash and a word to one")
    head = {
        "event": "comparison",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": model.name,
        "threads": threads,
        "max_rows": max_rows,
        "engines": engines,
        "options": {contender.name: list(contender.options) for contender in (own, *others)},
        "floor": asdict(Floor.of(model)),
    }
    done = _done(output, head)
    end_as_interrupted()
    garage = Garage(model, threads, timeout)
    runner = Runner(garage, threads, output)
    try:
        for number, name, order in turns(rounds, names, others, own):
            if (number, name) not in done:
                runner.turn(number, name, order)
    finally:
        garage.close()
    print(Comparison.read(output).markdown(against))
    if runner.failures[OURS]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
