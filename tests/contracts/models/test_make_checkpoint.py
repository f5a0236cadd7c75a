"""tools/make_checkpoint.py makes what transformers and the contract both load."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tests.contracts.models.driver import Driver
from tidemill_contracts.models.config import load_config
from tidemill_contracts.models.qwen3.variants import VARIANTS
from tools.make_checkpoint import (
    END_OF_TEXT,
    IM_END,
    SHAPES,
    generation_config,
    main,
    published_config,
    tensor_shapes,
)


def make(out: Path, *options: str) -> Path:
    result = CliRunner().invoke(main, [str(out), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """Bytes as tokens, then three control tokens."""
    vocab = {character: number for number, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in (END_OF_TEXT, "<|im_start|>", IM_END)]
    )
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ("0.6b", 596_049_920),
        ("1.7b", 1_720_574_976),
        ("4b", 4_022_468_096),
        ("8b", 8_190_735_360),
        ("14b", 14_768_307_200),
        ("32b", 32_762_123_264),
        ("30b-a3b", 30_532_122_624),
        ("235b-a22b", 235_093_634_560),
    ],
)
def test_published_shapes_have_the_published_sizes(shape: str, parameters: int) -> None:
    shapes = tensor_shapes(published_config(shape))
    assert sum(math.prod(sides) for sides in shapes.values()) == parameters


def test_every_shape_is_covered() -> None:
    sizes = {variant.name for variant in VARIANTS if variant.shape}
    assert set(SHAPES) == {*sizes, "tiny", "tiny-moe"}


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_a_tiny_model_loads_here_and_in_transformers(tmp_path: Path, shape: str) -> None:
    from transformers import AutoModelForCausalLM

    options = ("--shape", shape, "--dtype", "float32", "--seed", "3", "--std", "0.2")
    model_dir = make(tmp_path / "tiny", *options)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    driver = Driver(model_dir)
    prompt = [1, 2, 3, 500]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    found = driver.prefill((driver.row(), prompt))[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.5


def test_the_seed_decides_and_the_shards_do_not(tmp_path: Path) -> None:
    whole = load_file(make(tmp_path / "a") / "model.safetensors")
    sharded = make(tmp_path / "b", "--shards", "3")
    other = load_file(make(tmp_path / "c", "--seed", "1") / "model.safetensors")
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3
    for file in set(index["weight_map"].values()):
        for name, tensor in load_file(sharded / file).items():
            assert torch.equal(tensor, whole[name])
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(other[name], whole[name])
    Driver(sharded, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_dtype_is_that_of_file_and_config(tmp_path: Path, dtype: str) -> None:
    model_dir = make(tmp_path / "m", "--dtype", dtype)
    tensors = load_file(model_dir / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
    assert load_config(model_dir).torch_dtype == dtype


class TestTokenizer:
    def test_both_ends_are_the_tokenizers_own(self, tmp_path: Path, tokenizer_file: Path) -> None:
        model_dir = make(tmp_path / "m", "--tokenizer", str(tokenizer_file))
        ids = Tokenizer.from_file(str(tokenizer_file))
        generation = json.loads((model_dir / "generation_config.json").read_text())
        assert load_config(model_dir).eos_token_ids == (ids.token_to_id(IM_END),)
        assert generation["eos_token_id"] == [
            ids.token_to_id(IM_END),
            ids.token_to_id(END_OF_TEXT),
        ]

    def test_the_vocabulary_grows_to_hold_it(self, tmp_path: Path, tokenizer_file: Path) -> None:
        described = json.loads(tokenizer_file.read_text())
        described["added_tokens"][-1]["id"] = 700
        tokenizer_file.write_text(json.dumps(described))
        model_dir = make(tmp_path / "m", "--tokenizer", str(tokenizer_file))
        assert load_config(model_dir).vocab_size == 704
        assert load_config(model_dir).eos_token_ids == (700,)

    def test_without_one_the_ends_are_qwens(self) -> None:
        config = published_config("8b")
        assert config["eos_token_id"] == 151_645
        assert generation_config(config)["eos_token_id"] == [151_645, 151_643]

    @pytest.mark.parametrize(
        ("options", "end"),
        [
            ({}, ""),
            ({"add_generation_prompt": True}, "<|im_start|>assistant\n"),
            (
                {"add_generation_prompt": True, "enable_thinking": True},
                "<|im_start|>assistant\n",
            ),
            (
                {"add_generation_prompt": True, "enable_thinking": False},
                "<|im_start|>assistant\n<think>\n\n</think>\n\n",
            ),
        ],
    )
    def test_the_chat_template_is_chatml(
        self, tmp_path: Path, tokenizer_file: Path, options: dict[str, bool], end: str
    ) -> None:
        from transformers import AutoTokenizer

        model_dir = make(tmp_path / "m", "--tokenizer", str(tokenizer_file))
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What time is it?"},
            {"role": "assistant", "content": "I will look."},
            {"role": "tool", "content": "12:00"},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        assert text == (
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nWhat time is it?<|im_end|>\n"
            "<|im_start|>assistant\nI will look.<|im_end|>\n"
            "<|im_start|>user\n<tool_response>\n12:00\n</tool_response><|im_end|>\n" + end
        )
