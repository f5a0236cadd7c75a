"""How the C++ library has weights and pages lie in memory, in readable torch.

The matrix unit multiplies a B tile of 16 pairs of values by 16 columns. So weights [N, K] lie as
[N / 16 strips, K / 32 tiles, 16 pairs, 16 columns, 2]; gate and up alternate, 32 columns each, so
that one piece of work has both. A page of K holds, for each head, [PAGE / 16, D / 32, 16 pairs of
D, 16 tokens, 2], and a page of V [PAGE / 32, D / 16, 16 pairs of tokens, 16 of D, 2]: both are B
tiles as they lie. Every tensor keeps its logical shape and its size in bytes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from tidemill_contracts.models.qwen3.native.library import Library

STRIP, DEPTH, SPAN = 16, 32, 32
"""Columns of a strip, values that a tile is deep, tokens of a chunk of V."""

PACKERS = min(8, os.cpu_count() or 1)
"""Threads that pack a matrix while a model loads."""


def tiled(weight: Tensor) -> Tensor:
    """[…, N, K] as strips of B tiles."""
    *outer, n, k = weight.shape
    split = weight.reshape(-1, n // STRIP, STRIP, k // DEPTH, DEPTH // 2, 2)
    return split.permute(0, 1, 3, 4, 2, 5).reshape(*outer, n, k)


def untiled(weight: Tensor) -> Tensor:
    """The other way round."""
    *outer, n, k = weight.shape
    split = weight.reshape(-1, n // STRIP, k // DEPTH, DEPTH // 2, STRIP, 2)
    return split.permute(0, 1, 4, 2, 3, 5).reshape(*outer, n, k)


def alternated(gate_up: Tensor) -> Tensor:
    """[…, 2·I, H], gate then up, with 32 rows of gate and 32 of up in turn."""
    *outer, rows, hidden = gate_up.shape
    split = gate_up.reshape(-1, 2, rows // (2 * DEPTH), DEPTH, hidden)
    return split.transpose(1, 2).reshape(*outer, rows, hidden)


def k_page(k: Tensor) -> Tensor:
    """[PAGE, KVH, D] as a page of K, flat."""
    size, heads, dim = k.shape
    split = k.reshape(size // STRIP, STRIP, heads, dim // DEPTH, DEPTH // 2, 2)
    return split.permute(2, 0, 3, 4, 1, 5).flatten()


def v_page(v: Tensor) -> Tensor:
    """[PAGE, KVH, D] as a page of V, flat."""
    size, heads, dim = v.shape
    split = v.reshape(size // SPAN, SPAN // 2, 2, heads, dim // STRIP, STRIP)
    return split.permute(3, 0, 4, 1, 5, 2).flatten()


def huge(shape: Sequence[int]) -> Tensor:
    """bf16 zeros in huge pages where the system has them: a stream over small ones reads a quarter
    slower. Memory that is never touched is never taken."""
    size = torch.Size(shape).numel() * torch.bfloat16.itemsize
    # Private: shared memory, Python's default, has huge pages on few systems.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.bfloat16).view(*shape)


class Tiled:
    """`MatrixLayout` of the library: `tiled` matrices, gate and up `alternated`."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert dtype == torch.bfloat16
        return huge(shape)

    def fill(self, target: Tensor, parts: Sequence[Tensor], *, gated: bool) -> None:
        depth = target.shape[1]
        strip_bytes = STRIP * depth * target.itemsize
        sources = [part.to(torch.bfloat16).contiguous() for part in parts]
        # Strips that stay beside each other, and from where to where the next of them go.
        group = DEPTH // STRIP if gated else 1
        stride = group * len(parts) if gated else 1
        work: list[tuple[int, int, int, int, int, int]] = []
        at = target.data_ptr()
        for source in sources:
            strips = len(source) // STRIP
            # In pieces for the cores: the time is that of the memory, and of making it.
            piece = -(-strips // (PACKERS * group)) * group
            for first in range(0, strips, piece):
                place = first // group * stride
                work.append(
                    (
                        source.data_ptr() + first * strip_bytes,
                        at + place * strip_bytes,
                        min(piece, strips - first) * STRIP,
                        depth,
                        group,
                        stride,
                    )
                )
            at += (group if gated else strips) * strip_bytes
        with ThreadPoolExecutor(PACKERS) as pool:
            for done in [pool.submit(self._library.pack, *piece) for piece in work]:
                done.result()
