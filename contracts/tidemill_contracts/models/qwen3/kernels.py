"""The Qwen3 kernels in readable torch: the reference that every other backend is held to.

The numerics are those of Hugging Face's ``modeling_qwen3``: RMSNorm in float32, cast, then
multiplied by its weight; q/k norm per head before RoPE; cos and sin computed in float32, applied
in the model's dtype. Sizes are read from the tensors' shapes. L layers, H hidden size, D head
size, QH query heads, KVH K/V heads, P pages, V vocabulary; T packed tokens of B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

CPU_GROUP_BYTES = 2 << 20
"""K and V that one attention call of a decode step gathers for each CPU thread: what stays in a
core's cache is read back for nothing. Measured with 32 rows of 512 tokens: a third faster than
one call for all of them."""

GROUP_BYTES = 256 << 20
"""The same on other devices, where few large calls are best; bounds the scratch memory."""


def prefill(
    input_ids: Tensor,
    seq_lens: Tensor,
    chunk_lens: Tensor,
    chunk_offsets: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    embed: Tensor,
    input_norm: Tensor,
    wqkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    rope_cos: Tensor,
    rope_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    wo: Tensor,
    post_norm: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    final_norm: Tensor,
    lm_head: Tensor,
    rms_norm_eps: Tensor,
    logits: Tensor,
) -> None:
    """Runs one chunk of each row; ``logits[b]`` are those of row b's last token.

    Earlier chunks are read from the cache, so chunked and whole prefill are one code path.
    """
    page_size = k_cache.shape[2]
    positions = torch.empty_like(input_ids)
    groups: list[_Group] = []
    ends, lengths = seq_lens.tolist(), chunk_lens.tolist()
    for row, offset in enumerate(chunk_offsets.tolist()):
        length, end = lengths[row], ends[row]
        tokens = slice(offset, offset + length)
        places = torch.arange(end, device=input_ids.device)
        positions[tokens] = places[end - length :]
        seen = None if length == end else places <= places[end - length :, None]
        groups.append(
            _Group(
                tokens=tokens,
                rows=1,
                context=_slots(block_table[row : row + 1], places[None], page_size).flatten(),
                mask=seen,
                causal=seen is None,
            )
        )
    hidden = _layers(
        input_ids, positions, slot_mapping, groups, embed, input_norm, wqkv, q_norm, k_norm,
        rope_cos, rope_sin, k_cache, v_cache, wo, post_norm, w_gate_up, w_down, rms_norm_eps,
    )  # fmt: skip
    last = hidden.index_select(0, chunk_offsets + chunk_lens - 1)
    logits.copy_(functional.linear(_rms_norm(last, final_norm, rms_norm_eps), lm_head))


def decode(
    input_ids: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    embed: Tensor,
    input_norm: Tensor,
    wqkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    rope_cos: Tensor,
    rope_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    wo: Tensor,
    post_norm: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    final_norm: Tensor,
    lm_head: Tensor,
    rms_norm_eps: Tensor,
    logits: Tensor,
) -> None:
    """Runs one token of each row.

    Rows of similar length attend together: the longest row decides how much a group gathers.
    """
    lengths, order = seq_lens.sort(descending=True)
    tables = block_table.index_select(0, order)
    known = lengths.tolist()
    groups = [
        _decode_group(rows, known[rows.start], lengths[rows], tables[rows], k_cache.shape[2])
        for rows in _similar(known, _group_tokens(k_cache))
    ]
    hidden = _layers(
        input_ids.index_select(0, order), lengths - 1, slot_mapping.index_select(0, order),
        groups, embed, input_norm, wqkv, q_norm, k_norm, rope_cos, rope_sin, k_cache, v_cache,
        wo, post_norm, w_gate_up, w_down, rms_norm_eps,
    )  # fmt: skip
    scores = functional.linear(_rms_norm(hidden, final_norm, rms_norm_eps), lm_head)
    logits.index_copy_(0, order, scores.to(logits.dtype))


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that attend in one call: each has the same number of tokens in this step and S places
    of context."""

    tokens: slice
    """Their packed tokens, row after row."""
    rows: int
    context: Tensor
    """int64 [rows·S]: the slots of each row's K and V, position after position."""
    mask: Tensor | None
    """bool, broadcast to [rows, heads, tokens, S]: true where a token may look."""
    causal: bool = False
    """In place of a mask where the tokens are the whole context."""


def _similar(lengths: Sequence[int], most: int) -> list[slice]:
    """Splits rows, longest first, so that none is padded to more than twice its length and no
    group of several rows gathers more than `most` tokens."""
    groups: list[slice] = []
    start = 0
    for row, length in enumerate(lengths):
        longest = lengths[start]
        if row > start and (2 * length < longest or (row - start + 1) * longest > most):
            groups.append(slice(start, row))
            start = row
    groups.append(slice(start, len(lengths)))
    return groups


def _group_tokens(k_cache: Tensor) -> int:
    _, _, _, kv_heads, head_dim = k_cache.shape
    token_bytes = 2 * kv_heads * head_dim * k_cache.dtype.itemsize
    if k_cache.device.type == "cpu":
        return CPU_GROUP_BYTES * torch.get_num_threads() // token_bytes
    return GROUP_BYTES // token_bytes


def _decode_group(
    rows: slice, longest: int, lengths: Tensor, tables: Tensor, page_size: int
) -> _Group:
    places = torch.arange(longest, device=lengths.device)
    used = places < lengths[:, None]
    # Past a row's end its own first place is read: what lies in the tail of a page, or in pages
    # that the row does not have, reaches nothing, not even as NaN times zero.
    context = _slots(tables, places.where(used, 0), page_size)
    return _Group(
        tokens=rows, rows=len(lengths), context=context.flatten(), mask=used[:, None, None, :]
    )


def _slots(tables: Tensor, places: Tensor, page_size: int) -> Tensor:
    """int64 [rows, S]: the slot of every place, through each row's block table."""
    pages = tables.gather(1, places // page_size)
    return pages.long() * page_size + places % page_size


def _layers(
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    groups: Sequence[_Group],
    embed: Tensor,
    input_norm: Tensor,
    wqkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    rope_cos: Tensor,
    rope_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    wo: Tensor,
    post_norm: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    rms_norm_eps: Tensor,
) -> Tensor:
    """The residual stream [T, H] after the last layer; writes K and V of all tokens."""
    layers, _, _, kv_heads, head_dim = k_cache.shape
    q_heads = wo.shape[2] // head_dim
    hidden = functional.embedding(input_ids, embed)
    # [T, 1, D], so that all heads of a token turn alike.
    cos = rope_cos.index_select(0, positions).to(hidden.dtype).unsqueeze(1)
    sin = rope_sin.index_select(0, positions).to(hidden.dtype).unsqueeze(1)
    written = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping.index_select(0, written).long()
    # One scratch for all layers: memory that is new on every layer costs more than the copying.
    most = max(len(group.context) for group in groups)
    k_scratch, v_scratch = k_cache.new_empty((2, most, kv_heads, head_dim))

    for layer in range(layers):
        normed = _rms_norm(hidden, input_norm[layer], rms_norm_eps)
        qkv = functional.linear(normed, wqkv[layer]).view(len(hidden), -1, head_dim)
        q, k, v = torch.split(qkv, [q_heads, kv_heads, kv_heads], dim=1)
        q = _rotate(_rms_norm(q, q_norm[layer], rms_norm_eps), cos, sin)
        k = _rotate(_rms_norm(k, k_norm[layer], rms_norm_eps), cos, sin)
        k_pool, v_pool = k_cache[layer].flatten(0, 1), v_cache[layer].flatten(0, 1)
        k_pool.index_copy_(0, slots, k.index_select(0, written))
        v_pool.index_copy_(0, slots, v.index_select(0, written))
        attended = torch.empty_like(q)
        for group in groups:
            size = len(group.context)
            attended[group.tokens] = _attend(
                q[group.tokens],
                torch.index_select(k_pool, 0, group.context, out=k_scratch[:size]),
                torch.index_select(v_pool, 0, group.context, out=v_scratch[:size]),
                group,
            )
        hidden = hidden + functional.linear(attended.flatten(1), wo[layer])

        normed = _rms_norm(hidden, post_norm[layer], rms_norm_eps)
        gate, up = functional.linear(normed, w_gate_up[layer]).chunk(2, dim=1)
        hidden = hidden + functional.linear(functional.silu(gate) * up, w_down[layer])
    return hidden


def _attend(q: Tensor, k: Tensor, v: Tensor, group: _Group) -> Tensor:
    """Attention of a group's tokens, [tokens, QH, D], over its gathered K and V."""

    def by_head(x: Tensor) -> Tensor:
        """[rows, heads, n, D]."""
        return x.view(group.rows, -1, *x.shape[1:]).transpose(1, 2)

    out = functional.scaled_dot_product_attention(
        by_head(q),
        by_head(k),
        by_head(v),
        attn_mask=group.mask,
        is_causal=group.causal,
        enable_gqa=True,
    )
    return out.transpose(1, 2).reshape(q.shape)


def _rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """Over the last dimension (arXiv 1910.07467), rounded to x's dtype before the weight."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over the halves of each head: [T, heads, D] by the angles of each token."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
