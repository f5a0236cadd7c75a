"""The angles of RoPE, plain and stretched by YaRN, as tables of cos and sin."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tidemill_contracts.models.config import ModelConfig

BETA_FAST, BETA_SLOW = 32.0, 1.0
"""YaRN's own defaults for Llama-like models (arXiv 2309.00071, section 3.2)."""


def rope_tables(config: ModelConfig, max_seq_len: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, float32 [max_seq_len, D], both halves alike.

    Position p turns pair i by p · theta^(−2i/D) (RoFormer, arXiv 2104.09864); the pairs are
    dimension i and i + D/2, as in GPT-NeoX. YaRN stretches the slow pairs and scales both tables.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    periods = config.rope_theta**exponents
    frequencies, scale = 1.0 / periods, 1.0
    if config.rope_type == "yarn":
        stretched = 1.0 / (_number(config.rope_scaling, "factor", 1.0) * periods)
        kept = _kept(config)
        frequencies = stretched * (1 - kept) + frequencies * kept
        scale = _attention_factor(config.rope_scaling)
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scale == 1.0 else (cos.mul_(scale), sin.mul_(scale))


def _kept(config: ModelConfig) -> Tensor:
    """How much of each pair's frequency stays as it was, float32 [D/2] from 1 to 0.

    A pair that turns more than `beta_fast` times over the original context is left alone, one
    that turns less than `beta_slow` times is stretched by the whole factor, with a ramp over the
    pairs between (arXiv 2309.00071, section 3.2, "NTK-by-parts").
    """
    scaling, half = config.rope_scaling, config.head_dim // 2
    original = _number(scaling, "original_max_position_embeddings", 0.0)

    def pair(turns: float) -> float:
        """The pair, as a real number, that turns so often over the original context."""
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(config.rope_theta)

    first = pair(_number(scaling, "beta_fast", BETA_FAST))
    last = pair(_number(scaling, "beta_slow", BETA_SLOW))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    # A ramp of no width becomes a step, as in transformers.
    width = last - first if last != first else 0.001
    ramp = (torch.arange(half, dtype=torch.float32) - first) / width
    return 1 - ramp.clamp(0, 1)


def _attention_factor(scaling: Mapping[str, object]) -> float:
    """What sharpens attention over the longer context: 0.1 · ln(factor) + 1 on q and k alike
    (arXiv 2309.00071, section 3.4), or the ratio of two such terms where both mscales are given,
    or the number that the configuration states."""
    if "attention_factor" in scaling:
        return _number(scaling, "attention_factor", 1.0)
    log_factor = math.log(_number(scaling, "factor", 1.0))

    def term(mscale: float) -> float:
        return 0.1 * mscale * log_factor + 1.0

    if "mscale" in scaling and "mscale_all_dim" in scaling:
        mscale = _number(scaling, "mscale", 1.0)
        return term(mscale) / term(_number(scaling, "mscale_all_dim", 1.0))
    return term(1.0)


def _number(scaling: Mapping[str, object], name: str, default: float) -> float:
    """A parameter that `ModelConfig` has checked."""
    value = scaling.get(name, default)
    assert isinstance(value, int | float)
    return float(value)
