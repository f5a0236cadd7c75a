"""One call of a stage as the kernels see it: which rows, where their tokens lie, what is known
of it on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HostStep:
    """The integers of a step on the host: what decides shapes and which calls are made."""

    ends: Sequence[int]
    """Of each row: its length after this step."""
    lengths: Sequence[int]
    """Of each row: its tokens in this step."""
    offsets: Sequence[int]
    """Of each row: its first packed token."""
    slots: Sequence[int]
    """Of each packed token; negative where K and V must not be written."""

    @property
    def order(self) -> list[int]:
        """The rows in the order in which their tokens are packed."""
        return sorted(range(len(self.offsets)), key=self.offsets.__getitem__)


class Step:
    """The integers of a step on the device; `host` reads them back, once, when it is asked for.

    Reading them waits for the device, so what can be done without is done without.
    """

    def __init__(
        self,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        chunk_lens: Tensor | None = None,
        chunk_offsets: Tensor | None = None,
        logit_rows: Tensor | None = None,
        host: HostStep | None = None,
    ) -> None:
        self.seq_lens = seq_lens
        self.block_table = block_table
        self.slot_mapping = slot_mapping
        self._chunks = None
        if chunk_lens is not None and chunk_offsets is not None:
            self._chunks = (chunk_lens, chunk_offsets)
        self.logit_rows = logit_rows
        """int32: the packed tokens whose logits are asked for; ``None`` for every one, in order."""
        if host is not None:
            self.__dict__["host"] = host

    @property
    def decodes(self) -> bool:
        """One token of each row, the rows in order."""
        return self._chunks is None

    @cached_property
    def host(self) -> HostStep:
        rows = len(self.seq_lens)
        chunks = self._chunks or ()
        # One copy for all of them: each waits for the device.
        values = torch.cat((self.seq_lens, *chunks, self.slot_mapping)).tolist()
        ends = values[:rows]
        if self._chunks is None:
            return HostStep(ends, [1] * rows, range(rows), values[rows:])
        return HostStep(
            ends, values[rows : 2 * rows], values[2 * rows : 3 * rows], values[3 * rows :]
        )

    def positions(self) -> Tensor:
        """int64 [T]: each packed token's place in its row."""
        if self.decodes:
            return self.seq_lens.long() - 1
        host = self.host
        spans = [torch.arange(host.ends[b] - host.lengths[b], host.ends[b]) for b in host.order]
        return torch.cat(spans).to(self.seq_lens.device)
