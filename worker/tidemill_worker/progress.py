"""How far a running job has come, told in pieces, and going on from what another worker told.

What a row's state follows from is its tokens: a new row to which they are appended again has the
same text, thoughts, grammar and penalties, and draws the same tokens from there on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec

from tidemill_contracts.models.fingerprint import sample_weights
from tidemill_contracts.models.startup import ServedModel
from tidemill_contracts.wire import GenerationJob
from tidemill_contracts.wire.progress import (
    OutputProgress,
    Progress,
    UnfitProgress,
    decode_progress,
    encode_progress,
)
from tidemill_contracts.wire.receipt import hash_json
from tidemill_worker.engine.row import Row
from tidemill_worker.outputs import settled_sampling
from tidemill_worker.text import TextModel

_encode = msgspec.msgpack.Encoder().encode


def hash_model(model: ServedModel, text: TextModel) -> str:
    """Of what a served model makes its tokens with."""
    runtime = model.runtime
    return hash_json(
        {
            "weights": sample_weights(text.model_dir),
            "tokens": hashlib.sha256(b"\0".join(text.token_bytes)).hexdigest(),
            "chat_template": text.templates_hash,
            "contract": model.contract.abi_fingerprint(),
            "dtype": str(runtime.dtype),
            "deterministic": runtime.deterministic,
        }
    )


def basis_of(model_hash: str, job: GenerationJob, row: Row) -> str:
    """Of all that a job's tokens follow from, but for a seed that is drawn; `row` is its first."""
    sampling = {**settled_sampling(job, row), "seed": job.sampling.seed}
    facts = [model_hash, job, sampling, row.token_ids[: row.prompt_len]]
    return hashlib.sha256(_encode(facts)).hexdigest()[:32]


class Recorder:
    """Tells of one job's progress while the engine's thread moves it on."""

    def __init__(self, rows: Sequence[Row], basis: Callable[[], str]) -> None:
        """`rows` may have been resumed: the next piece then follows those that they were resumed
        from."""
        self._rows = rows
        self._basis = basis
        self._taken = [row.resumed for row in rows]
        self._prompt_taken = len(rows[0].prompt_logprobs)

    @property
    def started(self) -> bool:
        """Whether any of its rows has been in a step here."""
        return any(
            row.table_index >= 0 or row.preemptions or row.generated > row.resumed
            for row in self._rows
        )

    @property
    def resumed(self) -> bool:
        """Whether any of its rows goes on from where another worker left it."""
        return any(row.resumed for row in self._rows)

    @property
    def gained(self) -> int:
        """Tokens of all outputs since the last piece."""
        return sum(row.generated for row in self._rows) - sum(self._taken)

    def take(self) -> bytes:
        """The piece that follows the last one."""
        outputs = [_since(row, taken) for row, taken in zip(self._rows, self._taken, strict=True)]
        first = self._rows[0]
        prompt_logprobs = first.prompt_logprobs[self._prompt_taken :]
        self._prompt_taken += len(prompt_logprobs)
        self._taken = [
            taken + len(output.token_ids)
            for taken, output in zip(self._taken, outputs, strict=True)
        ]
        return encode_progress(
            Progress(
                basis=self._basis(),
                seed=first.sampling.seed,
                outputs=outputs,
                cached_tokens=first.cached,
                prompt_logprobs=prompt_logprobs,
            )
        )

    def rewind(self) -> None:
        """Makes the next piece a first one, with everything."""
        self._taken = [0] * len(self._rows)
        self._prompt_taken = 0


def _since(row: Row, taken: int) -> OutputProgress:
    # The engine adds a token's log probabilities before the token, and how the row ends after it:
    # read in this order, what is read is whole.
    token_ids = row.token_ids[row.prompt_len + taken :]
    return OutputProgress(
        token_ids=token_ids,
        logprobs=row.logprobs[taken : taken + len(token_ids)],
        scheduled_at=row.scheduled_at,
        first_token_at=row.first_token_at,
        finished_at=row.finished_at,
        finish_reason=row.finish_reason,
        stop_reason=row.stop_reason,
    )


def read_progress(
    pieces: Sequence[bytes], *, basis: str, outputs: int, vocab_size: int
) -> Progress:
    """A job's checkpoint. Raises `UnfitProgress` where it is not one of this job and model."""
    progress = decode_progress(pieces)
    if progress.basis != basis:
        raise UnfitProgress("another model, contract or version of the job made it")
    if len(progress.outputs) != outputs:
        raise UnfitProgress(f"it has {len(progress.outputs)} outputs, not {outputs}")
    if max((max(o.token_ids, default=0) for o in progress.outputs), default=0) >= vocab_size:
        raise UnfitProgress("it has tokens that are not in the vocabulary")
    return progress


def resume(rows: Sequence[Row], progress: Progress, now: float) -> None:
    """Brings new rows, seeded as the checkpoint's were, to where it says; `now` in seconds since
    the Unix epoch.

    Raises `UnfitProgress`, whereupon the rows are of no use any more.
    """
    for row, output in zip(rows, progress.outputs, strict=True):
        told = len(output.logprobs) if row.sampling.wants_logprobs else len(output.token_ids)
        if told != len(output.token_ids):
            raise UnfitProgress("it lacks log probabilities")
        if not row.replay(output.token_ids, output.first_token_at):
            raise UnfitProgress(f"its tokens are not such as {row.id} could have generated")
        row.logprobs = list(output.logprobs)
        row.scheduled_at = output.scheduled_at
        if row.finish_reason is None:
            # What ends a row otherwise than by its last token cannot be replayed.
            row.finish_reason, row.stop_reason = output.finish_reason, output.stop_reason
        if row.ended:
            row.finished_at = output.finished_at or now
    rows[0].cached = progress.cached_tokens
    rows[0].prompt_logprobs = list(progress.prompt_logprobs)
    if rows[0].resumed and rows[0].untold:
        raise UnfitProgress("it lacks log probabilities of the prompt")
