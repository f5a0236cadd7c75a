"""A safetensors checkpoint on disk: found, checked against itself, read tensor by tensor.

Everything that can be known from file lengths, headers and the index is checked before the first
tensor is read: a truncated file that is only mapped reads as zeros and answers in gibberish. The
files are memory-mapped, so a tensor costs memory only once it is copied. Which tensors a model
needs, and in which layout, is its contract's business.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tidemill_contracts.models.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Buffers that older exports saved along with the weights; they are computed from the config.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit (safetensors, "Format")."""

LFS_POINTER = b"version "
"""The first bytes of what a clone without Git LFS leaves in a file's place."""


class Checkpoint:
    """The tensors of a model directory: `WeightSource` over one safetensors file or an index.

    A ``consolidated.safetensors`` or any other file that the index does not name is ignored.
    Raises `CheckpointError`, naming file and tensor, where the files do not agree with themselves
    or with each other.
    """

    def __init__(self, model_dir: str | Path) -> None:
        self.directory = Path(model_dir)
        """For a backend that reads the files itself, in another process."""
        files, index = find_files(self.directory)
        self._entries: dict[str, _Entry] = {}
        for path in files:
            for name, entry in _read_entries(path).items():
                if other := self._entries.get(name):
                    raise CheckpointError(
                        f"{path}: tensor {name} is in {other.path.name} too; which one counts"
                        " cannot be told."
                    )
                self._entries[name] = entry
        if index is not None:
            _check_index(self.directory / INDEX_FILE, index, self._entries)
        self._left = {
            name: entry
            for name, entry in self._entries.items()
            if not name.endswith(IGNORED_SUFFIXES)
        }
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def names(self) -> list[str]:
        """The tensors that have not been taken yet."""
        return list(self._left)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor as saved (bf16, fp16 or fp32), a view of the mapped file.

        Raises `CheckpointError` where it is missing, was taken before, or has another shape.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.directory}: tensor {name} is missing.")
        if name not in self._left:
            raise CheckpointError(f"{entry.path}: tensor {name} was taken already.")
        if entry.shape != shape:
            raise CheckpointError(
                f"{entry.path}: tensor {name} has shape {list(entry.shape)},"
                f" config.json asks for {list(shape)}."
            )
        tensor: Tensor = self._file(entry.path).get_tensor(name)
        del self._left[name]
        return tensor

    def finish(self) -> None:
        """Closes the files. Raises `CheckpointError` where tensors are left over."""
        self._stack.close()
        self._open.clear()
        if self._left:
            shown = [f"{name} ({entry.path.name})" for name, entry in sorted(self._left.items())]
            more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
            raise CheckpointError(
                f"{self.directory}: the checkpoint holds tensors that the model has no place for:"
                f" {', '.join(shown[:5])}{more}."
            )

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be opened: {error}.") from error
        return self._open[path]


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a file's header says of one tensor."""

    path: Path
    shape: tuple[int, ...]


def find_files(directory: Path) -> tuple[list[Path], Mapping[str, str] | None]:
    """The files to read, and the index's weight map where there is one."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such model directory.")
    single, index_path = directory / SINGLE_FILE, directory / INDEX_FILE
    if not index_path.exists():
        if single.exists():
            return [single], None
        others = sorted(path.name for path in directory.glob("*.bin"))
        hint = f" ({others[0]} is a pickle, which is never read)" if others else ""
        raise CheckpointError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}.")
    weight_map = _read_index(index_path)
    shards = sorted(set(weight_map.values()))
    if single.exists() and SINGLE_FILE not in shards:
        raise CheckpointError(
            f"{directory} has both {SINGLE_FILE} and {INDEX_FILE}, which does not name it;"
            " remove the one that is out of date."
        )
    for shard in shards:
        if not (directory / shard).is_file():
            tensor = next(name for name, file in weight_map.items() if file == shard)
            raise CheckpointError(
                f"{index_path} names {shard}, which is missing (tensor {tensor} and others);"
                " the download is incomplete."
            )
    return [directory / shard for shard in shards], weight_map


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        index = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map.")
    for name, shard in weight_map.items():
        # A shard lies beside its index: a path that leads elsewhere is not followed.
        if (
            not isinstance(shard, str)
            or Path(shard).name != shard
            or not shard.endswith(".safetensors")
        ):
            raise CheckpointError(
                f"{path}: tensor {name}: {shard!r} is not the name of a safetensors file."
            )
    return weight_map


def _check_index(path: Path, weight_map: Mapping[str, str], entries: Mapping[str, _Entry]) -> None:
    for name, shard in weight_map.items():
        if name not in entries:
            raise CheckpointError(f"{path} lists tensor {name}, which {shard} does not hold.")
        if entries[name].path.name != shard:
            raise CheckpointError(
                f"{path} places tensor {name} in {shard}, but {entries[name].path.name} holds it."
            )
    for name, entry in entries.items():
        if name not in weight_map:
            raise CheckpointError(f"{entry.path}: tensor {name} is not listed in {path.name}.")


def _read_entries(path: Path) -> dict[str, _Entry]:
    """The tensors of one file, after its length has been checked against its header.

    The format: 8 bytes of little-endian header length, a JSON header, then the tensors without
    gaps (https://github.com/huggingface/safetensors, "Format").
    """
    header, data_start, size = read_header(path)
    entries: dict[str, _Entry] = {}
    spans: list[tuple[int, int, str]] = []
    for name, facts in header.items():
        try:
            dtype = facts["dtype"]
            shape = tuple(int(side) for side in facts["shape"])
            begin, end = (int(offset) for offset in facts["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: tensor {name}: its header is malformed.") from error
        if not name.endswith(IGNORED_SUFFIXES):
            if dtype not in ITEM_BYTES:
                raise CheckpointError(
                    f"{path}: tensor {name} has dtype {dtype};"
                    f" {', '.join(ITEM_BYTES)} can be loaded."
                )
            if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
                raise CheckpointError(
                    f"{path}: tensor {name}: {end - begin} bytes do not hold {dtype} {list(shape)}."
                )
        entries[name] = _Entry(path, shape)
        spans.append((begin, end, name))

    expected = 0
    for begin, end, name in sorted(spans):
        if begin != expected:
            raise CheckpointError(
                f"{path}: tensor {name} begins at byte {begin} of the data, expected {expected}."
            )
        if data_start + end > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {name} ends at byte {data_start + end} of {size}."
                " Fetch the file again."
            )
        expected = end
    if data_start + expected < size:
        raise CheckpointError(
            f"{path} has {size - data_start - expected} bytes after its last tensor:"
            " the file is damaged."
        )
    return entries


def read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the data begin, and the file's length, in bytes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(LENGTH_BYTES)
            length = int.from_bytes(prefix, "little")
            text = file.read(length) if length <= MAX_HEADER_BYTES else b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if prefix == LFS_POINTER:
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file: run `git lfs pull`.")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path} is not a safetensors file.")
    if len(prefix) < LENGTH_BYTES or len(text) < length:
        raise CheckpointError(
            f"{path} is truncated inside its header ({size} bytes). Fetch the file again."
        )
    try:
        header = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: its header is not valid JSON: {error}.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is not a JSON object.")
    header.pop("__metadata__", None)
    return header, LENGTH_BYTES + length, size
