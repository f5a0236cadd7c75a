"""The kit passes what is sound, says what it could not check, and fits itself to limits."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from tests.contracts.conformance.copies import copied, hidden, patched
from tests.contracts.conformance.faults import FAULTS
from tidemill_contracts.models.conformance import (
    CHECKS,
    ConformanceOptions,
    SeededWeights,
    Session,
    directory_case,
    qwen3_case,
    run_checks,
)
from tidemill_contracts.models.conformance.__main__ import main
from tidemill_contracts.models.conformance.case import named_case
from tidemill_contracts.models.conformance.plugin import conformance_tests
from tidemill_contracts.models.contract import ModelContract
from tidemill_contracts.models.errors import CheckpointError, ModelError
from tidemill_contracts.models.registry import get_contract
from tools.make_checkpoint import published_config, write_checkpoint

KIT = "tidemill_contracts.models.conformance"

NOT_MADE = {
    # The contract in the tree pads nothing, and in float32 on the CPU it is the reference.
    torch.float32: {"stored-k", "reference-logits", "pad-vocabulary"},
    torch.bfloat16: {"pad-vocabulary"},
}


def names(session: Session, outcome: str) -> set[str]:
    results = list(run_checks(session))
    assert [result.name for result in results] == [check.name for check in CHECKS]
    failures = [result for result in results if result.outcome == "failed"]
    assert outcome == "failed" or not failures, failures
    return {result.name for result in results if result.outcome == outcome}


class TestWhatIsSound:
    @pytest.mark.parametrize("page_size", [16, 128])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_the_dense_contract_passes(self, dtype: torch.dtype, page_size: int) -> None:
        contract = get_contract("qwen3", "dense")
        options = ConformanceOptions(dtype=dtype, page_size=page_size)
        assert names(Session(contract, qwen3_case(contract), options), "skipped") == NOT_MADE[dtype]

    def test_deterministic_mode_passes_and_is_held_to_the_reference(self) -> None:
        contract = get_contract("qwen3", "moe")
        session = Session(contract, qwen3_case(contract), ConformanceOptions(deterministic=True))
        assert names(session, "skipped") == {"pad-vocabulary"}

    def test_a_model_directory_passes(self, tmp_path: Path) -> None:
        model = write_checkpoint(tmp_path / "tiny", published_config("tiny", "float32"))
        contract = copied()
        session = Session(contract, directory_case(model))
        assert names(session, "skipped") == {"pad-vocabulary"}


class TestLimits:
    def test_the_run_keeps_to_the_contracts_limits(self) -> None:
        limits = {"page_size": 8, "max_seq": 48, "max_rows": 4, "min_kv_pages": 40, "num_layers": 1}
        contract = replace(copied(), limits=limits)
        session = Session(contract, qwen3_case(contract))
        assert session.case.config.num_hidden_layers == 1
        runtime = session.runtime
        assert (runtime.page_size, runtime.max_seq_len, runtime.max_batch_size) == (8, 48, 4)
        assert runtime.total_kv_pages == 40
        assert names(session, "skipped") == {"pad-vocabulary", "page-size-independence"}

    def test_checks_that_need_a_batch_are_skipped_for_a_contract_of_one_row(self) -> None:
        contract = replace(copied(), limits={"max_rows": 1})
        skipped = names(Session(contract, qwen3_case(contract)), "skipped")
        assert {"batch-equals-alone", "padding-rows", "chunk-offsets"} <= skipped
        assert "chunked-equals-whole" not in skipped

    def test_bfloat16_is_taken_where_float32_is_refused(self) -> None:
        def only_bfloat16(original: Any, loaded: Any, config: Any, runtime: Any) -> None:
            if runtime.dtype is not torch.bfloat16:
                raise copied().mismatch("dtype", found=runtime.dtype, expected="bfloat16")

        contract = copied(validate_kernels=only_bfloat16)
        assert Session(contract, qwen3_case(contract)).runtime.dtype is torch.bfloat16

    def test_a_model_that_does_not_fit_fails_before_it_is_loaded(self) -> None:
        contract = copied(weight_bytes=lambda original, *args: 2**60)
        session = Session(contract, qwen3_case(contract))
        (result,) = run_checks(session, only=["start-up"])
        assert result.outcome == "failed"
        assert "1,152,921,504,606,846,976 bytes of weights" in result.message
        assert session.source is None


class TestHiddenPools:
    """A backend in another process keeps its pools to itself."""

    def test_what_can_only_be_seen_in_the_pools_is_skipped(self) -> None:
        contract = hidden()
        skipped = names(Session(contract, qwen3_case(contract)), "skipped")
        seen_only = {"cache-size", "zeroed-pages", "slot-mapping", "nan-in-page-tail", "stored-k"}
        assert skipped == {*seen_only, "pad-vocabulary"}

    def test_negative_slots_that_are_written_show_in_another_row(self) -> None:
        written = patched(("written = slot_mapping >= 0", "written = slot_mapping < 2**31 - 1"))
        contract = hidden(written)
        assert names(Session(contract, qwen3_case(contract)), "failed") == {"negative-slots"}


class TestWhatDoesNotStart:
    def test_the_checks_that_need_a_model_are_skipped_not_passed(self) -> None:
        contract = FAULTS["the model is refused"].make()
        results = {r.name: r for r in run_checks(Session(contract, qwen3_case(contract)))}
        assert results["start-up"].outcome == "failed"
        assert "hidden_size: found 32, expected 5120" in results["start-up"].message
        assert results["arity"].outcome == "passed"
        assert results["negative-slots"].outcome == "skipped"
        assert "start-up" in results["negative-slots"].message

    def test_start_up_is_checked_with_any_other_check(self) -> None:
        contract = FAULTS["the model is refused"].make()
        results = list(run_checks(Session(contract, qwen3_case(contract)), only=["chunk-offsets"]))
        assert [(r.name, r.outcome) for r in results] == [
            ("start-up", "failed"),
            ("chunk-offsets", "skipped"),
        ]


class TestSeededWeights:
    def test_a_tensor_is_the_same_in_whatever_order_it_is_taken(self) -> None:
        shapes: dict[str, tuple[int, ...]] = {"a.weight": (3, 4), "norm.weight": (4,)}
        one, other = SeededWeights(shapes), SeededWeights(shapes)
        first = one.take("a.weight", (3, 4))
        other.take("norm.weight", (4,))
        assert torch.equal(first, other.take("a.weight", (3, 4)))
        assert not torch.equal(first, SeededWeights(shapes, seed=1).take("a.weight", (3, 4)))

    def test_it_holds_whoever_takes_to_the_shapes(self) -> None:
        weights = SeededWeights({"a.weight": (3, 4), "b.weight": (2, 2)})
        with pytest.raises(CheckpointError, match=r"a\.weight has shape \[3, 4\], asked for \[4\]"):
            weights.take("a.weight", (4,))
        with pytest.raises(CheckpointError, match="missing"):
            weights.take("c.weight", (1,))
        with pytest.raises(CheckpointError, match=r"not taken: b\.weight"):
            weights.finish()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


class TestCommandLine:
    def test_a_line_for_each_check_and_a_count(self) -> None:
        result = run("qwen3", "dense", "--only", "arity", "--only", "pad-vocabulary")
        assert result.exit_code == 0
        assert "✓ arity " in result.stdout
        assert "– pad-vocabulary " in result.stdout
        assert "nothing is padded" in result.stdout
        assert "2 passed, 0 failed, 1 skipped" in result.stdout

    def test_json(self) -> None:
        options = ("--json", "--only", "zeroed-pages", "--dtype", "bfloat16", "--page-size", "8")
        report = json.loads(run("qwen3", "dense", *options).stdout)
        assert report["fingerprint"] == get_contract("qwen3", "dense").abi_fingerprint()
        assert report["counts"] == {"passed": 2, "failed": 0, "skipped": 0}
        assert [check["name"] for check in report["checks"]] == ["start-up", "zeroed-pages"]

    def test_a_failure_ends_with_1_and_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        faulty = FAULTS["logits of a chunk's first token"].make()
        monkeypatch.setattr(f"{KIT}.__main__.get_contract", lambda family, variant: faulty)
        result = run("qwen3", "dense", "--only", "last-token-logits")
        assert result.exit_code == 1
        assert "✗ last-token-logits" in result.stdout
        assert "where the last token" in result.stdout

    def test_the_checks_can_be_listed_without_a_contract(self) -> None:
        result = run("--list")
        assert result.exit_code == 0
        assert len(result.stdout.splitlines()) == len(CHECKS)
        assert all(check.name in result.stdout and check.proves for check in CHECKS)

    @pytest.mark.parametrize(
        ("arguments", "code", "said"),
        [
            (("llama", "dense"), 1, "There is no contract llama/dense"),
            (("qwen3", "dense", "--case", "no_such:CASE"), 1, "There is no case 'no_such:CASE'"),
            (("qwen3", "dense", "--case", "x:Y", "--model", "/"), 2, "give one of them"),
            (("qwen3", "dense", "--only", "speed"), 2, "'speed' is not one of"),
        ],
    )
    def test_what_cannot_be_run(self, arguments: tuple[str, ...], code: int, said: str) -> None:
        result = run(*arguments)
        assert result.exit_code == code
        assert said in " ".join(result.stderr.split())


def any_case(contract: ModelContract) -> Any:
    return qwen3_case(contract, hidden_size=48)


def no_case(contract: ModelContract) -> Any:
    return {}


def test_a_case_may_be_made_for_the_contract() -> None:
    contract = get_contract("qwen3", "dense")
    assert named_case(contract, f"{__name__}:any_case").config.hidden_size == 48
    with pytest.raises(ModelError, match="gives a dict, not a ConformanceCase"):
        named_case(contract, f"{__name__}:no_case")


def test_under_pytest_each_check_is_a_test(tmp_path: Path) -> None:
    pytest_command = ["-m", "pytest", "-p", "no:asyncio", "-v", "-rs"]
    chosen = ["-k", "arity or pad-vocabulary or zeroed-pages"]
    plugin = ["-p", f"{KIT}.plugin", "--tidemill-contract", "qwen3/dense"]
    done = subprocess.run(
        [sys.executable, *pytest_command, *plugin, *chosen],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "qwen3/dense::arity PASSED" in done.stdout
    assert "nothing is padded" in done.stdout
    assert "2 passed, 1 skipped, 28 deselected" in done.stdout


def _no_contract() -> ModelContract:
    raise AssertionError("made while tests are collected")


class TestLazily:
    """Collecting the tests of a contract makes neither it nor a model."""

    made = staticmethod(conformance_tests(_no_contract))

    def test_the_first_test_makes_it(self) -> None:
        with pytest.raises(AssertionError, match="made while"):
            self.made(CHECKS[0])


def test_the_kit_does_not_import_pytest() -> None:
    script = f"import sys, {KIT}, {KIT}.__main__; print('pytest' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
