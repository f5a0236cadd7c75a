"""Chooses each row's next token, for all rows of a step at once, in fp32.

Randomness is counter-based: the draw for a row's n-th token is a function of the row's seed and
n alone. So a seeded row's tokens depend neither on its neighbours nor on joins, leaves,
preemptions or the device, and there is no generator state to carry.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill_contracts.wire import TokenLogprobs
from tidemill_worker.engine.adjust import adjust, adjusts
from tidemill_worker.engine.logprobs import token_logprobs
from tidemill_worker.engine.row import Row, RowSampling

_FEW_CANDIDATES, _MANY_CANDIDATES = 64, 1024
"""Tokens that a filter looks at before it sorts the whole vocabulary: few for a small top-k."""


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on `seed` and `index` alone.

    It has 52 random bits: one fewer than fit, so that it times a sum stays below the sum.
    """
    counter = struct.pack("<QQ", seed, index)
    digest = hashlib.blake2b(counter, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 12) / 2**52


def finite_rows(logits: Tensor) -> list[bool]:
    """Which rows of ``[rows, vocabulary]`` hold neither NaN nor infinity."""
    # A sum is NaN or infinite whenever one of its terms is, and reads the logits just once.
    return torch.isfinite(logits.sum(dim=1, dtype=torch.float64)).tolist()


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next token of one row."""

    token_id: int
    """−1 where the job's own options leave no token to choose from."""
    logprobs: TokenLogprobs | None = None


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Sampled]:
    """The next token of each row.

    `logits` is float32 ``[rows, vocabulary]``, finite, and already sliced to the real
    vocabulary: the pad entries of the head are garbage. It is changed in place. Where a budget
    ends a row's thoughts, the token is that of the closing sentence, whatever the job's options
    make of it.
    """
    told = [index for index, row in enumerate(rows) if row.sampling.wants_logprobs]
    # Of the model itself: before the job's penalties, biases, temperature and filters.
    log_probabilities = logits[told].log_softmax(dim=1) if told else None
    changed = [index for index, row in enumerate(rows) if adjusts(row)]
    if changed:
        adjusted = logits[changed]
        adjust(adjusted, [rows[index] for index in changed])
        logits[changed] = adjusted
    tokens = [
        token if row.thinking is None else row.thinking.settle(token)
        for token, row in zip(_choose(logits, rows), rows, strict=True)
    ]
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


def _choose(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    best, likeliest = logits.max(dim=1)
    tokens: list[int] = likeliest.tolist()
    for index, value in enumerate(best.tolist()):
        if value == -math.inf:
            tokens[index] = -1
    groups: dict[int | None, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        if not row.sampling.greedy and tokens[index] >= 0:
            groups[_width(row.sampling, logits.shape[1])].append(index)
    for width, group in groups.items():
        picked = _draw(logits[group], [rows[index] for index in group], width)
        for index, token in zip(group, picked, strict=True):
            tokens[index] = token
    return tokens


def _width(sampling: RowSampling, vocabulary: int) -> int | None:
    """How many of the likeliest tokens to look at first; ``None`` where nothing is filtered and
    the whole vocabulary counts. A width only saves time: what is left does not depend on it."""
    if sampling.unfiltered:
        return None
    few = 0 < sampling.top_k < _FEW_CANDIDATES
    return min(_FEW_CANDIDATES if few else _MANY_CANDIDATES, vocabulary)


def _draw(logits: Tensor, rows: Sequence[Row], width: int | None) -> list[int]:
    """One draw for each row by inverse CDF, the tokens in the order of their ids."""
    sampling = [row.sampling for row in rows]
    if width is None:
        weights, ids = _weights(logits, logits.amax(dim=1, keepdim=True), sampling), None
    else:
        weights, ids = filtered(logits, sampling, width)
    # In float64: the sum of 150,000 float32 terms is not precise enough.
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    draws = torch.tensor(
        [[uniform(row.sampling.seed, row.generated)] for row in rows],
        dtype=torch.float64,
        device=logits.device,
    )
    chosen = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    picked = chosen if ids is None else ids.gather(1, chosen)
    tokens: list[int] = picked[:, 0].tolist()
    return tokens


def _weights(logits: Tensor, largest: Tensor, sampling: Sequence[RowSampling]) -> Tensor:
    """exp of the logits over the temperature, 1 for the largest: proportional to probability."""
    temperature = torch.tensor([s.temperature for s in sampling], device=logits.device)
    # Shifted before the division, so that no temperature can overflow.
    return (logits - largest).div_(temperature[:, None]).exp_()


def _line_sums(values: Tensor) -> Tensor:
    """float64 [rows]: each row's sum, in the same order however many rows there are.

    torch splits one long sum among threads, but not two: a row alone is summed twice.
    """
    if len(values) == 1:
        return values.expand(2, -1).sum(dim=1, dtype=torch.float64)[:1]
    return values.sum(dim=1, dtype=torch.float64)


def filtered(logits: Tensor, sampling: Sequence[RowSampling], width: int) -> tuple[Tensor, Tensor]:
    """What min-p, then top-k, then top-p leave of each row.

    `logits` is float32 ``[rows, vocabulary]``; `width` of its likeliest tokens are looked at
    first, and the whole vocabulary where these do not settle it. Returns weights
    ``[rows, candidates]``, proportional to the probabilities and 0 where a token is filtered
    out, and the candidates' ids int64 ``[rows, candidates]``, rising. Tokens that tie with the
    last one kept are kept too, so that what is left does not depend on how a sort breaks ties.
    """
    vocabulary, device = logits.shape[1], logits.device
    top_k = torch.tensor([s.top_k or vocabulary for s in sampling], device=device)
    top_k.clamp_(max=vocabulary)
    # A top-p of 1 leaves everything, whatever the last bit of a sum.
    shares = [s.top_p if s.top_p < 1 else math.inf for s in sampling]
    top_p = torch.tensor(shares, dtype=torch.float64, device=device)
    # A share of the likeliest token's weight, which is 1.
    min_p = torch.tensor([s.min_p for s in sampling], device=device)[:, None]
    whole: Tensor | None = None
    mass = torch.zeros(len(logits), dtype=torch.float64, device=device)
    while True:
        values, ids = logits.topk(width, dim=1)
        weights = _weights(values, values[:, :1], sampling)
        kth = weights.gather(1, (top_k.clamp(max=width) - 1)[:, None])
        floor = torch.maximum(min_p, torch.where((top_k <= width)[:, None], kth, 0.0))
        kept = torch.where(weights < floor, 0.0, weights.double())
        cumulative = kept.cumsum(dim=1)
        # Without a limit among the candidates, the whole vocabulary's mass counts. It is kept for
        # the second look, where a sum in another order might differ in its last bit.
        if whole is None:
            limited = (top_k <= width) | (weights[:, -1] < floor[:, 0])
            whole = ~limited & (top_k == vocabulary) & top_p.isfinite()
            if bool(whole.any()):
                everything = _weights(logits, values[:, :1], sampling)
                mass = _line_sums(torch.where(everything < min_p, 0.0, everything))
        total = torch.where(whole, mass, cumulative[:, -1])
        # A token stays while the tokens before it have not reached top_p.
        goal = (top_p * total)[:, None]
        count = (cumulative - kept < goal).sum(dim=1, keepdim=True)
        floor = torch.maximum(floor, weights.gather(1, count - 1))
        # Everything that is kept lies strictly inside the candidates, and a top-k beyond them does
        # not change what top-p is a share of; or they are all there is.
        settled = (floor > weights[:, -1:]).all() and (limited | whole).all()
        if width == vocabulary or bool(settled):
            ids, order = ids.sort(dim=1)
            weights = weights.gather(1, order)
            return torch.where(weights >= floor, weights, 0.0), ids
        width = vocabulary
