"""RoPE's tables are transformers', plain and stretched by YaRN, in both spellings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.errors import CheckpointError
from tidemill_contracts.models.qwen3.rope import rope_tables
from tools.make_checkpoint import published_config

ORIGINAL = 32_768
POSITIONS = 4_096


def published(rope: dict[str, Any], spelling: str, **changes: Any) -> dict[str, Any]:
    """The 0.6B configuration with these RoPE parameters."""
    raw: dict[str, Any] = {**published_config("0.6b"), **changes}
    if spelling == "rope_parameters":
        raw["rope_parameters"] = {**rope, "rope_theta": raw.pop("rope_theta")}
        del raw["rope_scaling"]
    else:
        raw["rope_scaling"] = rope
    return raw


def yarn(factor: float, **parameters: Any) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": ORIGINAL,
        **parameters,
    }


def assert_transformers(raw: dict[str, Any]) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = ModelConfig.from_hf(raw, "m")
    found = rope_tables(config, POSITIONS)
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**raw))
    expected = theirs(torch.zeros(1), torch.arange(POSITIONS)[None])
    for ours, other in zip(found, expected, strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours, other[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
class TestAgainstTransformers:
    @pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
    @pytest.mark.parametrize("theta", [1e6, 5e6])
    def test_yarn(self, spelling: str, factor: float, theta: float) -> None:
        assert_transformers(published(yarn(factor), spelling, rope_theta=theta))

    @pytest.mark.parametrize(
        "parameters",
        [
            {"attention_factor": 1.25},
            {"beta_fast": 16, "beta_slow": 2},
            {"beta_fast": 1.0, "beta_slow": 1.0},
            {"mscale": 0.7, "mscale_all_dim": 1.3},
            {"mscale": 0.7},
            {"truncate": False},
            {"original_max_position_embeddings": 512},
            {"original_max_position_embeddings": None},
        ],
    )
    def test_yarns_other_parameters(self, spelling: str, parameters: dict[str, Any]) -> None:
        rope = {name: value for name, value in yarn(4.0, **parameters).items() if value is not None}
        assert_transformers(published(rope, spelling))

    def test_plain(self, spelling: str) -> None:
        assert_transformers(published({"rope_type": "default"}, spelling))


def test_the_old_name_of_the_type_is_read() -> None:
    rope = yarn(4.0)
    rope["type"] = rope.pop("rope_type")
    raw = published(rope, "rope_scaling")
    ours = rope_tables(ModelConfig.from_hf(raw, "m"), 64)
    new = rope_tables(ModelConfig.from_hf(published(yarn(4.0), "rope_scaling"), "m"), 64)
    assert torch.equal(ours[0], new[0])


def test_a_factor_of_one_is_plain() -> None:
    stretched = ModelConfig.from_hf(published(yarn(1.0), "rope_scaling"), "m")
    plain = ModelConfig.from_hf(published_config("0.6b"), "m")
    for ours, other in zip(
        rope_tables(stretched, POSITIONS), rope_tables(plain, POSITIONS), strict=True
    ):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("rope", "in_the_file", "context"),
    [
        # Qwen's recipe: the file keeps the length that it had.
        (yarn(4.0), 40_960, 131_072),
        (yarn(2.0), 32_768, 65_536),
        # transformers' way: the file has the length after scaling. It is not scaled again.
        (yarn(4.0), 131_072, 131_072),
        # Nothing to gain: the model's own context stays.
        (yarn(1.0), 40_960, 40_960),
        # Without the original length it cannot be told which length the file has.
        ({"rope_type": "yarn", "factor": 4.0}, 40_960, 40_960),
        ({"rope_type": "default"}, 262_144, 262_144),
    ],
)
def test_the_context_is_scaled_once(
    spelling: str, rope: dict[str, Any], in_the_file: int, context: int
) -> None:
    raw = published(rope, spelling, max_position_embeddings=in_the_file)
    assert ModelConfig.from_hf(raw, "m").max_position_embeddings == context


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"factor": None}, "factor"),
        ({"factor": 0.5}, "factor"),
        ({"factor": "4"}, "factor"),
        ({"factor": True}, "factor"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"original_max_position_embeddings": 1.5}, "original_max_position_embeddings"),
        ({"attention_factor": -1.0}, "attention_factor"),
        ({"beta_fast": "32"}, "beta_fast"),
        ({"truncate": 1}, "truncate"),
        ({"long_factor": [1.0]}, "long_factor"),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_a_wrong_parameter_is_named(spelling: str, parameters: dict[str, Any], name: str) -> None:
    raw = published({**yarn(4.0), **parameters}, spelling)
    with pytest.raises(CheckpointError, match=rf"{spelling}\.{name}: "):
        ModelConfig.from_hf(raw, "m")
