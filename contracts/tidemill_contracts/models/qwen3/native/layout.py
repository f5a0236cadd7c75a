"""How the C++ library has weights and pages lie in memory, in readable torch.

The matrix unit multiplies a B tile of 16 pairs of values by 16 columns, or of 16 fours in int8. So
weights [N, K] lie as [N / 16 strips, K / 32 tiles, 16 pairs, 16 columns, 2], in int8 as
[N / 16, K / 64, 16 fours, 16 columns, 4]; gate and up alternate, 32 columns each, so that one piece
of work has both. A page of K holds, for each head, [PAGE / 16, D / 32, 16 pairs of
D, 16 tokens, 2], and a page of V [PAGE / 32, D / 16, 16 pairs of tokens, 16 of D, 2]: both are B
tiles as they lie. Every tensor keeps its logical shape and its size in bytes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill_contracts.models.qwen3.native.library import Library

STRIP, DEPTH, SPAN = 16, 32, 32
"""Columns of a strip, values that a tile is deep, tokens of a chunk of V."""

LINE, INT8_DEPTH = 64, 64
"""Bytes of a tile's line, and so the values that one is deep in int8."""

GATED = 32
"""Rows of gate, and then of up, in turn."""

PACKERS = min(8, os.cpu_count() or 1)
"""Threads that pack a matrix while a model loads."""


def tiled(weight: Tensor) -> Tensor:
    """[…, N, K] as strips of B tiles."""
    *outer, n, k = weight.shape
    depth = LINE // weight.itemsize
    together = depth // STRIP
    split = weight.reshape(-1, n // STRIP, STRIP, k // depth, depth // together, together)
    return split.permute(0, 1, 3, 4, 2, 5).reshape(*outer, n, k)


def untiled(weight: Tensor) -> Tensor:
    """The other way round."""
    *outer, n, k = weight.shape
    depth = LINE // weight.itemsize
    together = depth // STRIP
    split = weight.reshape(-1, n // STRIP, k // depth, depth // together, STRIP, together)
    return split.permute(0, 1, 4, 2, 3, 5).reshape(*outer, n, k)


def alternated(gate_up: Tensor) -> Tensor:
    """[2·I, …], gate then up, with 32 rows of gate and 32 of up in turn."""
    rows, *inner = gate_up.shape
    split = gate_up.reshape(2, rows // (2 * GATED), GATED, *inner)
    return split.transpose(0, 1).reshape(rows, *inner)


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


def huge(shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Zeros in huge pages where the system has them: a stream over small ones reads a quarter
    slower. Memory that is never touched is never taken."""
    size = torch.Size(shape).numel() * dtype.itemsize
    # Private: shared memory, Python's default, has huge pages on few systems.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows that one call packs."""

    source: int
    """Where they lie, in bf16."""
    strip: int
    """The strip of the target where the first of them goes."""
    rows: int
    group: int
    """Strips that stay beside each other."""
    stride: int
    """From where one group goes to where the next one does, in strips."""


def _filled(parts: Sequence[Tensor], gated: bool, pack: Callable[[_Piece], None]) -> None:
    """Packs all parts, in pieces for the cores: the time is that of the memory, and of making
    it."""
    if parts[0].is_meta:
        return  # nobody will read it: a checkpoint is only looked at
    sources = [part.to(torch.bfloat16).contiguous() for part in parts]
    group = GATED // STRIP if gated else 1
    stride = group * len(parts) if gated else 1
    pieces, at = [], 0
    for source in sources:
        strips = len(source) // STRIP
        size = -(-strips // (PACKERS * group)) * group
        for first in range(0, strips, size):
            rows = source[first * STRIP : (first + size) * STRIP]
            place = at + first // group * stride
            pieces.append(_Piece(rows.data_ptr(), place, len(rows), group, stride))
        at += group if gated else strips
    with ThreadPoolExecutor(PACKERS) as pool:
        for done in [pool.submit(pack, piece) for piece in pieces]:
            done.result()


class Tiled:
    """`MatrixLayout` of the library: `tiled` matrices, gate and up `alternated`."""

    embeds = True

    def __init__(self, library: Library) -> None:
        self._library = library

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        assert dtype == torch.bfloat16
        return (huge(shape),)

    def fill(self, target: tuple[Tensor, ...], parts: Sequence[Tensor], *, gated: bool) -> None:
        (matrix,) = target
        depth, address = matrix.shape[1], matrix.data_ptr()
        strip_bytes = STRIP * depth * matrix.itemsize

        def pack(piece: _Piece) -> None:
            to = address + piece.strip * strip_bytes
            self._library.pack(piece.source, to, piece.rows, depth, piece.group, piece.stride)

        _filled(parts, gated, pack)


class TiledInt8:
    """The same in int8, as `int8.quantize` rounds; the scales in the order of the strips."""

    embeds = False

    def __init__(self, library: Library) -> None:
        self._library = library

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        return huge(shape, torch.int8), torch.zeros(shape[:-1])

    def fill(self, target: tuple[Tensor, ...], parts: Sequence[Tensor], *, gated: bool) -> None:
        matrix, scales = target
        depth = matrix.shape[1]
        values_at, scales_at = matrix.data_ptr(), scales.data_ptr()
        scale_bytes = STRIP * scales.itemsize

        def pack(piece: _Piece) -> None:
            self._library.quantize(
                piece.source,
                values_at + piece.strip * STRIP * depth,
                scales_at + piece.strip * scale_bytes,
                piece.rows,
                depth,
                piece.group,
                piece.stride,
            )

        _filled(parts, gated, pack)
