"""How long a step takes, learnt from the steps that were run.

The model is seconds = per_row · rows + per_token · tokens + per_step, fitted by least squares
with no negative part. Steps with and without a prefill are remembered apart, so that a long
stretch of decode steps, which are all alike, does not wipe out what a prompt's token costs.
Tokens that are guessed, and computed along with a row's last one, make no step a prefill.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

WINDOW = 128
"""Steps of either kind that count."""
MIN_STEPS = 8
REFIT_EVERY = 32
_RIDGE = 1e-4
"""Splits the cost evenly where all steps are alike and nothing tells its parts apart."""
_OUTLIER = 5.0
"""Standard deviations, as the median tells them, from which a step is left out."""
_PASSES = 4
_PARTS = [list(parts) for count in (3, 2, 1) for parts in combinations(range(3), count)]

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step costs, in seconds; nothing is negative."""

    per_row: float
    per_token: float
    per_step: float

    def seconds(self, rows: float, tokens: float, steps: float = 1) -> float:
        return self.per_row * rows + self.per_token * tokens + self.per_step * steps


class StepTimeModel:
    """Learns from the recent steps."""

    def __init__(self) -> None:
        self.cost: StepCost | None = None
        """As last fitted; ``None`` until there have been a few steps."""
        self.decode_cost: StepCost | None = None
        """The same of steps without a prefill alone: a token of theirs has its logits computed, and
        may be a draft."""
        self._decode: deque[tuple[int, int, float]] = deque(maxlen=WINDOW)
        self._mixed: deque[tuple[int, int, float]] = deque(maxlen=WINDOW)
        self._until_fit = MIN_STEPS

    def observe(self, rows: int, tokens: int, seconds: float, drafts: int = 0) -> None:
        """A step of so many rows and tokens, drafts among them, has taken so long."""
        if not rows:
            return  # all that was to run has ended before
        steps = self._mixed if tokens - drafts > rows else self._decode
        steps.append((rows, tokens, seconds))
        self._until_fit -= 1
        if self._until_fit == 0:
            self._until_fit = REFIT_EVERY
            self.cost = fit([*self._decode, *self._mixed])
            self.decode_cost = fit([*self._decode]) if self._decode else None


def fit(steps: list[tuple[int, int, float]]) -> StepCost:
    """The cost that explains steps of (rows, tokens, seconds) best, outliers left out.

    There must be at least one step, with rows and tokens in it.
    """
    data = np.array(steps, np.float64)
    sizes = np.column_stack([data[:, :2], np.ones(len(data))])
    seconds = data[:, 2]
    kept = np.ones(len(data), np.bool_)
    for _ in range(_PASSES):
        cost = _least_squares(sizes[kept], seconds[kept])
        misses = np.abs(seconds - sizes @ cost)
        # 1.4826: from the median absolute deviation to the standard deviation of a normal one.
        deviation = 1.4826 * float(np.median(misses[kept]))
        near = misses <= _OUTLIER * deviation + 1e-9
        if near.sum() * 2 < len(data) or (near == kept).all():
            break
        kept = near
    per_row, per_token, per_step = cost.tolist()
    return StepCost(per_row, per_token, per_step)


def _least_squares(sizes: _Floats, seconds: _Floats) -> _Floats:
    """Coefficients ``[3]`` for ``[steps, 3]`` sizes, none of them negative.

    With three parts every choice of which are zero can be tried.
    """
    scale = sizes.mean(axis=0)
    scaled = sizes / scale
    gram = scaled.T @ scaled + _RIDGE * len(sizes) * np.eye(3)
    moment = scaled.T @ seconds
    best: _Floats = np.zeros(3)
    least = np.inf
    for parts in _PARTS:
        found = np.zeros(3)
        found[parts] = np.linalg.solve(gram[np.ix_(parts, parts)], moment[parts])
        loss = float(found @ gram @ found - 2 * found @ moment)
        if loss < least and (found >= 0).all():
            best, least = found, loss
            if len(parts) == 3:
                break  # nothing is better than the minimum without bounds
    best /= scale
    return best
