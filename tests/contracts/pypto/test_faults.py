"""A child that dies, hangs or raises in a step: a typed error in time, and the next rows run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contracts.pypto.driver import VARIANT, Pypto, Served, make_checkout
from tidemill_contracts.models.errors import BackendError, ContractMismatch, KVCacheLost, ModelError
from tidemill_contracts.models.pypto.session import MAX_FAILURES_IN_A_ROW

EXIT, HANG, RAISE = 98, 99, 100
"""Tokens that the stand-in's kernels cannot bear."""
LIMIT_S = 1.0
GOOD = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


@pytest.fixture
def faulty(
    checkout: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Pypto, Served]]:
    monkeypatch.setenv("STAND_IN_FAULTS", "1")
    with Pypto(checkout, step_timeout_s=LIMIT_S) as pypto:
        yield pypto, pypto.serve(model_dir)


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (EXIT, "died during prefill, after .*exit status 7.*the kernel has met its end"),
        (HANG, f"did not answer prefill within {LIMIT_S:g} s"),
    ],
    ids=["dies", "hangs"],
)
def test_a_lost_child_fails_the_step_in_time_and_other_rows_run_on_a_new_one(
    token: int, said: str, faulty: tuple[Pypto, Served]
) -> None:
    pypto, served = faulty
    expected = served.prefill(served.row(GOOD))
    running = served.row(GOOD)
    served.prefill(running)
    running.tokens.append(3)
    pid = pypto.session.child_pid

    started = time.monotonic()
    with pytest.raises(BackendError, match=said):
        served.prefill(served.row([1, token]))
    assert time.monotonic() - started < LIMIT_S + 2

    with pytest.raises(KVCacheLost, match="KV cache of 1 of the 1 rows"):
        served.decode(running)
    assert pypto.session.child_pid is None, "a lost row needs no new child to fail"
    assert torch.equal(served.prefill(served.row(GOOD)), expected)
    assert pypto.session.child_pid not in (None, pid)
    assert pypto.session.generation == 1


def test_rows_that_were_lost_fail_until_they_are_computed_anew(
    faulty: tuple[Pypto, Served],
) -> None:
    _, served = faulty
    lost, reference = served.row(GOOD), served.row(GOOD)
    served.prefill(reference)
    reference.tokens.append(3)
    expected = served.decode(reference)
    served.prefill(lost)
    lost.tokens.append(3)
    with pytest.raises(BackendError, match="exit status 7"):
        served.prefill(served.row([EXIT]))

    fresh = served.row([1, 2])
    served.prefill(fresh)
    fresh.tokens.append(4)
    with pytest.raises(KVCacheLost, match="1 of the 2 rows of this decode step"):
        served.decode(fresh, lost)
    served.decode(fresh)
    lost.forget()
    served.prefill(lost, chunk=len(GOOD))
    assert torch.allclose(served.decode(lost), expected)


def test_a_chunk_after_a_lost_one_fails(faulty: tuple[Pypto, Served]) -> None:
    _, served = faulty
    row = served.row(GOOD)
    served.prefill(row, chunk=4)
    with pytest.raises(BackendError):
        served.prefill(served.row([EXIT]))
    with pytest.raises(KVCacheLost):
        served.prefill(row, chunk=4)


def test_a_kernel_that_raises_costs_its_step_and_nothing_else(
    faulty: tuple[Pypto, Served],
) -> None:
    pypto, served = faulty
    row = served.row(GOOD)
    served.prefill(row)
    row.tokens.append(3)
    pid = pypto.session.child_pid
    with pytest.raises(BackendError, match="prefill raised RuntimeError: the kernel has met"):
        served.prefill(served.row([RAISE]))
    served.decode(row)
    assert pypto.session.child_pid == pid


def test_a_child_in_which_every_step_raises_is_replaced(faulty: tuple[Pypto, Served]) -> None:
    pypto, served = faulty
    for _ in range(MAX_FAILURES_IN_A_ROW + 1):
        with pytest.raises(BackendError):
            served.prefill(served.row([RAISE]))
    assert pypto.session.child_pid is None
    served.prefill(served.row(GOOD))
    assert pypto.session.generation == 1


def test_a_child_killed_between_steps_is_noticed_at_the_next(
    faulty: tuple[Pypto, Served],
) -> None:
    pypto, served = faulty
    assert pypto.session.child_pid is not None
    os.kill(pypto.session.child_pid, signal.SIGKILL)
    with pytest.raises(BackendError, match="killed by SIGKILL"):
        served.prefill(served.row(GOOD))
    served.prefill(served.row(GOOD))


def test_device_workers_die_with_a_hanging_child(
    checkout: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAULTS", "1")
    with Pypto(checkout, step_timeout_s=LIMIT_S, platform="a2a3") as pypto:
        served = pypto.serve(model_dir)
        assert pypto.session.child_pid is not None
        group = pypto.session.child_pid
        assert len(members(group)) == 2
        with pytest.raises(BackendError, match="did not answer"):
            served.prefill(served.row([HANG]))
        wait_for(lambda: not members(group))
        served.prefill(served.row(GOOD))


def test_a_child_that_cannot_start_again_says_so(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_checkout(tmp_path)
    with Pypto(root) as pypto:
        served = pypto.serve(model_dir)
        assert pypto.session.child_pid is not None
        constants = root / VARIANT / "constants.py"
        constants.write_text(constants.read_text().replace('"page_size": 8', '"page_size": 16'))
        os.kill(pypto.session.child_pid, signal.SIGKILL)
        with pytest.raises(BackendError):
            served.prefill(served.row(GOOD))
        with pytest.raises(ModelError, match="has changed since this process started"):
            served.prefill(served.row(GOOD))


def test_a_model_that_was_replaced_by_another_does_not_run(checkout: Path, model_dir: Path) -> None:
    with Pypto(checkout) as pypto:
        first = pypto.serve(model_dir)
        second = Served(first.contract, model_dir)
        with pytest.raises(ModelError, match="has loaded another model since"):
            first.prefill(first.row(GOOD))
        second.prefill(second.row(GOOD))


def test_a_child_dies_with_its_parent(checkout: Path) -> None:
    script = (
        "import sys, time\n"
        "from tidemill_contracts.models.pypto.options import PyptoOptions\n"
        "from tidemill_contracts.models.pypto.messages import Describe, Description\n"
        "from tidemill_contracts.models.pypto.session import Session\n"
        "session = Session(PyptoOptions(lib_root=sys.argv[1]))\n"
        "session.ask(Describe('qwen3', 'tiny'), Description, 'describe')\n"
        "print(session.child_pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(checkout)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        assert members(group)
        parent.kill()
    wait_for(lambda: not members(group))


@pytest.mark.parametrize(
    ("tokens", "edit", "said"),
    [
        ([101], {}, "prefill.input_ids: found 101 to 101, expected 0 to 100"),
        ([-1], {}, "prefill.input_ids"),
        ([1], {"pages": [40]}, "prefill.slot_mapping: found 320, expected at most 319"),
        ([1] * 9, {"pages": [3, -7]}, "prefill.block_table: found pages -7 to 3"),
        ([1] * 65, {}, "block_table shape: found .*PAGES at most 8"),
    ],
)
def test_what_would_reach_into_other_memory_is_refused(
    tokens: list[int], edit: dict[str, list[int]], said: str, served: Served
) -> None:
    row = served.row(tokens)
    row.pages = edit.get("pages", [])
    with pytest.raises(ContractMismatch, match=said):
        served.prefill(row)


def members(group: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = stat.read_text().partition(" (")
        except OSError:
            continue
        state, _, pgrp = rest.rpartition(") ")[2].split()[:3]
        if int(pgrp) == group and state != "Z":
            found.append(int(pid))
    return found


def wait_for(condition: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
