"""Which operations a device gets.

A device's package is looked for when a stage is compiled for that device, and only then; where it
is missing, or cannot do the shapes at hand, the reference runs there instead.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

import torch
from torch import Tensor

from tidemill_contracts.models.contract import CompiledStage
from tidemill_contracts.models.qwen3.ops import Layout, Ops
from tidemill_contracts.models.qwen3.ops.deterministic import DeterministicOps
from tidemill_contracts.models.qwen3.ops.reference import ReferenceOps

logger = logging.getLogger("tidemill.contract")

NPU_PACKAGE, NPU_DISTRIBUTION = "torch_npu", "torch-npu"
CUDA_PACKAGE, CUDA_DISTRIBUTION = "flashinfer", "flashinfer-python"

Replay = Callable[[Callable[..., None], Mapping[str, Tensor]], CompiledStage]
"""From a decode stage's function and its compile arguments by name to a stage that replays it."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The operations of one compiled stage."""

    ops: Ops
    replay: Replay | None = None
    """How a decode stage without data-dependent calls is recorded once and replayed."""


def ops_for(device: torch.device, layout: Layout, *, deterministic: bool = False) -> Chosen:
    """The best operations that are installed for `device`; of one kind where they must be
    deterministic, which `validation` allows for the CPU only.

    torch names an NPU ``npu`` once torch_npu is imported, and ``privateuseone`` before.
    """
    if deterministic:
        return Chosen(DeterministicOps())
    if device.type in ("npu", "privateuseone"):
        package = optional(NPU_PACKAGE)
        if package is not None:
            from tidemill_contracts.models.qwen3.ops.npu import NpuOps

            return Chosen(NpuOps(package, layout))
    elif device.type == "cuda":
        package = optional(CUDA_PACKAGE)
        if package is not None:
            from tidemill_contracts.models.qwen3.ops import cuda

            if cuda.attention_fits(layout):
                ops = cuda.FlashInferOps(package, layout, device)
                return Chosen(ops, ops.replayed)
    return Chosen(ReferenceOps())


def optional(name: str) -> ModuleType | None:
    """The package, or ``None`` where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        logger.info("%s cannot be imported (%s): its operations run in plain torch", name, error)
        return None


def installed() -> dict[str, str]:
    """What each kind of device would be driven by here; nothing is imported to tell."""

    def version(distribution: str) -> str:
        try:
            return f"{distribution} {metadata.version(distribution)}"
        except metadata.PackageNotFoundError:
            return f"plain torch ({distribution} is not installed)"

    return {
        "cpu": "plain torch",
        "cuda": version(CUDA_DISTRIBUTION),
        "npu": version(NPU_DISTRIBUTION),
    }
