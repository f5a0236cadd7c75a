"""What the workers of a queue say about themselves."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from tidemill_contracts import keys
from tidemill_contracts.wire.status import WorkerStatus, decode_status

if TYPE_CHECKING:
    from redis.asyncio import Redis


async def worker_statuses(redis: Redis, queue: str) -> list[WorkerStatus]:
    """The last status of each live worker; a dead one's lasts for a few heartbeats more."""
    ids = await redis.zrange(keys.workers_key(queue), 0, -1)
    if not ids:
        return []
    raws = await redis.mget([keys.worker_key(queue, raw.decode()) for raw in ids])
    statuses = []
    for raw in raws:
        if raw is not None:
            with contextlib.suppress(msgspec.DecodeError):
                statuses.append(decode_status(raw))
    return statuses


def jobs_per_second(statuses: list[WorkerStatus]) -> float:
    """How many jobs the workers end in a second, judged by what they hold; 0 where none knows."""
    return sum(
        (status.rows_running + status.rows_waiting) / max(status.eta_s, 0.05)
        for status in statuses
        if status.eta_s is not None
    )
