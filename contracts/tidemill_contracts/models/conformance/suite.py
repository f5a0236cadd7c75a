"""All checks, in the order in which they run, and what a run of them gives."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from tidemill_contracts.models.conformance import check_abi, check_cache, check_rows
from tidemill_contracts.models.conformance.session import CheckFailed, CheckSkipped, Session

Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Check:
    """One promise of the contract, and the function that tries it."""

    name: str
    """Stable: logs and tests refer to it."""
    proves: str
    run: Callable[[Session], None]
    """Returns where the promise is kept; raises `CheckSkipped` where it cannot be tried."""

    @classmethod
    def of(cls, function: Callable[[Session], None]) -> Check:
        """Named after the function, explained by its docstring."""
        proves = " ".join((inspect.getdoc(function) or "").split())
        return cls(function.__name__.replace("_", "-"), proves, function)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What came of one check."""

    name: str
    outcome: Outcome
    message: str
    """Why it failed or was skipped; empty where it passed."""
    seconds: float


START_UP = Check.of(check_abi.start_up)

CHECKS = (
    Check.of(check_abi.arity),
    Check.of(check_abi.arg_specs),
    START_UP,
    *map(
        Check.of,
        (
            check_abi.builder_order,
            check_abi.fingerprint_stability,
            check_abi.weights_exported_once,
            check_abi.weight_bytes,
            check_cache.cache_size,
            check_cache.zeroed_pages,
            check_cache.slot_mapping,
            check_cache.negative_slots,
            check_cache.unused_table_entries,
            check_cache.nan_in_page_tail,
            check_cache.reused_pages,
            check_cache.shared_pages,
            check_cache.kv_rewrite_idempotent,
            check_cache.stored_k,
            check_rows.logits_written,
            check_rows.pad_vocabulary,
            check_rows.inputs_not_written,
            check_rows.last_token_logits,
            check_rows.prompt_logits,
            check_rows.absolute_positions,
            check_rows.chunk_offsets,
            check_rows.chunked_equals_whole,
            check_rows.decode_equals_prefill,
            check_rows.batch_equals_alone,
            check_rows.padding_rows,
            check_rows.largest_step,
            check_rows.reference_logits,
            check_cache.page_size_independence,
        ),
    ),
)

WITHOUT_MODEL = frozenset({"arity", "arg-specs", "start-up"})
"""Checks that can be made on a contract that does not start up."""


def run_check(check: Check, session: Session) -> CheckResult:
    """The result of one check. Whatever it raises is a failure, but `CheckSkipped`."""
    started = time.perf_counter()
    outcome: Outcome = "passed"
    message = ""
    try:
        check.run(session)
    except CheckSkipped as skipped:
        outcome, message = "skipped", str(skipped)
    except CheckFailed as failed:
        outcome, message = "failed", str(failed)
    except Exception as error:
        outcome, message = "failed", f"{type(error).__name__}: {error}"
    return CheckResult(check.name, outcome, message, time.perf_counter() - started)


def run_checks(session: Session, only: Collection[str] = ()) -> Iterator[CheckResult]:
    """The results of all checks, or of those named in `only`, as they come.

    ``start-up`` is made in any case. Where it fails, the checks that need a running model are
    skipped.
    """
    started = True
    for check in CHECKS:
        if check is START_UP:
            result = run_check(check, session)
            started = result.outcome == "passed"
            yield result
        elif only and check.name not in only:
            continue
        elif not started and check.name not in WITHOUT_MODEL:
            yield CheckResult(check.name, "skipped", "the model did not start: see start-up", 0.0)
        else:
            yield run_check(check, session)
