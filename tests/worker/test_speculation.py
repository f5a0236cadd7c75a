"""Tokens that are guessed and computed ahead, on models with texts and every option of a job."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from tests.tiny import write_demo_model
from tests.worker.mixed import TEMPLATE, assert_same, mixed_jobs
from tests.worker.served import batcher, generate
from tidemill_contracts.wire import GenerationJob, SamplingParams, StructuredOutput
from tidemill_worker.batcher import Batcher
from tidemill_worker.engine.runner import ModelRunner

COPIED = '{"name": "Ada", "city": "Oslo", "id": 4711}'


@pytest.fixture(scope="module")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("models") / "demo", TEMPLATE)


@asynccontextmanager
async def _guessing(path: Path, **settings: object) -> AsyncIterator[Batcher]:
    """As many tokens are guessed as may be, however long steps take."""
    async with batcher(path, **{"speculate": 4, **settings}) as model:
        model._scheduler._speculator.price = lambda rows: 0.0  # type: ignore[method-assign]
        yield model


async def test_every_option_beside_guesses_is_what_it_is_without(
    demo_model: Path,
) -> None:
    jobs = mixed_jobs()
    async with batcher(demo_model, speculate=0, prefix_caching=False) as model:
        plain = await asyncio.gather(*(generate(model, job) for job in jobs))
        assert model.stats.draft_tokens == 0
    small: dict[str, object] = {"max_step_tokens": 64, "page_size": 2, "kv_pages": 150}
    async with _guessing(demo_model, max_rows=24, **small) as model:
        guessed = await asyncio.gather(*(generate(model, job) for job in jobs))
        assert model._scheduler.pool.free == model._scheduler.pool.total
        stats = model.stats
    for one, other in zip(plain, guessed, strict=True):
        assert_same(one, other)
        assert one.usage.draft_tokens == 0
    usage = [result.usage for result in guessed]
    assert sum(one.draft_tokens for one in usage) == stats.draft_tokens
    assert sum(one.accepted_draft_tokens for one in usage) == stats.accepted_draft_tokens
    assert 50 < stats.accepted_draft_tokens < stats.draft_tokens


async def test_what_is_copied_is_guessed_and_held_to_a_form_cut_and_told_of(
    demo_model: Path,
) -> None:
    asked = SamplingParams(
        temperature=0,
        seed=1,
        max_tokens=60,
        logprobs=2,
        structured=StructuredOutput(choice=[COPIED]),
    )
    whole = GenerationJob(prompt=f"{COPIED} {COPIED} ", sampling=asked)
    stopped = msgspec.structs.replace(asked, stop=["sl"])
    short = msgspec.structs.replace(asked, max_tokens=7)
    jobs = [
        whole,
        *(msgspec.structs.replace(whole, sampling=sampling) for sampling in (stopped, short)),
    ]
    async with batcher(demo_model, speculate=0) as model:
        plain = [await generate(model, job) for job in jobs]
        steps = model.stats.steps
    async with _guessing(demo_model) as model:
        guessed = [await generate(model, job) for job in jobs]
        assert model.stats.steps < 2 / 3 * steps
    for one, other in zip(plain, guessed, strict=True):
        assert_same(one, other)
        assert other.usage.accepted_draft_tokens > other.usage.completion_tokens / 3
    texts = [result.text for result in guessed]
    assert texts == [COPIED, COPIED.partition("sl")[0], texts[2]]
    assert guessed[1].stop_reason == "sl"
    assert guessed[2].usage.completion_tokens == 7


@pytest.mark.parametrize(("kernels", "dtype"), [("torch", "bfloat16"), ("torch", "float32")])
async def test_deterministic_mode_gives_the_same_bits_with_guesses(
    kernels: str, dtype: str
) -> None:
    rng = random.Random(3)
    jobs = [
        GenerationJob(
            id=str(n),
            prompt="Repeat: " + "one two three " * n,
            sampling=SamplingParams(
                temperature=n % 2,
                seed=rng.randrange(99),
                max_tokens=24,
                logprobs=3,
                ignore_eos=True,
            ),
        )
        for n in range(1, 7)
    ]
    settings: dict[str, object] = {"kernels": kernels, "dtype": dtype, "deterministic": True}
    async with batcher(Path("demo"), speculate=0, **settings) as model:
        plain = [await generate(model, job) for job in jobs]
    async with _guessing(Path("demo"), **settings) as model:
        guessed = await asyncio.gather(*(generate(model, job) for job in jobs))
    assert sum(result.usage.accepted_draft_tokens for result in guessed) > 0
    for one, other in zip(plain, guessed, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


async def test_nothing_is_guessed_unless_that_is_asked_for(tiny_model: Path) -> None:
    async with batcher(tiny_model) as model:
        assert model._scheduler._speculator.max_drafts == 0


async def test_a_contract_without_logits_of_all_places_is_not_guessed_for(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ModelRunner, "lacks", lambda self, phase: phase == "score")
    caplog.set_level(logging.INFO, "tidemill.worker")
    async with batcher(tiny_model, speculate=4) as model:
        job = GenerationJob(prompt_token_ids=[1, 2] * 8, sampling=SamplingParams(max_tokens=8))
        result = await generate(model, job)
    assert "lacks the capability `prompt_logits`" in caplog.text
    assert result.usage.draft_tokens == 0
