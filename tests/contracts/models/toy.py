"""A contract in 80 lines for a model that any test can break: one layer, no weights to speak of.

Its "attention" is the sum of what the row has written to its pages, so slots, tables and lengths
matter; it shows what a contract needs, and every part can be replaced by a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tidemill_contracts.models.args import TensorArgSpec
from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import (
    CacheSpec,
    CompiledStage,
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

RUNTIME = RuntimeConfig(
    device=torch.device("cpu"),
    dtype=torch.float32,
    max_batch_size=4,
    max_seq_len=64,
    max_step_tokens=32,
    page_size=8,
    total_kv_pages=12,
)

DECODE_ARGS = (
    TensorArgSpec("input_ids", "int32", ("B",)),
    TensorArgSpec("seq_lens", "int32", ("B",)),
    TensorArgSpec("block_table", "int32", ("B", "PAGES")),
    TensorArgSpec("slot_mapping", "int32", ("B",)),
    TensorArgSpec("embed", "model", ("V", "H")),
    TensorArgSpec("head", "model", ("V", "H")),
    TensorArgSpec("k_cache", "model", ("SLOTS", "H"), "inout"),
    TensorArgSpec("v_cache", "model", ("SLOTS", "H"), "inout"),
    TensorArgSpec("logits", "fp32", ("B", "V"), "out"),
)
PREFILL_ARGS = (
    TensorArgSpec("input_ids", "int32", ("T",)),
    *DECODE_ARGS[1:3],
    TensorArgSpec("slot_mapping", "int32", ("T",)),
    *DECODE_ARGS[4:],
)


def decode(
    input_ids: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    embed: Tensor,
    head: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    logits: Tensor,
) -> None:
    k_cache[slot_mapping.long()] = embed[input_ids.long()]
    v_cache[slot_mapping.long()] = embed[input_ids.long()]
    logits.copy_(embed[input_ids.long()] @ head.T)


def prefill(
    input_ids: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    embed: Tensor,
    head: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    logits: Tensor,
) -> None:
    k_cache[slot_mapping.long()] = embed[input_ids.long()]
    v_cache[slot_mapping.long()] = embed[input_ids.long()]
    logits.copy_(embed[input_ids.long()[: len(logits)]] @ head.T)


@dataclass
class Recorder:
    """What has happened, to show that a refusal came before it."""

    compiled: list[str] = field(default_factory=list)
    opened: int = 0
    ran: list[str] = field(default_factory=list)


@dataclass
class ToyHostFn:
    name: str
    recorder: Recorder
    kernel: Callable[..., None] | None = None

    def compile(self, *args: Tensor, config: RuntimeConfig) -> CompiledStage:
        self.recorder.compiled.append(self.name)

        def run(*args: Tensor) -> None:
            self.recorder.ran.append(self.name)
            assert self.kernel is not None
            self.kernel(*args)

        return run


@dataclass
class ToyWeights:
    embed: Tensor
    head: Tensor

    @property
    def nbytes(self) -> int:
        return self.embed.nbytes + self.head.nbytes

    def named(self) -> Mapping[str, Tensor]:
        return {"embed": self.embed, "head": self.head}


@dataclass
class ToyHooks:
    host_fns: dict[str, ToyHostFn]
    recorder: Recorder
    functions: dict[str, Callable[..., None]] = field(
        default_factory=lambda: {"prefill": prefill, "decode": decode}
    )

    def load_kernels(self) -> LoadedKernelModules:
        return LoadedKernelModules(functions=self.functions, constants={"page": 8})

    def bind(self, loaded: LoadedKernelModules) -> None:
        for name, host_fn in self.host_fns.items():
            host_fn.kernel = loaded.functions[name]

    def validate_kernels(
        self, loaded: LoadedKernelModules, config: ModelConfig, runtime: RuntimeConfig
    ) -> None:
        if loaded.constants["page"] != runtime.page_size:
            raise toy_contract().mismatch(
                "constants[page]", found=loaded.constants["page"], expected=runtime.page_size
            )

    def cache_spec(self, config: ModelConfig, runtime: RuntimeConfig) -> CacheSpec:
        def allocate(pages: int) -> KVCache:
            shape = (pages * runtime.page_size, config.hidden_size)
            return KVCache(k=torch.zeros(shape), v=torch.zeros(shape))

        return CacheSpec(
            runtime.page_size, 2 * runtime.page_size * config.hidden_size * 4, allocate
        )

    def logits_width(self, config: ModelConfig) -> int:
        return config.vocab_size

    def weight_bytes(self, config: ModelConfig, runtime: RuntimeConfig) -> int:
        return 2 * config.vocab_size * config.hidden_size * 4

    def prepare_weights(
        self,
        source: WeightSource,
        config: ModelConfig,
        runtime: RuntimeConfig,
        exporter: TensorExporter,
    ) -> StaticArgs:
        self.recorder.opened += 1
        generator = torch.Generator().manual_seed(0)
        shape = (config.vocab_size, config.hidden_size)
        return ToyWeights(
            exporter(torch.randn(shape, generator=generator)),
            exporter(torch.randn(shape, generator=generator)),
        )


def _compile_args(phase: str) -> Callable[[ModelConfig, RuntimeConfig], tuple[Tensor, ...]]:
    def build(config: ModelConfig, runtime: RuntimeConfig) -> tuple[Tensor, ...]:
        rows, width, hidden = runtime.max_batch_size, config.vocab_size, config.hidden_size
        tokens = rows if phase == "decode" else runtime.max_step_tokens
        pages = -(-runtime.max_seq_len // runtime.page_size)
        slots = runtime.total_kv_pages * runtime.page_size
        ints = {"dtype": torch.int32, "device": "meta"}
        floats = {"dtype": torch.float32, "device": "meta"}
        return (
            torch.empty(tokens, **ints),
            torch.empty(rows, **ints),
            torch.empty((rows, pages), **ints),
            torch.empty(tokens, **ints),
            torch.empty((width, hidden), **floats),
            torch.empty((width, hidden), **floats),
            torch.empty((slots, hidden), **floats),
            torch.empty((slots, hidden), **floats),
            torch.empty((rows, width), **floats),
        )

    return build


def runtime_args(inputs: StageInputs, static: StaticArgs, cache: KVCache) -> tuple[Tensor, ...]:
    assert isinstance(static, ToyWeights)
    return (
        inputs.input_ids,
        inputs.seq_lens,
        inputs.block_table,
        inputs.slot_mapping,
        static.embed,
        static.head,
        cache.k,
        cache.v,
        inputs.logits,
    )


def toy_contract(recorder: Recorder | None = None) -> ModelContract:
    """A sound contract; tests replace one part of it."""
    recorder = recorder or Recorder()
    host_fns = {name: ToyHostFn(name, recorder) for name in ("prefill", "decode")}
    kernels = {
        name: KernelSpec(
            name=name,
            public_name=f"toy.{name}",
            args=PREFILL_ARGS if name == "prefill" else DECODE_ARGS,
            host_jit_fn=host_fns[name],
            compile_args_builder=_compile_args(name),
            runtime_args_builder=runtime_args,
        )
        for name in ("prefill", "decode")
    }
    return ModelContract(
        model=ModelId("toy", "one"),
        capabilities=frozenset({"paged_kv", "chunked_prefill"}),
        limits={"max_seq": 64, "page_size": 8, "num_layers": 2, "real_vocab": 101, "vocab": 101},
        execution={"prefill": ("prefill",), "decode": ("decode",)},
        kernels=kernels,
        hooks=ToyHooks(host_fns, recorder),
    )
