"""The kit under pytest: each check is a test, named after it.

As a plugin, with no file of your own::

    pytest -p tidemill_contracts.models.conformance.plugin --tidemill-contract qwen3/dense

or in a test suite, where contract and model may be made on the spot::

    test_conformance = conformance_tests(get_contract("mine", "small"), CASE)

A check that cannot be made is a skipped test, with its reason. Nothing but this module imports
pytest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tidemill_contracts.models.conformance.case import (
    ConformanceCase,
    ConformanceOptions,
    named_case,
    qwen3_case,
)
from tidemill_contracts.models.conformance.session import Session
from tidemill_contracts.models.conformance.suite import CHECKS, Check, run_check
from tidemill_contracts.models.contract import ModelContract
from tidemill_contracts.models.registry import get_contract


def conformance_tests(
    contract: ModelContract | Callable[[], ModelContract],
    case: ConformanceCase | Callable[[ModelContract], ConformanceCase] = qwen3_case,
    options: ConformanceOptions | None = None,
) -> Callable[[Check], None]:
    """A test function with one case for each check; assign it to a name that starts with
    ``test_``.

    A `contract` that is costly to make may be given as a function that makes it, a `case` as one
    that makes it for the contract: both are called by the first test, not when tests are collected.
    """

    @cache
    def session() -> Session:
        made = contract if isinstance(contract, ModelContract) else contract()
        model = case if isinstance(case, ConformanceCase) else case(made)
        return Session(made, model, options or ConformanceOptions())

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
    def test(check: Check) -> None:
        _hold(check, session())

    return test


def _hold(check: Check, session: Session) -> None:
    result = run_check(check, session)
    if result.outcome == "skipped":
        pytest.skip(result.message)
    if result.outcome == "failed":
        pytest.fail(f"{check.name}: {result.message}", pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tidemill", "conformance of a model serving contract")
    group.addoption("--tidemill-contract", metavar="FAMILY/VARIANT", help="the contract to test")
    group.addoption(
        "--tidemill-case", metavar="MODULE:NAME", help="its ConformanceCase; a seeded Qwen3 model"
    )
    group.addoption("--tidemill-device", default="cpu", help="where the model runs; cpu")
    group.addoption(
        "--tidemill-dtype", choices=("float32", "bfloat16"), help="of weights and cache"
    )


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Adds one test for each check, after those that were collected from files."""
    name = session.config.getoption("--tidemill-contract")
    if name is None:
        return
    family, _, variant = name.partition("/")
    contract = get_contract(family, variant)
    case_name = session.config.getoption("--tidemill-case")
    dtype = session.config.getoption("--tidemill-dtype")
    run = Session(
        contract,
        qwen3_case(contract) if case_name is None else named_case(contract, case_name),
        ConformanceOptions(
            device=session.config.getoption("--tidemill-device"),
            dtype=None if dtype is None else getattr(torch, dtype),
        ),
    )
    suite = _ContractSuite.from_parent(session, name=name, nodeid=name)
    items += [
        _ConformanceTest.from_parent(suite, name=check.name, check=check, run=run)
        for check in CHECKS
    ]


class _ContractSuite(pytest.Collector):
    """All checks of one contract."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        return []


class _ConformanceTest(pytest.Item):
    """One check of one contract."""

    def __init__(self, *, check: Check, run: Session, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._check = check
        self._run = run

    def runtest(self) -> None:
        _hold(self._check, self._run)
