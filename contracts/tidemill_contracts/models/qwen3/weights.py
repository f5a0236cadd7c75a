"""A Qwen3 checkpoint laid out as the kernels read it.

Every kind of weight is one tensor stacked over the layers; the three attention inputs are fused
into one projection, gate and up into another. A stack is allocated once and each layer's tensor
is copied into it as it is taken from the mapped file, so no second copy of the model exists.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import RuntimeConfig, TensorExporter, WeightSource
from tidemill_contracts.models.errors import CheckpointError

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class PreparedWeights:
    """What both stages read besides the step's inputs. L layers, H hidden size, D head size,
    QH query heads, KVH K/V heads, I intermediate size, V vocabulary; the model's dtype unless
    said otherwise."""

    embed: Tensor
    """[V, H]."""
    input_norm: Tensor
    """[L, H]."""
    wqkv: Tensor
    """[L, (QH + 2·KVH)·D, H]: the rows of all query heads, then of K, then of V."""
    q_norm: Tensor
    """[L, D]."""
    k_norm: Tensor
    """[L, D]."""
    wo: Tensor
    """[L, H, QH·D]."""
    post_norm: Tensor
    """[L, H]."""
    w_gate_up: Tensor
    """[L, 2·I, H]: the rows of gate, then of up."""
    w_down: Tensor
    """[L, H, I]."""
    final_norm: Tensor
    """[H]."""
    lm_head: Tensor
    """[V, H]; the storage of `embed` where the model ties them."""
    rope_cos: Tensor
    """float32 [max_seq_len, D]."""
    rope_sin: Tensor
    """float32 [max_seq_len, D]."""
    rms_norm_eps: Tensor
    """float32 [1]."""

    def named(self) -> dict[str, Tensor]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @property
    def nbytes(self) -> int:
        """Bytes of distinct storage."""
        tensors = self.named().values()
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def prepare(
    source: WeightSource, config: ModelConfig, runtime: RuntimeConfig, exporter: TensorExporter
) -> PreparedWeights:
    """Takes all of `source`, stacks it and exports each finished tensor once.

    Names with and without the leading ``model.`` are read (Qwen3's embedding models lack it); an
    ``lm_head.weight`` that a tied model carries besides is ignored. Raises `CheckpointError`.
    """
    hidden, head = config.hidden_size, config.head_dim
    q_rows = config.num_attention_heads * head
    kv_rows = config.num_key_value_heads * head
    inner = config.intermediate_size
    names = set(source.names())
    prefix = "" if EMBEDDING in names else "model."

    def stacked(*parts: tuple[str, tuple[int, ...]]) -> Tensor:
        """One kind of weight over all layers; several parts are fused along their rows."""
        rows = sum(shape[0] for _, shape in parts)
        stack = torch.empty((config.num_hidden_layers, rows, *parts[0][1][1:]), dtype=runtime.dtype)
        for layer, target in enumerate(stack):
            pieces = target.split([shape[0] for _, shape in parts])
            for (name, shape), piece in zip(parts, pieces, strict=True):
                piece.copy_(source.take(f"{prefix}layers.{layer}.{name}.weight", shape))
        return exporter(stack)

    def single(name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=runtime.dtype)
        tensor.copy_(source.take(name, shape))
        return exporter(tensor)

    vocabulary = (config.vocab_size, hidden)
    embed = single(prefix + EMBEDDING, vocabulary)
    if config.tie_word_embeddings:
        lm_head = embed
        if LM_HEAD in names:
            source.take(LM_HEAD, vocabulary)
    elif LM_HEAD in names:
        lm_head = single(LM_HEAD, vocabulary)
    else:
        raise CheckpointError(
            f"{config.model_id}: tensor {LM_HEAD} is missing, though tie_word_embeddings is false."
        )
    cos, sin = rope_tables(config, runtime.max_seq_len)
    weights = PreparedWeights(
        embed=embed,
        input_norm=stacked(("input_layernorm", (hidden,))),
        wqkv=stacked(
            ("self_attn.q_proj", (q_rows, hidden)),
            ("self_attn.k_proj", (kv_rows, hidden)),
            ("self_attn.v_proj", (kv_rows, hidden)),
        ),
        q_norm=stacked(("self_attn.q_norm", (head,))),
        k_norm=stacked(("self_attn.k_norm", (head,))),
        wo=stacked(("self_attn.o_proj", (hidden, q_rows))),
        post_norm=stacked(("post_attention_layernorm", (hidden,))),
        w_gate_up=stacked(("mlp.gate_proj", (inner, hidden)), ("mlp.up_proj", (inner, hidden))),
        w_down=stacked(("mlp.down_proj", (hidden, inner))),
        final_norm=single(f"{prefix}norm.weight", (hidden,)),
        lm_head=lm_head,
        rope_cos=exporter(cos),
        rope_sin=exporter(sin),
        rms_norm_eps=exporter(torch.tensor([config.rms_norm_eps], dtype=torch.float32)),
    )
    source.finish()
    return weights


def rope_tables(config: ModelConfig, max_seq_len: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, float32 [max_seq_len, D], both halves alike.

    Position p turns pair i by p · theta^(−2i/D) (RoFormer, arXiv 2104.09864); the pairs are
    dimension i and i + D/2, as in GPT-NeoX.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()
