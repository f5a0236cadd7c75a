"""Operations for CUDA: FlashInfer's paged attention, and decode steps replayed as CUDA graphs.

FlashInfer attends over pages of any size from a block table, on every card since Ampere, which
neither torch's own ``varlen_attn`` (Flash Attention 3 only, torch 2.13) nor the ``flash-attn``
package (pages of 256) does. The calls are those of flashinfer-python 0.7.4 (its wheel on PyPI,
``flashinfer/prefill.py``). This module has never run on a GPU: tests run it on the CPU, over a
stand-in for FlashInfer and a recorder in place of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tidemill_contracts.models.contract import CompiledStage
from tidemill_contracts.models.qwen3.ops import Attention, Layout
from tidemill_contracts.models.qwen3.ops.reference import ReferenceOps
from tidemill_contracts.models.qwen3.step import Step

ATTENTION_DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
"""Those that FlashInfer builds its kernels for."""

WORKSPACE_BYTES = 128 << 20
"""FlashInfer's own recommendation."""

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what a function does on the device; what it returns does it again."""


def attention_fits(layout: Layout) -> bool:
    return layout.dtype in ATTENTION_DTYPES and layout.head_dim in HEAD_DIMS


class FlashInferOps(ReferenceOps):
    """`Ops` with FlashInfer's attention; the rest in torch, which a graph makes cheap to call."""

    def __init__(self, flashinfer: ModuleType, layout: Layout, device: torch.device) -> None:
        self._flashinfer = flashinfer
        self._layout = layout
        self._device = device
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = self.wrapper()

    def plan(self, step: Step, k_cache: Tensor, q_heads: int) -> Attention:
        host = step.host
        order = host.order
        ends = [host.ends[row] for row in order]
        lengths = [host.lengths[row] for row in order]
        self.lay_out(self._wrapper, step.block_table, order, ends, lengths)
        return PagedAttention(self._wrapper, step.slot_mapping)

    def grouped_linear(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """torch's grouped product, where it has one and the rows are aligned for it."""
        aligned = x.shape[1] % 8 == 0 and weights.shape[1] % 8 == 0
        if x.dtype is not torch.bfloat16 or not aligned or not hasattr(functional, "grouped_mm"):
            return super().grouped_linear(x, weights, ends)
        return functional.grouped_mm(x, weights.transpose(1, 2), offs=ends)

    def replayed(
        self, function: Callable[..., None], compile_args: Mapping[str, Tensor]
    ) -> CompiledStage:
        """`GraphedDecode` of a dense stage. Experts are called as the tokens fall, which on some
        cards waits for the device: no graph can hold that."""
        if "router" in compile_args:
            return partial(function, self)
        return GraphedDecode(function, self, compile_args, self._device, cuda_graph())

    def wrapper(self, **buffers: Tensor) -> Any:
        """FlashInfer's state of one attention; with its own buffers where a graph reads them."""
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=bool(buffers),
            # One backend for every card and batch, so that results do not change with either.
            backend="fa2",
            **buffers,
        )

    def lay_out(
        self,
        wrapper: Any,
        block_table: Tensor,
        order: Sequence[int],
        ends: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        """Tells `wrapper` where the rows of `block_table`, taken in `order`, have their pages.

        `ends` and `lengths` are those rows' tokens after and in this step.
        """
        layout = self._layout
        counts = torch.tensor([-(-end // layout.page_size) for end in ends], dtype=torch.int32)
        starts = _starts(counts)
        rows = torch.repeat_interleave(torch.tensor(order), counts.long())
        columns = torch.arange(len(rows)) - torch.repeat_interleave(starts[:-1], counts).long()
        device = block_table.device
        wrapper.plan(
            _starts(torch.tensor(lengths, dtype=torch.int32)),
            starts,
            block_table[rows.to(device), columns.to(device)],
            torch.tensor([(end - 1) % layout.page_size + 1 for end in ends], dtype=torch.int32),
            layout.q_heads,
            layout.kv_heads,
            layout.head_dim,
            layout.page_size,
            causal=True,
            q_data_type=layout.dtype,
            kv_data_type=layout.dtype,
        )


def _starts(counts: Tensor) -> Tensor:
    """int32 [n + 1]: 0, then the running sum."""
    return torch.cat((counts.new_zeros(1), counts.cumsum(0).to(torch.int32)))


class PagedAttention:
    """`Attention` over a planned wrapper; makes no call that waits for the device."""

    def __init__(self, wrapper: Any, slot_mapping: Tensor) -> None:
        self._wrapper = wrapper
        # A token that must not be stored stores what another one does, in that one's place:
        # to leave it out would take its number to the host. Where no token is stored, slot 0
        # keeps what it has.
        stored = slot_mapping >= 0
        self._any = stored.any()
        tokens = torch.arange(len(slot_mapping), device=slot_mapping.device)
        first = stored.to(torch.int32).argmax()
        self._source = tokens.where(stored, first)
        self._slots = slot_mapping.index_select(0, self._source).clamp(min=0).long()

    def write(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        for values, pages in ((k, k_pages), (v, v_pages)):
            pool = pages.flatten(0, 1)
            values = values.index_select(0, self._source).where(self._any, pool[:1])
            pool.index_copy_(0, self._slots, values)

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        out: Tensor = self._wrapper.run(q.contiguous(), (k_pages, v_pages))
        return out


class GraphedDecode:
    """`CompiledStage` of decode that replays a CUDA graph: one for each padded number of rows,
    recorded when it is first met.

    A graph reads and writes fixed memory, so inputs are copied in and logits out. Rows are padded
    to a power of two by repeating row 0, whose K and V are then stored again as they are.
    """

    def __init__(
        self,
        function: Callable[..., None],
        ops: FlashInferOps,
        compile_args: Mapping[str, Tensor],
        device: torch.device,
        capture: Capture,
    ) -> None:
        self._function = function
        self._ops = ops
        self._capture = capture

        def buffer(name: str) -> Tensor:
            like = compile_args[name]
            return torch.zeros(like.shape, dtype=like.dtype, device=device)

        self._inputs = [buffer(n) for n in ("input_ids", "seq_lens", "block_table", "slot_mapping")]
        self._logits = buffer("logits")
        self._indices = torch.zeros(self._inputs[2].numel(), dtype=torch.int32, device=device)
        self._model: tuple[Tensor, ...] = ()
        self._graphs: dict[int, tuple[Any, Callable[[], None]]] = {}
        """By padded rows: the attention's state and the replay."""

    def __call__(self, *args: Tensor) -> None:
        *inputs, logits = args
        inputs, model = inputs[:4], tuple(inputs[4:])
        if len(model) != len(self._model) or any(
            new is not old for new, old in zip(model, self._model, strict=True)
        ):
            self._model = model
            self._graphs.clear()
        rows = len(logits)
        padded = min(1 << (rows - 1).bit_length(), len(self._logits))
        # A table may have more columns than any row has pages.
        inputs[2] = inputs[2][:, : self._inputs[2].shape[1]]
        for kept, given in zip(self._inputs, inputs, strict=True):
            target = kept[:padded, : given.shape[1]] if given.dim() == 2 else kept[:padded]
            target[:rows].copy_(given)
            target[rows:].copy_(given[:1].expand(padded - rows, *given.shape[1:]))

        ends = inputs[1].tolist()
        ends += ends[:1] * (padded - rows)
        if padded in self._graphs:
            wrapper, replay = self._graphs[padded]
            self._lay_out(wrapper, ends)
        else:
            wrapper = self._wrapper(padded)
            self._lay_out(wrapper, ends)
            replay = self._capture(partial(self._run, wrapper, padded))
            self._graphs[padded] = (wrapper, replay)
        replay()
        logits.copy_(self._logits[:rows])

    def _run(self, wrapper: Any, rows: int) -> None:
        """What a graph holds."""
        self._function(
            _PlannedOps(wrapper),
            *(kept[:rows] for kept in self._inputs),
            *self._model,
            self._logits[:rows],
        )

    def _lay_out(self, wrapper: Any, ends: list[int]) -> None:
        self._ops.lay_out(wrapper, self._inputs[2], range(len(ends)), ends, [1] * len(ends))

    def _wrapper(self, rows: int) -> Any:
        device = self._logits.device
        return self._ops.wrapper(
            qo_indptr_buf=torch.zeros(rows + 1, dtype=torch.int32, device=device),
            paged_kv_indptr_buf=torch.zeros(rows + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buf=self._indices,
            paged_kv_last_page_len_buf=torch.ones(rows, dtype=torch.int32, device=device),
        )


class _PlannedOps(ReferenceOps):
    """The operations inside a graph, whose attention was laid out before it."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def plan(self, step: Step, k_cache: Tensor, q_heads: int) -> Attention:
        return PagedAttention(self._wrapper, step.slot_mapping)


def cuda_graph() -> Capture:
    """Records CUDA graphs that share one pool of memory."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        # Once outside the graph: what a first call sets up must not be recorded.
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            run()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            run()
        return graph.replay

    return capture
