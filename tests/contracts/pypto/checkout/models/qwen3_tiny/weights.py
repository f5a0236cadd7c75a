"""Lays a model out for the kernels: projections transposed, layers stacked, vocabulary padded."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from constants import LIMITS

NORMS = ("input_rms_weight", "q_norm_weight", "k_norm_weight", "post_rms_weight")
PROJECTIONS = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")


def prepare_weights(runtime_model, tensor_exporter, *, padded_vocab=None, release_layers=True):
    vocab = padded_vocab or LIMITS["vocab"]
    head, embed = (
        tensor.to(torch.bfloat16) for tensor in (runtime_model.lm_head, runtime_model.embed_tokens)
    )
    head = torch.cat([head, head[:1].expand(vocab - len(head), -1)])
    embed = torch.cat([embed, torch.zeros(vocab - len(embed), embed.shape[1], dtype=embed.dtype)])
    stacked = {}
    for name in NORMS:
        rows = [getattr(layer, name).view(1, -1).float() for layer in runtime_model.layers]
        stacked[f"decode_{name}"] = torch.cat(rows)
    for name in PROJECTIONS:
        blocks = [getattr(layer, name).T.to(torch.bfloat16) for layer in runtime_model.layers]
        stacked[f"decode_{name}"] = torch.cat(blocks).contiguous()
    if release_layers:
        for layer in runtime_model.layers:
            for name in (*NORMS, *PROJECTIONS):
                setattr(layer, name, torch.empty(0))
    return SimpleNamespace(
        final_norm_weight=tensor_exporter(runtime_model.final_norm_weight.view(1, -1).float()),
        padded_lm_head_weight=tensor_exporter(head.contiguous()),
        padded_embed_weight=tensor_exporter(embed.contiguous()),
        decode_weights={name: tensor_exporter(tensor) for name, tensor in stacked.items()},
    )
