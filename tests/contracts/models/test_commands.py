"""`tidemill contracts`: what it prints, as text and as JSON, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.contracts.models.driver import small_config, small_model
from tests.contracts.models.toy import toy_contract
from tidemill_contracts.models.commands import contracts
from tidemill_contracts.models.inspection import describe_contract, differences
from tidemill_contracts.models.registry import get_contract
from tools.make_checkpoint import published_config, tensor_shapes


def run(*arguments: str) -> Result:
    return CliRunner().invoke(contracts, arguments)


def test_list_names_what_is_implemented_and_what_is_planned() -> None:
    entries = json.loads(run("list", "--json").stdout)
    assert {"family", "variant", "implemented", "source"} == set(entries[0])
    by_name = {(entry["family"], entry["variant"]): entry for entry in entries}
    assert by_name["qwen3", "dense"]["implemented"]
    assert by_name["qwen3", "dense"]["source"] == "tidemill_contracts"
    assert not by_name["deepseek-v4", "pro"]["implemented"]
    text = run("list").stdout
    assert "qwen3/dense" in text
    assert "planned" in text


def test_show_gives_each_stages_arguments_in_order() -> None:
    contract = get_contract("qwen3", "dense")
    shown = json.loads(run("show", "qwen3", "dense", "--json").stdout)
    assert shown["fingerprint"] == contract.abi_fingerprint()
    args = [arg["name"] for arg in shown["kernels"]["decode"]["args"]]
    assert args == [arg.name for arg in contract.kernels["decode"].args]
    text = run("show", "qwen3", "dense").stdout
    assert contract.abi_fingerprint() in text
    assert text.index("input_ids") < text.index("slot_mapping") < text.index(" logits ")
    assert "\nscore runs score\n  qwen3_dense.score  (dynamic: B, PAGES, R, T)\n" in text


def test_an_unknown_contract_is_an_error() -> None:
    result = run("show", "llama", "dense")
    assert result.exit_code == 1
    assert "There is no contract llama/dense" in str(result.exception)


def test_check_tells_what_fits(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model")
    result = run("check", str(model), "--json", "--memory", "1MiB", "--max-model-len", "64")
    assert result.exit_code == 0, result.stdout
    report = json.loads(result.stdout)
    assert report["problems"] == []
    assert report["contract"].startswith("qwen3/")
    # 2 tensors x 2 layers x 32 tokens x 2 heads x 16 values x 4 bytes.
    assert report["bytes_per_page"] == 2 * 2 * 32 * 2 * 16 * 4
    left = 2**20 - report["weight_bytes"]
    assert report["rows_that_fit"] == {"64": left // report["bytes_per_page"] // 2}
    assert "no problems found" in run("check", str(model)).stdout


@pytest.mark.parametrize("options", [[], ["--quantization", "int8"]])
def test_check_of_a_model_that_the_library_would_run(tmp_path: Path, options: list[str]) -> None:
    """What packs the weights must not read tensors that are only looked at."""
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64, "vocab_size": 112}
    model = small_model(tmp_path / "model", **sizes, dtype="bfloat16")
    result = run("check", str(model), *options)
    assert "no problems found" in result.stdout
    assert ("-int8" in result.stdout) == bool(options)


def test_the_weights_size_is_told_from_the_configuration_alone(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model")
    report = json.loads(run("check", str(model), "--json", "--max-model-len", "64").stdout)
    elements = sum(_product(shape) for shape in tensor_shapes(small_config()).values())
    assert report["weight_bytes"] == 4 * elements + 4 * (2 * 64 * 16 + 1)


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def test_check_reports_every_problem_at_once(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model")
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    config |= {"attention_bias": True, "intermediate_size": 40}
    (model / "config.json").write_text(json.dumps(config))
    result = run("check", str(model), "--json", "--memory", "1k")
    assert result.exit_code == 1
    said = "\n".join(json.loads(result.stdout)["problems"])
    for word in ("attention_bias", "gate_proj", "up_proj", "down_proj", "no page of the KV cache"):
        assert word in said
    text = run("check", str(model), "--memory", "1k").stdout
    assert text.count("problem  ") == len(json.loads(result.stdout)["problems"])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "no such model directory"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"model_type": "deepseek_v4"}, "planned but not implemented"),
        ({**published_config("0.6b"), "hidden_size": -1}, "hidden_size"),
    ],
)
def test_check_of_what_cannot_be_served(
    tmp_path: Path, config: dict[str, Any] | None, said: str
) -> None:
    model = tmp_path / "model"
    if config is not None:
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
    result = run("check", str(model))
    assert result.exit_code == 1
    assert said in result.stdout


@pytest.mark.parametrize("size", ["many", "5 apples", ""])
def test_a_memory_size_that_is_none_is_a_usage_error(tmp_path: Path, size: str) -> None:
    result = run("check", str(tmp_path), "--memory", size)
    assert result.exit_code == 2
    assert "try 24GiB" in result.stderr


def test_diff_of_a_contract_with_itself_is_empty(tmp_path: Path) -> None:
    saved = tmp_path / "dense.json"
    saved.write_text(run("show", "qwen3", "dense", "--json").stdout)
    result = run("diff", str(saved), "qwen3/dense")
    assert result.exit_code == 0
    assert "the same ABI" in result.stdout


def test_diff_names_what_changed(tmp_path: Path) -> None:
    shown = json.loads(run("show", "qwen3", "dense", "--json").stdout)
    args = shown["kernels"]["decode"]["args"]
    args[0], args[1] = args[1], args[0]
    args[2]["dtype"] = "int64"
    args.pop()
    shown["limits"]["max_seq"] = 4096
    shown["capabilities"].append("device_greedy_sampling")
    saved = tmp_path / "other.json"
    saved.write_text(json.dumps(shown))
    result = run("diff", "qwen3/dense", str(saved))
    assert result.exit_code == 1
    for line in (
        "+ limits.max_seq: 4096",
        "- kernels.decode.args[20]: logits",
        "~ kernels.decode.args.block_table.dtype: int32 → int64",
        "~ kernels.decode.args order: input_ids, seq_lens",
        "device_greedy_sampling",
    ):
        assert line in result.stdout


def test_differences_are_none_exactly_where_the_fingerprint_is_the_same() -> None:
    toy, dense = (
        describe_contract(toy_contract()),
        describe_contract(get_contract("qwen3", "dense")),
    )
    assert differences(toy, toy) == []
    assert differences(toy, dense)


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "llama/dense"])
def test_diff_of_what_does_not_exist(name: str) -> None:
    assert run("diff", name, "qwen3/dense").exit_code == 1
