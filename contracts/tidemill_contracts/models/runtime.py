"""How a model will run here: what the worker's options come to for one model and one machine."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import (
    Kernels,
    ModelContract,
    Quantization,
    RuntimeConfig,
)
from tidemill_contracts.models.errors import ModelError

DEFAULT_PAGE_SIZE = 32
KV_MEMORY_SHARE = 0.4
"""Of the memory that the weights leave free, where `kv_pages` is not given."""
SCORED_LOGITS_BYTES = 64 << 20
"""Of the float32 logits that one score call gives: 110 tokens of Qwen3's vocabulary."""


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """The part of a worker's settings that decides how a model runs; ``None`` leaves a choice to
    the model, the contract and the machine."""

    device: str = "cpu"
    dtype: str | None = None
    """``bfloat16`` or ``float32``; ``None`` takes the checkpoint's."""
    quantization: Quantization | None = None
    """Decides which contract the model gets: see `registry.open_model`."""
    max_model_len: int | None = None
    page_size: int | None = None
    kv_pages: int | None = None
    max_rows: int = 32
    max_step_tokens: int = 2048
    deterministic: bool = False
    kernels: Kernels = "auto"


def plan_runtime(
    config: ModelConfig, contract: ModelContract, options: RuntimeOptions
) -> RuntimeConfig:
    """What the options come to for this model.

    Raises `ContractMismatch`, and `ModelError` where the device is not there.
    """
    max_model_len = options.max_model_len
    if max_model_len is None:
        longest = contract.limits.get("max_seq", config.max_position_embeddings)
        max_model_len = min(longest, config.max_position_embeddings)
    if max_model_len > config.max_position_embeddings:
        raise contract.mismatch(
            "max_model_len",
            found=f"{max_model_len:,}",
            expected=f"at most {config.max_position_embeddings:,}, the model's own context",
        )
    dtype = options.dtype or config.torch_dtype
    if dtype not in ("bfloat16", "float32"):
        raise contract.mismatch(
            "dtype",
            found=dtype,
            expected="bfloat16 or float32",
            hint="float16 overflows in Qwen3; choose one with --dtype.",
        )
    page_size = options.page_size or contract.limits.get("page_size", DEFAULT_PAGE_SIZE)
    max_step_tokens = max(options.max_step_tokens, options.max_rows)
    logits_bytes = torch.float32.itemsize * contract.hooks.logits_width(config)
    runtime = RuntimeConfig(
        device=find_device(options.device),
        dtype=getattr(torch, dtype),
        max_batch_size=options.max_rows,
        max_seq_len=max_model_len,
        max_step_tokens=max_step_tokens,
        page_size=page_size,
        total_kv_pages=options.kv_pages or 1,
        kernels=options.kernels,
        max_logit_rows=min(max_step_tokens, max(1, SCORED_LOGITS_BYTES // logits_bytes)),
        deterministic=options.deterministic,
    )
    if options.kv_pages is None:
        pages = _pages_that_fit(config, contract, runtime)
        runtime = dataclasses.replace(runtime, total_kv_pages=pages)
    return runtime


def find_device(name: str) -> torch.device:
    """The device of that name, such as ``cpu``, ``cuda:1`` or ``npu``.

    Raises `ModelError` where there is no such device, or its package is not installed.
    """
    kind = name.partition(":")[0]
    if kind == "npu":
        try:
            # torch knows the name only once this package is there.
            importlib.import_module("torch_npu")
        except ImportError as error:
            raise ModelError(
                f"--device {name} needs torch_npu, which cannot be imported: {error}."
            ) from error
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"--device {name}: torch knows no such device.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"--device {name}: torch finds no CUDA device here.")
    return device


def _pages_that_fit(config: ModelConfig, contract: ModelContract, runtime: RuntimeConfig) -> int:
    """As many pages as all rows could ever use, within a share of the memory that the weights
    leave free."""
    spec = contract.hooks.cache_spec(config, runtime)
    useful = runtime.max_batch_size * -(-runtime.max_seq_len // spec.page_size)
    left = free_memory(runtime.device) - contract.hooks.weight_bytes(config, runtime)
    return max(1, min(useful, int(left * KV_MEMORY_SHARE) // spec.bytes_per_page))


def free_memory(device: torch.device) -> int:
    """Bytes that may still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "npu":
        free: int = torch.npu.mem_get_info(device)[0]  # type: ignore[attr-defined]
        return free
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    readers: list[Callable[[], int]] = [_meminfo_available, _cgroup_available]
    for read in readers:
        try:
            available = read() if read is _meminfo_available else min(available, read())
        except (OSError, ValueError):
            continue  # not Linux, or no limit in force
    return available


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError("no MemAvailable")


def _cgroup_available() -> int:
    root = Path("/sys/fs/cgroup")
    limit = int((root / "memory.max").read_text())
    return limit - int((root / "memory.current").read_text())
