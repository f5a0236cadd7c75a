"""Stages whose kernels are plain torch functions: nothing is built, the ABI is checked.

A kernel takes the stage's tensors in the order of its `TensorArgSpec`s and writes into those of
direction ``out`` and ``inout``. It runs on whatever device its tensors lie on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tidemill_contracts.models.contract import (
    CompiledStage,
    RuntimeConfig,
    TensorArgSpec,
    check_args,
)
from tidemill_contracts.models.errors import ContractMismatch


class EagerHostFn:
    """`HostJitFn` of one stage; `kernel` is set when the contract is bound."""

    def __init__(self, public_name: str, args: tuple[TensorArgSpec, ...]) -> None:
        self.public_name = public_name
        self.args = args
        self.kernel: Callable[..., None] | None = None

    def compile(self, *args: Tensor, config: RuntimeConfig) -> CompiledStage:
        """The bound kernel, run without autograd.

        Raises `ContractMismatch` where `args` do not fit the stage's specs or nothing is bound.
        """
        kernel = self.kernel
        if kernel is None:
            raise ContractMismatch(
                self.public_name,
                "kernel",
                found="none",
                expected="a bound kernel",
                hint="Call hooks.bind(hooks.load_kernels()) before compiling.",
            )
        check_args(self.public_name, self.args, args, config.dtype)

        def run(*args: Tensor) -> None:
            with torch.inference_mode():
                kernel(*args)

        return run
