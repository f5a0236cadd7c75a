"""What the Qwen3 kernels are made of, each operation by the best that the device has.

The kernels call `Ops`; `reference` has them in plain torch, for any device, and the others
replace those for which a device's own package has a fused one. Importing this package imports
none of those packages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tidemill_contracts.models.qwen3.step import Step


@dataclass(frozen=True, slots=True)
class Layout:
    """What a stage's attention works on; known before anything runs."""

    dtype: torch.dtype
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages: int

    @property
    def page_elements(self) -> int:
        """Of K, or of V, in one page of one layer."""
        return self.page_size * self.kv_heads * self.head_dim


class Attention(Protocol):
    """The attention of one step, planned once and run for every layer.

    ``k_pages`` and ``v_pages`` are one layer's cache, [P, PAGE, KVH, D].
    """

    def write(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        """Stores K and V of the step's tokens, [T, KVH, D], at their slots; none at a negative
        one."""

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """[T, QH, D]: causal attention of the step's tokens over their rows' places."""


class Ops(Protocol):
    """The operations of a layer. T tokens, N heads, D head size, I intermediate size."""

    def plan(self, step: Step, k_cache: Tensor, q_heads: int) -> Attention:
        """Decides how the step's tokens will be stored and attend; `k_cache` is
        [L, P, PAGE, KVH, D]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
        """Over the last dimension; `eps` is float32 [1]."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """RoPE over the halves of each head: [T, N, D] by [T, 1, D] of x's dtype."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """[T, in] by the weight [out, in] of a layer, or of the head, to [T, out]."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up: [T, 2·I], gate first, to [T, I]."""

    def grouped_linear(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """Rows of x by the weight of their group: x [n, in] sorted by group, weights
        [E, out, in]; group e's rows end at ``ends[e]``, int32 [E]. Returns [n, out]."""

    def weighted_sum(self, parts: Tensor, weights: Tensor) -> Tensor:
        """Of each token's K parts: [T, K, H] by [T, K], both of one dtype, to [T, H]."""
