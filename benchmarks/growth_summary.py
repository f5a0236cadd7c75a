"""A table of what `growth.py` and `growth_file.py` printed, with exponents, and plots.

    python benchmarks/growth_summary.py out/growth.jsonl [--plots benchmarks/plots]

An exponent of n between two neighbouring points says that the quantity grew as x to the n: up to 1
it grows no faster than what was varied. Plots are SVG files and need matplotlib (the extra
`bench`).
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

Point = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chart:
    varied: str
    x: str
    y: str
    title: str
    x_label: str
    y_label: str


CHARTS = (
    Chart("rows", "rows", "step_ms", "A decode step against rows", "rows", "ms"),
    Chart("rows", "rows", "decode_tok_s", "Throughput against rows", "rows", "tokens/s"),
    Chart(
        "context", "context", "step_ms", "A decode step against context", "tokens of context", "ms"
    ),
    Chart("file", "rows", "wall_s", "A file against its rows", "rows of the file", "s"),
    Chart("file", "rows", "command_rss_mib", "The command's memory", "rows of the file", "MiB"),
)


def series(points: Sequence[Point], chart: Chart) -> list[tuple[float, float]]:
    """x and y in order of x; where a point was measured again, the last counts."""
    found = {p[chart.x]: p[chart.y] for p in points if p["varied"] == chart.varied}
    return sorted(found.items())


def exponents(pairs: Sequence[tuple[float, float]]) -> Iterator[float | None]:
    """Of each point against the one before; none for the first."""
    for index, (x, y) in enumerate(pairs):
        if index == 0:
            yield None
        else:
            x_before, y_before = pairs[index - 1]
            yield math.log(y / y_before) / math.log(x / x_before)


def table(points: Sequence[Point]) -> str:
    lines = []
    for chart in CHARTS:
        pairs = series(points, chart)
        if not pairs:
            continue
        lines += ["", f"| {chart.x_label} | {chart.title}, {chart.y_label} | exponent |"]
        lines.append("| --- | --- | --- |")
        for (x, y), exponent in zip(pairs, exponents(pairs), strict=True):
            lines.append(f"| {x:,} | {y:,.1f} | {'' if exponent is None else f'{exponent:.2f}'} |")
    return "\n".join(lines[1:])


def plot(points: Sequence[Point], folder: Path) -> None:
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    folder.mkdir(parents=True, exist_ok=True)
    for chart in CHARTS:
        pairs = series(points, chart)
        if not pairs:
            continue
        figure, axes = pyplot.subplots(figsize=(5, 3.2))
        axes.plot(*zip(*pairs, strict=True), marker="o")
        if chart.varied == "file":
            axes.set_xscale("log")
            axes.set_yscale("log")
        else:
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
        axes.set_title(chart.title)
        axes.set_xlabel(chart.x_label)
        axes.set_ylabel(chart.y_label)
        axes.grid(visible=True, alpha=0.3)
        figure.tight_layout()
        # Without a date, a drawing of the same points is the same file.
        figure.savefig(folder / f"{chart.varied}_{chart.y}.svg", metadata={"Date": None})
        pyplot.close(figure)


@click.command()
@click.argument("lines", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--plots", type=click.Path(file_okay=False, path_type=Path))
def main(lines: Path, plots: Path | None) -> None:
    """Tell of LINES, a file of JSON lines."""
    points = [json.loads(line) for line in lines.read_text().splitlines()]
    print(table(points))
    if plots is not None:
        plot(points, plots)


if __name__ == "__main__":
    main()
