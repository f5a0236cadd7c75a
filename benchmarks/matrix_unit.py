"""In how many states the matrix unit is met, and what its instructions take in each.

    python benchmarks/matrix_unit.py [--threads 2] [--seconds 10]

On a shared machine the unit's rate may jump between levels that have nothing to do with what we
run. In windows of a fraction of a millisecond this measures a product of tiles that are in
registers, loads of tiles from the first and from the second cache, both at once, and, for
comparison, what does not use the unit: a 512-bit multiply-add and a scalar multiply. Windows are
told apart by what a product takes; each line is the medians of a state, times in ns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

import click
from ceilings import compiled

STATES = {"undisturbed": (0.0, 8.0), "held back": (11.0, 18.0)}
"""ns that a product takes in a register, on Sapphire Rapids at some 2.8 GHz: 16 cycles are 5.8."""
FIGURES = ("product", "load_near", "load_far", "both", "vector", "scalar")


def summary(windows: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Of each state: the share of all windows that it has, and medians of their figures."""
    found = {}
    for state, (low, high) in STATES.items():
        inside = [window for window in windows if low <= window["product"] < high]
        if inside:
            medians = {name: statistics.median(w[name] for w in inside) for name in FIGURES}
            found[state] = {"share": len(inside) / len(windows), **medians}
    return found


@click.command()
@click.option("--threads", default=2, show_default=True)
@click.option("--seconds", default=10.0, show_default=True)
def main(threads: int, seconds: float) -> None:
    """Watch the matrix unit of this machine."""
    program = compiled(Path(__file__).with_suffix(".cpp"))
    command = [str(program), str(threads), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException("this machine has no matrix unit, or does not grant it")
    windows = [json.loads(line) for line in done.stdout.splitlines()]
    for state, figures in summary(windows).items():
        rounded = {name: round(value, 2) for name, value in figures.items()}
        print(json.dumps({"state": state, **rounded}))


if __name__ == "__main__":
    main()
