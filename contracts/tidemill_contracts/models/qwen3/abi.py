"""The arguments of the stages, in order, and the tuples that the worker passes.

Shape symbols: T packed tokens, B rows, R tokens to give logits for, PAGES columns of the block
table, P pages of the cache, PAGE tokens of a page, L layers, H hidden, QH and KVH heads, D head
size, V vocabulary, MAX_SEQ the longest row; QD is QH·D, QKV is (QH + 2·KVH)·D. I is the
intermediate size, of one expert where there are E of them, GU is 2·I; every token goes to K
experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from tidemill_contracts.models.args import TensorArgSpec
from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import (
    KVCache,
    Quantization,
    RuntimeConfig,
    StageInputs,
    StaticArgs,
)
from tidemill_contracts.models.qwen3.int8 import MATRICES, scale_of
from tidemill_contracts.models.qwen3.validation import Mismatch
from tidemill_contracts.models.qwen3.variants import Kind
from tidemill_contracts.models.qwen3.weights import PreparedWeights

Specs = tuple[TensorArgSpec, ...]

_ROWS: Specs = (
    TensorArgSpec("input_ids", "int32", ("T",)),
    TensorArgSpec("seq_lens", "int32", ("B",)),
)
_CHUNKS: Specs = (
    TensorArgSpec("chunk_lens", "int32", ("B",)),
    TensorArgSpec("chunk_offsets", "int32", ("B",)),
)
_PLACES: Specs = (
    TensorArgSpec("block_table", "int32", ("B", "PAGES")),
    TensorArgSpec("slot_mapping", "int32", ("T",)),
)
_ATTENTION: Specs = (
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
)
_FEED_FORWARD: Mapping[Kind, Specs] = MappingProxyType(
    {
        "dense": (
            TensorArgSpec("w_gate_up", "model", ("L", "GU", "H")),
            TensorArgSpec("w_down", "model", ("L", "H", "I")),
        ),
        "moe": (
            TensorArgSpec("router", "model", ("L", "E", "H")),
            TensorArgSpec("w_gate_up", "model", ("L", "E", "GU", "H")),
            TensorArgSpec("w_down", "model", ("L", "E", "H", "I")),
            TensorArgSpec("expert_ranks", "int32", ("K",)),
            TensorArgSpec("norm_topk", "int32", (1,)),
        ),
    }
)
_HEAD: Specs = (
    TensorArgSpec("final_norm", "model", ("H",)),
    TensorArgSpec("lm_head", "model", ("V", "H")),
    TensorArgSpec("rms_norm_eps", "fp32", (1,)),
)
_LOGITS: Specs = (TensorArgSpec("logits", "fp32", ("B", "V"), "out"),)
_LOGIT_ROWS: Specs = (TensorArgSpec("logit_rows", "int32", ("R",)),)


def model_specs(kind: Kind, quantization: Quantization | None = None) -> Specs:
    """What every stage takes besides the step's own inputs."""
    specs = (*_ATTENTION, *_FEED_FORWARD[kind], *_HEAD)
    if quantization is None:
        return specs
    return tuple(made for spec in specs for made in _quantized(spec))


def _quantized(spec: TensorArgSpec) -> Specs:
    """A matrix in int8 has a scale for each of its rows."""
    if spec.name not in MATRICES:
        return (spec,)
    return (
        TensorArgSpec(spec.name, "int8", spec.shape),
        TensorArgSpec(scale_of(spec.name), "fp32", spec.shape[:-1]),
    )


@dataclass(frozen=True, slots=True)
class StageAbi:
    """The arguments of one stage and who builds the tuples of them."""

    args: Specs
    mismatch: Mismatch

    def compile_args(self, config: ModelConfig, runtime: RuntimeConfig) -> tuple[Tensor, ...]:
        """Tensors of the largest step's shapes on the meta device: they hold no memory."""
        largest = {"T": runtime.max_step_tokens, "R": runtime.max_logit_rows}
        sizes = {**shape_sizes(config, runtime), **largest}
        return tuple(_meta(spec, sizes, runtime) for spec in self.args)

    def runtime_args(
        self, inputs: StageInputs, static: StaticArgs, cache: KVCache
    ) -> tuple[Tensor, ...]:
        """The tuple of one call, in the order of `args`. Raises `ContractMismatch`."""
        given = inputs.named()
        for spec in self.args:
            if given.get(spec.name, cache) is None:
                raise self.mismatch(spec.name, found=None, expected="a tensor")
        if not isinstance(static, PreparedWeights):
            raise self.mismatch(
                "static", found=type(static).__name__, expected="what prepare_weights returned"
            )
        tensors = {**given, **static.named(), "k_cache": cache.k, "v_cache": cache.v}
        return tuple(tensors[spec.name] for spec in self.args)  # type: ignore[misc]


def prefill_specs(model: Specs) -> Specs:
    return (*_ROWS, *_CHUNKS, *_PLACES, *model, *_LOGITS)


def score_specs(model: Specs) -> Specs:
    """As prefill, with logits of the tokens that are asked for."""
    logits = tuple(_renamed(spec, "B", "R") for spec in _LOGITS)
    return (*_ROWS, *_CHUNKS, *_LOGIT_ROWS, *_PLACES, *model, *logits)


def decode_specs(model: Specs) -> Specs:
    """In decode every row has one token: T is B."""
    specs = (*_ROWS, *_PLACES, *model, *_LOGITS)
    return tuple(_renamed(spec, "T", "B") for spec in specs)


def _renamed(spec: TensorArgSpec, old: str, new: str) -> TensorArgSpec:
    shape = tuple(new if size == old else size for size in spec.shape)
    return TensorArgSpec(spec.name, spec.dtype, shape, spec.direction)


def shape_sizes(config: ModelConfig, runtime: RuntimeConfig) -> dict[str, int]:
    """What the shape symbols stand for, T and R apart."""
    heads, kv_heads, head = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    inner = config.moe_intermediate_size if config.num_experts else config.intermediate_size
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
        "I": inner,
        "GU": 2 * inner,
        "V": config.vocab_size,
        "E": config.num_experts,
        "K": config.num_experts_per_tok,
    }


def weight_bytes(model: Specs, config: ModelConfig, runtime: RuntimeConfig) -> int:
    """Bytes of the prepared weights and tables; an embedding that is also the head counts once."""
    sizes = shape_sizes(config, runtime)
    dtypes = {spec.name: spec.dtype for spec in model}
    one = config.tie_word_embeddings and dtypes["lm_head"] == dtypes["embed"]
    skipped = {"k_cache", "v_cache"} | ({"lm_head"} if one else set())
    return sum(_meta(spec, sizes, runtime).nbytes for spec in model if spec.name not in skipped)


def cache_shape(config: ModelConfig, runtime: RuntimeConfig, pages: int) -> tuple[int, ...]:
    """[L, pages, PAGE, KVH, D], of K and of V alike."""
    return (
        config.num_hidden_layers,
        pages,
        runtime.page_size,
        config.num_key_value_heads,
        config.head_dim,
    )


def by_name(specs: Sequence[TensorArgSpec], args: Sequence[Tensor]) -> dict[str, Tensor]:
    """The arguments by their names."""
    return {spec.name: arg for spec, arg in zip(specs, args, strict=True)}


def _meta(spec: TensorArgSpec, sizes: Mapping[str, int], runtime: RuntimeConfig) -> Tensor:
    return torch.empty(
        tuple(size if isinstance(size, int) else sizes[size] for size in spec.shape),
        dtype=spec.torch_dtype(runtime.dtype),
        device="meta",
    )
