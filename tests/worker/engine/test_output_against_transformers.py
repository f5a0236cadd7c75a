"""Stop texts end a row at the token at which transformers' `StopStringCriteria` end it, and log
probabilities are what its `LogitNormalization` gives."""

from __future__ import annotations

import random

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.generation.logits_process import LogitNormalization
from transformers.generation.stopping_criteria import StopStringCriteria

from tests.tiny import DEMO
from tests.worker.engine.conftest import make_row
from tidemill_worker.engine import sampler
from tidemill_worker.engine.detokenizer import Detokenizer
from tidemill_worker.engine.output import OutputText
from tidemill_worker.engine.row import RowSampling
from tidemill_worker.text import token_bytes

TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
PLAIN = TOKENIZER.get_vocab_size(with_added_tokens=False)
"""Ids from here on are added tokens: control tokens have no text in an output, and one here."""
WORDS = "the brown fox, žluť 汉字 👩‍🚒 12 + 30 = 42\n\nown foxes; the end."


def _stream(rng: random.Random) -> list[int]:
    """Words in the tokenizer's own tokens, in other cuts of them, and random tokens."""
    ids: list[int] = []
    while len(ids) < 60:
        start = rng.randrange(len(WORDS))
        piece = WORDS[start : start + rng.randint(1, 12)]
        if rng.random() < 0.3:
            ids.append(rng.randrange(PLAIN))
        elif rng.random() < 0.5:
            ids += TOKENIZER.encode(piece, add_special_tokens=False).ids
        else:
            for char in piece:
                ids += TOKENIZER.encode(char, add_special_tokens=False).ids
    return ids


def _our_step(ids: list[int], stops: list[str]) -> int | None:
    """After how many tokens a stop text is complete."""
    output = OutputText(Detokenizer(token_bytes(TOKENIZER)), stops)
    for step, token_id in enumerate(ids, start=1):
        if output.append(token_id) is not None:
            return step
    return None


def _their_step(ids: list[int], criteria: StopStringCriteria) -> int | None:
    for step in range(1, len(ids) + 1):
        if bool(criteria(torch.tensor([ids[:step]]), None)):
            return step
    return None


@pytest.mark.parametrize(
    "stops",
    [
        ["own fox"],
        ["e"],
        ["own", "own fox"],
        ["fox,", "2 + 3", "zzz"],
        ["\n\n"],
        ["ť 汉"],
        ["👩‍🚒"],
        ["\u200d", "the brown fox, žluť"],
    ],
    ids=repr,
)
def test_a_stop_text_ends_a_row_at_the_token_that_transformers_ends_it_at(
    stops: list[str],
) -> None:
    criteria = StopStringCriteria(
        PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json")), stops
    )
    rng = random.Random(3)
    steps = []
    for _ in range(30):
        ids = _stream(rng)
        steps.append(_our_step(ids, stops))
        assert steps[-1] == _their_step(ids, criteria), TOKENIZER.decode(ids)
    found = {step for step in steps if step is not None}
    assert len(found) > 4, "most streams hold a stop text somewhere"


def test_log_probabilities_are_those_of_transformers_logit_normalization() -> None:
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(8)) * 5
    logits[1, 3] = 60.0
    logits[2] *= 100
    logits[3] = 0.25
    sampling = RowSampling(temperature=0.7, top_p=0.5, top_k=9, seed=1, logprobs=6)
    rows = [make_row([1], 4) for _ in logits]
    for row in rows:
        row.sampling = sampling
    expected = LogitNormalization()(None, logits.clone())
    for line, choice in enumerate(sampler.sample(logits.clone(), rows)):
        told = choice.logprobs
        assert told is not None
        assert told.logprob == pytest.approx(float(expected[line, choice.token_id]), abs=1e-6)
        values = [float(expected[line, token_id]) for token_id in told.top]
        assert list(told.top.values()) == pytest.approx(values, abs=1e-6)
        assert values == pytest.approx(expected[line].topk(6).values.tolist(), abs=1e-6)
