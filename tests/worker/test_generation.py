"""The real kernels behind the batcher: a job's output depends on the job alone."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tidemill_contracts.models.errors import ContractMismatch, ModelError
from tidemill_contracts.wire import (
    ErrorCode,
    GenerationJob,
    GenerationResult,
    JobFailed,
    SamplingParams,
)
from tidemill_worker.batcher import Batcher
from tidemill_worker.settings import make_config

LENGTHS = [1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 63, 64, 65, 90, 100]


def _jobs(seed: int = 0) -> list[GenerationJob]:
    """Ragged prompts; every third greedy, the others sampled by seed with mixed filters."""
    rng = random.Random(seed)
    jobs = []
    for i, length in enumerate(LENGTHS):
        sampling = [
            SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
            SamplingParams(temperature=1, seed=i, top_k=20, max_tokens=12, ignore_eos=True),
            SamplingParams(temperature=2, seed=i, top_p=0.9, max_tokens=12, ignore_eos=True),
        ][i % 3]
        ids = [rng.randrange(200) for _ in range(length)]
        jobs.append(GenerationJob(id=f"job-{i}", prompt_token_ids=ids, sampling=sampling))
    return jobs


@asynccontextmanager
async def batcher(model: Path, **settings: object) -> AsyncIterator[Batcher]:
    config = make_config(
        {"model": str(model), "dtype": "float32", "threads": 1, "kv_pages": 512, **settings}
    )
    started = await Batcher.start(config)
    try:
        yield started
    finally:
        await started.close()


async def _generate(model: Batcher, job: GenerationJob) -> GenerationResult:
    return await model.generate(job, job.id or "job", time.time())


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[list[int]]:
    """The output of each job when it is the only one."""

    async def run() -> list[list[int]]:
        async with batcher(tiny_model) as model:
            return [(await _generate(model, job)).token_ids for job in _jobs()]

    return asyncio.run(run())


@pytest.mark.parametrize(
    "settings",
    [
        {"max_rows": 32},
        {"max_rows": 4},
        {"max_rows": 32, "max_step_tokens": 8},
        {"max_rows": 8, "page_size": 128, "kv_pages": 64},
        {"max_rows": 8, "page_size": 4, "kv_pages": 29},
    ],
    ids=["one batch", "small batches", "chunked", "large pages", "preempted"],
)
async def test_output_in_a_batch_is_output_alone(
    tiny_model: Path, alone: list[list[int]], settings: dict[str, object]
) -> None:
    jobs = _jobs()
    order = list(range(len(jobs)))
    random.Random(1).shuffle(order)
    async with batcher(tiny_model, **settings) as model:
        results = await asyncio.gather(*(_generate(model, jobs[i]) for i in order))
        assert model._scheduler.pool.free == model._scheduler.pool.total
    for i, result in zip(order, results, strict=True):
        assert result.token_ids == alone[i], jobs[i].id
        assert result.finish_reason == "length"
        assert result.usage.prompt_tokens == LENGTHS[i]
        assert result.usage.completion_tokens == 12


async def test_joining_late_changes_nothing(tiny_model: Path, alone: list[list[int]]) -> None:
    jobs = _jobs()
    async with batcher(tiny_model, max_wait_ms=0) as model:
        tasks = []
        for job in jobs:
            tasks.append(asyncio.create_task(_generate(model, job)))
            await asyncio.sleep(0.004)
        results = await asyncio.gather(*tasks)
    assert [result.token_ids for result in results] == alone


async def test_a_cancelled_caller_frees_its_pages_and_hurts_nobody(
    tiny_model: Path, alone: list[list[int]]
) -> None:
    jobs = _jobs()
    async with batcher(tiny_model) as model:
        doomed = asyncio.create_task(_generate(model, _asking([1], 1_000)))
        tasks = [asyncio.create_task(_generate(model, job)) for job in jobs]
        await asyncio.sleep(0.05)
        doomed.cancel()
        results = await asyncio.gather(*tasks)
        with pytest.raises(asyncio.CancelledError):
            await doomed
        async with asyncio.timeout(10):
            while model._scheduler.pool.free < model._scheduler.pool.total:
                await asyncio.sleep(0.01)
    assert [result.token_ids for result in results] == alone


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"prompt": "hello"}, ErrorCode.NO_TOKENIZER, "prompt_token_ids"),
        ({"prompt_token_ids": []}, ErrorCode.EMPTY_PROMPT, "no tokens"),
        ({"prompt_token_ids": [10**6]}, ErrorCode.TOKEN_OUT_OF_RANGE, "vocabulary"),
        (
            {"prompt_token_ids": [1] * 60, "sampling": SamplingParams(max_tokens=5)},
            ErrorCode.PROMPT_TOO_LONG,
            "60 tokens and 5 more are asked for: 65 do not fit the context of 64",
        ),
        ({"prompt_token_ids": [1] * 64}, ErrorCode.PROMPT_TOO_LONG, "65 do not fit"),
        ({"prompt_token_ids": [1], "model": "gpt"}, ErrorCode.MODEL_NOT_FOUND, "'tiny'"),
        ({"prompt_token_ids": [1], "deadline": 1.0}, ErrorCode.EXPIRED, "deadline"),
    ],
)
async def test_jobs_that_cannot_be_run_are_refused_at_once(
    tiny_model: Path, fields: dict[str, object], code: ErrorCode, said: str
) -> None:
    async with batcher(tiny_model, max_model_len=64) as model:
        with pytest.raises(JobFailed) as caught:
            await _generate(model, GenerationJob(**fields))  # type: ignore[arg-type]
        good = GenerationJob(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1))
        assert await _generate(model, good)
    assert caught.value.error.code == code
    assert said in caught.value.error.message


async def test_a_length_that_was_not_asked_for_is_what_there_is_room_for(
    tiny_model: Path,
) -> None:
    async with batcher(tiny_model, max_model_len=64) as model:
        job = GenerationJob(prompt_token_ids=[1] * 60, sampling=SamplingParams(ignore_eos=True))
        assert len((await _generate(model, job)).token_ids) == 4
    async with batcher(tiny_model, kv_pages=4, page_size=16) as model:
        assert len((await _generate(model, job)).token_ids) == 5, "the last needs no room"


async def test_a_job_larger_than_the_pool_is_refused_and_the_next_one_runs(
    tiny_model: Path,
) -> None:
    async with batcher(tiny_model, kv_pages=8, page_size=16) as model:
        prompt = [1] * 128
        with pytest.raises(JobFailed, match="KV cache of 8 pages"):
            await _generate(model, _asking(prompt, 2))
        assert (await _generate(model, _asking(prompt, 1))).usage.completion_tokens == 1


def _asking(prompt: list[int], max_tokens: int) -> GenerationJob:
    return GenerationJob(
        prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    )


async def test_end_tokens_stop_a_row_unless_it_ignores_them(tiny_model: Path) -> None:
    def job(*, ignore_eos: bool) -> GenerationJob:
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=ignore_eos)
        return GenerationJob(prompt_token_ids=[5, 6, 7], sampling=sampling)

    async with batcher(tiny_model) as model:
        tokens = (await _generate(model, job(ignore_eos=True))).token_ids
        model.text.eos_token_ids = frozenset({tokens[0]})
        stopped = await _generate(model, job(ignore_eos=False))
        assert (stopped.token_ids, stopped.finish_reason) == ([tokens[0]], "stop")
        assert (await _generate(model, job(ignore_eos=True))).token_ids == tokens


async def test_timings_are_in_order(tiny_model: Path) -> None:
    async with batcher(tiny_model) as model:
        timings = (await _generate(model, _jobs()[8])).timings
    assert 0 <= timings.queued_ms <= timings.first_token_ms <= timings.total_ms < 60_000


async def test_a_context_beyond_the_models_own_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ContractMismatch, match="max_model_len"):
        async with batcher(tiny_model, max_model_len=10**6):
            pass


async def test_a_missing_directory_is_named() -> None:
    with pytest.raises(ModelError, match="/no/such/model"):
        async with batcher(Path("/no/such/model")):
            pass
