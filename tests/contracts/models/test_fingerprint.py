"""The hash of a checkpoint's weights: of what they are, not of how they lie in files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.contracts.models.driver import small_config
from tidemill_contracts.models.fingerprint import hash_weights, sample_weights
from tools.make_checkpoint import tensor_shapes, write_checkpoint


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = tensor_shapes(small_config()).items()
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes}


def test_shards_and_other_metadata_do_not_change_it(tmp_path: Path) -> None:
    tensors = _tensors()
    whole = write_checkpoint(tmp_path / "whole", small_config(), tensors=tensors)
    shards = tmp_path / "shards"
    shards.mkdir()
    names = sorted(tensors)
    files = {"b.safetensors": names[:5], "a.safetensors": names[5:]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, shards / file, {"made": "elsewhere"})
    weight_map = {name: file for file, held in files.items() for name in held}
    index = shards / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert hash_weights(shards) == hash_weights(whole)
    assert sample_weights(shards) == sample_weights(whole) != hash_weights(whole)


@pytest.mark.parametrize("hash_of", [hash_weights, sample_weights])
def test_one_changed_bit_changes_it(tmp_path: Path, hash_of: Callable[[Path], str]) -> None:
    tensors = _tensors()
    before = hash_of(write_checkpoint(tmp_path / "a", small_config(), tensors=tensors))
    tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
    assert hash_of(write_checkpoint(tmp_path / "b", small_config(), tensors=tensors)) != before
