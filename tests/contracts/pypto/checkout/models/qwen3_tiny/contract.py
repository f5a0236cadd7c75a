"""A contract in the shape of pypto-lib's for Qwen3-14B, over a tiny model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pypto.language as pl
import torch
from constants import HIDDEN_FIRST, LIMITS, MODEL
from contract.base import (
    ContractRegistration,
    KernelSpec,
    LoadedKernelModules,
    ModelContract,
    ModelId,
    TensorArgSpec,
)
from weights import prepare_weights

FOLDER = Path(__file__).resolve().parent

prefill_fwd = decode_fwd = greedy_sample_fwd = None


def bind(*, prefill_fwd, decode_fwd, greedy_sample_fwd):
    globals().update(
        prefill_fwd=prefill_fwd, decode_fwd=decode_fwd, greedy_sample_fwd=greedy_sample_fwd
    )


def _args(text: str) -> tuple[TensorArgSpec, ...]:
    """One argument a line: name, dtype, shape, direction."""
    specs = []
    for line in filter(None, text.splitlines()):
        name, dtype, shape, *direction = line.split()
        sizes = tuple(int(s) if s.isdigit() else s for s in shape.strip("[]").split(","))
        specs.append(TensorArgSpec(name, dtype, sizes, *direction))
    return tuple(specs)


HIDDEN = "hidden_states bf16 [PREFILL_TOKENS,H]"
IDS = "input_ids int32 [PREFILL_TOKENS]"
HIDDEN = "hidden_states bf16 [PREFILL_TOKENS,H]"
IDS = "input_ids int32 [PREFILL_TOKENS]"
ROWS = """
seq_lens int32 [BATCH]
"""
LAYER = """
input_rms_weight fp32 [L,H]
wq bf16 [L*H,H]
wk bf16 [L*H,KVH]
wv bf16 [L*H,KVH]
q_norm_weight fp32 [L,D]
k_norm_weight fp32 [L,D]
"""
REST = """
wo bf16 [L*H,H]
w_gate bf16 [L*H,I]
w_up bf16 [L*H,I]
w_down bf16 [L*I,H]
post_rms_weight fp32 [L,H]
final_norm_weight fp32 [1,H]
lm_head_weight bf16 [VOCAB,H]
"""
ROPE = """
rope_cos fp32 [MAX_SEQ,D]
rope_sin fp32 [MAX_SEQ,D]
"""
CACHE = """
k_cache bf16 [KV_CACHE_ROWS,D] inout
v_cache bf16 [KV_CACHE_ROWS,D] inout
"""
OUT = """
out fp32 [BATCH,VOCAB] out
"""
EMBED = """
embed_weight bf16 [VOCAB,H]
"""
CHUNKS = """
chunk_lens int32 [BATCH]
chunk_offsets int32 [BATCH]
"""
TABLE = """
block_table int32 [BLOCK_TABLE_FLAT]
"""
PREFILL_ARGS = _args(
    (HIDDEN if HIDDEN_FIRST else IDS)
    + ROWS
    + CHUNKS
    + LAYER
    + ROPE
    + TABLE
    + "slot_mapping int32 [PREFILL_TOKENS]"
    + CACHE
    + REST
    + ("" if HIDDEN_FIRST else EMBED)
    + OUT
)
DECODE_ARGS = _args(
    LAYER
    + ROWS
    + TABLE
    + "slot_mapping int32 [BATCH]"
    + ROPE
    + CACHE
    + REST
    + OUT
    + EMBED
    + "sampled_ids_in int32 [BATCH,SAMPLED]\n"
    + "sampled_ids int32 [BATCH,SAMPLED] out\n"
    + "next_hidden bf16 [BATCH,H] out"
)
SAMPLE_ARGS = _args("logits fp32 [BATCH,VOCAB]\nsampled_ids int32 [BATCH,SAMPLED] out")

if HIDDEN_FIRST:

    @pl.jit.host
    def prefill_host(
        hidden_states, seq_lens, chunk_lens, chunk_offsets, input_rms_weight, wq, wk, wv,
        q_norm_weight, k_norm_weight, rope_cos, rope_sin, block_table, slot_mapping, k_cache,
        v_cache, wo, w_gate, w_up, w_down, post_rms_weight, final_norm_weight, lm_head_weight, out,
    ):  # fmt: skip
        prefill_fwd(
            hidden_states, seq_lens, chunk_lens, chunk_offsets, input_rms_weight, wq, wk, wv,
            q_norm_weight, k_norm_weight, rope_cos, rope_sin, block_table, slot_mapping, k_cache,
            v_cache, wo, post_rms_weight, w_gate, w_up, w_down, final_norm_weight, lm_head_weight,
            out,
        )  # fmt: skip

else:

    @pl.jit.host
    def prefill_host(
        input_ids, seq_lens, chunk_lens, chunk_offsets, input_rms_weight, wq, wk, wv,
        q_norm_weight, k_norm_weight, rope_cos, rope_sin, block_table, slot_mapping, k_cache,
        v_cache, wo, w_gate, w_up, w_down, post_rms_weight, final_norm_weight, lm_head_weight,
        embed_weight, out,
    ):  # fmt: skip
        prefill_fwd(
            input_ids, seq_lens, chunk_lens, chunk_offsets, input_rms_weight, wq, wk, wv,
            q_norm_weight, k_norm_weight, rope_cos, rope_sin, block_table, slot_mapping, k_cache,
            v_cache, wo, post_rms_weight, w_gate, w_up, w_down, final_norm_weight, lm_head_weight,
            embed_weight, out,
        )  # fmt: skip


@pl.jit.host
def decode_host(
    input_rms_weight, wq, wk, wv, q_norm_weight, k_norm_weight, seq_lens, block_table,
    slot_mapping, rope_cos, rope_sin, k_cache, v_cache, wo, w_gate, w_up, w_down, post_rms_weight,
    final_norm_weight, lm_head_weight, out, embed_weight, sampled_ids_in, sampled_ids, next_hidden,
):  # fmt: skip
    decode_fwd(
        input_rms_weight, wq, wk, wv, q_norm_weight, k_norm_weight, seq_lens, block_table,
        slot_mapping, rope_cos, rope_sin, k_cache, v_cache, wo, w_gate, w_up, w_down,
        post_rms_weight, final_norm_weight, lm_head_weight, out, embed_weight, sampled_ids_in,
        sampled_ids, next_hidden,
    )  # fmt: skip


@pl.jit.host
def sample_host(logits, sampled_ids):
    greedy_sample_fwd(logits, sampled_ids)


def _compile_args(specs):
    def build(model_config, runtime_config):
        batch, longest = runtime_config.max_batch_size, runtime_config.max_seq_len
        if batch > LIMITS["batch"]:
            raise ValueError(f"kernels require 1 <= max_batch_size <= {LIMITS['batch']}")
        blocks = -(-longest // runtime_config.page_size)
        layers, kv_heads = model_config.num_hidden_layers, model_config.num_key_value_heads
        sizes = {
            "BATCH": batch,
            "PREFILL_TOKENS": batch * longest,
            "MAX_SEQ": longest,
            "BLOCK_TABLE_FLAT": batch * blocks,
            "KV_CACHE_ROWS": batch * blocks * layers * kv_heads * runtime_config.page_size,
            "L": layers,
            "H": model_config.hidden_size,
            "L*H": layers * model_config.hidden_size,
            "I": model_config.intermediate_size,
            "L*I": layers * model_config.intermediate_size,
            "D": model_config.head_dim,
            "KVH": kv_heads * model_config.head_dim,
            "VOCAB": LIMITS["vocab"],
            "SAMPLED": LIMITS["sampled_ids_pad"],
        }
        dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "int32": torch.int32}
        return tuple(
            torch.empty([sizes.get(s, s) for s in spec.shape], dtype=dtypes[spec.dtype])
            for spec in specs
        )

    return build


def _weights(static, *names):
    return (static.decode_weights[f"decode_{name}"] for name in names)


def prefill_args(inputs, static, *, k_cache, v_cache, logits):
    return (
        inputs.hidden if HIDDEN_FIRST else inputs.token_ids,
        inputs.seq_lens,
        inputs.chunk_lens,
        inputs.chunk_offsets,
        *_weights(static, "input_rms_weight", "wq", "wk", "wv", "q_norm_weight", "k_norm_weight"),
        static.rope_cos,
        static.rope_sin,
        inputs.block_table,
        inputs.slot_mapping,
        k_cache,
        v_cache,
        *_weights(static, "wo", "w_gate", "w_up", "w_down", "post_rms_weight"),
        static.final_norm_weight,
        static.padded_lm_head_weight,
        *(() if HIDDEN_FIRST else (static.padded_embed_weight,)),
        logits,
    )


def decode_args(inputs, static, *, k_cache, v_cache, sampled_ids_buffer, next_hidden_buffer):
    return (
        *_weights(static, "input_rms_weight", "wq", "wk", "wv", "q_norm_weight", "k_norm_weight"),
        inputs.seq_lens,
        inputs.block_table,
        inputs.slot_mapping,
        static.rope_cos,
        static.rope_sin,
        k_cache,
        v_cache,
        *_weights(static, "wo", "w_gate", "w_up", "w_down", "post_rms_weight"),
        static.final_norm_weight,
        static.padded_lm_head_weight,
        inputs.logits,
        static.padded_embed_weight,
        inputs.token_ids,
        sampled_ids_buffer,
        next_hidden_buffer,
    )


def sample_args(inputs, static=None, *, sampled_ids_buffer):
    return (inputs.logits, sampled_ids_buffer)


def load_kernels() -> LoadedKernelModules:
    modules = {}
    for name in ("prefill_fwd", "decode_fwd", "greedy_sample"):
        spec = importlib.util.spec_from_file_location(f"_tiny_{name}", FOLDER / f"{name}.py")
        modules[name] = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(FOLDER))
        try:
            spec.loader.exec_module(modules[name])
        finally:
            sys.path.remove(str(FOLDER))
    config = sys.modules["config"]
    return LoadedKernelModules(
        functions={
            "prefill_fwd": modules["prefill_fwd"].prefill_fwd,
            "decode_fwd": modules["decode_fwd"].decode_fwd,
            "greedy_sample_fwd": modules["greedy_sample"].greedy_sample_fwd,
        },
        constants={
            "decode_batch_pad": config.BATCH_PAD,
            "decode_max_seq": config.MAX_SEQ,
            "decode_vocab": config.VOCAB,
            "decode_real_vocab": config.REAL_VOCAB,
        },
    )


def validate_kernels(contract, loaded, model) -> None:
    for name, constant in (("batch", "decode_batch_pad"), ("vocab", "decode_vocab")):
        actual, expected = loaded.constants[constant], contract.limits[name]
        if actual != expected:
            raise ValueError(f"{constant} mismatch: {actual} != {expected}.")
    if model.runtime.max_seq_len > loaded.constants["decode_max_seq"]:
        raise ValueError(f"max_model_len {model.runtime.max_seq_len} exceeds the kernel's MAX_SEQ")
    if model.runtime.vocab_pad_multiple != LIMITS["vocab_pad_multiple"]:
        raise ValueError("vocab_pad_multiple")


def matches(model_config: object) -> bool:
    return model_config.model_type == "qwen3" and all(
        getattr(model_config, name) == value for name, value in vars(MODEL).items()
    )


def get_tiny_contract() -> ModelContract:
    return ModelContract(
        schema_version="1",
        model=ModelId("qwen3", "tiny", "tiny", "bf16"),
        capabilities=("paged_kv", "chunked_prefill", "device_greedy_sampling", "device_embedding"),
        limits=dict(LIMITS),
        execution={"prefill": ("prefill",), "decode": ("decode",)},
        kernels={
            "prefill": KernelSpec(
                "prefill",
                "qwen3_tiny.prefill_fwd",
                PREFILL_ARGS,
                prefill_host,
                _compile_args(PREFILL_ARGS),
                prefill_args,
            ),
            "decode": KernelSpec(
                "decode",
                "qwen3_tiny.decode_fwd",
                DECODE_ARGS,
                decode_host,
                _compile_args(DECODE_ARGS),
                decode_args,
            ),
            "greedy_sample": KernelSpec(
                "greedy_sample",
                "qwen3_tiny.greedy_sample_fwd",
                SAMPLE_ARGS,
                sample_host,
                _compile_args(SAMPLE_ARGS),
                sample_args,
            ),
        },
        kernel_binder=bind,
        prepare_weights=prepare_weights,
        load_kernels=load_kernels,
        validate_kernels=validate_kernels,
    )


REGISTRATION = ContractRegistration("qwen3", "tiny", get_tiny_contract, matches)
