"""A job's log probabilities of its own prompt are those of `transformers`, whatever befalls it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.contracts.models.driver import small_config, small_model, small_moe_config
from tests.worker.served import batcher
from tidemill_contracts.models import runtime
from tidemill_contracts.models.errors import KVCacheLost
from tidemill_contracts.wire import (
    ErrorCode,
    GenerationJob,
    GenerationResult,
    JobFailed,
    SamplingParams,
)
from tidemill_worker.batcher import Batcher
from tidemill_worker.engine.pages import BlockTables
from tidemill_worker.engine.row import Row
from tidemill_worker.engine.scheduler import Chunk

VOCAB = 101
STEM = [random.Random(5).randrange(VOCAB) for _ in range(32)]
PROMPTS = [
    [*STEM[:length], *(random.Random(length).choices(range(VOCAB), k=tail))]
    for length, tail in ((0, 1), (0, 2), (0, 17), (32, 1), (32, 40), (20, 9), (32, 61))
]
LISTED = [3, 50]


@pytest.fixture(scope="module", params=[small_config, small_moe_config], ids=["dense", "moe"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config: Callable[..., dict[str, Any]] = request.param
    return small_model(tmp_path_factory.mktemp("models") / "small", seed=3, config=config)


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[Tensor]:
    """Of each prompt, float32 [its tokens but the last, vocabulary]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = [model(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in PROMPTS]
    return [of_prompt[:-1].log_softmax(dim=1) for of_prompt in logits]


def job(prompt: list[int], **sampling: Any) -> GenerationJob:
    options = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, **sampling}
    return GenerationJob(prompt_token_ids=prompt, sampling=SamplingParams(**options))


def jobs() -> list[GenerationJob]:
    return [job(prompt, prompt_logprobs=4, logprob_token_ids=LISTED) for prompt in PROMPTS]


async def generate(model: Batcher, asked: GenerationJob) -> GenerationResult:
    return await model.generate(asked, "job", time.time())


@dataclass
class Calls:
    """The places of each call of `score` from now on; the call of that number, if any, raises."""

    model: Batcher
    loses_at: int | None = None
    places: list[int] = field(default_factory=list)
    rows: set[Row] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._score = self.model.runner.score
        self.model.runner.score = self._count  # type: ignore[method-assign]

    def _count(self, chunks: Sequence[Chunk], tables: BlockTables) -> Tensor:
        self.places.append(sum(len(chunk.told) for chunk in chunks))
        self.rows.update(chunk.row for chunk in chunks if chunk.told)
        if len(self.places) == self.loses_at:
            raise KVCacheLost("planted restart")
        return self._score(chunks, tables)


def assert_told(result: GenerationResult, prompt: list[int], expected: Tensor) -> None:
    """Holds what a result tells of its prompt to the reference."""
    told = result.prompt_logprobs
    assert told is not None
    assert len(told) == len(prompt)
    assert told[0] is None
    for token, entry, reference in zip(prompt[1:], told[1:], expected, strict=True):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(reference[token]), abs=1e-4)
        values, ids = reference.topk(4)
        assert list(entry.top) == ids.tolist()
        assert list(entry.top.values()) == pytest.approx(values.tolist(), abs=1e-4)
        assert entry.listed == pytest.approx({t: float(reference[t]) for t in LISTED}, abs=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_rows": 1},
        {"max_rows": 4, "max_step_tokens": 7},
    ],
    ids=["one batch", "alone", "chunked"],
)
async def test_they_are_those_of_transformers(
    model_dir: Path, expected: list[Tensor], settings: dict[str, object]
) -> None:
    async with batcher(model_dir, **settings) as model:
        results = await asyncio.gather(*(generate(model, one) for one in jobs()))
        assert model._scheduler.pool.free == model._scheduler.pool.total
    for result, prompt, reference in zip(results, PROMPTS, expected, strict=True):
        assert_told(result, prompt, reference)
        assert result.usage.cached_tokens == 0


async def test_logits_that_would_take_too_much_memory_are_computed_a_few_at_a_time(
    model_dir: Path, expected: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "SCORED_LOGITS_BYTES", 5 * 4 * VOCAB)
    async with batcher(model_dir) as model:
        assert model.runner.max_logit_rows == 5
        results = await asyncio.gather(*(generate(model, one) for one in jobs()))
    for result, prompt, reference in zip(results, PROMPTS, expected, strict=True):
        assert_told(result, prompt, reference)


async def test_a_cached_prefix_is_told_of_all_the_same(
    model_dir: Path, expected: list[Tensor]
) -> None:
    async with batcher(model_dir, page_size=8) as model:
        await generate(model, job([*STEM, 1]))
        result = await generate(model, jobs()[-1])
        after = await generate(model, job([*PROMPTS[-1], 1]))
    assert_told(result, PROMPTS[-1], expected[-1])
    assert result.usage.cached_tokens == 0
    assert after.usage.cached_tokens == 88


async def test_who_does_not_ask_for_them_is_told_nothing_and_pays_nothing(model_dir: Path) -> None:
    async with batcher(model_dir) as model:
        calls = Calls(model)
        plain = await generate(model, job(PROMPTS[-1], logprobs=2, logprob_token_ids=LISTED))
        assert calls.places == []
        asked = await generate(model, job(PROMPTS[-1], prompt_logprobs=0))
        assert calls.places == [len(PROMPTS[-1])]
    assert plain.prompt_logprobs is None
    assert asked.logprobs is None
    assert asked.token_ids == plain.token_ids


async def test_outputs_of_one_job_are_told_of_their_prompt_once(
    model_dir: Path, expected: list[Tensor]
) -> None:
    options = msgspec.structs.asdict(jobs()[4].sampling)
    async with batcher(model_dir) as model:
        calls = Calls(model)
        result = await generate(model, job(PROMPTS[4], **{**options, "n": 3, "temperature": 1.0}))
    assert_told(result, PROMPTS[4], expected[4])
    assert len(result.outputs) == 3
    assert calls.places == [len(PROMPTS[4])]


async def test_what_was_told_before_a_preemption_is_not_told_again(
    model_dir: Path, expected: list[Tensor]
) -> None:
    # The first row grows while the second is in its prompt, and needs the pages that it has.
    settings = {"page_size": 4, "kv_pages": 21, "max_rows": 2, "max_step_tokens": 4}
    async with batcher(model_dir, **settings, max_wait_ms=1_000) as model:
        calls = Calls(model)
        growing, asking = job([1, 2], max_tokens=40), jobs()[4]
        _, result = await asyncio.gather(generate(model, growing), generate(model, asking))
    assert_told(result, PROMPTS[4], expected[4])
    (row,) = calls.rows
    assert row.preemptions == 1
    assert sum(calls.places) == len(PROMPTS[4])


async def test_what_was_told_before_the_cache_was_lost_is_not_told_again(
    model_dir: Path, expected: list[Tensor]
) -> None:
    async with batcher(model_dir, max_rows=1, max_step_tokens=10) as model:
        calls = Calls(model, loses_at=4)
        result = await generate(model, jobs()[4])
    assert_told(result, PROMPTS[4], expected[4])
    # 72 tokens, 10 at a time; the fourth call is made again after the first 30 are recomputed.
    assert calls.places == [10] * 8 + [2]


async def _refused(model: Batcher, asked: GenerationJob) -> JobFailed:
    neighbour = asyncio.create_task(generate(model, job([5], max_tokens=20)))
    with pytest.raises(JobFailed) as caught:
        await generate(model, asked)
    assert len((await neighbour).token_ids) == 20
    return caught.value


async def test_a_contract_that_cannot_tell_refuses_the_job_alone(model_dir: Path) -> None:
    async with batcher(model_dir) as model:
        served = model.runner.model
        stages = {phase: stage for phase, stage in served.stages.items() if phase != "score"}
        model.runner.model = replace(served, stages=stages)
        error = (await _refused(model, jobs()[2])).error
    assert error.code == ErrorCode.NOT_SUPPORTED
    assert "qwen3/" in error.message
    assert "`prompt_logits`" in error.message
    assert "`$.sampling.prompt_logprobs`" in error.message


async def test_a_result_that_would_be_too_large_is_refused_before_it_is_computed(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = jobs()[4]
    async with batcher(model_dir) as model:
        monkeypatch.setattr("tidemill_contracts.wire.job.MAX_PROMPT_LOGPROBS", 72 * 7 - 1)
        error = (await _refused(model, asked)).error
        monkeypatch.setattr("tidemill_contracts.wire.job.MAX_PROMPT_LOGPROBS", 72 * 7)
        assert (await generate(model, asked)).prompt_logprobs
    assert error.code == ErrorCode.INVALID_JOB
    assert "72 prompt tokens with 7 log probabilities each are more than the 503" in error.message
