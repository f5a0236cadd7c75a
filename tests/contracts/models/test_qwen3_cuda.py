"""CUDA's code path, run on the CPU over stand-ins for FlashInfer and for CUDA graphs.

The stand-in for FlashInfer takes exactly the parameters that FlashInfer publishes and computes
attention in torch. The stand-in for a graph records the operators that torch runs and runs those
again, on the same memory: what a replay would get wrong on a GPU (a length read back on the
host, an input that was not copied in), it gets wrong too. What a GPU makes of the calls is not
tested here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.contracts.models.driver import Driver, int32, small_model, small_moe_config
from tidemill_contracts.models.contract import StageInputs
from tidemill_contracts.models.qwen3 import host, kernels
from tidemill_contracts.models.qwen3.ops import Layout, choice, cuda
from tidemill_contracts.models.qwen3.ops.choice import Chosen, ops_for
from tidemill_contracts.models.qwen3.ops.cuda import FlashInferOps, GraphedDecode
from tidemill_contracts.models.qwen3.ops.reference import ReferenceOps
from tidemill_contracts.models.qwen3.step import HostStep, Step

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5] * 7, [3], list(range(90))]


class BatchPrefillWithPagedKVCacheWrapper:
    """FlashInfer's wrapper with the parameters of flashinfer-python 0.7.4
    (flashinfer_python-0.7.4-py3-none-any.whl from PyPI, ``flashinfer/prefill.py``)."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        assert float_workspace_buffer.dtype is torch.uint8
        assert kv_layout == "NHD"
        assert backend == "fa2"
        self._graph = use_cuda_graph
        given = (
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        )
        assert all((buffer is not None) is use_cuda_graph for buffer in given)
        self._buffers: Any = given

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(tensor.dtype is torch.int32 for tensor in given)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert causal
        if not paged_kv_indices.is_meta:
            assert len(paged_kv_indices) == paged_kv_indptr[-1]
            assert (paged_kv_indices >= 0).all()
        assert ((paged_kv_last_page_len > 0) & (paged_kv_last_page_len <= page_size)).all()
        self._heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._dtypes = (q_data_type, kv_data_type)
        if not self._graph:
            self._buffers = given
            return
        queries, starts, indices, last = self._buffers
        assert len(qo_indptr) == len(queries), "the batch is fixed"
        assert len(paged_kv_indices) <= len(indices)
        queries.copy_(qo_indptr)
        starts.copy_(paged_kv_indptr)
        indices[: len(paged_kv_indices)].copy_(paged_kv_indices)
        last.copy_(paged_kv_last_page_len)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        """Reads what `plan` left on the device and nothing of the host's, as a kernel does."""
        heads, kv_heads, head_dim, page_size = self._heads
        k_pages, v_pages = paged_kv_cache
        assert q.dtype is self._dtypes[0]
        assert k_pages.dtype is v_pages.dtype is self._dtypes[1]
        assert q.shape[1:] == (heads, head_dim)
        assert q.is_contiguous()
        assert k_pages.shape == v_pages.shape
        assert k_pages.shape[1:] == (page_size, kv_heads, head_dim)
        if q.is_meta:
            return torch.empty_like(q)
        queries, starts, indices, last = self._buffers
        lengths = queries.diff()
        ends = (starts.diff() - 1) * page_size + last
        tokens = torch.arange(len(q))
        row = torch.searchsorted(queries, tokens.int(), right=True) - 1
        position = ends[row] - lengths[row] + (tokens - queries[row])
        places = torch.arange(len(indices) * page_size)
        entry = (starts[row][:, None] + places // page_size).clamp(max=len(indices) - 1)
        slots = indices[entry] * page_size + places % page_size
        seen = places <= position[:, None]
        # [T, heads, 1, D] over [T, heads, S, D].
        k, v = (
            pages.flatten(0, 1)[slots.where(seen, 0)].transpose(1, 2)
            for pages in (k_pages, v_pages)
        )
        out = functional.scaled_dot_product_attention(
            q.unsqueeze(2), k, v, attn_mask=seen[:, None, None], enable_gqa=True
        )
        return out.squeeze(2).contiguous()


def flashinfer() -> ModuleType:
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    return module


class Recorder(TorchDispatchMode):
    """Notes every operator that torch runs, with its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        assert func is not torch.ops.aten._local_scalar_dense.default, "waits for the device"
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Runs the same operators on the same memory; a view comes out as the same one."""
        for func, args, kwargs, out in self.calls:
            new = func(*args, **kwargs)
            for old, fresh in zip(_tensors(out), _tensors(new), strict=True):
                if old.data_ptr() != fresh.data_ptr():
                    old.copy_(fresh)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if value else []


@dataclass
class Graphs:
    """Stands for `cuda.cuda_graph`; counts."""

    captured: int = 0
    replayed: int = 0
    keep: list[Recorder] = field(default_factory=list)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        recorder = Recorder()
        with recorder:
            run()
        self.captured += 1
        self.keep.append(recorder)

        def replay() -> None:
            self.replayed += 1
            recorder.replay()

        return replay


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Every stage is compiled for FlashInfer, whatever its dtype, on the CPU."""
    graphs = Graphs()
    monkeypatch.setattr(cuda, "cuda_graph", lambda: graphs.capture)
    monkeypatch.setattr(cuda, "WORKSPACE_BYTES", 16)

    def chosen(device: torch.device, layout: Layout, **_: bool) -> Chosen:
        ops = FlashInferOps(flashinfer(), layout, device)
        return Chosen(ops, ops.replayed)

    monkeypatch.setattr(host, "ops_for", chosen)
    return graphs


@pytest.fixture(scope="module", params=["dense", "moe"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    if request.param == "moe":
        return small_model(directory, seed=4, config=small_moe_config)
    return small_model(directory, seed=4)


@pytest.fixture(scope="module")
def dense_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("dense"), seed=4)


@pytest.fixture
def plain(model_dir: Path) -> Driver:
    """Compiled before `graphs` puts the stand-ins in place."""
    return driver(model_dir)


def driver(model_dir: Path, page_size: int = 16) -> Driver:
    return Driver(model_dir, page_size=page_size, max_seq_len=128, max_rows=4)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("chunk", [10**9, 40])
def test_it_computes_what_the_reference_does(
    model_dir: Path, plain: Driver, graphs: Graphs, chunk: int
) -> None:
    found = driver(model_dir).generate(PROMPTS, 6, chunk=chunk)
    close(found, plain.generate(PROMPTS, 6, chunk=chunk))
    dense = not plain.config.num_experts
    assert (graphs.captured, graphs.replayed) == ((1, 5) if dense else (0, 0))


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_pages_of_any_size(dense_dir: Path, page_size: int, request: Any) -> None:
    expected = driver(dense_dir, page_size).generate(PROMPTS, 4)
    request.getfixturevalue("graphs")
    close(driver(dense_dir, page_size).generate(PROMPTS, 4), expected)


class TestGraphs:
    def test_one_is_recorded_for_each_padded_number_of_rows(
        self, dense_dir: Path, request: Any
    ) -> None:
        plain = driver(dense_dir)
        graphs = request.getfixturevalue("graphs")
        replayed = driver(dense_dir)
        for rows in (3, 1, 4, 2, 3, 1):
            close(replayed.generate(PROMPTS[-rows:], 3), plain.generate(PROMPTS[-rows:], 3))
        # 3 and 4 rows share one; every number of rows decodes twice.
        assert (graphs.captured, graphs.replayed) == (3, 12)

    def test_other_weights_or_another_cache_are_recorded_anew(
        self, dense_dir: Path, graphs: Graphs
    ) -> None:
        replayed = driver(dense_dir)
        expected = replayed.generate(PROMPTS, 3)
        replayed.cache = replayed.spec.allocate(replayed.runtime.total_kv_pages)
        close(replayed.generate(PROMPTS, 3), expected)
        assert graphs.captured == 2

    def test_negative_slots_are_not_written(self, dense_dir: Path, graphs: Graphs) -> None:
        replayed = driver(dense_dir)
        rows = [replayed.row() for _ in range(4)]
        replayed.prefill(*((row, [5, 6, 7]) for row in rows))
        replayed.decode(*((row, 8) for row in rows))  # records
        before = replayed.cache.k.clone(), replayed.cache.v.clone()
        replayed.edit = lambda inputs: replace(inputs, slot_mapping=inputs.slot_mapping * 0 - 1)
        replayed.decode(*((row, 9) for row in rows))
        assert torch.equal(replayed.cache.k, before[0])
        assert torch.equal(replayed.cache.v, before[1])
        mixed = int32([-1, 0, -1, 0])
        replayed.edit = lambda inputs: replace(
            inputs, slot_mapping=inputs.slot_mapping.where(mixed == 0, -5)
        )
        replayed.decode(*((row, 9) for row in rows))
        written = [bool(replayed.cache.k[0, row.pages[0], 5].any()) for row in rows]
        assert written == [False, True, False, True]
        assert graphs.captured == 1

    def test_a_prompt_without_slots_writes_nothing(self, dense_dir: Path, graphs: Graphs) -> None:
        replayed = driver(dense_dir)
        replayed.edit = lambda inputs: replace(inputs, slot_mapping=inputs.slot_mapping * 0 - 1)
        replayed.prefill((replayed.row(), [5, 6, 7]))
        assert not replayed.cache.k.any()
        assert not replayed.cache.v.any()

    def test_the_recorder_notices_what_was_read_on_the_host(self) -> None:
        """Else these tests would prove nothing."""
        length, out = torch.tensor([1]), torch.zeros(4)

        def reads_back() -> None:
            out.zero_()
            out[: int(length)] += 1

        with pytest.raises(AssertionError, match="waits for the device"):
            Graphs().capture(reads_back)

        def reads_from_memory() -> None:
            out.zero_()
            out[: length.tolist()[0]] += 1

        replay = Graphs().capture(reads_from_memory)
        length.fill_(3)
        replay()
        assert out.sum() == 1  # as a graph would, it has kept the old length


def test_chunks_may_be_packed_in_any_order(dense_dir: Path, graphs: Graphs) -> None:
    replayed = driver(dense_dir)
    expected = replayed.prefill((replayed.row(), PROMPTS[0]), (replayed.row(), PROMPTS[1]))

    def swap(inputs: StageInputs) -> StageInputs:
        return replace(
            inputs,
            input_ids=inputs.input_ids.roll(-3),
            slot_mapping=inputs.slot_mapping.roll(-3),
            chunk_offsets=int32([42, 0]),
        )

    replayed.edit = swap
    found = replayed.prefill((replayed.row(), PROMPTS[0]), (replayed.row(), PROMPTS[1]))
    close(found, expected)


@pytest.mark.parametrize("decodes", [True, False])
def test_shapes_on_the_meta_device(dense_dir: Path, decodes: bool) -> None:
    """A whole stage with nothing but shapes; what the host knows of the step is given."""
    plain = driver(dense_dir)
    lengths = [1, 1, 1] if decodes else [3, 20, 1]
    offsets = [0, 1, 2] if decodes else [0, 3, 23]
    tokens = sum(lengths)

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    chunks = () if decodes else (meta(3), meta(3))
    step = Step(
        meta(3),
        meta(3, 8),
        meta(tokens),
        *chunks,
        host=HostStep([5, 100, 1], lengths, offsets, list(range(tokens))),
    )
    weights = {name: tensor.to("meta") for name, tensor in plain.static.named().items()}
    feed_forward = kernels.dense(weights.pop("w_gate_up"), weights.pop("w_down"))
    model = kernels.Transformer(feed_forward=feed_forward, **weights)
    ops = FlashInferOps(flashinfer(), Layout(torch.float32, 4, 2, 16, 16, 64), torch.device("meta"))
    hidden = model.hidden(
        ops, step, meta(tokens), plain.cache.k.to("meta"), plain.cache.v.to("meta")
    )
    assert hidden.shape == (tokens, plain.config.hidden_size)
    assert hidden.dtype is torch.float32
    assert hidden.is_meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_grouped_product_is_the_references(dtype: torch.dtype) -> None:
    ops = FlashInferOps(flashinfer(), Layout(dtype, 4, 2, 16, 16, 64), torch.device("cpu"))
    x, weights = torch.randn(10, 16).to(dtype), torch.randn(4, 24, 16).to(dtype)
    ends = int32([2, 2, 7, 10])
    expected = ReferenceOps().grouped_linear(x, weights, ends)
    torch.testing.assert_close(ops.grouped_linear(x, weights, ends), expected)


class TestChoice:
    LAYOUT = Layout(torch.bfloat16, 16, 8, 128, page_size=16, pages=100)
    DEVICE = torch.device("cuda")

    @pytest.fixture(autouse=True)
    def _no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "flashinfer", flashinfer())
        monkeypatch.setattr(
            cuda.FlashInferOps, "__init__", lambda self, package, layout, device: None
        )

    def test_flashinfer_and_graphs_where_it_is_installed(self) -> None:
        chosen = ops_for(self.DEVICE, self.LAYOUT)
        assert isinstance(chosen.ops, FlashInferOps)
        assert chosen.replay is not None

    def test_plain_torch_where_it_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "flashinfer", None)
        assert type(ops_for(self.DEVICE, self.LAYOUT).ops) is ReferenceOps

    @pytest.mark.parametrize("change", [{"dtype": torch.float32}, {"head_dim": 80}])
    def test_plain_torch_for_what_it_cannot_do(self, change: dict[str, Any]) -> None:
        chosen = ops_for(self.DEVICE, replace(self.LAYOUT, **change))
        assert type(chosen.ops) is ReferenceOps
        assert chosen.replay is None

    def test_the_cpu_looks_for_no_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(choice, "optional", lambda name: pytest.fail(name))
        assert type(ops_for(torch.device("cpu"), self.LAYOUT).ops) is ReferenceOps


def test_the_installed_flashinfer_takes_the_same_parameters() -> None:
    """Where it is installed; 0.7.4 was what the stand-in was written from."""
    real: Any = pytest.importorskip("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    for method in ("__init__", "plan"):
        ours = inspect.signature(getattr(BatchPrefillWithPagedKVCacheWrapper, method))
        theirs = inspect.signature(getattr(real, method))
        assert list(ours.parameters) == list(theirs.parameters)


def test_a_graphed_stage_is_what_dense_decode_compiles_to(dense_dir: Path, graphs: Graphs) -> None:
    ops = FlashInferOps(flashinfer(), Layout(torch.float32, 4, 2, 16, 16, 64), torch.device("cpu"))
    named = {
        name: torch.empty(shape, dtype=torch.int32, device="meta")
        for name, shape in {
            "input_ids": (4,),
            "seq_lens": (4,),
            "block_table": (4, 8),
            "slot_mapping": (4,),
            "logits": (4, 101),
        }.items()
    }
    assert isinstance(ops.replayed(kernels.dense_decode, named), GraphedDecode)
