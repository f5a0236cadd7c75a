"""One row's grammar: what may come next, before, in and after its thoughts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tidemill_worker
from tests.worker.engine.conftest import make_row
from tidemill_contracts.models.config import load_config
from tidemill_contracts.wire import (
    ErrorCode,
    GenerationJob,
    JobFailed,
    SamplingParams,
    StructuredOutput,
)
from tidemill_worker import structured as structured_module
from tidemill_worker.engine.grammar import RowGrammar, Stage, bar, masks
from tidemill_worker.structured import Grammars
from tidemill_worker.text import Prompt, TextModel

DEMO = Path(tidemill_worker.__file__).parent / "demo_model"
TEXT = TextModel(DEMO, load_config(DEMO))
EOS = 495


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(TEXT, threads=1)
    yield made
    made.close()


def _ids(text: str) -> list[int]:
    return TEXT.tokenise(text)


def _compile(grammars: Grammars, n: int = 1, **form: object) -> list[RowGrammar]:
    structured = StructuredOutput(**form)  # type: ignore[arg-type]
    job = GenerationJob(prompt="x", sampling=SamplingParams(n=n, structured=structured))
    return asyncio.run(grammars.for_rows(job, Prompt(token_ids=[1])))


def _allowed(grammar: RowGrammar, ends: set[int] | None = None) -> set[int]:
    logits = torch.zeros(2, TEXT.vocab_size)
    bar(logits, masks(len(logits), {1: (grammar, {EOS} if ends is None else ends)}))
    assert (logits[0] == 0).all(), "a row without a grammar"
    return set((logits[1] == 0).nonzero()[:, 0].tolist())


def _write(grammar: RowGrammar, text: str) -> None:
    for token_id in _ids(text):
        assert token_id in _allowed(grammar), text
        grammar.advance(token_id)


def test_the_end_may_come_exactly_where_the_form_is_complete(grammars: Grammars) -> None:
    (grammar,) = _compile(grammars, regex="a(bb)*")
    for written, complete in (("a", True), ("b", False), ("b", True)):
        assert EOS not in _allowed(grammar) or written == "b"
        _write(grammar, written)
        assert (EOS in _allowed(grammar)) is complete
        assert not grammar.over
    assert _allowed(grammar, {EOS, 7}) - _allowed(grammar, set()) == {EOS, 7}


def test_a_form_that_cannot_go_on_is_over(grammars: Grammars) -> None:
    (grammar,) = _compile(grammars, choice=["ab", "abc"])
    _write(grammar, "ab")
    assert not grammar.over
    _write(grammar, "c")
    assert grammar.finished
    assert grammar.error is None


def test_an_empty_form_is_over_before_it_begins(grammars: Grammars) -> None:
    (grammar,) = _compile(grammars, regex="(ab){0}")
    assert _allowed(grammar) == {EOS}
    assert grammar.over


def test_special_and_padded_tokens_are_never_part_of_a_form(grammars: Grammars) -> None:
    (grammar,) = _compile(grammars, regex="(.|\n)*")
    allowed = _allowed(grammar, set())
    assert not allowed & set(TEXT.special_token_ids)
    assert max(allowed) < len(TEXT.token_bytes) < TEXT.vocab_size
    assert set(_ids("<tool_call>")) <= allowed


def test_outputs_do_not_share_what_they_have_written(grammars: Grammars) -> None:
    first, second = _compile(grammars, n=2, regex="ab")
    _write(first, "ab")
    assert first.finished
    assert not second.finished
    _write(second, "ab")


def test_thoughts_are_free_but_do_not_end_the_output(grammars: Grammars) -> None:
    (grammar,) = _compile(grammars, regex="[0-9]+")
    grammar.stage = Stage.START
    digits = {i for i, raw in enumerate(TEXT.token_bytes) if raw.isdigit()}
    (think,), (end_think,) = _ids("<think>"), _ids("</think>")
    assert _allowed(grammar) == digits | {think}
    grammar.advance(think)
    assert not grammar.masks
    assert EOS in grammar.barred
    for token_id in _ids("Hm, 12 or 13? < /think> </thin"):
        grammar.advance(token_id)
    grammar.advance(end_think)
    newlines = {i for i, raw in enumerate(TEXT.token_bytes) if raw in (b"\n", b"\n\n")}
    assert _allowed(grammar) == digits | newlines
    grammar.advance(_ids("\n")[0])
    assert _allowed(grammar) == digits | set(_ids("\n"))
    grammar.advance(_ids("\n")[0])
    assert _allowed(grammar) == digits, "one blank line"
    grammar.advance(_ids("7")[0])
    assert _allowed(grammar) == digits | {EOS}


def test_an_answer_may_come_without_thoughts(grammars: Grammars) -> None:
    (grammar,) = _compile(grammars, regex="ab")
    grammar.stage = Stage.START
    _write(grammar, "ab")
    assert grammar.finished


def test_a_tag_that_is_spelt_out_ends_the_thoughts_too(grammars: Grammars) -> None:
    for after, error in ((">", False), (">\n", False), (">7", False), (">x", True)):
        (grammar,) = _compile(grammars, regex="[0-9]+")
        grammar.stage = Stage.THOUGHTS
        for raw in (b"so</", b"think", after.encode()):
            grammar._think(raw)
        assert (grammar.error is not None) is error
        assert grammar.stage is (Stage.GAP if after in (">", ">\n") else Stage.ANSWER)


def test_a_token_outside_the_form_is_an_error_of_the_job(grammars: Grammars) -> None:
    (grammar,) = _compile(grammars, regex="ab")
    row = make_row([1], grammar=grammar)
    row.append(_ids("x")[0], 0.0)
    assert row.error is not None
    assert row.error.code == ErrorCode.INVALID_GRAMMAR
    assert not row.error.retryable


def test_a_matcher_that_fails_in_a_mask_fails_its_row_only(grammars: Grammars) -> None:
    good, bad = _compile(grammars, n=2, regex="ab")
    bad.matcher.consume_tokens(_ids("x"))
    logits = torch.zeros(2, TEXT.vocab_size)
    bar(logits, masks(len(logits), {0: (bad, {EOS}), 1: (good, {EOS})}))
    assert (logits[0] == -torch.inf).all()
    assert bad.error is not None
    assert bad.over
    assert logits[1, _ids("a")[0]] == 0
    assert not good.over


def test_a_form_is_over_before_the_length_is(grammars: Grammars) -> None:
    (grammar,) = _compile(grammars, regex="aa")
    tokens = _ids("aa")
    row = make_row([1], len(tokens), grammar=grammar)
    for token_id in tokens:
        row.append(token_id, 0.0)
    assert row.finish_reason == "stop"


def test_what_was_compiled_or_refused_is_kept_for_a_while(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_module, "MAX_KEPT", 2)
    compiled: list[str] = []
    original = Grammars._compile

    def count(self: Grammars, structured: StructuredOutput, *rest: object) -> object:
        compiled.append(structured.source)
        return original(self, structured, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Grammars, "_compile", count)
    for regex in ("a", "a", "(b", "(b", "a", "c", "a", "(b"):
        try:
            _compile(grammars, regex=regex)
        except JobFailed:
            assert regex == "(b"
    assert compiled == ["a", "(b", "c", "(b"], "the least recently used one goes"


def test_a_trial_that_dies_is_started_anew(grammars: Grammars) -> None:
    _compile(grammars, regex="a")
    process = grammars._trial._process
    assert process is not None
    process.kill()
    process.wait()
    _compile(grammars, regex="b")
    assert grammars._trial._process is not process


def test_bits_are_read_lowest_first() -> None:
    logits = torch.arange(70, dtype=torch.float32)[None]
    bits = torch.tensor([[1 | 1 << 31 | -(2**31), 0, 1 << 4]], dtype=torch.int64)
    bar(logits, bits.to(torch.int32).numpy())
    assert logits[logits > -torch.inf].tolist() == [0, 31, 68]
