"""Where a row of a chat stands: before, inside or after its think block.

A block stands at the start of an output: the prompt has opened it, or the model opens it after
nothing but white space. It ends at the first ``</think>``, and none follows. The rule is that of
`tidemill_worker.chat.split`, here on tokens as they come.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThinkTokens:
    """The token ids that thinking is told by: one set for each model."""

    begin: int
    """``<think>``"""
    end: int
    """``</think>``"""
    blank: Set[int]
    """Tokens whose text is white space or nothing: they may come before ``<think>``."""
    closing: Sequence[int]
    """What ends the thoughts when their budget is used up; `end` is among them."""


class Thinking:
    """One row's think block, and the budget that it must end within.

    Once a block holds `budget` tokens, the tokens of the closing sentence follow, whatever was
    sampled. A row that ends its thoughts by itself just then, or earlier, is left alone.
    """

    def __init__(self, tokens: ThinkTokens, *, is_open: bool, budget: int | None = None) -> None:
        self.open = is_open
        """Whether the next token is part of the thoughts, or ends them."""
        self.may_open = not is_open
        """Whether a block may still begin: the output holds white space at most."""
        self.written = 0
        """Tokens between the tags, those of the closing sentence included."""
        self.truncated = False
        """Whether the budget was used up and has ended the thoughts."""
        self._tokens = tokens
        self._budget = budget
        self._closed_by = 0
        """Tokens of the closing sentence that are written."""

    def settle(self, sampled: int) -> int:
        """The token that comes next: the sampled one, unless the closing sentence is due."""
        if not self._closing(sampled):
            return sampled
        return self._tokens.closing[self._closed_by]

    def append(self, token_id: int) -> None:
        """Takes note of the settled token."""
        if self._closing(token_id):
            self.truncated = True
            self._closed_by += 1
        if self.open:
            if token_id == self._tokens.end:
                self.open = False
            else:
                self.written += 1
        elif self.may_open:
            self.open = token_id == self._tokens.begin
            self.may_open = token_id in self._tokens.blank

    def _closing(self, next_token: int) -> bool:
        if self._closed_by:
            return self._closed_by < len(self._tokens.closing)
        return (
            self.open
            and self._budget is not None
            and self.written >= self._budget
            and next_token != self._tokens.end
        )
