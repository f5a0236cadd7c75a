"""Checks of rows and chunks: logits, positions, and that neither company nor chunking matters."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tidemill_contracts.models.conformance.harness import Edit, Row
from tidemill_contracts.models.conformance.session import (
    STEPS,
    CheckFailed,
    CheckSkipped,
    Session,
)
from tidemill_contracts.models.contract import Phase, StageInputs


def logits_written(session: Session) -> None:
    """Every call writes finite logits for each of its rows, not all alike, and none past them."""
    for name, logits in _whole_logits(session, past=1).items():
        rows, spare = logits[:-1], logits[-1]
        wrong = (~rows[:, : session.case.config.vocab_size].isfinite()).nonzero()
        if len(wrong):
            row, token = wrong[0].tolist()
            raise CheckFailed(
                f"{name}: the logit of token id {token} in row {row} is {rows[row, token]:g};"
                f" {len(wrong)} are not finite"
            )
        if rows.std() == 0:
            raise CheckFailed(f"{name}: all logits are {rows[0, 0]:g}")
        if len(rows) > 1 and torch.equal(rows, rows[:1].expand_as(rows)):
            raise CheckFailed(f"{name}: {len(rows)} rows of different tokens have the same logits")
        if not spare.isnan().all():
            raise CheckFailed(f"{name} of {len(rows)} rows writes logits of a row {len(rows)}")


def pad_vocabulary(session: Session) -> None:
    """Logits past the real vocabulary are finite, so that a sampler may slice them off."""
    real = session.case.config.vocab_size
    width = session.contract.hooks.logits_width(session.case.config)
    if width < real:
        raise CheckFailed(f"logits_width() is {width}, the vocabulary has {real} tokens")
    if width == real:
        raise CheckSkipped("the logits are as wide as the vocabulary: nothing is padded")
    for name, logits in _whole_logits(session).items():
        wrong = (~logits[:, real:].isfinite()).nonzero()
        if len(wrong):
            row, token = wrong[0].tolist()
            raise CheckFailed(
                f"{name}: the logit of pad token id {real + token} in row {row} is"
                f" {logits[row, real + token]:g}"
            )


def _whole_logits(session: Session, past: int = 0) -> dict[str, Tensor]:
    """The logits of a prefill and a decode, padding included, and `past` rows more, which are
    NaN unless a stage has written there."""
    harness = session.harness()
    found: dict[str, Tensor] = {}

    def note(name: str) -> Edit:
        def edit(inputs: StageInputs) -> StageInputs:
            rows = len(inputs.seq_lens)
            found[name] = harness.logits(rows + past)
            return replace(inputs, logits=found[name][:rows])

        return edit

    rows = [Row() for _ in session.prompts]
    harness.prefill(*zip(rows, session.prompts, strict=True), edit=note("prefill"))
    harness.decode(*((row, 1) for row in rows), edit=note("decode"))
    return {name: logits.cpu() for name, logits in found.items()}


def last_token_logits(session: Session) -> None:
    """A chunk's logits are those of its last token."""
    harness = session.harness()
    found = harness.prefill(*((Row(), prompt) for prompt in session.prompts))
    harness = session.harness()
    rows = [Row() for _ in session.prompts]
    harness.prefill(
        *((row, prompt[:-1]) for row, prompt in zip(rows, session.prompts, strict=True))
    )
    expected = harness.prefill(
        *((row, prompt[-1:]) for row, prompt in zip(rows, session.prompts, strict=True))
    )
    labels = [f"row {row}, {len(prompt)} tokens" for row, prompt in enumerate(session.prompts)]
    session.expect(found, expected, labels, "where the last token is a chunk of its own")


def prompt_logits(session: Session) -> None:
    """Score gives the logits of just the tokens that are asked for, as prefills that end there."""
    if "score" not in session.model().stages:
        raise CheckSkipped("the contract has no phase `score`")
    chunks = [prompt[:-1] for prompt in session.prompts]
    packed = [(row, end) for row, chunk in enumerate(chunks) for end in range(1, len(chunk) + 1)]
    # Neither all tokens nor in order, but among them every chunk's last one.
    asked = [
        token
        for token, (row, end) in reversed(list(enumerate(packed)))
        if end == len(chunks[row]) or end % 3 == 0
    ]
    harness, rows = session.harness(), [Row() for _ in chunks]
    found = harness.score(*zip(rows, chunks, strict=True), logit_rows=asked)
    decoded = harness.decode(*((row, 1) for row in rows))
    places = [packed[token] for token in asked]
    expected = [session.harness().prefill((Row(), chunks[row][:end])) for row, end in places]
    labels = [f"row {row}, token {end} of {len(chunks[row])}" for row, end in places]
    session.expect(found, torch.cat(expected), labels, "in a prefill that ends there")

    harness, rows = session.harness(), [Row() for _ in chunks]
    harness.prefill(*zip(rows, chunks, strict=True))
    labels = [f"row {row}, the decode after it" for row in range(len(rows))]
    session.expect(decoded, harness.decode(*((row, 1) for row in rows)), labels, "after prefill")


def absolute_positions(session: Session) -> None:
    """A later chunk's tokens have the positions that they have in the row, as decode counts."""
    prompt = session.prompts[0]
    for start in dict.fromkeys((1, session.runtime.page_size - 1, len(prompt) // 2)):
        if not 0 < start < len(prompt) - 3:
            continue
        harness, row = session.harness(), Row()
        harness.prefill((row, prompt[:start]))
        found = harness.prefill((row, prompt[start:-1]))
        found = torch.cat((found, harness.decode((row, prompt[-1]))))
        harness, row = session.harness(), Row()
        harness.prefill((row, prompt[:start]))
        steps = [harness.decode((row, token)) for token in prompt[start:]]
        labels = [f"the chunk from position {start}", "the decode after it"]
        session.expect(found, torch.cat(steps[-2:]), labels, "decoded token by token")


def chunk_offsets(session: Session) -> None:
    """`chunk_offsets` says where a chunk lies; the packed order need not be the rows' order."""
    session.need_rows(2)
    one, two = session.prompts[0][:7], session.prompts[0][-12:]
    expected = session.harness().prefill((Row(), one), (Row(), two))

    def swap(inputs: StageInputs) -> StageInputs:
        assert inputs.chunk_offsets is not None
        first = len(one)
        return replace(
            inputs,
            input_ids=inputs.input_ids.roll(-first),
            slot_mapping=inputs.slot_mapping.roll(-first),
            chunk_offsets=torch.tensor([len(two), 0]).to(inputs.chunk_offsets),
        )

    found = session.harness().prefill((Row(), one), (Row(), two), edit=swap)
    session.expect(found, expected, ["row 0", "row 1"], "packed in the rows' order")


def chunked_equals_whole(session: Session) -> None:
    """A prompt in chunks, which may cross pages, gives what it gives whole."""
    page = session.runtime.page_size
    for chunk in sorted({3, max(1, page - 1), page}):
        found = session.harness().run(session.prompts, STEPS, chunk=chunk)
        session.expect_run(
            found, session.clean, session.prompts, f"whole, not in chunks of {chunk}"
        )


def decode_equals_prefill(session: Session) -> None:
    """Decoding a token gives what prefilling it gives."""
    for step in range(STEPS):
        ends = [prompt[: len(prompt) - STEPS + step + 1] for prompt in session.prompts]
        expected = session.harness().prefill(*((Row(), end) for end in ends))
        labels = [f"row {row}, decode at length {len(end)}" for row, end in enumerate(ends)]
        session.expect(session.clean[:, step + 1], expected, labels, "in one prefill")


def batch_equals_alone(session: Session) -> None:
    """A row gives the same in any company and in any place of the batch."""
    session.need_rows(3)
    alone = [session.harness().run([prompt], STEPS) for prompt in session.prompts]
    session.expect_run(session.clean, torch.cat(alone), session.prompts, "alone")
    found = session.harness().run(session.prompts[::-1], STEPS).flip(0)
    session.expect_run(found, session.clean, session.prompts, "in the opposite order of rows")


def padding_rows(session: Session) -> None:
    """Padding rows that repeat row 0, its slot included, change no other row and no place."""
    real = session.prompts[:2]
    session.need_rows(len(real) + 2)

    def pad(inputs: StageInputs) -> StageInputs:
        named = {
            name: torch.cat((tensor, tensor[:1], tensor[:1]))
            for name, tensor in inputs.named().items()
            if tensor is not None
        }
        return replace(inputs, **named)

    results: list[tuple[Tensor, Tensor]] = []
    for edit in (None, pad):
        harness = session.harness()
        rows = [Row() for _ in real]
        harness.prefill(*zip(rows, real, strict=True))
        logits = harness.decode(*((row, 1) for row in rows), edit=edit)
        following = harness.decode(*((row, 2) for row in rows))
        results.append((logits, following))
    (expected, after), (padded, after_padded) = results
    labels = [f"row {row}" for row in range(len(real))]
    session.expect(padded[: len(real)], expected, labels, "without padding rows")
    pads = [f"padding row {row}" for row in range(len(real), len(padded))]
    session.expect(padded[len(real) :], expected[:1].expand(2, -1), pads, "in row 0")
    session.expect(after_padded, after, [f"{label}, next" for label in labels], "without padding")


def inputs_not_written(session: Session) -> None:
    """A stage leaves every argument that is declared `in` as it was, and the logical inputs too."""
    model = session.model()
    kept: list[tuple[str, Tensor, Tensor]] = []

    def note(phase: Phase) -> Edit:
        def edit(inputs: StageInputs) -> StageInputs:
            kernel = session.contract.stage(phase)
            args = kernel.runtime_args_builder(inputs, model.static, model.cache)
            read = {
                spec.name: arg
                for spec, arg in zip(kernel.args, args, strict=True)
                if spec.direction == "in"
            }
            read |= {
                name: tensor
                for name, tensor in inputs.named().items()
                if tensor is not None and name != "logits"
            }
            kept.extend(
                (f"{kernel.public_name}.{name}", tensor, tensor.clone())
                for name, tensor in read.items()
            )
            return inputs

        return edit

    harness = session.harness()
    rows = [Row() for _ in session.prompts]
    harness.prefill(*zip(rows, session.prompts, strict=True), edit=note("prefill"))
    harness.decode(*((row, 1) for row in rows), edit=note("decode"))
    for name, tensor, before in kept:
        if not torch.equal(tensor, before):
            changed = int((tensor != before).sum())
            raise CheckFailed(f"{name} is read only, but {changed} of its elements were written")


def largest_step(session: Session) -> None:
    """As many rows as the run allows, as long as it allows, give what each gives alone."""
    full = session.runtime.max_seq_len
    prompts = [session.tokens(full, seed) for seed in range(session.runtime.max_batch_size)]
    found = session.harness().run(prompts, 1)
    chosen = [0, len(prompts) - 1]
    for row in chosen:
        expected = session.harness().run([prompts[row]], 1, chunk=max(1, full // 2))
        session.expect_run(found[row : row + 1], expected, [prompts[row]], f"alone (row {row})")


def reference_logits(session: Session) -> None:
    """Prefill and decode give the logits of the reference, which runs in float32."""
    reference = session.reference()
    expected = reference.harness().run(session.prompts, STEPS)
    session.expect_run(session.clean, expected, session.prompts, "in the reference")
