"""A layer's mixture of experts: every token goes to the few experts that its router likes best.

Numerics are those of Hugging Face's ``modeling_qwen3_moe``: the router's softmax in float32, its
weights cast to the model's dtype. The experts' outputs of a token are added up in its own order
of preference, so that they do not depend on its neighbours. T tokens, H hidden size, I
intermediate size of one expert, E experts, of which a token goes to K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill_contracts.models.qwen3.ops import Ops


def route(
    ops: Ops, x: Tensor, router: Tensor, expert_ranks: Tensor, norm_topk: Tensor
) -> tuple[Tensor, Tensor]:
    """Each token's experts, best first: weights of x's dtype and ids, int64, both [T, K].

    x [T, H]; router [E, H]; of `expert_ranks` only the length K is read.
    """
    chances = ops.linear(x, router).softmax(-1, dtype=torch.float32)
    best, experts = chances.topk(len(expert_ranks), dim=-1)
    scaled = best / best.sum(-1, keepdim=True)
    return best.where(norm_topk == 0, scaled).to(x.dtype), experts


def mix(
    ops: Ops,
    x: Tensor,
    router: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    expert_ranks: Tensor,
    norm_topk: Tensor,
) -> Tensor:
    """[T, H]: the weighted sum of each token's experts.

    x [T, H]; router [E, H]; w_gate_up [E, 2·I, H]; w_down [E, H, I]. Tokens are sorted by expert,
    so that each expert's weight is read once, for all of its tokens.
    """
    weights, experts = route(ops, x, router, expert_ranks, norm_topk)
    per_token = experts.shape[1]
    by_expert, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(len(router), device=x.device)
    ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
    inner = ops.silu_and_mul(
        ops.grouped_linear(x.index_select(0, order // per_token), w_gate_up, ends)
    )
    out = ops.grouped_linear(inner, w_down, ends)
    out = torch.empty_like(out).index_copy_(0, order, out).view(len(x), per_token, -1)
    return ops.weighted_sum(out, weights)
