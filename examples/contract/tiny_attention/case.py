"""What the conformance kit tests this contract with: a small model and weights of noise."""

from __future__ import annotations

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.conformance import ConformanceCase, SeededWeights

CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["TinyAttentionForCausalLM"],
        "model_type": "tiny-attention",
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "torch_dtype": "float32",
    },
    "a seeded tiny-attention model",
)
SHAPES = {"embed.weight": (61, 16), "positions.weight": (512, 16)}

CASE = ConformanceCase(CONFIG, weights=lambda: SeededWeights(SHAPES))
