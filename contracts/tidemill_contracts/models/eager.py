"""Stages whose kernels are plain torch functions: nothing is built.

A kernel takes the stage's tensors in the order of its `TensorArgSpec`s and writes into those of
direction ``out`` and ``inout``. It runs on whatever device its tensors lie on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tidemill_contracts.models.contract import CompiledStage, RuntimeConfig
from tidemill_contracts.models.errors import ModelError


class EagerHostFn:
    """`HostJitFn` of one stage; `kernel` is set when the contract is bound."""

    def __init__(self, public_name: str) -> None:
        self.public_name = public_name
        self.kernel: Callable[..., None] | None = None

    def compile(self, *args: Tensor, config: RuntimeConfig) -> CompiledStage:
        """The bound kernel, run without autograd. Raises `ModelError` where none is bound."""
        kernel = self.kernel
        if kernel is None:
            raise ModelError(
                f"{self.public_name} has no kernel: call hooks.bind(hooks.load_kernels()) before"
                " compiling."
            )

        def run(*args: Tensor) -> None:
            with torch.inference_mode():
                kernel(*args)

        return run
