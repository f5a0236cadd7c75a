"""Each seeded fault fails the checks that it should fail, by name; without one, all pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

import pytest
import torch

from tests.contracts.conformance.copies import copied, padded
from tests.contracts.conformance.faults import FAULTS, Fault
from tidemill_contracts.models.conformance import (
    CHECKS,
    ConformanceOptions,
    Session,
    qwen3_case,
    run_checks,
)
from tidemill_contracts.models.contract import ModelContract


def outcomes(
    contract: ModelContract, only: Collection[str] = (), dtype: torch.dtype = torch.float32
) -> dict[str, str]:
    """What came of each check, and why."""
    session = Session(contract, qwen3_case(contract), ConformanceOptions(dtype=dtype))
    return {
        result.name: f"{result.outcome}: {result.message}" for result in run_checks(session, only)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [copied, padded])
def test_a_copy_without_a_fault_passes(
    make: Callable[[], ModelContract], dtype: torch.dtype
) -> None:
    found = outcomes(make(), dtype=dtype)
    skipped = {name for name, outcome in found.items() if outcome.startswith("skipped")}
    assert not {name: said for name, said in found.items() if said.startswith("failed")}
    assert skipped <= {"pad-vocabulary"}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_found_by_name(fault: Fault) -> None:
    found = outcomes(fault.make(), fault.found_by)
    for name in fault.found_by:
        assert found[name].startswith("failed: "), f"{name} {found[name]}"
        # Not because the fault itself is faulty.
        assert not re.match("failed: (Name|Type|Attribute|Runtime|Value)Error", found[name])


def test_every_check_has_a_fault_that_it_finds() -> None:
    found = {name for fault in FAULTS.values() for name in fault.found_by}
    assert found == {check.name for check in CHECKS}
