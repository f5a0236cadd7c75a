"""Stop texts over token borders, and outputs that repeat themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.engine.conftest import make_row
from tidemill_worker.engine.detokenizer import Detokenizer
from tidemill_worker.engine.output import OutputText, Repetition

# One token a byte, so that a text can be cut anywhere.
BYTES = [bytes([value]) for value in range(256)]


def _written(
    pieces: list[bytes], stops: list[str], *, include_stop: bool = False
) -> tuple[str, str | None, int]:
    """The final text, the stop text that ended it, and how many tokens were read."""
    table = sorted(set(pieces))
    text = OutputText(Detokenizer(table), stops, include_stop=include_stop)
    for count, piece in enumerate(pieces, start=1):
        stop = text.append(table.index(piece))
        if stop is not None:
            return text.finish(), stop, count
    return text.finish(), None, len(pieces)


def _cuts(text: str, every: int) -> list[bytes]:
    raw = text.encode()
    return [raw[i : i + every] for i in range(0, len(raw), every)]


@pytest.mark.parametrize("every", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_text_over_token_borders_ends_the_text_where_it_begins(
    every: int, include_stop: bool
) -> None:
    text, stop, _ = _written(
        _cuts("the brown fox jumps", every), ["own fox"], include_stop=include_stop
    )
    assert stop == "own fox"
    assert text == ("the brown fox" if include_stop else "the br")


@pytest.mark.parametrize("every", [1, 2, 4])
def test_of_two_stop_texts_the_one_that_begins_first_counts(every: int) -> None:
    assert _written(_cuts("abcdef", every), ["cd", "b"])[:2] == ("a", "b")
    assert _written(_cuts("xabcx", 5), ["abc", "ab"])[:2] == ("x", "ab")


def test_a_stop_text_of_one_character_and_one_at_the_very_last_token() -> None:
    assert _written(_cuts("hello", 1), ["o"]) == ("hell", "o", 5)
    assert _written(_cuts("hello", 1), ["h"]) == ("", "h", 1)


def test_a_stop_text_inside_a_character_that_spans_tokens() -> None:
    assert _written(_cuts("ab👩‍🚒cd", 1), ["🚒"])[0] == "ab👩\u200d"


def test_what_only_begins_a_stop_text_stays() -> None:
    assert _written(_cuts("an unfinished sto", 1), ["stop"]) == ("an unfinished sto", None, 17)


@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_the_text_ends_before_the_first_stop_text_however_it_is_cut(
    text: str, stops: list[str], every: int
) -> None:
    # One character at a time: the stop text that is complete first, and of those the longest way
    # back, is the one that begins first among the complete ones.
    written, stop, count = _written(_cuts(text, every), stops)
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if not ends:
        assert (written, stop) == (text, None)
        return
    assert stop is not None
    read = text[: count * every]
    assert min(ends) <= len(read) < min(ends) + every
    assert written == read[: min(read.find(s) for s in stops if s in read)]


def test_text_before_stopping_is_allowed_neither_holds_nor_begins_a_stop_text() -> None:
    text = OutputText(Detokenizer(BYTES), ["ab"])
    for char, may_stop in (("a", False), ("b", False), ("a", False), ("b", True)):
        assert text.append(ord(char), may_stop=may_stop) is None
    assert text.append(ord("a")) is None
    assert text.append(ord("b")) == "ab"
    assert text.finish() == "abab"


PIECES = [
    *(
        "own fox",
        "o",
        "wn",
        " fox",
        "</think>",
        "<think>",
        "x",
        "\n",
        "Příliš žluť",
        "汉字",
        "\ufffd",
    ),
    *("👩‍🚒", "stop here it"),
]


@given(
    st.lists(st.sampled_from(PIECES).map(str.encode) | st.binary(max_size=3), max_size=12),
    st.lists(st.sampled_from(["own fox", "o", "ow", "🚒", "\ufffd", "stop here it"]), max_size=3),
    st.booleans(),
    st.integers(1, 4),
    st.integers(0, 4),
)
def test_deltas_concatenate_to_the_final_text(
    pieces: list[bytes], stops: list[str], include_stop: bool, every: int, min_tokens: int
) -> None:
    raw = b"".join(pieces)
    table = sorted({raw[i : i + every] for i in range(0, len(raw), every)})
    text = OutputText(Detokenizer(table), stops, include_stop=include_stop)
    deltas = []
    for count, start in enumerate(range(0, len(raw), every), start=1):
        token_id = table.index(raw[start : start + every])
        stop = text.append(token_id, may_stop=count > min_tokens)
        deltas.append(text.take_delta())
        if stop is not None:
            break
    final = text.finish()
    assert final.startswith("".join(deltas))
    assert "".join(deltas) + text.take_delta(final=True) == final
    assert text.take_delta(final=True) == ""


def test_a_stop_text_held_back_splits_no_think_tag() -> None:
    pieces = [b"hm", b"</think>", b"stop", b" ", b"it"]
    text = OutputText(Detokenizer(pieces), ["stop here it"])
    deltas = []
    for token_id in range(len(pieces)):
        assert text.append(token_id) is None
        deltas.append(text.take_delta())
    assert deltas == ["hm", "</think>", "", "", "stop it"], "no more than its own beginning is held"


def test_memory_does_not_grow_with_the_text() -> None:
    text = OutputText(Detokenizer(BYTES), ["never"])
    for _ in range(10_000):
        text.append(ord("x"))
    assert len(text._tail) < 10


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1, 2, 3] * 4, True),
        ([9, 9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3], True),
        ([1, 2, 3] * 3 + [1, 2], False),
        ([1, 2, 3] * 3, False),
        ([5] * 4, True),
        ([5] * 3, False),
        ([1, 2, 3, 4, 5] * 4, False),
        ([1, 2, 3] * 4 + [7], False),
    ],
)
def test_a_pattern_of_up_to_four_tokens_four_times_is_a_repetition(
    tokens: list[int], found: bool
) -> None:
    repetition = Repetition(max_pattern=4, min_count=4)
    assert repetition.found([8, 8, 8, *tokens], 3) is found


def test_a_prompt_that_repeats_itself_is_none() -> None:
    assert not Repetition(max_pattern=4, min_count=4).found([5] * 10 + [5] * 3, 10)


def test_a_row_ends_by_what_comes_first() -> None:
    row = make_row([1], 10)
    row.text = OutputText(Detokenizer(BYTES), ["ab"])
    row.end_token_ids = frozenset({200})
    for token in b"xab":
        row.append(token, 0.0)
    assert (row.finish_reason, row.stop_reason) == ("stop", "ab")
    row = make_row([1], 3)
    row.text = OutputText(Detokenizer(BYTES), ["ab"])
    for token in b"xab":
        row.append(token, 0.0)
    assert (row.finish_reason, row.stop_reason) == ("stop", "ab"), "not length"
    row = make_row([1], 10)
    row.end_token_ids = frozenset({200})
    row.append(200, 0.0)
    assert (row.finish_reason, row.stop_reason) == ("stop", 200)
    row = make_row([1], 40)
    row.repetition = Repetition(max_pattern=2, min_count=3)
    for _ in range(3):
        row.append(7, 0.0)
    assert row.finish_reason == "repetition"
