"""Rows that differ in every sampling option at once: each is what it is alone, and keeps its own.

On the demo model, which has texts, in float32, in a pool that is too small for all of them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tidemill_contracts.wire import (
    Completion,
    GenerationJob,
    GenerationResult,
    RepetitionDetection,
    SamplingParams,
    StructuredOutput,
)
from tidemill_worker.batcher import Batcher
from tidemill_worker.engine.row import Row
from tidemill_worker.settings import make_config
from tidemill_worker.text import TextModel

VOCABULARY = 512
PROMPTS = ["What is 2 + 3?", "Repeat: one two one two", "Say hello", "Count: 1 2 3 4"]
TEXTS = ["e", "1", " the", "on", "two", "3 4"]

OPTIONS: dict[str, Callable[[random.Random], Any]] = {
    "temperature": lambda rng: rng.choice([0, 0.3, 1, 2.0, 5]),
    "top_p": lambda rng: rng.choice([0.2, 0.8, 0.99]),
    "top_k": lambda rng: rng.choice([-1, 1, 3, 40, 10**9]),
    "min_p": lambda rng: rng.choice([0.01, 0.3, 1]),
    "seed": lambda rng: rng.randrange(2**63),
    "n": lambda rng: rng.choice([2, 3]),
    "presence_penalty": lambda rng: rng.choice([-1, 0.5, 2]),
    "frequency_penalty": lambda rng: rng.choice([-0.5, 0.5, 2]),
    "repetition_penalty": lambda rng: rng.choice([0.8, 1.3, 2]),
    "logit_bias": lambda rng: {rng.randrange(250): -100.0, rng.randrange(250, 490): 5},
    "allowed_token_ids": lambda rng: sorted(rng.sample(range(490), 200)),
    "bad_words": lambda rng: rng.sample(TEXTS, 2),
    "max_tokens": lambda rng: rng.randint(8, 24),
    "min_tokens": lambda rng: rng.randint(2, 8),
    "stop": lambda rng: rng.choice([rng.choice(TEXTS), rng.sample(TEXTS, 2)]),
    "stop_token_ids": lambda rng: rng.sample(range(490), 20),
    "include_stop_str_in_output": lambda _: True,
    "ignore_eos": lambda _: True,
    "repetition_detection": lambda _: RepetitionDetection(max_pattern=4, min_count=3),
    "structured": lambda _: StructuredOutput(regex=r"[a-z]{2,4}( [0-9]+)*"),
    "logprobs": lambda rng: rng.choice([0, 1, 5, 128]),
    "logprob_token_ids": lambda rng: rng.sample(range(VOCABULARY), 3),
    "prompt_logprobs": lambda rng: rng.choice([0, 2]),
    "skip_special_tokens": lambda _: False,
}


def _jobs() -> list[GenerationJob]:
    """32 jobs, each with about a third of the options."""
    rng = random.Random(11)
    jobs = []
    for i in range(32):
        given = {name: make(rng) for name, make in OPTIONS.items() if rng.random() < 0.35}
        # What is not seeded is not the same twice; and a form or a list bars most tokens already.
        given.setdefault("seed", i)
        given.setdefault("max_tokens", 20)
        if "structured" in given:
            given.pop("allowed_token_ids", None)
            given.pop("bad_words", None)
        jobs.append(
            GenerationJob(
                id=f"mixed-{i}",
                prompt=PROMPTS[i % 4] * rng.randint(1, 4),
                sampling=SamplingParams(**given),
            )
        )
    return jobs


@asynccontextmanager
async def _batcher(**settings: object) -> AsyncIterator[Batcher]:
    config = make_config({"model": "demo", "dtype": "float32", "threads": 1, **settings})
    model = await Batcher.start(config)
    try:
        yield model
    finally:
        await model.close()


async def _generate(model: Batcher, job: GenerationJob) -> GenerationResult:
    return await model.generate(job, job.id or "", time.time())


def _outputs(result: GenerationResult) -> list[Completion]:
    return list(result.outputs) or [result]


def _has(ids: list[int], sequence: list[int]) -> bool:
    length = len(sequence)
    return any(ids[at : at + length] == sequence for at in range(len(ids) - length + 1))


def _check_tokens(asked: SamplingParams, output: Completion, text: TextModel) -> None:
    ids = output.token_ids
    assert max(ids) < VOCABULARY
    if asked.allowed_token_ids is not None:
        assert set(ids) <= set(asked.allowed_token_ids)
    for word in asked.bad_words:
        assert not any(_has(ids, sequence) for sequence in text.token_ids_of(word)), word
    barred = {token_id for token_id, bias in asked.logit_bias.items() if bias == -100}
    assert not barred & set(ids)


def _check_end(asked: SamplingParams, output: Completion, text: TextModel) -> None:
    ids, reason, stop = output.token_ids, output.finish_reason, output.stop_reason
    assert asked.max_tokens is not None
    assert len(ids) <= asked.max_tokens
    ends = {*asked.stop_token_ids, *(() if asked.ignore_eos else text.eos_token_ids)}
    assert not ends & set(ids[:-1]), "an end token that did not end the row"
    least = min(asked.min_tokens, asked.max_tokens)
    if reason == "length":
        assert len(ids) == asked.max_tokens
    elif reason == "stop" and isinstance(stop, int):
        assert stop == ids[-1]
        assert stop in asked.stop_token_ids
        assert len(ids) > least
    elif reason == "stop" and stop is not None:
        assert stop in asked.stops
        assert len(ids) >= least
    elif reason == "repetition":
        watch = asked.repetition_detection
        assert watch is not None
        assert any(
            ids[-length * watch.min_count :] == ids[-length:] * watch.min_count
            for length in range(1, watch.max_pattern + 1)
        )
        assert len(ids) >= least
    else:
        assert (reason, stop) == ("stop", None), "by an end of sequence, or of a form"
        assert asked.structured or (ids[-1] in ends and len(ids) > least)


def _check_text(asked: SamplingParams, output: Completion, text: TextModel) -> None:
    assert output.text is not None
    assert text.tokenizer is not None
    whole = text.tokenizer.decode(output.token_ids, skip_special_tokens=asked.skip_special_tokens)
    if isinstance(output.stop_reason, str):
        assert whole.startswith(output.text)
        assert len(output.text) < len(whole) or asked.include_stop_str_in_output
        kept = output.text.endswith(output.stop_reason)
        assert kept == asked.include_stop_str_in_output
    elif output.finish_reason != "stop":
        assert output.text == whole
        if not asked.min_tokens:
            assert not any(stop in whole for stop in asked.stops)


def _check_logprobs(asked: SamplingParams, output: Completion) -> None:
    if asked.logprobs is None and not asked.logprob_token_ids:
        assert output.logprobs is None
        return
    assert output.logprobs is not None
    for token_id, told in zip(output.token_ids, output.logprobs, strict=True):
        assert told.logprob <= 0
        assert len(told.top) == (asked.logprobs or 0)
        assert list(told.listed) == asked.logprob_token_ids
        assert told.top.get(token_id, told.logprob) == told.logprob


def _assert_same(one: GenerationResult, other: GenerationResult) -> None:
    assert one.sampling == other.sampling
    for a, b in zip(_outputs(one), _outputs(other), strict=True):
        assert (a.token_ids, a.text) == (b.token_ids, b.text)
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        for told, also in zip(a.logprobs or [], b.logprobs or [], strict=True):
            assert told.logprob == pytest.approx(also.logprob, abs=1e-3)


async def test_32_rows_with_every_option_mixed_all_end_and_are_what_each_is_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = _jobs()
    async with _batcher(prefix_caching=False) as model:
        alone = [await _generate(model, job) for job in jobs]
    preempted: list[Row] = []
    async with _batcher(max_rows=24, max_step_tokens=64, page_size=2, kv_pages=150) as model:
        put_back = model._scheduler._put_back

        def noted(row: Row) -> None:
            preempted.append(row)
            put_back(row)

        monkeypatch.setattr(model._scheduler, "_put_back", noted)
        together = await asyncio.gather(*(_generate(model, job) for job in jobs))
        assert model._scheduler.pool.free == model._scheduler.pool.total
        text = model.text
    assert preempted, "this pool must preempt"

    reasons = set()
    for job, one, other in zip(jobs, alone, together, strict=True):
        _assert_same(one, other)
        asked = job.sampling
        assert len(_outputs(other)) == asked.n
        for output in _outputs(other):
            _check_tokens(asked, output, text)
            _check_end(asked, output, text)
            _check_text(asked, output, text)
            _check_logprobs(asked, output)
            reasons.add((output.finish_reason, type(output.stop_reason)))
    assert {("length", type(None)), ("stop", int), ("stop", str)} <= reasons
    assert "repetition" in {reason for reason, _ in reasons}


def test_the_mix_has_every_option_of_the_wire() -> None:
    plain = SamplingParams()
    for name in SamplingParams.__struct_fields__:
        different = [getattr(job.sampling, name) != getattr(plain, name) for job in _jobs()]
        assert sum(different) >= 4, name
