"""Choosing tokens by kernels of the contract's own, which it need not have.

The hooks of a contract may have a method ``sampling_kernels(runtime)``. It gives `SamplingKernels`,
or ``None`` for a run that has none, whose tokens the worker chooses in torch. Either way a row's
token depends on its own logits and its own `Draw` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

NO_TOKEN = -1
"""In place of a token: the options leave none to choose from."""
NOT_FINITE = -2
"""In place of a token: the logits hold NaN or infinity."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What decides a row's next token, in the order in which it counts."""

    uniform: float
    """The random number in [0, 1) behind the draw, at most 52 bits."""
    repetition_penalty: float = 1.0
    """Over `token_ids`, as CTRL (arXiv 1909.05858) defines it."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Over the output, as the OpenAI API defines them."""
    token_ids: Sequence[int] = ()
    """Prompt, then output, where a penalty counts them."""
    prompt_len: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Sequence[int] = ()
    """Empty where every token is allowed."""
    mask: npt.NDArray[np.int32] | None = None
    """A bit for each token, the lowest first: 1 where it may come. ``[words of 32]``"""
    barred: Sequence[int] = ()
    temperature: float = 1.0
    """0 for the likeliest token, the first of equal ones."""
    min_p: float = 0.0
    top_k: int = 0
    """0 for the whole vocabulary."""
    top_p: float = 1.0
    """Of what `min_p` and `top_k` leave; tokens that tie with the last one kept are kept too."""


@dataclass(frozen=True, slots=True)
class Telling:
    """Log probabilities that are asked of one place."""

    line: int
    """The place's logits among those given."""
    token_id: int
    top: int
    """How many of the likeliest tokens to tell of."""
    listed: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Told:
    """Natural logarithms of the model's own probabilities in one place."""

    logprob: float
    """Of `Telling.token_id`."""
    top: dict[int, float]
    """By token, the likeliest first."""
    listed: dict[int, float]


class SamplingKernels(Protocol):
    """Both take float32 logits ``[rows, vocabulary]``, which may be a slice of wider ones, and
    leave them as they are. Both raise `BackendError` where a token lies outside the vocabulary."""

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        """The next token of each row, `NO_TOKEN` or `NOT_FINITE`."""

    def tell(self, logits: Tensor, tellings: Sequence[Telling]) -> list[Told | None]:
        """``None`` where a place's logits are not finite."""
