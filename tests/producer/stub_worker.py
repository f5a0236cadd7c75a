"""Stands in for `tidemill worker`: the double of conftest.py as a process with a status.

What it does beyond that is in the model's name: ``dies`` at once with an error, ``mute`` never
gets ready, ``stubborn`` ignores SIGTERM, ``brief`` ends after half a second.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from conftest import WorkerDouble
from redis.asyncio import Redis

from tidemill_contracts import keys
from tidemill_contracts.wire.status import WorkerStatus, encode_status


async def report(redis: Redis, worker: WorkerDouble, model: str, started_at: float) -> None:
    worker_id = f"stub-{os.getpid()}"
    while True:
        status = WorkerStatus(
            id=worker_id,
            state="ready",
            model=model,
            contract="stub",
            device="cpu",
            dtype="float32",
            max_rows=4,
            rows_running=0,
            rows_waiting=0,
            steps=len(worker.ran),
            row_steps=3 * len(worker.ran),
            prompt_tokens=0,
            completion_tokens=0,
            jobs_done=len(worker.ran),
            jobs_failed=0,
            started_at=started_at,
            updated_at=time.time(),
        )
        await redis.set(keys.worker_key(worker.queue, worker_id), encode_status(status), px=2000)
        await redis.zadd(keys.workers_key(worker.queue), {worker_id: time.time() * 1000})
        await asyncio.sleep(0.1)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--redis")
    parser.add_argument("--queue")
    parser.add_argument("--max-rows")
    args = parser.parse_args()
    if args.model == "dies":
        sys.exit("some noise\ntidemill: error: there is no model named dies")
    if args.model == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    redis = Redis.from_url(args.redis, socket_timeout=None)
    worker = WorkerDouble(redis, args.queue)
    if args.model == "mute":
        await asyncio.sleep(3600)
    reporting = asyncio.create_task(report(redis, worker, args.model, time.time()))
    serving = asyncio.create_task(worker.serve())
    await asyncio.wait(
        [reporting, serving],
        timeout=0.5 if args.model == "brief" else None,
        return_when=asyncio.FIRST_COMPLETED,
    )
    os._exit(7)


if __name__ == "__main__":
    asyncio.run(main())
