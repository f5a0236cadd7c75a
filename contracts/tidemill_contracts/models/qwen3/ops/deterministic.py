"""Operations whose result for a token is the same to the bit whatever is computed with it.

Libraries choose their kernels, and with them the order in which they add, by the shape at hand:
by how many rows a batch has, or how long a chunk is. Here every product has one fixed shape, and
a token's own numbers always pass through it in the same way; the rest of a shape is padding or
other tokens, which never mix with it. What remains is one machine, one torch and one number of
threads: the bits may differ between two of those. For the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tidemill_contracts.models.errors import ModelError
from tidemill_contracts.models.qwen3.ops import Attention
from tidemill_contracts.models.qwen3.ops.reference import PagedWrites, ReferenceOps, slots_of
from tidemill_contracts.models.qwen3.step import Step

TILE_ROWS = (32, 16)
"""Rows of every product with a weight: the first for which a row's place in the tile does not
matter. MKL's AVX2 kernels end a tile of 32 in other code, one of 16 not."""

BLOCK = 64
"""Places of the context that are attended at once."""

GROUP_ROWS = 8
"""Rows of a decode step whose K and V are gathered together: a block of theirs stays in the cache
of a core."""

VECTOR, SERIAL = 64, 16_384
"""Elements: torch's CPU kernels compute what is left over of a multiple of `VECTOR` with scalar
code, whose exp differs, and share out among threads only what is longer than 32,768."""


class DeterministicOps(ReferenceOps):
    """`Ops` in fixed shapes. RMSNorm and RoPE are the reference's: they only reduce within a
    token's own vector, and what else they do is exact to the last bit in any kernel."""

    def __init__(self) -> None:
        self._tiles: dict[tuple[torch.Size, torch.dtype], int] = {}

    def plan(self, step: Step, k_cache: Tensor, q_heads: int) -> Attention:
        return BlockAttention(step, k_cache)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Tile by tile, the last one padded. Raises `ModelError` where this machine's kernels
        have no tile in which every place is alike."""
        key = (weight.shape, weight.dtype)
        if key not in self._tiles:
            self._tiles[key] = _tile_rows(weight)
        rows = self._tiles[key]
        padded = x.new_zeros(-(-len(x) // rows) * rows, x.shape[1])
        padded[: len(x)] = x
        out = x.new_empty(len(padded), len(weight))
        for tile, target in zip(torch.split(padded, rows), torch.split(out, rows), strict=True):
            torch.mm(tile, weight.t(), out=target)
        return out[: len(x)]

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        flat = gate.new_zeros(-(-gate.numel() // VECTOR) * VECTOR)
        flat[: gate.numel()] = gate.flatten()
        for piece in torch.split(flat, SERIAL):
            functional.silu(piece, inplace=True)
        return flat[: gate.numel()].view(gate.shape) * up

    def grouped_linear(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        out = x.new_empty(len(x), weights.shape[1])
        start = 0
        for group, end in enumerate(ends.tolist()):
            if end > start:
                out[start:end] = self.linear(x[start:end], weights[group])
            start = end
        return out

    def weighted_sum(self, parts: Tensor, weights: Tensor) -> Tensor:
        """One part after another, in float32."""
        wide = parts.float() * weights.float().unsqueeze(-1)
        total = wide[:, 0]
        for part in range(1, wide.shape[1]):
            total = total + wide[:, part]
        return total.to(parts.dtype)


def _tile_rows(weight: Tensor) -> int:
    """The rows of a tile for products with weights of this shape."""
    for rows in TILE_ROWS:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(rows, weight.shape[1], generator=generator).to(weight.dtype)
        moved = torch.mm(x.roll(1, 0), weight.t())
        if torch.equal(torch.mm(x, weight.t()).roll(1, 0), moved):
            return rows
    raise ModelError(
        "Deterministic mode cannot be had on this machine: its matrix products with weights of"
        f" shape {list(weight.shape)} in {weight.dtype} depend on where a row stands in a tile of"
        f" {' or '.join(map(str, TILE_ROWS))} rows."
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """One block of the context for all tokens of a group that look at it."""

    tokens: slice
    """Of the group's lines."""
    slots: Tensor
    """int64 [contexts·BLOCK]; a place that is not there reads the context's first one."""
    seen: Tensor | None
    """bool [lines, 1, BLOCK]: where each line looks; ``None`` for everywhere."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Lines that are computed together, each with the blocks of its context in order.

    In decode a line is one K/V head of one token, with a context of its own. In prefill a line is
    one token of a chunk; all share the context, and heads are one after another.
    """

    tokens: Tensor
    """int64: the packed tokens."""
    heads_apart: bool
    blocks: Sequence[_Block]


class BlockAttention(PagedWrites):
    """`Attention` of every token by itself, its context block by block from the start.

    A product takes the query heads of one token that share a K/V head by one block: that shape
    is the same in prefill and decode, and for every context. The blocks' shares are added as in
    "Online normalizer calculation for softmax" (arXiv 1805.02867), all in float32.
    """

    def __init__(self, step: Step, k_cache: Tensor) -> None:
        super().__init__(step)
        _, _, page_size, self._kv_heads, self._head_dim = k_cache.shape
        groups = _decode_groups if step.decodes else _chunk_groups
        self._groups = list(groups(step, page_size, self._kv_heads))
        # One scratch for all layers: memory that is new on every layer costs more than the copy.
        most = max(len(block.slots) for group in self._groups for block in group.blocks)
        self._found = k_cache.new_empty((most, self._kv_heads, self._head_dim))
        self._wide = self._found.new_empty(self._found.shape, dtype=torch.float32)

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        k_pool, v_pool = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self._groups:
            mine = q.index_select(0, group.tokens).float() * self._head_dim**-0.5
            mine = mine.view(len(mine), self._kv_heads, -1, self._head_dim)
            if group.heads_apart:
                lines = mine.transpose(0, 1).contiguous()
                attended = self._attend(lines, group, k_pool, v_pool).transpose(0, 1)
            else:
                attended = self._attend(mine.flatten(0, 1)[None], group, k_pool, v_pool)
            out[group.tokens] = attended.reshape(len(mine), *q.shape[1:]).to(q.dtype)
        return out

    def _attend(self, q: Tensor, group: _Group, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        """[heads, lines, G, D], as `q`, which is scaled; one head where heads are lines."""
        largest = q.new_full((*q.shape[:-1], 1), -torch.inf)
        mass = torch.zeros_like(largest)
        total = torch.zeros_like(q)
        for block in group.blocks:
            here = (slice(None), block.tokens)
            keys = self._gathered(k_pool, block, group.heads_apart)
            scores = _products(q[here], keys.transpose(-1, -2))
            if block.seen is not None:
                scores.masked_fill_(~block.seen, -torch.inf)
            peak = scores.amax(-1, keepdim=True)
            weights = (scores - peak).exp_()
            values = _products(weights, self._gathered(v_pool, block, group.heads_apart))
            highest = torch.maximum(largest[here], peak)
            before, now = (largest[here] - highest).exp_(), (peak - highest).exp_()
            largest[here] = highest
            mass[here] = mass[here] * before + weights.sum(-1, keepdim=True) * now
            total[here] = total[here] * before + values * now
        return total / mass

    def _gathered(self, pool: Tensor, block: _Block, heads_apart: bool) -> Tensor:
        """float32: [KVH, 1, BLOCK, D] where heads are apart, else [1, lines, BLOCK, D]; valid until
        the next call."""
        places = len(block.slots)
        found = torch.index_select(pool, 0, block.slots, out=self._found[:places])
        by_head = found.view(-1, BLOCK, self._kv_heads, self._head_dim).transpose(1, 2)
        wide = self._wide[:places].view(by_head.shape).copy_(by_head)
        return wide.transpose(0, 1) if heads_apart else wide.flatten(0, 1)[None]


def _products(x: Tensor, y: Tensor) -> Tensor:
    """Matrix products [heads, n, a, b] by [heads, n or 1, b, c]."""
    heads, lines, rows, _ = x.shape
    out = x.new_empty(heads, lines, rows, y.shape[-1])
    for head in range(heads):
        torch.bmm(x[head], y[head].expand(lines, -1, -1), out=out[head])
    return out


def _chunk_groups(step: Step, page_size: int, _kv_heads: int) -> Iterable[_Group]:
    """A group for each row's chunk."""
    host = step.host
    device = step.slot_mapping.device
    for row, (end, length) in enumerate(zip(host.ends, host.lengths, strict=True)):
        own = torch.arange(end - length, end, device=device)
        blocks = []
        for start in range(0, end, BLOCK):
            places = torch.arange(start, start + BLOCK, device=device)
            table = step.block_table[row : row + 1]
            # The first tokens of the chunk may lie before the block: they do not look at it.
            tokens = slice(max(0, start - (end - length)), length)
            blocks.append(
                _Block(
                    tokens,
                    slots_of(table, places.where(places < end, 0)[None], page_size).flatten(),
                    (places <= own[tokens, None])[:, None],
                )
            )
        offset = host.offsets[row]
        yield _Group(torch.arange(offset, offset + length, device=device), True, blocks)


def _decode_groups(step: Step, page_size: int, kv_heads: int) -> Iterable[_Group]:
    """Groups of rows, the longest first, so that those that look at a block stand together."""
    ends = step.host.ends
    device = step.slot_mapping.device
    order = sorted(range(len(ends)), key=lambda row: -ends[row])
    for first in range(0, len(order), GROUP_ROWS):
        members = order[first : first + GROUP_ROWS]
        tokens = torch.tensor(members, dtype=torch.int64, device=device)
        lengths, table = step.seq_lens[tokens], step.block_table[tokens]
        blocks = []
        for start in range(0, ends[members[0]], BLOCK):
            looking = sum(ends[row] > start for row in members)
            places = torch.arange(start, start + BLOCK, device=device)
            used = places < lengths[:looking, None]
            blocks.append(
                _Block(
                    slice(looking * kv_heads),
                    slots_of(table[:looking], places.where(used, 0), page_size).flatten(),
                    used.repeat_interleave(kv_heads, 0)[:, None],
                )
            )
        yield _Group(tokens, False, blocks)
