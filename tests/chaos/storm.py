"""Random kills, pauses and restarts of workers and their server while producers wait for results.

All that is random follows from one seed. A fault comes when so many jobs have ended, not at a time:
a slow machine gets the same storm.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from redis import Redis

from tests.chaos.server import AppendOnlyServer, read_written
from tests.chaos.workers import WorkerProcess, working
from tests.worker.served import batcher, generate
from tidemill_contracts import keys
from tidemill_contracts.wire.status import WorkerStatus
from tidemill_producer import GenerationJob, Outcome, Producer, SamplingParams

ENV_PREFIX = "TIDEMILL_CHAOS_"
LEASE_MS = 2_000
CLOCKS_AHEAD_S = (0, 3600, -3600)
"""Of the workers, in turn."""
OPTIONS_OF_WORKERS = (
    *("--dtype", "float32", "--deterministic", "--lease-ms", str(LEASE_MS)),
    *("--max-tries", "1000", "--checkpoint-tokens", "8", "--drain-timeout", "0.5"),
)
"""In deterministic mode no batch and no move changes a token. So many tries that whatever ends as a
dead letter has not died of bad luck."""
MOST_UNANSWERED = 40
"""Jobs of one producer: it enqueues through all of the storm."""
PATIENCE_S = 60.0
NEWS_TIMEOUT_S = 120.0
"""Longest time in which no job ends."""

Kind = Literal["kill worker", "pause worker", "drain worker", "kill server", "kill both"]


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything; each field can be set by ``TIDEMILL_CHAOS_…``."""

    seed: int
    jobs: int = 160
    workers: int = 3
    producers: int = 3
    worker_kills: int = 6
    server_kills: int = 2
    pauses: int = 1
    drains: int = 1

    @property
    def faults(self) -> int:
        return self.worker_kills + self.server_kills + self.pauses + self.drains

    @property
    def limit_s(self) -> float:
        """What the slowest machine may take."""
        return 120 + self.jobs * 0.5 + self.faults * 15


def scale_from_env() -> Scale:
    given = {
        name: os.environ[ENV_PREFIX + name.upper()]
        for name in Scale.__struct_fields__
        if os.environ.get(ENV_PREFIX + name.upper())
    }
    return msgspec.convert({"seed": random.randrange(10**6), **given}, Scale, strict=False)


class Fault(msgspec.Struct, frozen=True):
    """One thing that goes wrong."""

    after: int
    """Jobs that have ended by then."""
    delay_s: float
    kind: Kind
    worker: int
    leases: float
    """How long a pause lasts, always longer than a lease, or the server is away, mostly."""

    @property
    def lasts_s(self) -> float:
        return self.leases * LEASE_MS / 1000


def schedule(scale: Scale) -> list[Fault]:
    rng = random.Random(scale.seed)
    kinds: list[Kind] = ["kill worker"] * scale.worker_kills
    kinds += ["pause worker"] * scale.pauses
    kinds += ["drain worker"] * scale.drains
    # Every second time a worker goes with it, whose leases run out while nobody can see it.
    kinds += ["kill server"] * ((scale.server_kills + 1) // 2)
    kinds += ["kill both"] * (scale.server_kills // 2)
    rng.shuffle(kinds)
    afters = sorted(rng.randrange(scale.jobs * 9 // 10) for _ in kinds)
    return [
        Fault(
            after=after,
            delay_s=rng.uniform(0, 0.3),
            kind=kind,
            worker=rng.randrange(scale.workers),
            leases=rng.uniform(1.3, 2) if kind == "pause worker" else rng.uniform(0, 2),
        )
        for after, kind in zip(afters, kinds, strict=True)
    ]


def make_jobs(scale: Scale) -> list[GenerationJob]:
    rng = random.Random(scale.seed)
    return [
        GenerationJob(
            id=f"job-{n}",
            prompt=" ".join(f"{rng.randrange(1000)} and" for _ in range(rng.randint(1, 12))),
            sampling=SamplingParams(temperature=0, max_tokens=rng.randint(5, 60), ignore_eos=True),
        )
        for n in range(scale.jobs)
    ]


async def unbroken(jobs: Sequence[GenerationJob]) -> dict[str, list[int]]:
    """The tokens of each job where nothing goes wrong."""
    async with batcher(Path("demo"), deterministic=True) as model:
        results = await asyncio.gather(*(generate(model, job) for job in jobs))
    return {result.id: result.token_ids for result in results}


class Storm:
    """One run; `log` tells what has been done to whom."""

    def __init__(self, scale: Scale, directory: Path) -> None:
        self.scale = scale
        self.log: list[str] = []
        self._directory = directory
        self._jobs = make_jobs(scale)
        self._server = AppendOnlyServer()
        self._server_is_up = asyncio.Event()
        self._outcomes: dict[str, Outcome] = {}
        self._running: dict[int, WorkerProcess] = {}
        self._runs: list[WorkerProcess] = []
        self._started_at = time.monotonic()

    async def run(self) -> None:
        """Raises `AssertionError` with all that is needed to see what happened."""
        print(f"\n{self.scale}", flush=True)
        try:
            async with asyncio.timeout(self.scale.limit_s):
                expected = await unbroken(self._jobs)
                self._say(f"{len(expected)} jobs generated unbroken")
                with self._server:
                    self._server_is_up.set()
                    try:
                        await self._rage()
                        await self._check(expected)
                    except BaseException:
                        sockets = shutil.ignore_patterns("*.sock")
                        target = self._directory / "server"
                        shutil.copytree(self._server.directory, target, ignore=sockets)
                        raise
        except BaseException as error:
            errors = [f"{type(leaf).__name__}: {leaf}" for leaf in _leaves(error)]
            told = [*errors, str(self.scale), *self.log, f"logs: {self._directory}"]
            raise AssertionError("\n".join(told)) from error

    def _say(self, line: str) -> None:
        seconds = time.monotonic() - self._started_at
        self.log.append(f"{seconds:7.1f}s {len(self._outcomes):5} ended: {line}")
        print(self.log[-1], flush=True)

    async def _rage(self) -> None:
        async with asyncio.TaskGroup() as keepers:
            kept = [keepers.create_task(self._keep(n)) for n in range(self.scale.workers)]
            async with asyncio.TaskGroup() as storm:
                for n in range(self.scale.producers):
                    storm.create_task(self._produce(self._jobs[n :: self.scale.producers]))
                storm.create_task(self._bring_faults(storm))
            self._say("all jobs have ended")
            await self._until_at_rest()
            for keeper in kept:
                keeper.cancel()

    async def _keep(self, slot: int) -> None:
        """Starts the worker again however often it ends."""
        ahead_s = CLOCKS_AHEAD_S[slot % len(CLOCKS_AHEAD_S)]
        for run in range(10**6):
            name = f"{slot}-{run}"
            async with working(
                self._server.url, name, self._directory, *OPTIONS_OF_WORKERS, ahead_s=ahead_s
            ) as worker:
                self._running[slot] = worker
                self._runs.append(worker)
                code = await worker.process.wait()
            # Whoever starts while the server is away is not served.
            unreachable = "Redis does not answer" in worker.said
            self._say(f"worker {name} ended with {code}")
            assert worker.signalled or unreachable, f"worker {name} ended by itself: {worker.said}"
            assert code in (-9, 0) or unreachable, f"worker {name}: {worker.said}"
            if unreachable:
                await self._server_is_up.wait()

    async def _produce(self, jobs: Sequence[GenerationJob]) -> None:
        """Enqueues these, in small lots, and awaits every result."""
        free = asyncio.Semaphore(MOST_UNANSWERED)
        async with (
            Producer(self._server.url, patience_s=PATIENCE_S) as producer,
            asyncio.TaskGroup() as group,
        ):

            async def answer(job_id: str) -> None:
                outcome = await producer.outcome(job_id)
                assert job_id not in self._outcomes
                self._outcomes[job_id] = outcome
                free.release()

            rng = random.Random(jobs[0].id)
            left = list(jobs)
            while left:
                lot, left = left[: (size := rng.randint(1, 10))], left[size:]
                for _ in lot:
                    await free.acquire()
                async for handle in producer.enqueue_many(lot):
                    group.create_task(answer(handle.id))

    async def _bring_faults(self, storm: asyncio.TaskGroup) -> None:
        for fault in schedule(self.scale):
            await self._until_ended(fault.after)
            await asyncio.sleep(fault.delay_s)
            if fault.kind == "kill server":
                await self._without_server(fault.lasts_s)
                continue
            worker = await self._worker_for(fault)
            self._say(f"{fault.kind} {worker.name}")
            match fault.kind:
                case "kill worker":
                    worker.kill()
                case "kill both":
                    await self._without_server(fault.lasts_s, worker)
                case "drain worker":
                    worker.drain()
                case "pause worker":
                    # Others are hit meanwhile.
                    storm.create_task(self._pause(worker, fault.lasts_s))

    async def _worker_for(self, fault: Fault) -> WorkerProcess:
        """The fault's worker, or the next one that serves."""
        found: list[WorkerProcess] = []

        def serves() -> bool:
            order = [(fault.worker + n) % self.scale.workers for n in range(self.scale.workers)]
            running = [self._running[slot] for slot in order if slot in self._running]
            found[:] = [w for w in running if w.is_ready and not w.paused and not w.signalled]
            return bool(found)

        await self._until("a worker serves", serves)
        return found[0]

    async def _without_server(self, seconds: float, worker: WorkerProcess | None = None) -> None:
        """The server is killed and comes back on the same data; a worker dies right after it."""
        self._server_is_up.clear()
        self._server.kill()
        if worker is not None:
            worker.kill()
        self._say(f"the server is away for {seconds:.1f} s")
        await asyncio.sleep(seconds)
        self._server.start()
        self._server_is_up.set()
        self._say("the server is back")

    async def _pause(self, worker: WorkerProcess, seconds: float) -> None:
        worker.pause()
        await asyncio.sleep(seconds)
        worker.resume()
        self._say(f"worker {worker.name} goes on after {seconds:.1f} s")

    async def _until_ended(self, jobs: int) -> None:
        await self._until(f"{jobs} jobs have ended", lambda: len(self._outcomes) >= jobs)

    async def _until(self, what: str, condition: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + NEWS_TIMEOUT_S
        ended = 0
        while not condition():
            if len(self._outcomes) > ended:
                ended = len(self._outcomes)
                give_up_at = time.monotonic() + NEWS_TIMEOUT_S
            assert time.monotonic() < give_up_at, f"nothing moves any more; wanted: {what}"
            await asyncio.sleep(0.02)

    async def _until_at_rest(self) -> None:
        """Every worker serves, holds no row, and has all its pages back."""
        statuses: list[WorkerStatus] = []
        async with Producer(self._server.url) as producer:
            give_up_at = time.monotonic() + NEWS_TIMEOUT_S
            while len(statuses) < self.scale.workers or any(map(_holds_anything, statuses)):
                assert time.monotonic() < give_up_at, f"not at rest: {statuses}"
                await asyncio.sleep(0.2)
                serving = {worker.name for worker in self._running.values() if worker.is_ready}
                statuses = [status for status in await producer.workers() if status.id in serving]

    async def _check(self, expected: dict[str, list[int]]) -> None:
        failed = {id_: out.error for id_, out in self._outcomes.items() if out.error is not None}
        assert not failed, failed
        got = {id_: outcome.unwrap().token_ids for id_, outcome in self._outcomes.items()}
        other = [job_id for job_id, tokens in expected.items() if got.get(job_id) != tokens]
        assert not other, f"other tokens, or none: {other}"
        written = read_written(self._server)
        assert written.results == dict.fromkeys(expected, 1), "a result was written twice"
        assert written.replies == dict.fromkeys(expected, 1), "a caller was told twice"
        await self._check_keys(expected)
        orphans, tries = len(written.orphaned), max(written.claims.values())
        resumed = sum(
            outcome.unwrap().usage.resumed_tokens > 0 for outcome in self._outcomes.values()
        )
        self._say(f"{orphans} jobs lost their worker, {resumed} went on elsewhere, {tries} tries")
        if self.scale.worker_kills >= 5:
            assert orphans, "the storm has hit nobody"

    async def _check_keys(self, expected: dict[str, list[int]]) -> None:
        """Of the jobs nothing but their results is left."""
        queue = keys.DEFAULT_QUEUE
        with Redis.from_url(self._server.url) as redis:
            left = {key.decode() for key in redis.scan_iter(count=1000)}
        left -= {keys.result_key(job_id) for job_id in expected}
        harmless = {keys.doorbell_key(queue), f"{queue}:quarantine", f"{queue}:health-check"}
        left = {key for key in left - harmless if not key.startswith(f"{queue}:worker")}
        assert not left, left


def _holds_anything(status: WorkerStatus) -> bool:
    return (status.rows_running, status.rows_waiting, status.pages_held) != (0, 0, 0)


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors in groups of errors."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
