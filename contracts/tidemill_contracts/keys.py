"""Every Redis key that Tidemill touches, and how long each lives.

| key | type | written by | lives |
| --- | --- | --- | --- |
| ``<queue>`` | zset: job id → when due, ms | enqueue, claim, renew | until the job ends |
| ``<queue>:leases`` | zset: job id → lease's end, ms | claim, renew | until the job ends |
| ``<queue>:doorbell`` | list of at most one token | enqueue, release | until taken |
| ``<queue>:workers`` | zset: worker id → heartbeat, ms | worker | entries for a minute |
| ``<queue>:worker:<id>`` | string: the worker's state, JSON | worker | a few heartbeats |
| ``arq:job:<id>`` | string: `JobRecord` | enqueue | until the job ends |
| ``arq:in-progress:<id>`` | string: the lease's token | claim, renew | the lease |
| ``arq:retry:<id>`` | string: tries so far | claim | until the job ends |
| ``arq:result:<id>`` | string: `ResultRecord` | finish | ``RESULT_TTL_MS`` |
| ``tidemill:waiters:<id>`` | set of reply streams | a second caller for the job | until it ends |
| ``tidemill:reply:<producer>`` | stream of ids of finished jobs | finish | ``REPLY_TTL_MS`` |

The ``arq:`` keys are arq's own (arq 0.28, ``arq/constants.py``). A job key has no TTL: arq's
expires a day after *enqueue*, which silently fails whatever has queued for longer.
"""

from __future__ import annotations

DEFAULT_QUEUE = "tidemill:queue"
"""Not arq's default: a stock arq worker of another application must not take our jobs."""

JOB_PREFIX = "arq:job:"
IN_PROGRESS_PREFIX = "arq:in-progress:"
RETRY_PREFIX = "arq:retry:"
RESULT_PREFIX = "arq:result:"
WAITERS_PREFIX = "tidemill:waiters:"
REPLY_PREFIX = "tidemill:reply:"

RESULT_TTL_MS = 24 * 3600 * 1000
REPLY_TTL_MS = 3600 * 1000
"""A reply stream outlives its producer by this; writing to it or reading it renews it."""
WAITERS_TTL_MS = 24 * 3600 * 1000
RETRY_TTL_MS = 7 * 24 * 3600 * 1000
PRIORITY_STEP_MS = 60_000
"""One step of priority counts as this much waiting: low priority still runs, only later."""


def job_key(job_id: str) -> str:
    return JOB_PREFIX + job_id


def result_key(job_id: str) -> str:
    return RESULT_PREFIX + job_id


def in_progress_key(job_id: str) -> str:
    return IN_PROGRESS_PREFIX + job_id


def retry_key(job_id: str) -> str:
    return RETRY_PREFIX + job_id


def waiters_key(job_id: str) -> str:
    return WAITERS_PREFIX + job_id


def reply_key(producer_id: str) -> str:
    return REPLY_PREFIX + producer_id


def leases_key(queue: str) -> str:
    return f"{queue}:leases"


def doorbell_key(queue: str) -> str:
    return f"{queue}:doorbell"


def workers_key(queue: str) -> str:
    return f"{queue}:workers"


def worker_key(queue: str, worker_id: str) -> str:
    return f"{queue}:worker:{worker_id}"
