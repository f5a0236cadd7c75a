"""Receipts: what they cover, and that a difference is named."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from tidemill_contracts.wire import GenerationResult, Receipt, Timings, Usage
from tidemill_contracts.wire.receipt import differences, hash_json, problems

FACTS: dict[str, Any] = {
    "weights": "aa",
    "contract": "bb",
    "chat_template": None,
    "prompt_token_ids": [1, 2],
    "sampling": {"temperature": 0.5, "logit_bias": {3: 1.0}, "seed": 7},
    "outputs": [[4, 5], [6]],
    "dtype": "float32",
    "quantization": None,
    "deterministic": True,
}


def _result(receipt: Receipt | None, **changes: Any) -> GenerationResult:
    fields: dict[str, Any] = {
        "text": None,
        "token_ids": [4, 5],
        "finish_reason": "length",
        "id": "job",
        "model": "tiny",
        "usage": Usage(prompt_tokens=2, completion_tokens=2),
        "timings": Timings(queued_ms=0, first_token_ms=0, total_ms=0),
        "receipt": receipt,
    }
    return GenerationResult(**{**fields, **changes})


def test_the_hashes_are_plain_sha256_of_plain_json() -> None:
    receipt = Receipt.of(**FACTS)
    assert receipt.prompt == hashlib.sha256(b"[1,2]").hexdigest()
    assert receipt.outputs == hashlib.sha256(b"[[4,5],[6]]").hexdigest()
    text = b'{"logit_bias":{"3":1.0},"seed":7,"temperature":0.5}'
    assert receipt.sampling == hashlib.sha256(text).hexdigest()


def test_the_same_facts_give_the_same_receipt_in_any_order() -> None:
    sampling = dict(reversed(FACTS["sampling"].items()))
    assert Receipt.of(**{**FACTS, "sampling": sampling}) == Receipt.of(**FACTS)
    assert differences(Receipt.of(**FACTS), Receipt.of(**FACTS)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": "cc"}, "other weights: aa and cc"),
        ({"contract": "cc"}, "another model serving contract: bb and cc"),
        ({"chat_template": "cc"}, "another chat template"),
        ({"prompt_token_ids": [12]}, "another prompt"),
        ({"sampling": {"temperature": 0.5}}, "another sampling"),
        ({"dtype": "bfloat16"}, "another dtype: float32 and bfloat16"),
        ({"quantization": "int8"}, "another quantisation: None and int8"),
        ({"deterministic": False}, "one ran in deterministic mode, the other not"),
        ({"outputs": [[4, 5, 6]]}, "another machine"),
    ],
)
def test_a_difference_is_named(change: dict[str, Any], said: str) -> None:
    one, other = Receipt.of(**FACTS), Receipt.of(**{**FACTS, **change})
    assert one.digest != other.digest
    (found,) = differences(one, other)
    assert said in found


def test_causes_come_before_other_outputs() -> None:
    changed = {**FACTS, "prompt_token_ids": [9], "outputs": [[1]]}
    found = differences(Receipt.of(**FACTS), Receipt.of(**changed))
    assert found == ["another prompt", "other outputs"]


def test_other_outputs_alone_without_deterministic_mode_are_explained() -> None:
    facts = {**FACTS, "deterministic": False}
    (found,) = differences(Receipt.of(**facts), Receipt.of(**{**facts, "outputs": [[1]]}))
    assert "deterministic mode would have ruled out" in found


def test_a_result_is_held_to_its_own_receipt() -> None:
    receipt = Receipt.of(**{**FACTS, "outputs": [[4, 5]]})
    assert problems(_result(receipt), [1, 2]) == []
    assert problems(_result(receipt), [1, 3]) == [
        "the prompt is not the one that the receipt was made for"
    ]
    assert problems(_result(receipt, token_ids=[4])) == [
        "the outputs are not those that the receipt was made for"
    ]
    forged = msgspec.structs.replace(receipt, outputs=hash_json([[4]]))
    assert problems(_result(forged, token_ids=[4])) == [
        "the receipt's own digest does not fit it: it was changed"
    ]
    assert problems(_result(None)) == ["the result has no receipt"]
