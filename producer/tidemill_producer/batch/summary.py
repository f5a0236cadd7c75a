"""What a run came to, on stderr when it ends: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tidemill_producer.batch.progress import duration
from tidemill_producer.batch.tally import Score, Tally


def print_summary(console: Console, tally: Tally) -> None:
    """Every figure of the tally."""
    figures = [*_figures(tally), *_accuracies(tally)]
    if not console.is_terminal:
        for name, value in figures:
            console.print(f"{name}: {value}", markup=False, highlight=False, soft_wrap=True)
        return
    table = Table(show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for figure in figures:
        table.add_row(*(escape(part) for part in figure))
    console.print(table)


def _figures(tally: Tally) -> list[tuple[str, str]]:
    figures = [
        ("rows", f"{tally.done:,}"),
        ("ok", f"{tally.done - tally.failed:,}"),
        ("failed", f"{tally.failed:,}"),
        *((f"  {code}", f"{count:,}") for code, count in tally.errors.most_common()),
        ("prompt tokens", f"{tally.prompt_tokens:,}"),
        ("completion tokens", f"{tally.completion_tokens:,}"),
        ("tokens/s", f"{tally.tokens_per_s:,.1f}"),
        ("wall time", f"{duration(tally.wall_s)} ({tally.wall_s:.1f} s)"),
    ]
    if tally.occupancy is not None:
        figures.append(("batch occupancy", f"{tally.occupancy:.0%}"))
    return figures


def _accuracies(tally: Tally) -> list[tuple[str, str]]:
    """Of all, then by task."""
    if not tally.scores:
        return []
    every = Score(
        right=sum(score.right for score in tally.scores.values()),
        total=sum(score.total for score in tally.scores.values()),
    )
    tasks = sorted(tally.scores.items()) if len(tally.scores) > 1 else []
    return [
        ("accuracy", _share(every)),
        *((f"  {task or '(no task)'}", _share(score)) for task, score in tasks),
    ]


def _share(score: Score) -> str:
    return f"{score.right}/{score.total} ({score.right / score.total:.0%})"
