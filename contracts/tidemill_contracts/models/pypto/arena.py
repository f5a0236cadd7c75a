"""The shared memory that one step's tensors travel in.

One anonymous file, mapped by both processes and made before the child's device workers fork:
host memory that they did not inherit is invisible to them (hw-native-sys/simpler#1027). Mapped
through torch, because PyPTO's device worker takes no host tensor that torch does not know to be
shared. Linux only, as CANN is.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

ALIGNMENT = 512
"""Bytes; Ascend's data copies work in blocks of 32, and one cache line more costs nothing."""


class ArenaSize(msgspec.Struct, frozen=True, kw_only=True):
    """The largest step."""

    rows: int
    """Whole windows."""
    tokens: int
    """Packed tokens of one prefill call."""
    pages: int
    """Columns of the block table."""
    vocab: int
    """Padded."""


@dataclass(frozen=True, slots=True)
class Arena:
    """The tensors of a step; each call uses the front of them."""

    input_ids: Tensor
    """int32 [tokens]."""
    slot_mapping: Tensor
    """int32 [tokens]."""
    seq_lens: Tensor
    """int32 [rows]."""
    chunk_lens: Tensor
    """int32 [rows]."""
    chunk_offsets: Tensor
    """int32 [rows]."""
    block_table: Tensor
    """int32 [rows, pages]."""
    logits: Tensor
    """float32 [rows, vocab]; the kernels write into it."""


def make_arena_file() -> int:
    """An anonymous file of no length yet; returns its descriptor."""
    return os.memfd_create("tidemill-pypto")


def shared_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of its own that processes forked later share; counts against no ``/dev/shm``."""
    count = math.prod(shape) * dtype.itemsize
    fd = make_arena_file()
    try:
        os.ftruncate(fd, max(count, 1))
        memory = _map(fd, count)
    finally:
        os.close(fd)
    return memory.view(dtype).view(shape)


def map_arena(fd: int, size: ArenaSize) -> Arena:
    """Maps the file, after growing it where it is too short."""
    tokens = max(size.tokens, size.rows)
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "input_ids": ((tokens,), torch.int32),
        "slot_mapping": ((tokens,), torch.int32),
        "seq_lens": ((size.rows,), torch.int32),
        "chunk_lens": ((size.rows,), torch.int32),
        "chunk_offsets": ((size.rows,), torch.int32),
        "block_table": ((size.rows, size.pages), torch.int32),
        "logits": ((size.rows, size.vocab), torch.float32),
    }
    spans: dict[str, tuple[int, int]] = {}
    end = 0
    for name, (shape, dtype) in layout.items():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + math.prod(shape) * dtype.itemsize
        spans[name] = (start, end)
    # Never made shorter: the other side may still have the longer one mapped.
    if os.fstat(fd).st_size < end:
        os.ftruncate(fd, end)
    memory = _map(fd, end)
    tensors = {
        name: memory[slice(*spans[name])].view(dtype).view(shape)
        for name, (shape, dtype) in layout.items()
    }
    return Arena(**tensors)


def _map(fd: int, count: int) -> Tensor:
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=count, dtype=torch.uint8)
