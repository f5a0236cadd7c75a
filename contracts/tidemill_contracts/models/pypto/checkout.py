"""Child side: imports a pypto-lib checkout and describes what it finds.

Only ever imported in a child process: the checkout's modules are called ``contract``,
``constants``, ``weights`` and ``config``, they stay in ``sys.modules``, and kernels import more of
them when they run. So the root goes on ``sys.path`` once, at the end, and stays there.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from tidemill_contracts.models.errors import ModelError
from tidemill_contracts.models.pypto.messages import (
    ArgDescription,
    Description,
    Matched,
    ModelView,
    StageDescription,
)

CONTRACT_TYPES = ("ModelContract", "ModelServingContract")
"""Today's name, and that of the first drafts."""


class LibArg(Protocol):
    name: str
    dtype: str
    shape: tuple[str | int, ...]
    direction: str


class LibStage(Protocol):
    name: str
    public_name: str
    args: Sequence[LibArg]
    host_jit_fn: Any
    compile_args_builder: Callable[..., tuple[Any, ...]]
    runtime_args_builder: Callable[..., tuple[Any, ...]]


class LibModelId(Protocol):
    family: str
    variant: str
    size: str | None
    quant: str | None


class LibKernels(Protocol):
    functions: Mapping[str, Any]
    constants: Mapping[str, int]


class LibContract(Protocol):
    """pypto-lib's ``ModelContract``, as far as it is used; the hooks are fields, not methods."""

    schema_version: str
    model: LibModelId
    capabilities: Sequence[str]
    limits: Mapping[str, int | str]
    execution: Mapping[str, Sequence[str]]
    kernels: Mapping[str, LibStage]
    kernel_binder: Callable[..., None]
    prepare_weights: Callable[..., Any]
    load_kernels: Callable[[], LibKernels]
    validate_kernels: Callable[..., None]

    def abi_fingerprint(self) -> str: ...


class Checkout:
    """The imported checkout: its registry at once, its kernels with the contract, once each."""

    def __init__(self, root: str) -> None:
        self.root = Path(root).resolve()
        if str(self.root) not in sys.path:
            sys.path.append(str(self.root))
        self._registry = self._import_registry()
        self._contract: LibContract | None = None
        self._kernels: LibKernels | None = None

    @property
    def contract(self) -> LibContract:
        if self._contract is None:
            raise ModelError("no contract has been loaded: describe comes first")
        return self._contract

    @property
    def kernels(self) -> LibKernels:
        if self._kernels is None:
            raise ModelError("no kernels have been loaded: describe comes first")
        return self._kernels

    def match(self, model: ModelView) -> Matched:
        """The contract whose matcher accepts the model."""
        try:
            found = self._registry.find_contract_for_model_config(model)
        except KeyError:
            return Matched(None, None)
        return Matched(found.model.family, found.model.variant)

    def describe(self, family: str, variant: str) -> Description:
        """Loads a contract and its kernels. Raises `ModelError` where there is none such."""
        if self._contract is None:
            try:
                self._contract = self._registry.get_contract(family, variant)
            except KeyError as error:
                raise ModelError(str(error.args[0])) from error
            self._kernels = self._contract.load_kernels()
        contract, kernels = self.contract, self.kernels
        kind = type(contract).__name__
        if kind not in CONTRACT_TYPES:
            raise ModelError(f"get_contract returned a {kind}, not a {CONTRACT_TYPES[0]}")
        return Description(
            contract_type=kind,
            registry_file=str(self._registry.__file__),
            schema_version=contract.schema_version,
            family=contract.model.family,
            variant=contract.model.variant,
            size=contract.model.size,
            quant=contract.model.quant,
            capabilities=tuple(contract.capabilities),
            limits=dict(contract.limits),
            execution={phase: tuple(stages) for phase, stages in contract.execution.items()},
            stages=tuple(
                _describe_stage(key, stage, kernels.functions)
                for key, stage in contract.kernels.items()
            ),
            functions=tuple(kernels.functions),
            constants={name: int(value) for name, value in kernels.constants.items()},
            fingerprint=contract.abi_fingerprint(),
            pypto=_version("pypto"),
        )

    def _import_registry(self) -> ModuleType:
        registry = importlib.import_module("contract.registry")
        file = Path(str(registry.__file__)).resolve()
        if not file.is_relative_to(self.root):
            raise ModelError(
                f"contract.registry resolves to {file}, not into {self.root}: another package"
                " named contract is importable here. Remove it from this environment."
            )
        return registry


def _describe_stage(key: str, stage: LibStage, functions: Mapping[str, Any]) -> StageDescription:
    kernel = next((name for name in (f"{key}_fwd", key) if name in functions), None)
    return StageDescription(
        key=key,
        name=stage.name,
        public_name=stage.public_name,
        args=tuple(
            ArgDescription(arg.name, arg.dtype, tuple(arg.shape), arg.direction)
            for arg in stage.args
        ),
        kernel=kernel,
        kernel_params=() if kernel is None else _parameters(functions[kernel]) or (),
        host_params=_parameters(stage.host_jit_fn),
        buffers=keyword_parameters(stage.runtime_args_builder),
    )


def keyword_parameters(function: Callable[..., object]) -> tuple[str, ...]:
    """The keyword-only parameters that must be given."""
    return tuple(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
    )


def _parameters(function: Any) -> tuple[str, ...] | None:
    """Of a plain function, or of the one that PyPTO's ``jit`` decorators keep in ``_func``."""
    inner = getattr(function, "_func", function)
    try:
        return tuple(inspect.signature(inner).parameters)
    except (TypeError, ValueError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
