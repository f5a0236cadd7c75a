"""From a stage's kernel to something that runs on the worker's device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tidemill_contracts.models.args import TensorArgSpec
from tidemill_contracts.models.contract import CompiledStage, Quantization, RuntimeConfig
from tidemill_contracts.models.eager import EagerHostFn
from tidemill_contracts.models.qwen3.abi import by_name
from tidemill_contracts.models.qwen3.native.choice import Sizes, native_library
from tidemill_contracts.models.qwen3.native.stage import NativeStage
from tidemill_contracts.models.qwen3.ops import Layout, Ops
from tidemill_contracts.models.qwen3.ops.choice import ops_for
from tidemill_contracts.models.qwen3.ops.reference import ReferenceOps
from tidemill_contracts.models.qwen3.variants import Kind


class Kernel:
    """A stage's function with the operations that it runs on; its parameters are the stage's
    arguments."""

    def __init__(self, function: Callable[..., None], ops: Ops | None = None) -> None:
        self.function = function
        """Takes the operations, then the stage's arguments."""
        self._ops = ops or ReferenceOps()
        signature = inspect.signature(function)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])

    def on(self, ops: Ops) -> Kernel:
        """The same on other operations."""
        return Kernel(self.function, ops)

    def __call__(self, *args: Tensor) -> None:
        self.function(self._ops, *args)


class DeviceHostFn(EagerHostFn):
    """`HostJitFn` that picks the operations, and whether calls are replayed as a graph, by the
    device and the shapes that it is compiled for."""

    def __init__(
        self,
        public_name: str,
        kind: Kind,
        quantization: Quantization | None,
        specs: Sequence[TensorArgSpec],
        decodes: bool,
    ) -> None:
        super().__init__(public_name)
        self._kind = kind
        self._quantization = quantization
        self._specs = tuple(specs)
        self._decodes = decodes

    def compile(self, *args: Tensor, config: RuntimeConfig) -> CompiledStage:
        """Raises `ModelError` where no kernel is bound."""
        kernel = self.kernel
        if not isinstance(kernel, Kernel):
            return super().compile(*args, config=config)
        named = by_name(self._specs, args)
        library = native_library(self._kind, self._quantization, _sizes(named), config)
        if library is not None:
            return NativeStage(library, self._specs)
        chosen = ops_for(config.device, _layout(named), deterministic=config.deterministic)
        stage: CompiledStage = kernel.on(chosen.ops)
        if self._decodes and chosen.replay is not None:
            stage = chosen.replay(kernel.function, named)

        def run(*args: Tensor) -> None:
            with torch.inference_mode():
                stage(*args)

        return run


def _sizes(named: dict[str, Tensor]) -> Sizes:
    vocabulary, hidden = named["embed"].shape
    _, _, _, kv_heads, head_dim = named["k_cache"].shape
    return Sizes(
        hidden=hidden,
        inner=named["w_down"].shape[-1],
        head_dim=head_dim,
        q_heads=named["wo"].shape[2] // head_dim,
        kv_heads=kv_heads,
        vocabulary=vocabulary,
    )


def _layout(named: dict[str, Tensor]) -> Layout:
    k_cache = named["k_cache"]
    _, pages, page_size, kv_heads, head_dim = k_cache.shape
    return Layout(
        dtype=k_cache.dtype,
        q_heads=named["wo"].shape[2] // head_dim,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pages=pages,
    )
