"""What is sampled, from which tokens, and that a row's draws are its own."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.worker.engine.conftest import make_row
from tidemill_worker.engine import sampler
from tidemill_worker.engine.row import Row, RowSampling


def _row(seed: int = 0, generated: int = 0, **fields: float) -> Row:
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **fields}
    row = make_row([1, 2], 1_000)
    row.sampling = RowSampling(seed=seed, **sampling)  # type: ignore[arg-type]
    row.token_ids += [0] * generated
    return row


def _logits(rows: int, vocabulary: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def _probabilities(logits: torch.Tensor, sampling: list[RowSampling]) -> torch.Tensor:
    """``[rows, vocabulary]`` after every filter."""
    weights, ids = sampler.filtered(sampler._scaled(logits, sampling), sampling)
    whole = torch.zeros_like(logits).scatter(1, ids, weights)
    return whole / whole.sum(dim=1, keepdim=True)


def test_temperature_zero_and_top_k_one_take_the_largest() -> None:
    logits = _logits(3, 500)
    best = logits.argmax(dim=1).tolist()
    rows = [_row(temperature=0.0), _row(top_k=1), _row(temperature=0.0, top_p=0.1)]
    assert sampler.sample(logits, rows) == best


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 200, 5_000])
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

    sampling = [_row(temperature=temperature, top_k=top_k, top_p=top_p).sampling] * 4
    torch.testing.assert_close(_probabilities(logits, sampling), expected, atol=1e-6, rtol=1e-4)


def test_rows_of_one_batch_are_filtered_each_by_its_own_options() -> None:
    logits = _logits(5, 4_000)
    options = [
        {"top_k": 3},
        {"top_p": 0.5},
        {},
        {"temperature": 2.0, "top_k": 50, "top_p": 0.9},
        {"top_k": 10**9},
    ]
    samplings = [_row(**o).sampling for o in options]  # type: ignore[arg-type]
    together = _probabilities(logits, samplings)
    for i, sampling in enumerate(samplings):
        alone = _probabilities(logits[i : i + 1], [sampling])[0]
        torch.testing.assert_close(together[i], alone, atol=0, rtol=0)


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    logits = torch.zeros(1, 3_000)
    logits[0, 5] = 4.0
    sampling = [_row(top_k=10).sampling]
    assert (_probabilities(logits, sampling) > 0).all()


def test_a_seeded_row_draws_the_same_whatever_its_neighbours() -> None:
    logits = _logits(1, 2_000)
    alone = [sampler.sample(logits, [_row(seed=7, generated=n)])[0] for n in range(20)]
    neighbours = _logits(3, 2_000, seed=2)
    for n in range(20):
        batch = torch.cat([neighbours[:2], logits, neighbours[2:]])
        rows = [
            _row(temperature=0.0),
            _row(seed=1, top_k=4),
            _row(seed=7, generated=n),
            _row(seed=7, top_p=0.3),
        ]
        assert sampler.sample(batch, rows)[2] == alone[n]
    assert len(set(alone)) > 5, "the draws of one seed differ from token to token"


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    count = 4_000
    rows = [_row(seed=n) for n in range(count)]
    drawn = torch.bincount(torch.tensor(sampler.sample(logits.expand(count, 4), rows)), minlength=4)
    torch.testing.assert_close(drawn / count, logits.softmax(dim=1)[0], atol=0.03, rtol=0.0)


def test_uniform_draws_are_uniform_and_depend_on_seed_and_index() -> None:
    draws = [sampler.uniform(3, n) for n in range(2_000)]
    assert all(0 <= draw < 1 for draw in draws)
    assert abs(sum(draws) / len(draws) - 0.5) < 0.03
    assert sampler.uniform(3, 5) == draws[5]
    assert sampler.uniform(4, 5) != draws[5]


def test_nan_and_infinite_rows_are_found() -> None:
    logits = _logits(5, 50)
    logits[1, 3] = torch.nan
    logits[2, 4] = torch.inf
    logits[4, 0] = -torch.inf
    assert sampler.finite_rows(logits) == [True, False, False, True, False]


def test_an_extreme_temperature_does_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4, 9_999.0]])
    assert sampler.sample(logits, [_row(temperature=1e-4)]) == [0]
