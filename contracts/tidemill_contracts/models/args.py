"""Argument specs that are checked: the shape symbols of a stage are bound once, when it is
compiled, and every argument tuple is held to them before its kernel runs.

A symbol stands for a size. Most are fixed for the life of a loaded model (layers, hidden size,
pages). A stage's *dynamic* symbols change from call to call (rows, packed tokens, columns of the
block table); for them the compile-time size is the largest that may be passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tidemill_contracts.models.errors import ContractIdentity, ContractMismatch

Direction = Literal["in", "out", "inout"]

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
}
MODEL_DTYPE = "model"
"""In a spec: the dtype that the worker runs the model in."""


@dataclass(frozen=True, slots=True)
class TensorArgSpec:
    """One argument of a stage; `shape` mixes fixed sizes and symbols such as ``"T"``."""

    name: str
    dtype: str
    """A key of `DTYPES`, or ``model`` for the dtype that the worker runs in."""
    shape: tuple[str | int, ...]
    direction: Direction = "in"

    def torch_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return model_dtype if self.dtype == MODEL_DTYPE else DTYPES[self.dtype]


class ArgChecker:
    """Holds the argument tuples of one stage to its specs.

    Made from the compile arguments, which bind the symbols. `check` is called before every run:
    arguments without dynamic symbols (weights, caches, tables) are checked once and recognised by
    identity from then on, so a step pays only for the few tensors that are new in it.
    """

    def __init__(
        self,
        contract: ContractIdentity,
        stage: str,
        specs: Sequence[TensorArgSpec],
        dynamic: frozenset[str],
        compile_args: Sequence[Tensor],
        model_dtype: torch.dtype,
    ) -> None:
        self._contract = contract
        self._stage = stage
        self._specs = tuple(specs)
        self._model_dtype = model_dtype
        self.sizes: Mapping[str, int] = self._bind(compile_args)
        self._changing: list[tuple[int, TensorArgSpec, torch.dtype]] = []
        self._fixed: list[tuple[int, TensorArgSpec]] = []
        for index, spec in enumerate(self._specs):
            if dynamic.isdisjoint(size for size in spec.shape if isinstance(size, str)):
                self._fixed.append((index, spec))
            else:
                self._changing.append((index, spec, spec.torch_dtype(model_dtype)))
        self._dynamic = dynamic
        self._known: list[Tensor] = []
        """The fixed arguments that have passed, in the order of `_fixed`."""

    def check(self, args: Sequence[Tensor]) -> None:
        """Raises `ContractMismatch` naming ``stage.argument``, what was expected and found."""
        if len(args) != len(self._specs):
            raise self._wrong_count(args)
        known = self._known
        if not known or any(args[i] is not known[n] for n, (i, _) in enumerate(self._fixed)):
            self._check_fixed(args)
        bound: dict[str, int] = {}
        for index, spec, dtype in self._changing:
            arg = args[index]
            if arg.dtype is not dtype:
                raise self._mismatch(spec, "dtype", arg.dtype, dtype)
            shape = arg.shape
            if len(shape) != len(spec.shape):
                raise self._mismatch(spec, "rank", list(shape), self._labels(spec))
            for found, size in zip(shape, spec.shape, strict=True):
                if isinstance(size, int):
                    fits = found == size
                elif size in self._dynamic:
                    fits = found == bound.setdefault(size, found) <= self.sizes[size]
                else:
                    fits = found == self.sizes[size]
                if not fits:
                    raise self._mismatch(
                        spec, "shape", list(shape), f"{self._labels(spec)}{self._meaning(bound)}"
                    )

    def check_sources(self, args: Sequence[Tensor], sources: Mapping[str, Tensor]) -> None:
        """Raises where an argument is not the tensor that its name says.

        Two arguments of one shape can be swapped without any shape noticing. `sources` are the
        tensors that can be told by name: the logical inputs, the caches, the prepared weights.
        """
        for spec, arg in zip(self._specs, args, strict=True):
            source = sources.get(spec.name)
            if source is not None and arg is not source:
                names = [name for name, tensor in sources.items() if tensor is arg]
                found = names[0] if names else "another tensor"
                raise self._mismatch(spec, "order", found, spec.name)

    def _check_fixed(self, args: Sequence[Tensor]) -> None:
        for index, spec in self._fixed:
            arg, dtype = args[index], spec.torch_dtype(self._model_dtype)
            if arg.dtype is not dtype:
                raise self._mismatch(spec, "dtype", arg.dtype, dtype)
            wanted = [size if isinstance(size, int) else self.sizes[size] for size in spec.shape]
            if list(arg.shape) != wanted:
                raise self._mismatch(
                    spec, "shape", list(arg.shape), f"{wanted} for {self._labels(spec)}"
                )
        self._check_directions(args)
        self._known = [args[index] for index, _ in self._fixed]

    def _check_directions(self, args: Sequence[Tensor]) -> None:
        """What a stage writes must not lie in what it only reads."""
        read = {
            arg.untyped_storage().data_ptr(): spec.name
            for spec, arg in zip(self._specs, args, strict=True)
            if spec.direction == "in" and arg.numel() and not arg.is_meta
        }
        for spec, arg in zip(self._specs, args, strict=True):
            if spec.direction != "in" and arg.numel() and not arg.is_meta:
                overlapping = read.get(arg.untyped_storage().data_ptr())
                if overlapping is not None:
                    raise self._mismatch(
                        spec, "direction", f"the storage of {overlapping}", "one of its own"
                    )

    def _bind(self, compile_args: Sequence[Tensor]) -> dict[str, int]:
        """The size of every symbol, as the compile arguments have it."""
        if len(compile_args) != len(self._specs):
            raise self._wrong_count(compile_args)
        sizes: dict[str, int] = {}
        for spec, arg in zip(self._specs, compile_args, strict=True):
            wanted = spec.torch_dtype(self._model_dtype)
            if arg.dtype is not wanted:
                raise self._mismatch(spec, "dtype", arg.dtype, wanted)
            if arg.dim() != len(spec.shape):
                raise self._mismatch(spec, "rank", list(arg.shape), self._labels(spec))
            for found, size in zip(arg.shape, spec.shape, strict=True):
                bound = size if isinstance(size, int) else sizes.setdefault(size, found)
                if found != bound:
                    raise self._mismatch(
                        spec,
                        "shape",
                        list(arg.shape),
                        f"{self._labels(spec)}, where {size} is {bound}",
                    )
        return sizes

    def _wrong_count(self, args: Sequence[Tensor]) -> ContractMismatch:
        names = ", ".join(spec.name for spec in self._specs)
        return ContractMismatch(
            self._contract,
            f"{self._stage} arguments",
            found=len(args),
            expected=f"{len(self._specs)} ({names})",
        )

    def _mismatch(
        self, spec: TensorArgSpec, what: str, found: object, expected: object
    ) -> ContractMismatch:
        return ContractMismatch(
            self._contract, f"{self._stage}.{spec.name} {what}", found=found, expected=expected
        )

    def _meaning(self, bound: Mapping[str, int]) -> str:
        said = [f"{name} is {size}" for name, size in bound.items()]
        said += [
            f"{name} at most {self.sizes[name]}"
            for name in sorted(self._dynamic & self.sizes.keys())
        ]
        return f" ({', '.join(said)})"

    @staticmethod
    def _labels(spec: TensorArgSpec) -> str:
        return f"[{', '.join(map(str, spec.shape))}]"
