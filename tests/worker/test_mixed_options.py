"""Rows that differ in every sampling option at once: each is what it is alone, and keeps its own.

On the demo model, which has texts, in float32, in a pool that is too small for all of them. Every
fourth job is a chat whose thoughts a budget ends.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.tiny import write_demo_model
from tests.worker.mixed import (
    CHOICES,
    TEMPLATE,
    VOCABULARY,
    assert_same,
    mixed_jobs,
    outputs_of,
)
from tests.worker.served import batcher, generate
from tidemill_contracts.wire import (
    Completion,
    GenerationJob,
    GenerationResult,
    SamplingParams,
    StructuredOutput,
)
from tidemill_worker.chat import CLOSING_SENTENCE
from tidemill_worker.engine.row import Row
from tidemill_worker.text import TextModel


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


async def test_32_rows_with_every_option_mixed_all_end_and_are_what_each_is_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs = mixed_jobs()
    path = write_demo_model(tmp_path / "model", TEMPLATE)
    async with batcher(path, prefix_caching=False) as model:
        alone = [await generate(model, job) for job in jobs]
    preempted: list[Row] = []
    async with batcher(path, max_rows=24, max_step_tokens=64, page_size=2, kv_pages=150) as model:
        put_back = model._scheduler._put_back

        def noted(row: Row) -> None:
            preempted.append(row)
            put_back(row)

        monkeypatch.setattr(model._scheduler, "_put_back", noted)
        together = await asyncio.gather(*(generate(model, job) for job in jobs))
        assert model._scheduler.pool.free == model._scheduler.pool.total
        text = model.text
    assert preempted, "this pool must preempt"

    reasons, forms, truncated = set(), set(), set()
    for job, one, other in zip(jobs, alone, together, strict=True):
        assert_same(one, other)
        asked = job.sampling
        assert len(outputs_of(other)) == asked.n
        _check_prompt_logprobs(asked, other)
        for output in outputs_of(other):
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
        different = [getattr(job.sampling, name) != getattr(plain, name) for job in mixed_jobs()]
        assert sum(different) >= 4, name
    assert sum(job.chat.thinking_budget is not None for job in mixed_jobs()) >= 4
