"""Child side: where compiled stages run and where what they keep lies.

`HostDevice` calls what ``compile`` returned, with host tensors: kernels that are Python functions.
`WorkerDevice` drives PyPTO's ``DistributedWorker``, whose processes fork when it is made; it
follows the public sources of pypto and has never run on an NPU.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tidemill_contracts.models.errors import ModelError
from tidemill_contracts.models.pypto.arena import shared_zeros
from tidemill_contracts.models.pypto.options import PyptoOptions

ZEROING_BYTES = 16 << 20
"""Host memory from which device pages are zeroed, piece by piece."""


class Device(Protocol):
    """Memory and dispatch of one device; handles stand for tensors in a stage's arguments."""

    def static(self, tensor: Tensor) -> Any:
        """Uploads a weight or table once."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any: ...

    def run(self, program: Any, *args: Any) -> None: ...

    def close(self) -> None: ...


class HostDevice:
    """Calls the compiled stages in this process."""

    def static(self, tensor: Tensor) -> Tensor:
        return tensor

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def run(self, program: Any, *args: Any) -> None:
        with torch.inference_mode():
            program(*args)

    def close(self) -> None:
        pass


class WorkerDevice:
    """PyPTO's device worker. All host memory that it will read must be shared already."""

    def __init__(self, programs: Mapping[str, Any]) -> None:
        runtime: Any = _import("pypto.runtime")
        self._zeros = shared_zeros((ZEROING_BYTES,), torch.uint8)
        self._worker = runtime.DistributedWorker(list(programs.values()))
        # Newer workers address a piece of a tensor by its offset, older ones by its pointer.
        self._has_offset = "dst_offset" in inspect.signature(self._worker.copy_to).parameters

    def static(self, tensor: Tensor) -> Any:
        return self._worker.alloc_tensor(tuple(tensor.shape), tensor.dtype, init=tensor)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """Pages are zeroed: attention reads the unused tail of a page, and NaN times 0 is NaN."""
        handle = self._worker.alloc_tensor(shape, dtype)
        total = torch.Size(shape).numel() * dtype.itemsize
        for offset in range(0, total, ZEROING_BYTES):
            count = min(ZEROING_BYTES, total - offset)
            source = self._zeros.data_ptr()
            if self._has_offset:
                self._worker.copy_to(handle.data_ptr, source, count, dst_offset=offset)
            else:
                self._worker.copy_to(handle.data_ptr + offset, source, count)
        return handle

    def run(self, program: Any, *args: Any) -> None:
        self._worker.run(program, *args)

    def close(self) -> None:
        self._worker.close()


def runs_on_worker(program: Any) -> bool:
    """Whether ``compile`` made a program for PyPTO's device worker."""
    try:
        module: Any = _import("pypto.ir.distributed_compiled_program")
    except ModelError:
        return False
    return isinstance(program, module.DistributedCompiledProgram)


def run_config(options: PyptoOptions, artefacts: str) -> Any:
    """PyPTO's ``RunConfig`` of one stage; `artefacts` is its folder below the kernel cache.

    Raises `ModelError` where this PyPTO has no field for an option that is set.
    """
    runtime: Any = _import("pypto.runtime")
    distributed: Any = _import("pypto.ir.distributed_compiled_program")
    fields: dict[str, Any] = {
        "platform": options.platform,
        "device_id": options.device_id,
        "codegen_only": options.codegen_only,
        "distributed_config": distributed.DistributedConfig(
            device_ids=[options.device_id],
            num_sub_workers=0,
            block_dim=options.block_dim,
            aicpu_thread_num=options.aicpu_thread_num,
        ),
    }
    if options.backend_type is not None:
        kinds: Any = _import("pypto.backend").BackendType
        try:
            fields["backend_type"] = getattr(kinds, options.backend_type)
        except AttributeError:
            raise ModelError(f"PyPTO has no BackendType {options.backend_type}") from None
    if options.kernel_cache is not None:
        directory = Path(options.kernel_cache, artefacts)
        directory.mkdir(parents=True, exist_ok=True)
        fields |= {"save_kernels": True, "save_kernels_dir": str(directory)}
    known = {field.name for field in dataclasses.fields(runtime.RunConfig)}
    if missing := sorted(fields.keys() - known):
        raise ModelError(f"this PyPTO's RunConfig has no {', '.join(missing)}")
    return runtime.RunConfig(**fields)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModelError(f"PyPTO is not importable here: {error}") from error
