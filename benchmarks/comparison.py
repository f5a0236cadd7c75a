"""What `compare.py` has written, read again: medians, ratios of neighbours, fractions of the floor.

A **turn** is one workload through every engine, one after another, ours again after every two of
them. So each peer's run has one of ours right before or after it, and the median of these pairs'
ratios says more than the ratio of two medians where the machine's pace changes from minute to
minute.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import workloads
from ceilings import Ceilings
from contenders import OURS
from floor import Floor

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    median: float
    least: float
    most: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(statistics.median(values), min(values), max(values), len(values))

    @property
    def spread(self) -> float:
        return (self.most - self.least) / self.median


class Comparison:
    """The events of a file of JSON lines."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.head = events[0]
        self.starts = [event for event in events if event["event"] == "start"]
        self.failures = [event for event in events if event["event"] == "failure"]
        runs = {}
        for event in events:
            # A turn that was cut is run again as a whole: the later run counts.
            if event["event"] == "run":
                runs[event["round"], event["workload"], event["position"]] = event
        self.runs = list(runs.values())

    @classmethod
    def read(cls, path: Path) -> Comparison:
        """Raises `ValueError` where the file is not one of ours."""
        lines = path.read_text().splitlines()
        events = []
        for number, line in enumerate(lines, 1):
            try:
                events.append(json.loads(line))
            except ValueError:
                if number < len(lines):
                    raise ValueError(f"{path}, line {number}: not JSON") from None
                break  # cut while it was written
        if not events or events[0].get("event") != "comparison":
            raise ValueError(f"{path} does not begin as a comparison does")
        return cls(events)

    @property
    def engines(self) -> list[str]:
        names: list[str] = list(self.head["engines"])
        return names

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(run["workload"] for run in self.runs))

    def times(self, engine: str, workload: str) -> Figure | None:
        """Seconds, or ms of a step."""
        return _figure([run[workloads.figure(workload)] for run in self._of(engine, workload)])

    def ratios(self, engine: str, workload: str, against: str = OURS) -> Figure | None:
        """The engine's time over that of the other, each with its nearest in the same turn."""
        found = []
        others = self._of(against, workload)
        for run in self._of(engine, workload):
            near = [other for other in others if other["round"] == run["round"]]
            if near:
                nearest = min(near, key=lambda other: abs(other["position"] - run["position"]))
                key = workloads.figure(workload)
                found.append(run[key] / nearest[key])
        return _figure(found)

    def fractions(self, engine: str, workload: str) -> Figure | None:
        """The floor over the time, at what the machine gave right before and right after."""
        floor = Floor(**self.head["floor"])
        found = []
        for run in self._of(engine, workload):
            limits = Ceilings(**run["before"]).mean(Ceilings(**run["after"]))
            least = floor.seconds(
                workload, limits, self.head["max_rows"], self._weight_bytes(engine)
            )
            key = workloads.figure(workload)
            found.append(least * (1000 if key == "step_ms" else 1) / run[key])
        return _figure(found)

    def _of(self, engine: str, workload: str) -> list[Event]:
        return [r for r in self.runs if r["engine"] == engine and r["workload"] == workload]

    def _weight_bytes(self, engine: str) -> int | None:
        found = [start["weight_bytes"] for start in self.starts if start["engine"] == engine]
        return found[-1] if found else None

    def markdown(self, against: str = OURS) -> str:
        """Tables for people."""
        return "\n\n".join(
            [
                self._ceilings(),
                self._table("median (spread, runs)", self.times, _time),
                self._table(f"time over that of {against}, median of neighbours (least–most)",
                            lambda engine, name: None if engine == against
                            else self.ratios(engine, name, against), _ratio),
                self._table("of the moment's floor, median (least–most)", self.fractions, _share),
                self._costs(),
                *self._failed(),
            ]
        )  # fmt: skip

    def _ceilings(self) -> str:
        probes = [run[when] for run in self.runs for when in ("before", "after")]
        if not probes:
            return "No run yet."
        read = Figure.of([probe["read_gb_s"] for probe in probes])
        matrix = Figure.of([probe["matrix_tflop_s"] for probe in probes])
        return (
            f"{self.head['model']}, {self.head['threads']} threads, begun {self.head['started']}:"
            f" {len(self.runs)} runs. Probes of the machine, median (least–most):"
            f" {read.median:.1f} GB/s ({read.least:.1f}–{read.most:.1f}),"
            f" {matrix.median:.2f} TFLOP/s ({matrix.least:.2f}–{matrix.most:.2f})."
        )

    def _table(self, title: str, figure: Any, cell: Any) -> str:
        lines = [[title, *self.engines], ["---"] * (1 + len(self.engines))]
        for name in self.workloads:
            unit = "ms a step" if workloads.is_decode(name) else "s"
            found = [figure(engine, name) for engine in self.engines]
            lines.append([f"{name}, {unit}", *("–" if f is None else cell(f) for f in found)])
        return _lines(lines)

    def _costs(self) -> str:
        lines = [["", *self.engines], ["---"] * (1 + len(self.engines))]
        starts: list[str] = []
        peaks: list[str] = []
        for engine in self.engines:
            cold = [start["cold_start_s"] for start in self.starts if start["engine"] == engine]
            rss = [run["peak_rss_gib"] for run in self.runs if run["engine"] == engine]
            starts.append(f"{statistics.median(cold):.1f} ({len(cold)})" if cold else "–")
            peaks.append(f"{max(rss):.1f}" if rss else "–")
        lines += [["cold start to first token, s (starts)", *starts], ["peak RSS, GiB", *peaks]]
        return _lines(lines)

    def _failed(self) -> list[str]:
        return [
            f"{f['engine']} failed at {f['workload']}, round {f['round']}:"
            f" {f['message'].splitlines()[0]}"
            for f in self.failures
        ]


def _figure(values: Sequence[float]) -> Figure | None:
    return Figure.of(values) if values else None


def _time(figure: Figure) -> str:
    return f"{figure.median:.2f} ({figure.spread:.0%}, {figure.runs})"


def _ratio(figure: Figure) -> str:
    return f"{figure.median:.2f} × ({figure.least:.2f}–{figure.most:.2f})"


def _share(figure: Figure) -> str:
    return f"{figure.median:.0%} ({figure.least:.0%}–{figure.most:.0%})"


def _lines(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
