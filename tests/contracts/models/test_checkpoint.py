"""A damaged or ill-fitting checkpoint is refused by file and tensor, before it gives gibberish."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.contracts.models.driver import Driver, lively_tensors, small_config
from tidemill_contracts.models.checkpoint import Checkpoint
from tidemill_contracts.models.errors import CheckpointError
from tools.make_checkpoint import write_checkpoint

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def config() -> dict[str, Any]:
    return small_config()


@pytest.fixture
def tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    return lively_tensors(config, seed=1)


@pytest.fixture
def single(tmp_path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    return write_checkpoint(tmp_path / "single", config, tensors=tensors)


@pytest.fixture
def sharded(tmp_path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    return write_checkpoint(tmp_path / "sharded", config, tensors=tensors, shards=2)


def first_logits(model_dir: Path) -> Tensor:
    driver = Driver(model_dir)
    return driver.prefill((driver.row(), PROMPT))


def edit_index(model_dir: Path, change: Callable[[dict[str, str]], None]) -> None:
    path = model_dir / INDEX
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def edit_shard(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def refused(model_dir: Path, *words: str) -> None:
    """Loading raises `CheckpointError` whose message holds all `words`."""
    with pytest.raises(CheckpointError) as caught:
        Driver(model_dir)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


class TestLoads:
    def test_one_file_and_shards_alike(self, single: Path, sharded: Path) -> None:
        assert torch.equal(first_logits(single), first_logits(sharded))

    def test_a_stray_consolidated_file_is_ignored(self, sharded: Path, single: Path) -> None:
        (sharded / "consolidated.safetensors").write_bytes(b"anything")
        assert torch.equal(first_logits(sharded), first_logits(single))

    def test_names_without_the_model_prefix(
        self, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Tensor], single: Path
    ) -> None:
        bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        found = first_logits(write_checkpoint(tmp_path / "bare", config, tensors=bare))
        assert torch.equal(found, first_logits(single))

    def test_a_tied_model_with_a_head_besides(
        self, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Tensor], single: Path
    ) -> None:
        more = {**tensors, "lm_head.weight": torch.zeros(101, 32)}
        found = first_logits(write_checkpoint(tmp_path / "more", config, tensors=more))
        assert torch.equal(found, first_logits(single))

    def test_rotary_buffers_of_old_exports_are_ignored(
        self, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Tensor], single: Path
    ) -> None:
        more = {
            **tensors,
            "model.rotary_emb.inv_freq": torch.ones(8),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        }
        found = first_logits(write_checkpoint(tmp_path / "more", config, tensors=more))
        assert torch.equal(found, first_logits(single))

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    @pytest.mark.parametrize("target", [torch.bfloat16, torch.float32])
    def test_any_float_file_in_any_model_dtype(
        self,
        tmp_path: Path,
        config: dict[str, Any],
        tensors: dict[str, Tensor],
        dtype: str,
        target: torch.dtype,
    ) -> None:
        config["torch_dtype"] = dtype
        model_dir = write_checkpoint(tmp_path / "m", config, tensors=tensors)
        driver = Driver(model_dir, dtype=target)
        saved = tensors["model.embed_tokens.weight"].to(getattr(torch, dtype))
        assert torch.equal(driver.static.embed, saved.to(target))

    def test_tied_weights_share_storage(self, single: Path) -> None:
        static = Driver(single).static
        assert static.lm_head.data_ptr() == static.embed.data_ptr()
        on_disk = (single / "model.safetensors").stat().st_size
        # Besides the checkpoint: two RoPE tables of 512 positions and epsilon; less the header.
        assert static.nbytes < on_disk + 2 * 512 * 16 * 4 + 4

    def test_each_final_tensor_is_exported_once(self, single: Path) -> None:
        driver = Driver(single)
        exported: list[Tensor] = []

        def export(tensor: Tensor) -> Tensor:
            exported.append(tensor)
            return tensor

        static = driver.contract.hooks.prepare_weights(
            Checkpoint(single), driver.config, driver.runtime, export
        )
        assert len({tensor.data_ptr() for tensor in exported}) == len(exported)
        assert sum(tensor.nbytes for tensor in exported) == static.nbytes


class TestDirectory:
    def test_no_directory(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="nowhere: no such model directory"):
            Checkpoint(tmp_path / "nowhere")

    def test_no_weights(self, single: Path) -> None:
        (single / "model.safetensors").unlink()
        refused(single, str(single), "neither model.safetensors nor")

    def test_pickles_only(self, single: Path) -> None:
        (single / "model.safetensors").rename(single / "pytorch_model.bin")
        refused(single, "pytorch_model.bin is a pickle, which is never read")

    def test_a_single_file_beside_an_index_that_does_not_name_it(
        self, sharded: Path, single: Path
    ) -> None:
        (single / "model.safetensors").rename(sharded / "model.safetensors")
        refused(sharded, "both model.safetensors and model.safetensors.index.json")


class TestIndex:
    def test_names_a_missing_shard(self, sharded: Path) -> None:
        (sharded / SECOND).unlink()
        refused(sharded, INDEX, SECOND, "missing", "model.layers.1.input_layernorm.weight")

    def test_lists_a_tensor_that_its_shard_lacks(self, sharded: Path) -> None:
        edit_shard(sharded / SECOND, lambda tensors: tensors.pop(Q_PROJ))
        refused(sharded, INDEX, Q_PROJ, SECOND, "does not hold")

    def test_places_a_tensor_in_the_wrong_shard(self, sharded: Path) -> None:
        edit_index(sharded, lambda weight_map: weight_map.update({Q_PROJ: FIRST}))
        refused(sharded, Q_PROJ, FIRST, SECOND)

    def test_does_not_list_a_tensor_of_its_shard(self, sharded: Path) -> None:
        edit_index(sharded, lambda weight_map: weight_map.pop(Q_PROJ))
        refused(sharded, SECOND, Q_PROJ, "not listed")

    def test_two_shards_hold_one_tensor(self, sharded: Path) -> None:
        again = load_file(sharded / SECOND)[Q_PROJ].clone()
        edit_shard(sharded / FIRST, lambda tensors: tensors.update({Q_PROJ: again}))
        refused(sharded, FIRST, SECOND, Q_PROJ)

    @pytest.mark.parametrize("shard", ["../up.safetensors", "/etc/passwd", "..", 7, ""])
    def test_leads_out_of_the_directory(self, sharded: Path, shard: Any) -> None:
        edit_index(sharded, lambda weight_map: weight_map.update({Q_PROJ: shard}))
        refused(sharded, INDEX, Q_PROJ, "is not the name of a safetensors file")

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', "\xff"])
    def test_is_no_index(self, sharded: Path, text: str) -> None:
        (sharded / INDEX).write_bytes(text.encode("latin-1"))
        refused(sharded, str(sharded / INDEX))


class TestFile:
    """The file's length is checked against its header before a byte of it is mapped."""

    def test_cut_by_one_byte(self, sharded: Path) -> None:
        path = sharded / SECOND
        path.write_bytes(path.read_bytes()[:-1])
        last = max(_header(path).items(), key=lambda item: item[1]["data_offsets"][1])[0]
        refused(sharded, str(path), "truncated", last)

    def test_cut_in_half(self, sharded: Path) -> None:
        path = sharded / SECOND
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        refused(sharded, str(path), "truncated", "tensor ")

    @pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 200])
    def test_cut_inside_the_header(self, sharded: Path, size: int) -> None:
        path = sharded / SECOND
        path.write_bytes(path.read_bytes()[:size])
        refused(sharded, str(path), "truncated inside its header", f"{size} bytes")

    @pytest.mark.parametrize("extra", [b"\0", b"\0" * 4096])
    def test_trailing_bytes(self, single: Path, extra: bytes) -> None:
        path = single / "model.safetensors"
        path.write_bytes(path.read_bytes() + extra)
        refused(single, str(path), f"{len(extra)} bytes after its last tensor")

    def test_a_git_lfs_pointer(self, single: Path) -> None:
        path = single / "model.safetensors"
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        refused(single, str(path), "Git LFS pointer")

    @pytest.mark.parametrize("content", [b"\xff" * 64, b"PK\x03\x04" + b"\x77" * 90])
    def test_some_other_file(self, single: Path, content: bytes) -> None:
        path = single / "model.safetensors"
        path.write_bytes(content)
        refused(single, str(path), "not a safetensors file")

    @pytest.mark.parametrize("header", [b"{", b"[]", b"\xff\xfe", b'"x"'])
    def test_a_header_that_is_no_object(self, single: Path, header: bytes) -> None:
        path = single / "model.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        refused(single, str(path), "header is not")

    @pytest.mark.parametrize(
        "facts",
        [
            {},
            None,
            {"dtype": "F32", "shape": [2], "data_offsets": [0]},
            {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]},
            {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
            {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
            {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]},
        ],
    )
    def test_a_header_that_lies(self, single: Path, facts: Any) -> None:
        path = single / "model.safetensors"
        header = json.dumps({"some.weight": facts}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
        refused(single, str(path), "some.weight")


class TestTensors:
    def test_missing(self, single: Path) -> None:
        edit_shard(single / "model.safetensors", lambda tensors: tensors.pop(Q_PROJ))
        refused(single, str(single), Q_PROJ, "missing")

    def test_missing_head_of_an_untied_model(
        self, tmp_path: Path, tensors: dict[str, Tensor]
    ) -> None:
        config = small_config(tie_word_embeddings=False)
        model_dir = write_checkpoint(tmp_path / "m", config, tensors=tensors)
        refused(model_dir, str(model_dir), "lm_head.weight", "tie_word_embeddings is false")

    def test_missing_embedding(self, single: Path) -> None:
        name = "model.embed_tokens.weight"
        edit_shard(single / "model.safetensors", lambda tensors: tensors.pop(name))
        refused(single, name, "missing")

    def test_wrong_shape(self, sharded: Path) -> None:
        edit_shard(sharded / SECOND, lambda tensors: tensors.update({Q_PROJ: torch.zeros(32, 64)}))
        refused(sharded, str(sharded / SECOND), Q_PROJ, "[32, 64]", "[64, 32]")

    @pytest.mark.parametrize(
        "dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.bool, torch.int64]
    )
    def test_unexpected_dtype(self, single: Path, dtype: torch.dtype) -> None:
        path = single / "model.safetensors"
        edit_shard(path, lambda tensors: tensors.update({Q_PROJ: torch.ones(64, 32).to(dtype)}))
        refused(single, str(path), Q_PROJ, "dtype")

    def test_left_over(self, sharded: Path) -> None:
        def add(tensors: dict[str, Tensor]) -> None:
            tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(64)
            tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(1)

        edit_shard(sharded / SECOND, add)
        names = ["model.layers.1.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight"]
        edit_index(sharded, lambda weight_map: weight_map.update(dict.fromkeys(names, SECOND)))
        refused(sharded, *names, SECOND, "no place for")

    def test_many_left_over_are_counted(self, single: Path) -> None:
        extra = {f"extra.{number}": torch.zeros(1) for number in range(9)}
        edit_shard(single / "model.safetensors", lambda tensors: tensors.update(extra))
        refused(single, "extra.0", "and 4 more")

    def test_taken_twice(self, single: Path) -> None:
        checkpoint = Checkpoint(single)
        checkpoint.take("model.norm.weight", (32,))
        assert "model.norm.weight" not in checkpoint.names()
        with pytest.raises(CheckpointError, match=re.escape("model.norm.weight was taken already")):
            checkpoint.take("model.norm.weight", (32,))


def _header(path: Path) -> Mapping[str, Any]:
    data = path.read_bytes()
    header: dict[str, Any] = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    header.pop("__metadata__", None)
    return header
