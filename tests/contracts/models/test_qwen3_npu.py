"""The NPU's code path, run on the CPU over a stand-in for torch_npu.

The stand-in's operators are declared to torch by the schemas that torch_npu publishes, so torch
itself refuses a call that does not fit them; each is computed in torch as its documentation says.
What an NPU makes of the calls is not tested here.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.contracts.models.driver import Driver, int32, small_model, small_moe_config
from tidemill_contracts.models.contract import StageInputs
from tidemill_contracts.models.qwen3 import kernels
from tidemill_contracts.models.qwen3.ops import Layout, Ops, npu
from tidemill_contracts.models.qwen3.ops.choice import ops_for
from tidemill_contracts.models.qwen3.ops.npu import NpuOps
from tidemill_contracts.models.qwen3.ops.reference import ReferenceOps
from tidemill_contracts.models.qwen3.step import HostStep, Step

# torch_npu 2.14.0, torch_npu-2.14.0-cp311-cp311-manylinux_2_28_x86_64.whl from PyPI: the schemas
# that its library registers.
SCHEMAS = (
    "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half',"
    " Tensor? rotate=None) -> Tensor",
    "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    "npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache,"
    " Tensor(b!) value_cache, Tensor slot_mapping, *, Tensor? compress_lens=None,"
    " Tensor? compress_seq_offsets=None, Tensor? seq_lens=None,"
    " str? cache_mode='PA_NZ') -> ()",
    "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *,"
    " Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None,"
    " SymInt[]? actual_seq_lengths_kv=None, Tensor? dequant_scale1=None,"
    " Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None,"
    " Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None,"
    " Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None,"
    " Tensor? value_antiquant_scale=None, Tensor? value_antiquant_offset=None,"
    " Tensor? block_table=None, Tensor? query_padding_size=None, Tensor? kv_padding_size=None,"
    " Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None,"
    " SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None,"
    " Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0,"
    " int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout='BSH',"
    " int num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, int block_size=0,"
    " int antiquant_mode=0, int key_antiquant_mode=0, int value_antiquant_mode=0,"
    " bool softmax_lse_flag=False) -> (Tensor, Tensor)",
)

NAMESPACE = "tidemill_npu_stand_in"
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5] * 7, [3], list(range(100)) + list(range(80))]


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    assert gamma.dtype is x.dtype
    normed = ReferenceOps().rms_norm(x, gamma, torch.tensor([epsilon], device=x.device))
    return normed, x.new_empty(0, dtype=torch.float32)


def rotary_mul(
    x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    assert rotary_mode == "half"
    assert x.dim() == r1.dim() == r2.dim() == 4
    # BSND by 1S1D.
    assert r1.shape == r2.shape == (1, x.shape[1], 1, x.shape[3])
    first, second = x.chunk(2, -1)
    return r1 * x + r2 * torch.cat((-second, first), -1)


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.chunk(2, dim)
    return functional.silu(gate) * up


def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    **options: Any,
) -> None:
    assert options.pop("cache_mode") == "Norm"
    assert not any(value is not None for value in options.values())
    tensors = (key, value, key_cache, value_cache, slot_mapping)
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert key.dtype is value.dtype is key_cache.dtype is value_cache.dtype
    assert key.shape == value.shape == (len(slot_mapping), *key_cache.shape[2:])
    if key.is_meta:
        return
    slots = slot_mapping.tolist()
    assert len(set(slots)) == len(slots), "a slot twice is undefined"
    assert all(0 <= slot < key_cache.shape[0] * key_cache.shape[1] for slot in slots)
    key_cache.flatten(0, 1)[slot_mapping.long()] = key
    value_cache.flatten(0, 1)[slot_mapping.long()] = value


def fused_infer_attention_score(
    query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Page attention in the two layouts that the contract calls it in."""
    # torch leaves out what was given as its default.
    options = {"input_layout": "BSH", "atten_mask": None, "sparse_mode": 0, **options}
    table, block, ends = (
        options["block_table"],
        options["block_size"],
        options["actual_seq_lengths_kv"],
    )
    heads, kv_heads = options["num_heads"], options["num_key_value_heads"]
    assert all(tensor.is_contiguous() for tensor in (query, key, value, table))
    assert key.shape[1] == block
    assert key.dim() == 3, "(blocknum, blocksize, H)"
    assert table.dim() == 2
    assert table.dtype is torch.int32
    assert len(table) == len(ends)
    assert table.shape[1] * block >= max(ends)
    nothing = query.new_empty(0, dtype=torch.float32)
    if options["input_layout"] == "BSH":
        assert query.shape[1] == 1
        assert block % 16 == 0
        assert options["atten_mask"] is None
        tokens = query.view(len(query), heads, -1)
        starts = list(range(len(query) + 1))
    else:
        assert options["input_layout"] == "TND"
        assert block % 128 == 0
        assert options["sparse_mode"] == 3
        mask = options["atten_mask"]
        assert mask.dtype is torch.bool
        assert mask.shape == (2048, 2048)
        if not mask.is_meta:
            assert torch.equal(mask, torch.ones(2048, 2048).triu(1).bool())
        tokens = query
        starts = [0, *options["actual_seq_lengths"]]
    if query.is_meta:
        return torch.empty_like(query), nothing
    assert (table >= 0).all()
    out = torch.empty_like(tokens)
    for row, end in enumerate(ends):
        chunk = slice(starts[row], starts[row + 1])
        pages = table[row, : -(-end // block)].long()
        k, v = (
            pool[pages].flatten(0, 1)[:end].view(end, kv_heads, -1).transpose(0, 1)
            for pool in (key, value)
        )
        length = chunk.stop - chunk.start
        seen = torch.arange(end) <= torch.arange(end - length, end)[:, None]
        out[chunk] = functional.scaled_dot_product_attention(
            tokens[chunk].transpose(0, 1),
            k,
            v,
            attn_mask=seen,
            scale=options["scale"],
            enable_gqa=True,
        ).transpose(0, 1)
    return out.view(query.shape), nothing


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": rms_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_swiglu": swiglu,
    "npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "npu_fused_infer_attention_score": fused_infer_attention_score,
}


class StandIn(ModuleType):
    """torch_npu, as far as the contract uses it; counts the calls."""

    def __init__(self) -> None:
        super().__init__("torch_npu")
        self.calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in IMPLEMENTATIONS:
            raise AttributeError(name)
        operator = getattr(getattr(torch.ops, NAMESPACE), name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            return operator(*args, **kwargs)

        return call


@pytest.fixture(scope="module", autouse=True)
def _operators() -> Iterator[None]:
    library = torch.library.Library(NAMESPACE, "DEF")
    for schema in SCHEMAS:
        library.define(schema)
        name = schema.partition("(")[0]
        library.impl(name, IMPLEMENTATIONS[name], "CompositeExplicitAutograd")
    yield
    library._destroy()


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "torch_npu", stand_in)
    # So that greedy tokens can be compared exactly; the real operator takes no float32.
    monkeypatch.setattr(npu, "ATTENTION_DTYPES", (torch.bfloat16, torch.float32))
    return stand_in


@pytest.fixture(scope="module", params=["dense", "moe"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    if request.param == "moe":
        return small_model(directory, seed=3, config=small_moe_config)
    return small_model(directory, seed=3)


@pytest.fixture(scope="module")
def dense_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("dense"), seed=3)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("chunk", [10**9, 50])
def test_it_computes_what_the_reference_does(
    model_dir: Path, torch_npu: StandIn, page_size: int, chunk: int
) -> None:
    expected = Driver(model_dir, page_size=page_size).generate(PROMPTS, 5, chunk=chunk)
    driver = Driver(model_dir, page_size=page_size, device="privateuseone")
    close(driver.generate(PROMPTS, 5, chunk=chunk), expected)
    assert torch_npu.calls.keys() == IMPLEMENTATIONS.keys()
    per_step = driver.config.num_hidden_layers
    prefills = -(-max(map(len, PROMPTS)) // chunk) if page_size == 128 else 0
    assert torch_npu.calls["npu_fused_infer_attention_score"] == per_step * (4 + prefills)


def test_bfloat16_stays_close(model_dir: Path, torch_npu: StandIn) -> None:
    options: dict[str, Any] = {"page_size": 128, "dtype": torch.bfloat16}
    whole = Driver(model_dir, **options)
    fused = Driver(model_dir, device="privateuseone", **options)
    for prompt in PROMPTS:
        expected = whole.prefill((whole.row(), prompt))
        error = (fused.prefill((fused.row(), prompt)) - expected).abs().max()
        assert error < 0.05 * expected.std()


class TestSlots:
    def test_negative_ones_are_not_written(self, model_dir: Path, torch_npu: StandIn) -> None:
        driver = Driver(model_dir, page_size=128, device="privateuseone")
        driver.edit = lambda inputs: replace(
            inputs, slot_mapping=inputs.slot_mapping.where(inputs.slot_mapping % 2 == 0, -1)
        )
        row = driver.row()
        driver.prefill((row, PROMPTS[1]))
        written = driver.cache.k[0, row.pages[0]].ne(0).any(-1).any(-1)
        assert written.tolist() == [place % 2 == 0 and place < 42 for place in range(128)]

    def test_a_step_that_writes_nothing_makes_no_call(
        self, model_dir: Path, torch_npu: StandIn
    ) -> None:
        driver = Driver(model_dir, page_size=128, device="privateuseone")
        driver.edit = lambda inputs: replace(inputs, slot_mapping=inputs.slot_mapping * 0 - 1)
        driver.prefill((driver.row(), PROMPTS[1]))
        assert "npu_scatter_pa_kv_cache" not in torch_npu.calls
        assert not driver.cache.k.any()

    def test_padding_rows_that_repeat_row_0_write_once(
        self, model_dir: Path, torch_npu: StandIn
    ) -> None:
        """The stand-in refuses a slot that is named twice."""
        driver = Driver(model_dir, device="privateuseone")
        row = driver.row()
        driver.prefill((row, [5, 6, 7]))
        logits = torch.empty(3, driver.config.vocab_size)

        def pad(inputs: StageInputs) -> StageInputs:
            return replace(
                inputs,
                input_ids=inputs.input_ids.repeat(3),
                seq_lens=inputs.seq_lens.repeat(3),
                block_table=inputs.block_table.repeat(3, 1),
                slot_mapping=inputs.slot_mapping.repeat(3),
                logits=logits,
            )

        driver.edit = pad
        driver.decode((row, 8))
        other = Driver(model_dir)
        rows = other.row()
        other.prefill((rows, [5, 6, 7]))
        close(logits, other.decode((rows, 8)).expand(3, -1))


def test_chunks_may_be_packed_in_any_order(model_dir: Path, torch_npu: StandIn) -> None:
    driver = Driver(model_dir, page_size=128, device="privateuseone")
    expected = driver.prefill((driver.row(), PROMPTS[0]), (driver.row(), PROMPTS[1]))

    def swap(inputs: StageInputs) -> StageInputs:
        return replace(
            inputs,
            input_ids=inputs.input_ids.roll(-3),
            slot_mapping=inputs.slot_mapping.roll(-3),
            chunk_offsets=int32([42, 0]),
        )

    driver.edit = swap
    close(driver.prefill((driver.row(), PROMPTS[0]), (driver.row(), PROMPTS[1])), expected)


LAYOUT = Layout(torch.bfloat16, q_heads=16, kv_heads=8, head_dim=128, page_size=128, pages=100)


@pytest.mark.parametrize(
    ("changes", "prefill", "decode"),
    [
        ({}, True, True),
        ({"page_size": 16}, False, True),
        ({"page_size": 256}, True, True),
        ({"page_size": 640}, False, False),
        ({"page_size": 8}, False, False),
        ({"dtype": torch.float32}, False, False),
        ({"head_dim": 72}, False, False),
        ({"q_heads": 65, "kv_heads": 1}, False, False),
        ({"pages": 2**31 // (128 * 8 * 128)}, False, False),
    ],
)
def test_what_the_operator_cannot_do_falls_back(
    changes: dict[str, Any], prefill: bool, decode: bool
) -> None:
    layout = replace(LAYOUT, **changes)
    assert npu.attention_fits(layout, decodes=False) is prefill
    assert npu.attention_fits(layout, decodes=True) is decode


@pytest.mark.parametrize(
    "call",
    [
        lambda fake: fake.npu_rms_norm(torch.ones(2, 4), torch.ones(4), eps=1e-6),
        lambda fake: fake.npu_rms_norm(torch.ones(2, 4), torch.ones(4), "1e-6"),
        lambda fake: fake.npu_swiglu(torch.ones(2, 4), -1, 0),
        lambda fake: fake.npu_scatter_pa_kv_cache(*[torch.ones(1)] * 5, "Norm"),
    ],
)
def test_a_call_that_does_not_fit_the_published_schema_is_refused(
    call: Callable[[StandIn], object],
) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        call(StandIn())


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("ops", ["reference", "npu"])
def test_shapes_on_the_meta_device(
    dense_dir: Path, torch_npu: StandIn, ops: str, page_size: int, decodes: bool
) -> None:
    """A whole stage with nothing but shapes; what the host knows of the step is given."""
    driver = Driver(dense_dir, page_size=page_size)
    lengths = [1, 1, 1] if decodes else [3, 20, 1]
    offsets = [0, 1, 2] if decodes else [0, 3, 23]
    tokens = sum(lengths)
    host = HostStep([5, 200, 1], lengths, offsets, list(range(tokens)))

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    # Of chunks, their lengths, their offsets, and the tokens to give logits for.
    chunks = () if decodes else (meta(3), meta(3), meta(3))
    step = Step(meta(3), meta(3, 512 // page_size), meta(tokens), *chunks, host=host)
    weights = {name: tensor.to("meta") for name, tensor in driver.static.named().items()}
    chosen: Ops = ReferenceOps()
    if ops == "npu":
        # The operator takes epsilon as a number, which a shape does not have.
        weights["rms_norm_eps"] = driver.static.named()["rms_norm_eps"]
        chosen = NpuOps(torch_npu, Layout(torch.float32, 4, 2, 16, page_size, 64))
    feed_forward = kernels.dense(weights.pop("w_gate_up"), weights.pop("w_down"))
    model = kernels.Transformer(feed_forward=feed_forward, **weights)
    k_cache, v_cache = driver.cache.k.to("meta"), driver.cache.v.to("meta")
    hidden = model.hidden(chosen, step, meta(tokens), k_cache, v_cache)
    assert hidden.shape == (tokens, driver.config.hidden_size)
    assert hidden.dtype is torch.float32
    assert hidden.is_meta
    logits = torch.empty(3, driver.config.vocab_size, device="meta")
    model.run(chosen, step, meta(tokens), k_cache, v_cache, logits)


class TestChoice:
    DEVICE = torch.device("privateuseone")

    def test_the_fused_operators_where_the_package_is_installed(self, torch_npu: StandIn) -> None:
        assert isinstance(ops_for(self.DEVICE, LAYOUT).ops, NpuOps)

    def test_plain_torch_where_it_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch_npu", None)
        assert type(ops_for(self.DEVICE, LAYOUT).ops) is ReferenceOps

    def test_torchs_two_names_of_the_device_are_one(self, torch_npu: StandIn) -> None:
        renamed: Any = SimpleNamespace(type="npu")
        assert isinstance(ops_for(renamed, LAYOUT).ops, NpuOps)

    def test_no_package_of_a_device_is_needed_to_import_its_path(self) -> None:
        code = (
            "import sys; sys.modules['torch_npu'] = sys.modules['flashinfer'] = None\n"
            "from tidemill_contracts.models.qwen3.ops import choice, cuda, npu\n"
            "from tidemill_contracts.models.registry import get_contract\n"
            "get_contract('qwen3', 'dense').hooks.load_kernels()"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
