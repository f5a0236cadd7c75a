"""The Qwen3 contracts: one for each published size, one for other dense models and one for other
mixtures of experts; what they share is here, what they differ in is in `variants`.

The arithmetic is in `kernels`, the layout of the weights in `weights`, the arguments in `abi`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import (
    DETERMINISTIC,
    DYNAMIC_SYMBOLS,
    CacheSpec,
    KernelSpec,
    KVCache,
    LoadedKernelModules,
    ModelContract,
    ModelId,
    RuntimeConfig,
    StaticArgs,
    TensorExporter,
    WeightSource,
)
from tidemill_contracts.models.errors import ContractMismatch
from tidemill_contracts.models.qwen3.abi import (
    Specs,
    StageAbi,
    cache_shape,
    decode_specs,
    model_specs,
    prefill_specs,
    score_specs,
    weight_bytes,
)
from tidemill_contracts.models.qwen3.host import DeviceHostFn, Kernel
from tidemill_contracts.models.qwen3.int8 import Int8RowMajor, on_int8
from tidemill_contracts.models.qwen3.native import layout, library
from tidemill_contracts.models.qwen3.native.choice import Sizes, native_library
from tidemill_contracts.models.qwen3.native.library import Library
from tidemill_contracts.models.qwen3.native.sampling import native_sampling
from tidemill_contracts.models.qwen3.ops.choice import installed
from tidemill_contracts.models.qwen3.validation import (
    Mismatch,
    validate_model,
    validate_runtime,
)
from tidemill_contracts.models.qwen3.variants import Variant
from tidemill_contracts.models.qwen3.weights import MatrixLayout, RowMajor, prepare
from tidemill_contracts.models.sampling import SamplingKernels

FAMILY = "qwen3"


@cache
def contract_of(variant: Variant) -> ModelContract:
    """The contract of `variant`: made once in a process."""

    def mismatch(
        field: str, *, found: object, expected: object, hint: str = ""
    ) -> ContractMismatch:
        return contract.mismatch(field, found=found, expected=expected, hint=hint)

    def stage(name: str, specs: Specs, *dynamic: str) -> KernelSpec:
        abi = StageAbi(specs, mismatch)
        public_name = f"{FAMILY}_{variant.name}.{name}"
        return KernelSpec(
            name=name,
            public_name=public_name,
            args=specs,
            host_jit_fn=DeviceHostFn(
                public_name, variant.kind, variant.quantization, specs, decodes=name == "decode"
            ),
            compile_args_builder=abi.compile_args,
            runtime_args_builder=abi.runtime_args,
            dynamic_symbols=DYNAMIC_SYMBOLS.union(dynamic),
        )

    model = model_specs(variant.kind, variant.quantization)
    kernels = {
        "prefill": stage("prefill", prefill_specs(model)),
        "decode": stage("decode", decode_specs(model)),
        "score": stage("score", score_specs(model), "R"),
    }
    contract = ModelContract(
        model=ModelId(FAMILY, variant.name, quant=variant.quantization),
        capabilities=frozenset({"paged_kv", "chunked_prefill", "prompt_logits", DETERMINISTIC}),
        limits=variant.limits,
        execution={"prefill": ("prefill",), "decode": ("decode",), "score": ("score",)},
        kernels=kernels,
        hooks=Qwen3Hooks(variant, kernels, mismatch),
    )
    return contract


@dataclass(frozen=True, slots=True)
class Qwen3Hooks:
    """`ModelHooks` of one variant."""

    variant: Variant
    kernels: Mapping[str, KernelSpec]
    mismatch: Mismatch

    def load_kernels(self) -> LoadedKernelModules:
        from tidemill_contracts.models.qwen3 import kernels

        functions = {name: getattr(kernels, f"{self.variant.kind}_{name}") for name in self.kernels}
        if self.variant.quantization is not None:
            functions = {name: on_int8(function) for name, function in functions.items()}
        return LoadedKernelModules(
            functions={name: Kernel(function) for name, function in functions.items()},
            constants={},
        )

    def bind(self, loaded: LoadedKernelModules) -> None:
        for name, kernel in self.kernels.items():
            assert isinstance(kernel.host_jit_fn, DeviceHostFn)
            kernel.host_jit_fn.kernel = loaded.functions[name]

    def validate_kernels(
        self, loaded: LoadedKernelModules, config: ModelConfig, runtime: RuntimeConfig
    ) -> None:
        validate_model(config, self.variant, self.mismatch)
        validate_runtime(config, runtime, self.variant.quantization, self.mismatch)

    def cache_spec(self, config: ModelConfig, runtime: RuntimeConfig) -> CacheSpec:
        def allocate(pages: int) -> KVCache:
            shape = cache_shape(config, runtime, pages)
            if self._library(config, runtime) is not None:
                return KVCache(k=layout.huge(shape), v=layout.huge(shape))
            k = torch.zeros(shape, dtype=runtime.dtype, device=runtime.device)
            return KVCache(k=k, v=torch.zeros_like(k))

        page_elements = 2 * torch.Size(cache_shape(config, runtime, 1)).numel()
        return CacheSpec(
            page_size=runtime.page_size,
            bytes_per_page=page_elements * runtime.dtype.itemsize,
            allocate=allocate,
        )

    def details(self) -> Mapping[str, str]:
        """By kind of device, what its operations are by."""
        if self.variant.kind != "dense":
            return installed()
        lacking = library.lacking()
        cpu = "C++ in bfloat16, else plain torch" if lacking is None else f"plain torch ({lacking})"
        if self.variant.quantization is not None:
            return {"cpu": cpu}
        return {**installed(), "cpu": cpu}

    def logits_width(self, config: ModelConfig) -> int:
        return config.vocab_size

    def weight_bytes(self, config: ModelConfig, runtime: RuntimeConfig) -> int:
        specs = model_specs(self.variant.kind, self.variant.quantization)
        return weight_bytes(specs, config, runtime)

    def prepare_weights(
        self,
        source: WeightSource,
        config: ModelConfig,
        runtime: RuntimeConfig,
        exporter: TensorExporter,
    ) -> StaticArgs:
        return prepare(source, config, runtime, exporter, self._layout(config, runtime))

    def _layout(self, config: ModelConfig, runtime: RuntimeConfig) -> MatrixLayout:
        built = self._library(config, runtime)
        if self.variant.quantization is None:
            return RowMajor() if built is None else layout.Tiled(built)
        return Int8RowMajor() if built is None else layout.TiledInt8(built)

    def sampling_kernels(self, runtime: RuntimeConfig) -> SamplingKernels | None:
        return native_sampling(runtime)

    def _library(self, config: ModelConfig, runtime: RuntimeConfig) -> Library | None:
        """The C++ library where stages, weights and cache are to be laid out for it."""
        sizes = Sizes.of(config)
        return native_library(self.variant.kind, self.variant.quantization, sizes, runtime)
