"""What a job does to the logits before a token is drawn: penalties, biases, barred tokens.

For all rows of a step at once: each kind is one gather and one scatter over the few entries that
it changes, never a pass over the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tidemill_worker.engine.grammar import Bits, bar, masks
from tidemill_worker.engine.row import Row


def adjust(logits: Tensor, rows: Sequence[Row]) -> None:
    """Changes float32 logits ``[rows, vocabulary]`` in place, as each row's job asks.

    Penalties as the OpenAI API defines presence and frequency (over the output) and as CTRL
    (arXiv 1909.05858) defines repetition (over prompt and output).
    """
    _repeat(logits, rows)
    _add(logits, [list(_penalties(row)) for row in rows])
    _add(logits, [list(row.sampling.logit_bias.items()) for row in rows])
    _allow(logits, rows)
    bits = grammar_masks(rows)
    if bits is not None:
        bar(logits, bits)
    _bar(logits, [list(barred(row)) for row in rows])


def grammar_masks(rows: Sequence[Row]) -> Bits | None:
    """What the rows' grammars allow next, ``None`` where no row is held to one just now."""
    held = {
        line: (row.grammar, row.end_token_ids)
        for line, row in enumerate(rows)
        if row.grammar is not None and row.held
    }
    return masks(len(rows), held) if held else None


def barred(row: Row) -> Iterator[int]:
    """Tokens that must not come next."""
    if row.grammar is not None:
        yield from row.grammar.barred
    if row.generated < row.min_tokens:
        yield from row.end_token_ids
    for word in row.sampling.bad_words:
        *before, last = word
        if len(before) <= row.generated and row.token_ids[row.known - len(before) :] == before:
            yield last


def _repeat(logits: Tensor, rows: Sequence[Row]) -> None:
    lines: list[int] = []
    ids: list[int] = []
    strengths: list[float] = []
    for line, row in enumerate(rows):
        if row.sampling.repetition_penalty != 1:
            seen = set(row.token_ids)
            lines += [line] * len(seen)
            ids += seen
            strengths += [row.sampling.repetition_penalty] * len(seen)
    if not ids:
        return
    at = _places(logits, lines, ids)
    strength = torch.tensor(strengths, device=logits.device)
    values = logits[at]
    # A small penalty may make a logit infinite, and then no other has a distance from it.
    largest = torch.finfo(logits.dtype).max
    logits[at] = torch.where(values > 0, values / strength, values * strength).clamp_(max=largest)


def _penalties(row: Row) -> Iterator[tuple[int, float]]:
    presence, frequency = row.sampling.presence_penalty, row.sampling.frequency_penalty
    if presence or frequency:
        for token_id, count in Counter(row.output_token_ids).items():
            yield token_id, -presence - frequency * count


def _add(logits: Tensor, changes: Sequence[Sequence[tuple[int, float]]]) -> None:
    lines = [line for line, pairs in enumerate(changes) for _ in pairs]
    if lines:
        ids = [token_id for pairs in changes for token_id, _ in pairs]
        values = torch.tensor([v for pairs in changes for _, v in pairs]).to(logits)
        logits.index_put_(_places(logits, lines, ids), values, accumulate=True)


def _allow(logits: Tensor, rows: Sequence[Row]) -> None:
    for line, row in enumerate(rows):
        if row.sampling.allowed_token_ids:
            allowed = torch.tensor(row.sampling.allowed_token_ids, device=logits.device)
            kept = logits[line, allowed]
            logits[line] = -torch.inf
            logits[line, allowed] = kept


def _bar(logits: Tensor, barred: Sequence[Sequence[int]]) -> None:
    lines = [line for line, ids in enumerate(barred) for _ in ids]
    if lines:
        ids = [token_id for line_ids in barred for token_id in line_ids]
        logits[_places(logits, lines, ids)] = -torch.inf


def _places(logits: Tensor, lines: Sequence[int], ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    device = logits.device
    return torch.tensor(lines, device=device), torch.tensor(ids, device=device)
