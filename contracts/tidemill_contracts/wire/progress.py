"""How far a job has come: what the next worker goes on from where this one stops.

A checkpoint is a list of pieces, each an encoded `Progress` with what was added since the piece
before. Whatever follows from the tokens (text, thoughts, a grammar's state, penalties) is not in
it: the next worker replays them. Nor are random numbers: the n-th draw of an output follows from
its seed and n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from tidemill_contracts.wire.errors import TidemillError
from tidemill_contracts.wire.job import TokenId
from tidemill_contracts.wire.result import FinishReason, TokenLogprobs

PROGRESS_VERSION = 1
MAX_PROGRESS_BYTES = 4 * 1024 * 1024
"""Largest checkpoint of one job: whatever its outputs gain after that is generated again."""


class UnfitProgress(TidemillError):
    """A checkpoint that a worker cannot go on from: the job starts anew."""


class OutputProgress(msgspec.Struct, frozen=True, kw_only=True):
    """One output of a job. Times are seconds since the Unix epoch, 0 for what is yet to come."""

    token_ids: list[TokenId] = []
    """Generated since the piece before."""
    logprobs: list[TokenLogprobs] = []
    """One for each of these tokens, where the job asks for them."""
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    finish_reason: FinishReason | None = None
    """Of an output that has ended, as is `stop_reason`."""
    stop_reason: str | int | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's outputs have gained since the piece before, or since the start."""

    basis: str
    """A hash of all that the tokens were generated from: weights, contract, dtype, prompt, job.
    Tokens of another basis are foreign."""
    seed: Annotated[int, Meta(ge=0)]
    """Of the first output: the job's own, or the one that was drawn for it."""
    outputs: list[OutputProgress]
    """Every output of the job, in order."""
    cached_tokens: int = 0
    """For the result's `Usage`."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Where the job asks for them: in the first piece."""
    schema_version: int = PROGRESS_VERSION


class _Version(msgspec.Struct):
    schema_version: int


_version_decoder = msgspec.msgpack.Decoder(_Version)
_decoder = msgspec.msgpack.Decoder(Progress)
encode_progress = msgspec.msgpack.Encoder().encode


def decode_progress(pieces: Sequence[bytes]) -> Progress:
    """The sum of a checkpoint's pieces, of which there is at least one. Raises `UnfitProgress`."""
    try:
        # Another version's fields may not even decode.
        versions = {_version_decoder.decode(piece).schema_version for piece in pieces}
        if versions != {PROGRESS_VERSION}:
            found = " and ".join(map(str, sorted(versions)))
            raise UnfitProgress(f"it has schema version {found}, not {PROGRESS_VERSION}")
        first, *rest = map(_decoder.decode, pieces)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnfitProgress(f"it cannot be decoded: {error}") from error
    heads = {(piece.basis, piece.seed, len(piece.outputs)) for piece in (first, *rest)}
    if len(heads) > 1:
        raise UnfitProgress("its pieces belong to different runs")
    parts = [first, *rest]
    return msgspec.structs.replace(
        parts[-1],
        outputs=[_sum(pieces) for pieces in zip(*(part.outputs for part in parts), strict=True)],
        prompt_logprobs=[entry for part in parts for entry in part.prompt_logprobs],
    )


def _sum(pieces: Sequence[OutputProgress]) -> OutputProgress:
    return msgspec.structs.replace(
        pieces[-1],
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        logprobs=[entry for piece in pieces for entry in piece.logprobs],
    )
