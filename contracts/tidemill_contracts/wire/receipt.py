"""A receipt: what a result was made from, in hashes that anyone can compute again.

Two receipts that are equal say that weights, kernels' contract, template, prompt, sampling and
outputs were the same. A receipt is no signature: it does not show that a worker ran what it says,
only that two statements agree, and where they part. Hashes are sha256 in hex.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from tidemill_contracts.wire.result import GenerationResult


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The hashes of one result. `of` makes it, `differences` compares two."""

    weights: str
    """Of the checkpoint's tensors: `tidemill_contracts.models.fingerprint.hash_weights`."""
    contract: str
    """The fingerprint of the model serving contract."""
    chat_template: str | None
    """Of the model's chat templates; ``None`` for a job that is no chat."""
    prompt: str
    """Of the prompt's token ids."""
    sampling: str
    """Of the effective sampling, the seed and every limit included."""
    outputs: str
    """Of the token ids of every output, in order."""
    dtype: str
    """Of weights and KV cache, such as ``bfloat16``."""
    quantization: str | None
    """What the weights were rounded to, such as ``int8``; ``None`` for those of the dtype."""
    deterministic: bool
    """Whether the worker ran in deterministic mode. Where it did not, equal inputs may still have
    come to other outputs in other batches."""
    digest: str
    """Of all of the above."""

    @classmethod
    def of(
        cls,
        *,
        weights: str,
        contract: str,
        chat_template: str | None,
        prompt_token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        outputs: Sequence[Sequence[int]],
        dtype: str,
        quantization: str | None,
        deterministic: bool,
    ) -> Receipt:
        facts: dict[str, Any] = {
            "weights": weights,
            "contract": contract,
            "chat_template": chat_template,
            "prompt": hash_json(list(prompt_token_ids)),
            "sampling": hash_json(dict(sampling)),
            "outputs": hash_json([list(ids) for ids in outputs]),
            "dtype": dtype,
            "quantization": quantization,
            "deterministic": deterministic,
        }
        return cls(**facts, digest=hash_json(facts))


_WORDS = {
    "weights": "other weights",
    "contract": "another model serving contract",
    "chat_template": "another chat template",
    "prompt": "another prompt",
    "sampling": "another sampling",
    "dtype": "another dtype",
    "quantization": "another quantisation",
    "deterministic": "one ran in deterministic mode, the other not",
    "outputs": "other outputs",
}


def hash_json(value: object) -> str:
    """Of the value's canonical JSON: keys sorted, no spaces, ASCII."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(one: Receipt, other: Receipt) -> list[str]:
    """What differs between two results, in words, causes before outputs; empty where nothing
    does. Where nothing but the outputs differs, and neither run was deterministic, that is said."""
    found = [name for name in _WORDS if getattr(one, name) != getattr(other, name)]
    words = [
        f"{_WORDS[name]}: {getattr(one, name)} and {getattr(other, name)}"
        if name in ("dtype", "quantization", "contract", "weights")
        else _WORDS[name]
        for name in found
    ]
    if found == ["outputs"]:
        words = [
            "other outputs from the same inputs in deterministic mode: another machine, another"
            " build or number of threads, or a fault"
            if one.deterministic
            else "other outputs from the same inputs, which deterministic mode would have ruled out"
        ]
    return words


def problems(result: GenerationResult, prompt_token_ids: Sequence[int] | None = None) -> list[str]:
    """Where a result does not agree with its own receipt, in words; empty where it does.

    The prompt is compared where it is given: a result does not hold it.
    """
    receipt = result.receipt
    if receipt is None:
        return ["the result has no receipt"]
    found = []
    outputs = [output.token_ids for output in result.outputs] or [result.token_ids]
    if hash_json(outputs) != receipt.outputs:
        found.append("the outputs are not those that the receipt was made for")
    if prompt_token_ids is not None and hash_json(list(prompt_token_ids)) != receipt.prompt:
        found.append("the prompt is not the one that the receipt was made for")
    facts = msgspec.structs.asdict(receipt)
    digest = facts.pop("digest")
    if hash_json(facts) != digest:
        found.append("the receipt's own digest does not fit it: it was changed")
    return found
