"""Prompts to token ids, and token ids to text as they come."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import tidemill_worker
from tidemill_contracts.models.config import load_config
from tidemill_contracts.models.errors import CheckpointError
from tidemill_contracts.wire import ChatMessage, ErrorCode, GenerationJob, JobFailed
from tidemill_worker.text import TextModel

DEMO = Path(tidemill_worker.__file__).parent / "demo_model"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
TEXT = TextModel(DEMO, load_config(DEMO))

texts = st.text(st.characters(exclude_categories=["Cs"]))


def _model(tmp_path: Path, **files: object) -> TextModel:
    """The demo model's texts with some files replaced; ``None`` leaves one out."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path / name)
    shutil.copy(DEMO / "tokenizer.json", tmp_path / "tokenizer.json")
    for name, content in files.items():
        path = tmp_path / f"{name}.json"
        if content is None:
            path.unlink()
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return TextModel(tmp_path, load_config(tmp_path))


def _streamed(
    model: TextModel, ids: list[int], *, skip_special_tokens: bool = True
) -> tuple[list[str], str]:
    detokenizer = model.detokenizer(skip_special_tokens)
    assert detokenizer is not None
    pieces = [detokenizer.append(token_id) for token_id in ids]
    return pieces, detokenizer.finish()


@given(texts)
def test_text_goes_through_tokens_and_back(text: str) -> None:
    ids = TEXT.encode(GenerationJob(prompt=text + ".")).token_ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text + "."


@given(texts)
def test_pieces_concatenate_to_the_final_text(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    pieces, final = _streamed(TEXT, ids)
    assert "".join(pieces) == final
    assert final == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=30), st.booleans())
def test_any_tokens_give_the_text_that_the_tokenizer_gives(ids: list[int], skip: bool) -> None:
    # Random ids make broken UTF-8 of every kind.
    _, final = _streamed(TEXT, ids, skip_special_tokens=skip)
    assert final == TOKENIZER.decode(ids, skip_special_tokens=skip)


def test_a_character_that_spans_tokens_is_held_back_until_it_is_whole() -> None:
    ids = TOKENIZER.encode("a👩‍🚒b", add_special_tokens=False).ids
    assert len(ids) > 5, "the emoji spans tokens"
    pieces, final = _streamed(TEXT, ids)
    assert final == "a👩‍🚒b"
    assert not any("\ufffd" in piece for piece in pieces)
    cut, text = _streamed(TEXT, ids[:2])
    assert (cut[1], text) == ("", "a\ufffd")


def test_a_literal_replacement_character_does_not_stall_the_stream() -> None:
    ids = TOKENIZER.encode("x\ufffdy", add_special_tokens=False).ids
    pieces, _ = _streamed(TEXT, ids)
    assert "".join(pieces) == "x\ufffdy"


def test_special_tokens_are_left_out_and_thinking_tags_are_not() -> None:
    ids = TOKENIZER.encode("<think>a</think>b<|im_end|>", add_special_tokens=False).ids
    assert _streamed(TEXT, ids)[1] == "<think>a</think>b"
    kept = _streamed(TEXT, ids, skip_special_tokens=False)[1]
    assert kept == "<think>a</think>b<|im_end|>"


def test_ids_of_the_padded_vocabulary_have_no_text() -> None:
    assert _streamed(TEXT, [10**6])[1] == ""


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (GenerationJob(prompt=""), ErrorCode.EMPTY_PROMPT),
        (GenerationJob(prompt_token_ids=[]), ErrorCode.EMPTY_PROMPT),
        (GenerationJob(messages=[]), ErrorCode.EMPTY_PROMPT),
        (GenerationJob(prompt_token_ids=[1, TEXT.vocab_size]), ErrorCode.TOKEN_OUT_OF_RANGE),
    ],
)
def test_prompts_that_cannot_be_run_are_refused(job: GenerationJob, code: ErrorCode) -> None:
    with pytest.raises(JobFailed) as caught:
        TEXT.encode(job)
    assert caught.value.error.code == code


def test_whitespace_is_a_prompt() -> None:
    assert TEXT.encode(GenerationJob(prompt=" "))


def test_a_conversation_is_rendered_as_chatml() -> None:
    messages = [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="<b>1 & 2</b>"),
    ]
    assert TEXT.render(GenerationJob(messages=messages)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<b>1 & 2</b><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_without_a_tokenizer_token_ids_are_served_and_text_is_refused(tmp_path: Path) -> None:
    model = _model(tmp_path, tokenizer=None)
    assert model.encode(GenerationJob(prompt_token_ids=[1, 2])).token_ids == [1, 2]
    assert model.detokenizer() is None
    with pytest.raises(JobFailed, match="prompt_token_ids") as caught:
        model.encode(GenerationJob(prompt="hello"))
    assert caught.value.error.code == ErrorCode.NO_TOKENIZER
    with pytest.raises(JobFailed, match="bad_words") as caught:
        model.token_ids_of("hello")
    assert caught.value.error.code == ErrorCode.NO_TOKENIZER


@pytest.mark.parametrize("text", ["the", "hello", " the", "\n", "ž", "<think>", "1"])
def test_the_tokens_of_a_text_are_those_at_the_start_and_those_after_a_space(text: str) -> None:
    def encoded(text: str) -> list[int]:
        return list(TOKENIZER.encode(text, add_special_tokens=False).ids)

    found = TEXT.token_ids_of(text)
    assert found[0] == encoded(text)
    if not text[0].isspace():
        spaced = encoded(" " + text)
        assert any(spaced[-len(ids) :] == ids for ids in found), "barred after a space"
    assert len(found) == len({tuple(ids) for ids in found})
    assert all(TOKENIZER.decode(ids).strip(" ") == text.strip(" ") for ids in found)


def test_a_word_with_a_space_of_its_own_token_is_tokenised_both_ways() -> None:
    assert len(TEXT.token_ids_of("the")) == 2


def test_without_a_chat_template_conversations_are_refused(tmp_path: Path) -> None:
    model = _model(tmp_path, tokenizer_config={"eos_token": "<|im_end|>"})
    with pytest.raises(JobFailed, match="no chat template"):
        model.encode(GenerationJob(messages=[ChatMessage(role="user", content="x")]))


def test_a_template_that_refuses_says_why(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    model = _model(tmp_path, tokenizer_config={"chat_template": template})
    with pytest.raises(JobFailed, match="roles must alternate") as caught:
        model.encode(GenerationJob(messages=[ChatMessage(role="user", content="x")]))
    assert caught.value.error.code == ErrorCode.TEMPLATE_FAILED


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append('x') }}",
        "{% for i in range(99999999) %}x{% endfor %}",
    ],
)
def test_a_template_runs_in_a_sandbox(tmp_path: Path, template: str) -> None:
    model = _model(tmp_path, tokenizer_config={"chat_template": template})
    with pytest.raises(JobFailed) as caught:
        model.encode(GenerationJob(messages=[ChatMessage(role="user", content="x")]))
    assert caught.value.error.code == ErrorCode.TEMPLATE_FAILED


def test_end_tokens_are_the_union_of_what_the_files_say(tmp_path: Path) -> None:
    ids = {name: TOKENIZER.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")}
    config = json.loads((DEMO / "config.json").read_text())
    model = _model(
        tmp_path,
        config={**config, "eos_token_id": 7},
        generation_config={"eos_token_id": [ids["<|endoftext|>"], 9]},
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}},
    )
    assert model.eos_token_ids == {7, 9, *ids.values()}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"generation_config": "{"}, "generation_config.json"),
        ({"generation_config": {"temperature": "hot"}}, r"\$\.temperature"),
        ({"tokenizer_config": {"chat_template": "{% if %}"}}, "chat template is broken"),
        ({"tokenizer": "{}"}, "tokenizer.json"),
        ({"tokenizer": "[1]"}, "tokenizer.json"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, files: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        _model(tmp_path, **files)
