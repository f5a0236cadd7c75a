"""The exceptions of the producer's side; each says what to do.

TidemillError                 (tidemill_contracts.wire)
├── InvalidMessage            (wire) the job breaks the contract; nothing was written
├── JobFailed                 (wire) the job ended with a `JobError`
├── QueueUnavailable          Redis cannot be reached, or refuses
├── ResultTimeout             the result did not come within the caller's timeout
├── UnknownJob                neither the job nor its result is in Redis
├── EmbeddedFailed            the embedded server or worker cannot be started, or died
└── BatchError                a batch file cannot be run, or its run was given up
"""

from __future__ import annotations

from tidemill_contracts.wire import TidemillError


class QueueUnavailable(TidemillError):
    """Redis cannot be reached, or refuses to serve."""


class ResultTimeout(TidemillError):
    """The result did not come within the caller's timeout. The job goes on."""


class UnknownJob(TidemillError):
    """Neither the job nor its result is in Redis: never enqueued, or expired since."""


class EmbeddedFailed(TidemillError):
    """The embedded server or worker cannot be started, or died."""


class BatchError(TidemillError):
    """A batch file cannot be run, or its run was given up."""
