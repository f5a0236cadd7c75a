"""How many guessed tokens a step computes beside each row's last known one: as many as pay.

A guess that is right saves its row's share of a decode step, and every guess costs what a token
more does. Both are learnt from the steps that were run; so is, for each row, how often it is
guessed right.
"""

from __future__ import annotations

from tidemill_worker.engine.drafter import Drafter
from tidemill_worker.engine.row import Row
from tidemill_worker.engine.steptime import StepTimeModel


class Speculator:
    """Guesses for rows that decode."""

    def __init__(self, step_time: StepTimeModel, max_drafts: int, max_logit_rows: int) -> None:
        self.max_drafts = max_drafts
        """Of one row in one step; 0 for no guesses."""
        self.max_logit_rows = max_logit_rows
        """Places that one call of the model may tell of: those of drafts and of all other rows."""
        self._step_time = step_time

    def price(self, rows: int) -> float:
        """What a token more costs in a step of so many decode rows, in shares of what one that a
        row need not decode later saves; infinite while no step time is known.

        Before there have been drafts nothing tells what one costs, and it is taken to be a third.
        """
        cost = self._step_time.decode_cost
        saved = 0.0 if cost is None else cost.seconds(rows, rows) / rows
        return cost.per_token / saved if cost is not None and saved else float("inf")

    def draft(self, row: Row, price: float, room: int) -> list[int]:
        """The guesses that are worth their price, at most `room`."""
        if row.drafter is None:
            row.drafter = Drafter(row.token_ids)
        drafts = row.drafter.guess(self.max_drafts)
        count, chance = 0, row.drafter.hit_rate
        while count < min(len(drafts), room) and chance > price:
            count += 1
            chance *= row.drafter.hit_rate
        return drafts[:count]
