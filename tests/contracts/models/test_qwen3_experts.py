"""Mixtures of experts: routing, loading, and what a token's neighbours must not change."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts.models.driver import Driver, lively_tensors, small_model, small_moe_config
from tidemill_contracts.models.errors import CheckpointError
from tidemill_contracts.models.qwen3 import experts
from tidemill_contracts.models.qwen3.ops.reference import ReferenceOps
from tools.make_checkpoint import write_checkpoint

PROMPT = random.Random(1).choices(range(101), k=40)
UP = "model.layers.1.mlp.experts.5.up_proj.weight"


def ranks(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32)


class TestRouting:
    @pytest.mark.parametrize("norm", [True, False])
    def test_it_is_transformers_router(self, norm: bool) -> None:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

        config = Qwen3MoeConfig(
            hidden_size=16, num_experts=10, num_experts_per_tok=4, norm_topk_prob=norm
        )
        router, x = torch.randn(10, 16), torch.randn(50, 16)
        theirs = Qwen3MoeTopKRouter(config)
        theirs.weight.data = router
        with torch.no_grad():
            _, weights, chosen = theirs(x)
        flag = torch.tensor([norm], dtype=torch.int32)
        found, ids = experts.route(ReferenceOps(), x, router, ranks(4), flag)
        assert torch.equal(ids, chosen)
        torch.testing.assert_close(found, weights)

    def test_the_softmax_is_float32_in_any_model_dtype(self) -> None:
        x, router = torch.randn(5, 16).bfloat16(), torch.randn(6, 16).bfloat16()
        found, _ = experts.route(
            ReferenceOps(), x, router, ranks(6), torch.zeros(1, dtype=torch.int32)
        )
        chances = torch.nn.functional.linear(x, router).float().softmax(-1)
        expected = chances.sort(-1, descending=True).values.bfloat16()
        assert torch.equal(found, expected)

    def test_an_expert_without_tokens_is_not_computed(self) -> None:
        """Its weights may be anything."""
        router = torch.zeros(4, 8)
        router[1], router[2] = 1.0, -1.0
        gate_up, down = torch.randn(4, 6, 8), torch.randn(4, 8, 3)
        gate_up[2], down[2] = float("nan"), float("nan")
        x = torch.rand(7, 8) + 1
        out = experts.mix(
            ReferenceOps(), x, router, gate_up, down, ranks(3), torch.ones(1, dtype=torch.int32)
        )
        assert out.isfinite().all()


class TestNeighbours:
    def test_a_row_does_not_depend_on_them(self, tmp_path: Path) -> None:
        model_dir = small_model(tmp_path / "m", config=small_moe_config)
        driver = Driver(model_dir)
        prompts = [PROMPT[:n] for n in (1, 7, 40, 20)]
        together = driver.generate(prompts, 4)
        for index, prompt in enumerate(prompts):
            torch.testing.assert_close(
                driver.generate([prompt], 4)[0], together[index], rtol=1e-5, atol=1e-5
            )


class TestLoading:
    @pytest.fixture
    def raw(self) -> dict[str, Any]:
        return small_moe_config()

    def test_each_expert_lies_in_its_place(self, tmp_path: Path, raw: dict[str, Any]) -> None:
        tensors = lively_tensors(raw, seed=1)
        static = Driver(write_checkpoint(tmp_path / "m", raw, tensors=tensors)).static.named()
        assert torch.equal(static["w_gate_up"][1, 5, 24:], tensors[UP])
        gate = "model.layers.0.mlp.experts.2.gate_proj.weight"
        assert torch.equal(static["w_gate_up"][0, 2, :24], tensors[gate])
        down = "model.layers.1.mlp.experts.0.down_proj.weight"
        assert torch.equal(static["w_down"][1, 0], tensors[down])
        assert torch.equal(static["router"][1], tensors["model.layers.1.mlp.gate.weight"])

    def test_names_without_the_model_prefix(self, tmp_path: Path, raw: dict[str, Any]) -> None:
        tensors = lively_tensors(raw, seed=1)
        bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        found, expected = (
            driver.prefill((driver.row(), PROMPT))
            for driver in (
                Driver(write_checkpoint(tmp_path / "bare", raw, tensors=bare)),
                Driver(write_checkpoint(tmp_path / "full", raw, tensors=tensors)),
            )
        )
        assert torch.equal(found, expected)

    def test_a_missing_expert_is_named(self, tmp_path: Path, raw: dict[str, Any]) -> None:
        tensors = lively_tensors(raw, seed=1)
        del tensors[UP]
        model_dir = write_checkpoint(tmp_path / "m", raw, tensors=tensors)
        with pytest.raises(CheckpointError, match=re.escape(f"{UP} is missing")):
            Driver(model_dir)

    def test_an_expert_too_many_is_named(self, tmp_path: Path, raw: dict[str, Any]) -> None:
        tensors = lively_tensors(raw, seed=1)
        name = "model.layers.0.mlp.experts.6.up_proj.weight"
        model_dir = write_checkpoint(
            tmp_path / "m", raw, tensors={**tensors, name: torch.zeros(24, 32)}
        )
        with pytest.raises(CheckpointError, match=re.escape(name)):
            Driver(model_dir)

    def test_what_weight_bytes_said_is_what_they_take(
        self, tmp_path: Path, raw: dict[str, Any]
    ) -> None:
        driver = Driver(small_model(tmp_path / "m", config=small_moe_config))
        hooks = driver.contract.hooks
        assert hooks.weight_bytes(driver.config, driver.runtime) == driver.static.nbytes
