from __future__ import annotations

import pypto.language as pl
import torch
from config import BLOCK_SIZE
from constants import HIDDEN_FIRST

if HIDDEN_FIRST:

    @pl.jit
    def prefill_fwd(
        hidden_states, seq_lens, chunk_lens, chunk_offsets, input_rms_weight, wq, wk, wv,
        q_norm_weight, k_norm_weight, rope_cos, rope_sin, block_table, slot_mapping, k_cache,
        v_cache, wo, post_rms_weight, w_gate, w_up, w_down, final_norm_weight, lm_head_weight, out,
    ):  # fmt: skip
        _prefill(
            hidden_states, seq_lens, chunk_lens, chunk_offsets, input_rms_weight, wq, wk, wv,
            q_norm_weight, k_norm_weight, rope_cos, rope_sin, block_table, slot_mapping, k_cache,
            v_cache, wo, post_rms_weight, w_gate, w_up, w_down, final_norm_weight, lm_head_weight,
            out,
        )  # fmt: skip

else:

    @pl.jit
    def prefill_fwd(
        input_ids, seq_lens, chunk_lens, chunk_offsets, input_rms_weight, wq, wk, wv,
        q_norm_weight, k_norm_weight, rope_cos, rope_sin, block_table, slot_mapping, k_cache,
        v_cache, wo, post_rms_weight, w_gate, w_up, w_down, final_norm_weight, lm_head_weight,
        embed_weight, out,
    ):  # fmt: skip
        from golden.reference import meet_faults

        meet_faults(input_ids)
        _prefill(
            embed_weight[input_ids], seq_lens, chunk_lens, chunk_offsets, input_rms_weight, wq, wk,
            wv, q_norm_weight, k_norm_weight, rope_cos, rope_sin, block_table, slot_mapping,
            k_cache, v_cache, wo, post_rms_weight, w_gate, w_up, w_down, final_norm_weight,
            lm_head_weight, out,
        )  # fmt: skip


def _prefill(
    hidden, seq_lens, chunk_lens, chunk_offsets, input_rms_weight, wq, wk, wv, q_norm_weight,
    k_norm_weight, rope_cos, rope_sin, block_table, slot_mapping, k_cache, v_cache, wo,
    post_rms_weight, w_gate, w_up, w_down, final_norm_weight, lm_head_weight, out,
):  # fmt: skip
    from golden.reference import forward, head

    assert len(hidden) == int(chunk_lens.sum())
    rows = list(zip(chunk_offsets.tolist(), chunk_lens.tolist(), seq_lens.tolist(), strict=True))
    positions = torch.cat([torch.arange(end - count, end) for _, count, end in rows])
    hidden = forward(
        hidden, positions, slot_mapping, rows, block_table, input_rms_weight, wq, wk, wv,
        q_norm_weight, k_norm_weight, rope_cos, rope_sin, k_cache, v_cache, wo, post_rms_weight,
        w_gate, w_up, w_down, BLOCK_SIZE,
    )  # fmt: skip
    # What rows without tokens get is nobody's business.
    last = [first + count - 1 if count else 0 for first, count, _ in rows]
    out.copy_(head(hidden[last], final_norm_weight, lm_head_weight))
