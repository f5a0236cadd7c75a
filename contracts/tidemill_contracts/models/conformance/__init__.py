"""The conformance kit: one set of checks that any contract can be held to.

    python -m tidemill_contracts.models.conformance FAMILY VARIANT

or, from a test suite of your own, `plugin.conformance_tests`, or in code::

    session = Session(contract, case)
    results = list(run_checks(session))

The kit drives a contract through its public surface alone and looks into no layout. It proves
nothing about speed.
"""

from __future__ import annotations

from tidemill_contracts.models.conformance.case import (
    ConformanceCase,
    ConformanceOptions,
    SeededWeights,
    directory_case,
    qwen3_case,
)
from tidemill_contracts.models.conformance.session import Session
from tidemill_contracts.models.conformance.suite import (
    CHECKS,
    Check,
    CheckResult,
    run_check,
    run_checks,
)

__all__ = [
    "CHECKS",
    "Check",
    "CheckResult",
    "ConformanceCase",
    "ConformanceOptions",
    "SeededWeights",
    "Session",
    "directory_case",
    "qwen3_case",
    "run_check",
    "run_checks",
]
