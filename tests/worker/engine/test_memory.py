"""Memory that runs out makes steps smaller and fails nobody; and nothing stays of a row."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch

from tests.worker.engine.conftest import Bench, expected_tokens, expected_tops, make_row, tops
from tidemill_contracts.models.errors import KVCacheLost
from tidemill_contracts.models.sampling import SamplingKernels
from tidemill_contracts.wire import ErrorCode
from tidemill_worker.engine import sampler
from tidemill_worker.engine.memory import RECOVER_AFTER, CallLimit, is_out_of_memory
from tidemill_worker.engine.row import Row

PROMPT = 40


class _Memory:
    """Raises for calls of more tokens than fit; notes how large the others were."""

    def __init__(self, bench: Bench, tokens: int, error: Exception | None = None) -> None:
        self.tokens = tokens
        self.error = error or RuntimeError("DefaultCPUAllocator: not enough memory")
        self.calls: list[int] = []
        self.failures = 0
        bench.runner.on_call = self

    def __call__(self, rows: int, tokens: int) -> None:
        if tokens > self.tokens:
            self.failures += 1
            raise self.error
        self.calls.append(tokens)


def _rows(bench: Bench, count: int = 8, max_tokens: int = 12) -> list[Row]:
    return [bench.add(make_row([n] * PROMPT, max_tokens, name=str(n))) for n in range(count)]


def _check(rows: list[Row]) -> None:
    for row in rows:
        assert row.error is None
        prompt = row.token_ids[: row.prompt_len]
        assert list(row.output_token_ids) == expected_tokens(prompt, row.max_len - row.prompt_len)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError("Unable to allocate 3.00 GiB for an array"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried 9 bytes"),
        RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=lambda error: f"{type(error).__name__} {str(error)[:20]}",
)
def test_a_step_that_memory_is_short_for_is_run_in_parts(error: Exception) -> None:
    bench = Bench(max_rows=8, pages=256, max_step_tokens=256)
    memory = _Memory(bench, 30, error)
    rows = _rows(bench)
    bench.run()
    _check(rows)
    assert memory.failures == 4  # 256, 128 and 64 were too much, then 32
    assert max(memory.calls) == 16


@pytest.mark.parametrize("error", [RuntimeError("memory of a rowhammer"), ValueError("out of me")])
def test_another_error_is_no_lack_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_decode_steps_are_halved_too() -> None:
    bench = Bench(max_rows=8, pages=256, max_step_tokens=400)
    memory = _Memory(bench, 400)
    rows = _rows(bench)
    bench.step()
    memory.tokens = 3
    bench.run()
    _check(rows)
    assert memory.failures == 2  # 8 rows, then 4
    assert set(memory.calls[1:]) <= {1, 2}


def test_a_limit_is_eased_slowly_and_then_lifted(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(max_rows=8, pages=512, max_step_tokens=256)
    memory = _Memory(bench, 60)
    rows = _rows(bench, max_tokens=12)
    bench.step()
    memory.tokens = 256
    bench.run()
    assert [record.message for record in caplog.records if "out of memory" in record.message]
    failures = memory.failures
    for n in range(40):
        rows.append(bench.add(make_row([n, 7], 200, name=f"more{n}")))
    bench.run()
    _check(rows)
    assert memory.failures == failures
    assert bench.engine._calls.prefill_limit.tokens is None


def test_a_limit_recovers_in_steps() -> None:
    limit = CallLimit()
    limit.shrink(64)
    seen = {limit.tokens}
    for calm in range(10 * RECOVER_AFTER):
        limit.ease()
        if calm < RECOVER_AFTER - 1:
            assert limit.tokens == 32
        seen.add(limit.tokens)
    assert seen == {32, 40, 50, 62, None}


def test_prompts_are_told_of_once_though_memory_runs_out() -> None:
    bench = Bench(max_rows=4, pages=256, max_step_tokens=128)
    memory = _Memory(bench, 5)
    rows = [
        bench.add(make_row([n] * PROMPT, 12, name=str(n), prompt_logprobs=n % 2 or None))
        for n in range(4)
    ]
    bench.run()
    _check(rows)
    assert memory.failures > 0
    for n, row in enumerate(rows):
        assert tops(row) == (expected_tops([n] * PROMPT) if n % 2 else [])


def test_a_row_with_no_memory_for_one_token_fails_alone() -> None:
    bench = Bench(max_rows=4, pages=256, max_step_tokens=64)
    rows = _rows(bench, 4)
    bench.runner.raise_for = lambda row: row.id == "2" and _out_of_memory()
    bench.run()
    error = rows[2].error
    assert error is not None
    assert (error.code, error.retryable) == (ErrorCode.OUT_OF_MEMORY, True)
    assert "0 of 40 tokens" in error.message
    _check([row for row in rows if row.id != "2"])


def _out_of_memory() -> bool:
    raise MemoryError("planted fault")


def test_a_row_that_loses_its_kv_cache_in_one_part_of_a_step_is_not_in_the_next() -> None:
    bench = Bench(max_rows=2, pages=256, max_step_tokens=64)
    _Memory(bench, 10)
    losses = iter([True])

    def lose_once(row: Row) -> bool:
        if row.id == "1" and row.computed == 8 and next(losses, False):
            raise KVCacheLost("planted restart")
        return False

    bench.runner.raise_for = lose_once
    rows = _rows(bench, 2)
    bench.run()
    _check(rows)
    assert [row.restarts for row in rows] == [0, 1]


def test_memory_that_runs_out_in_sampling_draws_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample = sampler.sample

    def short_of_memory(
        logits: torch.Tensor, rows: list[Row], kernels: SamplingKernels | None
    ) -> list[sampler.Sampled | None]:
        sampled = sample(logits, rows, kernels)  # which may change the logits
        if len(rows) > 2:
            raise MemoryError("planted fault")
        return sampled

    monkeypatch.setattr(sampler, "sample", short_of_memory)
    bench = Bench(max_rows=8, pages=256, max_step_tokens=400)
    rows = _rows(bench)
    bench.run()
    _check(rows)


def test_the_tensors_of_a_call_that_failed_are_freed_before_it_is_tried_again() -> None:
    bench = Bench(max_rows=8, pages=256, max_step_tokens=400)
    kept: list[weakref.ref[torch.Tensor]] = []

    def allocate(rows: int, tokens: int) -> None:
        assert all(ref() is None for ref in kept)
        activations = torch.zeros(tokens)
        kept.append(weakref.ref(activations))
        if tokens > 20:
            raise MemoryError("planted fault")

    bench.runner.on_call = allocate
    rows = _rows(bench)
    bench.run()
    _check(rows)


def test_twenty_thousand_jobs_leave_nothing_behind() -> None:
    bench = Bench(max_rows=64, pages=256, max_step_tokens=256)
    bench.engine._check_integrity = False

    def run(count: int) -> None:
        for n in range(count):
            bench.add(
                make_row([n % 90, n % 7, n % 11], 1, tenant=f"t{n}", deadline=1e12, priority=n % 5)
            )
            if n % 64 == 63:
                bench.run()
                bench.delivered.clear()
        bench.run()
        bench.delivered.clear()
        gc.collect()

    run(2_000)  # whatever is filled once: the cache, the window of step times
    rows = _living_rows()
    blocks, resident = sys.getallocatedblocks(), _resident_bytes()
    run(20_000)
    assert sys.getallocatedblocks() - blocks < 20_000 / 20
    assert _resident_bytes() - resident < 1_024 * 20_000
    assert len(bench.scheduler.fair) == 0
    assert _living_rows() == rows


def _living_rows() -> int:
    return sum(type(found) is Row for found in gc.get_objects())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
