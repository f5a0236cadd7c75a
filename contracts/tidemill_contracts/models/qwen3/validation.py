"""What the Qwen3 kernels cannot do, refused before they would compute it wrongly."""

from __future__ import annotations

from typing import Protocol

import torch

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import Quantization, RuntimeConfig
from tidemill_contracts.models.errors import ContractMismatch
from tidemill_contracts.models.qwen3.variants import Variant

DTYPES = (torch.bfloat16, torch.float32)
"""float16 overflows in Qwen's residual stream (huggingface/transformers#26869)."""

ROPE_TYPES = ("default", "yarn")

MAX_SLOTS = 2**31
"""Slots are int32."""


class Mismatch(Protocol):
    """Makes the error that names the contract; `ModelContract.mismatch` of the one at hand."""

    def __call__(
        self, field: str, *, found: object, expected: object, hint: str = ""
    ) -> ContractMismatch: ...


def validate_model(config: ModelConfig, variant: Variant, mismatch: Mismatch) -> None:
    """Refuses what the kernels would silently compute wrongly. Raises `ContractMismatch`."""
    if config.rope_type not in ROPE_TYPES:
        parameters = "".join(f", {name}={value}" for name, value in config.rope_scaling.items())
        raise mismatch(
            "rope_type",
            found=f"{config.rope_type!r}{parameters}",
            expected=" or ".join(map(repr, ROPE_TYPES)),
            hint="Other kinds of scaled RoPE are not supported yet; a config.json without it serves"
            " the model's original context.",
        )
    if "dual_chunk_attention_config" in config.extra:
        raise mismatch(
            "dual_chunk_attention_config",
            found="one",
            expected="none",
            hint="Dual chunk attention is not supported; without it in config.json the model"
            " serves its native context.",
        )
    if config.quantization is not None:
        method = config.quantization.get("quant_method", "unnamed")
        raise mismatch(
            "quantization_config",
            found=f"quant_method {method!r}",
            expected="none",
            hint="Quantised checkpoints are not supported yet; use the bfloat16 one, which"
            " --quantization int8 rounds while it loads.",
        )
    expected: dict[str, tuple[object, object]] = {
        "attention_bias": (config.attention_bias, False),
        "hidden_act": (config.hidden_act, "silu"),
        "sliding_window": (config.sliding_window, None),
    }
    if variant.kind == "dense":
        expected["num_experts"] = (config.num_experts, 0)
    else:
        expected["decoder_sparse_step"] = (config.decoder_sparse_step, 1)
        expected["mlp_only_layers"] = (config.mlp_only_layers, ())
    for field, (found, wanted) in expected.items():
        if found != wanted:
            raise mismatch(
                field,
                found=repr(found),
                expected=repr(wanted),
                hint=f"{config.describe()} is not a Qwen3 model as published.",
            )
    for field, size in variant.shape.items():
        if getattr(config, field) != size:
            raise mismatch(
                field,
                found=getattr(config, field),
                expected=size,
                hint="The contract is that of another size.",
            )
    if variant.kind == "moe":
        _validate_experts(config, mismatch)


def _validate_experts(config: ModelConfig, mismatch: Mismatch) -> None:
    for field in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        if getattr(config, field) < 1:
            raise mismatch(field, found=getattr(config, field), expected="at least 1")
    if config.num_experts_per_tok > config.num_experts:
        raise mismatch(
            "num_experts_per_tok",
            found=config.num_experts_per_tok,
            expected=f"at most num_experts, {config.num_experts}",
        )


def validate_runtime(
    config: ModelConfig,
    runtime: RuntimeConfig,
    quantization: Quantization | None,
    mismatch: Mismatch,
) -> None:
    """Refuses a run that the kernels cannot do. Raises `ContractMismatch`."""
    if runtime.dtype not in DTYPES:
        raise mismatch(
            "dtype",
            found=runtime.dtype,
            expected=" or ".join(map(str, DTYPES)),
            hint="Qwen3's activations overflow float16.",
        )
    if quantization is not None and runtime.device.type != "cpu":
        raise mismatch(
            "quantization",
            found=f"{quantization} on device {runtime.device}",
            expected="device cpu",
            hint="There are int8 kernels for the CPU only: leave --quantization out, or use"
            " --device cpu.",
        )
    if runtime.deterministic and runtime.device.type != "cpu":
        raise mismatch(
            "deterministic",
            found=f"device {runtime.device}",
            expected="device cpu",
            hint="That a row's bits do not depend on its batch is shown for the CPU's kernels"
            " only: leave --deterministic out, or use --device cpu.",
        )
    if not 0 < runtime.max_seq_len <= config.max_position_embeddings:
        raise mismatch(
            "max_seq_len",
            found=runtime.max_seq_len,
            expected=f"1 to {config.max_position_embeddings}",
            hint="The model's context is the longest row.",
        )
    for field in ("max_batch_size", "max_step_tokens", "page_size", "total_kv_pages"):
        if getattr(runtime, field) < 1:
            raise mismatch(field, found=getattr(runtime, field), expected="at least 1")
    if runtime.total_kv_pages * runtime.page_size > MAX_SLOTS:
        raise mismatch(
            "total_kv_pages",
            found=f"{runtime.total_kv_pages} pages of {runtime.page_size}",
            expected=f"at most {MAX_SLOTS} slots",
        )
