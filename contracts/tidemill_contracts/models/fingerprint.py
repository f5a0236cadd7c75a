"""Which weights a checkpoint holds, as one hash: of all of them, or of a sample."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tidemill_contracts.models.checkpoint import find_files, read_header
from tidemill_contracts.models.errors import CheckpointError
from tidemill_contracts.wire.receipt import hash_json

_PIECE_BYTES = 8 << 20
_SAMPLE_BYTES = 1024


def hash_weights(model_dir: Path) -> str:
    """sha256 over all tensors, in the order of their names: ``hash_json`` of a list of
    ``[name, dtype, shape, sha256 of the bytes]``.

    The same for one file and for shards, and whatever else the files' headers say. Reads the whole
    checkpoint: about a second a gigabyte from a warm page cache, without the GIL. Raises
    `CheckpointError`.
    """
    return _hash(model_dir, None)


def sample_weights(model_dir: Path) -> str:
    """As `hash_weights`, of no more than the first KiB of each tensor.

    Tells one checkpoint from another, a fine-tuned one among them, in some milliseconds; what
    comes after the first KiB is taken on trust. Raises `CheckpointError`.
    """
    return _hash(model_dir, _SAMPLE_BYTES)


def _hash(model_dir: Path, sample: int | None) -> str:
    tensors: list[tuple[str, str, list[int], str]] = []
    files, _ = find_files(model_dir)
    for path in files:
        header, data_start, _ = read_header(path)
        with path.open("rb") as file:
            for name, facts in header.items():
                begin, end = facts["data_offsets"]
                file.seek(data_start + begin)
                digest = hashlib.sha256()
                left = end - begin if sample is None else min(end - begin, sample)
                while left:
                    piece = file.read(min(left, _PIECE_BYTES))
                    if not piece:
                        raise CheckpointError(f"{path} is truncated in tensor {name}.")
                    digest.update(piece)
                    left -= len(piece)
                tensors.append((name, facts["dtype"], facts["shape"], digest.hexdigest()))
    return hash_json(sorted(tensors))
