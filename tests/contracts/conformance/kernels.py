"""The dense Qwen3 stages once more, row by row: the copy that faults are planted in.

Takes the arguments of the contract in the tree, and nothing else of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

Span = tuple[int, int, int]
"""A row's chunk: its first packed token, its tokens, the row's length after it."""


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
    spans = chunks(seq_lens, chunk_lens, chunk_offsets)
    run(
        spans, lasts(spans), input_ids, block_table, slot_mapping, embed, input_norm, wqkv, q_norm,
        k_norm, rope_cos, rope_sin, k_cache, v_cache, wo, post_norm, w_gate_up, w_down,
        final_norm, lm_head, rms_norm_eps, logits,
    )  # fmt: skip


def score(
    input_ids: Tensor,
    seq_lens: Tensor,
    chunk_lens: Tensor,
    chunk_offsets: Tensor,
    logit_rows: Tensor,
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
    spans = chunks(seq_lens, chunk_lens, chunk_offsets)
    asked = logit_rows.tolist()
    run(
        spans, asked, input_ids, block_table, slot_mapping, embed, input_norm, wqkv, q_norm, k_norm,
        rope_cos, rope_sin, k_cache, v_cache, wo, post_norm, w_gate_up, w_down, final_norm,
        lm_head, rms_norm_eps, logits,
    )  # fmt: skip


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
    lengths = seq_lens.tolist()
    spans = [(row, 1, length) for row, length in enumerate(lengths)]
    run(
        spans, lasts(spans), input_ids, block_table, slot_mapping, embed, input_norm, wqkv, q_norm,
        k_norm, rope_cos, rope_sin, k_cache, v_cache, wo, post_norm, w_gate_up, w_down,
        final_norm, lm_head, rms_norm_eps, logits,
    )  # fmt: skip


def chunks(seq_lens: Tensor, chunk_lens: Tensor, chunk_offsets: Tensor) -> list[Span]:
    offsets = chunk_offsets.tolist()
    return list(zip(offsets, chunk_lens.tolist(), seq_lens.tolist(), strict=True))


def lasts(spans: list[Span]) -> list[int]:
    return [offset + length - 1 for offset, length, _ in spans]


def run(
    spans: list[Span],
    told: list[int],
    input_ids: Tensor,
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
    eps: Tensor,
    logits: Tensor,
) -> None:
    page_size, kv_heads, head_dim = k_cache.shape[2:]
    q_heads = wo.shape[2] // head_dim
    positions = torch.empty_like(input_ids)
    for offset, length, end in spans:
        positions[offset : offset + length] = torch.arange(end - length, end)
    cos, sin = (table[positions][:, None].to(embed.dtype) for table in (rope_cos, rope_sin))
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    hidden = embed[input_ids]
    for layer in range(k_cache.shape[0]):
        normed = rms_norm(hidden, input_norm[layer], eps)
        qkv = functional.linear(normed, wqkv[layer]).view(len(hidden), -1, head_dim)
        q, k, v = torch.split(qkv, [q_heads, kv_heads, kv_heads], dim=1)
        q = rotate(rms_norm(q, q_norm[layer], eps), cos, sin)
        k = rotate(rms_norm(k, k_norm[layer], eps), cos, sin)
        k_pool, v_pool = k_cache[layer].flatten(0, 1), v_cache[layer].flatten(0, 1)
        k_pool[slots] = k[written]
        v_pool[slots] = v[written]
        attended = torch.zeros_like(q)
        for row, (offset, length, end) in enumerate(spans):
            table = block_table[row]
            places = torch.arange(end)
            context = table[places // page_size].long() * page_size + places % page_size
            seen = places <= torch.arange(end - length, end)[:, None]
            own = slice(offset, offset + length)
            attended[own] = attend(q[own], k_pool[context], v_pool[context], seen)
        hidden = hidden + functional.linear(attended.flatten(1), wo[layer])
        normed = rms_norm(hidden, post_norm[layer], eps)
        gate, up = functional.linear(normed, w_gate_up[layer]).chunk(2, dim=1)
        hidden = hidden + functional.linear(functional.silu(gate) * up, w_down[layer])
    logits.copy_(functional.linear(rms_norm(hidden[told], final_norm, eps), lm_head))


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """[tokens, QH, D] over the places [S, KVH, D] that `seen` [tokens, S] allows."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k).float() * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(v.dtype)
    return torch.einsum("hts,shd->thd", weights, v)


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
