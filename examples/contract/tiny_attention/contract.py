"""The contract: what the kernels take, in which order, and how weights and cache are laid out."""

from __future__ import annotations

from collections.abc import Mapping
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

# Shape symbols: T packed tokens, B rows, PAGES columns of the block table (these three change from
# call to call), P pages of PAGE tokens, H hidden size, V vocabulary, N positions.
PREFILL_ARGS = (
    TensorArgSpec("input_ids", "int32", ("T",)),
    TensorArgSpec("seq_lens", "int32", ("B",)),
    TensorArgSpec("chunk_lens", "int32", ("B",)),
    TensorArgSpec("chunk_offsets", "int32", ("B",)),
    TensorArgSpec("block_table", "int32", ("B", "PAGES")),
    TensorArgSpec("slot_mapping", "int32", ("T",)),
    TensorArgSpec("embed", "model", ("V", "H")),
    TensorArgSpec("positions", "model", ("N", "H")),
    TensorArgSpec("k_cache", "model", ("P", "PAGE", "H"), "inout"),
    TensorArgSpec("v_cache", "model", ("P", "PAGE", "H"), "inout"),
    TensorArgSpec("logits", "fp32", ("B", "V"), "out"),
)
DECODE_ARGS = (
    TensorArgSpec("input_ids", "int32", ("B",)),
    TensorArgSpec("seq_lens", "int32", ("B",)),
    TensorArgSpec("block_table", "int32", ("B", "PAGES")),
    TensorArgSpec("slot_mapping", "int32", ("B",)),
    *PREFILL_ARGS[6:],
)


@dataclass(frozen=True, slots=True)
class Weights:
    """`StaticArgs`: what `prepare_weights` returns and the builders pass on."""

    embed: Tensor
    positions: Tensor

    @property
    def nbytes(self) -> int:
        return self.embed.nbytes + self.positions.nbytes

    def named(self) -> Mapping[str, Tensor]:
        return {"embed": self.embed, "positions": self.positions}


@dataclass(frozen=True, slots=True)
class Hooks:
    """`ModelHooks`."""

    host_fns: Mapping[str, EagerHostFn]

    def load_kernels(self) -> LoadedKernelModules:
        from tiny_attention import kernels

        return LoadedKernelModules(
            functions={"prefill": kernels.prefill, "decode": kernels.decode}, constants={}
        )

    def bind(self, loaded: LoadedKernelModules) -> None:
        for name, host_fn in self.host_fns.items():
            host_fn.kernel = loaded.functions[name]

    def validate_kernels(
        self, loaded: LoadedKernelModules, config: ModelConfig, runtime: RuntimeConfig
    ) -> None:
        if config.num_hidden_layers != 1:
            raise tiny_contract().mismatch(
                "num_hidden_layers",
                found=config.num_hidden_layers,
                expected=1,
                hint="These kernels have one layer.",
            )

    def cache_spec(self, config: ModelConfig, runtime: RuntimeConfig) -> CacheSpec:
        def allocate(pages: int) -> KVCache:
            shape = (pages, runtime.page_size, config.hidden_size)
            k = torch.zeros(shape, dtype=runtime.dtype, device=runtime.device)
            return KVCache(k=k, v=torch.zeros_like(k))

        elements = 2 * runtime.page_size * config.hidden_size
        return CacheSpec(runtime.page_size, elements * runtime.dtype.itemsize, allocate)

    def logits_width(self, config: ModelConfig) -> int:
        return config.vocab_size

    def weight_bytes(self, config: ModelConfig, runtime: RuntimeConfig) -> int:
        rows = config.vocab_size + config.max_position_embeddings
        return rows * config.hidden_size * runtime.dtype.itemsize

    def prepare_weights(
        self,
        source: WeightSource,
        config: ModelConfig,
        runtime: RuntimeConfig,
        exporter: TensorExporter,
    ) -> StaticArgs:
        def take(name: str, rows: int) -> Tensor:
            tensor = source.take(name, (rows, config.hidden_size))
            return exporter(tensor.to(runtime.dtype))

        weights = Weights(
            embed=take("embed.weight", config.vocab_size),
            positions=take("positions.weight", config.max_position_embeddings),
        )
        source.finish()
        return weights


def _compile_args(
    specs: tuple[TensorArgSpec, ...], config: ModelConfig, runtime: RuntimeConfig
) -> tuple[Tensor, ...]:
    """The largest step, on the meta device: shapes and dtypes without memory."""
    sizes = {
        "T": runtime.max_step_tokens,
        "B": runtime.max_batch_size,
        "PAGES": -(-runtime.max_seq_len // runtime.page_size),
        "P": runtime.total_kv_pages,
        "PAGE": runtime.page_size,
        "H": config.hidden_size,
        "V": config.vocab_size,
        "N": config.max_position_embeddings,
    }
    return tuple(
        torch.empty(
            [sizes[str(symbol)] for symbol in spec.shape],
            dtype=spec.torch_dtype(runtime.dtype),
            device="meta",
        )
        for spec in specs
    )


def _runtime_args(
    specs: tuple[TensorArgSpec, ...], inputs: StageInputs, static: StaticArgs, cache: KVCache
) -> tuple[Tensor, ...]:
    """The tensors of one call by their names, in the order of the stage."""
    named = {
        **inputs.named(),
        **static.named(),
        "k_cache": cache.k,
        "v_cache": cache.v,
    }
    tensors = [named[spec.name] for spec in specs]
    return tuple(tensor for tensor in tensors if tensor is not None)


def _stage(
    name: str, specs: tuple[TensorArgSpec, ...], host_fns: Mapping[str, EagerHostFn]
) -> KernelSpec:
    return KernelSpec(
        name=name,
        public_name=f"tiny_attention.{name}",
        args=specs,
        host_jit_fn=host_fns[name],
        compile_args_builder=lambda config, runtime: _compile_args(specs, config, runtime),
        runtime_args_builder=lambda inputs, static, kv: _runtime_args(specs, inputs, static, kv),
    )


@cache
def tiny_contract() -> ModelContract:
    """The contract, made once in a process."""
    host_fns = {name: EagerHostFn(f"tiny_attention.{name}") for name in ("prefill", "decode")}
    return ModelContract(
        model=ModelId("tiny", "attention"),
        capabilities=frozenset({"paged_kv", "chunked_prefill"}),
        limits={"num_layers": 1},
        execution={"prefill": ("prefill",), "decode": ("decode",)},
        kernels={
            "prefill": _stage("prefill", PREFILL_ARGS, host_fns),
            "decode": _stage("decode", DECODE_ARGS, host_fns),
        },
        hooks=Hooks(host_fns),
    )
