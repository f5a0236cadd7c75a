"""Child side: a checkpoint as the model object that pypto-lib's ``prepare_weights`` reads, and the
RoPE tables, which pypto-lib leaves to whoever serves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill_contracts.models.checkpoint import Checkpoint
from tidemill_contracts.models.errors import CheckpointError
from tidemill_contracts.models.pypto.messages import ModelView

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclass(slots=True)
class LayerWeights:
    """One layer in Hugging Face's [out, in] layout; pypto-lib empties it as it goes."""

    input_rms_weight: Tensor
    wq: Tensor
    wk: Tensor
    wv: Tensor
    q_norm_weight: Tensor
    k_norm_weight: Tensor
    wo: Tensor
    post_rms_weight: Tensor
    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor


@dataclass(slots=True)
class RuntimeModel:
    """What ``prepare_weights`` takes. The tensors are views of the mapped checkpoint."""

    config: ModelView
    lm_head: Tensor
    """[vocab, hidden]; that of the embedding where the model ties them."""
    embed_tokens: Tensor
    """[vocab, hidden]."""
    final_norm_weight: Tensor
    """[hidden]."""
    layers: list[LayerWeights]


def read_model(source: Checkpoint, config: ModelView) -> RuntimeModel:
    """Takes every tensor of `source`. Raises `CheckpointError`; call ``source.finish()`` after."""
    hidden, head, inner = config.hidden_size, config.head_dim, config.intermediate_size
    q_rows, kv_rows = config.num_attention_heads * head, config.num_key_value_heads * head
    names = set(source.names())
    prefix = "" if EMBEDDING in names else "model."
    vocabulary = (config.vocab_size, hidden)

    def layer(number: int) -> LayerWeights:
        def take(name: str, *shape: int) -> Tensor:
            return source.take(f"{prefix}layers.{number}.{name}.weight", shape)

        return LayerWeights(
            input_rms_weight=take("input_layernorm", hidden),
            wq=take("self_attn.q_proj", q_rows, hidden),
            wk=take("self_attn.k_proj", kv_rows, hidden),
            wv=take("self_attn.v_proj", kv_rows, hidden),
            q_norm_weight=take("self_attn.q_norm", head),
            k_norm_weight=take("self_attn.k_norm", head),
            wo=take("self_attn.o_proj", hidden, q_rows),
            post_rms_weight=take("post_attention_layernorm", hidden),
            w_gate=take("mlp.gate_proj", inner, hidden),
            w_up=take("mlp.up_proj", inner, hidden),
            w_down=take("mlp.down_proj", hidden, inner),
        )

    embed = source.take(prefix + EMBEDDING, vocabulary)
    lm_head = embed
    if LM_HEAD in names:
        taken = source.take(LM_HEAD, vocabulary)
        # A tied model may carry a head besides; it is the embedding that counts.
        lm_head = embed if config.tie_word_embeddings else taken
    elif not config.tie_word_embeddings:
        raise CheckpointError(
            f"{config.model_id}: tensor {LM_HEAD} is missing, though tie_word_embeddings is false."
        )
    return RuntimeModel(
        config=config,
        lm_head=lm_head,
        embed_tokens=embed,
        final_norm_weight=source.take(f"{prefix}norm.weight", (hidden,)),
        layers=[layer(number) for number in range(config.num_hidden_layers)],
    )


def rope_tables(config: ModelView, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, float32 [length, D], both halves alike.

    Position p turns the pair of dimensions i and i + D/2 by p · theta^(−2i/D) (RoFormer, arXiv
    2104.09864).
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=1)
    return angles.cos(), angles.sin()
