"""Runs one job queue for `benchmarks/queue_rates.py`: its producer here, its workers in forks.

An adapter subclasses `Peer` and hands itself to `main`. It runs in that queue's own environment,
so this module needs nothing but the standard library. Commands come in and answers go out as JSON,
a line each; whatever the queue prints goes to standard error. Workers are forked from this process,
which has imported all that they need: sixty-four of them start in a second and share their memory.

A job's work is `FakeEngine.run`: it notes who ran the job and when, and takes a step of a fixed
time, shared with the other jobs of that worker.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import struct
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any, ClassVar

PROMPT = "The sea is " * 36
"""400 characters, as many as the queues' own benchmarks take."""
POLL_S = 0.002

_SLOT = struct.Struct("=q")


class Tally:
    """What the workers have done, in memory that forks share: a count each, -1 until ready."""

    def __init__(self, workers: int) -> None:
        self._memory = mmap.mmap(-1, workers * _SLOT.size)
        self.workers = workers
        for worker in range(workers):
            self[worker] = -1

    def __getitem__(self, worker: int) -> int:
        (count,) = _SLOT.unpack_from(self._memory, worker * _SLOT.size)
        return int(count)

    def __setitem__(self, worker: int, count: int) -> None:
        _SLOT.pack_into(self._memory, worker * _SLOT.size, count)

    def counts(self) -> list[int]:
        return [self[worker] for worker in range(self.workers)]


class FakeEngine:
    """Runs jobs in steps of a fixed time, up to `rows` of them in each; a job takes one step."""

    def __init__(self, tally: Tally, worker: int, step_s: float, rows: int) -> None:
        self.step_s = step_s
        self.rows = rows
        self.runs: list[tuple[str, float]] = []
        """Each job that was begun, and when, in seconds since the epoch."""
        self._tally = tally
        self._worker = worker
        self._waiting: list[asyncio.Future[None]] = []
        self._stepping: asyncio.Task[None] | None = None

    def ready(self) -> None:
        """To be called when the worker listens."""
        self._tally[self._worker] = 0

    async def run(self, job_id: str) -> None:
        self.runs.append((job_id, time.time()))
        if self.step_s:
            ended = asyncio.get_running_loop().create_future()
            self._waiting.append(ended)
            if self._stepping is None:
                self._stepping = asyncio.create_task(self._step())
            await ended
        self._tally[self._worker] = len(self.runs)

    async def _step(self) -> None:
        while self._waiting:
            await asyncio.sleep(self.step_s)
            running, self._waiting = self._waiting[: self.rows], self._waiting[self.rows :]
            for ended in running:
                if not ended.done():
                    ended.set_result(None)
        self._stepping = None


class Client(ABC):
    """The producer of one queue."""

    @abstractmethod
    async def enqueue(self, job_id: str) -> None:
        """Enqueues one job and returns when Redis has it."""

    @abstractmethod
    async def enqueue_many(self, job_ids: Sequence[str]) -> None:
        """Enqueues jobs the fastest way that the queue's own interface has."""

    @abstractmethod
    async def result(self, job_id: str) -> None:
        """Returns when the job that this client enqueued has its result."""

    @abstractmethod
    async def left(self) -> int:
        """Jobs whose results are still to come."""


class Peer(ABC):
    """A queue that has been imported. Workers run in forks: nothing may be connected yet."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def add_options(cls, parser: ArgumentParser) -> None:
        """Options beyond the server's URL."""

    def __init__(self, url: str, options: Namespace) -> None:
        self.url = url
        self.options = options

    @abstractmethod
    def client(self) -> AbstractAsyncContextManager[Client]: ...

    @abstractmethod
    async def work(self, engine: FakeEngine) -> None:
        """Serves as one worker until it is cancelled; says so to `engine.ready`."""


class Host:
    """Carries out the commands, each a method named `do_…`."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._workers: list[int] = []
        self._tally = Tally(1)
        self._notes = Path(tempfile.mkdtemp(prefix="queue-"))
        self._enqueued: dict[str, float] = {}

    def do_start(self, workers: int, step_ms: float, rows: int) -> dict[str, Any]:
        """Forks workers; returns when all of them listen."""
        self._tally, self._enqueued = Tally(workers), {}
        started = time.perf_counter()
        for worker in range(workers):
            pid = os.fork()
            if pid == 0:
                self._be_worker(FakeEngine(self._tally, worker, step_ms / 1000, rows), worker)
            self._workers.append(pid)
        while min(self._tally.counts()) < 0:
            time.sleep(POLL_S)
        return {"ready_s": time.perf_counter() - started}

    def _be_worker(self, engine: FakeEngine, worker: int) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(_until_told(self._peer.work(engine)))
        (self._notes / str(worker)).write_text(json.dumps(engine.runs))
        os._exit(0)

    def do_hold(self) -> dict[str, Any]:
        """Stands the workers still, so that a queue fills up before they begin."""
        self._signal(signal.SIGSTOP)
        return {}

    def do_enqueue(self, jobs: int, bulk: bool) -> dict[str, Any]:
        async def enqueue() -> float:
            async with self._peer.client() as client:
                await client.enqueue("first")  # connects
                self._enqueued["first"] = time.time()
                ids = [f"{os.getpid()}-{time.time_ns()}-{n}" for n in range(jobs)]
                self._enqueued |= dict.fromkeys(ids, time.time())
                started = time.perf_counter()
                if bulk:
                    await client.enqueue_many(ids)
                else:
                    for job_id in ids:
                        await client.enqueue(job_id)
                return time.perf_counter() - started

        return {"seconds": asyncio.run(enqueue())}

    def do_drain(self, timeout_s: float) -> dict[str, Any]:
        """Lets the workers go on, until every job has its result or the time is up."""

        async def drain() -> float:
            async with self._peer.client() as client:
                await client.left()
                started = time.perf_counter()
                self._signal(signal.SIGCONT)

                async def is_drained() -> bool:
                    return sum(self._tally.counts()) >= jobs and not await client.left()

                give_up_at = started + timeout_s
                while not await is_drained() and time.perf_counter() < give_up_at:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
                return time.perf_counter() - started

        jobs = len(self._enqueued)
        seconds = asyncio.run(drain())
        return {"seconds": seconds, "jobs": sum(self._tally.counts())}

    def do_flow(self, jobs: int, rate: float) -> dict[str, Any]:
        """Enqueues jobs and awaits all results: at a rate one by one, or in bulk at rate 0."""

        async def flow() -> float:
            async with self._peer.client() as client:
                ids = [f"{os.getpid()}-{time.time_ns()}-{n}" for n in range(jobs)]
                started = time.perf_counter()
                if not rate:
                    self._enqueued |= dict.fromkeys(ids, time.time())
                    await client.enqueue_many(ids)
                    await asyncio.gather(*(client.result(job_id) for job_id in ids))
                else:
                    results = []
                    for n, job_id in enumerate(ids):
                        await asyncio.sleep(max(0, started + n / rate - time.perf_counter()))
                        self._enqueued[job_id] = time.time()
                        await client.enqueue(job_id)
                        results.append(asyncio.create_task(client.result(job_id)))
                    await asyncio.gather(*results)
                return time.perf_counter() - started

        return {"seconds": asyncio.run(flow())}

    def do_round_trips(self, jobs: int, gap_ms: float) -> dict[str, Any]:
        """Jobs one after another, each awaited, with a pause before each."""

        async def go() -> list[float]:
            taken = []
            async with self._peer.client() as client:
                for n in range(jobs + 1):
                    await asyncio.sleep(gap_ms / 1000)
                    job_id = f"{os.getpid()}-{time.time_ns()}-{n}"
                    self._enqueued[job_id] = time.time()
                    started = time.perf_counter()
                    await client.enqueue(job_id)
                    await client.result(job_id)
                    taken.append((time.perf_counter() - started) * 1000)
            return taken[1:]  # the first one connects

        return {"ms": asyncio.run(go())}

    def do_stop(self) -> dict[str, Any]:
        """Ends the workers; tells what they have run, by what each of them has noted."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        for pid in self._workers:
            os.waitpid(pid, 0)
        runs: list[tuple[str, float]] = []
        counts = []
        for worker in range(len(self._workers)):
            noted = json.loads((self._notes / str(worker)).read_text())
            counts.append(len(noted))
            runs += noted
        self._workers = []
        times = Counter(job_id for job_id, _ in runs)
        waits = sorted((at - self._enqueued.get(job_id, at)) * 1000 for job_id, at in runs)
        return {
            "per_worker": counts,
            "duplicates": len(runs) - len(times),
            "missing": len(self._enqueued.keys() - times.keys()),
            "claim_ms": waits,
        }

    def _signal(self, number: int) -> None:
        for pid in self._workers:
            os.kill(pid, number)

    def close(self) -> None:
        for pid in self._workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def _until_told(work: Any) -> None:
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await task


def main(kind: type[Peer]) -> None:
    parser = ArgumentParser(description=f"{kind.name} for benchmarks/queue_rates.py")
    parser.add_argument("url")
    kind.add_options(parser)
    options = parser.parse_args()
    # What a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    host = Host(kind(options.url, options))
    try:
        print(json.dumps({"ready": kind.name, "python": sys.version.split()[0]}), file=answers)
        answers.flush()
        for line in sys.stdin:
            command = json.loads(line)
            answer = getattr(host, "do_" + command.pop("do"))(**command)
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        host.close()
