"""Stop texts end a row at the token at which transformers' own criterion would end it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, StopStringCriteria

import tidemill_worker
from tidemill_contracts.models.config import load_config
from tidemill_worker.engine.output import OutputText
from tidemill_worker.text import TextModel

MODEL = Path(tidemill_worker.__file__).parent / "demo_model"
STREAMS, LENGTH = 40, 60


@pytest.fixture(scope="module")
def text() -> TextModel:
    return TextModel(MODEL, load_config(MODEL))


@pytest.fixture(scope="module")
def ascii_tokens(text: TextModel) -> list[int]:
    """Tokens of printable ASCII: transformers matches characters, and so tears no others."""
    special = set(text.special_token_ids)
    return [
        token
        for token, raw in enumerate(text.token_bytes)
        if raw and token not in special and all(32 <= byte < 127 for byte in raw)
    ]


@pytest.mark.parametrize(
    "stops", [["e"], ["th", "the"], ["a b"], ["in", "n", "er t"], [" the s", "es", "q"]]
)
def test_a_row_ends_at_the_same_token(
    text: TextModel, ascii_tokens: list[int], stops: list[str]
) -> None:
    theirs = StopStringCriteria(
        PreTrainedTokenizerFast(tokenizer_file=str(MODEL / "tokenizer.json")), stops
    )
    rng = random.Random(5)
    ended = 0
    for _ in range(STREAMS):
        tokens = rng.choices(ascii_tokens, k=LENGTH)
        detokenizer = text.detokenizer(True)
        assert detokenizer is not None
        ours = OutputText(detokenizer, stops)
        for count in range(1, LENGTH + 1):
            found = ours.append(tokens[count - 1]) is not None
            scores = torch.empty(1, 0)
            assert bool(theirs(torch.tensor([tokens[:count]]), scores)[0]) == found
            if found:
                ended += 1
                break
    assert ended > 0, "these stop texts never come"
