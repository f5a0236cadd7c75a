"""Generation through a checkout in a child process, held to the contract in the tree."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.contracts.models.driver import int32
from tests.contracts.pypto.driver import VARIANT, Pypto, Served, make_checkout
from tidemill_contracts.models.contract import StageInputs

TOLERANCE = 0.25
"""Of bf16 logits that span some 20 units, computed by two orders of summation."""

HIDDEN_FIRST = (VARIANT / "constants.py", "HIDDEN_FIRST = False", "HIDDEN_FIRST = True")
OLDER_NAME = tuple(
    (name, "ModelContract", "ModelServingContract")
    for name in ("contract/base.py", "contract/registry.py", VARIANT / "contract.py")
)


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    generator = random.Random(seed)
    return [
        [generator.randrange(90) for _ in range(generator.randrange(1, 40))] for _ in range(count)
    ]


def check_same(served: Served, in_tree: Served, chunk: int = 10**6) -> None:
    """Ten rows: windows of four, the last half empty."""
    tokens, logits = served.generate(prompts(10), 12, chunk)
    expected_tokens, expected = in_tree.generate(prompts(10), 12)
    assert len({token for row in tokens for token in row}) > 20
    assert tokens == expected_tokens
    assert torch.allclose(logits, expected, atol=TOLERANCE, rtol=0.05)


def test_the_tokens_are_those_of_the_contract_in_the_tree(served: Served, in_tree: Served) -> None:
    check_same(served, in_tree)


def test_chunked_prompts_give_the_same_tokens(served: Served, in_tree: Served) -> None:
    check_same(served, in_tree, chunk=7)


@pytest.mark.parametrize("edits", [[HIDDEN_FIRST], OLDER_NAME], ids=["hidden_states", "older name"])
def test_older_checkouts_give_the_same_tokens(
    edits: list[tuple[Path, str, str]], tmp_path: Path, model_dir: Path, in_tree: Served
) -> None:
    with Pypto(make_checkout(tmp_path, *edits)) as pypto:
        served = pypto.serve(model_dir)
        check_same(served, in_tree)
        hidden_first = edits == [HIDDEN_FIRST]
        assert pypto.backend.features.host_embedding is hidden_first
        name = "ModelContract" if hidden_first else "ModelServingContract"
        assert pypto.backend.description.contract_type == name


def test_a_device_worker_that_forks_gives_the_same_tokens(
    checkout: Path, model_dir: Path, in_tree: Served
) -> None:
    with Pypto(checkout, platform="a2a3") as pypto:
        check_same(pypto.serve(model_dir), in_tree)


def test_a_negative_slot_is_not_written_though_the_kernels_do_not_guard_it(
    served: Served,
) -> None:
    row = served.row([3, 1, 4, 1, 5])
    served.prefill(row)
    row.tokens.append(9)
    before = served.decode(row)
    row.computed -= 1
    table, logits = int32([row.pages]), served.logits[:1]
    served.model.stages["decode"](
        StageInputs(int32([77]), int32([6]), table, int32([-1]), logits.clone())
    )
    # The last position, had it been written, would show in what is read there now.
    served.model.stages["decode"](StageInputs(int32([9]), int32([6]), table, int32([-1]), logits))
    assert torch.equal(logits[:, : served.config.vocab_size], before)


def test_packed_rows_may_lie_in_any_order(served: Served) -> None:
    first, second = served.row([5, 6, 7]), served.row([8, 9])
    expected = served.prefill(first, second)
    logits = served.logits[:2]
    table = int32([first.pages, second.pages])
    slots = [
        page * 8 + place
        for pages, n in ((second.pages, 2), (first.pages, 3))
        for page in pages
        for place in range(n)
    ]
    served.model.stages["prefill"](
        StageInputs(
            input_ids=int32([8, 9, 5, 6, 7]),
            seq_lens=int32([3, 2]),
            block_table=table,
            slot_mapping=int32(slots),
            logits=logits,
            chunk_lens=int32([3, 2]),
            chunk_offsets=int32([2, 0]),
        )
    )
    assert torch.equal(logits[:, : served.config.vocab_size], expected)
