"""Copies of the contract ``qwen3/dense`` in which one thing can be changed.

A copy has kernels of its own (`kernels`), so that what is planted in it touches nobody else, and
passes the whole kit as long as nothing is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.contracts.conformance import kernels
from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import (
    CacheSpec,
    KVCache,
    LoadedKernelModules,
    ModelContract,
    ModelHooks,
    RuntimeConfig,
    StaticArgs,
    TensorExporter,
    WeightSource,
)
from tidemill_contracts.models.eager import EagerHostFn
from tidemill_contracts.models.registry import get_contract


def patched(*changes: tuple[str, str]) -> ModuleType:
    """The kernels with pieces of their text replaced, each of which stands there once."""
    source = inspect.getsource(kernels)
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in the kernels"
        source = source.replace(old, new)
    module = ModuleType("patched_kernels")
    exec(compile(source, "patched_kernels", "exec"), module.__dict__)
    return module


@dataclass
class Hooks:
    """The hooks of the contract in the tree, with other kernels."""

    inner: ModelHooks
    module: ModuleType
    host_fns: dict[str, EagerHostFn]

    def load_kernels(self) -> LoadedKernelModules:
        functions = {name: getattr(self.module, name) for name in self.host_fns}
        return LoadedKernelModules(functions=functions, constants={})

    def bind(self, loaded: LoadedKernelModules) -> None:
        for name, host_fn in self.host_fns.items():
            host_fn.kernel = loaded.functions[name]

    def validate_kernels(
        self, loaded: LoadedKernelModules, config: ModelConfig, runtime: RuntimeConfig
    ) -> None:
        self.inner.validate_kernels(loaded, config, runtime)

    def cache_spec(self, config: ModelConfig, runtime: RuntimeConfig) -> CacheSpec:
        return self.inner.cache_spec(config, runtime)

    def logits_width(self, config: ModelConfig) -> int:
        return self.inner.logits_width(config)

    def weight_bytes(self, config: ModelConfig, runtime: RuntimeConfig) -> int:
        return self.inner.weight_bytes(config, runtime)

    def prepare_weights(
        self,
        source: WeightSource,
        config: ModelConfig,
        runtime: RuntimeConfig,
        exporter: TensorExporter,
    ) -> StaticArgs:
        return self.inner.prepare_weights(source, config, runtime, exporter)


def copied(module: ModuleType = kernels, /, **hook_changes: Callable[..., Any]) -> ModelContract:
    """A copy over the kernels of `module`; `hook_changes` replace hooks, and are called with the
    hook of the contract in the tree before its own arguments."""
    dense = get_contract("qwen3", "dense")
    host_fns = {name: EagerHostFn(kernel.public_name) for name, kernel in dense.kernels.items()}
    hooks = Hooks(dense.hooks, module, host_fns)
    for name, change in hook_changes.items():
        setattr(hooks, name, _with_original(change, getattr(hooks, name)))
    copies = {
        name: replace(kernel, host_jit_fn=host_fns[name]) for name, kernel in dense.kernels.items()
    }
    return replace(dense, kernels=copies, hooks=hooks)


def _with_original(change: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: change(original, *args)


PAD_TO = 128
"""Rows of the head in `padded`."""


@dataclass
class PaddedSource:
    """A checkpoint whose vocabulary is padded by repeating its first row."""

    inner: WeightSource
    real: int

    def names(self) -> Sequence[str]:
        return self.inner.names()

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if shape[0] != PAD_TO:
            return self.inner.take(name, shape)
        tensor = self.inner.take(name, (self.real, *shape[1:]))
        return torch.cat((tensor, tensor[:1].expand(PAD_TO - self.real, -1)))

    def finish(self) -> None:
        self.inner.finish()


def padded(module: ModuleType = kernels) -> ModelContract:
    """A copy whose logits are wider than the vocabulary."""

    def wide(config: ModelConfig) -> ModelConfig:
        return replace(config, vocab_size=PAD_TO)

    contract = copied(
        module,
        logits_width=lambda original, config: PAD_TO,
        weight_bytes=lambda original, config, runtime: original(wide(config), runtime),
        prepare_weights=lambda original, source, config, *rest: original(
            PaddedSource(source, config.vocab_size), wide(config), *rest
        ),
    )

    def widened(build: Callable[..., Any]) -> Callable[..., Any]:
        return lambda config, runtime: build(wide(config), runtime)

    kernels_of = {
        name: replace(kernel, compile_args_builder=widened(kernel.compile_args_builder))
        for name, kernel in contract.kernels.items()
    }
    return replace(contract, kernels=kernels_of)


def hidden(module: ModuleType = kernels) -> ModelContract:
    """A copy whose pools lie where the worker does not see them, as those of a child process do."""
    kept: list[KVCache] = []

    def cache_spec(original: Callable[..., CacheSpec], *args: Any) -> CacheSpec:
        spec = original(*args)

        def allocate(pages: int) -> KVCache:
            kept[:] = [spec.allocate(pages)]
            k, v = (torch.empty_like(pool, device="meta") for pool in (kept[0].k, kept[0].v))
            return KVCache(k, v)

        return replace(spec, allocate=allocate)

    def load_kernels(original: Callable[[], LoadedKernelModules]) -> LoadedKernelModules:
        loaded = original()
        functions = {name: over_kept(function) for name, function in loaded.functions.items()}
        return replace(loaded, functions=functions)

    def over_kept(function: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(function).parameters)

        @wraps(function)
        def run(*args: Tensor) -> None:
            named = dict(zip(names, args, strict=True))
            function(**{**named, "k_cache": kept[0].k, "v_cache": kept[0].v})

        return run

    return copied(module, cache_spec=cache_spec, load_kernels=load_kernels)
