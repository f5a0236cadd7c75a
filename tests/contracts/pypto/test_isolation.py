"""What the checkout does to its process stays there; and nothing starts before it is needed."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from tests.contracts.models.driver import small_config
from tests.contracts.pypto.driver import STAND_IN, make_checkout, options
from tidemill_contracts.models import pypto
from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.errors import ModelError
from tidemill_contracts.models.pypto.contract import contract_of, session_of
from tidemill_contracts.models.pypto.options import PyptoOptions, options_from_env

GENERIC_NAMES = ("contract", "constants", "weights", "config", "golden", "pypto")


def fitting_config(**changes: object) -> ModelConfig:
    shape = {"hidden_size": 64, "intermediate_size": 96, **changes}
    return ModelConfig.from_hf(small_config(**shape), "a model")


def test_without_a_root_there_is_no_contract() -> None:
    assert pypto.registrations({}) == ()


def test_knowing_the_contract_starts_nothing_and_matching_asks_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_checkout(tmp_path)
    environ = {"PYPTO_LIB_ROOT": str(root), "TIDEMILL_PYPTO_CONTRACT": "qwen3/tiny"}
    (registration,) = pypto.registrations(environ)
    assert (registration.family, registration.variant) == ("qwen3", "pypto-tiny")
    chosen = options_from_env(environ)
    assert chosen is not None
    session = session_of(chosen)
    assert session.child_pid is None

    own = types.ModuleType("config")
    monkeypatch.setitem(sys.modules, "config", own)
    assert registration.matcher(fitting_config())
    assert registration.factory is not None
    contract = registration.factory()
    assert registration.factory() is contract
    assert session.child_pid is not None

    assert sys.modules["config"] is own
    assert not [
        name
        for name, module in sys.modules.items()
        if str(getattr(module, "__file__", None) or "").startswith((str(root), str(STAND_IN)))
    ]
    assert not {name for name in GENERIC_NAMES if name != "config"} & sys.modules.keys()
    assert str(root) not in sys.path
    assert not list(root.rglob("__pycache__")), "the checkout is left as it was"

    assert not registration.matcher(fitting_config(num_hidden_layers=3))
    assert session.child_pid is None, "a child that serves nothing is ended"


def test_a_broken_checkout_is_not_passed_over(tmp_path: Path) -> None:
    root = make_checkout(tmp_path, ("contract/registry.py", "import sys", "import syss"))
    registration = pypto.registration(options(root))
    with pytest.raises(ModelError, match="syss"):
        registration.matcher(fitting_config())


def test_the_description_is_plain_and_complete(checkout: Path) -> None:
    chosen = options(checkout)
    contract = contract_of(chosen)
    shown = contract.hooks.details()
    session_of(chosen).close()
    assert shown["checkout"]["problem"] == "not a git checkout"
    assert shown["found"] == {
        "first_prefill_arg": "input_ids",
        "embedding": "device",
        "device_sampling": ["greedy_sample"],
    }
    assert shown["options"]["platform"] == "a2a3sim"
    lib = shown["pypto_lib"]
    assert [len(stage["args"]) for stage in lib["stages"]] == [25, 25, 2]
    assert len(lib["fingerprint"]) == 64
    assert "device_embedding" in contract.capabilities


def test_options_come_from_the_environment(checkout: Path) -> None:
    environ = {
        "PYPTO_LIB_ROOT": str(checkout),
        "TIDEMILL_PYPTO_PLATFORM": "a5",
        "TIDEMILL_PYPTO_DEVICE_ID": "3",
        "TIDEMILL_PYPTO_CODEGEN_ONLY": "false",
        "TIDEMILL_PYPTO_STEP_TIMEOUT_S": "2.5",
    }
    assert options_from_env({**os.environ, **environ}) == PyptoOptions(
        lib_root=str(checkout), platform="a5", device_id=3, codegen_only=False, step_timeout_s=2.5
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TIDEMILL_PYPTO_PLATFORM", "a100"),
        ("TIDEMILL_PYPTO_DEVICE_ID", "-1"),
        ("TIDEMILL_PYPTO_CONTRACT", "deepseek-v4/flash"),
        ("TIDEMILL_PYPTO_STEP_TIMEOUT", "3"),
        ("PYPTO_LIB_ROOT", "/"),
    ],
)
def test_a_wrong_option_is_named(variable: str, value: str, checkout: Path) -> None:
    with pytest.raises(ModelError, match=variable):
        pypto.registrations({"PYPTO_LIB_ROOT": str(checkout), variable: value})


def test_run_config_takes_the_options(tmp_path: Path, model_dir: Path) -> None:
    """The stand-in's RunConfig leaves its platform in the folder that it is given."""
    from tests.contracts.pypto.driver import Pypto

    root = make_checkout(tmp_path)
    with Pypto(root, kernel_cache=str(tmp_path / "kernels"), platform="a5sim") as session:
        session.serve(model_dir)
    written = {path.parent.name: path.read_text() for path in tmp_path.glob("kernels/*/*/platform")}
    assert written == {"qwen3_tiny.prefill_fwd": "a5sim", "qwen3_tiny.decode_fwd": "a5sim"}
