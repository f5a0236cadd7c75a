"""Writes how far running jobs have come to Redis, every so many tokens or seconds, so that little
is generated again when their worker dies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tidemill_contracts.wire.progress import MAX_PROGRESS_BYTES
from tidemill_worker.queue import Claim, JobQueue, Piece

if TYPE_CHECKING:
    from tidemill_worker.progress import Recorder

logger = logging.getLogger("tidemill.worker")


@dataclass(slots=True)
class _Kept:
    """What Redis has of one job's progress."""

    recorder: Recorder
    pieces: int
    size: int
    """Bytes of these pieces."""
    written_at: float = field(default_factory=time.monotonic)
    certain: bool = True
    """Whether Redis is known to have no more than these pieces, and no less."""
    full: bool = False


class Checkpoints:
    """The checkpoints of the jobs that a worker holds."""

    def __init__(
        self,
        queue: JobQueue,
        recorder_of: Callable[[str], Recorder | None],
        *,
        tokens: int,
        seconds: float,
    ) -> None:
        """A job is due when it has gained `tokens`, or any and `seconds` have passed; 0 tokens:
        never."""
        self._queue = queue
        self._recorder_of = recorder_of
        self._tokens = tokens
        self._seconds = seconds
        self._kept: dict[str, _Kept] = {}

    async def write(self, claims: Mapping[str, Claim]) -> None:
        """Writes what is due of these jobs in one call."""
        for job_id in self._kept.keys() - claims.keys():
            del self._kept[job_id]
        pieces: dict[str, Piece] = {}
        for claim in claims.values():
            kept = self._find(claim)
            if kept is not None and self._is_due(kept):
                piece = self._next(claim, kept)
                if piece is not None:
                    pieces[claim.id] = piece
        if not pieces:
            return
        written = [self._kept[job_id] for job_id in pieces]
        for kept in written:
            kept.certain = False
        taken = await self._queue.checkpoint(list(pieces.values()))
        for kept, piece, was_taken in zip(written, pieces.values(), taken, strict=True):
            kept.certain = was_taken
            if was_taken:
                kept.pieces = piece.after + 1
                kept.size = (kept.size if piece.after else 0) + len(piece.data)

    def last(self, claim: Claim) -> Piece | None:
        """All that the job has gained since its checkpoint; ``None`` where that is nothing."""
        kept = self._find(claim)
        if kept is None or kept.full or not self._tokens:
            return None
        return self._next(claim, kept) if kept.recorder.gained or not kept.certain else None

    def _find(self, claim: Claim) -> _Kept | None:
        recorder = self._recorder_of(claim.id)
        if recorder is None:
            return None
        kept = self._kept.get(claim.id)
        if kept is None or kept.recorder is not recorder:
            if recorder.resumed:
                pieces, size = len(claim.progress), sum(map(len, claim.progress))
            else:
                recorder.rewind()
                pieces = size = 0
            kept = self._kept[claim.id] = _Kept(recorder, pieces, size)
        return kept

    def _is_due(self, kept: _Kept) -> bool:
        if not self._tokens or kept.full:
            return False
        gained = kept.recorder.gained
        return gained >= self._tokens or (
            gained > 0 and time.monotonic() - kept.written_at >= self._seconds
        )

    def _next(self, claim: Claim, kept: _Kept) -> Piece | None:
        if not kept.certain:
            # Redis went away, or has lost it: from the start again.
            kept.recorder.rewind()
            kept.pieces = kept.size = 0
        data = kept.recorder.take()
        kept.written_at = time.monotonic()
        if kept.size + len(data) > MAX_PROGRESS_BYTES:
            kept.full = True
            logger.info("%s has more progress than a checkpoint may hold", claim.id)
            return None
        return Piece(claim, kept.pieces, data)
