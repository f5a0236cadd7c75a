"""A contract with any single defect is refused before anything is compiled or loaded, by a
message that a person can act on; a tuple that does not fit is refused before its kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.contracts.models.driver import small_config
from tests.contracts.models.toy import (
    RUNTIME,
    Recorder,
    ToyHooks,
    decode,
    prefill,
    runtime_args,
    toy_contract,
)
from tidemill_contracts.models.args import TensorArgSpec
from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import (
    DETERMINISTIC,
    KernelSpec,
    KVCache,
    ModelContract,
    RuntimeConfig,
    StageInputs,
    WeightSource,
)
from tidemill_contracts.models.errors import ContractMismatch
from tidemill_contracts.models.requirements import ServingRequirements
from tidemill_contracts.models.startup import ServedModel, load_model

CONFIG = ModelConfig.from_hf(small_config(), "the/model")


def _no_source() -> WeightSource:
    return None  # type: ignore[return-value]  # the toy's weights come from nowhere


def start(
    contract: ModelContract, config: ModelConfig = CONFIG, runtime: RuntimeConfig = RUNTIME
) -> ServedModel:
    return load_model(contract, config, runtime, _no_source)


def with_kernel(contract: ModelContract, key: str, /, **changes: Any) -> ModelContract:
    kernel = replace(contract.kernels[key], **changes)
    return replace(contract, kernels={**contract.kernels, key: kernel})


def with_args(
    contract: ModelContract,
    change: Callable[[tuple[TensorArgSpec, ...]], tuple[TensorArgSpec, ...]],
) -> ModelContract:
    return with_kernel(contract, "decode", args=change(contract.kernels["decode"].args))


def with_functions(contract: ModelContract, **functions: Any) -> ModelContract:
    hooks = contract.hooks
    assert isinstance(hooks, ToyHooks)
    return replace(contract, hooks=replace(hooks, functions={**hooks.functions, **functions}))


def fewer(input_ids: Tensor, seq_lens: Tensor, logits: Tensor) -> None: ...


def swapped(
    seq_lens: Tensor,
    input_ids: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    embed: Tensor,
    head: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    logits: Tensor,
) -> None: ...


Defect = Callable[[ModelContract], ModelContract]

DEFECTS: dict[str, tuple[Defect, str, tuple[str, ...]]] = {
    "schema": (
        lambda c: replace(c, schema_version="0"),
        "schema_version",
        ("found 0", "expected 1", "Use a Tidemill release"),
    ),
    "missing phase": (
        lambda c: replace(c, execution={"prefill": ("prefill",)}),
        "execution[decode]",
        ("found []",),
    ),
    "two stages in a phase": (
        lambda c: replace(c, execution={"prefill": ("prefill", "decode"), "decode": ("decode",)}),
        "execution[prefill]",
        ("exactly one",),
    ),
    "missing capability": (
        lambda c: replace(c, capabilities=frozenset({"paged_kv"})),
        "capabilities",
        ("chunked_prefill",),
    ),
    "stage under another key": (
        lambda c: with_kernel(c, "decode", name="step"),
        "kernels[decode].name",
        ("found step",),
    ),
    "one public name twice": (
        lambda c: with_kernel(c, "decode", public_name="toy.prefill"),
        "kernels[decode].public_name",
        ("toy.prefill",),
    ),
    "an argument twice": (
        lambda c: with_args(c, lambda a: (a[0], replace(a[1], name="input_ids"), *a[2:])),
        "kernels[decode].args",
        ("'input_ids' twice",),
    ),
    "unknown dtype": (
        lambda c: with_args(c, lambda a: (replace(a[0], dtype="int7"), *a[1:])),
        "toy.decode.input_ids dtype",
        ("int7", "bf16"),
    ),
    "unknown direction": (
        lambda c: with_args(c, lambda a: (replace(a[0], direction="up"), *a[1:])),  # type: ignore[arg-type]
        "toy.decode.input_ids direction",
        ("up",),
    ),
    "nothing written": (
        lambda c: with_args(c, lambda a: tuple(replace(x, direction="in") for x in a)),
        "kernels[decode].args",
        ("no output",),
    ),
    "limit below the model": (
        lambda c: replace(c, limits={**c.limits, "num_layers": 1}),
        "limits[num_layers]",
        ("found 2", "expected 1", "another model"),
    ),
    "wrong vocabulary": (
        lambda c: replace(c, limits={**c.limits, "real_vocab": 99}),
        "limits[real_vocab]",
        ("found 101", "expected 99"),
    ),
    "wrong padded vocabulary": (
        lambda c: replace(c, limits={**c.limits, "vocab": 128}),
        "limits[vocab]",
        ("found 101", "expected 128"),
    ),
    "context too long": (
        lambda c: replace(c, limits={**c.limits, "max_seq": 32}),
        "limits[max_seq]",
        ("found 64", "at most 32", "--max-model-len 32"),
    ),
    "wrong page size": (
        lambda c: replace(c, limits={**c.limits, "page_size": 128}),
        "limits[page_size]",
        ("found 8", "exactly 128", "--page-size 128"),
    ),
    "too few pages": (
        lambda c: replace(c, limits={**c.limits, "min_kv_pages": 16}),
        "limits[min_kv_pages]",
        ("found 12", "--kv-pages 16"),
    ),
    "too many rows": (
        lambda c: replace(c, limits={**c.limits, "max_rows": 2}),
        "limits[max_rows]",
        ("found 4", "--max-rows 2"),
    ),
    "missing function": (
        lambda c: replace(c, hooks=replace(c.hooks, functions={"prefill": prefill})),  # type: ignore[type-var]
        "kernels[decode]",
        ("a function 'decode'", "different versions"),
    ),
    "wrong arity": (
        lambda c: with_functions(c, decode=fewer),
        "toy.decode arity",
        ("a kernel of 3 parameters", "9 declared", "Only the contract declares block_table"),
    ),
    "swapped arguments": (
        lambda c: with_functions(c, decode=swapped),
        "toy.decode argument 0",
        ("the kernel's 'seq_lens'", "the declared 'input_ids'", "The order differs"),
    ),
}


@pytest.mark.parametrize(("change", "field", "words"), DEFECTS.values(), ids=DEFECTS.keys())
def test_a_defect_is_refused_before_anything_is_compiled(
    change: Defect, field: str, words: tuple[str, ...]
) -> None:
    recorder = Recorder()
    contract = change(toy_contract(recorder))
    with pytest.raises(ContractMismatch) as caught:
        start(contract)
    error = caught.value
    assert error.field == field
    assert (error.contract.family, error.contract.variant) == ("toy", "one")
    assert error.contract.schema_version == contract.schema_version
    assert error.contract.fingerprint == contract.abi_fingerprint()
    for word in ("toy/one", contract.abi_fingerprint()[:12], field, *words):
        assert word in str(error)
    assert (recorder.compiled, recorder.opened) == ([], 0)


def test_a_wrong_constant_is_refused_before_anything_is_compiled() -> None:
    recorder = Recorder()
    contract = toy_contract(recorder)
    contract = replace(contract, limits={**contract.limits, "page_size": 4})
    with pytest.raises(ContractMismatch, match=r"constants\[page\]: found 8, expected 4"):
        start(contract, runtime=replace(RUNTIME, page_size=4))
    assert (recorder.compiled, recorder.opened) == ([], 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a[:-1], r"toy\.decode arguments: found 8, expected 9 \(input_ids, seq_lens"),
        (lambda a: (a[0].float(), *a[1:]), r"input_ids dtype: found torch\.float32"),
        (lambda a: (a[0][None], *a[1:]), r"input_ids rank: found \[1, 4\], expected \[B\]"),
        (lambda a: (a[0], a[1][:3], *a[2:]), r"seq_lens shape: found \[3\].* B is 4"),
        (lambda a: (*a[:5], a[5][:9], *a[6:]), r"head shape: found \[9, 32\].* V is 101"),
    ],
)
def test_compile_arguments_that_do_not_fit_are_refused_before_compilation(
    change: Callable[[Any], Any], message: str
) -> None:
    recorder = Recorder()
    contract = toy_contract(recorder)
    build = contract.kernels["decode"].compile_args_builder
    broken = with_kernel(contract, "decode", compile_args_builder=lambda c, r: change(build(c, r)))
    with pytest.raises(ContractMismatch, match=message):
        start(broken)
    assert "decode" not in recorder.compiled
    assert recorder.opened == 0


def test_a_deterministic_run_needs_a_contract_that_can_give_it() -> None:
    contract = toy_contract()
    run = replace(RUNTIME, deterministic=True)
    (problem,) = ServingRequirements().of_run(run).problems(contract)
    assert "expected also deterministic" in str(problem)
    able = replace(contract, capabilities=contract.capabilities | {DETERMINISTIC})
    assert not list(ServingRequirements().of_run(run).problems(able))
    assert not list(ServingRequirements().of_run(RUNTIME).problems(contract))


def test_optional_capabilities_are_found_where_they_are() -> None:
    requirements = ServingRequirements(optional_capabilities=frozenset({"paged_kv", "sampling"}))
    assert requirements.found_optional(toy_contract()) == {"paged_kv"}


def test_a_phase_that_a_contract_need_not_have_is_run_where_it_is_declared() -> None:
    contract = toy_contract()
    assert set(start(contract).stages) == {"prefill", "decode"}
    declared = contract.capabilities | {"prompt_logits"}
    with pytest.raises(ContractMismatch, match=r"execution\[score\]"):
        start(replace(contract, capabilities=declared))
    kernel = replace(contract.kernels["prefill"], name="score", public_name="toy.score")
    scoring = replace(
        with_functions(contract, score=prefill),
        execution={**contract.execution, "score": ("score",)},
        kernels={**contract.kernels, "score": kernel},
    )
    with pytest.raises(ContractMismatch, match="also prompt_logits, since there is a phase"):
        start(scoring)
    assert set(start(replace(scoring, capabilities=declared)).stages) == {
        "prefill",
        "decode",
        "score",
    }


def _decode_inputs(rows: int = 2) -> StageInputs:
    ints = torch.arange(rows, dtype=torch.int32)
    return StageInputs(
        input_ids=ints,
        seq_lens=ints + 1,
        block_table=ints[:, None].clone(),
        slot_mapping=ints * 8,
        logits=torch.zeros(rows, 101),
    )


def test_a_sound_contract_runs() -> None:
    recorder = Recorder()
    model = start(toy_contract(recorder))
    inputs = _decode_inputs()
    model.stages["decode"](inputs)
    assert recorder.ran == ["decode"]
    assert inputs.logits.abs().sum() > 0


RUNTIME_DEFECTS: dict[str, tuple[Callable[[StageInputs], StageInputs], str]] = {
    "dtype": (
        lambda i: replace(i, seq_lens=i.seq_lens.long()),
        r"toy\.decode\.seq_lens dtype: found torch\.int64, expected torch\.int32",
    ),
    "rank": (
        lambda i: replace(i, block_table=i.block_table.flatten()),
        r"toy\.decode\.block_table rank: found \[2\], expected \[B, PAGES\]",
    ),
    "rows that disagree": (
        lambda i: replace(i, slot_mapping=i.slot_mapping[:1]),
        r"toy\.decode\.slot_mapping shape: found \[1\], expected \[B\] \(B is 2",
    ),
    "too many rows": (
        lambda i: replace(i, **vars_of(_decode_inputs(5))),
        r"toy\.decode\.input_ids shape: found \[5\].*B at most 4",
    ),
    "wrong width": (
        lambda i: replace(i, logits=torch.zeros(2, 100)),
        r"toy\.decode\.logits shape: found \[2, 100\], expected \[B, V\]",
    ),
    "too many pages": (
        lambda i: replace(i, block_table=torch.zeros(2, 9, dtype=torch.int32)),
        r"toy\.decode\.block_table shape: found \[2, 9\].*PAGES at most 8",
    ),
}


def vars_of(inputs: StageInputs) -> dict[str, Any]:
    return dict(inputs.named())


@pytest.mark.parametrize(
    ("change", "message"), RUNTIME_DEFECTS.values(), ids=RUNTIME_DEFECTS.keys()
)
@pytest.mark.parametrize("warm", [False, True])
def test_inputs_that_do_not_fit_are_refused_before_the_kernel_runs(
    change: Callable[[StageInputs], StageInputs], message: str, warm: bool
) -> None:
    recorder = Recorder()
    model = start(toy_contract(recorder))
    if warm:
        model.stages["decode"](_decode_inputs())
        recorder.ran.clear()
    with pytest.raises(ContractMismatch, match=message):
        model.stages["decode"](change(_decode_inputs()))
    assert recorder.ran == []


def _builder(order: tuple[int, ...]) -> Callable[..., tuple[Tensor, ...]]:
    def build(*parts: Any) -> tuple[Tensor, ...]:
        args = runtime_args(*parts)
        return tuple(args[i] for i in order)

    return build


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((0, 1, 2, 3, 4, 5, 6, 7), r"arguments: found 8, expected 9"),
        ((1, 0, 2, 3, 4, 5, 6, 7, 8), r"input_ids order: found seq_lens, expected input_ids"),
        ((0, 1, 2, 3, 5, 4, 6, 7, 8), r"embed order: found head, expected embed"),
        ((0, 1, 2, 3, 4, 5, 7, 6, 8), r"k_cache order: found v_cache, expected k_cache"),
        ((0, 1, 2, 3, 6, 5, 4, 7, 8), r"embed shape: found \[96, 32\], expected \[101, 32\]"),
    ],
)
def test_a_builder_that_mixes_arguments_up_is_refused_even_where_shapes_agree(
    order: tuple[int, ...], message: str
) -> None:
    recorder = Recorder()
    contract = with_kernel(toy_contract(recorder), "decode", runtime_args_builder=_builder(order))
    with pytest.raises(ContractMismatch, match=message):
        start(contract).stages["decode"](_decode_inputs())
    assert recorder.ran == []


def test_weights_of_the_wrong_dtype_are_refused() -> None:
    def build(inputs: StageInputs, static: Any, cache: KVCache) -> tuple[Tensor, ...]:
        args = runtime_args(inputs, static, cache)
        return (*args[:4], args[4].bfloat16(), *args[5:])

    contract = with_kernel(toy_contract(), "decode", runtime_args_builder=build)
    with pytest.raises(ContractMismatch, match=r"embed dtype: found torch\.bfloat16"):
        start(contract).stages["decode"](_decode_inputs())


def test_an_output_that_lies_in_an_input_is_refused() -> None:
    def build(inputs: StageInputs, static: Any, cache: KVCache) -> tuple[Tensor, ...]:
        args = runtime_args(inputs, static, cache)
        return (*args[:6], args[4][:96], *args[7:])

    contract = with_kernel(toy_contract(), "decode", runtime_args_builder=build)
    with pytest.raises(ContractMismatch, match=r"k_cache direction: found the storage of embed"):
        start(contract).stages["decode"](_decode_inputs())


def test_the_toy_kernels_declare_what_they_take() -> None:
    # Guards the table above: `swapped` must differ from the real kernel in order alone.
    assert sorted(decode.__annotations__) == sorted(swapped.__annotations__)


names = st.text("abcdefgh", min_size=1, max_size=3)
specs = st.builds(
    TensorArgSpec,
    name=names,
    dtype=st.sampled_from(["bf16", "fp32", "int32", "model"]),
    shape=st.tuples(names | st.integers(1, 9)),
    direction=st.sampled_from(["in", "out", "inout"]),
)


def _contract(
    args: list[TensorArgSpec], limits: dict[str, int], capabilities: set[str], dynamic: set[str]
) -> ModelContract:
    base = toy_contract()
    kernel: KernelSpec = replace(
        base.kernels["decode"], args=tuple(args), dynamic_symbols=frozenset(dynamic)
    )
    return replace(
        base,
        limits=limits,
        capabilities=frozenset(capabilities),
        kernels={**base.kernels, "decode": kernel},
    )


abis = st.tuples(
    st.lists(specs, max_size=4),
    st.dictionaries(names, st.integers(0, 9), max_size=3),
    st.sets(names, max_size=3),
    st.sets(names, max_size=2),
)


@given(abis, abis)
def test_two_fingerprints_are_equal_exactly_where_the_abi_is(a: Any, b: Any) -> None:
    first, second = _contract(*a), _contract(*b)
    assert (first.abi_fingerprint() == second.abi_fingerprint()) == (a == b)
    assert (first == second) == (a == b)
    assert _contract(*a).abi_fingerprint() == first.abi_fingerprint()


@given(abis)
def test_hooks_and_kernels_do_not_change_the_fingerprint(abi: Any) -> None:
    contract = _contract(*abi)
    other = toy_contract(Recorder())
    changed = replace(contract, hooks=other.hooks)
    changed = with_kernel(changed, "decode", host_jit_fn=other.kernels["decode"].host_jit_fn)
    assert changed.abi_fingerprint() == contract.abi_fingerprint()
    assert hash(changed) == hash(contract)
