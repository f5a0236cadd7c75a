"""Chooses each row's next token, for all rows of a step at once, in fp32.

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

from tidemill_contracts.wire import TokenLogprobs
from tidemill_worker.engine.adjust import adjust, adjusts
from tidemill_worker.engine.row import Row, RowSampling

_FIRST_CANDIDATES = 1024
"""Tokens that top-p looks at before it sorts the whole vocabulary."""


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
    vocabulary: the pad entries of the head are garbage. It is changed in place.
    """
    told = [index for index, row in enumerate(rows) if row.sampling.wants_logprobs]
    # Of the model itself: before the job's penalties, biases, temperature and filters.
    log_probabilities = logits[told].log_softmax(dim=1) if told else None
    changed = [index for index, row in enumerate(rows) if adjusts(row)]
    if changed:
        adjusted = logits[changed]
        adjust(adjusted, [rows[index] for index in changed])
        logits[changed] = adjusted
    tokens = _choose(logits, rows)
    sampled = [Sampled(token) for token in tokens]
    if log_probabilities is not None:
        for line, index in enumerate(told):
            token = tokens[index]
            if token >= 0:
                found = _logprobs(log_probabilities[line], token, rows[index].sampling)
                sampled[index] = Sampled(token, found)
    return sampled


def _choose(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    best, likeliest = logits.max(dim=1)
    tokens: list[int] = likeliest.tolist()
    for index, value in enumerate(best.tolist()):
        if value == -math.inf:
            tokens[index] = -1
    # Rows with and without a filter apart: the latter need the whole vocabulary, but no order.
    drawn = [
        index for index, row in enumerate(rows) if not row.sampling.greedy and tokens[index] >= 0
    ]
    for unfiltered in (True, False):
        group = [i for i in drawn if rows[i].sampling.unfiltered is unfiltered]
        if group:
            picked = _draw(logits[group], [rows[i] for i in group], unfiltered=unfiltered)
            for index, token in zip(group, picked, strict=True):
                tokens[index] = token
    return tokens


def _logprobs(log_probabilities: Tensor, token: int, sampling: RowSampling) -> TokenLogprobs:
    """Of one place: ``[vocabulary]``."""
    count = min(sampling.logprobs or 0, len(log_probabilities))
    values, ids = log_probabilities.topk(count)
    listed = list(sampling.logprob_token_ids)
    return TokenLogprobs(
        logprob=float(log_probabilities[token]),
        top=dict(zip(ids.tolist(), values.tolist(), strict=True)),
        listed=dict(zip(listed, log_probabilities[listed].tolist(), strict=True)),
    )


def _draw(logits: Tensor, rows: Sequence[Row], *, unfiltered: bool) -> list[int]:
    """One draw for each row by inverse CDF, the tokens in the order of their ids."""
    sampling = [row.sampling for row in rows]
    scaled = _scaled(logits, sampling)
    weights, ids = (scaled.exp(), None) if unfiltered else filtered(scaled, sampling)
    # In float64: the sum of 150,000 float32 terms is not precise enough.
    cumulative = weights.double().cumsum_(dim=1)
    draws = torch.tensor(
        [[uniform(row.sampling.seed, row.generated)] for row in rows],
        dtype=torch.float64,
        device=logits.device,
    )
    chosen = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    picked = chosen if ids is None else ids.gather(1, chosen)
    tokens: list[int] = picked[:, 0].tolist()
    return tokens


def _scaled(logits: Tensor, sampling: Sequence[RowSampling]) -> Tensor:
    """The logits over the temperature, shifted so that the largest is 0."""
    temperature = torch.tensor([s.temperature for s in sampling], device=logits.device)
    # Shifted before the division, so that no temperature can overflow.
    return (logits - logits.amax(dim=1, keepdim=True)) / temperature[:, None]


def filtered(scaled: Tensor, sampling: Sequence[RowSampling]) -> tuple[Tensor, Tensor]:
    """What min-p, then top-k, then top-p leave of each row.

    `scaled` is float32 ``[rows, vocabulary]``, its largest entry 0. Returns weights
    ``[rows, candidates]``, proportional to the probabilities and 0 where a token is filtered
    out, and the candidates' ids int64 ``[rows, candidates]``, rising. Tokens that tie with the
    last one kept are kept too, so that what is left does not depend on how a sort breaks ties.
    """
    vocabulary, device = scaled.shape[1], scaled.device
    top_k = torch.tensor([s.top_k or vocabulary for s in sampling], device=device)
    top_k.clamp_(max=vocabulary)
    top_p = torch.tensor([s.top_p for s in sampling], dtype=torch.float64, device=device)
    # min_p is a share of the likeliest token's probability, whose entry is 0.
    min_p = torch.tensor([s.min_p for s in sampling], device=device).log()[:, None]
    mass = scaled.exp().sum(dim=1, dtype=torch.float64)
    width = min(_FIRST_CANDIDATES, vocabulary)
    while True:
        values, ids = scaled.topk(width, dim=1)
        kth = values.gather(1, (top_k.clamp(max=width) - 1)[:, None])
        floor = torch.maximum(min_p, torch.where((top_k <= width)[:, None], kth, -torch.inf))
        weights = torch.where(values < floor, 0.0, values.double().exp())
        cumulative = weights.cumsum(dim=1)
        # Without a limit among the candidates, the whole vocabulary's mass counts.
        limited = (top_k <= width) | (values[:, -1] < floor[:, 0])
        total = torch.where(limited, cumulative[:, -1], mass)
        # A token stays while the tokens before it have not reached top_p.
        goal = (top_p * total)[:, None]
        kept = (cumulative - weights < goal).sum(dim=1, keepdim=True)
        floor = torch.maximum(floor, values.gather(1, kept - 1))
        # Everything that is kept lies strictly inside the candidates, or they are all there is.
        if width == vocabulary or bool((floor > values[:, -1:]).all()):
            ids, order = ids.sort(dim=1)
            values = values.gather(1, order)
            return torch.where(values >= floor, values.exp(), 0.0), ids
        width = vocabulary
