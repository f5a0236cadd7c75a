"""One generation in the engine: what is known, how much of it is computed, how it ends.

One rule replaces the cases of prefill and decode: the computed tokens catch up with the known
ones. A row whose last known token has just been computed gets one more token sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tidemill_contracts.wire import FinishReason, JobError
from tidemill_worker.engine.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The effective sampling of one row, every default resolved."""

    temperature: float
    top_p: float
    top_k: int
    """0 for the whole vocabulary."""
    seed: int
    """Given, or drawn once when the row was made."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def unfiltered(self) -> bool:
        return self.top_k == 0 and self.top_p >= 1


@dataclass(slots=True, eq=False)
class Row:
    """One generation. Owned by the engine's thread once it is submitted."""

    id: str
    token_ids: list[int]
    """Prompt and generated tokens."""
    max_len: int
    """Length at which the row ends, in tokens."""
    sampling: RowSampling
    eos_token_ids: frozenset[int]
    """Empty where the job ignores them."""
    detokenizer: Detokenizer | None = None
    priority: int = 0
    deadline: float | None = None
    """Seconds since the Unix epoch."""
    enqueued_at: float = 0.0
    """Seconds since the Unix epoch, as are the other times."""

    prompt_len: int = field(init=False)
    arrival: int = field(default=0, init=False)
    """Order in which the scheduler met the rows."""
    computed: int = field(default=0, init=False)
    """Tokens whose K and V are in the cache."""
    pages: list[int] = field(default_factory=list, init=False)
    table_index: int = field(default=-1, init=False)
    """Its line in the block tables while it runs; −1 while it waits."""
    preemptions: int = field(default=0, init=False)
    restarts: int = field(default=0, init=False)
    """Times that the backend lost its K and V."""
    scheduled_at: float = field(default=0.0, init=False)
    first_token_at: float = field(default=0.0, init=False)
    finished_at: float = field(default=0.0, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: JobError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.token_ids)

    @property
    def known(self) -> int:
        return len(self.token_ids)

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed yet; 1 is a decode step."""
        return len(self.token_ids) - self.computed

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def rank(self) -> tuple[int, int]:
        """Lower runs sooner and is preempted later."""
        return (-self.priority, self.arrival)

    def append(self, token_id: int, now: float) -> None:
        """Adds a sampled token and notes whether it ends the row."""
        if self.known == self.prompt_len:
            self.first_token_at = now
        self.token_ids.append(token_id)
        if self.detokenizer is not None:
            self.detokenizer.append(token_id)
        if token_id in self.eos_token_ids:
            self.finish_reason = "stop"
        elif self.known >= self.max_len:
            self.finish_reason = "length"
