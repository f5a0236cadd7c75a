"""Chooses each row's next token, for all rows of a step at once, in fp32.

Randomness is counter-based: the draw for a row's n-th token is a function of the row's seed and
n alone. So a seeded row's tokens depend neither on its neighbours nor on joins, leaves,
preemptions or the device, and there is no generator state to carry.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

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


def sample(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """The next token of each row.

    `logits` is float32 ``[rows, vocabulary]``, finite, and already sliced to the real
    vocabulary: the pad entries of the head are garbage.
    """
    tokens: list[int] = torch.argmax(logits, dim=1).tolist()
    # Rows with and without a filter apart: the latter need the whole vocabulary, but no order.
    drawn = [index for index, row in enumerate(rows) if not row.sampling.greedy]
    for unfiltered in (True, False):
        group = [i for i in drawn if rows[i].sampling.unfiltered is unfiltered]
        if group:
            picked = _draw(logits[group], [rows[i] for i in group], unfiltered=unfiltered)
            for index, token in zip(group, picked, strict=True):
                tokens[index] = token
    return tokens


def _draw(logits: Tensor, rows: Sequence[Row], *, unfiltered: bool) -> list[int]:
    """One draw for each row by inverse CDF, the tokens in the order of their ids."""
    sampling = [row.sampling for row in rows]
    scaled = _scaled(logits, sampling)
    weights, ids = (scaled.exp(), None) if unfiltered else filtered(scaled, sampling)
    # In float64: the sum of 150,000 float32 terms is not precise enough.
    cumulative = weights.double().cumsum_(dim=1)
    draws = torch.tensor(
        [[uniform(row.sampling.seed, row.known - row.prompt_len)] for row in rows],
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
    """What top-k and then top-p leave of each row.

    `scaled` is float32 ``[rows, vocabulary]``, its largest entry 0. Returns weights
    ``[rows, candidates]``, proportional to the probabilities and 0 where a token is filtered
    out, and the candidates' ids int64 ``[rows, candidates]``, rising. Tokens that tie with the
    last one kept are kept too, so that what is left does not depend on how a sort breaks ties.
    """
    vocabulary = scaled.shape[1]
    top_k = torch.tensor([s.top_k or vocabulary for s in sampling], device=scaled.device)
    top_k.clamp_(max=vocabulary)
    top_p = torch.tensor([s.top_p for s in sampling], device=scaled.device)
    mass = scaled.exp().sum(dim=1, dtype=torch.float64)
    width = min(_FIRST_CANDIDATES, vocabulary)
    while True:
        values, ids = scaled.topk(width, dim=1)
        kth = values.gather(1, (top_k.clamp(max=width) - 1)[:, None])
        limited = (top_k <= width)[:, None]
        weights = values.double().exp()
        weights = torch.where(limited & (values < kth), 0.0, weights)
        cumulative = weights.cumsum(dim=1)
        total = torch.where(limited[:, 0], cumulative[:, -1], mass)
        # A token stays while the tokens before it have not reached top_p.
        goal = (top_p * total)[:, None]
        kept = (cumulative - weights < goal).sum(dim=1, keepdim=True)
        floor = torch.maximum(values.gather(1, kept - 1), torch.where(limited, kth, -torch.inf))
        # Everything that is kept lies strictly inside the candidates, or they are all there is.
        if width == vocabulary or bool((floor > values[:, -1:]).all()):
            ids, order = ids.sort(dim=1)
            values = values.gather(1, order)
            return torch.where(values >= floor, values.exp(), 0.0), ids
        width = vocabulary
