"""Which Qwen3 models there are: the published shapes by size, and how a configuration is told
to be one of them. A model is told by the fields of its shape alone, never by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import Quantization

Kind = Literal["dense", "moe"]

MODEL_TYPES: Mapping[Kind, str] = MappingProxyType({"dense": "qwen3", "moe": "qwen3_moe"})
ARCHITECTURES: Mapping[Kind, str] = MappingProxyType(
    {"dense": "Qwen3ForCausalLM", "moe": "Qwen3MoeForCausalLM"}
)

VOCAB = 151_936
HEAD_DIM = 128


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """One contract of the family, compared by identity."""

    name: str
    kind: Kind
    shape: Mapping[str, int]
    """The fields of `ModelConfig` that make a model one of this size; empty for any shape."""
    quantization: Quantization | None = None

    def matches(self, config: ModelConfig) -> bool:
        return (
            config.model_type == MODEL_TYPES[self.kind]
            and ARCHITECTURES[self.kind] in config.architectures
            and all(getattr(config, field) == size for field, size in self.shape.items())
        )

    @property
    def limits(self) -> dict[str, int]:
        """The shape as the limits of a contract."""
        if not self.shape:
            return {}
        renamed = {"num_hidden_layers": "num_layers", "vocab_size": "real_vocab"}
        limits = {renamed.get(field, field): size for field, size in self.shape.items()}
        return {**limits, "vocab": self.shape["vocab_size"]}


def _sized(
    name: str, hidden: int, layers: int, heads: int, kv_heads: int, kind: Kind, **shape: int
) -> Variant:
    return Variant(
        name,
        kind,
        MappingProxyType(
            {
                "num_hidden_layers": layers,
                "hidden_size": hidden,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "head_dim": HEAD_DIM,
                "vocab_size": VOCAB,
                **shape,
            }
        ),
    )


def _dense(
    name: str, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int
) -> Variant:
    return _sized(name, hidden, layers, heads, kv_heads, "dense", intermediate_size=intermediate)


def _moe(name: str, hidden: int, layers: int, heads: int, kv_heads: int, expert: int) -> Variant:
    """Of 128 experts, of which each token goes to 8. ``intermediate_size`` is no part of the
    shape: no layer of these models is dense."""
    return _sized(
        name,
        hidden,
        layers,
        heads,
        kv_heads,
        "moe",
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=expert,
    )


# Shapes: the config.json of https://huggingface.co/Qwen. The most specific come first; the last
# two serve what no size matches (demo models, Qwen3-Embedding's vocabulary, pruned models).
VARIANTS: tuple[Variant, ...] = (
    _dense("0.6b", 1024, 28, 16, 8, 3072),
    _dense("1.7b", 2048, 28, 16, 8, 6144),
    _dense("4b", 2560, 36, 32, 8, 9728),
    _dense("8b", 4096, 36, 32, 8, 12288),
    _dense("14b", 5120, 40, 40, 8, 17408),
    _dense("32b", 5120, 64, 64, 8, 25600),
    _moe("30b-a3b", 2048, 48, 32, 4, 768),
    _moe("235b-a22b", 4096, 94, 64, 4, 1536),
    Variant("dense", "dense", MappingProxyType({})),
    Variant("moe", "moe", MappingProxyType({})),
)

QUANTIZED: tuple[Variant, ...] = tuple(
    replace(variant, name=f"{variant.name}-int8", quantization="int8")
    for variant in VARIANTS
    if variant.kind == "dense"
)
"""The same with their matrices in int8."""
