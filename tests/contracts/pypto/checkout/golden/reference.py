"""The arithmetic of the kernels, imported by them when they run: the checkout's root must still be
importable then.

K and V lie in two flat pools; the row of (layer l, page p, offset o, head h) is
((l·P + p)·page + o)·heads + h.
"""

from __future__ import annotations

import os
import time

import torch
from torch.nn import functional

EPS = 1e-6

EXIT_TOKEN, HANG_TOKEN, RAISE_TOKEN = 98, 99, 100


def meet_faults(token_ids):
    """Tokens that are bad for the process that computes them, where faults are asked for."""
    if "STAND_IN_FAULTS" not in os.environ:
        return
    if (token_ids == EXIT_TOKEN).any():
        os.write(2, b"the kernel has met its end\n")
        os._exit(7)
    if (token_ids == HANG_TOKEN).any():
        time.sleep(3600)
    if (token_ids == RAISE_TOKEN).any():
        raise RuntimeError("the kernel has met a token that it cannot bear")


def forward(
    hidden, positions, slots, rows, block_table, input_rms_weight, wq, wk, wv, q_norm_weight,
    k_norm_weight, rope_cos, rope_sin, k_cache, v_cache, wo, post_rms_weight, w_gate, w_up, w_down,
    page,
):  # fmt: skip
    """The residual stream after the last layer; `rows` are (first token, tokens, length after)."""
    # Like the kernels on the device, it does not guard against slots that say "do not write".
    assert int(slots.min()) >= 0
    layers, head_dim = q_norm_weight.shape
    width, inner, kv_width = wq.shape[1], w_gate.shape[1], wk.shape[1]
    kv_heads = kv_width // head_dim
    k_pool, v_pool = (pool.view(layers, -1, kv_heads, head_dim) for pool in (k_cache, v_cache))
    assert int(slots.max()) < k_pool.shape[1]
    cos, sin = (table[positions].to(hidden.dtype).unsqueeze(1) for table in (rope_cos, rope_sin))
    table = block_table.view(len(rows), -1)
    for layer in range(layers):
        block = slice(layer * width, (layer + 1) * width)
        x = rms_norm(hidden, input_rms_weight[layer])
        q, k, v = ((x @ weight[block]).view(len(x), -1, head_dim) for weight in (wq, wk, wv))
        q = rotate(rms_norm(q, q_norm_weight[layer]), cos, sin)
        k_pool[layer][slots] = rotate(rms_norm(k, k_norm_weight[layer]), cos, sin)
        v_pool[layer][slots] = v
        attended = torch.zeros_like(q)
        for number, (first, count, length) in enumerate(rows):
            if not count:
                continue
            places = torch.arange(length)
            context = table[number][places // page].long() * page + places % page
            mine = slice(first, first + count)
            attended[mine] = attend(
                q[mine],
                k_pool[layer][context],
                v_pool[layer][context],
                places <= places[length - count :, None],
            )
        hidden = hidden + attended.flatten(1) @ wo[block]
        x = rms_norm(hidden, post_rms_weight[layer])
        down = w_down[layer * inner : (layer + 1) * inner]
        hidden = hidden + (functional.silu(x @ w_gate[block]) * (x @ w_up[block])) @ down
    return hidden


def attend(q, k, v, mask):
    def by_head(x):
        return x.transpose(0, 1).unsqueeze(0)

    out = functional.scaled_dot_product_attention(
        by_head(q), by_head(k), by_head(v), attn_mask=mask, enable_gqa=True
    )
    return out.squeeze(0).transpose(0, 1)


def rms_norm(x, weight):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return weight.to(x.dtype) * wide.to(x.dtype)


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def head(hidden, final_norm_weight, lm_head_weight):
    return (rms_norm(hidden, final_norm_weight.view(-1)) @ lm_head_weight.T).float()
