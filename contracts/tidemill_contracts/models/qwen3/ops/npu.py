"""Operations for Ascend NPUs, by torch_npu's fused operators.

Signatures and constraints are those that torch_npu 2.14.0 publishes (its wheel on PyPI,
``torch_npu/_op_plugin_docs.py``); the packed prefill call is the one that vllm-ascend makes
(``vllm_ascend/attention/attention_v1.py``). This module has never run on an NPU: tests run it on
the CPU, over a stand-in for torch_npu that computes each operator in torch.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from tidemill_contracts.models.qwen3.ops import Attention, Layout
from tidemill_contracts.models.qwen3.ops.reference import ReferenceOps
from tidemill_contracts.models.qwen3.step import Step

ATTENTION_DTYPES = (torch.bfloat16, torch.float16)
"""npu_fused_infer_attention_score, "query"."""

MAX_BLOCK = 512
DECODE_BLOCK_MULTIPLE = 16
PREFILL_BLOCK_MULTIPLE = 128
"""The same, "block_size" under page attention, for one query token and for several."""

MAX_HEAD_DIM, HEAD_DIM_MULTIPLE, MAX_GROUP = 512, 16, 64
MAX_TOKEN_ELEMENTS = 65_535
"""KVH·D under the (blocknum, blocksize, H) layout."""
MAX_POOL_ELEMENTS = 2**31 - 1
"""K, or V, of one layer is addressed by an int32."""

MASK_SIDE = 2048
"""Of the mask that stands for every causal one (``sparse_mode`` 3)."""


class NpuOps(ReferenceOps):
    """`Ops` by torch_npu; experts, and what its attention cannot do, in torch."""

    def __init__(self, torch_npu: ModuleType, layout: Layout) -> None:
        self._npu = torch_npu
        self._layout = layout
        self._mask: Tensor | None = None
        self._eps: tuple[Tensor, float] | None = None

    def plan(self, step: Step, k_cache: Tensor, q_heads: int) -> Attention:
        if not attention_fits(self._layout, step.decodes):
            return super().plan(step, k_cache, q_heads)
        if not step.decodes and self._mask is None:
            ones = torch.ones((MASK_SIDE, MASK_SIDE), dtype=torch.bool, device=k_cache.device)
            self._mask = ones.triu(1)
        return FusedAttention(self._npu, step, self._layout, self._mask)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
        normed: Tensor = self._npu.npu_rms_norm(x, weight, self._epsilon(eps))[0]
        return normed

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As one batch of T places: BSND by 1S1D."""
        turned: Tensor = self._npu.npu_rotary_mul(
            x.unsqueeze(0), cos.unsqueeze(0), sin.unsqueeze(0), "half"
        )
        return turned.squeeze(0)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        out: Tensor = self._npu.npu_swiglu(gate_up, -1)
        return out

    def _epsilon(self, eps: Tensor) -> float:
        """The operator takes a number: read back once, as reading waits for the device."""
        if self._eps is None or self._eps[0] is not eps:
            self._eps = (eps, float(eps))
        return self._eps[1]


def attention_fits(layout: Layout, decodes: bool) -> bool:
    """Whether the fused operator can attend over such pages, by its published constraints."""
    multiple = DECODE_BLOCK_MULTIPLE if decodes else PREFILL_BLOCK_MULTIPLE
    return (
        layout.dtype in ATTENTION_DTYPES
        and layout.page_size % multiple == 0
        and layout.page_size <= MAX_BLOCK
        and layout.head_dim % HEAD_DIM_MULTIPLE == 0
        and layout.head_dim <= MAX_HEAD_DIM
        and layout.q_heads <= MAX_GROUP * layout.kv_heads
        and layout.kv_heads * layout.head_dim <= MAX_TOKEN_ELEMENTS
        and layout.pages * layout.page_elements <= MAX_POOL_ELEMENTS
    )


class FusedAttention:
    """`Attention` by npu_fused_infer_attention_score over the block table."""

    def __init__(
        self, torch_npu: ModuleType, step: Step, layout: Layout, mask: Tensor | None
    ) -> None:
        self._npu = torch_npu
        self._layout = layout
        host, device = step.host, step.slot_mapping.device
        # The operator leaves open what happens to a slot that is named twice, as padding rows do.
        first = {slot: token for token, slot in reversed(list(enumerate(host.slots)))}
        keep = sorted(token for slot, token in first.items() if slot >= 0)
        self._written: Tensor | None = None
        self._slots = step.slot_mapping
        if len(keep) != len(host.slots):
            self._written = torch.tensor(keep, dtype=torch.int64, device=device)
            self._slots = step.slot_mapping.index_select(0, self._written)

        order = host.order
        # Entries that are never read must still be no negative page.
        self._table = step.block_table.clamp(min=0)
        if order != list(range(len(order))):
            rows = torch.tensor(order, dtype=torch.int64, device=device)
            self._table = self._table.index_select(0, rows)
        self._ends = [host.ends[row] for row in order]
        self._queries: list[int] | None = None
        self._mask = mask
        if not step.decodes:
            self._queries = [host.offsets[row] + host.lengths[row] for row in order]

    def write(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        if not len(self._slots):
            return
        if self._written is not None:
            k, v = k.index_select(0, self._written), v.index_select(0, self._written)
        self._npu.npu_scatter_pa_kv_cache(
            k.contiguous(), v.contiguous(), k_pages, v_pages, self._slots, cache_mode="Norm"
        )

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        layout = self._layout
        if self._queries is None:
            # One query token: [B, 1, QH·D], no mask.
            query = q.reshape(len(q), 1, -1)
            extra: dict[str, object] = {"input_layout": "BSH"}
        else:
            # Chunks packed one after another: [T, QH, D], each aligned with its row's end.
            query = q.contiguous()
            extra = {
                "input_layout": "TND",
                "actual_seq_lengths": self._queries,
                "atten_mask": self._mask,
                "sparse_mode": 3,
            }
        out: Tensor = self._npu.npu_fused_infer_attention_score(
            query,
            k_pages.flatten(2),
            v_pages.flatten(2),
            actual_seq_lengths_kv=self._ends,
            block_table=self._table,
            block_size=layout.page_size,
            num_heads=layout.q_heads,
            num_key_value_heads=layout.kv_heads,
            scale=layout.head_dim**-0.5,
            **extra,
        )[0]
        return out.view(q.shape)
