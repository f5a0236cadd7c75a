"""The reference kernels give what transformers' Qwen3 gives, however the work is cut."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contracts.models.driver import Driver, small_model, small_moe_config

NEW_TOKENS = 6
LENGTHS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 18, 31, 32, 33, 47, 64, 65, 100, 127, 128, 150)

SHAPES: dict[str, dict[str, Any]] = {
    "tied-grouped": {},
    "untied-theta-5e6": {
        "tie_word_embeddings": False,
        "rope_theta": 5e6,
        "vocab_size": 257,
        "num_hidden_layers": 3,
    },
    "one-kv-head": {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 8},
    "no-groups": {
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 24,
        "tie_word_embeddings": False,
    },
    "head-is-a-share-of-hidden": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 100,
        "vocab_size": 313,
    },
    "transformers-5-spelling": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
        "torch_dtype": "float32",
        "dtype": "float32",
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "vocab_size": 97,
    },
    "loud-and-deep": {"num_hidden_layers": 5, "rms_norm_eps": 1e-3, "hidden_size": 24},
    "yarn": {
        "max_position_embeddings": 128,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        "vocab_size": 149,
    },
    "experts": {"config": small_moe_config},
    "experts-unnormed": {
        "config": small_moe_config,
        "norm_topk_prob": False,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
        "vocab_size": 211,
    },
    "many-experts-theta-5e6": {
        "config": small_moe_config,
        "num_experts": 16,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 3,
        "rope_theta": 5e6,
        "vocab_size": 163,
    },
    "every-expert": {
        "config": small_moe_config,
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "hidden_size": 24,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
}


@dataclass
class Reference:
    model_dir: Path
    prompts: list[list[int]]
    tokens: Tensor
    """[prompts, new], as transformers chose them."""
    logits: Tensor
    """float32 [prompts, new, vocabulary]."""
    prompt_logits: list[Tensor]
    """Of each prompt, float32 [its tokens, vocabulary]."""


@pytest.fixture(scope="module", params=SHAPES)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    from transformers import AutoModelForCausalLM

    seed = list(SHAPES).index(request.param)
    model_dir = small_model(tmp_path_factory.mktemp("model"), seed=seed, **SHAPES[request.param])
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rng = random.Random(seed)
    vocab = model.config.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(length)] for length in LENGTHS]
    tokens = torch.empty(len(prompts), NEW_TOKENS, dtype=torch.long)
    logits = torch.empty(len(prompts), NEW_TOKENS, vocab)
    prompt_logits = []
    with torch.no_grad():
        for index, prompt in enumerate(prompts):
            for step in range(NEW_TOKENS):
                known = torch.tensor([prompt + tokens[index, :step].tolist()])
                whole = model(known, use_cache=False).logits[0]
                if step == 0:
                    prompt_logits.append(whole)
                logits[index, step] = whole[-1]
                tokens[index, step] = logits[index, step].argmax()
    return Reference(model_dir, prompts, tokens, logits, prompt_logits)


def _assert_same(found: Tensor, reference: Reference, rows: slice = slice(None)) -> None:
    torch.testing.assert_close(found, reference.logits[rows], rtol=0, atol=1e-4)
    assert torch.equal(found.argmax(-1), reference.tokens[rows])


@pytest.mark.parametrize("page_size", [16, 128])
def test_each_prompt_alone(reference: Reference, page_size: int) -> None:
    driver = Driver(reference.model_dir, page_size=page_size)
    for index, prompt in enumerate(reference.prompts):
        found = driver.generate([prompt], NEW_TOKENS)
        _assert_same(found, reference, slice(index, index + 1))


@pytest.mark.parametrize("page_size", [16, 128])
def test_a_ragged_batch(reference: Reference, page_size: int) -> None:
    driver = Driver(reference.model_dir, page_size=page_size)
    _assert_same(driver.generate(reference.prompts, NEW_TOKENS), reference)


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("chunk", [7, 64])
def test_chunked_prefill(reference: Reference, page_size: int, chunk: int) -> None:
    driver = Driver(reference.model_dir, page_size=page_size)
    _assert_same(driver.generate(reference.prompts, NEW_TOKENS, chunk=chunk), reference)


def test_every_tokens_logits(reference: Reference) -> None:
    driver = Driver(reference.model_dir)
    tokens = sum(map(len, reference.prompts))
    chunks = [(driver.row(), prompt) for prompt in reference.prompts]
    found = driver.score(*chunks, logit_rows=range(tokens))
    expected = torch.cat(reference.prompt_logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_every_other_tokens_logits_in_chunks(reference: Reference) -> None:
    driver = Driver(reference.model_dir)
    prompt, expected, row = reference.prompts[-1], reference.prompt_logits[-1], driver.row()
    for start in range(0, len(prompt), 19):
        chunk = prompt[start : start + 19]
        asked = range(len(chunk) - 1, -1, -2)
        found = driver.score((row, chunk), logit_rows=asked)
        torch.testing.assert_close(found, expected[start:][list(asked)], rtol=0, atol=1e-4)


def test_the_reference_is_no_near_constant(reference: Reference) -> None:
    """Else equal tokens and close logits would prove nothing."""
    assert reference.logits.std() > 0.5
    assert reference.tokens.unique().numel() > 20


def test_bfloat16_too(reference: Reference) -> None:
    """Within what two attention kernels differ by; with transformers' default one the logits are
    bit-equal on the CPUs that this was tried on."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(reference.model_dir, dtype=torch.bfloat16).eval()
    driver = Driver(reference.model_dir, dtype=torch.bfloat16)
    for prompt in reference.prompts[::6]:
        with torch.no_grad():
            expected = model(torch.tensor([prompt]), use_cache=False).logits[0, -1].float()
        error = (driver.prefill((driver.row(), prompt))[0] - expected).abs().max()
        assert error < 0.05 * expected.std()
