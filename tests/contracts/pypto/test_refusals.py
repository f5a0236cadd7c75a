"""Checkouts and models that are refused, each with an error that says what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from tests.contracts.pypto.driver import VARIANT, Pypto, Served, make_checkout, make_model
from tidemill_contracts.models.errors import CheckpointError, ContractMismatch, ModelError
from tidemill_contracts.models.pypto.checks import check_description, identity
from tidemill_contracts.models.pypto.messages import Description

CONTRACT = VARIANT / "contract.py"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        pytest.param(
            [(CONTRACT, '    + ("" if HIDDEN_FIRST else EMBED)\n', "")],
            r"stage prefill \(qwen3_tiny\.prefill_fwd\): found 24 declared arguments, but its"
            r" kernel prefill_fwd takes 25, expected as many\. Only the kernel has embed_weight\.",
            id="fewer declared than the kernel takes",
        ),
        pytest.param(
            [
                (CONTRACT, '    + ("" if HIDDEN_FIRST else EMBED)\n', ""),
                (CONTRACT, "    (HIDDEN if HIDDEN_FIRST else IDS)", "    HIDDEN"),
            ],
            "found 24 .* takes 25.* Only the kernel has input_ids, embed_weight; only the contract"
            " has hidden_states",
            id="as at the public head of August 2026",
        ),
        pytest.param(
            [(CONTRACT, "def sample_host(logits, sampled_ids):", "def sample_host(logits):")],
            "stage greedy_sample .*found 2 declared arguments, but its host wrapper takes 1",
            id="host wrapper",
        ),
    ],
)
def test_a_checkout_that_contradicts_itself(
    edit: list[tuple[Path, str, str]], said: str, tmp_path: Path
) -> None:
    with (
        Pypto(make_checkout(tmp_path, *edit)) as pypto,
        pytest.raises(ContractMismatch, match=said) as caught,
    ):
        pypto.contract()
    assert str(caught.value).startswith("qwen3/pypto-tiny contract (schema ")


def stage(description: Description, key: str, **changes: object) -> Description:
    """With one stage changed."""
    stages = tuple(
        replace(stage, **changes) if stage.key == key else stage for stage in description.stages
    )
    return replace(description, stages=stages)


def limits(description: Description, **changes: object) -> Description:
    return replace(description, limits={**description.limits, **changes})


def first_arg(description: Description, name: str, dtype: str) -> Description:
    args = next(s.args for s in description.stages if s.key == "prefill")
    changed = (replace(args[0], name=name, dtype=dtype), *args[1:])
    return stage(description, "prefill", args=changed)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        pytest.param(
            lambda found: first_arg(found, "hidden_states", "bf16"),
            "argument 0: found hidden_states declared, input_ids in the kernel",
            id="same count, other input",
        ),
        pytest.param(
            lambda found: first_arg(found, "input_ids", "bf16"),
            r"argument 0: found input_ids \(bf16\), expected hidden_states \(bf16\) or input_ids"
            r" \(int32\)",
            id="input of another type",
        ),
        pytest.param(
            lambda found: stage(found, "decode", name="decoding"),
            r"kernels\[decode\]\.name: found decoding, expected decode",
            id="key is not the name",
        ),
        pytest.param(
            lambda found: stage(found, "decode", kernel=None, kernel_params=()),
            r"kernels\[decode\]: found functions \['decode_fwd', .*expected a function decode_fwd",
            id="no function",
        ),
        pytest.param(
            lambda found: stage(found, "decode", host_params=("seq_lens",)),
            r"stage decode .*found 25 declared arguments, but its host wrapper takes 1",
            id="host wrapper",
        ),
        pytest.param(
            lambda found: replace(found, execution={"prefill": ("prefill",), "decode": ()}),
            r"execution\[decode\]: found \[\], expected exactly one of the stages",
            id="no stage",
        ),
        pytest.param(
            lambda found: replace(found, schema_version="2"),
            "schema_version: found 2, expected 1",
            id="schema",
        ),
        pytest.param(
            lambda found: limits(found, vocab=127),
            r"limits\[vocab\]: found 127, expected real_vocab 101 rounded up to a multiple of 64",
            id="vocabulary",
        ),
        pytest.param(
            lambda found: limits(found, page_size=None),
            r"limits\[page_size\]: found None",
            id="no limit",
        ),
        pytest.param(
            lambda found: stage(found, "prefill", buffers=("logits", "topk_buffer")),
            "a builder that asks for topk_buffer",
            id="a buffer that is not known",
        ),
    ],
)
def test_a_description_that_contradicts_itself(
    edit: Callable[[Description], Description], said: str, served: Served
) -> None:
    description = edit(served.contract.hooks.description)
    with pytest.raises(ContractMismatch, match=said):
        check_description(description, identity(description, "pypto-tiny"))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ((CONTRACT, "import torch\n", "import torch\nimport ptoas\n"), "No module named 'ptoas'"),
        ((CONTRACT, '"qwen3", "tiny", get', '"qwen3", "small", get'), "unsupported external"),
        (("contract/base.py", "class ModelContract", "class Contract"), "ImportError"),
    ],
    ids=["import", "variant", "type"],
)
def test_a_checkout_that_cannot_be_loaded(
    edit: tuple[Path, str, str], said: str, tmp_path: Path
) -> None:
    root = make_checkout(tmp_path, edit)
    with Pypto(root) as pypto, pytest.raises(ModelError, match=said) as caught:
        pypto.contract()
    assert str(root) in str(caught.value)


def test_a_registry_that_resolves_elsewhere(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another distribution's package of that name comes first on the path."""
    other = tmp_path / "site" / "contract"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    (other / "registry.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(other.parent))
    with (
        Pypto(checkout) as pypto,
        pytest.raises(ModelError, match=rf"resolves to {other}/registry.py, not into {checkout}"),
    ):
        pypto.contract()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            (VARIANT / "config.py", "BATCH_PAD = 4", "BATCH_PAD = 8"),
            "validate_kernels: found ValueError: decode_batch_pad mismatch: 8 != 4",
        ),
        (
            (CONTRACT, "for s in spec.shape]", "for s in spec.shape[::-1]]"),
            r"qwen3_tiny\.prefill_fwd\.\w+ shape: found",
        ),
        (
            (CONTRACT, "            for spec in specs\n", "            for spec in specs[1:]\n"),
            r"qwen3_tiny\.prefill_fwd arguments: found 24, expected 25",
        ),
        (
            (CONTRACT, 'rms_weight", "wq", "wk", "wv", "q', 'rms_weight", "wq", "wv", "wk", "q'),
            r"qwen3_tiny\.prefill_fwd\.wk order: found wv, expected wk",
        ),
        (
            (VARIANT / "weights.py", "    stacked = {}\n", "    raise MemoryError('no room')\n"),
            "prepare_weights: found MemoryError: no room",
        ),
    ],
    ids=["constants", "dummies", "count", "builder", "weights"],
)
def test_a_checkout_that_does_not_fit_when_a_model_is_loaded(
    edit: tuple[Path, str, str], said: str, tmp_path: Path, model_dir: Path
) -> None:
    with (
        Pypto(make_checkout(tmp_path, edit)) as pypto,
        pytest.raises(ContractMismatch, match=said),
    ):
        pypto.serve(model_dir)


@pytest.mark.parametrize(
    ("runtime", "said"),
    [
        ({"dtype": torch.float32}, "dtype: found torch.float32, expected torch.bfloat16"),
        ({"device": torch.device("cuda")}, "device: found cuda, expected cpu"),
        ({"page_size": 16}, "page_size.*found 16"),
        ({"max_seq_len": 65}, "max_seq.*found 65, expected at most 64"),
        ({"total_kv_pages": 3}, "min_kv_pages.*found 3, expected at least 4"),
    ],
    ids=["dtype", "device", "page size", "length", "pages"],
)
def test_a_run_outside_of_the_limits(
    runtime: dict[str, object], said: str, served: Served, model_dir: Path
) -> None:
    with pytest.raises(ContractMismatch, match=said):
        Served(served.contract, model_dir, **runtime)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps: found 1e-05, expected 1e-06"),
        ({"quantization_config": {"quant_method": "a8w8"}}, "quantization_config: found"),
        ({"vocab_size": 90}, r"real_vocab.*found 90, expected .*101"),
        ({"num_hidden_layers": 3}, r"num_layers.*found 3, expected .*2"),
    ],
    ids=["eps", "quantised", "vocabulary", "layers"],
)
def test_a_model_that_the_kernels_would_compute_wrongly(
    changes: dict[str, object], said: str, served: Served, tmp_path: Path
) -> None:
    with pytest.raises(ContractMismatch, match=said):
        Served(served.contract, make_model(tmp_path, **changes))


def test_a_checkpoint_that_is_incomplete(checkout: Path, tmp_path: Path) -> None:
    model_dir = make_model(tmp_path, tie_word_embeddings=False)
    config = model_dir / "config.json"
    config.write_text(config.read_text().replace('"head_dim": 16', '"head_dim": 32'))
    with (
        Pypto(checkout) as pypto,
        pytest.raises(CheckpointError, match=r"q_proj\.weight has shape \[64, 64\]"),
    ):
        pypto.serve(model_dir)
