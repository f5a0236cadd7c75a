"""The exceptions of the producer's side; each says what to do.

TidemillError                 (tidemill_contracts.wire)
├── InvalidMessage            (wire) the job breaks the contract; nothing was written
├── JobFailed                 (wire) the job ended with a `JobError`
├── QueueUnavailable          Redis cannot be reached, or refuses
├── QueueFull                 the queue holds as much as its limits allow; nothing was written
├── JobConflict               the id, or the idempotency key, belongs to another job
├── ResultTimeout             the result did not come within the caller's timeout
├── UnknownJob                neither the job nor its result is in Redis
├── EmbeddedFailed            the embedded server or worker cannot be started, or died
└── BatchError                a batch file cannot be run, or its run was given up
"""

from __future__ import annotations

from tidemill_contracts.wire import TidemillError


class QueueUnavailable(TidemillError):
    """Redis cannot be reached, or refuses to serve."""


class QueueFull(TidemillError):
    """The queue holds as much as its limits allow; the job was not written."""

    def __init__(self, message: str, *, job_id: str, expected_wait_s: float | None) -> None:
        super().__init__(message)
        self.job_id = job_id
        """The first job that was refused."""
        self.expected_wait_s = expected_wait_s
        """Seconds until there may be room, by what the workers say of themselves; ``None`` where
        they do not know."""


class JobConflict(TidemillError):
    """A job of that id, or idempotency key, asks for something else; nothing was written."""

    def __init__(self, message: str, *, job_id: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class ResultTimeout(TidemillError):
    """The result did not come within the caller's timeout. The job goes on."""


class UnknownJob(TidemillError):
    """Neither the job nor its result is in Redis: never enqueued, or expired since."""


class EmbeddedFailed(TidemillError):
    """The embedded server or worker cannot be started, or died."""


class BatchError(TidemillError):
    """A batch file cannot be run, or its run was given up."""
