"""What is guessed of a row's next tokens, and when a guess is worth computing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.engine.conftest import make_row
from tidemill_worker.engine.drafter import MAX_MATCH, MAX_TRIED, MIN_MATCH, Drafter, Lookup
from tidemill_worker.engine.speculation import Speculator
from tidemill_worker.engine.steptime import StepCost, StepTimeModel


def _searched(tokens: Sequence[int], count: int) -> list[int]:
    """What a search through all of the tokens guesses."""

    def length(place: int) -> int:
        longest = min(MAX_MATCH, place)
        matching = [n for n in range(1, longest + 1) if tokens[place - n : place] == tokens[-n:]]
        return max(matching, default=0)

    places = [p for p in range(len(tokens) - 1, 0, -1) if length(p) >= MIN_MATCH][:MAX_TRIED]
    if not places:
        return []
    place = max(places, key=length)
    guess: list[int] = []
    for i in range(count):
        guess.append(
            tokens[place + i] if place + i < len(tokens) else guess[place + i - len(tokens)]
        )
    return guess


@given(
    first=st.lists(st.integers(0, 3), max_size=40),
    more=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), max_size=12),
    count=st.integers(0, 9),
)
def test_a_guess_is_what_a_search_through_all_tokens_gives(
    first: list[int], more: list[list[int]], count: int
) -> None:
    tokens = list(first)
    lookup = Lookup(tokens)
    assert lookup.guess(count) == _searched(tokens, count)
    for pieces in more:
        tokens += pieces
        assert lookup.guess(count) == _searched(tokens, count)


def test_pairs_of_large_token_ids_are_not_mixed_up() -> None:
    tokens = [1 << 20, 5, 7, 1 << 19, 5]
    assert Lookup(tokens).guess(1) == []
    assert Lookup([*tokens, 7, 1 << 20, 5]).guess(2) == [7, 1 << 19]


def test_a_loop_is_taken_to_go_on() -> None:
    assert Lookup([9, 1, 2, 3, 1, 2, 3, 1, 2]).guess(7) == [3, 1, 2, 3, 1, 2, 3]
    assert Lookup([4, 4, 4]).guess(3) == [4, 4, 4]


def test_of_equal_matches_the_latest_and_a_longer_one_before_any() -> None:
    assert Lookup([1, 2, 7, 1, 2, 8, 1, 2]).guess(1) == [8]
    assert Lookup([3, 1, 2, 7, 1, 2, 8, 3, 1, 2]).guess(1) == [7]


def test_the_hit_rate_is_learnt_from_guesses_whether_they_were_computed_or_not() -> None:
    looping, random_tokens = [1, 2, 3] * 3, [0, 1] * 4
    rng = random.Random(0)
    drafter, other = Drafter(looping), Drafter(random_tokens)
    for step in range(60):
        drafter.guess(4)
        looping.append(looping[-3])
        other.guess(4)
        random_tokens.append(rng.randrange(12))
        if step == 30:
            assert drafter.hit_rate > 0.9
    assert other.hit_rate < 0.3


def test_tokens_after_a_wrong_guess_say_nothing() -> None:
    tokens = [1, 2, 3, 4, 5, 1, 2]
    drafter = Drafter(tokens)
    assert drafter.guess(3) == [3, 4, 5]
    tokens += [3, 9]
    drafter.guess(3)
    # A quarter, three quarters on to one, and three quarters back to none.
    assert drafter.hit_rate == pytest.approx((1 / 4 + 1 / 4 * 3 / 4) * 3 / 4)


@pytest.mark.parametrize(
    ("cost", "rows", "hit_rate", "drafts"),
    [
        (None, 1, 1.0, 0),  # nothing is known yet
        (StepCost(0.0, 0.0, 0.04), 1, 0.1, 8),  # what costs nothing is always worth it
        (StepCost(0.0, 0.001, 0.039), 1, 0.5, 5),  # 1/32 > 1/40
        (StepCost(0.0, 0.001, 0.039), 32, 0.5, 1),  # a token saves 71/32 ms, one costs 1 ms
        (StepCost(0.0, 0.001, 0.039), 32, 0.9, 7),  # 0.9 to the 8th is less than 32/71
        (StepCost(0.0, 0.001, 0.039), 32, 0.4, 0),
        (StepCost(0.0, 0.001, 0.0), 8, 0.99, 0),  # each token costs what it saves
    ],
)
def test_as_many_guesses_as_pay(
    cost: StepCost | None, rows: int, hit_rate: float, drafts: int
) -> None:
    step_time = StepTimeModel()
    step_time.decode_cost = cost
    speculator = Speculator(step_time, 8, 64)
    row = make_row([1, 2, 3, 1, 2])
    row.drafter = Drafter(row.token_ids)
    row.drafter.hit_rate = hit_rate
    price = speculator.price(rows)
    assert len(speculator.draft(row, price, 99)) == drafts
    assert len(speculator.draft(row, price, 2)) == min(2, drafts)
    assert speculator.draft(make_row([1, 2, 3]), price, 99) == []
