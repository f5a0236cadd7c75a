"""Matrices in int8: how they round, that a model keeps its logits, and that nobody takes such a
contract for another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.contracts.models.driver import Driver, small_config, small_model, small_moe_config
from tidemill_contracts.models.config import load_config
from tidemill_contracts.models.conformance.case import ConformanceOptions, qwen3_case
from tidemill_contracts.models.conformance.session import Session
from tidemill_contracts.models.conformance.suite import run_checks
from tidemill_contracts.models.contract import ModelContract
from tidemill_contracts.models.errors import ContractMismatch, UnsupportedModel
from tidemill_contracts.models.qwen3.int8 import Int8Matrix, quantize
from tidemill_contracts.models.registry import find_contract_for_model_config, get_contract


@pytest.fixture
def contract() -> ModelContract:
    return get_contract("qwen3", "dense-int8")


class TestRounding:
    def test_no_value_moves_by_more_than_half_a_step(self) -> None:
        x = torch.randn(40, 96) * torch.logspace(-6, 6, 40).unsqueeze(-1)
        values, scales = quantize(x)
        assert values.abs().amax(-1).tolist() == [127] * 40
        moved = (values * scales.unsqueeze(-1) - x).abs()
        assert bool((moved <= 0.5001 * scales.unsqueeze(-1)).all())

    def test_zeros_stay_zeros(self) -> None:
        values, scales = quantize(torch.zeros(2, 64))
        assert not values.any()
        assert scales.isfinite().all()

    def test_a_row_that_is_nan_spoils_itself_alone(self) -> None:
        matrix = Int8Matrix(*quantize(torch.randn(48, 64)))
        x = torch.randn(3, 64)
        clean = matrix.product(x)
        x[1, 5] = float("nan")
        found = matrix.product(x)
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], clean[[0, 2]])

    def test_a_product_is_that_of_what_the_integers_stand_for(self) -> None:
        values, scales = quantize(torch.randn(48, 3072))
        x = torch.randn(5, 3072)
        rounded, of_rows = quantize(x)
        expected = (rounded.double() * of_rows.unsqueeze(-1)) @ (
            values.double() * scales.unsqueeze(-1)
        ).t()
        found = Int8Matrix(values, scales).product(x)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


class TestAModel:
    @pytest.mark.parametrize("tied", [True, False])
    def test_logits_stay_near_those_of_the_checkpoint(self, tmp_path: Path, tied: bool) -> None:
        model = small_model(tmp_path, hidden_size=128, tie_word_embeddings=tied)
        prompts = [[5, 17, 3], [9] * 30]
        exact = Driver(model).generate(prompts, 1)
        driver = Driver(model, quantization="int8")
        error = (driver.generate(prompts, 1) - exact).square().mean().sqrt() / exact.std()
        # Each of a dozen products in a row adds about a hundredth.
        assert 0.001 < error < 0.1

    @pytest.mark.parametrize("tied", [True, False])
    def test_what_is_multiplied_is_int8_and_what_is_looked_up_is_not(
        self, tmp_path: Path, tied: bool
    ) -> None:
        driver = Driver(small_model(tmp_path, tie_word_embeddings=tied), quantization="int8")
        static = driver.static.named()
        found = {name for name, tensor in static.items() if tensor.dtype == torch.int8}
        assert found == {"wqkv", "wo", "w_gate_up", "w_down", "lm_head"}
        assert static["embed"].dtype == torch.float32
        said = driver.contract.hooks.weight_bytes(driver.config, driver.runtime)
        assert said == driver.static.nbytes

    def test_the_kit_passes_in_deterministic_mode(self, contract: ModelContract) -> None:
        """In ordinary mode another order of summation may move an activation by a step."""
        case = replace(qwen3_case(contract), reference=None)
        results = list(run_checks(Session(contract, case, ConformanceOptions(deterministic=True))))
        assert [r for r in results if r.outcome == "failed"] == []
        skipped = {r.name for r in results if r.outcome == "skipped"}
        assert skipped == {"pad-vocabulary", "reference-logits", "stored-k"}


class TestWhoGetsIt:
    def test_it_is_found_where_it_is_asked_for_and_only_there(
        self, tmp_path: Path, contract: ModelContract
    ) -> None:
        config = load_config(small_model(tmp_path, config=small_config))
        assert find_contract_for_model_config(config, "int8") is contract
        plain = find_contract_for_model_config(config)
        assert plain is get_contract("qwen3", "dense")
        assert (plain.model.quant, contract.model.quant) == (None, "int8")
        assert str(contract.model) == "qwen3/dense-int8"
        assert plain.abi_fingerprint() != contract.abi_fingerprint()

    def test_experts_are_refused(self, tmp_path: Path) -> None:
        config = load_config(small_model(tmp_path, config=small_moe_config))
        with pytest.raises(UnsupportedModel, match="not supported with --quantization int8"):
            find_contract_for_model_config(config, "int8")

    @pytest.mark.parametrize("device", ["cuda", "meta"])
    def test_other_devices_are_refused_before_anything_is_loaded(
        self, tmp_path: Path, contract: ModelContract, device: str
    ) -> None:
        driver = Driver(small_model(tmp_path), quantization="int8")
        runtime = replace(driver.runtime, device=torch.device(device))
        with pytest.raises(ContractMismatch, match=f"int8 on device {device}.*device cpu"):
            contract.hooks.validate_kernels(contract.hooks.load_kernels(), driver.config, runtime)
