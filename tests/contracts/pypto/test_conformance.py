"""The conformance kit on a checkout in a child process."""

from __future__ import annotations

from pathlib import Path

from tests.contracts.pypto.driver import Pypto
from tidemill_contracts.models.conformance.case import ConformanceOptions, directory_case
from tidemill_contracts.models.conformance.session import Session
from tidemill_contracts.models.conformance.suite import run_checks


def test_the_kit_finds_no_fault(checkout: Path, model_dir: Path) -> None:
    with Pypto(checkout) as pypto:
        contract = pypto.contract()
        case = directory_case(model_dir)
        results = list(run_checks(Session(contract, case, ConformanceOptions()), ()))
    assert [result for result in results if result.outcome == "failed"] == []
    assert sum(result.outcome == "passed" for result in results) > 15
