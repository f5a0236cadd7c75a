from __future__ import annotations

import pypto.language as pl
from config import REAL_VOCAB


@pl.jit
def greedy_sample_fwd(logits, sampled_ids):
    sampled_ids.zero_()
    sampled_ids[:, 0] = logits[:, :REAL_VOCAB].argmax(1)
