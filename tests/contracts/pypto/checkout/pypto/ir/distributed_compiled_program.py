from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class DistributedConfig:
    device_ids: list[int]
    num_sub_workers: int
    block_dim: int
    aicpu_thread_num: int


@dataclass(eq=False)
class DistributedCompiledProgram:
    program: Any
    config: Any
