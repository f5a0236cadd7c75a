"""The contract ``qwen3/dense``: any dense Qwen3, its sizes read from the model's configuration.

Describes the two stages and checks what they cannot do; the arithmetic is in `kernels`, the
layout of the weights in `weights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tidemill_contracts.models.args import TensorArgSpec
from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import (
    CacheSpec,
    KernelSpec,
    KVCache,
    LoadedKernelModules,
    ModelContract,
    ModelId,
    RuntimeConfig,
    StageInputs,
    StaticArgs,
    TensorExporter,
    WeightSource,
)
from tidemill_contracts.models.eager import EagerHostFn
from tidemill_contracts.models.errors import ContractMismatch
from tidemill_contracts.models.qwen3.weights import PreparedWeights, prepare

# Shape symbols: T packed tokens, B rows, PAGES columns of the block table, P pages of the cache,
# PAGE tokens of a page, L layers, H hidden, QH and KVH heads, D head size, I intermediate,
# V vocabulary. QD is QH·D, QKV is (QH + 2·KVH)·D, GU is 2·I.

_ROWS = (
    TensorArgSpec("input_ids", "int32", ("T",)),
    TensorArgSpec("seq_lens", "int32", ("B",)),
)
_CHUNKS = (
    TensorArgSpec("chunk_lens", "int32", ("B",)),
    TensorArgSpec("chunk_offsets", "int32", ("B",)),
)
_PLACES = (
    TensorArgSpec("block_table", "int32", ("B", "PAGES")),
    TensorArgSpec("slot_mapping", "int32", ("T",)),
)
_MODEL = (
    TensorArgSpec("embed", "model", ("V", "H")),
    TensorArgSpec("input_norm", "model", ("L", "H")),
    TensorArgSpec("wqkv", "model", ("L", "QKV", "H")),
    TensorArgSpec("q_norm", "model", ("L", "D")),
    TensorArgSpec("k_norm", "model", ("L", "D")),
    TensorArgSpec("rope_cos", "fp32", ("MAX_SEQ", "D")),
    TensorArgSpec("rope_sin", "fp32", ("MAX_SEQ", "D")),
    TensorArgSpec("k_cache", "model", ("L", "P", "PAGE", "KVH", "D"), "inout"),
    TensorArgSpec("v_cache", "model", ("L", "P", "PAGE", "KVH", "D"), "inout"),
    TensorArgSpec("wo", "model", ("L", "H", "QD")),
    TensorArgSpec("post_norm", "model", ("L", "H")),
    TensorArgSpec("w_gate_up", "model", ("L", "GU", "H")),
    TensorArgSpec("w_down", "model", ("L", "H", "I")),
    TensorArgSpec("final_norm", "model", ("H",)),
    TensorArgSpec("lm_head", "model", ("V", "H")),
    TensorArgSpec("rms_norm_eps", "fp32", (1,)),
)
_LOGITS = (TensorArgSpec("logits", "fp32", ("B", "V"), "out"),)

PREFILL_ARGS = (*_ROWS, *_CHUNKS, *_PLACES, *_MODEL, *_LOGITS)
# In decode every row has one token: T is B.
DECODE_ARGS = tuple(
    TensorArgSpec(
        spec.name, spec.dtype, tuple("B" if s == "T" else s for s in spec.shape), spec.direction
    )
    for spec in (*_ROWS, *_PLACES, *_MODEL, *_LOGITS)
)

# float16 overflows in Qwen's residual stream (huggingface/transformers#26869).
DTYPES = (torch.bfloat16, torch.float32)

MAX_SLOTS = 2**31
"""Slots are int32."""


@cache
def dense_contract() -> ModelContract:
    """The contract of dense Qwen3 models."""
    prefill = EagerHostFn("qwen3.prefill")
    decode = EagerHostFn("qwen3.decode")
    return ModelContract(
        model=ModelId("qwen3", "dense"),
        capabilities=frozenset({"paged_kv", "chunked_prefill"}),
        limits={},
        execution={"prefill": ("prefill",), "decode": ("decode",)},
        kernels={
            "prefill": KernelSpec(
                name="prefill",
                public_name=prefill.public_name,
                args=PREFILL_ARGS,
                host_jit_fn=prefill,
                compile_args_builder=_prefill_compile_args,
                runtime_args_builder=_prefill_args,
            ),
            "decode": KernelSpec(
                name="decode",
                public_name=decode.public_name,
                args=DECODE_ARGS,
                host_jit_fn=decode,
                compile_args_builder=_decode_compile_args,
                runtime_args_builder=_decode_args,
            ),
        },
        hooks=DenseHooks({"prefill": prefill, "decode": decode}),
    )


@dataclass(frozen=True, slots=True)
class DenseHooks:
    """`ModelHooks` of dense Qwen3."""

    host_fns: dict[str, EagerHostFn]

    def load_kernels(self) -> LoadedKernelModules:
        from tidemill_contracts.models.qwen3 import kernels

        return LoadedKernelModules(
            functions={"prefill": kernels.prefill, "decode": kernels.decode}, constants={}
        )

    def bind(self, loaded: LoadedKernelModules) -> None:
        for name, host_fn in self.host_fns.items():
            host_fn.kernel = loaded.functions[name]

    def validate_kernels(
        self, loaded: LoadedKernelModules, config: ModelConfig, runtime: RuntimeConfig
    ) -> None:
        _validate_model(config)
        _validate_runtime(config, runtime)

    def cache_spec(self, config: ModelConfig, runtime: RuntimeConfig) -> CacheSpec:
        def shape(pages: int) -> tuple[int, ...]:
            return _cache_shape(config, runtime, pages)

        def allocate(pages: int) -> KVCache:
            k = torch.zeros(shape(pages), dtype=runtime.dtype, device=runtime.device)
            return KVCache(k=k, v=torch.zeros_like(k))

        page_elements = 2 * torch.Size(shape(1)).numel()
        return CacheSpec(
            page_size=runtime.page_size,
            bytes_per_page=page_elements * runtime.dtype.itemsize,
            allocate=allocate,
        )

    def logits_width(self, config: ModelConfig) -> int:
        return config.vocab_size

    def weight_bytes(self, config: ModelConfig, runtime: RuntimeConfig) -> int:
        sizes = _sizes(config, runtime)
        embedding = sizes["V"] * sizes["H"]
        layer = sizes["H"] * (sizes["QKV"] + sizes["QD"] + sizes["GU"] + sizes["I"] + 2)
        elements = (
            embedding * (1 if config.tie_word_embeddings else 2)
            + sizes["L"] * (layer + 2 * sizes["D"])
            + sizes["H"]
        )
        tables = 2 * sizes["MAX_SEQ"] * sizes["D"] + 1
        return elements * runtime.dtype.itemsize + tables * torch.float32.itemsize

    def prepare_weights(
        self,
        source: WeightSource,
        config: ModelConfig,
        runtime: RuntimeConfig,
        exporter: TensorExporter,
    ) -> StaticArgs:
        return prepare(source, config, runtime, exporter)


def _validate_model(config: ModelConfig) -> None:
    """Refuses what the kernels would silently compute wrongly."""
    if config.rope_type != "default":
        parameters = "".join(f", {name}={value}" for name, value in config.rope_scaling.items())
        raise _mismatch(
            "rope_type",
            found=f"{config.rope_type!r}{parameters}",
            expected="'default'",
            hint="Scaled RoPE (YaRN and others) is not supported yet; a config.json without it"
            " serves the model's original context.",
        )
    if config.quantization is not None:
        method = config.quantization.get("quant_method", "unnamed")
        raise _mismatch(
            "quantization_config",
            found=f"quant_method {method!r}",
            expected="none",
            hint="Quantised checkpoints are not supported yet; use the bfloat16 one.",
        )
    for field, found, expected in (
        ("attention_bias", config.attention_bias, False),
        ("hidden_act", config.hidden_act, "silu"),
        ("sliding_window", config.sliding_window, None),
        ("num_experts", config.num_experts, 0),
    ):
        if found != expected:
            raise _mismatch(
                field,
                found=repr(found),
                expected=repr(expected),
                hint=f"{config.describe()} is not a Qwen3 model as published.",
            )


def _validate_runtime(config: ModelConfig, runtime: RuntimeConfig) -> None:
    if runtime.dtype not in DTYPES:
        raise _mismatch(
            "dtype",
            found=runtime.dtype,
            expected=" or ".join(map(str, DTYPES)),
            hint="Qwen3's activations overflow float16.",
        )
    if not 0 < runtime.max_seq_len <= config.max_position_embeddings:
        raise _mismatch(
            "max_seq_len",
            found=runtime.max_seq_len,
            expected=f"1 to {config.max_position_embeddings}",
            hint="max_position_embeddings of the model is the longest row.",
        )
    for field in ("max_batch_size", "max_step_tokens", "page_size", "total_kv_pages"):
        if getattr(runtime, field) < 1:
            raise _mismatch(field, found=getattr(runtime, field), expected="at least 1")
    if runtime.total_kv_pages * runtime.page_size > MAX_SLOTS:
        raise _mismatch(
            "total_kv_pages",
            found=f"{runtime.total_kv_pages} pages of {runtime.page_size}",
            expected=f"at most {MAX_SLOTS} slots",
        )


def _mismatch(field: str, *, found: object, expected: object, hint: str = "") -> ContractMismatch:
    return dense_contract().mismatch(field, found=found, expected=expected, hint=hint)


def _cache_shape(config: ModelConfig, runtime: RuntimeConfig, pages: int) -> tuple[int, ...]:
    return (
        config.num_hidden_layers,
        pages,
        runtime.page_size,
        config.num_key_value_heads,
        config.head_dim,
    )


def _sizes(config: ModelConfig, runtime: RuntimeConfig) -> dict[str, int]:
    """What the shape symbols stand for, T apart."""
    heads, kv_heads, head = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    return {
        "B": runtime.max_batch_size,
        "PAGES": -(-runtime.max_seq_len // runtime.page_size),
        "P": runtime.total_kv_pages,
        "PAGE": runtime.page_size,
        "MAX_SEQ": runtime.max_seq_len,
        "L": config.num_hidden_layers,
        "H": config.hidden_size,
        "KVH": kv_heads,
        "D": head,
        "QD": heads * head,
        "QKV": (heads + 2 * kv_heads) * head,
        "I": config.intermediate_size,
        "GU": 2 * config.intermediate_size,
        "V": config.vocab_size,
    }


def _compile_args(
    specs: tuple[TensorArgSpec, ...], config: ModelConfig, runtime: RuntimeConfig, tokens: int
) -> tuple[Tensor, ...]:
    """Tensors of the largest step's shapes on the meta device: they hold no memory."""
    sizes = {**_sizes(config, runtime), "T": tokens}
    return tuple(
        torch.empty(
            tuple(size if isinstance(size, int) else sizes[size] for size in spec.shape),
            dtype=spec.torch_dtype(runtime.dtype),
            device="meta",
        )
        for spec in specs
    )


def _prefill_compile_args(config: ModelConfig, runtime: RuntimeConfig) -> tuple[Tensor, ...]:
    return _compile_args(PREFILL_ARGS, config, runtime, runtime.max_step_tokens)


def _decode_compile_args(config: ModelConfig, runtime: RuntimeConfig) -> tuple[Tensor, ...]:
    return _compile_args(DECODE_ARGS, config, runtime, runtime.max_batch_size)


def _prefill_args(inputs: StageInputs, static: StaticArgs, cache: KVCache) -> tuple[Tensor, ...]:
    if inputs.chunk_lens is None or inputs.chunk_offsets is None:
        raise _mismatch("chunk_lens, chunk_offsets", found=None, expected="tensors in prefill")
    return (
        inputs.input_ids,
        inputs.seq_lens,
        inputs.chunk_lens,
        inputs.chunk_offsets,
        inputs.block_table,
        inputs.slot_mapping,
        *_model_args(static, cache),
        inputs.logits,
    )


def _decode_args(inputs: StageInputs, static: StaticArgs, cache: KVCache) -> tuple[Tensor, ...]:
    return (
        inputs.input_ids,
        inputs.seq_lens,
        inputs.block_table,
        inputs.slot_mapping,
        *_model_args(static, cache),
        inputs.logits,
    )


def _model_args(static: StaticArgs, cache: KVCache) -> tuple[Tensor, ...]:
    """In the order of `_MODEL`."""
    if not isinstance(static, PreparedWeights):
        raise _mismatch(
            "static", found=type(static).__name__, expected="what prepare_weights returned"
        )
    return (
        static.embed,
        static.input_norm,
        static.wqkv,
        static.q_norm,
        static.k_norm,
        static.rope_cos,
        static.rope_sin,
        cache.k,
        cache.v,
        static.wo,
        static.post_norm,
        static.w_gate_up,
        static.w_down,
        static.final_norm,
        static.lm_head,
        static.rms_norm_eps,
    )
