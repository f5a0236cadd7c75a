"""A job that another worker began goes on from its checkpoint, and ends as if it had never moved.

Checkpoints are taken at the borders of steps, as a worker may take them, from the demo model in
float32, and given to a second model that has never seen the jobs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.tiny import DEMO, write_demo_model
from tests.worker.mixed import TEMPLATE, assert_same, mixed_jobs, outputs_of
from tests.worker.served import batcher, generate
from tidemill_contracts.wire import (
    GenerationJob,
    GenerationResult,
    SamplingParams,
)
from tidemill_contracts.wire.progress import Progress, decode_progress
from tidemill_worker.batcher import Batcher
from tidemill_worker.engine.row import Row
from tidemill_worker.generator import EngineCrashed

PROMPT = "What is 2 + 3?"
Pieces = list[bytes]


class Tapped:
    """Notes a whole checkpoint of every job after every step, and the pieces since the last."""

    def __init__(self, model: Batcher) -> None:
        self.whole: dict[str, list[bytes]] = defaultdict(list)
        self.pieces: dict[str, Pieces] = defaultdict(list)
        self.states: dict[str, list[set[str]]] = defaultdict(list)
        count = model._engine._count

        def tapped(plan: Any) -> None:
            count(plan)
            for job_id, recorder in list(model._recorders.items()):
                if recorder.gained:
                    self.pieces[job_id].append(recorder.take())
                    taken = list(recorder._taken), recorder._prompt_taken
                    recorder.rewind()
                    self.whole[job_id].append(recorder.take())
                    assert (recorder._taken, recorder._prompt_taken) == taken
                    self.states[job_id].append(set().union(*map(_state, recorder._rows)))

        model._engine._count = tapped  # type: ignore[method-assign]


def _state(row: Row) -> set[str]:
    """In the middle of what a row stands."""
    found = set()
    if row.ended:
        return {"ended"}
    if row.text is not None:
        pending, _ = row.text._detokenizer._decoder.getstate()
        if pending:
            found.add("character")
        if row.text._held_back():
            found.add("stop text")
    if row.thinking is not None and row.thinking.open:
        found.add("closing sentence" if row.thinking._closed_by else "thoughts")
    if row.grammar is not None:
        found.add(f"grammar {row.grammar.stage.value}")
    if row.generated < row.min_tokens:
        found.add("minimum")
    if row.known == row.max_len - 1:
        found.add("last token")
    return found


async def _resumed(model: Batcher, job: GenerationJob, *pieces: bytes) -> GenerationResult:
    return await model.generate(job, job.id or "job", time.time(), pieces)


def _counts(progress: Progress) -> int:
    return sum(len(output.token_ids) for output in progress.outputs)


async def test_a_job_with_any_options_goes_on_from_any_token_as_if_unbroken(tmp_path: Path) -> None:
    path = write_demo_model(tmp_path / "model", TEMPLATE)
    jobs = mixed_jobs()
    async with batcher(path) as first:
        tap = Tapped(first)
        unbroken = await asyncio.gather(*(generate(first, job) for job in jobs))
    seen: set[str] = set()
    async with batcher(path, max_rows=128, kv_pages=4096) as second:
        handed = []
        for job, result in zip(jobs, unbroken, strict=True):
            for at in range(len(tap.whole[job.id or ""])):
                states = tap.states[job.id or ""][at]
                # Every tenth place, and all those where a row stands in something for the first
                # few times.
                if at % 10 == 0 or not states <= seen:
                    seen |= states
                    handed.append((job, result, tap.whole[job.id or ""][at]))
        done = await asyncio.gather(*(_resumed(second, job, piece) for job, _, piece in handed))
        computed = second.stats.completion_tokens
        assert second._scheduler.pool.free == second._scheduler.pool.total
    for (_, whole, piece), result in zip(handed, done, strict=True):
        progress = decode_progress([piece])
        assert_same(whole, result)
        assert result.usage.resumed_tokens == _counts(progress) > 0
        computed -= result.usage.completion_tokens - result.usage.resumed_tokens
        for name in ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens"):
            assert getattr(result.usage, name) == getattr(whole.usage, name), name
        for one, other in zip(outputs_of(whole), outputs_of(result), strict=True):
            assert len(one.logprobs or []) == len(other.logprobs or [])
            assert one.thinking_truncated == other.thinking_truncated
            assert one.tool_calls == other.tool_calls
        assert len(whole.prompt_logprobs or []) == len(result.prompt_logprobs or [])
    assert computed == 0, "what was generated is not generated again"
    assert seen >= {
        "character", "stop text", "thoughts", "closing sentence", "grammar thoughts",
        "grammar answer", "minimum", "last token", "ended",
    }, seen  # fmt: skip


@pytest.fixture(scope="module")
def tapped_job() -> GenerationJob:
    return GenerationJob(
        id="job",
        prompt=PROMPT,
        sampling=SamplingParams(
            temperature=5.0, max_tokens=24, ignore_eos=True, n=3, logprobs=1, prompt_logprobs=1
        ),
    )


async def _tapped(job: GenerationJob, **settings: object) -> tuple[GenerationResult, Tapped]:
    async with batcher(DEMO, **settings) as model:
        tap = Tapped(model)
        return await generate(model, job), tap


async def test_pieces_add_up_to_the_whole_and_hold_nothing_twice(tapped_job: GenerationJob) -> None:
    # Outputs that run one after another gain tokens at different times, and end at different times.
    result, tap = await _tapped(tapped_job, max_rows=2)
    pieces, whole = tap.pieces["job"], tap.whole["job"]
    assert len(pieces) == 48
    for count in range(1, len(pieces) + 1):
        assert decode_progress(pieces[:count]) == decode_progress([whole[count - 1]])
    assert _counts(decode_progress(whole[-1:])) == sum(
        _counts(decode_progress([piece])) for piece in pieces
    )
    assert _counts(decode_progress(pieces)) == result.usage.completion_tokens


async def test_a_seed_that_was_drawn_is_kept(tapped_job: GenerationJob) -> None:
    unbroken, tap = await _tapped(tapped_job)
    async with batcher(DEMO) as model:
        result = await _resumed(model, tapped_job, *tap.pieces["job"][:7])
        other = await generate(model, tapped_job)
    assert_same(unbroken, result)
    assert result.usage.resumed_tokens == 21
    assert other.sampling["seed"] != unbroken.sampling["seed"]


async def test_outputs_that_have_ended_are_not_run_again(tapped_job: GenerationJob) -> None:
    unbroken, tap = await _tapped(tapped_job, max_rows=1)
    piece = next(
        piece
        for piece in tap.whole["job"]
        if [len(output.token_ids) > 0 for output in decode_progress([piece]).outputs][1]
    )
    async with batcher(DEMO) as model:
        result = await _resumed(model, tapped_job, piece)
        assert result.usage.resumed_tokens > len(unbroken.outputs[0].token_ids)
        assert model.stats.completion_tokens == (
            result.usage.completion_tokens - result.usage.resumed_tokens
        )
    assert_same(unbroken, result)


async def test_a_job_that_was_at_its_end_is_answered_without_a_step() -> None:
    job = GenerationJob(id="job", prompt=PROMPT, sampling=SamplingParams(max_tokens=5))
    unbroken, tap = await _tapped(job)
    async with batcher(DEMO) as model:
        result = await _resumed(model, job, tap.whole["job"][-1])
        assert model.stats.steps == 0
    assert_same(unbroken, result)
    assert result.usage.resumed_tokens == len(unbroken.token_ids)


def _changed(piece: bytes, **fields: object) -> bytes:
    """The piece with other fields, which need not be such as the wire allows."""
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(piece), **fields})


def _output(piece: bytes, **fields: object) -> list[dict[str, Any]]:
    first, *others = msgspec.msgpack.decode(piece)["outputs"]
    return [{**first, **fields}, *others]


async def test_a_checkpoint_that_does_not_fit_is_ignored_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=3.0, seed=1)
    job = GenerationJob(id="job", prompt=PROMPT, sampling=sampling)
    unbroken, tap = await _tapped(job)
    piece, pieces = tap.whole["job"][5], tap.pieces["job"]
    longer = msgspec.structs.replace(sampling, max_tokens=13)
    warmer = msgspec.structs.replace(sampling, temperature=3.5)
    unfit: dict[str, Sequence[bytes]] = {
        "cannot be decoded": [b"\xc1garbage"],
        "cannot be decoded: Object missing": [msgspec.msgpack.encode({"schema_version": 1})],
        "schema version 0, not 1": [_changed(piece, schema_version=0, outputs=None)],
        "schema version 2, not 1": [_changed(piece, schema_version=2)],
        "another model": [_changed(piece, basis="0" * 32)],
        "different runs": [pieces[0], _changed(pieces[1], seed=5)],
        "2 outputs, not 1": [_changed(piece, outputs=_output(piece) * 2)],
        "not in the vocabulary": [_changed(piece, outputs=_output(piece, token_ids=[512]))],
        "Expected `int` >= 0": [_changed(piece, seed=-1)],
        "could have generated": [_changed(piece, outputs=_output(piece, token_ids=[5] * 13))],
    }
    async with batcher(DEMO) as model:
        for reason, checkpoint in unfit.items():
            caplog.clear()
            with caplog.at_level(logging.WARNING, "tidemill.worker"):
                result = await _resumed(model, job, *checkpoint)
            assert_same(unbroken, result)
            assert result.usage.resumed_tokens == 0
            assert reason in caplog.text
            assert "job starts anew" in caplog.text
        for options in (longer, warmer):
            changed = msgspec.structs.replace(job, sampling=options)
            result = await _resumed(model, changed, piece)
            assert result.usage.resumed_tokens == 0, "of another version of the job"
        assert (await _resumed(model, job, piece)).usage.resumed_tokens == 6
    async with batcher(DEMO, dtype="bfloat16") as model:
        assert (await _resumed(model, job, piece)).usage.resumed_tokens == 0


async def test_what_was_generated_is_in_the_prefix_cache_and_counts_as_no_prompt() -> None:
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    job = GenerationJob(id="job", prompt=PROMPT, sampling=sampling)
    async with batcher(DEMO, page_size=4) as model:
        tap = Tapped(model)
        unbroken = await generate(model, job)
        cached = model.stats.cached_tokens
        result = await _resumed(model, job, tap.whole["job"][30])
        assert model.stats.cached_tokens - cached > result.usage.prompt_tokens
    assert_same(unbroken, result)
    assert result.usage.cached_tokens == 0, "of the run that read the prompt"


async def test_a_crash_of_the_engine_ends_whoever_waits_and_whoever_comes() -> None:
    job = GenerationJob(id="job", prompt=PROMPT, sampling=SamplingParams(max_tokens=5))
    async with batcher(DEMO) as model:

        def broken() -> None:
            raise RuntimeError("planted bug")

        model._scheduler.plan = broken  # type: ignore[method-assign,assignment]
        for jobs in (2, 1):
            async with asyncio.timeout(10):
                ended = await asyncio.gather(
                    *(generate(model, job) for _ in range(jobs)), return_exceptions=True
                )
            assert [type(error) for error in ended] == [EngineCrashed] * jobs
