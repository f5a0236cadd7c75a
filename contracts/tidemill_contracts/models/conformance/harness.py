"""A worker in miniature: plans steps for a loaded model through the contract's public surface.

Plays the part of the engine's runner and page allocator. Rows own pages whose ids are shuffled, so
that nothing works by accident of order; the same calls always give the same pages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tidemill_contracts.models.contract import Phase, StageInputs
from tidemill_contracts.models.startup import ServedModel

Edit = Callable[[StageInputs], StageInputs]
"""Changes the logical inputs of a call just before it is made."""

Prompt = Sequence[int]


@dataclass(slots=True)
class Row:
    """One sequence and what the cache holds of it."""

    pages: list[int] = field(default_factory=list)
    length: int = 0
    """Tokens in the cache."""


class Harness:
    """Rows of one loaded model, from a cache that nobody else uses."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.vocab_size = model.config.vocab_size
        self.width = model.contract.hooks.logits_width(model.config)
        self.free = list(range(model.runtime.total_kv_pages))
        random.Random(7).shuffle(self.free)

    def prefill(self, *chunks: tuple[Row, Prompt], edit: Edit | None = None) -> Tensor:
        """One call over all chunks; float32 [chunks, real vocabulary] on the CPU."""
        return self._call("prefill", chunks, edit)

    def score(
        self, *chunks: tuple[Row, Prompt], logit_rows: Sequence[int], edit: Edit | None = None
    ) -> Tensor:
        """The same with the logits of the packed tokens `logit_rows`, [those, real vocabulary]."""
        return self._call("score", chunks, edit, logit_rows)

    def decode(self, *rows: tuple[Row, int], edit: Edit | None = None) -> Tensor:
        """One token of each row; float32 [rows, real vocabulary] on the CPU."""
        return self._call("decode", [(row, [token]) for row, token in rows], edit)

    def release(self, row: Row) -> None:
        """Gives the row's pages to the next ones."""
        self.free += reversed(row.pages)
        row.pages, row.length = [], 0

    def run(
        self,
        prompts: Sequence[Prompt],
        steps: int,
        *,
        chunk: int | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        """All prompts as one batch: prefilled, at most `chunk` tokens of each at a time, up to
        their last `steps` tokens, which are decoded.

        The logits after prefill and after each step, float32 [prompts, steps + 1, vocabulary].
        """
        rows = [Row() for _ in prompts]
        heads = [len(prompt) - steps for prompt in prompts]
        size = chunk or max(heads)
        logits = torch.empty(len(prompts), steps + 1, self.vocab_size)
        for start in range(0, max(heads), size):
            parts = [
                (index, prompts[index][start : min(start + size, head)])
                for index, head in enumerate(heads)
                if start < head
            ]
            found = self.prefill(*((rows[index], tokens) for index, tokens in parts), edit=edit)
            logits[[index for index, _ in parts], 0] = found
        for step in range(steps):
            tokens = [prompt[step - steps] for prompt in prompts]
            logits[:, step + 1] = self.decode(*zip(rows, tokens, strict=True), edit=edit)
        for row in rows:
            self.release(row)
        return logits

    def _call(
        self,
        phase: Phase,
        work: Sequence[tuple[Row, Prompt]],
        edit: Edit | None,
        logit_rows: Sequence[int] | None = None,
    ) -> Tensor:
        runtime = self.model.runtime
        size = runtime.page_size
        slots: list[int] = []
        for row, tokens in work:
            places = range(row.length, row.length + len(tokens))
            row.length += len(tokens)
            while len(row.pages) * size < row.length:
                row.pages.append(self.free.pop())
            slots += [row.pages[place // size] * size + place % size for place in places]
        # Wider than the rows need, where it may be: what lies past a row's pages is never read.
        most = -(-runtime.max_seq_len // size)
        width = min(max(len(row.pages) for row, _ in work) + 2, most)
        lengths = [len(tokens) for _, tokens in work]
        offsets = [sum(lengths[:index]) for index in range(len(lengths))]
        packed = phase != "decode"
        inputs = StageInputs(
            input_ids=self.int32([token for _, tokens in work for token in tokens]),
            seq_lens=self.int32([row.length for row, _ in work]),
            block_table=self.int32([(row.pages + [-1] * width)[:width] for row, _ in work]),
            slot_mapping=self.int32(slots),
            logits=self.logits(len(work if logit_rows is None else logit_rows)),
            chunk_lens=self.int32(lengths) if packed else None,
            chunk_offsets=self.int32(offsets) if packed else None,
            logit_rows=None if logit_rows is None else self.int32(logit_rows),
        )
        if edit is not None:
            inputs = edit(inputs)
        self.model.stages[phase](inputs)
        return inputs.logits[:, : self.vocab_size].cpu()

    def logits(self, rows: int) -> Tensor:
        """A buffer in which what is never written shows."""
        device = self.model.runtime.device
        return torch.full((rows, self.width), float("nan"), device=device)

    def int32(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.model.runtime.device)
