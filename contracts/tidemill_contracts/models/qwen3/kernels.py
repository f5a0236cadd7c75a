"""The Qwen3 stages: one transformer, run over the operations of a device.

Sizes are read from the tensors' shapes. L layers, H hidden size, D head size, QH query heads,
KVH K/V heads, P pages, V vocabulary; T packed tokens of B rows. q and k are normed per head
before RoPE; K is stored after both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tidemill_contracts.models.qwen3 import experts
from tidemill_contracts.models.qwen3.int8 import Matrix, linear
from tidemill_contracts.models.qwen3.ops import Ops
from tidemill_contracts.models.qwen3.step import Step

FeedForward = Callable[[Ops, int, Tensor], Tensor]
"""Of one layer, by its number: [T, H] to [T, H]."""


def dense_score(
    ops: Ops,
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
    """Runs one chunk of each row; ``logits[i]`` are those of packed token ``logit_rows[i]``.

    Earlier chunks are read from the cache, so chunked and whole prefill are one code path.
    """
    step = Step(seq_lens, block_table, slot_mapping, chunk_lens, chunk_offsets, logit_rows)
    model = Transformer(
        embed, input_norm, wqkv, q_norm, k_norm, rope_cos, rope_sin, wo, post_norm,
        dense(w_gate_up, w_down), final_norm, lm_head, rms_norm_eps,
    )  # fmt: skip
    model.run(ops, step, input_ids, k_cache, v_cache, logits)


def dense_prefill(
    ops: Ops,
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
    """`dense_score` whose ``logits[b]`` are those of row b's last token."""
    dense_score(
        ops, input_ids, seq_lens, chunk_lens, chunk_offsets, chunk_offsets + chunk_lens - 1,
        block_table, slot_mapping, embed, input_norm, wqkv, q_norm, k_norm, rope_cos, rope_sin,
        k_cache, v_cache, wo, post_norm, w_gate_up, w_down, final_norm, lm_head, rms_norm_eps,
        logits,
    )  # fmt: skip


def dense_decode(
    ops: Ops,
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
    """Runs one token of each row."""
    model = Transformer(
        embed, input_norm, wqkv, q_norm, k_norm, rope_cos, rope_sin, wo, post_norm,
        dense(w_gate_up, w_down), final_norm, lm_head, rms_norm_eps,
    )  # fmt: skip
    step = Step(seq_lens, block_table, slot_mapping)
    model.run(ops, step, input_ids, k_cache, v_cache, logits)


def moe_score(
    ops: Ops,
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
    router: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    expert_ranks: Tensor,
    norm_topk: Tensor,
    final_norm: Tensor,
    lm_head: Tensor,
    rms_norm_eps: Tensor,
    logits: Tensor,
) -> None:
    """`dense_score` with experts."""
    step = Step(seq_lens, block_table, slot_mapping, chunk_lens, chunk_offsets, logit_rows)
    model = Transformer(
        embed, input_norm, wqkv, q_norm, k_norm, rope_cos, rope_sin, wo, post_norm,
        mixture(router, w_gate_up, w_down, expert_ranks, norm_topk), final_norm, lm_head,
        rms_norm_eps,
    )  # fmt: skip
    model.run(ops, step, input_ids, k_cache, v_cache, logits)


def moe_prefill(
    ops: Ops,
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
    router: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    expert_ranks: Tensor,
    norm_topk: Tensor,
    final_norm: Tensor,
    lm_head: Tensor,
    rms_norm_eps: Tensor,
    logits: Tensor,
) -> None:
    """`dense_prefill` with experts."""
    moe_score(
        ops, input_ids, seq_lens, chunk_lens, chunk_offsets, chunk_offsets + chunk_lens - 1,
        block_table, slot_mapping, embed, input_norm, wqkv, q_norm, k_norm, rope_cos, rope_sin,
        k_cache, v_cache, wo, post_norm, router, w_gate_up, w_down, expert_ranks, norm_topk,
        final_norm, lm_head, rms_norm_eps, logits,
    )  # fmt: skip


def moe_decode(
    ops: Ops,
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
    router: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    expert_ranks: Tensor,
    norm_topk: Tensor,
    final_norm: Tensor,
    lm_head: Tensor,
    rms_norm_eps: Tensor,
    logits: Tensor,
) -> None:
    """`dense_decode` with experts."""
    model = Transformer(
        embed, input_norm, wqkv, q_norm, k_norm, rope_cos, rope_sin, wo, post_norm,
        mixture(router, w_gate_up, w_down, expert_ranks, norm_topk), final_norm, lm_head,
        rms_norm_eps,
    )  # fmt: skip
    step = Step(seq_lens, block_table, slot_mapping)
    model.run(ops, step, input_ids, k_cache, v_cache, logits)


def dense(w_gate_up: Matrix, w_down: Matrix) -> FeedForward:
    def feed_forward(ops: Ops, layer: int, x: Tensor) -> Tensor:
        inner = ops.silu_and_mul(linear(ops, x, w_gate_up[layer]))
        return linear(ops, inner, w_down[layer])

    return feed_forward


def mixture(
    router: Tensor, w_gate_up: Tensor, w_down: Tensor, expert_ranks: Tensor, norm_topk: Tensor
) -> FeedForward:
    def feed_forward(ops: Ops, layer: int, x: Tensor) -> Tensor:
        return experts.mix(
            ops, x, router[layer], w_gate_up[layer], w_down[layer], expert_ranks, norm_topk
        )

    return feed_forward


@dataclass(frozen=True, slots=True)
class Transformer:
    """The weights of a model, as `PreparedWeights` lays them out."""

    embed: Tensor
    input_norm: Tensor
    wqkv: Matrix
    q_norm: Tensor
    k_norm: Tensor
    rope_cos: Tensor
    rope_sin: Tensor
    wo: Matrix
    post_norm: Tensor
    feed_forward: FeedForward
    final_norm: Tensor
    lm_head: Matrix
    rms_norm_eps: Tensor

    def run(
        self,
        ops: Ops,
        step: Step,
        input_ids: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        logits: Tensor,
    ) -> None:
        """Writes K and V of all tokens, and the float32 logits of those that the step names."""
        hidden = self.hidden(ops, step, input_ids, k_cache, v_cache)
        if step.logit_rows is not None:
            hidden = hidden.index_select(0, step.logit_rows)
        normed = ops.rms_norm(hidden, self.final_norm, self.rms_norm_eps)
        logits.copy_(linear(ops, normed, self.lm_head))

    def hidden(
        self, ops: Ops, step: Step, input_ids: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """The residual stream [T, H] after the last layer; writes K and V of all tokens."""
        layers, _, _, kv_heads, head_dim = k_cache.shape
        q_heads = self.wo.shape[2] // head_dim
        eps = self.rms_norm_eps
        attention = ops.plan(step, k_cache, q_heads)
        positions = step.positions()
        hidden = functional.embedding(input_ids, self.embed)
        # [T, 1, D], so that all heads of a token turn alike.
        cos = self.rope_cos.index_select(0, positions).to(hidden.dtype).unsqueeze(1)
        sin = self.rope_sin.index_select(0, positions).to(hidden.dtype).unsqueeze(1)

        for layer in range(layers):
            normed = ops.rms_norm(hidden, self.input_norm[layer], eps)
            qkv = linear(ops, normed, self.wqkv[layer]).view(len(hidden), -1, head_dim)
            q, k, v = torch.split(qkv, [q_heads, kv_heads, kv_heads], dim=1)
            q = ops.rotate(ops.rms_norm(q, self.q_norm[layer], eps), cos, sin)
            k = ops.rotate(ops.rms_norm(k, self.k_norm[layer], eps), cos, sin)
            k_pages, v_pages = k_cache[layer], v_cache[layer]
            attention.write(k, v, k_pages, v_pages)
            attended = attention.attend(q, k_pages, v_pages)
            hidden = hidden + linear(ops, attended.flatten(1), self.wo[layer])

            normed = ops.rms_norm(hidden, self.post_norm[layer], eps)
            hidden = hidden + self.feed_forward(ops, layer, normed)
        return hidden
