"""Matrices in int8, in readable torch: what the C++ library is held to, and what runs where it
cannot.

A matrix has a scale for each of its rows, which is an output of the product; activations get one
for each token when they are multiplied (W8A8, symmetric, dynamic per token). So a product is one
of integers, exact in int32, times two scales. Embedding, norms, attention and the KV cache keep
the run's dtype.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill_contracts.models.qwen3.ops import Ops

MATRICES = ("wqkv", "wo", "w_gate_up", "w_down", "lm_head")
"""The weights that are quantised, by the names of the stages' arguments."""

LARGEST, LEAST = 127, 1e-30
"""Of the integers, and of the largest magnitude in a row: zeros have a scale too."""

CHUNK_ELEMENTS = 1 << 17
"""Of a matrix that is quantised at once: its copies in float32 are small beside the model."""


def scale_of(matrix: str) -> str:
    """The name of the argument that has a matrix's scales."""
    return f"{matrix}_scale"


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., K] as int8, and the float32 scale of each, [...]."""
    wide = x.float()
    largest = wide.abs().amax(-1).clamp(min=LEAST)
    # A number over a tensor would be the number times its reciprocal, rounded twice. The product
    # below is rounded once, as by a fused multiply and add: in float64 it is exact.
    inverse = torch.full_like(largest, LARGEST) / largest
    return (wide * inverse.unsqueeze(-1).double()).round().to(torch.int8), largest / LARGEST


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A matrix, or a stack of them."""

    values: Tensor
    """int8 [..., out, in]."""
    scales: Tensor
    """float32 [..., out]."""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __getitem__(self, layer: int) -> Int8Matrix:
        return Int8Matrix(self.values[layer], self.scales[layer])

    def product(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out], of x's dtype."""
        rows, scales = quantize(x)
        sums = torch._int_mm(rows, self.values.t())
        return (sums * scales.unsqueeze(-1) * self.scales).to(x.dtype)


Matrix = Tensor | Int8Matrix


def linear(ops: Ops, x: Tensor, weight: Matrix) -> Tensor:
    """`Ops.linear`; by a matrix in int8, whatever the operations are."""
    return weight.product(x) if isinstance(weight, Int8Matrix) else ops.linear(x, weight)


def on_int8(function: Callable[..., None]) -> Callable[..., None]:
    """A stage's function with a parameter for the scales after each of `MATRICES`."""
    signature = inspect.signature(function)
    parameters = []
    for name, parameter in signature.parameters.items():
        parameters.append(parameter)
        if name in MATRICES:
            parameters.append(parameter.replace(name=scale_of(name)))
    names = [parameter.name for parameter in parameters[1:]]

    def run(ops: Ops, *args: Tensor) -> None:
        tensors = dict(zip(names, args, strict=True))
        matrices = {
            name: Int8Matrix(tensors.pop(name), tensors.pop(scale_of(name))) for name in MATRICES
        }
        function(ops, **tensors, **matrices)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


class Int8RowMajor:
    """`MatrixLayout` of plain torch: as the shapes say."""

    embeds = False

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        return torch.empty(shape, dtype=torch.int8), torch.empty(shape[:-1])

    def fill(self, target: Sequence[Tensor], parts: Sequence[Tensor], *, gated: bool) -> None:
        values, scales = target
        rows = max(1, CHUNK_ELEMENTS // values.shape[-1])
        first = 0
        for part in parts:
            for chunk in torch.split(part, rows):
                here = slice(first, first + len(chunk))
                made, of_rows = quantize(chunk)
                values[here].copy_(made)
                scales[here].copy_(of_rows)
                first = here.stop
