"""Fixtures of the PyPTO suites."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contracts.pypto.driver import Pypto, Served, make_checkout, make_model
from tidemill_contracts.models.registry import get_contract


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """In this process and in the children: these models are too small to share out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in as it is; not to be changed."""
    return make_checkout(tmp_path_factory.mktemp("checkouts"))


@pytest.fixture(scope="session")
def _in_tree(model_dir: Path) -> Served:
    return Served(get_contract("qwen3", "dense"), model_dir)


@pytest.fixture(scope="session")
def _served(checkout: Path, model_dir: Path) -> Iterator[Served]:
    with Pypto(checkout) as pypto:
        yield pypto.serve(model_dir)


@pytest.fixture
def in_tree(_in_tree: Served) -> Served:
    """The model behind the contract in the tree, on the CPU; all of its pages are free."""
    _in_tree.forget_rows()
    return _in_tree


@pytest.fixture
def served(_served: Served) -> Served:
    """The model behind the stand-in, whose child no test may kill; all of its pages are free."""
    _served.forget_rows()
    return _served
