"""How far a run is, on stderr: a bar on a terminal, a line now and then elsewhere, or nothing."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

from tidemill_producer.batch.tally import Tally

BAR_PERIOD_S = 0.2
LINE_PERIOD_S = 10.0
RATE_WINDOW_S = 10.0
"""Tokens a second are those of so many last seconds."""


class Progress(Protocol):
    """Shows a `Tally` every `period_s`, and messages in between."""

    period_s: float

    def show(self, tally: Tally) -> None: ...

    def say(self, message: str) -> None:
        """A line about how things go."""

    def note(self, message: str) -> None:
        """A line that matters; shown even where progress is not."""

    def close(self) -> None: ...


def make_progress(console: Console, *, quiet: bool) -> Progress:
    """The form that suits where stderr goes."""
    if quiet:
        return Quiet(console)
    return Bar(console) if console.is_terminal else Lines(console)


class Quiet:
    """Messages only."""

    period_s = LINE_PERIOD_S

    def __init__(self, console: Console) -> None:
        self.console = console

    def show(self, tally: Tally) -> None:
        pass

    def say(self, message: str) -> None:
        pass

    def note(self, message: str) -> None:
        self.console.print(f"tidemill: {message}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


class Lines(Quiet):
    """One line every `period_s`."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._rate = TokenRate()

    def say(self, message: str) -> None:
        self.note(message)

    def show(self, tally: Tally) -> None:
        rows = f"{tally.done:,}" if tally.total is None else f"{tally.done:,}/{tally.total:,}"
        self.note(
            f"{rows} rows, {tally.failed:,} failed, {self._rate.of(tally):,.0f} tokens/s,"
            f" {duration(tally.eta_s)} left"
        )


class Bar(Lines):
    """A bar that is redrawn in place."""

    period_s = BAR_PERIOD_S

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar = RichProgress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rows · {task.fields[failed]} failed · {task.fields[rate]} tokens/s ·"),
            TextColumn("{task.fields[eta]} left"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, failed="0", rate="0", eta="?")

    def show(self, tally: Tally) -> None:
        self._bar.start()
        self._bar.update(
            self._task,
            total=tally.total,
            completed=tally.done,
            failed=f"{tally.failed:,}",
            rate=f"{self._rate.of(tally):,.0f}",
            eta=duration(tally.eta_s),
        )

    def close(self) -> None:
        self._bar.stop()


class TokenRate:
    """Completion tokens a second over the last `RATE_WINDOW_S`."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def of(self, tally: Tally) -> float:
        now = time.monotonic()
        self._seen.append((now, tally.completion_tokens))
        while len(self._seen) > 2 and self._seen[1][0] < now - RATE_WINDOW_S:
            self._seen.popleft()
        then, tokens = self._seen[0]
        if then == now:
            return tally.tokens_per_s
        return (tally.completion_tokens - tokens) / (now - then)


def duration(seconds: float | None) -> str:
    """As ``1:02:03``; ``?`` where nobody knows."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
