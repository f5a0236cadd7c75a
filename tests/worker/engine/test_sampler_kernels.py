"""The C++ sampler beside its torch twin: the same token and the same log probabilities for any mix
of options, but for the last bits of sums; and what it owes to its neighbours."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.engine.conftest import Bench, built_kernels, make_row, next_token
from tidemill_contracts.models.errors import BackendError
from tidemill_contracts.models.sampling import (
    NO_TOKEN,
    NOT_FINITE,
    Draw,
    SamplingKernels,
    Telling,
)
from tidemill_contracts.wire import ErrorCode
from tidemill_worker.engine import adjust, sampler
from tidemill_worker.engine.row import Row, RowSampling

VOCABULARY = 700
HAIR = 1e-6
"""By how much the two sums of a vocabulary may differ, in units of the whole."""


def logits_of(kind: str, seed: int, rows: int = 1, vocabulary: int = VOCABULARY) -> Tensor:
    plain = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    return {
        "plain": plain,
        "ties": plain.round(),
        "flat": plain * 0.01,
        "equal": plain * 0 + 3,
        "far apart": plain * 1e4,
        "huge": plain * 1e37,
    }[kind]


KINDS = ("plain", "ties", "flat", "equal", "far apart", "huge")

token_ids = st.integers(0, VOCABULARY - 1)
samplings = st.builds(
    RowSampling,
    temperature=st.sampled_from([0.0, 1e-46, 1e-3, 0.3, 1.0, 1.7, 10.0]),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 0.999, 0.9999999, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 300, VOCABULARY, 10**9]),
    min_p=st.sampled_from([0.0, 1e-12, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**63),
    presence_penalty=st.sampled_from([0.0, -2.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1e-44, 0.6, 1.3, 10.0]),
    logit_bias=st.dictionaries(token_ids, st.sampled_from([-100.0, 0.3, 5.0, 100.0]), max_size=5),
    allowed_token_ids=st.lists(token_ids, max_size=9, unique=True),
    bad_words=st.lists(st.lists(token_ids, min_size=1, max_size=1), max_size=3),
    logprobs=st.sampled_from([None, 0, 3, 2 * VOCABULARY]),
    logprob_token_ids=st.lists(token_ids, max_size=3, unique=True),
)


@st.composite
def drawn_rows(draw: st.DrawFn) -> Row:
    row = make_row(draw(st.lists(token_ids, min_size=1, max_size=6)))
    row.sampling = draw(samplings)
    row.token_ids += draw(st.lists(st.one_of(token_ids, st.just(7)), max_size=6))
    row.end_token_ids, row.min_tokens = frozenset({3, 8}), draw(st.integers(0, 4))
    return row


def by_twin(logits: Tensor, row: Row, hair: float) -> int:
    """The twin's token where everything that is compared with a sum lies a hair further on."""
    moved = copy.copy(row)
    sampling = row.sampling
    if sampling.top_p < 1:
        sampling = replace(sampling, top_p=min(1.0, max(1e-12, sampling.top_p * (1 + hair))))
    moved.sampling = sampling
    (found,) = sampler.sample(logits.clone(), [moved])
    assert found is not None
    return found.token_id


def nearby(logits: Tensor, row: Row, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """What the twin draws a hair before and after the row's number, and its filters' borders."""
    at = sampler.uniform(row.sampling.seed, row.generated)
    tokens = set()
    for moved in (-HAIR, 0.0, HAIR):
        with monkeypatch.context() as patch:
            patch.setattr(sampler, "uniform", lambda *_, u=at + moved: min(max(u, 0.0), 1 - 2**-52))
            tokens |= {by_twin(logits, row, hair) for hair in (-10 * HAIR, 0.0, 10 * HAIR)}
    return tokens


@pytest.mark.parametrize("architecture", ["native", "x86-64-v3"])
def test_any_mix_of_options_chooses_what_the_twin_chooses(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = built_kernels(architecture)

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        rows=st.lists(drawn_rows(), min_size=1, max_size=8),
        kind=st.sampled_from(KINDS),
        seed=st.integers(0, 9),
    )
    def check(rows: list[Row], kind: str, seed: int) -> None:
        logits = logits_of(kind, seed, len(rows))
        expected = sampler.sample(logits.clone(), rows)
        for line, found in enumerate(sampler.sample(logits, rows, library)):
            twin, row = expected[line], rows[line]
            assert found is not None
            assert twin is not None
            if found.token_id != twin.token_id:
                tokens = nearby(logits[line : line + 1], row, monkeypatch)
                assert min(tokens) <= found.token_id <= max(tokens), row.sampling
                continue
            assert (found.logprobs is None) == (twin.logprobs is None)
            if found.logprobs is None or twin.logprobs is None:
                continue
            near = {"rel": 1e-5, "abs": 1e-5}
            assert found.logprobs.logprob == pytest.approx(twin.logprobs.logprob, **near)
            assert found.logprobs.listed == pytest.approx(twin.logprobs.listed, **near)
            # Which of equal ones are told of first, and at all, is left to a sort.
            values = list(found.logprobs.top.values())
            assert values == pytest.approx(list(twin.logprobs.top.values()), **near)
            assert values == sorted(values, reverse=True)
            if kind == "plain":
                assert list(found.logprobs.top) == list(twin.logprobs.top)

    check()


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5},
        {"top_k": 5, "top_p": 0.8},
        {"top_p": 0.7},
        {"top_p": 0.99, "min_p": 0.001},
        {"min_p": 0.05},
        {"top_p": 0.05},
        {"top_k": 1_500, "top_p": 0.9, "temperature": 5.0},
        {"top_p": 0.9, "temperature": 50.0},
    ],
)
@pytest.mark.parametrize("kind", ["plain", "ties", "flat", "equal"])
def test_a_grid_of_numbers_draws_each_token_as_often_as_it_is_likely(
    options: Mapping[str, Any], kind: str, library: SamplingKernels
) -> None:
    logits, count = logits_of(kind, 3, vocabulary=2_000), 4_000
    draws = [Draw((n + 0.5) / count, **options) for n in range(count)]
    drawn = torch.tensor(library.draw(logits.expand(count, -1), draws))
    row = make_row([1])
    row.sampling = RowSampling(
        **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0, **options}
    )
    blocks = sampler.LogitBlocks.of(logits)
    left = sampler.filtered(
        blocks, [0], [row], sampler._mass(blocks, [row], [0]), blocks.vocabulary
    )
    weights = torch.zeros(blocks.vocabulary).scatter(0, left.ids[0], left.weights[0]).double()
    expected = (weights / weights.sum())[:2_000]
    found = drawn.bincount(minlength=2_000) / count
    assert (found - expected).abs().max() < 1.1 / count
    assert not found[expected == 0].any()


class TestNeighbours:
    OPTIONS = (
        {"temperature": 0.0},
        {},
        {"top_k": 20, "top_p": 0.95},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"repetition_penalty": 1.3, "token_ids": [5, 5, 9], "prompt_len": 1},
        {"allowed": [3, 900], "barred": [3]},
    )

    def draws(self, count: int) -> list[Draw]:
        return [
            Draw(sampler.uniform(5, n), **self.OPTIONS[n % len(self.OPTIONS)]) for n in range(count)
        ]

    def test_rows_threads_and_strides_change_nothing(self, library: SamplingKernels) -> None:
        wide = logits_of("plain", 1, 30, 3_100)
        logits, draws = wide[:, :3_001], self.draws(30)
        alone = [library.draw(logits[n : n + 1], [draw])[0] for n, draw in enumerate(draws)]
        threads = torch.get_num_threads()
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                assert library.draw(logits, draws) == alone
                assert library.draw(logits.flip(0), draws[::-1]) == alone[::-1]
                assert library.draw(logits.t().contiguous().t(), draws) == alone
        finally:
            torch.set_num_threads(threads)

    def test_penalties_of_one_row_are_forgotten_before_the_next(
        self, library: SamplingKernels
    ) -> None:
        logits = logits_of("plain", 1, 2)
        best = int(logits[1].argmax())
        heavy = Draw(
            0.5, repetition_penalty=9.0, presence_penalty=50.0, token_ids=[best] * 3, prompt_len=1
        )
        assert library.draw(logits, [heavy, Draw(0.5, temperature=0.0)])[1] == best
        assert library.draw(logits[1:], [replace(heavy, temperature=0.0)])[0] != best

    def test_logits_stay_as_they_are(self, library: SamplingKernels) -> None:
        logits = logits_of("plain", 1, 7)
        before = logits.clone()
        library.draw(
            logits, self.draws(7) if logits.shape[1] > 900 else [Draw(0.5, barred=[1])] * 7
        )
        library.tell(logits, [Telling(0, 1, 3)])
        assert torch.equal(logits, before)

    def test_what_stands_for_no_token(self, library: SamplingKernels) -> None:
        logits = logits_of("plain", 1, 3)
        logits[0, 650] = torch.nan
        draws = [Draw(0.5), Draw(0.5, allowed=[1], barred=[1]), Draw(0.5, temperature=0.0)]
        best = int(logits[2].argmax())
        assert library.draw(logits, draws) == [NOT_FINITE, NO_TOKEN, best]
        told = library.tell(logits, [Telling(0, 1, 1), Telling(2, best, 1)])
        assert told[0] is None
        assert told[1] is not None
        assert list(told[1].top.items()) == [(best, told[1].logprob)]

    @pytest.mark.parametrize(
        "options",
        [
            {"barred": [VOCABULARY]},
            {"allowed": [-1]},
            {"logit_bias": {10**6: 1.0}},
            {"token_ids": [VOCABULARY]},
        ],
    )
    def test_a_token_outside_the_vocabulary_is_refused(
        self, options: Mapping[str, Any], library: SamplingKernels
    ) -> None:
        with pytest.raises(BackendError, match="the vocabulary has not"):
            library.draw(logits_of("plain", 1), [Draw(0.5, **options)])
        with pytest.raises(BackendError, match="the vocabulary has not"):
            library.tell(logits_of("plain", 1), [Telling(0, 1, 1, listed=[VOCABULARY])])


def test_a_mask_bars_what_it_does_not_name(
    library: SamplingKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks of grammars go to the library as they are; the twin bars by them in torch."""
    logits = logits_of("flat", 2, 3)
    bits = np.random.default_rng(4).integers(0, 2**32, (3, 22), dtype=np.uint32).view(np.int32)
    bits[1] = -1
    draws = [Draw((n + 0.5) / 500, mask=bits[0]) for n in range(500)]
    allowed = np.unpackbits(bits[0].view(np.uint8), bitorder="little")[:VOCABULARY]
    drawn = library.draw(logits[:1].expand(500, -1), draws)
    assert allowed[drawn].all()
    assert len(set(drawn)) > 200
    rows = [make_row([1]) for _ in range(3)]
    monkeypatch.setattr(adjust, "grammar_masks", lambda rows: bits)
    monkeypatch.setattr(sampler, "grammar_masks", lambda rows: bits)
    monkeypatch.setattr(Row, "held", property(lambda row: True))
    assert sampler.sample(logits.clone(), rows) == sampler.sample(logits, rows, library)


def test_a_row_whose_options_the_library_refuses_fails_alone(library: SamplingKernels) -> None:
    bench = Bench()
    bench.runner.sampling_kernels = library
    bad, good = bench.add(make_row([1, 2], name="bad")), bench.add(make_row([3], name="good"))
    bad.sampling = replace(bad.sampling, logit_bias={10**6: 1.0})
    bench.run()
    assert bad.error is not None
    assert bad.error.code == ErrorCode.ENGINE_ERROR
    assert good.error is None
    assert good.output_token_ids[0] == next_token([3])


def test_a_row_of_nan_fails_alone_and_prompts_are_told_of(library: SamplingKernels) -> None:
    bench = Bench()
    bench.runner.sampling_kernels = library
    rows = [bench.add(make_row([n, 2, 3], name=str(n), prompt_logprobs=1)) for n in range(3)]
    bench.runner.nan_for = lambda row, place: row is rows[1] and place == 1
    bench.run()
    assert rows[1].error is not None
    assert rows[1].error.code == ErrorCode.NONFINITE_LOGITS
    for row in (rows[0], rows[2]):
        assert row.error is None
        assert [list(entry.top) for entry in row.prompt_logprobs] == [
            [next_token(row.token_ids[:place])] for place in (1, 2)
        ]
