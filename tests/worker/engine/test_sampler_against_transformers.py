"""On logits made to be awkward, every option leaves what transformers' processors leave.

In the order that the wire documents: penalties, biases and barred tokens, then temperature,
min-p, top-k, top-p.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.worker.engine.conftest import make_row
from tidemill_contracts.models.sampling import Draw, SamplingKernels
from tidemill_worker.engine import sampler
from tidemill_worker.engine.adjust import adjust
from tidemill_worker.engine.logit_blocks import LogitBlocks
from tidemill_worker.engine.row import Row, RowSampling

VOCABULARY = 1_500
PROMPT = [3, 900, 3]


def _crafted() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    plain = torch.randn(VOCABULARY, generator=generator) * 3
    barred = plain.clone()
    barred[torch.rand(VOCABULARY, generator=generator) < 0.7] = -torch.inf
    one = torch.full((VOCABULARY,), -torch.inf)
    one[77] = 2.5
    dominated = plain.clone()
    dominated[1_499] = 60.0
    return {
        "plain": plain,
        "ties": (plain * 2).round() / 2,
        "one dominates": dominated,
        "most are barred": barred,
        "one is left": one,
        "nearly flat": plain * 0.1,
        "far apart": plain * 100,
    }


CRAFTED = _crafted()


def _row(output: tuple[int, ...] = (), **options: Any) -> Row:
    row = make_row(PROMPT, 1_000)
    row.sampling = RowSampling(
        **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0, **options}
    )
    row.token_ids += output
    return row


def _warpers(sampling: RowSampling) -> list[LogitsProcessor]:
    """transformers' filters, set as the row's."""
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers


def _left(logits: Tensor, rows: list[Row]) -> Tensor:
    """The distribution that each row's token is drawn from, float64 ``[rows, vocabulary]``."""
    blocks, lines = LogitBlocks.of(logits), list(range(len(rows)))
    mass = sampler._mass(blocks, rows, lines)
    found = sampler.filtered(blocks, lines, rows, mass, blocks.vocabulary)
    weights = torch.zeros(len(rows), blocks.vocabulary, dtype=torch.float64)
    weights.scatter_(1, found.ids, found.weights.double())
    return (weights / weights.sum(dim=1, keepdim=True))[:, : logits.shape[1]]


def _keep_ties(expected: Tensor, logits: Tensor) -> Tensor:
    """Where transformers' sort cuts through tokens of one logit, those that it dropped come back:
    which of them stay must not hang on how a sort breaks ties."""
    kept = expected.isfinite()
    if not kept.any():
        return expected
    last = logits[kept].min()
    return torch.where(logits == last, expected[kept & (logits == last)][0], expected)


@pytest.mark.parametrize("temperature", [1e-3, 0.6, 1, 10])
@pytest.mark.parametrize("name", CRAFTED)
def test_every_mix_of_filters_in_one_batch_leaves_what_transformers_leaves(
    name: str, temperature: float
) -> None:
    logits = CRAFTED[name]
    options = itertools.product(
        [0, 1, 7, 64, VOCABULARY, 10**9], [0.0, 0.1, 1.0], [1.0, 0.95, 0.3, 1e-6]
    )
    rows = [
        _row(temperature=temperature, top_k=top_k, min_p=min_p, top_p=top_p)
        for top_k, min_p, top_p in options
    ]
    found = _left(logits.expand(len(rows), -1), rows)
    for line, row in enumerate(rows):
        scores = logits[None]
        for warper in _warpers(row.sampling):
            scores = _keep_ties(warper(None, scores)[0], scores[0])[None]
        expected = scores[0].double().softmax(dim=0)
        torch.testing.assert_close(found[line], expected, rtol=0, atol=1e-6, msg=str(row.sampling))
        # Their float32 sums may end one token of no weight sooner or later.
        differs = (found[line] > 0) != (expected > 0)
        assert expected[differs].sum() + found[line][differs].sum() < 1e-6, row.sampling


@pytest.mark.parametrize("temperature", [1e-3, 0.6, 1, 10])
@pytest.mark.parametrize("name", CRAFTED)
def test_the_library_draws_from_what_transformers_leaves(
    name: str, temperature: float, library: SamplingKernels
) -> None:
    """A draw by inverse CDF tells of the whole distribution: at 0 it is the first token left, and
    from one number to the next no token is passed over."""
    logits = CRAFTED[name]
    # A model's own logits are finite; what is barred comes with the options.
    barred = logits.isinf().nonzero()[:, 0].tolist()
    given = logits.nan_to_num(neginf=9.0)
    options = itertools.product(
        [0, 1, 7, 64, VOCABULARY, 10**9], [0.0, 0.1, 1.0], [1.0, 0.95, 0.3, 1e-6]
    )
    uniforms = [0.0, 0.1, 0.37, 0.5, 0.8, 1 - 2**-52]
    for top_k, min_p, top_p in options:
        row = _row(temperature=temperature, top_k=top_k, min_p=min_p, top_p=top_p)
        scores = logits[None]
        for warper in _warpers(row.sampling):
            scores = _keep_ties(warper(None, scores)[0], scores[0])[None]
        below = torch.cat((torch.zeros(1), scores[0].double().softmax(dim=0).cumsum(dim=0)))
        draws = [
            Draw(
                uniform,
                barred=barred,
                temperature=temperature,
                top_k=top_k,
                min_p=min_p,
                top_p=top_p,
            )
            for uniform in uniforms
        ]
        drawn = library.draw(given.expand(len(draws), -1), draws)
        for token, uniform in zip(drawn, uniforms, strict=True):
            if uniform == 0:
                assert scores[0, token].isfinite(), row.sampling
            assert below[token] - 1e-5 <= uniform <= below[token + 1] + 1e-5, row.sampling


@pytest.mark.parametrize("name", ["plain", "ties", "one dominates", "far apart"])
def test_penalties_and_barred_tokens_are_those_of_transformers_row_by_row(name: str) -> None:
    output = (5, 5, 8, 1_499)
    bad_words = [[40], [8, 1_499, 6], [1_499, 7], [5, 1]]
    options: list[tuple[dict[str, Any], list[LogitsProcessor]]] = [
        ({}, []),
        ({"repetition_penalty": 1.4}, [RepetitionPenaltyLogitsProcessor(1.4)]),
        ({"repetition_penalty": 0.5}, [RepetitionPenaltyLogitsProcessor(0.5)]),
        ({"bad_words": bad_words}, [NoBadWordsLogitsProcessor(bad_words)]),
        ({"bad_words": [[9], [10]]}, [SuppressTokensLogitsProcessor([9, 10])]),
        ({"min_tokens": 9}, [MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, [2, 11])]),
        ({"min_tokens": 4}, [MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, [2, 11])]),
        (
            {"repetition_penalty": 2.0, "bad_words": bad_words, "min_tokens": 9},
            [
                RepetitionPenaltyLogitsProcessor(2.0),
                NoBadWordsLogitsProcessor(bad_words),
                MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, [2, 11]),
            ],
        ),
    ]
    rows = []
    for given, _ in options:
        fields = dict(given)
        min_tokens = fields.pop("min_tokens", 0)
        row = _row(output, **fields)
        row.min_tokens, row.end_token_ids = min_tokens, frozenset({2, 11})
        rows.append(row)
    adjusted = CRAFTED[name].repeat(len(rows), 1)
    adjust(adjusted, rows)
    ids = torch.tensor([[*PROMPT, *output]])
    for line, (given, processors) in enumerate(options):
        scores = LogitsProcessorList(processors)(ids, CRAFTED[name][None].clone())
        torch.testing.assert_close(adjusted[line], scores[0], msg=str(given))


def test_presence_and_frequency_penalties_are_those_of_a_plain_loop() -> None:
    rng = random.Random(2)
    rows = [
        _row(
            tuple(rng.randrange(40) for _ in range(length)),
            presence_penalty=rng.choice([0.0, -2.0, 0.7, 2]),
            frequency_penalty=rng.choice([0.0, -2.0, 0.3, 2]),
        )
        for length in (0, 1, 2, 30, 200)
    ]
    logits = CRAFTED["plain"].repeat(len(rows), 1)
    adjust(logits, rows)
    for line, row in enumerate(rows):
        expected = CRAFTED["plain"].double().numpy().copy()
        for token_id, count in Counter(row.token_ids[len(PROMPT) :]).items():
            expected[token_id] -= row.sampling.presence_penalty
            expected[token_id] -= row.sampling.frequency_penalty * count
        np.testing.assert_allclose(logits[line].numpy(), expected, rtol=0, atol=1e-4)


def test_the_whole_order_in_one_row_is_that_of_the_wire() -> None:
    output = (5, 5, 8)
    row = _row(
        output,
        temperature=0.7,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={8: 30.0, 12: 28.0},
        allowed_token_ids=[5, 8, 12, *range(100, 400)],
        bad_words=[[8, 12]],
        min_p=0.01,
        top_k=40,
        top_p=0.9,
    )
    logits = CRAFTED["plain"][None].clone()
    adjust(logits, [row])

    scores = RepetitionPenaltyLogitsProcessor(1.3)(
        torch.tensor([row.token_ids]), CRAFTED["plain"][None].clone()
    )
    scores[0, 5] -= 0.5 + 0.25 * 2
    scores[0, 8] -= 0.5 + 0.25
    scores[0, 8] += 30.0
    scores[0, 12] += 28.0
    barred = torch.ones(VOCABULARY, dtype=torch.bool)
    barred[list(row.sampling.allowed_token_ids)] = False
    barred[12] = True
    scores[0, barred] = -torch.inf
    torch.testing.assert_close(logits, scores)
    for warper in _warpers(row.sampling):
        scores = warper(None, scores)
    torch.testing.assert_close(
        _left(logits, [row])[0], scores[0].double().softmax(dim=0), rtol=0, atol=1e-6
    )
