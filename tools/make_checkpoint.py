"""Makes a seeded random Qwen3 checkpoint, for tests and for benchmarks of speed.

    python tools/make_checkpoint.py OUT --shape 0.6b

The shapes are those of the published models; the weights are noise, so what such a model writes
is noise too. The same seed gives the same weights, however many shards hold them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file
from torch import Tensor

INIT_STD = 0.02

IM_END, END_OF_TEXT = "<|im_end|>", "<|endoftext|>"
QWEN3_IDS = {IM_END: 151_645, END_OF_TEXT: 151_643}

DTYPES = ("bfloat16", "float16", "float32")

# hidden, layers, query heads, K/V heads, intermediate, tied: https://huggingface.co/Qwen
_DENSE = {
    "0.6b": (1024, 28, 16, 8, 3072, True),
    "1.7b": (2048, 28, 16, 8, 6144, True),
    "4b": (2560, 36, 32, 8, 9728, True),
    "8b": (4096, 36, 32, 8, 12288, False),
    "14b": (5120, 40, 40, 8, 17408, False),
    "32b": (5120, 64, 64, 8, 25600, False),
}
# hidden, layers, query heads, K/V heads, intermediate of a dense layer (there is none) and of one
# of the 128 experts
_MOE = {
    "30b-a3b": (2048, 48, 32, 4, 6144, 768),
    "235b-a22b": (4096, 94, 64, 4, 12288, 1536),
}

# ChatML as Qwen3 was trained on it: a tool's answer is a user turn, and a prompt that must not be
# thought about ends in an empty think block.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- elif message.role in ('system', 'user', 'assistant') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- else %}
{{- raise_exception('unknown role: ' + message.role) }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


def qwen3_config(
    *,
    hidden_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    intermediate_size: int,
    tie_word_embeddings: bool,
    head_dim: int = 128,
    vocab_size: int = 151_936,
    max_position_embeddings: int = 40_960,
    rope_theta: float = 1_000_000.0,
    eos_token_id: int | None = QWEN3_IDS[IM_END],
    dtype: str = "bfloat16",
    initializer_range: float = INIT_STD,
) -> dict[str, Any]:
    """A ``config.json`` as the published dense Qwen3 models have it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": _within(vocab_size, QWEN3_IDS[END_OF_TEXT]),
        "eos_token_id": eos_token_id,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": initializer_range,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": max_position_embeddings,
        "max_window_layers": num_hidden_layers,
        "model_type": "qwen3",
        "num_attention_heads": num_attention_heads,
        "num_hidden_layers": num_hidden_layers,
        "num_key_value_heads": num_key_value_heads,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": tie_word_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
    }


def _within(vocab_size: int, token: int) -> int | None:
    return token if token < vocab_size else None


def with_experts(
    config: Mapping[str, Any],
    *,
    num_experts: int,
    num_experts_per_tok: int,
    moe_intermediate_size: int,
    norm_topk_prob: bool = True,
) -> dict[str, Any]:
    """The configuration of a dense model as that of a mixture of experts, in the published
    models' words."""
    return {
        **config,
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": moe_intermediate_size,
        "norm_topk_prob": norm_topk_prob,
        "num_experts": num_experts,
        "num_experts_per_tok": num_experts_per_tok,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def published_config(shape: str, dtype: str = "bfloat16", std: float = INIT_STD) -> dict[str, Any]:
    """The configuration of one of `SHAPES`; the tiny ones are no published ones, but keep
    everything that makes Qwen3 special in some hundred thousand parameters and a vocabulary of
    512. `std` is that of the random weights."""
    if shape in ("tiny", "tiny-moe"):
        tiny = qwen3_config(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=160,
            tie_word_embeddings=shape == "tiny",
            vocab_size=512,
            eos_token_id=None,
            dtype=dtype,
            initializer_range=std,
        )
        if shape == "tiny":
            return tiny
        return with_experts(tiny, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48)
    if shape in _DENSE:
        hidden, layers, heads, kv_heads, intermediate, tied = _DENSE[shape]
        expert = 0
    else:
        hidden, layers, heads, kv_heads, intermediate, expert = _MOE[shape]
        tied = False
    config = qwen3_config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
        dtype=dtype,
        initializer_range=std,
    )
    if not expert:
        return config
    return with_experts(
        config, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=expert
    )


SHAPES = (*_DENSE, *_MOE, "tiny", "tiny-moe")


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a Qwen3 checkpoint in Hugging Face's names, in file order."""
    hidden, head = config["hidden_size"], config["head_dim"]
    q_rows = config["num_attention_heads"] * head
    kv_rows = config["num_key_value_heads"] * head
    vocab = config["vocab_size"]
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "self_attn.o_proj": (hidden, q_rows),
        "post_attention_layernorm": (hidden,),
        **_feed_forward_shapes(config),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for number in range(config["num_hidden_layers"]):
        shapes.update(
            (f"model.layers.{number}.{name}.weight", shape) for name, shape in layer.items()
        )
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _feed_forward_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of one layer: a single network, or a router and its experts."""
    hidden, experts = config["hidden_size"], config.get("num_experts", 0)
    inner = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    network = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    if not experts:
        return {f"mlp.{name}": shape for name, shape in network.items()}
    return {
        "mlp.gate": (experts, hidden),
        **{
            f"mlp.experts.{number}.{name}": shape
            for number in range(experts)
            for name, shape in network.items()
        },
    }


def random_tensor(
    name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype, std: float = INIT_STD
) -> Tensor:
    """Ones for a norm, else N(0, std), from a generator of this tensor's own."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=dtype)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.empty(shape).normal_(0.0, std, generator=generator).to(dtype)


def write_checkpoint(
    directory: str | Path,
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    shards: int = 1,
    tokenizer: str | Path | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes a complete model directory and returns its path.

    `config` is what goes to ``config.json``; its ``torch_dtype`` is that of the tensors, its
    ``initializer_range`` the standard deviation of the random ones, which `tensors` replaces. At
    most one shard is in memory at a time.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", generation_config(config, tokenizer))
    if tokenizer is not None:
        shutil.copyfile(tokenizer, directory / "tokenizer.json")
        _write_json(directory / "tokenizer_config.json", _tokenizer_config())
    dtype = getattr(torch, config["torch_dtype"])
    shapes = (
        {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if tensors is not None
        else tensor_shapes(config)
    )

    def tensor(name: str) -> Tensor:
        if tensors is not None:
            return tensors[name].to(dtype).contiguous()
        return random_tensor(name, shapes[name], seed, dtype, config["initializer_range"])

    weight_map: dict[str, str] = {}
    total = 0
    parts = list(_split(list(shapes), shards))
    for number, names in enumerate(parts, start=1):
        file = (
            "model.safetensors"
            if len(parts) == 1
            else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        )
        shard = {name: tensor(name) for name in names}
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
        total += sum(t.nbytes for t in shard.values())
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(directory / "model.safetensors.index.json", index)
    return directory


def _split(names: Sequence[str], parts: int) -> Iterator[Sequence[str]]:
    size = -(-len(names) // parts)
    for start in range(0, len(names), size):
        yield names[start : start + size]


def fitted(config: Mapping[str, Any], tokenizer: Path) -> dict[str, Any]:
    """`config` with the tokenizer's own end of turn, and a vocabulary that holds its tokens."""
    ids = _token_ids(tokenizer)
    size = max(ids.values()) + 1
    return {
        **config,
        "vocab_size": max(config["vocab_size"], -(-size // 64) * 64),
        "bos_token_id": ids.get(END_OF_TEXT),
        "eos_token_id": ids.get(IM_END),
    }


def _token_ids(tokenizer: str | Path) -> dict[str, int]:
    """Every token of a ``tokenizer.json`` with its id, the added ones included."""
    described = json.loads(Path(tokenizer).read_bytes())
    added = {token["content"]: token["id"] for token in described["added_tokens"]}
    return {**described["model"]["vocab"], **added}


def generation_config(
    config: Mapping[str, Any], tokenizer: str | Path | None = None
) -> dict[str, Any]:
    """With both ends, of a turn and of a text, as the published models have it."""
    ids = QWEN3_IDS if tokenizer is None else _token_ids(tokenizer)
    ends = [
        ids[token]
        for token in (IM_END, END_OF_TEXT)
        if token in ids and ids[token] < config["vocab_size"]
    ]
    return {
        "bos_token_id": config["bos_token_id"],
        "do_sample": True,
        "eos_token_id": ends or config["eos_token_id"],
        "pad_token_id": config["bos_token_id"],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "model_max_length": 131_072,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@click.command(help=__doc__)
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--shape", type=click.Choice(SHAPES), default="tiny", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True)
@click.option(
    "--std",
    type=click.FloatRange(min=0, min_open=True),
    default=INIT_STD,
    show_default=True,
    help="Standard deviation of the weights; a larger one makes a livelier model.",
)
@click.option("--shards", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A tokenizer.json to copy; a tokenizer_config.json with a chat template is added, and the"
    " configuration takes its end of turn from it.",
)
def main(
    out: Path,
    shape: str,
    seed: int,
    dtype: str,
    std: float,
    shards: int,
    tokenizer: Path | None,
) -> None:
    config = published_config(shape, dtype, std)
    if tokenizer is not None:
        config = fitted(config, tokenizer)
    write_checkpoint(out, config, seed=seed, shards=shards, tokenizer=tokenizer)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    click.echo(f"{out}: Qwen3 {shape}, {dtype}, seed {seed}, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
