"""How much a step may compute: tokens, and time where decode rows must not be kept waiting."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill_worker.engine.steptime import StepCost, StepTimeModel

MIN_PREFILL_TOKENS = 16
"""Less is not worth a prefill call, unless it is all there is."""
PREFILL_EVERY = 8
"""Steps after which prompts get `MIN_PREFILL_TOKENS` whatever that does to the target."""


@dataclass(slots=True)
class Budget:
    """What a step may compute yet."""

    tokens: int
    cost: StepCost | None = None
    """What time is reckoned by; ``None`` where time is no matter."""
    spare_s: float = 0.0

    @property
    def room(self) -> int:
        """Tokens that one row more may have."""
        if self.cost is None:
            return self.tokens
        spare_s = self.spare_s - self.cost.per_row
        if spare_s < 0:
            return 0
        if spare_s < self.tokens * self.cost.per_token:
            return int(spare_s / self.cost.per_token)
        return self.tokens

    def take(self, length: int, rows: int = 1) -> None:
        """Spends so many tokens; of 0 rows where it is more of one that is in the step anyway."""
        self.tokens -= length
        if self.cost is not None:
            self.spare_s -= self.cost.seconds(rows, length, steps=0)


class PrefillShare:
    """Leaves prompts the time that a step has to spare when rows decode in it.

    `target_tpot_s` is how long such a step may take, in seconds; ``None`` for any time.
    """

    def __init__(self, step_time: StepTimeModel, target_tpot_s: float | None) -> None:
        self._step_time = step_time
        self._target_s = target_tpot_s
        self._steps_without = 0

    def limit(self, budget: Budget, decode_rows: int) -> None:
        """Limits what is left of a budget to what prompts may have beside so many decode rows.

        Where that is next to nothing they wait, but not for ever.
        """
        cost = self._step_time.cost
        if self._target_s is None or cost is None or not decode_rows:
            self._steps_without = 0
            return
        least = min(MIN_PREFILL_TOKENS, budget.tokens)
        budget.cost = cost
        budget.spare_s = self._target_s - cost.seconds(decode_rows, decode_rows)
        if budget.room >= least:
            self._steps_without = 0
            return
        budget.cost = None
        self._steps_without += 1
        if self._steps_without < PREFILL_EVERY:
            budget.tokens = 0
        else:
            budget.tokens = least
            self._steps_without = 0
