"""Every Redis key that Tidemill touches, and how long each lives.

| key | type | written by | lives |
| --- | --- | --- | --- |
| ``<queue>`` | zset: job id → when due, ms | enqueue, claim, renew | until the job ends |
| ``<queue>:leases`` | zset: job id → lease's end, ms | claim, renew | until the job ends |
| ``<queue>:holders`` | hash: job id → who claimed it last, and when | claim | until the job ends |
| ``<queue>:classes`` | set of priorities that have a lane | enqueue | while they have |
| ``<queue>:lane:<priority>`` | zset: job id → turn | enqueue | until claimed |
| ``<queue>:turns:<priority>`` | hash: tenant → its last turn | enqueue, claim | while the lane |
| ``<queue>:later`` | hash: deferred job id → priority and tenant | enqueue | until due |
| ``<queue>:suspects`` | zset: job id → when its worker died | claim | until claimed |
| ``<queue>:quarantine`` | string: who empties itself for suspects | claim | two leases |
| ``<queue>:dead`` | zset: job id → when it was given up, ms | finish | ``DEAD_TTL_MS`` |
| ``<queue>:limits`` | hash: `QueueLimits` | `Producer.set_limits` | for ever |
| ``<queue>:load`` | hash: bytes, and jobs of each tenant | enqueue, finish | while there are jobs |
| ``<queue>:tenants`` | hash: job id → its tenant, if it has one | enqueue | until the job ends |
| ``<queue>:doorbell`` | list of at most one token | enqueue, release | until taken |
| ``<queue>:orders:<instance>`` | list: ids that the worker no longer holds | cancel | a minute |
| ``<queue>:workers`` | zset: worker id → heartbeat, ms | worker | entries for a minute |
| ``<queue>:worker:<id>`` | string: the worker's state, JSON | worker | a few heartbeats |
| ``arq:job:<id>`` | string: `JobRecord` | enqueue | until the job ends |
| ``arq:in-progress:<id>`` | string: the lease's token | claim, renew | the lease |
| ``arq:retry:<id>`` | string: tries so far | claim | until the job ends |
| ``arq:result:<id>`` | string: `ResultRecord` | finish, cancel | the job's result TTL |
| ``tidemill:history:<id>`` | list of `Try`s that did not end it | claim, release | until it ends |
| ``tidemill:dead:<id>`` | string: the `JobRecord` of a job given up | finish | ``DEAD_TTL_MS`` |
| ``tidemill:dead-history:<id>`` | list of `Try`, of a job given up | finish | ``DEAD_TTL_MS`` |
| ``tidemill:progress:<id>`` | list of `Progress` | checkpoint, release | until the job ends |
| ``tidemill:waiters:<id>`` | set of reply streams | a second caller for the job | until it ends |
| ``tidemill:reply:<producer>`` | stream of ids of finished jobs | finish | ``REPLY_TTL_MS`` |
| ``tidemill:fence`` | string | a producer that waits for replicas | a minute |

The ``arq:`` keys are arq's own (arq 0.28, ``arq/constants.py``). A job key has no TTL: arq's
expires a day after *enqueue*, which silently fails whatever has queued for longer.

In a Redis Cluster the keys of one script must share a slot, which follows from what stands in
braces in a key, its hash tag. So a queue's name has a hash tag there, ``{tidemill:queue}``, and the
ids of its jobs and producers begin with the same.
"""

from __future__ import annotations

import re

DEFAULT_QUEUE = "tidemill:queue"
"""Not arq's default: a stock arq worker of another application must not take our jobs."""

JOB_PREFIX = "arq:job:"
IN_PROGRESS_PREFIX = "arq:in-progress:"
RETRY_PREFIX = "arq:retry:"
RESULT_PREFIX = "arq:result:"
ARQ_ABORT = "arq:abort"
"""arq's set of jobs to abort, of all queues."""
HISTORY_PREFIX = "tidemill:history:"
DEAD_PREFIX = "tidemill:dead:"
DEAD_HISTORY_PREFIX = "tidemill:dead-history:"
PROGRESS_PREFIX = "tidemill:progress:"
WAITERS_PREFIX = "tidemill:waiters:"
REPLY_PREFIX = "tidemill:reply:"
FENCE = "tidemill:fence"

RESULT_TTL_MS = 24 * 3600 * 1000
REPLY_TTL_MS = 3600 * 1000
"""A reply stream outlives its producer by this; writing to it or reading it renews it."""
WAITERS_TTL_MS = 24 * 3600 * 1000
PROGRESS_TTL_MS = 24 * 3600 * 1000
"""A job that nobody has gone on with for so long starts anew."""
RETRY_TTL_MS = 7 * 24 * 3600 * 1000
DEAD_TTL_MS = 30 * 24 * 3600 * 1000
PRIORITY_STEP_MS = 60_000
"""One step of priority counts as this much waiting: low priority still runs, only later."""
HOLD_MS = 24 * 3600 * 1000
"""What waits in a lane, or is suspect, stands so much later in arq's set: out of sight of stock
arq workers, which know neither tenants nor suspects, until that has passed."""
MAX_HISTORY = 20
"""Tries that are remembered of a job, the last ones."""


def hash_tag(queue: str) -> str:
    """The part of a queue's name by which a cluster places it, braces included; ``""`` for none."""
    match = re.search(r"\{[^}]*\}", queue)
    return match[0] if match is not None and match[0] != "{}" else ""


def in_one_slot(queue: str) -> str:
    """The queue's name as it is in a cluster."""
    return queue if hash_tag(queue) else f"{{{queue}}}"


def tagged(name: str, queue: str) -> str:
    """The id of a job or a producer, with the queue's hash tag in front where it has one."""
    tag = hash_tag(queue)
    return name if name.startswith(tag) else tag + name


def job_key(job_id: str) -> str:
    return JOB_PREFIX + job_id


def result_key(job_id: str) -> str:
    return RESULT_PREFIX + job_id


def in_progress_key(job_id: str) -> str:
    return IN_PROGRESS_PREFIX + job_id


def retry_key(job_id: str) -> str:
    return RETRY_PREFIX + job_id


def dead_letter_key(job_id: str) -> str:
    return DEAD_PREFIX + job_id


def dead_history_key(job_id: str) -> str:
    return DEAD_HISTORY_PREFIX + job_id


def progress_key(job_id: str) -> str:
    return PROGRESS_PREFIX + job_id


def waiters_key(job_id: str) -> str:
    return WAITERS_PREFIX + job_id


def reply_key(producer_id: str) -> str:
    return REPLY_PREFIX + producer_id


def leases_key(queue: str) -> str:
    return f"{queue}:leases"


def dead_key(queue: str) -> str:
    return f"{queue}:dead"


def limits_key(queue: str) -> str:
    return f"{queue}:limits"


def doorbell_key(queue: str) -> str:
    return f"{queue}:doorbell"


def orders_key(queue: str, instance: str) -> str:
    return f"{queue}:orders:{instance}"


def workers_key(queue: str) -> str:
    return f"{queue}:workers"


def worker_key(queue: str, worker_id: str) -> str:
    return f"{queue}:worker:{worker_id}"
