"""What is sampled, from which tokens, and that a row's draws are its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.worker.engine.conftest import make_row
from tidemill_contracts.models.sampling import SamplingKernels
from tidemill_worker.engine import sampler
from tidemill_worker.engine.adjust import adjust
from tidemill_worker.engine.logit_blocks import LogitBlocks
from tidemill_worker.engine.row import Row, RowSampling


def _row(seed: int = 0, generated: int = 0, **fields: Any) -> Row:
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **fields}
    row = make_row([1, 2], 1_000)
    row.sampling = RowSampling(seed=seed, **sampling)
    row.token_ids += [0] * generated
    return row


def _logits(rows: int, vocabulary: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def _sample(
    kernels: SamplingKernels | None, logits: torch.Tensor, rows: list[Row]
) -> list[sampler.Sampled]:
    sampled = sampler.sample(logits.clone(), rows, kernels)
    return [choice for choice in sampled if choice is not None]


def _tokens(kernels: SamplingKernels | None, logits: torch.Tensor, rows: list[Row]) -> list[int]:
    return [sampled.token_id for sampled in _sample(kernels, logits, rows)]


def _probabilities(logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """``[rows, vocabulary]`` after every filter, which must be the same at every width that
    settles the row."""
    blocks = LogitBlocks.of(logits)
    lines = list(range(len(rows)))
    mass = sampler._mass(blocks, rows, lines)
    left: list[torch.Tensor | None] = [None] * len(rows)
    for width in (8, 64, 1024, blocks.vocabulary):
        found = sampler.filtered(blocks, lines, rows, mass, width)
        whole = torch.zeros(len(rows), blocks.vocabulary).scatter(1, found.ids, found.weights)
        for line in found.settled.nonzero()[:, 0].tolist():
            earlier = left[line]
            left[line] = whole[line]
            assert earlier is None or torch.equal(earlier, whole[line])
    weights = torch.stack([line for line in left if line is not None])
    assert not weights[:, logits.shape[1] :].any(), "what fills the last block is no token"
    return (weights / weights.sum(dim=1, keepdim=True))[:, : logits.shape[1]]


def test_temperature_zero_and_top_k_one_take_the_largest(kernels: SamplingKernels | None) -> None:
    logits = _logits(3, 500)
    best = logits.argmax(dim=1).tolist()
    rows = [_row(temperature=0.0), _row(top_k=1), _row(temperature=0.0, top_p=0.1)]
    assert _tokens(kernels, logits, rows) == best


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 200, 2_000, 5_000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.01])
def test_the_filtered_distribution_is_that_of_transformers(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = _logits(4, 3_000)
    reference = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        reference = TopKLogitsWarper(top_k)(None, reference)
    if top_p < 1:
        reference = TopPLogitsWarper(top_p)(None, reference)
    expected = reference.softmax(dim=1)

    rows = [_row(temperature=temperature, top_k=top_k, top_p=top_p)] * 4
    torch.testing.assert_close(_probabilities(logits, rows), expected, atol=1e-6, rtol=1e-4)


def test_rows_of_one_batch_are_filtered_each_by_its_own_options() -> None:
    logits = _logits(5, 4_000)
    options = [
        {"top_k": 3},
        {"top_p": 0.5},
        {},
        {"temperature": 2.0, "top_k": 50, "top_p": 0.9},
        {"top_k": 10**9},
    ]
    rows = [_row(**o) for o in options]  # type: ignore[arg-type]
    together = _probabilities(logits, rows)
    for i, row in enumerate(rows):
        alone = _probabilities(logits[i : i + 1], [row])[0]
        torch.testing.assert_close(together[i], alone, atol=0, rtol=0)


def test_a_row_that_settles_early_is_filtered_alike_with_one_that_does_not() -> None:
    """Top-p is a share of what min-p leaves, also where min-p ends beyond the first candidates."""
    logits = _logits(2, 4_000)
    rows = [_row(top_p=0.8, min_p=1e-4), _row(top_p=0.999, temperature=5.0)]
    blocks = LogitBlocks.of(logits)
    mass = sampler._mass(blocks, rows, [0, 1])
    assert sampler.filtered(blocks, [0, 1], rows, mass, 300).settled.tolist() == [True, False]
    alone = _probabilities(logits[:1], rows[:1])
    assert torch.equal(_probabilities(logits, rows)[:1], alone)
    assert (
        (alone > 0).sum() < 300 < (logits[0].softmax(0) > 1e-4 * logits[0].softmax(0).max()).sum()
    )


def test_the_mass_of_a_row_does_not_depend_on_how_many_there_are() -> None:
    # torch shares one long sum out among threads, but not two.
    logits = _logits(3, 151_936)
    rows = [_row(top_p=0.9, temperature=2.0)] * 3
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = sampler._mass(LogitBlocks.of(logits), rows, [0, 1, 2])
        for line in range(3):
            alone = sampler._mass(LogitBlocks.of(logits[line : line + 1]), rows[:1], [0])
            assert torch.equal(alone[0], together[line])
    finally:
        torch.set_num_threads(threads)


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    logits = torch.zeros(1, 3_000)
    logits[0, 5] = 4.0
    assert (_probabilities(logits, [_row(top_k=10)]) > 0).all()


def test_a_seeded_row_draws_the_same_whatever_its_neighbours(
    kernels: SamplingKernels | None,
) -> None:
    logits = _logits(1, 2_000)
    alone = [_tokens(kernels, logits, [_row(seed=7, generated=n)])[0] for n in range(20)]
    neighbours = _logits(3, 2_000, seed=2)
    for n in range(20):
        batch = torch.cat([neighbours[:2], logits, neighbours[2:]])
        rows = [
            _row(temperature=0.0),
            _row(seed=1, top_k=4),
            _row(seed=7, generated=n),
            _row(seed=7, top_p=0.3),
        ]
        assert _tokens(kernels, batch, rows)[2] == alone[n]
    assert len(set(alone)) > 5, "the draws of one seed differ from token to token"


def test_draws_follow_the_distribution(kernels: SamplingKernels | None) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    count = 4_000
    rows = [_row(seed=n) for n in range(count)]
    drawn = torch.bincount(
        torch.tensor(_tokens(kernels, logits.expand(count, 4), rows)), minlength=4
    )
    torch.testing.assert_close(drawn / count, logits.softmax(dim=1)[0], atol=0.03, rtol=0.0)


def test_uniform_draws_are_uniform_and_depend_on_seed_and_index() -> None:
    draws = [sampler.uniform(3, n) for n in range(2_000)]
    assert all(0 <= draw < 1 for draw in draws)
    assert abs(sum(draws) / len(draws) - 0.5) < 0.03
    assert sampler.uniform(3, 5) == draws[5]
    assert sampler.uniform(4, 5) != draws[5]


@pytest.mark.parametrize("vocabulary", [1, 16, 50])
def test_rows_of_nan_or_infinity_get_no_token_and_hurt_nobody(
    vocabulary: int, kernels: SamplingKernels | None
) -> None:
    logits = _logits(6, vocabulary)
    rows = [_row(seed=n, logprobs=1) for n in range(6)]
    clean = _sample(kernels, logits, rows)
    for line, value in ((1, torch.nan), (2, torch.inf), (4, -torch.inf), (5, 3e38)):
        logits[line, -1] = value
    sampled = sampler.sample(logits.clone(), rows, kernels)
    assert [choice is None for choice in sampled] == [False, True, True, False, True, False]
    assert [sampled[0], sampled[3]] == [clean[0], clean[3]]
    assert sampler.sample(logits[1:3].clone(), rows[1:3], kernels) == [None, None]


def test_nan_and_infinite_rows_are_found() -> None:
    logits = _logits(5, 50)
    logits[1, 3] = torch.nan
    logits[2, 4] = torch.inf
    logits[4, 0] = -torch.inf
    assert sampler.finite_rows(logits) == [True, False, False, True, False]
    logits[3] = 3e38
    assert sampler.finite_rows(logits) == [True, False, False, True, False], "only the sum is not"


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-38, 1e-4, 10])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 2, "top_p": 0.5}]
)
def test_a_temperature_near_zero_draws_no_token_that_does_not_exist(
    temperature: float, filters: dict[str, Any], kernels: SamplingKernels | None
) -> None:
    # float32 takes 1e-46 for 0, and 0 / 0 is NaN.
    logits = torch.tensor([[1e4, -1e4, 9_900.0]])
    assert _tokens(kernels, logits, [_row(temperature=temperature, **filters)]) == [0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_repetition_penalty_near_zero_draws_no_token_that_does_not_exist(
    temperature: float, kernels: SamplingKernels | None
) -> None:
    # It makes the logits of seen tokens infinite, and inf - inf is NaN.
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    row = _row(temperature=temperature, repetition_penalty=1e-44)
    assert row.token_ids == [1, 2]
    assert _tokens(kernels, logits, [row])[0] in (1, 2)


def test_no_option_is_spoilt_by_a_whole_number_for_a_fraction(
    kernels: SamplingKernels | None,
) -> None:
    logits = _logits(3, 300)
    whole = [_row(temperature=1, min_p=0, top_p=1), _row(temperature=2, top_p=1, top_k=9)]
    whole.append(_row(temperature=1, repetition_penalty=2, presence_penalty=1, min_p=1))
    parts = [_row(temperature=1.0, min_p=0.0, top_p=1.0), _row(temperature=2.0, top_k=9)]
    parts.append(_row(repetition_penalty=2.0, presence_penalty=1.0, min_p=1.0))
    assert _tokens(kernels, logits, whole) == _tokens(kernels, logits, parts)


def test_a_top_k_over_the_vocabulary_or_of_zero_beside_others_kills_nobody(
    kernels: SamplingKernels | None,
) -> None:
    logits = _logits(7, 151_936)
    rows = [_row(seed=n, top_k=k) for n, k in enumerate((0, 1, 64, 151_936, 10**9, 20, 151_937))]
    drawn = _tokens(kernels, logits, rows)
    assert drawn == [_tokens(kernels, logits[n : n + 1], [row])[0] for n, row in enumerate(rows)]
    assert drawn[1] == int(logits[1].argmax())
    # Limits beyond the vocabulary are none.
    for n in (3, 4, 6):
        assert _tokens(kernels, logits[n : n + 1], [_row(seed=n)]) == [drawn[n]]


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 2_049])
def test_no_token_is_drawn_from_what_fills_the_last_block(
    vocabulary: int, kernels: SamplingKernels | None
) -> None:
    logits = torch.full((60, vocabulary), -1e4)
    options: list[dict[str, Any]] = [{}, {"top_k": 10**6}, {"top_p": 0.999}, {"min_p": 1e-9}]
    rows = [_row(seed=n, temperature=5.0, **options[n % 4]) for n in range(60)]
    assert max(_tokens(kernels, logits, rows)) < vocabulary


def test_ten_thousand_hot_draws_from_a_padded_head_are_in_the_vocabulary(
    kernels: SamplingKernels | None,
) -> None:
    # As the runner does it: the head is wider than the vocabulary, and its pad rows are garbage.
    head = torch.randn(100, 640, generator=torch.Generator().manual_seed(4))
    head[:, 600:] = 1e3
    drawn: list[int] = []
    for start in range(0, 10_000, 100):
        rows = [_row(seed=start + n, temperature=5.0) for n in range(100)]
        drawn += _tokens(kernels, head[:, :600], rows)
    assert max(drawn) < 600
    assert len(set(drawn)) > 500


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.6}, {"top_k": 900}])
def test_draws_from_many_blocks_follow_the_distribution(
    filters: dict[str, Any], kernels: SamplingKernels | None
) -> None:
    logits = _logits(1, 2_000) / 3
    count = 4_000
    rows = [_row(seed=n, **filters) for n in range(count)]
    drawn = torch.bincount(
        torch.tensor(_tokens(kernels, logits.expand(count, -1), rows)), minlength=2_000
    )
    expected = _probabilities(logits, rows[:1])[0]
    assert not drawn[expected == 0].any()
    found = (drawn / count).view(40, 50).sum(dim=1)
    torch.testing.assert_close(found, expected.view(40, 50).sum(dim=1), atol=0.02, rtol=0.0)


@pytest.mark.parametrize("min_p", [0.001, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("vocabulary", [50, 3_000])
def test_min_p_leaves_what_transformers_leaves(min_p: float, vocabulary: int) -> None:
    logits = _logits(4, vocabulary)
    expected = MinPLogitsWarper(min_p)(None, logits).softmax(dim=1)
    found = _probabilities(logits, [_row(min_p=min_p)] * 4)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_min_p_then_top_k_then_top_p() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]])
    # min_p 0.04 leaves four tokens, top_k three of them; these hold 67%, 24% and 9%.
    row = _row(min_p=0.04, top_k=3, top_p=0.9)
    kept = (_probabilities(logits, [row]) > 0)[0].tolist()
    assert kept == [True, True, False, False, False]


def _adjusted(row: Row, logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone()
    adjust(logits, [row])
    return logits


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_is_over_prompt_and_output_as_in_transformers(penalty: float) -> None:
    logits = _logits(1, 100)
    row = _row(repetition_penalty=penalty)
    row.token_ids += [7, 7, 90]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([row.token_ids]), logits)
    torch.testing.assert_close(_adjusted(row, logits), expected)


def test_presence_and_frequency_penalties_are_over_the_output_only() -> None:
    logits = torch.zeros(1, 10)
    row = _row(presence_penalty=0.5, frequency_penalty=0.25)
    assert row.token_ids == [1, 2], "the prompt"
    row.token_ids += [4, 4, 4, 5]
    adjusted = _adjusted(row, logits)[0]
    assert adjusted[4] == -0.5 - 3 * 0.25
    assert adjusted[5] == -0.5 - 0.25
    assert adjusted[[0, 1, 2, 3, 6]].abs().sum() == 0
    fresh = _row(presence_penalty=0.5, frequency_penalty=0.25)
    assert _adjusted(fresh, logits).abs().sum() == 0, "the first step has no output yet"


def test_penalties_are_the_same_after_a_preemption() -> None:
    # They depend on the tokens alone, which a preemption keeps.
    row = _row(presence_penalty=1.0, repetition_penalty=1.2, generated=3)
    before = _adjusted(row, _logits(1, 50))
    row.computed = 0
    torch.testing.assert_close(_adjusted(row, _logits(1, 50)), before)


def test_logit_bias_and_allowed_tokens() -> None:
    logits = torch.zeros(1, 6)
    row = _row(logit_bias={3: 2.5, 0: -1.0}, allowed_token_ids=[3, 4])
    assert _adjusted(row, logits)[0].tolist() == [-torch.inf] * 3 + [2.5, 0.0, -torch.inf]


def test_bad_words_bar_their_last_token_after_the_others_as_in_transformers() -> None:
    logits = _logits(1, 30)
    words = [[9], [4, 5], [4, 4, 6], [2, 7]]
    row = _row(bad_words=words)
    row.token_ids += [4, 4]
    barred = NoBadWordsLogitsProcessor(words)(torch.tensor([row.token_ids]), logits)
    torch.testing.assert_close(_adjusted(row, logits), barred)
    assert torch.isinf(barred[0]).nonzero()[:, 0].tolist() == [5, 6, 9]


def test_a_bad_word_that_the_prompt_begins_is_not_barred() -> None:
    row = _row(bad_words=[[2, 7]])
    assert row.token_ids[-1] == 2
    assert not torch.isinf(_adjusted(row, _logits(1, 30))).any()


def test_end_tokens_are_barred_until_there_are_enough_tokens() -> None:
    row = _row()
    row.end_token_ids, row.min_tokens = frozenset({3, 8}), 2
    for generated, barred in ((0, [3, 8]), (1, [3, 8]), (2, [])):
        row.token_ids = [1, 2] + [0] * generated
        assert torch.isinf(_adjusted(row, _logits(1, 10))[0]).nonzero()[:, 0].tolist() == barred


def test_options_of_one_row_do_not_touch_its_neighbours(kernels: SamplingKernels | None) -> None:
    logits = _logits(5, 400)
    rows = [
        _row(seed=1),
        _row(seed=2, logit_bias={5: 50.0}),
        _row(seed=3, presence_penalty=2.0, generated=9),
        _row(seed=4, allowed_token_ids=[7]),
        _row(seed=5, bad_words=[[1]], min_p=0.2, top_k=7, repetition_penalty=1.5),
    ]
    alone = [_tokens(kernels, logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert _tokens(kernels, logits, rows) == alone
    assert alone[1] == 5
    assert alone[3] == 7


def test_a_row_whose_options_bar_every_token_is_told_and_hurts_nobody(
    kernels: SamplingKernels | None,
) -> None:
    rows = [_row(temperature=0.0), _row(allowed_token_ids=[3], bad_words=[[3]])]
    logits = _logits(2, 10)
    first, second = _sample(kernels, logits, rows)
    assert first.token_id == int(logits[0].argmax())
    assert second.token_id == -1


def test_log_probabilities_are_the_models_own(kernels: SamplingKernels | None) -> None:
    logits = _logits(3, 200)
    rows = [
        _row(temperature=0.0, logprobs=3, logit_bias={9: 100.0}),
        _row(logprobs=0, seed=3),
        _row(logprob_token_ids=[4, 2], temperature=5.0),
    ]
    expected = logits.log_softmax(dim=1)
    sampled = _sample(kernels, logits, rows)
    assert sampled[0].token_id == 9
    for line, choice in enumerate(sampled):
        assert choice.logprobs is not None
        assert choice.logprobs.logprob == pytest.approx(float(expected[line, choice.token_id]))
    first, second, third = (choice.logprobs for choice in sampled)
    assert first is not None
    assert second is not None
    assert third is not None
    values, ids = expected[0].topk(3)
    assert list(first.top) == ids.tolist()
    assert list(first.top.values()) == pytest.approx(values.tolist())
    assert second.top == {}
    assert third.listed == pytest.approx({4: float(expected[2, 4]), 2: float(expected[2, 2])})


def test_more_log_probabilities_than_tokens_are_all_of_them(
    kernels: SamplingKernels | None,
) -> None:
    (choice,) = _sample(kernels, _logits(1, 5), [_row(logprobs=128)])
    assert choice.logprobs is not None
    assert sorted(choice.logprobs.top) == [0, 1, 2, 3, 4]
