"""``config.json`` is read field by field, and a wrong one is refused by the field's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.models.driver import small_config
from tidemill_contracts.models.config import ModelConfig, load_config
from tidemill_contracts.models.errors import CheckpointError, UnsupportedModel
from tools.make_checkpoint import SHAPES, published_config

ABSENT = object()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def read(**changes: Any) -> ModelConfig:
    raw = {**small_config(), **changes}
    return ModelConfig.from_hf(
        {name: value for name, value in raw.items() if value is not ABSENT}, "the/model"
    )


class TestReads:
    def test_a_published_file(self) -> None:
        config = ModelConfig.from_hf(published_config("0.6b"), "Qwen/Qwen3-0.6B")
        assert config == ModelConfig(
            model_id="Qwen/Qwen3-0.6B",
            architectures=("Qwen3ForCausalLM",),
            model_type="qwen3",
            vocab_size=151_936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40_960,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
            eos_token_ids=(151_645,),
            extra=config.extra,
        )
        assert config.extra == {
            "attention_dropout": 0.0,
            "bos_token_id": 151_643,
            "initializer_range": 0.02,
            "use_cache": True,
        }

    @pytest.mark.parametrize("shape", SHAPES)
    def test_what_transformers_writes(self, shape: str, tmp_path: Path) -> None:
        """Its newest spelling gives the same fields as the published one."""
        from transformers import Qwen3Config, Qwen3MoeConfig

        raw = published_config(shape)
        kind = Qwen3MoeConfig if "num_experts" in raw else Qwen3Config
        saved = kind(**{name: value for name, value in raw.items() if name != "torch_dtype"})
        saved.architectures = raw["architectures"]
        saved.dtype = raw["torch_dtype"]
        saved.save_pretrained(tmp_path)
        found = load_config(tmp_path)
        assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
        expected = ModelConfig.from_hf(raw, str(tmp_path))
        for name in set(ModelConfig.__dataclass_fields__) - {"extra"}:
            assert getattr(found, name) == getattr(expected, name), name

    def test_a_published_file_with_experts(self) -> None:
        config = ModelConfig.from_hf(published_config("30b-a3b"), "Qwen/Qwen3-30B-A3B")
        assert config.num_experts == 128
        assert config.num_experts_per_tok == 8
        assert config.moe_intermediate_size == 768
        assert config.norm_topk_prob is True
        assert config.decoder_sparse_step == 1
        assert config.mlp_only_layers == ()
        assert config.extra.keys() == {
            "attention_dropout",
            "bos_token_id",
            "initializer_range",
            "output_router_logits",
            "router_aux_loss_coef",
            "use_cache",
        }

    @pytest.mark.parametrize("shape", ["4b", "30b-a3b", "235b-a22b"])
    def test_a_file_of_2507(self, shape: str) -> None:
        """Its context is the model's own: nothing is scaled."""
        raw = published_config(shape)
        raw |= {"max_position_embeddings": 262_144, "rope_theta": 5_000_000}
        config = ModelConfig.from_hf(raw, "the/model")
        assert config.max_position_embeddings == 262_144
        assert config.rope_theta == 5e6
        assert config.rope_type == "default"

    @pytest.mark.parametrize(
        ("changes", "field", "value"),
        [
            ({"rope_theta": 5e6}, "rope_theta", 5e6),
            ({"rope_theta": 10_000}, "rope_theta", 1e4),
            (
                {
                    "rope_theta": ABSENT,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
                },
                "rope_theta",
                5e6,
            ),
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta", 1e6),
            ({"torch_dtype": ABSENT, "dtype": "bfloat16"}, "torch_dtype", "bfloat16"),
            ({"torch_dtype": ABSENT}, "torch_dtype", "float32"),
            ({"torch_dtype": "torch.bfloat16"}, "torch_dtype", "bfloat16"),
            ({"head_dim": ABSENT}, "head_dim", 8),
            ({"head_dim": None}, "head_dim", 8),
            ({"num_key_value_heads": ABSENT}, "num_key_value_heads", 4),
            ({"eos_token_id": 7}, "eos_token_ids", (7,)),
            ({"eos_token_id": [7, 3, 7]}, "eos_token_ids", (7, 3)),
            ({"eos_token_id": None}, "eos_token_ids", ()),
            ({"eos_token_id": ABSENT}, "eos_token_ids", ()),
            ({"tie_word_embeddings": ABSENT}, "tie_word_embeddings", False),
            ({"attention_bias": True}, "attention_bias", True),
            ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
            ({"num_experts": 128}, "num_experts", 128),
            ({"num_local_experts": 128}, "num_experts", 128),
            ({"num_experts_per_tok": 8}, "num_experts_per_tok", 8),
            ({"moe_intermediate_size": 768}, "moe_intermediate_size", 768),
            ({"norm_topk_prob": True}, "norm_topk_prob", True),
            ({"decoder_sparse_step": 2}, "decoder_sparse_step", 2),
            ({"mlp_only_layers": [0, 3]}, "mlp_only_layers", (0, 3)),
            ({"mlp_only_layers": None}, "mlp_only_layers", ()),
            ({"quantization_config": {"bits": 4}}, "quantization", {"bits": 4}),
            ({"rope_scaling": YARN}, "rope_type", "yarn"),
            ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type", "linear"),
            ({"rope_scaling": {"rope_type": "default"}}, "rope_type", "default"),
            ({"rope_scaling": {}}, "rope_type", "default"),
            (
                {"rope_scaling": YARN},
                "rope_scaling",
                {"factor": 4.0, "original_max_position_embeddings": 32768},
            ),
            (
                {"rope_theta": ABSENT, "rope_parameters": {**YARN, "rope_theta": 1e6}},
                "rope_type",
                "yarn",
            ),
        ],
    )
    def test_a_spelling(self, changes: dict[str, Any], field: str, value: object) -> None:
        assert getattr(read(**changes), field) == value

    @pytest.mark.parametrize(
        ("changes", "window"),
        [
            ({"sliding_window": 4096}, None),
            ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, None),
            ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, 64),
            ({"sliding_window": 64, "layer_types": ["full_attention"] * 2}, None),
            (
                {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]},
                64,
            ),
        ],
    )
    def test_a_window_counts_only_where_a_layer_uses_it(
        self, changes: dict[str, Any], window: int | None
    ) -> None:
        assert read(**changes).sliding_window == window

    def test_the_result_is_read_only(self) -> None:
        config = read(quantization_config={"bits": 4})
        with pytest.raises(TypeError):
            config.extra["x"] = 1  # type: ignore[index]
        with pytest.raises(AttributeError):
            config.hidden_size = 1  # type: ignore[misc]


class TestRefuses:
    @pytest.mark.parametrize(
        "field",
        [
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "vocab_size",
            "max_position_embeddings",
            "rms_norm_eps",
            "rope_theta",
            "hidden_act",
        ],
    )
    @pytest.mark.parametrize("value", [ABSENT, None])
    def test_a_missing_field(self, field: str, value: object) -> None:
        with pytest.raises(CheckpointError, match=f"{field}: is missing"):
            read(**{field: value})

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("hidden_size", "1024"),
            ("hidden_size", 1024.0),
            ("hidden_size", True),
            ("hidden_size", 0),
            ("hidden_size", -1024),
            ("num_hidden_layers", [28]),
            ("num_key_value_heads", 3),
            ("num_key_value_heads", -1),
            ("num_key_value_heads", 8),
            ("head_dim", 15),
            ("head_dim", 0),
            ("vocab_size", -5),
            ("rms_norm_eps", "1e-6"),
            ("rms_norm_eps", 0),
            ("rms_norm_eps", float("nan")),
            ("rope_theta", -1e6),
            ("rope_theta", True),
            ("rope_theta", float("inf")),
            ("tie_word_embeddings", 1),
            ("tie_word_embeddings", "true"),
            ("attention_bias", "no"),
            ("torch_dtype", "int8"),
            ("torch_dtype", 16),
            ("dtype", "float64"),
            ("architectures", "Qwen3ForCausalLM"),
            ("architectures", [1]),
            ("model_type", 3),
            ("hidden_act", ["silu"]),
            ("eos_token_id", "151645"),
            ("eos_token_id", [1, "2"]),
            ("eos_token_id", True),
            ("eos_token_id", -1),
            ("eos_token_id", 101),
            ("num_experts", -1),
            ("num_local_experts", "8"),
            ("num_experts_per_tok", 1.5),
            ("moe_intermediate_size", -768),
            ("norm_topk_prob", 1),
            ("decoder_sparse_step", 0),
            ("mlp_only_layers", 0),
            ("mlp_only_layers", [0, -1]),
            ("mlp_only_layers", [True]),
            ("quantization_config", "fp8"),
            ("rope_scaling", "yarn"),
            ("rope_scaling", {"factor": 4.0}),
            ("rope_scaling", {"rope_type": 4}),
            ("rope_parameters", [1e6]),
            ("rope_parameters", {"rope_type": "default", "rope_theta": "1e6"}),
            ("rope_parameters", {"rope_type": "default", "rope_theta": 0}),
            ("layer_types", ["full_attention"]),
            ("layer_types", ["sliding_attention"] * 2),
        ],
    )
    def test_a_wrong_value(self, field: str, value: object) -> None:
        named = "sliding_window" if value == ["sliding_attention"] * 2 else field
        with pytest.raises(CheckpointError, match=named) as caught:
            read(**{field: value})
        assert "the/model" in str(caught.value)

    def test_heads_that_do_not_divide_the_hidden_size_without_a_head_size(self) -> None:
        with pytest.raises(CheckpointError, match="head_dim: is missing"):
            read(head_dim=ABSENT, num_attention_heads=5, num_key_value_heads=5)

    def test_two_thetas_that_disagree(self) -> None:
        with pytest.raises(CheckpointError, match=r"rope_theta.*disagree: 1000000.0, 5000000.0"):
            read(rope_parameters={"rope_type": "default", "rope_theta": 5e6})

    def test_two_rope_types_that_disagree(self) -> None:
        with pytest.raises(CheckpointError, match="disagree: default, yarn"):
            read(rope_parameters={"rope_type": "default"}, rope_scaling=YARN)

    def test_two_numbers_of_experts_that_disagree(self) -> None:
        with pytest.raises(CheckpointError, match=r"num_experts and num_local_experts.*: 4, 8"):
            read(num_experts=4, num_local_experts=8)

    def test_a_language_model_nested_in_another(self) -> None:
        raw = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": small_config(),
        }
        with pytest.raises(UnsupportedModel, match=r"Qwen3_5ForConditionalGeneration.*qwen3_5"):
            ModelConfig.from_hf(raw, "m")


class TestFile:
    def test_no_directory(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="nowhere: no such model directory"):
            load_config(tmp_path / "nowhere")

    def test_a_file_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "model").touch()
        with pytest.raises(CheckpointError, match="model: no such model directory"):
            load_config(tmp_path / "model")

    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"has no config\.json"):
            load_config(tmp_path)

    def test_a_directory_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").mkdir()
        with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
            load_config(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"not json"])
    def test_invalid_json(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
            load_config(tmp_path)

    @pytest.mark.parametrize("content", ["[]", "null", '"qwen3"'])
    def test_no_object(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match="expected a JSON object"):
            load_config(tmp_path)

    def test_a_complaint_names_the_model_in_its_own_words(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(
            json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
        )
        with pytest.raises(CheckpointError) as caught:
            load_config(tmp_path)
        for word in (str(tmp_path), "GPT2LMHeadModel", "gpt2", "hidden_size"):
            assert word in str(caught.value)
