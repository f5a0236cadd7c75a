"""The types of the external contract, in the shape that pypto-lib gives them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ModelId:
    family: str
    variant: str
    size: str | None = None
    quant: str | None = None


@dataclass(frozen=True)
class TensorArgSpec:
    name: str
    dtype: str
    shape: tuple[str | int, ...]
    direction: str = "in"


@dataclass(frozen=True)
class KernelSpec:
    name: str
    public_name: str
    args: tuple[TensorArgSpec, ...]
    host_jit_fn: Any
    compile_args_builder: Callable[..., tuple[Any, ...]]
    runtime_args_builder: Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class LoadedKernelModules:
    functions: Mapping[str, Any]
    constants: Mapping[str, int]


@dataclass(frozen=True)
class ModelContract:
    schema_version: str
    model: ModelId
    capabilities: tuple[str, ...]
    limits: Mapping[str, int | str]
    execution: Mapping[str, tuple[str, ...]]
    kernels: Mapping[str, KernelSpec]
    kernel_binder: Callable[..., None]
    prepare_weights: Callable[..., Any]
    load_kernels: Callable[[], LoadedKernelModules]
    validate_kernels: Callable[..., None]

    def abi_fingerprint(self) -> str:
        abi = {
            "schema_version": self.schema_version,
            "model": asdict(self.model),
            "limits": dict(self.limits),
            "kernels": {
                name: [spec.public_name, *(asdict(arg) for arg in spec.args)]
                for name, spec in self.kernels.items()
            },
        }
        return hashlib.sha256(json.dumps(abi, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class ContractRegistration:
    family: str
    variant: str
    factory: Callable[[], ModelContract]
    matcher: Callable[[object], bool] | None = None
    implemented: bool = True
