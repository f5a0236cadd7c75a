"""A Qwen3 checkpoint laid out as the kernels read it.

Every kind of weight is one tensor stacked over the layers (and experts); the three attention
inputs are fused into one projection, gate and up into another. A stack is allocated once and each
tensor is copied into its place as it is taken from the mapped file, so no second copy of the
model exists: besides the prepared weights, loading needs no memory but the page cache. The shapes
here are logical: how a matrix lies within its tensor is its `MatrixLayout`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import RuntimeConfig, TensorExporter, WeightSource
from tidemill_contracts.models.errors import CheckpointError
from tidemill_contracts.models.qwen3.int8 import scale_of
from tidemill_contracts.models.qwen3.rope import rope_tables

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedWeights:
    """What both stages read besides the step's inputs. L layers, H hidden size, D head size,
    QH query heads, KVH K/V heads, I intermediate size, V vocabulary, E experts of which a token
    goes to K; the run's dtype unless said otherwise. Matrices in int8 have a float32 scale for
    each of their rows, which others lack."""

    embed: Tensor
    """[V, H]."""
    input_norm: Tensor
    """[L, H]."""
    wqkv: Tensor
    """[L, (QH + 2·KVH)·D, H]: the rows of all query heads, then of K, then of V."""
    wqkv_scale: Tensor | None = None
    q_norm: Tensor
    """[L, D]."""
    k_norm: Tensor
    """[L, D]."""
    wo: Tensor
    """[L, H, QH·D]."""
    wo_scale: Tensor | None = None
    post_norm: Tensor
    """[L, H]."""
    w_gate_up: Tensor
    """[L, 2·I, H], with experts [L, E, 2·I, H]: the rows of gate, then of up."""
    w_gate_up_scale: Tensor | None = None
    w_down: Tensor
    """[L, H, I], with experts [L, E, H, I]."""
    w_down_scale: Tensor | None = None
    final_norm: Tensor
    """[H]."""
    lm_head: Tensor
    """[V, H]; the storage of `embed` where the model ties them and both are of one dtype."""
    lm_head_scale: Tensor | None = None
    rope_cos: Tensor
    """float32 [max_seq_len, D]."""
    rope_sin: Tensor
    """float32 [max_seq_len, D]."""
    rms_norm_eps: Tensor
    """float32 [1]."""
    router: Tensor | None = None
    """[L, E, H]; this and what follows only with experts."""
    expert_ranks: Tensor | None = None
    """int32 [K], 0 to K−1: its length says to how many experts a token goes."""
    norm_topk: Tensor | None = None
    """int32 [1]: not 0 where the weights of a token's experts are made to add up to one."""

    def named(self) -> dict[str, Tensor]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of distinct storage."""
        tensors = self.named().values()
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


Laid = tuple[Tensor, ...]
"""A matrix, or a stack of them; in int8 with the scales of their rows behind it."""


class MatrixLayout(Protocol):
    """How the weights that products read lie in memory."""

    @property
    def embeds(self) -> bool:
        """Whether tokens are looked up in an embedding that lies so too."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Laid:
        """Room for matrices, on the host."""

    def fill(self, target: Laid, parts: Sequence[Tensor], *, gated: bool) -> None:
        """Writes matrices that are fused along their rows into `target`, [out, in]; `gated` where
        they are gate and up."""


class RowMajor:
    """`MatrixLayout` of plain torch: as the shapes say."""

    embeds = True

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Laid:
        return (torch.empty(shape, dtype=dtype),)

    def fill(self, target: Laid, parts: Sequence[Tensor], *, gated: bool) -> None:
        (matrix,) = target
        pieces = torch.split(matrix, [len(part) for part in parts])
        for piece, part in zip(pieces, parts, strict=True):
            piece.copy_(part)


_Part = tuple[str, tuple[int, ...]]
"""A module's name within its layer or expert, and its weight's shape."""


def _fused(parts: tuple[_Part, ...]) -> tuple[int, ...]:
    return (sum(shape[0] for _, shape in parts), *parts[0][1][1:])


def prepare(
    source: WeightSource,
    config: ModelConfig,
    runtime: RuntimeConfig,
    exporter: TensorExporter,
    matrices: MatrixLayout,
) -> PreparedWeights:
    """Takes all of `source`, stacks it and exports each finished tensor once.

    Names with and without the leading ``model.`` are read (Qwen3's embedding models lack it); an
    ``lm_head.weight`` that a tied model carries besides is ignored. Raises `CheckpointError`.
    """
    hidden, head = config.hidden_size, config.head_dim
    layers, experts = config.num_hidden_layers, config.num_experts
    q_rows = config.num_attention_heads * head
    kv_rows = config.num_key_value_heads * head
    names = set(source.names())
    prefix = "" if EMBEDDING in names else "model."

    plain: MatrixLayout = RowMajor()

    def filled(target: Laid, module: str, parts: tuple[_Part, ...], by: MatrixLayout) -> None:
        taken = [source.take(f"{prefix}{module}.{name}.weight", shape) for name, shape in parts]
        by.fill(target, taken, gated=parts[0][0].endswith("gate_proj"))

    def exported(name: str, laid: Laid) -> dict[str, Tensor]:
        """By the names of the arguments, of which the second is only there for int8."""
        return dict(zip((name, scale_of(name)), map(exporter, laid), strict=False))

    def stacked(argument: str, *parts: _Part, by: MatrixLayout = matrices) -> dict[str, Tensor]:
        """One kind of weight over all layers; several parts are fused along their rows."""
        stack = by.allocate((layers, *_fused(parts)), runtime.dtype)
        for layer, target in enumerate(zip(*stack, strict=True)):
            filled(target, f"layers.{layer}", parts, by)
        return exported(argument, stack)

    def stacked_experts(argument: str, *parts: _Part) -> dict[str, Tensor]:
        """The same over all layers and the experts of each."""
        stack = matrices.allocate((layers, experts, *_fused(parts)), runtime.dtype)
        for layer, targets in enumerate(zip(*stack, strict=True)):
            for expert, target in enumerate(zip(*targets, strict=True)):
                filled(target, f"layers.{layer}.mlp.experts.{expert}", parts, matrices)
        return exported(argument, stack)

    def single(argument: str, taken: Tensor, by: MatrixLayout) -> dict[str, Tensor]:
        laid = by.allocate(tuple(taken.shape), runtime.dtype)
        by.fill(laid, [taken], gated=False)
        return exported(argument, laid)

    def feed_forward() -> dict[str, Tensor]:
        inner = config.moe_intermediate_size if experts else config.intermediate_size
        gate, up, down = (inner, hidden), (inner, hidden), (hidden, inner)
        if not experts:
            return {
                **stacked("w_gate_up", ("mlp.gate_proj", gate), ("mlp.up_proj", up)),
                **stacked("w_down", ("mlp.down_proj", down)),
            }
        ranks = torch.arange(config.num_experts_per_tok, dtype=torch.int32)
        norm = torch.tensor([config.norm_topk_prob], dtype=torch.int32)
        return {
            **stacked("router", ("mlp.gate", (experts, hidden))),
            **stacked_experts("w_gate_up", ("gate_proj", gate), ("up_proj", up)),
            **stacked_experts("w_down", ("down_proj", down)),
            "expert_ranks": exporter(ranks),
            "norm_topk": exporter(norm),
        }

    def vocabulary() -> dict[str, Tensor]:
        """Embedding and head."""
        shape = (config.vocab_size, hidden)
        table = source.take(prefix + EMBEDDING, shape)
        embed = single("embed", table, matrices if matrices.embeds else plain)
        if config.tie_word_embeddings:
            if LM_HEAD in names:
                source.take(LM_HEAD, shape)
            if matrices.embeds:
                return {**embed, "lm_head": embed["embed"]}
            return {**embed, **single("lm_head", table, matrices)}
        if LM_HEAD not in names:
            raise CheckpointError(
                f"{config.model_id}: tensor {LM_HEAD} is missing, though tie_word_embeddings is"
                " false."
            )
        return {**embed, **single("lm_head", source.take(LM_HEAD, shape), matrices)}

    cos, sin = rope_tables(config, runtime.max_seq_len)
    weights = PreparedWeights(
        **vocabulary(),
        **stacked("input_norm", ("input_layernorm", (hidden,)), by=plain),
        **stacked(
            "wqkv",
            ("self_attn.q_proj", (q_rows, hidden)),
            ("self_attn.k_proj", (kv_rows, hidden)),
            ("self_attn.v_proj", (kv_rows, hidden)),
        ),
        **stacked("q_norm", ("self_attn.q_norm", (head,)), by=plain),
        **stacked("k_norm", ("self_attn.k_norm", (head,)), by=plain),
        **stacked("wo", ("self_attn.o_proj", (hidden, q_rows))),
        **stacked("post_norm", ("post_attention_layernorm", (hidden,)), by=plain),
        **feed_forward(),
        **single("final_norm", source.take(f"{prefix}norm.weight", (hidden,)), plain),
        rope_cos=exporter(cos),
        rope_sin=exporter(sin),
        rms_norm_eps=exporter(torch.tensor([config.rms_norm_eps], dtype=torch.float32)),
    )
    source.finish()
    return weights
