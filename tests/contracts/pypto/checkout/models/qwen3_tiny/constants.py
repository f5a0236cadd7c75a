"""What the contract publishes."""

from __future__ import annotations

from types import SimpleNamespace

HIDDEN_FIRST = False
"""Whether prefill takes embeddings, as the first contracts did."""

MODEL = SimpleNamespace(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
LIMITS = {
    "batch": 4,
    "max_seq": 64,
    "page_size": 8,
    "num_layers": 2,
    "vocab": 128,
    "real_vocab": 101,
    "sampled_ids_pad": 8,
    "vocab_pad_multiple": 64,
}
