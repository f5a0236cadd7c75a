"""Thoughts: which tokens they are, which field they come back in, and the budget that ends them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tidemill_worker
from tidemill_contracts.models.config import load_config
from tidemill_contracts.wire import (
    ErrorCode,
    GenerationJob,
    GenerationResult,
    JobFailed,
    convert_job,
)
from tidemill_worker.batcher import Batcher
from tidemill_worker.chat import CLOSING_SENTENCE, split
from tidemill_worker.engine.engine import Engine
from tidemill_worker.engine.pages import BlockTables, PagePool
from tidemill_worker.engine.row import Row
from tidemill_worker.engine.scheduler import Chunk, Scheduler
from tidemill_worker.engine.thinking import Thinking
from tidemill_worker.outputs import make_result, make_rows
from tidemill_worker.settings import make_config
from tidemill_worker.text import TextModel

DEMO = Path(tidemill_worker.__file__).parent / "demo_model"
VOCAB = 512
ENDINGS = {
    "opened by the prompt": "<|im_start|>assistant\n<think>\n",
    "opened by the model": "<|im_start|>assistant\n",
    "off": "<|im_start|>assistant\n<think>\n\n</think>\n\n",
}


def _model_dir(path: Path, ending: str, weights: Path | None = None) -> Path:
    """A model with the demo model's tokenizer and a template whose prompts end so."""
    path.mkdir()
    for file in (weights or DEMO).iterdir():
        (path / file.name).symlink_to(file)
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages[-1].content }}" + ending
    (path / "tokenizer_config.json").unlink(missing_ok=True)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if weights is not None:
        (path / "tokenizer.json").symlink_to(DEMO / "tokenizer.json")
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextModel]:
    root = tmp_path_factory.mktemp("models")
    found = {}
    for name, ending in ENDINGS.items():
        path = _model_dir(root / name.replace(" ", "-"), ending)
        found[name] = TextModel(path, load_config(path))
    return found


TEXT = TextModel(DEMO, load_config(DEMO))
assert TEXT.tokenizer is not None
TOKENIZER = TEXT.tokenizer


def _ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


THINK, END_THINK, EOS = _ids("<think>")[0], _ids("</think>")[0], _ids("<|im_end|>")[0]
CLOSING = _ids(CLOSING_SENTENCE)
THOUGHTS = _ids("so it is ")
ANSWER = _ids("It must be 42.<|im_end|>")


def writer(thoughts: int | None, *, opens: bool = False) -> Callable[[Sequence[int]], int]:
    """A model that thinks for so many tokens (``None``: it does not think) and then answers.

    It goes by what it has written, as a model does: a ``</think>`` that was forced upon it is
    followed by the answer too.
    """

    def following(output: Sequence[int]) -> int:
        if thoughts is None or END_THINK in output:
            start = 0 if thoughts is None else output.index(END_THINK) + 1
            place = sum(token not in _ids("\n") for token in output[start:])
            return ANSWER[min(place, len(ANSWER) - 1)]
        if opens and not output:
            return THINK
        place = len(output) - opens
        return END_THINK if place >= thoughts else THOUGHTS[place % len(THOUGHTS)]

    return following


class WriterRunner:
    """A runner whose logits favour what a writer writes next."""

    max_logit_rows = 1
    decodes_along = False

    def __init__(self, following: Callable[[Sequence[int]], int]) -> None:
        self._following = following

    def decode(self, rows: Sequence[Row], tables: BlockTables) -> Tensor:
        return torch.stack([self.logits(row.output_token_ids) for row in rows])

    def prefill(self, chunks: Sequence[Chunk], tables: BlockTables) -> Tensor:
        return torch.stack([self.logits(chunk.row.output_token_ids) for chunk in chunks])

    def score(self, chunks: Sequence[Chunk], tables: BlockTables) -> Tensor:
        raise NotImplementedError("no job here asks for log probabilities of its prompt")

    def logits(self, output: Sequence[int]) -> Tensor:
        logits = torch.linspace(0, 1, VOCAB)
        logits[self._following(output)] = 5.0
        return logits


def _job(budget: int | None = None, *, sampling: dict[str, Any] | None = None) -> GenerationJob:
    return convert_job(
        {
            "messages": [{"role": "user", "content": "What is 40 + 2?"}],
            "chat": {"thinking_budget": budget},
            "sampling": {"temperature": 0, "max_tokens": 500, **(sampling or {})},
        }
    )


def _run(text: TextModel, following: Callable[[Sequence[int]], int], job: GenerationJob) -> Any:
    """The job's result, generated by an engine over a writer."""
    delivered: list[Row] = []
    scheduler = Scheduler(PagePool(512, 4), max_rows=4, max_step_tokens=64, max_model_len=2_000)
    engine = Engine(WriterRunner(following), scheduler, delivered.extend, check_integrity=True)
    prompt = text.encode(job)
    max_tokens = job.sampling.max_tokens or 500
    rows = make_rows(job, "job", prompt, text, max_tokens=max_tokens, enqueued_at=0.0)
    for row in rows:
        scheduler.add(row)
    while scheduler.has_work:
        engine.step()
    return make_result(job, "job", "demo", prompt, rows)


THINKING = ["opened by the prompt", "opened by the model"]


@pytest.mark.parametrize("budget", [0, 1, 32])
@pytest.mark.parametrize("kind", THINKING)
def test_a_budget_that_is_used_up_ends_the_thoughts_and_an_answer_follows(
    models: dict[str, TextModel], kind: str, budget: int
) -> None:
    opens = kind == "opened by the model"
    result = _run(models[kind], writer(400, opens=opens), _job(budget))
    thoughts = [THOUGHTS[i % len(THOUGHTS)] for i in range(budget)]
    assert result.token_ids == [*([THINK] if opens else []), *thoughts, *CLOSING, *ANSWER]
    closing = CLOSING_SENTENCE.removesuffix("\n</think>\n\n")
    assert result.reasoning == (TOKENIZER.decode(thoughts) + closing).strip("\n")
    assert result.content == "It must be 42."
    assert result.finish_reason == "stop"
    assert result.thinking_truncated
    assert result.usage.reasoning_tokens == budget + CLOSING.index(END_THINK)
    assert result.usage.completion_tokens == len(result.token_ids)


@pytest.mark.parametrize("budget", [20, 21, 1_000])
@pytest.mark.parametrize("kind", THINKING)
def test_a_budget_that_is_not_used_up_changes_nothing(
    models: dict[str, TextModel], kind: str, budget: int
) -> None:
    following = writer(20, opens=kind == "opened by the model")
    options = {"max_tokens": 1_200}
    free, bound = (_run(models[kind], following, _job(b, sampling=options)) for b in (None, budget))
    assert bound.token_ids == free.token_ids
    assert (bound.content, bound.thinking_truncated) == ("It must be 42.", False)
    assert bound.usage.reasoning_tokens == 20


@pytest.mark.parametrize("budget", [0, 1, 400])
@pytest.mark.parametrize("kind", ["off", "opened by the model"])
def test_a_budget_does_nothing_where_the_model_does_not_think(
    models: dict[str, TextModel], kind: str, budget: int
) -> None:
    result = _run(models[kind], writer(None), _job(budget))
    assert result.token_ids == ANSWER
    assert (result.reasoning, result.content) == (None, "It must be 42.")
    assert (result.usage.reasoning_tokens, result.thinking_truncated) == (0, False)


@pytest.mark.parametrize("max_tokens", [5, 500])
@pytest.mark.parametrize("kind", ENDINGS)
def test_cut_thoughts_are_not_shown_as_content_nor_an_answer_as_reasoning(
    models: dict[str, TextModel], kind: str, max_tokens: int
) -> None:
    opens = kind == "opened by the model"
    following = writer(None if kind == "off" else 20, opens=opens)
    result = _run(models[kind], following, _job(sampling={"max_tokens": max_tokens}))
    cut = max_tokens == 5
    assert result.finish_reason == ("length" if cut else "stop")
    if kind == "off":
        assert result.reasoning is None
        assert result.content == (TOKENIZER.decode(ANSWER[:5]) if cut else "It must be 42.")
        assert result.usage.reasoning_tokens == 0
        return
    written = 5 - opens if cut else 20
    thoughts = [THOUGHTS[i % len(THOUGHTS)] for i in range(written)]
    assert result.reasoning == TOKENIZER.decode(thoughts)
    assert result.content == ("" if cut else "It must be 42.")
    assert result.usage.reasoning_tokens == written
    assert not result.thinking_truncated, "max_tokens is no budget"


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 10.0},
        {"logit_bias": {END_THINK: -100.0, THINK: 100.0}},
        {"allowed_token_ids": [*THOUGHTS, *ANSWER]},
        {"bad_words": ["limited time", "user", "</think>"]},
        {"min_tokens": 400, "max_tokens": 450},
        {"temperature": 0.5, "seed": 3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_no_option_keeps_the_closing_sentence_from_being_written(
    models: dict[str, TextModel], options: dict[str, Any]
) -> None:
    result = _run(models["opened by the prompt"], writer(400), _job(8, sampling=options))
    assert result.token_ids[8 : 8 + len(CLOSING)] == CLOSING
    assert result.thinking_truncated
    assert result.token_ids[8 + len(CLOSING) :]


def test_options_that_bar_every_token_fail_a_row_but_not_in_its_closing_sentence(
    models: dict[str, TextModel],
) -> None:
    # The one word is barred after itself, so that nothing is left for the second token.
    options = {"allowed_token_ids": THOUGHTS[:1], "bad_words": [TOKENIZER.decode(THOUGHTS[:1])]}
    with pytest.raises(JobFailed, match="bar every token"):
        _run(models["opened by the prompt"], writer(400), _job(sampling=options))
    with pytest.raises(JobFailed, match="bar every token"):
        _run(models["opened by the prompt"], writer(400), _job(0, sampling=options))
    options["max_tokens"] = len(CLOSING) + 1
    options["stop_token_ids"] = CLOSING[-1:]
    assert _run(models["opened by the prompt"], writer(400), _job(0, sampling=options))


def test_log_probabilities_of_forced_tokens_are_the_models_own(
    models: dict[str, TextModel],
) -> None:
    following = writer(400)
    options = {"logprobs": 1, "logit_bias": {THOUGHTS[0]: 100.0}, "max_tokens": 90}
    result = _run(models["opened by the prompt"], following, _job(0, sampling=options))
    assert result.token_ids[: len(CLOSING)] == CLOSING
    assert len(result.logprobs) == len(result.token_ids)
    runner = WriterRunner(following)
    for place, (token, told) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        expected = runner.logits(result.token_ids[:place]).log_softmax(0)
        assert told.logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert list(told.top) == [following(result.token_ids[:place])]


@pytest.mark.parametrize(
    ("options", "stop_reason", "content"),
    [
        ({"stop": ["it is"]}, "it is", ""),
        ({"stop": "limited time"}, "limited time", ""),
        ({"stop": "</think>"}, "</think>", ""),
        ({"stop": ["2."]}, "2.", "It must be 4"),
        ({"stop": ["2."], "include_stop_str_in_output": True}, "2.", "It must be 42."),
        ({"stop_token_ids": [END_THINK]}, END_THINK, ""),
        ({"stop_token_ids": THOUGHTS[3:4]}, THOUGHTS[3], ""),
    ],
)
def test_stops_count_in_thoughts_and_closing_sentence_as_in_the_answer(
    models: dict[str, TextModel], options: dict[str, Any], stop_reason: str | int, content: str
) -> None:
    result = _run(models["opened by the prompt"], writer(400), _job(9, sampling=options))
    assert (result.finish_reason, result.stop_reason) == ("stop", stop_reason)
    assert result.content == content
    shown = result.text + result.reasoning
    if isinstance(stop_reason, str) and not options.get("include_stop_str_in_output"):
        assert stop_reason not in shown, "neither the stop text nor what follows it leaks"
    if "stop_token_ids" in options:
        assert result.token_ids[-1] == options["stop_token_ids"][0]


def test_a_loop_in_the_thoughts_is_still_found(models: dict[str, TextModel]) -> None:
    options = {"repetition_detection": {"max_pattern": 16, "min_count": 3}}
    result = _run(models["opened by the prompt"], writer(400), _job(300, sampling=options))
    assert result.finish_reason == "repetition"
    assert result.usage.reasoning_tokens == 3 * len(THOUGHTS)
    assert (result.content, result.thinking_truncated) == ("", False)


def test_every_output_has_a_budget_of_its_own(models: dict[str, TextModel]) -> None:
    result = _run(models["opened by the prompt"], writer(400), _job(7, sampling={"n": 3}))
    assert [output.content for output in result.outputs] == ["It must be 42."] * 3
    assert all(output.thinking_truncated for output in result.outputs)
    assert result.usage.reasoning_tokens == 3 * (7 + CLOSING.index(END_THINK))


def test_a_length_without_room_for_an_answer_after_the_budget_is_refused(
    models: dict[str, TextModel],
) -> None:
    text = models["opened by the prompt"]
    least = 10 + len(CLOSING) + 1
    fits = _run(text, writer(400), _job(10, sampling={"max_tokens": least}))
    assert (fits.content, fits.finish_reason) == (TOKENIZER.decode(ANSWER[:1]), "length")
    with pytest.raises(
        JobFailed, match=rf"^invalid_job: {least - 1} tokens leave no room"
    ) as caught:
        _run(text, writer(400), _job(10, sampling={"max_tokens": least - 1}))
    assert "`$.chat.thinking_budget`" in caught.value.error.message
    off = _run(models["off"], writer(None), _job(10, sampling={"max_tokens": 4}))
    assert off.usage.completion_tokens == 4


def test_a_model_without_thinking_tokens_takes_no_budget(tmp_path: Path) -> None:
    path = _model_dir(tmp_path / "model", ENDINGS["opened by the model"])
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = tokenizer["added_tokens"][:-2]
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = TextModel(path, load_config(path))
    with pytest.raises(JobFailed, match="no tokens for <think>") as caught:
        _run(text, writer(None), _job(5))
    assert caught.value.error.code == ErrorCode.INVALID_JOB
    assert _run(text, writer(None), _job()).usage.reasoning_tokens == 0


tokens = st.sampled_from([THINK, END_THINK, *_ids("\n"), *_ids(" "), *_ids("x"), *THOUGHTS])


@given(st.lists(tokens, max_size=12), st.booleans())
def test_thoughts_by_token_are_the_thoughts_by_text(ids: list[int], is_open: bool) -> None:
    assert TEXT.think_tokens is not None
    thinking = Thinking(TEXT.think_tokens, is_open=is_open)
    thought = is_open
    for token_id in ids:
        assert thinking.settle(token_id) == token_id, "without a budget nothing is forced"
        thinking.append(token_id)
        thought = thought or thinking.open
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    reply = split(text, thinking_open=is_open)
    assert (reply.reasoning is not None) == thought
    if thought:
        assert thinking.open == ("</think>" not in text)
    assert thinking.may_open == (not thought and not text.strip())


@asynccontextmanager
async def _batcher(path: Path, **settings: object) -> AsyncIterator[Batcher]:
    config = make_config(
        {"model": str(path), "dtype": "float32", "threads": 1, "kv_pages": 256, **settings}
    )
    started = await Batcher.start(config)
    try:
        yield started
    finally:
        await started.close()


async def _all(model: Batcher, jobs: Iterable[GenerationJob]) -> list[GenerationResult]:
    now = time.time()
    return await asyncio.gather(*(model.generate(job, f"j{i}", now) for i, job in enumerate(jobs)))


def _real_jobs() -> list[GenerationJob]:
    """For random weights, which write no end of thoughts themselves: only a budget does."""
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "seed": 5, "top_k": 20},
        {"temperature": 1.5, "seed": 6, "frequency_penalty": 0.5},
    ]
    return [
        convert_job(
            {
                "messages": [{"role": "user", "content": f"What is {i} + {i}?" * (i % 4 + 1)}],
                "chat": {"thinking_budget": [0, 1, 9, 17][i % 4]},
                "sampling": {"max_tokens": 100, "ignore_eos": True, **options[i % 3]},
            }
        )
        for i in range(4)
    ]


async def test_thoughts_ended_by_a_budget_are_the_same_in_a_batch_preempted_or_chunked(
    tmp_path: Path, tiny_model: Path
) -> None:
    path = _model_dir(tmp_path / "model", ENDINGS["opened by the prompt"], tiny_model)
    jobs = _real_jobs()
    async with _batcher(path) as model:
        alone = [(await _all(model, [job]))[0] for job in jobs]
        for job, result in zip(jobs, alone, strict=True):
            budget = job.chat.thinking_budget
            assert budget is not None
            assert result.token_ids[budget : budget + len(CLOSING)] == CLOSING
            assert result.thinking_truncated
            assert result.content
        # What follows the sentence is what the model says to a prompt that holds it.
        first = alone[0]
        given = GenerationJob(
            prompt_token_ids=[*model.text.encode(jobs[0]).token_ids, *CLOSING],
            sampling=convert_job(
                {"prompt": "", "sampling": {"temperature": 0, "max_tokens": 20, "ignore_eos": True}}
            ).sampling,
        )
        [again] = await _all(model, [given])
        assert first.token_ids[len(CLOSING) :][:20] == again.token_ids
    for settings in ({"max_step_tokens": 8}, {"kv_pages": 34, "page_size": 8}):
        async with _batcher(path, **settings) as model:
            together = await _all(model, jobs)
        assert [r.token_ids for r in together] == [r.token_ids for r in alone], settings


async def test_a_length_left_open_is_for_the_answer_after_the_budget(
    tmp_path: Path, tiny_model: Path
) -> None:
    path = _model_dir(tmp_path / "model", ENDINGS["opened by the prompt"], tiny_model)
    job = convert_job(
        {
            "messages": [{"role": "user", "content": "1 + 1"}],
            "chat": {"thinking_budget": 12},
            "sampling": {"temperature": 0, "ignore_eos": True},
        }
    )
    async with _batcher(path, default_max_tokens=6) as model:
        prompt_len = len(model.text.encode(job).token_ids)
        [result] = await _all(model, [job])
    assert len(result.token_ids) == 12 + len(CLOSING) + 6
    # Where the context is too short for that, the thoughts end sooner; the answer has its token.
    room = len(CLOSING) + 5
    async with _batcher(path, default_max_tokens=6, max_model_len=prompt_len + room) as model:
        [result] = await _all(model, [job])
    assert result.token_ids[4 : 4 + len(CLOSING)] == CLOSING
    assert len(result.token_ids) == room
    async with _batcher(
        path, default_max_tokens=6, max_model_len=prompt_len + len(CLOSING)
    ) as model:
        with pytest.raises(JobFailed, match="leave no room for an answer"):
            await _all(model, [job])
