"""Writes a trained checkpoint as a Hugging Face model directory, as Qwen3's own are written.

    python -m tools.demo_model.export --checkpoint out/demo_model/checkpoint.pt \
        --tokenizer out/demo_model/tokenizer.json --to worker/tidemill_worker/demo_model
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from transformers import Qwen3Config

from tools.demo_model.chat import CHAT_TEMPLATE, END_OF_TEXT, IM_END
from tools.demo_model.tokenizer import SPECIAL_TOKENS, TAG_TOKENS
from tools.demo_model.train import model_config


def config_json(config: Qwen3Config) -> dict[str, Any]:
    """`config.json` in the form of the published Qwen3 checkpoints.

    Written field by field, because what `save_pretrained` writes changes with transformers'
    version (`rope_theta` and `torch_dtype` have moved), and other readers know this form.
    """
    assert config.rope_parameters is not None
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": config.attention_bias,
        "attention_dropout": config.attention_dropout,
        "eos_token_id": config.eos_token_id,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_hidden_layers,
        "model_type": "qwen3",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_parameters["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def tokenizer_config_json(tokenizer: Tokenizer, max_length: int) -> dict[str, Any]:
    """`tokenizer_config.json` with the added tokens, the roles of some and the chat template."""
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in (*SPECIAL_TOKENS, *TAG_TOKENS)
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "errors": "replace",
        "model_max_length": max_length,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def export(checkpoint: Path, tokenizer_path: Path, to: Path) -> None:
    """Writes the model directory `to`; files of these names there are replaced.

    The weights become bfloat16, and the head, being tied, is left out.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    config = model_config(tokenizer)
    state: dict[str, torch.Tensor] = torch.load(checkpoint, weights_only=True)["model"]
    state.pop("lm_head.weight", None)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}

    to.mkdir(parents=True, exist_ok=True)
    (to / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    shutil.copyfile(tokenizer_path, to / "tokenizer.json")
    pad = tokenizer.token_to_id(END_OF_TEXT)
    generation = {
        "do_sample": False,
        "eos_token_id": [tokenizer.token_to_id(IM_END), pad],
        "pad_token_id": pad,
    }
    _write(to / "config.json", config_json(config))
    _write(to / "generation_config.json", generation)
    _write(
        to / "tokenizer_config.json",
        tokenizer_config_json(tokenizer, config.max_position_embeddings),
    )


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write the trained model as a model directory.")
    run = Path("out/demo_model")
    parser.add_argument("--checkpoint", type=Path, default=run / "checkpoint.pt")
    parser.add_argument("--tokenizer", type=Path, default=run / "tokenizer.json")
    parser.add_argument("--to", type=Path, default=Path("worker/tidemill_worker/demo_model"))
    args = parser.parse_args()
    export(args.checkpoint, args.tokenizer, args.to)


if __name__ == "__main__":
    main()
