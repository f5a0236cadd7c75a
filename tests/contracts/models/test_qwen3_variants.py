"""One contract for each published size, told by shape alone, and two for everything else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts.models.driver import Driver, small_config, small_model, small_moe_config
from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import ModelContract, RuntimeConfig
from tidemill_contracts.models.errors import ContractMismatch
from tidemill_contracts.models.inspection import describe_contract
from tidemill_contracts.models.qwen3 import REGISTRATIONS
from tidemill_contracts.models.qwen3.native import library
from tidemill_contracts.models.qwen3.variants import QUANTIZED, VARIANTS
from tidemill_contracts.models.registry import find_contract_for_model_config, get_contract
from tidemill_contracts.models.startup import check
from tools.make_checkpoint import published_config, tensor_shapes

SIZES = [variant.name for variant in VARIANTS if variant.shape]
RUNTIME = RuntimeConfig(
    device=torch.device("cpu"),
    dtype=torch.bfloat16,
    max_batch_size=4,
    max_seq_len=100,
    max_step_tokens=64,
    page_size=16,
    total_kv_pages=10,
)


def config_of(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**raw, **changes}, "the/model")


def contracts() -> list[ModelContract]:
    return [entry.factory() for entry in REGISTRATIONS if entry.factory is not None]


class TestMatching:
    @pytest.mark.parametrize("size", SIZES)
    def test_a_published_model_has_the_contract_of_its_size(self, size: str) -> None:
        config = config_of(published_config(size))
        contract = find_contract_for_model_config(config)
        assert str(contract.model) == f"qwen3/{size}"
        assert contract is get_contract("qwen3", size)
        check(contract, config, RUNTIME)

    @pytest.mark.parametrize("size", SIZES)
    def test_the_files_of_2507_have_the_contract_of_their_size(self, size: str) -> None:
        """Instruct and Thinking differ from the first release in context and theta alone."""
        config = config_of(
            published_config(size), max_position_embeddings=262_144, rope_theta=5_000_000
        )
        contract = find_contract_for_model_config(config)
        assert contract.model.variant == size
        check(contract, config, replace(RUNTIME, max_seq_len=262_144))

    @pytest.mark.parametrize("size", SIZES)
    def test_the_name_does_not_matter(self, size: str) -> None:
        config = replace(config_of(published_config(size)), model_id="/models/llama-2-70b")
        assert find_contract_for_model_config(config).model.variant == size

    @pytest.mark.parametrize(
        ("size", "change"),
        [
            ("0.6b", {"num_hidden_layers": 27}),
            ("4b", {"intermediate_size": 9729}),
            ("14b", {"head_dim": 64}),
            ("8b", {"num_key_value_heads": 4}),
            ("32b", {"hidden_size": 4096}),
            ("1.7b", {"vocab_size": 151_669, "eos_token_id": None}),
            ("30b-a3b", {"num_experts": 64}),
            ("30b-a3b", {"num_experts_per_tok": 4}),
            ("235b-a22b", {"moe_intermediate_size": 768}),
        ],
    )
    def test_any_other_shape_has_the_generic_one(self, size: str, change: dict[str, Any]) -> None:
        config = config_of(published_config(size), **change)
        contract = find_contract_for_model_config(config)
        assert contract.model.variant == ("moe" if "-" in size else "dense")
        assert "hidden_size" not in contract.limits

    def test_the_size_of_a_dense_layer_does_not_matter_where_there_is_none(self) -> None:
        config = config_of(published_config("30b-a3b"), intermediate_size=1)
        assert find_contract_for_model_config(config).model.variant == "30b-a3b"

    def test_transformers_name_for_the_experts_is_read(self) -> None:
        raw = published_config("30b-a3b")
        raw["num_local_experts"] = raw.pop("num_experts")
        assert find_contract_for_model_config(config_of(raw)).model.variant == "30b-a3b"


class TestLimits:
    @pytest.mark.parametrize("size", SIZES)
    def test_a_sized_contract_holds_the_model_to_its_size(self, size: str) -> None:
        contract = get_contract("qwen3", size)
        other = published_config("1.7b" if size == "0.6b" else "0.6b")
        with pytest.raises(ContractMismatch, match="limits"):
            check(contract, config_of(other), RUNTIME)

    def test_they_are_the_shape(self) -> None:
        assert get_contract("qwen3", "0.6b").limits == {
            "num_layers": 28,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "real_vocab": 151_936,
            "vocab": 151_936,
        }
        assert get_contract("qwen3", "235b-a22b").limits == {
            "num_layers": 94,
            "hidden_size": 4096,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "real_vocab": 151_936,
            "vocab": 151_936,
        }

    def test_the_size_of_the_experts_is_checked_too(self) -> None:
        contract = get_contract("qwen3", "30b-a3b")
        config = config_of(published_config("30b-a3b"), moe_intermediate_size=760)
        with pytest.raises(ContractMismatch) as caught:
            check(contract, config, RUNTIME)
        assert caught.value.field == "limits[moe_intermediate_size]"

    @pytest.mark.parametrize("size", [*SIZES, "tiny", "tiny-moe"])
    def test_weight_bytes_are_told_without_loading(self, size: str) -> None:
        raw = published_config(size)
        config = config_of(raw)
        contract = find_contract_for_model_config(config)
        on_disk = 2 * sum(torch.Size(shape).numel() for shape in tensor_shapes(raw).values())
        tables = 2 * 100 * config.head_dim * 4 + 4
        routing = 4 * (config.num_experts_per_tok + 1) if config.num_experts else 0
        assert contract.hooks.weight_bytes(config, RUNTIME) == on_disk + tables + routing


class TestContracts:
    def test_stages_are_filed_under_names_of_their_own(self) -> None:
        names = [
            kernel.public_name for contract in contracts() for kernel in contract.kernels.values()
        ]
        assert len(set(names)) == len(names) == 3 * len((*VARIANTS, *QUANTIZED))
        assert get_contract("qwen3", "0.6b").stage("decode").public_name == "qwen3_0.6b.decode"

    def test_fingerprints_differ(self) -> None:
        fingerprints = [contract.abi_fingerprint() for contract in contracts()]
        assert len(set(fingerprints)) == len(fingerprints)

    def test_each_is_made_once(self) -> None:
        assert all(
            entry.factory is not None and entry.factory() is entry.factory()
            for entry in REGISTRATIONS
        )

    @pytest.mark.parametrize(
        ("lacking", "dense"),
        [
            (None, "C++ in bfloat16, else plain torch"),
            ("the CPU has no amx_tile", "plain torch (the CPU has no amx_tile)"),
        ],
    )
    def test_each_says_what_drives_which_device(
        self, monkeypatch: pytest.MonkeyPatch, lacking: str | None, dense: str
    ) -> None:
        monkeypatch.setattr(library, "lacking", lambda: lacking)
        for contract in contracts():
            described = describe_contract(contract)["backend"]
            assert isinstance(described, dict)
            devices = {"cpu", "cuda", "npu"} if contract.model.quant is None else {"cpu"}
            assert described.keys() == devices
            arguments = {arg.name for arg in contract.kernels["decode"].args}
            assert described["cpu"] == ("plain torch" if "router" in arguments else dense)

    def test_several_serve_in_one_process(self, tmp_path: Path) -> None:
        """Binding one contract's kernels leaves another's alone."""
        dense_dir = small_model(tmp_path / "dense")
        dense = Driver(dense_dir)
        prompt = [3, 1, 4, 1, 5]
        expected = dense.prefill((dense.row(), prompt))
        moe = Driver(small_model(tmp_path / "moe", config=small_moe_config))
        moe.prefill((moe.row(), prompt))
        assert torch.equal(dense.prefill((dense.row(), prompt)), expected)
        assert torch.equal(Driver(dense_dir).prefill((moe.row(), prompt)), expected)


class TestRefusals:
    @pytest.mark.parametrize(
        ("raw", "change", "field"),
        [
            (small_moe_config, {"decoder_sparse_step": 2}, "decoder_sparse_step"),
            (small_moe_config, {"mlp_only_layers": [0]}, "mlp_only_layers"),
            (small_moe_config, {"num_experts": 0}, "num_experts"),
            (small_moe_config, {"num_experts_per_tok": 0}, "num_experts_per_tok"),
            (small_moe_config, {"num_experts_per_tok": 7}, "num_experts_per_tok"),
            (small_moe_config, {"moe_intermediate_size": 0}, "moe_intermediate_size"),
            (small_config, {"num_experts": 8}, "num_experts"),
            (small_config, {"dual_chunk_attention_config": {}}, "dual_chunk_attention_config"),
            (small_config, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type"),
            (small_config, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type"),
        ],
    )
    def test_what_the_kernels_would_get_wrong(
        self, raw: Any, change: dict[str, Any], field: str
    ) -> None:
        config = config_of(raw(), **change)
        contract = find_contract_for_model_config(config)
        with pytest.raises(ContractMismatch) as caught:
            check(contract, config, RUNTIME)
        assert caught.value.field == field
        assert str(contract.model) in str(caught.value)
