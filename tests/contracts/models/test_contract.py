"""Finding a contract, checking it against worker, kernels and model, and its fingerprint."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from tests.contracts.models.driver import small_config
from tidemill_contracts.models.args import TensorArgSpec
from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import (
    KernelSpec,
    KVCache,
    LoadedKernelModules,
    ModelContract,
    ModelId,
    RuntimeConfig,
    StageInputs,
)
from tidemill_contracts.models.eager import EagerHostFn
from tidemill_contracts.models.errors import (
    CheckpointError,
    ContractMismatch,
    ContractNotImplemented,
    ModelError,
    UnsupportedModel,
)
from tidemill_contracts.models.registry import (
    find_contract_for_model_config,
    get_contract,
    open_model,
    registrations,
)
from tidemill_contracts.models.requirements import ServingRequirements

DENSE_FINGERPRINT = "fc535f85dcc936908dcd2a5479a2787b3eb7817f82ab84de5ae197890fd1d977"


def model_config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**small_config(), **changes}, "the/model")


RUNTIME = RuntimeConfig(
    device=torch.device("cpu"),
    dtype=torch.float32,
    max_batch_size=4,
    max_seq_len=100,
    max_step_tokens=64,
    page_size=16,
    total_kv_pages=10,
)


@pytest.fixture
def contract() -> ModelContract:
    return get_contract("qwen3", "dense")


class TestRegistry:
    def test_a_dense_qwen3_of_any_size_has_the_one_contract(self, contract: ModelContract) -> None:
        for shape in ({}, {"hidden_size": 5120, "num_hidden_layers": 64, "vocab_size": 151936}):
            assert find_contract_for_model_config(model_config(**shape)) is contract

    def test_the_name_of_the_model_does_not_matter(self, contract: ModelContract) -> None:
        config = replace(model_config(), model_id="/models/llama-2")
        assert find_contract_for_model_config(config) is contract

    @pytest.mark.parametrize(
        ("architecture", "model_type"),
        [
            ("LlamaForCausalLM", "llama"),
            ("Qwen2ForCausalLM", "qwen2"),
            ("Qwen3_5ForCausalLM", "qwen3_5_text"),
            ("Qwen3NextForCausalLM", "qwen3_next"),
            ("Qwen3ForSequenceClassification", "qwen3"),
            ("Qwen3ForCausalLM", "qwen2"),
        ],
    )
    def test_other_models_are_refused_in_their_own_words(
        self, architecture: str, model_type: str
    ) -> None:
        config = model_config(architectures=[architecture], model_type=model_type)
        with pytest.raises(UnsupportedModel) as caught:
            find_contract_for_model_config(config)
        for word in ("the/model", architecture, repr(model_type), "qwen3/dense"):
            assert word in str(caught.value)
        assert not isinstance(caught.value, ContractNotImplemented)

    def test_an_unknown_contract(self) -> None:
        with pytest.raises(
            UnsupportedModel, match=r"llama/dense; there are: qwen3/0\.6b, .*qwen3/dense"
        ):
            get_contract("llama", "dense")

    def test_knowing_the_contracts_imports_no_kernels(self) -> None:
        code = (
            "import sys; from tidemill_contracts.models.registry import *; registrations();"
            "get_contract('qwen3', 'dense');"
            "sys.exit('tidemill_contracts.models.qwen3.kernels' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    @pytest.mark.parametrize(
        ("change", "variant"),
        [({"num_hidden_layers": 43}, "flash"), ({"num_hidden_layers": 61}, "pro")],
    )
    def test_deepseek_v4_is_planned(self, change: dict[str, Any], variant: str) -> None:
        config = model_config(
            architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", **change
        )
        with pytest.raises(ContractNotImplemented, match=f"deepseek-v4/{variant}") as caught:
            find_contract_for_model_config(config)
        for word in ("the/model", "DeepseekV4ForCausalLM", "'deepseek_v4'", "planned"):
            assert word in str(caught.value)

    @pytest.mark.parametrize(
        ("raw", "error"),
        [
            ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, UnsupportedModel),
            (
                {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]},
                ContractNotImplemented,
            ),
            ({}, UnsupportedModel),
            ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, CheckpointError),
        ],
    )
    def test_a_foreign_model_is_told_before_its_fields_are_read(
        self, tmp_path: Path, raw: dict[str, Any], error: type[ModelError]
    ) -> None:
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(error) as caught:
            open_model(tmp_path)
        assert type(caught.value) is error
        for word in (str(tmp_path), *raw.get("architectures", [])):
            assert word in str(caught.value)

    def test_another_distribution_adds_its_contract_by_an_entry_point(self, tmp_path: Path) -> None:
        (tmp_path / "their_kernels.py").write_text(
            "from tests.contracts.models.toy import toy_contract\n"
            "from tidemill_contracts.models.contract import ContractRegistration\n"
            "def toy(): return toy_contract()\n"
            "REGISTRATION = ContractRegistration('toy', 'one', frozenset({'toy'}), toy)\n"
        )
        info = tmp_path / "their_kernels-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-kernels\nVersion: 1.0\n")
        entry_points = "[tidemill.contracts]\ntoy = their_kernels:REGISTRATION\n"
        (info / "entry_points.txt").write_text(entry_points)
        code = (
            "from tidemill_contracts.models.registry import *\n"
            "print(get_contract('toy', 'one').model, source_of(registrations()[0]))"
        )
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.stdout.strip() == "toy/one their_kernels", run.stderr
        (info / "entry_points.txt").write_text(entry_points.replace("REGISTRATION", "toy_contract"))
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "their_kernels:toy_contract" in run.stderr
        assert "ModelError" in run.stderr

    def test_families_and_variants_are_unique(self) -> None:
        names = [(entry.family, entry.variant) for entry in registrations()]
        assert len(set(names)) == len(names)


class TestFingerprint:
    def test_is_stable(self, contract: ModelContract) -> None:
        """A change here is a change of the public ABI: every backend has to follow it."""
        assert contract.abi_fingerprint() == DENSE_FINGERPRINT

    @pytest.mark.parametrize(
        "change",
        [
            lambda contract: replace(contract, model=ModelId("qwen3", "dense", size="14b")),
            lambda contract: replace(contract, capabilities=frozenset({"paged_kv"})),
            lambda contract: replace(contract, limits={"max_seq": 4096}),
            lambda contract: replace(contract, schema_version="2"),
            lambda contract: replace(contract, execution={"prefill": ("prefill",)}),
            lambda contract: with_args(contract, lambda args: (args[1], args[0], *args[2:])),
            lambda contract: with_args(contract, lambda args: args[:-1]),
            lambda contract: with_args(
                contract, lambda args: (replace(args[0], dtype="fp32"), *args[1:])
            ),
            lambda contract: with_args(
                contract, lambda args: (replace(args[0], direction="inout"), *args[1:])
            ),
            lambda contract: with_args(
                contract, lambda args: (replace(args[0], shape=("B",)), *args[1:])
            ),
            lambda contract: with_stage(
                contract, replace(contract.kernels["prefill"], public_name="qwen3.other")
            ),
        ],
    )
    def test_any_change_of_the_abi_changes_it(
        self, contract: ModelContract, change: Callable[[ModelContract], ModelContract]
    ) -> None:
        changed = change(contract)
        assert changed.abi_fingerprint() != contract.abi_fingerprint()
        assert changed != contract
        assert hash(changed) != hash(contract)

    def test_who_implements_it_does_not_matter(self, contract: ModelContract) -> None:
        other = replace(contract, hooks=None)  # type: ignore[arg-type]
        assert other == contract
        assert len({contract, other}) == 1

    def test_a_contract_is_immutable(self, contract: ModelContract) -> None:
        with pytest.raises(FrozenInstanceError):
            contract.schema_version = "2"  # type: ignore[misc]
        for mapping in (contract.limits, contract.execution, contract.kernels):
            assert isinstance(mapping, MappingProxyType)


class TestRequirements:
    def test_the_in_tree_contract_meets_them(self, contract: ModelContract) -> None:
        ServingRequirements().check(contract)

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"schema_version": "0"}, "schema_version"),
            ({"capabilities": frozenset({"paged_kv"})}, "capabilities"),
            ({"execution": {"prefill": ("prefill",)}}, "execution[decode]"),
            ({"execution": {"prefill": ("prefill",), "decode": ("nothing",)}}, "execution[decode]"),
            (
                {"execution": {"prefill": ("prefill", "decode"), "decode": ("decode",)}},
                "execution[prefill]",
            ),
            (
                {"execution": {"prefill": ("prefill",), "decode": ("decode",)}},
                "execution[score]",
            ),
            ({"capabilities": frozenset({"paged_kv", "chunked_prefill"})}, "capabilities"),
        ],
    )
    def test_what_is_lacking_is_named(
        self, contract: ModelContract, change: dict[str, Any], field: str
    ) -> None:
        changed = replace(contract, **change)
        with pytest.raises(ContractMismatch) as caught:
            ServingRequirements().check(changed)
        assert caught.value.field == field
        for word in ("qwen3/dense", changed.schema_version, changed.abi_fingerprint()[:12], field):
            assert word in str(caught.value)


class TestAbi:
    @pytest.mark.parametrize("name", ["prefill", "decode", "score"])
    def test_a_kernels_parameters_are_its_arguments(
        self, contract: ModelContract, name: str
    ) -> None:
        parameters = inspect.signature(contract.hooks.load_kernels().functions[name]).parameters
        assert list(parameters) == [arg.name for arg in contract.kernels[name].args]

    @pytest.mark.parametrize("name", ["prefill", "decode", "score"])
    def test_compile_arguments_hold_no_memory(self, contract: ModelContract, name: str) -> None:
        args = contract.kernels[name].compile_args_builder(model_config(), RUNTIME)
        assert all(arg.is_meta for arg in args)

    @pytest.mark.parametrize("name", ["prefill", "decode", "score"])
    def test_stages_are_filed_under_their_own_names(
        self, contract: ModelContract, name: str
    ) -> None:
        stage = contract.kernels[name]
        assert stage.name == name
        assert stage.public_name == f"qwen3_dense.{name}"

    def test_compiling_before_binding_is_refused(self) -> None:
        with pytest.raises(ModelError, match=r"hooks\.bind"):
            EagerHostFn("qwen3.prefill").compile(config=RUNTIME)

    def test_prefill_without_chunks_is_refused(self, contract: ModelContract) -> None:
        nothing = torch.empty(0)
        inputs = StageInputs(nothing, nothing, nothing, nothing, nothing)
        with pytest.raises(ContractMismatch, match="chunk_lens"):
            contract.stage("prefill").runtime_args_builder(
                inputs, StrangeWeights(), KVCache(nothing, nothing)
            )

    def test_score_without_the_tokens_to_tell_of_is_refused(self, contract: ModelContract) -> None:
        nothing = torch.empty(0)
        inputs = StageInputs(*[nothing] * 5, chunk_lens=nothing, chunk_offsets=nothing)
        with pytest.raises(ContractMismatch, match="logit_rows"):
            contract.stage("score").runtime_args_builder(
                inputs, StrangeWeights(), KVCache(nothing, nothing)
            )

    def test_the_weights_of_another_contract_are_refused(self, contract: ModelContract) -> None:
        nothing = torch.empty(0)
        inputs = StageInputs(nothing, nothing, nothing, nothing, nothing)
        with pytest.raises(ContractMismatch, match="StrangeWeights"):
            contract.stage("decode").runtime_args_builder(
                inputs, StrangeWeights(), KVCache(nothing, nothing)
            )


class StrangeWeights:
    nbytes = 0

    def named(self) -> dict[str, torch.Tensor]:
        return {}


class TestValidation:
    def validate(
        self,
        contract: ModelContract,
        config: ModelConfig | None = None,
        runtime: RuntimeConfig = RUNTIME,
        loaded: LoadedKernelModules | None = None,
    ) -> None:
        contract.hooks.validate_kernels(
            loaded or contract.hooks.load_kernels(), config or model_config(), runtime
        )

    def test_the_kernels_fit_their_contract(self, contract: ModelContract) -> None:
        self.validate(contract)

    @pytest.mark.parametrize(
        ("changes", "field", "words"),
        [
            (
                {"rope_scaling": {"rope_type": "su-per", "factor": 1.0}},
                "rope_type",
                ("'su-per'", "not supported yet"),
            ),
            ({"attention_bias": True}, "attention_bias", ("True", "False")),
            ({"hidden_act": "gelu"}, "hidden_act", ("'gelu'", "'silu'")),
            (
                {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0},
                "sliding_window",
                ("64",),
            ),
            (
                {"quantization_config": {"quant_method": "fp8"}},
                "quantization_config",
                ("'fp8'", "not supported yet"),
            ),
            ({"num_experts": 8}, "num_experts", ("8",)),
        ],
    )
    def test_a_model_that_the_kernels_would_get_wrong(
        self,
        contract: ModelContract,
        changes: dict[str, Any],
        field: str,
        words: tuple[str, ...],
    ) -> None:
        config = model_config(**changes)
        assert find_contract_for_model_config(config) is contract
        with pytest.raises(ContractMismatch) as caught:
            self.validate(contract, config)
        assert caught.value.field == field
        for word in ("qwen3/dense", contract.abi_fingerprint()[:12], *words):
            assert word in str(caught.value)

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"dtype": torch.float16}, "dtype"),
            ({"max_seq_len": 513}, "max_seq_len"),
            ({"max_seq_len": 0}, "max_seq_len"),
            ({"page_size": 0}, "page_size"),
            ({"max_batch_size": 0}, "max_batch_size"),
            ({"max_step_tokens": 0}, "max_step_tokens"),
            ({"total_kv_pages": 0}, "total_kv_pages"),
            ({"total_kv_pages": 2**28, "page_size": 16}, "total_kv_pages"),
        ],
    )
    def test_a_run_that_the_kernels_cannot_do(
        self, contract: ModelContract, changes: dict[str, Any], field: str
    ) -> None:
        with pytest.raises(ContractMismatch) as caught:
            self.validate(contract, runtime=replace(RUNTIME, **changes))
        assert caught.value.field == field


def with_stage(contract: ModelContract, stage: KernelSpec) -> ModelContract:
    return replace(contract, kernels={**contract.kernels, stage.name: stage})


def with_args(
    contract: ModelContract,
    change: Callable[[tuple[TensorArgSpec, ...]], tuple[TensorArgSpec, ...]],
) -> ModelContract:
    stage = contract.kernels["prefill"]
    return with_stage(contract, replace(stage, args=change(stage.args)))
