"""A dense Qwen3 checkpoint as a GGUF file without a tokenizer: benchmarks send token ids.

Needs the package `gguf`, and no torch: bf16 goes over as it is, and 8 bits (Q8_0: blocks of 32
weights with one scale) are made by that package.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WEIGHTS = ("bf16", "q8_0")

NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Modules of a checkpoint, and what GGUF calls them."""


def exported(model: Path, folder: Path, weights: str) -> Path:
    """The GGUF file of a checkpoint directory, written where it is not there yet."""
    target = folder / f"{model.resolve().name}-{weights}.gguf"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        _write(model, partial, weights)
        os.replace(partial, target)
    return target


def _write(model: Path, target: Path, weights: str) -> None:
    gguf: Any = importlib.import_module("gguf")
    numpy: Any = importlib.import_module("numpy")
    config: dict[str, Any] = json.loads((model / "config.json").read_bytes())
    writer = gguf.GGUFWriter(target, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(_rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    quantised = gguf.GGMLQuantizationType.Q8_0 if weights == "q8_0" else None
    for name, shape, data in _tensors(model):
        bits = numpy.frombuffer(data, numpy.uint16).reshape(shape)
        if len(shape) > 1 and quantised is None:
            writer.add_tensor(
                _gguf_name(name),
                bits.view(numpy.uint8),
                raw_dtype=gguf.GGMLQuantizationType.BF16,
            )
            continue
        # A bf16 number is the upper half of a float32.
        values = (bits.astype(numpy.uint32) << 16).view(numpy.float32)
        if len(shape) == 1:
            writer.add_tensor(_gguf_name(name), values)
        else:
            packed = gguf.quants.quantize(values, quantised)
            writer.add_tensor(_gguf_name(name), packed, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Path) -> Iterator[tuple[str, list[int], bytes]]:
    """Name, shape and bytes of every tensor (the header of safetensors is JSON)."""
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            start = file.tell()
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                if entry["dtype"] != "BF16":
                    raise SystemExit(f"{path}: {name} is {entry['dtype']}, not BF16")
                first, end = entry["data_offsets"]
                file.seek(start + first)
                yield name, entry["shape"], file.read(end - first)


def _gguf_name(name: str) -> str:
    module = name.removeprefix("model.").removesuffix(".weight")
    if module.startswith("layers."):
        _, layer, part = module.split(".", 2)
        return f"blk.{layer}.{NAMES[part]}.weight"
    return f"{NAMES[module]}.weight"


def _rope_theta(config: dict[str, Any]) -> float:
    """Older and newer files have it in different places."""
    theta: float = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    return theta
