"""How long steps take: learnt, kept to a target, and told of in advance."""

from __future__ import annotations

import random

import pytest

from tests.worker.engine.conftest import Bench, Clock, expected_tokens, make_row
from tidemill_worker.engine.budget import MIN_PREFILL_TOKENS, PREFILL_EVERY, Budget, PrefillShare
from tidemill_worker.engine.steptime import WINDOW, StepCost, StepTimeModel, fit

TRUE = StepCost(per_row=0.002, per_token=0.0005, per_step=0.01)


def _steps(count: int, noise: float = 0.0) -> list[tuple[int, int, float]]:
    rng = random.Random(3)
    steps = []
    for _ in range(count):
        rows = rng.randint(1, 32)
        tokens = rows if rng.random() < 0.5 else rows + rng.randint(1, 500)
        seconds = TRUE.seconds(rows, tokens) * (1 + rng.uniform(-noise, noise))
        steps.append((rows, tokens, seconds))
    return steps


def _miss(cost: StepCost) -> float:
    """Largest relative error of a prediction, over a range of steps."""
    sizes = [(1, 1), (8, 8), (32, 32), (1, 200), (32, 400)]
    return max(abs(cost.seconds(*size) / TRUE.seconds(*size) - 1) for size in sizes)


def test_the_cost_of_rows_and_tokens_is_learnt() -> None:
    assert _miss(fit(_steps(200))) < 0.01
    assert _miss(fit(_steps(200, noise=0.1))) < 0.1


def test_steps_that_took_far_too_long_change_nothing() -> None:
    steps = _steps(200, noise=0.05)
    for index in range(0, 200, 20):
        rows, tokens, seconds = steps[index]
        steps[index] = (rows, tokens, seconds + 30.0)
    assert _miss(fit(steps)) < 0.1


@pytest.mark.parametrize(
    "steps",
    [[(4, 4, 0.02)], [(4, 4, 0.02)] * 50, [(4, 4, 0.0)] * 9, [(1, 1, 0.1), (2, 2, 0.05)] * 5],
    ids=["one", "all alike", "no time at all", "more is faster"],
)
def test_data_that_tells_little_gives_a_cost_that_fits_it(
    steps: list[tuple[int, int, float]],
) -> None:
    cost = fit(steps)
    assert min(cost.per_row, cost.per_token, cost.per_step) >= 0
    mean = sum(seconds for *_, seconds in steps) / len(steps)
    assert sum(cost.seconds(r, t) for r, t, _ in steps) / len(steps) == pytest.approx(
        mean, rel=0.01
    )


def test_a_long_stretch_of_decode_steps_keeps_what_a_prompt_costs() -> None:
    model = StepTimeModel()
    assert model.cost is None
    for step in [*_steps(200), *([(8, 8, TRUE.seconds(8, 8))] * 4 * WINDOW)]:
        model.observe(*step)
    assert model.cost is not None
    assert model.cost.per_token == pytest.approx(TRUE.per_token, rel=0.02)


def test_a_budget_never_gives_more_than_the_time_that_is_left() -> None:
    rng = random.Random(1)
    for _ in range(2_000):
        cost = StepCost(*(rng.choice([0.0, rng.random()]) for _ in range(3)))
        spare_s = rng.uniform(-1, 50)
        budget = Budget(rng.randint(0, 60), cost, spare_s)
        rows, taken = 0, 0
        while (room := budget.room) and rows < 8:
            length = rng.randint(1, room)
            budget.take(length)
            rows, taken = rows + 1, taken + length
        assert rows == 0 or cost.seconds(rows, taken, steps=0) <= spare_s + 1e-9
        assert budget.tokens >= 0


def test_prompts_that_find_no_time_get_a_little_every_few_steps() -> None:
    model = StepTimeModel()
    model.cost = TRUE
    share = PrefillShare(model, 0.001)
    rooms = []
    for _ in range(3 * PREFILL_EVERY):
        budget = Budget(100)
        share.limit(budget, 4)
        rooms.append(budget.room)
    assert rooms == [*[0] * (PREFILL_EVERY - 1), MIN_PREFILL_TOKENS] * 3
    budget = Budget(100)
    share.limit(budget, 0)
    assert budget.room == 100  # nothing decodes


def _timed(target_tpot_s: float | None, **options: int) -> tuple[Bench, Clock]:
    clock = Clock()
    bench = Bench(
        pages=400,
        max_rows=8,
        max_step_tokens=256,
        target_tpot_s=target_tpot_s,
        clock=clock,
        **options,
    )

    def pass_time(rows: int, tokens: int) -> None:
        # Half of the constant part for each of the step's calls.
        clock.now += TRUE.per_row * rows + TRUE.per_token * tokens + TRUE.per_step / 2

    bench.runner.on_call = pass_time
    return bench, clock


def _longest_decode_step(target_tpot_s: float | None) -> float:
    """With prompts of 200 tokens that come while other rows decode."""
    bench, clock = _timed(target_tpot_s)
    rows = [bench.add(make_row([n] * 200, 40, name=str(n))) for n in range(4)]
    bench.step(30)
    longest = 0.0
    for n in range(4, 12):
        rows.append(bench.add(make_row([n] * 200, 10, name=str(n))))
        for _ in range(6):
            decoding = any(row.generated and not row.ended for row in rows)
            before = clock.now
            bench.step()
            if decoding:
                longest = max(longest, clock.now - before)
    bench.run()
    for row in rows:
        prompt = row.token_ids[: row.prompt_len]
        assert list(row.output_token_ids) == expected_tokens(prompt, row.max_len - row.prompt_len)
    return longest


def test_steps_that_decode_stay_within_the_target_beside_long_prompts() -> None:
    assert _longest_decode_step(None) > 0.1
    assert _longest_decode_step(0.06) <= 0.06 * 1.1


def test_no_target_can_starve_a_prompt() -> None:
    bench, _ = _timed(1e-6)
    bench.add(make_row([1] * 9, 240))
    bench.step(40)
    late = bench.add(make_row([2] * 64, 4))
    bench.step(64 // MIN_PREFILL_TOKENS * PREFILL_EVERY + 8)
    assert late.finish_reason == "length"


def test_without_rows_that_decode_a_target_changes_nothing() -> None:
    bench, _ = _timed(1e-6)
    bench.scheduler.step_time.cost = TRUE
    row = bench.add(make_row([3] * 200, 1))
    bench.step()
    assert row.finish_reason == "length"


def test_the_eta_is_near_the_time_that_the_rows_then_take() -> None:
    bench, clock = _timed(None)
    assert bench.engine.eta_s == 0.0
    rng = random.Random(2)

    def add(count: int) -> None:
        for _ in range(count):
            prompt = [rng.randrange(90) for _ in range(rng.randint(5, 60))]
            bench.add(make_row(prompt, rng.randint(10, 40)))

    add(40)
    assert bench.engine.eta_s is None
    bench.run()
    add(100)
    started, eta_s = clock.now, bench.engine.eta_s
    bench.step(100)
    half_way, then = clock.now, bench.engine.eta_s
    bench.run()
    assert eta_s is not None
    assert then is not None
    assert eta_s == pytest.approx(clock.now - started, rel=0.3)
    assert then == pytest.approx(clock.now - half_way, rel=0.3)
    assert bench.engine.eta_s == 0.0


def test_what_a_draft_costs_is_learnt_apart_from_a_token_of_a_prompt() -> None:
    model = StepTimeModel()
    for step in range(64):
        drafts = step % 5
        model.observe(8, 8 + drafts, 0.040 + 0.001 * 8 + 0.003 * drafts, drafts)
        model.observe(8, 300, 0.040 + 0.001 * 300)
    assert model.decode_cost is not None
    assert model.decode_cost.per_token == pytest.approx(0.003, rel=0.05)
    assert len(model._mixed) == 64


def test_a_step_in_which_nothing_ran_tells_nothing() -> None:
    model = StepTimeModel()
    for _ in range(40):
        model.observe(0, 0, 0.001)
        model.observe(1, 50, 0.06)
    assert model.cost is not None
    assert model.decode_cost is None
    assert model.cost.seconds(1, 50) == pytest.approx(0.06, rel=0.05)
