"""Logits in blocks of neighbouring tokens, so that the likeliest ones are found without a sort.

The n likeliest tokens of a row lie in those n blocks whose largest logits are the largest: each
of these has a token at least as likely as any outside of them. One pass over the vocabulary finds
the largest of each block; what follows reads a few blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
"""Tokens of a block: short ones narrow the search down, and cost more to look through."""


@dataclass(frozen=True, slots=True)
class LogitBlocks:
    """The logits of a step's rows; `lines` are the places of some of them, rising."""

    logits: Tensor
    """float32 ``[rows, blocks, BLOCK]``; −inf past the end of the vocabulary."""
    largest: Tensor
    """Of each block: ``[rows, blocks]``."""

    @classmethod
    def of(cls, logits: Tensor) -> LogitBlocks:
        """`logits` is ``[rows, vocabulary]``; it is copied only where it ends within a block."""
        missing = -logits.shape[1] % BLOCK
        if missing:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        blocks = logits.view(len(logits), -1, BLOCK)
        return cls(blocks, blocks.amax(dim=2))

    @property
    def vocabulary(self) -> int:
        """Tokens of a row, those included that only fill the last block."""
        return self.logits.shape[1] * BLOCK

    def argmax(self) -> tuple[Tensor, Tensor]:
        """Each row's largest logit and the first token that has it: ``[rows]`` and ``[rows]``."""
        largest, block = self.largest.max(dim=1)
        rows = torch.arange(len(block), device=block.device)
        return largest, block * BLOCK + self.logits[rows, block].argmax(dim=1)

    def whole(self, lines: Sequence[int]) -> Tensor:
        """All logits of these rows: ``[lines, blocks, BLOCK]``."""
        return self.logits if len(lines) == len(self.logits) else self.logits[list(lines)]

    def likeliest(self, lines: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        """Logits and ids of these rows' likeliest tokens, the likeliest first:
        ``[lines, count]`` each."""
        if count >= self.largest.shape[1]:
            values, ids = self.whole(lines).flatten(1).topk(count, dim=1)
            return values, ids
        rows = torch.tensor(lines, device=self.largest.device)
        blocks = self.largest[rows].topk(count, dim=1, sorted=False).indices
        values, places = self.logits[rows[:, None], blocks].flatten(1).topk(count, dim=1)
        return values, blocks.gather(1, places // BLOCK) * BLOCK + places % BLOCK
