"""Whether a model runs on the C++ library."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import Quantization, RuntimeConfig
from tidemill_contracts.models.qwen3.native.layout import DEPTH, INT8_DEPTH, SPAN, STRIP
from tidemill_contracts.models.qwen3.native.library import Library, NoLibrary, library
from tidemill_contracts.models.qwen3.variants import Kind

logger = logging.getLogger("tidemill.contract")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What has to be a whole number of tiles."""

    hidden: int
    inner: int
    head_dim: int
    q_heads: int
    kv_heads: int
    vocabulary: int

    @classmethod
    def of(cls, config: ModelConfig) -> Sizes:
        return cls(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            head_dim=config.head_dim,
            q_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            vocabulary=config.vocab_size,
        )


def native_library(
    kind: Kind, quantization: Quantization | None, sizes: Sizes, runtime: RuntimeConfig
) -> Library | None:
    """The library where this model runs on it, ``None`` where it runs on plain torch."""
    if runtime.kernels == "torch":
        return None
    reason = obstacle(kind, quantization, sizes, runtime)
    if reason is None:
        try:
            return library()
        except NoLibrary as error:
            reason = str(error)
    if runtime.device.type == "cpu":
        _tell_once(reason)
    return None


def obstacle(
    kind: Kind, quantization: Quantization | None, sizes: Sizes, runtime: RuntimeConfig
) -> str | None:
    """What about the model or the run the library cannot do."""
    if runtime.device.type != "cpu":
        return f"it runs on the CPU, not on {runtime.device}"
    if kind != "dense":
        return "it has no experts"
    if runtime.dtype != torch.bfloat16:
        return "it computes in bfloat16"
    depth = DEPTH if quantization is None else INT8_DEPTH
    for name, size, unit in (
        ("hidden size", sizes.hidden, depth),
        ("intermediate size", sizes.inner, depth),
        ("head size", sizes.head_dim, DEPTH),
        ("size of all query heads", sizes.q_heads * sizes.head_dim, depth),
        ("vocabulary", sizes.vocabulary, STRIP),
        ("page size", runtime.page_size, SPAN),
    ):
        if size % unit:
            return f"the {name} of {size} is no multiple of {unit}"
    if sizes.q_heads > STRIP * sizes.kv_heads:
        return f"more than {STRIP} query heads share one head of K and V"
    return None


@cache
def _tell_once(reason: str) -> None:
    logger.info("the CPU kernels run in plain torch: %s", reason)
