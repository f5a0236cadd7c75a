"""What the kernels are built for."""

from __future__ import annotations

BATCH_PAD = 4
MAX_SEQ = 64
BLOCK_SIZE = 8
REAL_VOCAB = 101
VOCAB = 128
NUM_LAYERS = 2
SAMPLED_IDS_PAD = 8
