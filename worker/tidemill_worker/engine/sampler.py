"""Chooses each row's next token, for all rows of a step at once, in fp32.

By the contract's kernels where it has some. Otherwise, and as what those are held to, in torch.

Randomness is counter-based: the draw for a row's n-th token is a function of the row's seed and
n alone. So a seeded row's tokens depend neither on its neighbours nor on joins, leaves,
preemptions or the device, and there is no generator state to carry.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill_contracts.models.sampling import (
    NO_TOKEN,
    NOT_FINITE,
    Draw,
    SamplingKernels,
    Telling,
)
from tidemill_contracts.wire import TokenLogprobs
from tidemill_worker.engine.adjust import adjust, barred, grammar_masks
from tidemill_worker.engine.grammar import Bits
from tidemill_worker.engine.logit_blocks import BLOCK, LogitBlocks
from tidemill_worker.engine.logprobs import tell, token_logprobs
from tidemill_worker.engine.row import Row, RowSampling

_WIDTHS = (64, 256, 1024)
"""How many of the likeliest tokens a filter looks at before it sorts the whole vocabulary. A width
only saves time: what a row draws does not depend on it."""


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on `seed` and `index` alone.

    It has 52 random bits: one fewer than fit, so that it times a sum stays below the sum.
    """
    counter = struct.pack("<QQ", seed, index)
    digest = hashlib.blake2b(counter, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 12) / 2**52


def finite_rows(logits: Tensor) -> list[bool]:
    """Which rows of ``[rows, vocabulary]`` hold neither NaN nor infinity."""
    # A sum is NaN or infinite whenever one of its terms is, and it is quickly taken.
    finite = torch.isfinite(logits.sum(dim=1))
    if not bool(finite.all()):
        # It is infinite as well where large terms add up to more than float32 holds.
        finite = torch.isfinite(logits).all(dim=1)
    return finite.tolist()


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next token of one row."""

    token_id: int
    """`NO_TOKEN` where the job's own options leave none to choose from."""
    logprobs: TokenLogprobs | None = None


def sample(
    logits: Tensor, rows: Sequence[Row], kernels: SamplingKernels | None = None
) -> list[Sampled | None]:
    """The next token of each row, ``None`` where its logits are NaN or infinite.

    `logits` is float32 ``[rows, vocabulary]``, already sliced to the real vocabulary: the pad
    entries of the head are garbage. It may be changed in place. Where a budget ends a row's
    thoughts, the token is that of the closing sentence, whatever the job's options make of it.
    """
    if kernels is not None:
        return _sample_by(kernels, logits, rows)
    finite = finite_rows(logits)
    sound = [row for row, good in zip(rows, finite, strict=True) if good]
    if not sound:
        return [None] * len(rows)
    sampled = iter(_sample_in_torch(logits if all(finite) else logits[finite], sound))
    return [next(sampled) if good else None for good in finite]


def _sample_by(
    kernels: SamplingKernels, logits: Tensor, rows: Sequence[Row]
) -> list[Sampled | None]:
    bits = grammar_masks(rows)
    draws = [
        _draw_of(row, bits[line] if bits is not None and row.held else None)
        for line, row in enumerate(rows)
    ]
    tokens = _settled(kernels.draw(logits, draws), rows)
    asked = [
        Telling(line, tokens[line], row.sampling.logprobs or 0, row.sampling.logprob_token_ids)
        for line, row in enumerate(rows)
        if row.sampling.wants_logprobs and tokens[line] >= 0
    ]
    told = {
        telling.line: logprobs
        for telling, logprobs in zip(asked, tell(kernels, logits, asked), strict=True)
    }
    return [
        None if token == NOT_FINITE else Sampled(token, told.get(line))
        for line, token in enumerate(tokens)
    ]


def _sample_in_torch(logits: Tensor, rows: Sequence[Row]) -> list[Sampled]:
    told = [index for index, row in enumerate(rows) if row.sampling.wants_logprobs]
    # Of the model itself: before the job's penalties, biases, temperature and filters.
    log_probabilities = logits[told].log_softmax(dim=1) if told else None
    adjust(logits, rows)
    tokens = _settled(_choose(logits, rows), rows)
    sampled = [Sampled(token) for token in tokens]
    if log_probabilities is not None:
        for line, index in enumerate(told):
            token = tokens[index]
            if token >= 0:
                asked = rows[index].sampling
                (found,) = token_logprobs(
                    log_probabilities[line : line + 1],
                    [token],
                    asked.logprobs or 0,
                    asked.logprob_token_ids,
                )
                sampled[index] = Sampled(token, found)
    return sampled


def _settled(drawn: Sequence[int], rows: Sequence[Row]) -> list[int]:
    """The drawn tokens, or those that a budget of thoughts has come instead."""
    return [
        token if row.thinking is None or token == NOT_FINITE else row.thinking.settle(token)
        for token, row in zip(drawn, rows, strict=True)
    ]


def _draw_of(row: Row, mask: Bits | None) -> Draw:
    sampling = row.sampling
    return Draw(
        uniform=uniform(sampling.seed, row.generated),
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        token_ids=row.token_ids if sampling.penalises else (),
        prompt_len=row.prompt_len if sampling.penalises else 0,
        logit_bias=sampling.logit_bias,
        allowed=sampling.allowed_token_ids,
        mask=mask,
        barred=tuple(barred(row)),
        temperature=0.0 if sampling.greedy else sampling.temperature,
        min_p=sampling.min_p,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )


def _choose(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    blocks = LogitBlocks.of(logits)
    largest, likeliest = blocks.argmax()
    tokens: list[int] = likeliest.tolist()
    for line, value in enumerate(largest.tolist()):
        if value == -math.inf:
            tokens[line] = NO_TOKEN
    drawing = [i for i, row in enumerate(rows) if not row.sampling.greedy and tokens[i] >= 0]
    free = [line for line in drawing if rows[line].sampling.unfiltered]
    limited = [line for line in drawing if not rows[line].sampling.unfiltered]
    for draw, lines in ((_draw, free), (_draw_filtered, limited)):
        if lines:
            for line, token in zip(lines, draw(blocks, rows, lines), strict=True):
                tokens[line] = token
    return tokens


def _draw(blocks: LogitBlocks, rows: Sequence[Row], lines: Sequence[int]) -> list[int]:
    """One draw by inverse CDF for each of these rows, which no filter limits: first a block of
    neighbouring tokens, then one of them."""
    drawing = [rows[line] for line in lines]
    weights = _weights(blocks.whole(lines), blocks.largest[lines], drawing)
    # Within a block float32 is precise enough; for the sum of 150,000 terms it is not.
    sums = weights.sum(dim=2).cumsum(dim=1, dtype=torch.float64)
    goal = _uniforms(drawing, sums.device) * sums[:, -1:]
    block = torch.searchsorted(sums, goal, right=True)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = weights[torch.arange(len(lines), device=block.device), block[:, 0]]
    cumulative = inside.cumsum(dim=1, dtype=torch.float64)
    # The block's sum is rounded in another way here, and the goal must stay below it.
    goal = torch.minimum(goal - before, cumulative[:, -1:].nextafter(torch.zeros_like(goal)))
    token = block * BLOCK + torch.searchsorted(cumulative, goal, right=True)
    tokens: list[int] = token[:, 0].tolist()
    return tokens


def _draw_filtered(blocks: LogitBlocks, rows: Sequence[Row], lines: Sequence[int]) -> list[int]:
    """One draw by inverse CDF for each of these rows, from what its filters leave."""
    drawing = [rows[line] for line in lines]
    mass = _mass(blocks, drawing, lines)
    tokens = [-1] * len(lines)
    waiting = list(range(len(lines)))
    for width in (*_WIDTHS, blocks.vocabulary):
        tried = [i for i in waiting if _may_settle(drawing[i].sampling, width, blocks.vocabulary)]
        if not tried:
            continue
        trying = [drawing[i] for i in tried]
        left = filtered(blocks, [lines[i] for i in tried], trying, mass[tried], width)
        cumulative = left.weights.cumsum(dim=1, dtype=torch.float64)
        goal = _uniforms(trying, cumulative.device) * cumulative[:, -1:]
        picked = left.ids.gather(1, torch.searchsorted(cumulative, goal, right=True))
        settled = left.settled.tolist()
        for i, token, is_settled in zip(tried, picked[:, 0].tolist(), settled, strict=True):
            if is_settled:
                tokens[i] = token
                waiting.remove(i)
    return tokens


def _may_settle(sampling: RowSampling, width: int, vocabulary: int) -> bool:
    """Whether there is a point in looking at so few of the likeliest tokens."""
    return width >= vocabulary or width > sampling.top_k or sampling.min_p > 0


def _uniforms(rows: Sequence[Row], device: torch.device) -> Tensor:
    """The random number behind each row's next token: float64 ``[rows, 1]``."""
    numbers = [[uniform(row.sampling.seed, row.generated)] for row in rows]
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _weights(logits: Tensor, largest: Tensor, rows: Sequence[Row]) -> Tensor:
    """exp of the logits over the temperature, 1 for the largest: proportional to probability.

    `logits` is ``[rows, …]``; `largest` holds each row's largest among others: ``[rows, any]``.
    """
    shape = (-1, *[1] * (logits.dim() - 1))
    temperature = logits.new_tensor([row.sampling.temperature for row in rows])
    # One that float32 takes for 0 leaves the largest alone, as the least that it can hold does.
    temperature.clamp_(min=torch.finfo(torch.float32).tiny)
    # Shifted before the division, so that no temperature can overflow.
    shifted = logits - largest.amax(dim=1).view(shape)
    return shifted.div_(temperature.view(shape)).exp_()


def _mass(blocks: LogitBlocks, rows: Sequence[Row], lines: Sequence[int]) -> Tensor:
    """What top-p takes its share of in a row without a top-k: the sum of the weights that min-p
    leaves, summed in one order whatever the width and the neighbours.

    float64 ``[rows]``, and NaN for the other rows, where the candidates tell.
    """
    device = blocks.largest.device
    mass = torch.full((len(rows),), torch.nan, dtype=torch.float64, device=device)
    shared = [i for i, row in enumerate(rows) if not row.sampling.top_k and row.sampling.top_p < 1]
    if shared:
        taken, sharing = [lines[i] for i in shared], [rows[i] for i in shared]
        weights = _weights(blocks.whole(taken), blocks.largest[taken], sharing)
        if any(row.sampling.min_p for row in sharing):
            min_p = weights.new_tensor([row.sampling.min_p for row in sharing])
            weights = torch.where(weights < min_p[:, None, None], 0.0, weights)
        mass[shared] = weights.sum(dim=2).cumsum(dim=1, dtype=torch.float64)[:, -1]
    return mass


@dataclass(frozen=True, slots=True)
class Filtered:
    """What filters leave of some rows."""

    weights: Tensor
    """float32 ``[rows, candidates]``: proportional to the probabilities, 0 where a token is out."""
    ids: Tensor
    """The candidates, int64 ``[rows, candidates]``, rising."""
    settled: Tensor
    """bool ``[rows]``: whether all that is left is among the candidates."""


def filtered(
    blocks: LogitBlocks, lines: Sequence[int], rows: Sequence[Row], mass: Tensor, width: int
) -> Filtered:
    """What min-p, then top-k, then top-p leave of the rows at `lines`.

    Looks at the `width` likeliest tokens; `mass` is as `_mass` gives it. Tokens that tie with the
    last one kept are kept too, so that what is left does not depend on how a sort breaks ties.
    """
    vocabulary, device = blocks.vocabulary, blocks.largest.device
    width = min(width, vocabulary)
    sampling = [row.sampling for row in rows]
    top_k = torch.tensor([s.top_k or vocabulary for s in sampling], device=device)
    top_k = top_k.clamp_(max=vocabulary)[:, None]
    # A top-p of 1 leaves everything, whatever the last bit of a sum.
    shares = [[s.top_p if s.top_p < 1 else math.inf] for s in sampling]
    top_p = torch.tensor(shares, dtype=torch.float64, device=device)
    values, ids = blocks.likeliest(lines, width)
    # A share of the likeliest token's weight, which is 1.
    min_p = values.new_tensor([[s.min_p] for s in sampling])
    weights = _weights(values, values[:, :1], rows)
    least = weights[:, -1:]
    kth = weights.gather(1, top_k.clamp(max=width) - 1)
    floor = torch.maximum(min_p, torch.where(top_k <= width, kth, 0.0))
    kept = torch.where(weights < floor, 0.0, weights.double())
    cumulative = kept.cumsum(dim=1)
    mass = mass[:, None]
    total = torch.where(mass.isnan(), cumulative[:, -1:], mass)
    # What top-p takes its share of is known too once another limit lies among the candidates.
    known = ~mass.isnan() | (top_k <= width) | (least < floor)
    # A token stays while the tokens before it have not reached top_p.
    count = (cumulative - kept < top_p * total).sum(dim=1, keepdim=True)
    floor = torch.maximum(floor, weights.gather(1, count - 1))
    # Tokens that tie with the last candidate may lie outside, unless they weigh nothing at all.
    settled = (known & (floor > least)) | (least == 0) | (width == vocabulary)
    ids, order = ids.sort(dim=1)
    weights = weights.gather(1, order)
    return Filtered(torch.where(weights >= floor, weights, 0.0), ids, settled[:, 0])
