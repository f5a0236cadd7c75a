"""What a run adds up: rows, errors, tokens, and how many answers are right."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tidemill_contracts.wire import GenerationResult, JobError
from tidemill_contracts.wire.status import WorkerStatus

EXPECTED = "expected"
TASK = "task"


@dataclass(slots=True)
class Score:
    """Right answers of so many."""

    right: int = 0
    total: int = 0


@dataclass(slots=True)
class Tally:
    """The figures of one run, as it goes."""

    total: int | None = None
    """Rows in the file, once counted."""
    done: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Rows that failed, by error code."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    scores: dict[str, Score] = field(default_factory=dict)
    """Of rows with an expected answer, by task ("" for none)."""
    occupancy: float | None = None
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def failed(self) -> int:
        return self.errors.total()

    @property
    def wall_s(self) -> float:
        return (self.ended or time.monotonic()) - self.started

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens a second over the whole run."""
        return self.completion_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the mean rate so far."""
        if self.total is None or not self.done:
            return None
        return (self.total - self.done) * self.wall_s / self.done

    def add_error(self, error: JobError) -> None:
        self.done += 1
        self.errors[error.code] += 1

    def add_result(self, result: GenerationResult) -> None:
        self.done += 1
        self.prompt_tokens += result.usage.prompt_tokens
        self.completion_tokens += result.usage.completion_tokens

    def add_score(self, expected: str, task: str, text: str | None) -> None:
        """Count an answer; a row that failed counts as a wrong one (`text` is None)."""
        score = self.scores.setdefault(task, Score())
        score.total += 1
        score.right += is_right(text, expected)


def is_right(text: str | None, expected: str) -> bool:
    """Equal apart from white space around it, or equal as JSON where a JSON object is expected."""
    if text is None:
        return False
    if text.strip() == expected.strip():
        return True
    try:
        wanted = msgspec.json.decode(expected.encode())
        return isinstance(wanted, dict) and bool(msgspec.json.decode(text.encode()) == wanted)
    except msgspec.DecodeError:
        return False


def batch_occupancy(before: Sequence[WorkerStatus], after: Sequence[WorkerStatus]) -> float | None:
    """Rows in use of rows available over the steps between, from 0 to 1; None without a step."""
    earlier = {(status.id, status.started_at): status for status in before}
    rows = room = 0
    for status in after:
        base = earlier.get((status.id, status.started_at))
        rows += status.row_steps - (base.row_steps if base else 0)
        room += (status.steps - (base.steps if base else 0)) * status.max_rows
    return rows / room if room > 0 else None
