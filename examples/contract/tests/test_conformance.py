"""The contract keeps every promise that the worker relies on: one test for each check."""

from __future__ import annotations

from tiny_attention.case import CASE
from tiny_attention.contract import tiny_contract

from tidemill_contracts.models.conformance.plugin import conformance_tests

test_conformance = conformance_tests(tiny_contract(), CASE)
