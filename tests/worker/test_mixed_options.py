"""Rows that differ in every sampling option at once: each is what it is alone, and keeps its own.

On the demo model, which has texts, in float32, in a pool that is too small for all of them. Every
fourth job is a chat whose thoughts a budget ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import write_demo_model
from tidemill_contracts.wire import (
    ChatMessage,
    ChatOptions,
    Completion,
    GenerationJob,
    GenerationResult,
    RepetitionDetection,
    SamplingParams,
    StructuredOutput,
)
from tidemill_worker.batcher import Batcher
from tidemill_worker.chat import CLOSING_SENTENCE
from tidemill_worker.engine.row import Row
from tidemill_worker.settings import make_config
from tidemill_worker.text import TextModel

VOCABULARY = 512
TEMPLATE = "{{ messages[-1].content }}<|im_start|>assistant\n<think>\n"
PROMPTS = ["What is 2 + 3?", "Repeat: one two one two", "Say hello", "Count: 1 2 3 4"]
TEXTS = ["e", "1", " the", "on", "two", "3 4"]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["n", "ok"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no 3 4", "žluť 👩‍🚒"]
FORMS = [
    StructuredOutput(regex=r"[a-z]{2,4}( [0-9]{1,2})?"),
    StructuredOutput(json_schema=SCHEMA),
    StructuredOutput(json_object=True),
    StructuredOutput(choice=CHOICES),
    StructuredOutput(grammar='start: "(" NUMBER ")"\nNUMBER: /[0-9]{1,3}/'),
]

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
    "structured": lambda _: FORMS[0],
    "logprobs": lambda rng: rng.choice([0, 1, 5, 128]),
    "logprob_token_ids": lambda rng: rng.sample(range(VOCABULARY), 3),
    "prompt_logprobs": lambda rng: rng.choice([0, 2]),
    "skip_special_tokens": lambda _: False,
}


def _jobs() -> list[GenerationJob]:
    """32 jobs, each with about a third of the options."""
    rng = random.Random(11)
    forms = zip(itertools.cycle(FORMS), itertools.cycle((True, False)), strict=True)
    jobs = []
    for i in range(32):
        given = {name: make(rng) for name, make in OPTIONS.items() if rng.random() < 0.35}
        # What is not seeded is not the same twice; and a form or a list bars most tokens already.
        given.setdefault("seed", i)
        given.setdefault("max_tokens", 20)
        if "structured" in given:
            given.pop("allowed_token_ids", None)
            given.pop("bad_words", None)
            given["max_tokens"] += 20
            given["structured"], may_be_cut = next(forms)
            if not may_be_cut:
                given.pop("stop", None)
                given.pop("stop_token_ids", None)
        text = PROMPTS[i % 4] * rng.randint(1, 4)
        fields: dict[str, Any] = {"prompt": text}
        if i % 4 == 3:
            given["max_tokens"] += 80  # for the budget, and the sentence that ends the thoughts
            budget = rng.choice([0, 2, 6])
            fields = {
                "messages": [ChatMessage(role="user", content=text)],
                "chat": ChatOptions(thinking_budget=budget),
            }
        jobs.append(GenerationJob(id=f"mixed-{i}", sampling=SamplingParams(**given), **fields))
    return jobs


@asynccontextmanager
async def _batcher(path: Path, **settings: object) -> AsyncIterator[Batcher]:
    config = make_config({"model": str(path), "dtype": "float32", "threads": 1, **settings})
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


def _encoded(text: TextModel, words: str) -> list[int]:
    assert text.tokenizer is not None
    return list(text.tokenizer.encode(words, add_special_tokens=False).ids)


def _forced(job: GenerationJob, output: Completion, text: TextModel) -> range:
    """The places of the tokens that were not the model's to choose: those of the sentence that
    ends thoughts of more tokens than the job's budget."""
    budget, ids = job.chat.thinking_budget, output.token_ids
    if budget is None:
        assert not output.thinking_truncated
        return range(0)
    if not output.thinking_truncated:
        (end,) = _encoded(text, "</think>")
        thoughts = ids.index(end) if end in ids else len(ids)
        assert thoughts <= budget
        return range(0)
    closing = _encoded(text, CLOSING_SENTENCE)
    places = range(budget, min(budget + len(closing), len(ids)))
    assert ids[places.start : places.stop] == closing[: len(places)]
    return places


def _check_tokens(
    asked: SamplingParams, output: Completion, forced: range, text: TextModel
) -> None:
    ids = output.token_ids
    assert max(ids) < VOCABULARY
    for chosen in (ids[: forced.start], ids[forced.stop :]):
        if asked.allowed_token_ids is not None:
            assert set(chosen) <= set(asked.allowed_token_ids)
        for word in asked.bad_words:
            assert not _has(chosen, _encoded(text, word)), word
            assert not _has(chosen, _encoded(text, " " + word)), word
        barred = {token_id for token_id, bias in asked.logit_bias.items() if bias == -100}
        assert not barred & set(chosen)


def _ends(asked: SamplingParams, text: TextModel) -> set[int]:
    return {*asked.stop_token_ids, *(() if asked.ignore_eos else text.eos_token_ids)}


def _check_end(asked: SamplingParams, output: Completion, forced: range, text: TextModel) -> None:
    ids, reason, stop = output.token_ids, output.finish_reason, output.stop_reason
    assert asked.max_tokens is not None
    assert len(ids) <= asked.max_tokens
    ends = _ends(asked, text)
    least = min(asked.min_tokens, asked.max_tokens)
    for place, token_id in enumerate(ids[:-1]):
        ended = token_id in ends and not (place in forced and place < least)
        assert not ended, "an end token that did not end the row"
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
    ids = output.token_ids
    if output.finish_reason == "stop" and ids[-1] in _ends(asked, text):
        ids = ids[:-1]  # the token that ends an output is no part of its text
    whole = text.tokenizer.decode(ids, skip_special_tokens=asked.skip_special_tokens)
    if not isinstance(output.stop_reason, str):
        assert output.text == whole
        if not asked.min_tokens:
            assert not any(stop in whole for stop in asked.stops)
        return
    assert whole.startswith(output.text)
    before = output.text
    if asked.include_stop_str_in_output:
        assert before.endswith(output.stop_reason)
        before = before.removesuffix(output.stop_reason)
    assert whole.startswith(before + output.stop_reason)
    if not asked.min_tokens:
        assert not any(stop in before for stop in asked.stops)


def _check_form(form: StructuredOutput, text: str, *, whole: bool) -> None:
    """`text` has this form; where it is not `whole`, it may be the beginning of one that has."""
    if form.regex is not None:
        cut = r"[a-z]{0,4}|[a-z]{2,4} [0-9]{0,2}"
        assert re.fullmatch(form.regex if whole else cut, text)
    elif form.choice is not None:
        # A character that was cut is no beginning of one.
        assert (
            text in CHOICES
            if whole
            else any(choice.startswith(text.rstrip("\ufffd")) for choice in CHOICES)
        )
    elif form.grammar is not None:
        assert re.fullmatch(r"\([0-9]{1,3}\)" if whole else r"(\([0-9]{0,3}\)?)?", text)
    elif not whole:
        assert text[:1] in ("", "{")
    else:
        value = json.loads(text)
        assert isinstance(value, dict)
        if form.json_schema is not None:
            assert list(value) == ["n", "ok"]
            assert type(value["n"]) is int
            assert 0 <= value["n"] <= 99
            assert type(value["ok"]) is bool


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


def _check_prompt_logprobs(asked: SamplingParams, result: GenerationResult) -> None:
    if asked.prompt_logprobs is None:
        assert result.prompt_logprobs is None
        return
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == result.usage.prompt_tokens
    first, *others = result.prompt_logprobs
    assert first is None, "nothing comes before it"
    for told in others:
        assert told is not None
        assert told.logprob <= 0
        assert len(told.top) == asked.prompt_logprobs
        assert list(told.listed) == asked.logprob_token_ids


def _assert_same(one: GenerationResult, other: GenerationResult) -> None:
    assert one.sampling == other.sampling
    for a, b in zip(_outputs(one), _outputs(other), strict=True):
        assert (a.token_ids, a.text) == (b.token_ids, b.text)
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        assert (a.reasoning, a.content) == (b.reasoning, b.content)
        for told, also in zip(a.logprobs or [], b.logprobs or [], strict=True):
            assert told.logprob == pytest.approx(also.logprob, abs=1e-3)
    prompts = (result.prompt_logprobs or [None] for result in (one, other))
    for place, also_place in zip(*prompts, strict=True):
        if place is not None and also_place is not None:
            assert place.logprob == pytest.approx(also_place.logprob, abs=1e-3)


async def test_32_rows_with_every_option_mixed_all_end_and_are_what_each_is_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs = _jobs()
    path = write_demo_model(tmp_path / "model", TEMPLATE)
    async with _batcher(path, prefix_caching=False) as model:
        alone = [await _generate(model, job) for job in jobs]
    preempted: list[Row] = []
    async with _batcher(path, max_rows=24, max_step_tokens=64, page_size=2, kv_pages=150) as model:
        put_back = model._scheduler._put_back

        def noted(row: Row) -> None:
            preempted.append(row)
            put_back(row)

        monkeypatch.setattr(model._scheduler, "_put_back", noted)
        together = await asyncio.gather(*(_generate(model, job) for job in jobs))
        assert model._scheduler.pool.free == model._scheduler.pool.total
        text = model.text
    assert preempted, "this pool must preempt"

    reasons, forms, truncated = set(), set(), set()
    for job, one, other in zip(jobs, alone, together, strict=True):
        _assert_same(one, other)
        asked = job.sampling
        assert len(_outputs(other)) == asked.n
        _check_prompt_logprobs(asked, other)
        for output in _outputs(other):
            forced = _forced(job, output, text)
            _check_tokens(asked, output, forced, text)
            _check_end(asked, output, forced, text)
            _check_text(asked, output, text)
            _check_logprobs(asked, output)
            reasons.add((output.finish_reason, type(output.stop_reason)))
            written = output.text if job.messages is None else output.content
            if asked.structured and written:
                whole = (output.finish_reason, output.stop_reason) == ("stop", None)
                _check_form(asked.structured, written, whole=whole)
                forms.add((asked.structured.kind, whole))
            truncated.add(output.thinking_truncated)
    assert {("length", type(None)), ("stop", int), ("stop", str)} <= reasons
    assert "repetition" in {reason for reason, _ in reasons}
    assert {(kind, True) for kind in ("regex", "choice", "grammar", "json_schema")} <= forms
    assert {whole for _, whole in forms} == truncated == {True, False}


def test_the_mix_has_every_option_of_the_wire() -> None:
    plain = SamplingParams()
    for name in SamplingParams.__struct_fields__:
        different = [getattr(job.sampling, name) != getattr(plain, name) for job in _jobs()]
        assert sum(different) >= 4, name
    assert sum(job.chat.thinking_budget is not None for job in _jobs()) >= 4
