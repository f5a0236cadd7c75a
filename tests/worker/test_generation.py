"""The real kernels behind the batcher: a job's output depends on the job alone."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import msgspec
import pytest

import tidemill_worker
from tests.worker.served import batcher, generate
from tidemill_contracts.models.errors import CheckpointError, ContractMismatch, ModelError
from tidemill_contracts.models.fingerprint import hash_weights
from tidemill_contracts.wire import (
    ErrorCode,
    GenerationJob,
    GenerationResult,
    JobFailed,
    SamplingParams,
    convert_job,
)
from tidemill_contracts.wire.receipt import differences, problems
from tidemill_worker.batcher import _characters

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


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[list[int]]:
    """The output of each job when it is the only one."""

    async def run() -> list[list[int]]:
        async with batcher(tiny_model) as model:
            return [(await generate(model, job)).token_ids for job in _jobs()]

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
        results = await asyncio.gather(*(generate(model, jobs[i]) for i in order))
        assert model._scheduler.pool.free == model._scheduler.pool.total
    for i, result in zip(order, results, strict=True):
        assert result.token_ids == alone[i], jobs[i].id
        assert result.finish_reason == "length"
        assert result.usage.prompt_tokens == LENGTHS[i]
        assert result.usage.completion_tokens == 12


@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_a_cached_prefix_changes_no_token(tiny_model: Path, prefix_caching: bool) -> None:
    stem = [random.Random(1).randrange(200) for _ in range(50)]
    sampling = SamplingParams(temperature=1, seed=4, max_tokens=10, ignore_eos=True)
    jobs = [
        GenerationJob(prompt_token_ids=[*stem, i], sampling=sampling, cache_salt=salt)
        for i, salt in ((1, ""), (2, ""), (1, ""), (1, "another tenant"))
    ]
    async with batcher(tiny_model, prefix_caching=prefix_caching) as model:
        results = [await generate(model, job) for job in jobs]
    cached = [result.usage.cached_tokens for result in results]
    assert cached == ([0, 32, 32, 0] if prefix_caching else [0, 0, 0, 0])
    first, _, again, salted = results
    assert first.token_ids == again.token_ids == salted.token_ids


async def test_n_outputs_are_independent_and_seeded_one_by_one(tiny_model: Path) -> None:
    def job(n: int) -> GenerationJob:
        sampling = SamplingParams(temperature=2, seed=5, n=n, max_tokens=12, ignore_eos=True)
        return GenerationJob(prompt_token_ids=[1, 2, 3], sampling=sampling)

    async with batcher(tiny_model) as model:
        one = await generate(model, job(1))
        four = await generate(model, job(4))
        again = await generate(model, job(4))
    assert one.outputs == []
    assert len({tuple(output.token_ids) for output in four.outputs}) == 4
    assert four.token_ids == four.outputs[0].token_ids == one.token_ids
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in four.outputs]
    assert four.usage.completion_tokens == 48
    assert four.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"logit_bias": {512: 1.0}}, ErrorCode.TOKEN_OUT_OF_RANGE),
        ({"allowed_token_ids": [1, 10**6]}, ErrorCode.TOKEN_OUT_OF_RANGE),
        ({"stop_token_ids": [512]}, ErrorCode.TOKEN_OUT_OF_RANGE),
        ({"logprob_token_ids": [512]}, ErrorCode.TOKEN_OUT_OF_RANGE),
        ({"stop": "text"}, ErrorCode.NO_TOKENIZER),
        ({"bad_words": ["text"]}, ErrorCode.NO_TOKENIZER),
        (
            {"allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 2},
            ErrorCode.INVALID_JOB,
        ),
    ],
)
async def test_options_that_cannot_be_met_fail_their_job_only(
    tiny_model: Path, options: dict[str, object], code: ErrorCode
) -> None:
    bad = GenerationJob(
        prompt_token_ids=[1],
        sampling=SamplingParams(**{"max_tokens": 4, **options}),  # type: ignore[arg-type]
    )
    async with batcher(tiny_model) as model:
        neighbour = asyncio.create_task(generate(model, _asking([5], 20)))
        with pytest.raises(JobFailed) as caught:
            await generate(model, bad)
        assert len((await neighbour).token_ids) == 20
    assert caught.value.error.code == code


async def test_the_result_says_what_sampling_was_in_effect(tiny_model: Path) -> None:
    job = GenerationJob(
        prompt_token_ids=[1], sampling=SamplingParams(top_k=-1, seed=9, max_tokens=1)
    )
    async with batcher(tiny_model) as model:
        told = (await generate(model, job)).sampling
    # The tiny model's generation config: 0.6, 0.95, 20.
    assert told == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": 9,
    }


async def test_a_receipt_says_what_a_result_was_made_from(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []

    def noted(model_dir: Path) -> str:
        hashed.append(model_dir)
        return hash_weights(model_dir)

    monkeypatch.setattr("tidemill_worker.batcher.hash_weights", noted)
    asked = SamplingParams(temperature=1, seed=4, n=2, max_tokens=5, ignore_eos=True)
    job = GenerationJob(prompt_token_ids=[1, 2, 3], sampling=asked, receipt=True)
    async with batcher(tiny_model) as model:
        assert (await generate(model, _asking([1], 2))).receipt is None
        assert hashed == [], "nothing is hashed before a receipt is asked for"
        one, again = await asyncio.gather(*(generate(model, job) for _ in range(2)))
        warmer = msgspec.structs.replace(asked, temperature=2.0)
        other = await generate(model, msgspec.structs.replace(job, sampling=warmer))
        fingerprint = model.runner.contract.abi_fingerprint()
    assert hashed == [tiny_model]
    assert one.receipt is not None
    assert again.receipt == one.receipt
    assert other.receipt is not None
    assert one.receipt.contract == fingerprint
    assert one.receipt.weights == hash_weights(tiny_model)
    assert (one.receipt.dtype, one.receipt.deterministic) == ("float32", False)
    assert problems(one, [1, 2, 3]) == []
    assert differences(one.receipt, other.receipt) == ["another sampling", "other outputs"]


async def test_a_receipt_tells_int8_from_the_dtype(tiny_model: Path) -> None:
    job = msgspec.structs.replace(_asking([1], 2), receipt=True)
    async with batcher(tiny_model) as model:
        plain = (await generate(model, job)).receipt
    async with batcher(tiny_model, quantization="int8") as model:
        rounded = (await generate(model, job)).receipt
    assert plain is not None
    assert rounded is not None
    assert (plain.quantization, rounded.quantization) == (None, "int8")
    assert plain.contract != rounded.contract
    assert "another quantisation: None and int8" in differences(plain, rounded)


async def test_a_checkpoint_that_is_gone_fails_the_job_that_asked_for_a_receipt(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with batcher(tiny_model) as model:
        monkeypatch.setattr(model.text, "model_dir", tiny_model / "gone")
        job = msgspec.structs.replace(_asking([1], 2), receipt=True)
        with pytest.raises(CheckpointError, match="no such model directory"):
            await generate(model, job)
        assert await generate(model, _asking([1], 2))
        monkeypatch.setattr(model.text, "model_dir", tiny_model)
        assert (await generate(model, job)).receipt, "it is tried again"


async def test_joining_late_changes_nothing(tiny_model: Path, alone: list[list[int]]) -> None:
    jobs = _jobs()
    async with batcher(tiny_model, max_wait_ms=0) as model:
        tasks = []
        for job in jobs:
            tasks.append(asyncio.create_task(generate(model, job)))
            await asyncio.sleep(0.004)
        results = await asyncio.gather(*tasks)
    assert [result.token_ids for result in results] == alone


async def test_a_cancelled_caller_frees_its_pages_and_hurts_nobody(
    tiny_model: Path, alone: list[list[int]]
) -> None:
    jobs = _jobs()
    async with batcher(tiny_model) as model:
        doomed = asyncio.create_task(generate(model, _asking([1], 1_000)))
        tasks = [asyncio.create_task(generate(model, job)) for job in jobs]
        await asyncio.sleep(0.05)
        doomed.cancel()
        results = await asyncio.gather(*tasks)
        with pytest.raises(asyncio.CancelledError):
            await doomed
        async with asyncio.timeout(10):
            while model._scheduler.pool.free < model._scheduler.pool.total:
                await asyncio.sleep(0.01)
    assert [result.token_ids for result in results] == alone


async def test_all_outputs_of_a_cancelled_caller_leave(tiny_model: Path) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=1_000, ignore_eos=True, n=4)
    job = GenerationJob(id="four", prompt_token_ids=[1], sampling=sampling)
    async with batcher(tiny_model, max_rows=2) as model:
        doomed = asyncio.create_task(generate(model, job))
        async with asyncio.timeout(10):
            while model.stats.steps < 3:
                await asyncio.sleep(0.01)
        for _ in range(2):
            doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        async with asyncio.timeout(10):
            while model._scheduler.has_work:
                await asyncio.sleep(0.01)
        assert model._scheduler.pool.free == model._scheduler.pool.total
        assert model.rows_waiting == model.rows_running == 0
        assert model.eta_s == 0.0
        assert (await generate(model, _asking([1], 3))).finish_reason == "length"


async def test_tenants_and_a_target_change_no_output(
    tiny_model: Path, alone: list[list[int]]
) -> None:
    jobs = [
        msgspec.structs.replace(job, tenant=f"tenant-{n % 3}", priority=n % 2)
        for n, job in enumerate(_jobs())
    ]
    async with batcher(tiny_model, max_rows=4, target_tpot_ms=0.5) as model:
        results = await asyncio.gather(*(generate(model, job) for job in jobs))
        assert model.eta_s == 0.0
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
            await generate(model, GenerationJob(**fields))  # type: ignore[arg-type]
        good = GenerationJob(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1))
        assert await generate(model, good)
    assert caught.value.error.code == code
    assert said in caught.value.error.message


async def test_a_prompt_of_megabytes_is_tokenised_while_the_event_loop_turns() -> None:
    demo = Path(tidemill_worker.__file__).parent / "demo_model"
    text = "The quick brown fox. " * 100_000
    async with batcher(demo) as model:
        jobs = [
            GenerationJob(prompt=text),
            convert_job({"messages": [{"role": "user", "content": text}]}),
            convert_job(
                {
                    "messages": [{"role": "user", "content": "x"}],
                    "chat": {"tools": [{"function": {"description": text}}]},
                }
            ),
        ]
        for job in jobs:
            assert _characters(job) >= len(text)
        encoding = asyncio.create_task(model._encode(jobs[0]))
        turns = 0
        while not encoding.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert len((await encoding).token_ids) > 100_000
    # Tokenising takes seconds; where it holds the interpreter, a handful of turns get through.
    assert turns > 20


@pytest.mark.parametrize("prompt_len", [1, 40, 63])
async def test_a_context_exactly_full_runs_and_one_token_over_is_told_with_the_three_numbers(
    tiny_model: Path, prompt_len: int
) -> None:
    room = 64 - prompt_len
    async with batcher(tiny_model, max_model_len=64) as model:
        full = await generate(model, _asking([1] * prompt_len, room))
        assert (len(full.token_ids), full.finish_reason) == (room, "length")
        with pytest.raises(JobFailed) as caught:
            await generate(model, _asking([1] * prompt_len, room + 1))
    assert caught.value.error.code == ErrorCode.PROMPT_TOO_LONG
    for number in (prompt_len, room + 1, 64):
        assert re.search(rf"\b{number}\b", caught.value.error.message), number


async def test_a_job_too_long_among_others_is_one_error_and_loses_doubles_or_reorders_nobody(
    tiny_model: Path,
) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    jobs = [
        GenerationJob(prompt_token_ids=prompt, sampling=sampling)
        for prompt in ([5, 6], [1] * 64, [7, 8], [2] * 300, [9])
    ]
    async with batcher(tiny_model, max_model_len=64) as model:
        alone = [(await generate(model, job)).token_ids for job in jobs[::2]]
        answers = await asyncio.gather(
            *(generate(model, job) for job in jobs), return_exceptions=True
        )
    assert [isinstance(answer, JobFailed) for answer in answers] == [False, True] * 2 + [False]
    assert [a.token_ids for a in answers if isinstance(a, GenerationResult)] == alone


async def test_extreme_options_in_one_batch_kill_neither_the_engine_nor_a_neighbour(
    tiny_model: Path,
) -> None:
    extremes: list[dict[str, object]] = [
        *({"top_k": top_k} for top_k in (-1, 0, 1, 511, 512, 513, 10**9)),
        *({"logprobs": count} for count in (0, 1, 128)),
        *({"temperature": value} for value in (1e-300, 1e-46, 1e-3, 10)),
        *({"temperature": 1e-46, "top_k": top_k} for top_k in (0, 20)),
        {"repetition_penalty": 1e-44},
        {"min_p": 1},
        {"top_p": 1e-300},
    ]
    jobs = [
        GenerationJob(
            id=f"{i}",
            prompt_token_ids=[3, 4, i],
            sampling=SamplingParams(
                **{"temperature": 1, "seed": i, "max_tokens": 6, "ignore_eos": True, **options}  # type: ignore[arg-type]
            ),
        )
        for i, options in enumerate(extremes)
    ]
    async with batcher(tiny_model) as model:
        neighbour = _jobs()[1]
        alone = await generate(model, neighbour)
        beside, *results = await asyncio.gather(
            *(generate(model, job) for job in (neighbour, *jobs))
        )
        assert model.crashed.done() is False
    assert beside.token_ids == alone.token_ids
    assert all(len(result.token_ids) == 6 and max(result.token_ids) < 512 for result in results)


async def test_a_length_that_was_not_asked_for_is_what_there_is_room_for(
    tiny_model: Path,
) -> None:
    async with batcher(tiny_model, max_model_len=64) as model:
        job = GenerationJob(prompt_token_ids=[1] * 60, sampling=SamplingParams(ignore_eos=True))
        assert len((await generate(model, job)).token_ids) == 4
    async with batcher(tiny_model, kv_pages=4, page_size=16) as model:
        assert len((await generate(model, job)).token_ids) == 5, "the last needs no room"


async def test_a_job_larger_than_the_pool_is_refused_and_the_next_one_runs(
    tiny_model: Path,
) -> None:
    async with batcher(tiny_model, kv_pages=8, page_size=16) as model:
        prompt = [1] * 128
        with pytest.raises(JobFailed, match="KV cache of 8 pages"):
            await generate(model, _asking(prompt, 2))
        assert (await generate(model, _asking(prompt, 1))).usage.completion_tokens == 1


def _asking(prompt: list[int], max_tokens: int) -> GenerationJob:
    return GenerationJob(
        prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    )


async def test_end_tokens_stop_a_row_unless_it_ignores_them(tiny_model: Path) -> None:
    def job(*, ignore_eos: bool) -> GenerationJob:
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=ignore_eos)
        return GenerationJob(prompt_token_ids=[5, 6, 7], sampling=sampling)

    async with batcher(tiny_model) as model:
        tokens = (await generate(model, job(ignore_eos=True))).token_ids
        model.text.eos_token_ids = frozenset({tokens[0]})
        stopped = await generate(model, job(ignore_eos=False))
        assert (stopped.token_ids, stopped.finish_reason) == ([tokens[0]], "stop")
        assert (await generate(model, job(ignore_eos=True))).token_ids == tokens


async def test_timings_are_in_order(tiny_model: Path) -> None:
    async with batcher(tiny_model) as model:
        timings = (await generate(model, _jobs()[8])).timings
    assert 0 <= timings.queued_ms <= timings.first_token_ms <= timings.total_ms < 60_000


async def test_a_context_beyond_the_models_own_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ContractMismatch, match="max_model_len"):
        async with batcher(tiny_model, max_model_len=10**6):
            pass


async def test_a_missing_directory_is_named() -> None:
    with pytest.raises(ModelError, match="/no/such/model"):
        async with batcher(Path("/no/such/model")):
            pass
