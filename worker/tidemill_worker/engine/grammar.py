"""Holds rows to the form that their jobs ask for: which tokens may come next, and when it ends.

A row's grammar is its own: it moves on once for each token that is appended, so neither
neighbours nor a preemption touch it. The masks of a step are computed for all rows at once and
applied to the logits in one pass. Where a row may think first, the grammar waits for its answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from torch import Tensor

from tidemill_contracts.wire import ErrorCode, JobError

_END_THINK = b"</think>"
_MAX_NEWLINES = 2
"""Between the thoughts and the answer: Qwen3 writes a blank line there."""

Bits = npt.NDArray[np.int32]
"""A bit for each token, the lowest first: 1 where it may come next. ``[rows, words of 32]``."""


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """What grammars need to know of a model's tokens."""

    size: int
    """Of the model, whose logits may be wider than the tokenizer."""
    token_bytes: Sequence[bytes]
    tokenizer: LLTokenizer
    """Has one token more than the model, `size`: it may come where a grammar is complete."""
    executor: LLExecutor
    think: int | None
    """The token that opens a think block; ``None`` where there is none."""
    newlines: dict[int, int]
    """Tokens of up to `_MAX_NEWLINES` newlines and nothing else, and how many each has."""
    eos: frozenset[int]


class Stage(Enum):
    """Where a row stands."""

    START = "start"
    """It may open a think block, or begin its answer."""
    THOUGHTS = "thoughts"
    GAP = "gap"
    """After the thoughts: newlines, or the answer."""
    ANSWER = "answer"


class RowGrammar:
    """The form of one row's answer, and how much of it is written."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, stage: Stage) -> None:
        self.vocabulary = vocabulary
        self.matcher = matcher
        self.stage = stage
        self.finished = False
        """The form is complete, and nothing can be added to it."""
        self.error: JobError | None = None
        self._thoughts = b""
        """The end of them, where a tag may begin."""
        self._newlines = 0

    @property
    def over(self) -> bool:
        """Whether no token can come any more."""
        return self.finished or self.error is not None

    @property
    def masks(self) -> bool:
        """Whether the next token is held to the form: thoughts are free."""
        return self.stage is not Stage.THOUGHTS

    @property
    def barred(self) -> Collection[int]:
        """Tokens that must not come next, where no mask says so: no end without an answer."""
        return self.vocabulary.eos if self.stage is Stage.THOUGHTS else ()

    def advance(self, token_id: int) -> None:
        """Takes note of a token that was appended to the row."""
        if self.stage is Stage.THOUGHTS:
            self._think(self._bytes(token_id))
        elif self.stage is Stage.START and token_id == self.vocabulary.think:
            self.stage = Stage.THOUGHTS
        elif self.stage is Stage.GAP and (count := self._newlines_of(token_id)):
            self._newlines += count
        else:
            self._answer([token_id])

    def extend(self, bits: Bits, end_token_ids: Collection[int]) -> None:
        """Completes the mask ``[words]`` that the matcher has written for the next token.

        Whatever ends the row may come where the form is complete.
        """
        if self.matcher.is_error():
            self._fail()
            bits[:] = 0
            return
        flags = bits.view(np.uint8)
        complete = _take(flags, self.vocabulary.size)
        self.finished = complete and self.stage is Stage.ANSWER and not bits.any()
        for token_id in end_token_ids if complete else ():
            _set(flags, token_id)
        if self.stage is Stage.START and self.vocabulary.think is not None:
            _set(flags, self.vocabulary.think)
        elif self.stage is Stage.GAP:
            for token_id in self.vocabulary.newlines:
                if self._newlines_of(token_id):
                    _set(flags, token_id)

    def _bytes(self, token_id: int) -> bytes:
        table = self.vocabulary.token_bytes
        return table[token_id] if token_id < len(table) else b""

    def _think(self, raw: bytes) -> None:
        before, tag, after = (self._thoughts + raw).partition(_END_THINK)
        if not tag:
            self._thoughts = before[1 - len(_END_THINK) :]
            return
        self.stage = Stage.GAP
        # The tag is a token of its own, unless the model has spelt it out.
        answer = after.lstrip(b"\n")
        self._newlines = len(after) - len(answer)
        if answer:
            self._answer(self.vocabulary.tokenizer.tokenize_bytes(answer))

    def _newlines_of(self, token_id: int) -> int:
        """How many newlines the token adds to the gap; 0 where it is none, or one too many."""
        count = self.vocabulary.newlines.get(token_id, 0)
        return count if self._newlines + count <= _MAX_NEWLINES else 0

    def _answer(self, token_ids: list[int]) -> None:
        self.stage = Stage.ANSWER
        if not self.matcher.consume_tokens(token_ids):
            self._fail()
        else:
            self.finished = self.matcher.is_stopped()

    def _fail(self) -> None:
        self.error = refusal("$.sampling.structured", self.matcher.get_error())


def masks(rows: int, held: Mapping[int, tuple[RowGrammar, Collection[int]]]) -> Bits:
    """What the grammars allow next in each of so many rows.

    `held` has the grammar and the end tokens of each row that is held to one; others may go on
    with any token.
    """
    vocabulary = next(iter(held.values()))[0].vocabulary
    bits = allocate_token_bitmask(rows, vocabulary.size + 1)  # all allowed
    matchers = [(grammar.matcher, line) for line, (grammar, _) in held.items()]
    fill_next_token_bitmask_par(vocabulary.executor, matchers, bits)
    for line, (grammar, end_token_ids) in held.items():
        grammar.extend(bits[line], end_token_ids)
    return bits


def bar(logits: Tensor, bits: Bits) -> None:
    """Sets logits ``[rows, vocabulary]`` to −inf where their bit is 0."""
    barred = np.unpackbits(
        ~bits.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little"
    ).view(np.bool_)
    logits.masked_fill_(torch.from_numpy(barred).to(logits.device), -torch.inf)


def refusal(path: str, reason: str) -> JobError:
    """The error of a form that cannot be held to, for the reason that the library gives."""
    reason = " ".join(reason.replace("<non-verbose/>", "").split())
    if len(reason) > 300:
        reason = reason[:300] + "…"
    return JobError.of(ErrorCode.INVALID_GRAMMAR, f"{reason} - at `{path}`")


def _take(flags: npt.NDArray[np.uint8], token_id: int) -> bool:
    """Clears the token's bit; returns what it was."""
    bit = 1 << (token_id & 7)
    was = bool(flags[token_id >> 3] & bit)
    flags[token_id >> 3] &= 0xFF ^ bit
    return was


def _set(flags: npt.NDArray[np.uint8], token_id: int) -> None:
    flags[token_id >> 3] |= 1 << (token_id & 7)
