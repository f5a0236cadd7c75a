"""What the worker asks of whatever generates for it: a `Batcher`, or a stand-in without a model.

The start-up hook puts one in the worker's context as ``batcher``. Nothing here needs torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tidemill_contracts.wire import GenerationJob, GenerationResult, TidemillError

if TYPE_CHECKING:
    from tidemill_worker.progress import Recorder


class EngineCrashed(TidemillError):
    """The engine's loop has failed: a fault of the worker, whose log has the traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a generator is, and what it does now; as in `WorkerStatus`."""

    model: str
    contract: str
    device: str
    dtype: str
    rows_running: int
    rows_waiting: int
    pages_held: int
    eta_s: float | None
    steps: int
    row_steps: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int


class Generator(Protocol):
    """Generates for any number of callers at once."""

    crashed: asyncio.Future[None]
    """Never done, unless it crashes: then it raises."""

    @property
    def figures(self) -> Figures: ...

    def recorder(self, job_id: str) -> Recorder | None:
        """Tells of the progress of a job that runs; ``None`` where there is nothing to tell."""

    async def generate(
        self,
        job: GenerationJob,
        job_id: str,
        enqueued_at: float,
        checkpoint: Sequence[bytes] = (),
    ) -> GenerationResult:
        """Runs one job to its end. Raises `JobFailed` and `EngineCrashed`."""

    async def close(self) -> None: ...
