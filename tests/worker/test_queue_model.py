"""The scripts against a model: any order of enqueuing, claiming, dying, answering and cancelling.

The model knows of each job only where it is. Time passes by moving what Redis holds; leases and
delays are such that no sum of the steps comes within seconds of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis as redis_sync
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis

from tests.worker.queue_clock import pass_time
from tidemill_contracts import keys
from tidemill_contracts.wire import GenerationJob, JobError, JobState, Try
from tidemill_contracts.wire.arq_format import decode_job_record, encode_result_record
from tidemill_producer import Admission, Cancellation, JobConflict, Producer
from tidemill_producer.embedded import EmbeddedRedis
from tidemill_producer.jobs import read_status
from tidemill_worker.queue import Claim, Finished, JobQueue, Piece, Release

QUEUE = "queue"
LEASE_S, DELAY_S = 65, 45
PASSING_S = (20, 70)
MAX_TRIES = 2
WORKERS = 3
IDS = [f"job-{n}" for n in range(7)]

T = TypeVar("T")


@dataclass
class Modelled:
    """A job that has not ended."""

    content: str
    tenant: str
    priority: int
    due: float
    tries: int = 0
    token: str | None = None
    lease_end: float | None = None
    suspect: bool = False
    spent: bool = False
    """Suspect, with no try left: anybody may take it, to give it up."""


@dataclass
class Model:
    now: float = 0
    live: dict[str, Modelled] = field(default_factory=dict)
    ended: dict[str, tuple[JobState, str | None]] = field(default_factory=dict)
    """State and content; the content of a cancelled job is not known."""
    dead: dict[str, Modelled] = field(default_factory=dict)
    quarantine: tuple[int, float] | None = None
    """Which worker empties itself, until when."""

    def sweep(self) -> None:
        for job in self.live.values():
            if job.lease_end is not None and job.lease_end <= self.now:
                job.lease_end, job.suspect = None, True
                job.spent = job.tries >= MAX_TRIES

    def due(self) -> set[str]:
        return {
            job_id
            for job_id, job in self.live.items()
            if job.lease_end is None and not job.suspect and job.due <= self.now
        }

    def state(self, job_id: str) -> JobState:
        if job_id in self.ended:
            return self.ended[job_id][0]
        job = self.live.get(job_id)
        if job is None:
            return JobState.UNKNOWN
        if job.lease_end is not None and job.lease_end > self.now:
            return JobState.RUNNING
        waits = job.lease_end is not None or job.suspect or job.due <= self.now
        return JobState.QUEUED if waits else JobState.DEFERRED


class QueueMachine(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.model = Model()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    @initialize()
    def connect(self) -> None:
        with redis_sync.Redis.from_url(self.url) as client:
            client.flushall()

        async def open_all() -> None:
            self.redis = Redis.from_url(self.url, socket_timeout=None)
            self.producer = Producer(self.url, QUEUE)
            self.queues = [
                JobQueue(
                    self.redis,
                    QUEUE,
                    worker=f"worker {n}",
                    lease_ms=LEASE_S * 1000,
                    max_tries=MAX_TRIES,
                )
                for n in range(WORKERS)
            ]

        self.run(open_all())
        self.held: list[dict[str, Claim]] = [{} for _ in range(WORKERS)]

    def teardown(self) -> None:
        async def close_all() -> None:
            await self.producer.aclose()
            await self.redis.aclose()

        if hasattr(self, "redis"):
            self.run(close_all())
        self.runner.close()

    @rule(
        job_id=st.sampled_from(IDS),
        content=st.sampled_from("xxxxy"),
        tenant=st.sampled_from(["", "", "a", "b"]),
        priority=st.sampled_from([0, 0, -1, 1]),
        delay=st.sampled_from([None, None, DELAY_S]),
    )
    def enqueue(
        self, job_id: str, content: str, tenant: str, priority: int, delay: float | None
    ) -> None:
        model = self.model
        job = GenerationJob(id=job_id, prompt=content, tenant=tenant, priority=priority)
        asked = content + tenant
        known = model.live.get(job_id)
        known_content = known.content if known else model.ended.get(job_id, (None, None))[1]
        conflict = known_content is not None and known_content != asked
        try:
            handle = self.run(self.producer.enqueue(job, delay=delay))
        except JobConflict:
            assert conflict
            return
        assert not conflict
        if known is not None:
            assert handle.admission is Admission.DUPLICATE
        elif job_id in model.ended:
            assert handle.admission is Admission.FINISHED
        else:
            assert handle.admission is Admission.QUEUED
            model.live[job_id] = Modelled(asked, tenant, priority, model.now + (delay or 0))

    @rule(worker=st.integers(0, WORKERS - 1), limit=st.integers(1, 3))
    def claim(self, worker: int, limit: int) -> None:
        model, held = self.model, self.held[worker]
        claimed = self.run(self.queues[worker].claim(limit, held=len(held)))
        ids = [claim.id for claim in claimed.claims]
        assert len(set(ids)) == len(ids) <= limit
        model.sweep()
        spent = {job_id for job_id, job in model.live.items() if job.suspect and job.spent}
        given_up = set(ids[: min(len(spent), limit)])
        assert given_up <= spent
        assert len(given_up) == min(len(spent), limit), "what is given up waits for nobody"
        rest = ids[len(given_up) :]
        waiting = {id_ for id_, job in model.live.items() if job.suspect} - given_up
        if waiting and not held and not given_up:
            assert len(rest) == 1
            assert rest[0] in waiting, "an idle worker takes a suspect, and nothing else"
        elif waiting and self.takes_quarantine(worker):
            assert claimed.empty_yourself
            assert not rest
        else:
            assert not claimed.empty_yourself
            due = model.due()
            assert set(rest) <= due
            assert len(rest) == min(limit - len(given_up), len(due)), "it takes all it may"
        if not waiting:
            model.quarantine = None
        for claim in claimed.claims:
            job = model.live[claim.id]
            assert claim.suspect == job.suspect
            job.tries += 1
            assert claim.tries == job.tries
            assert decode_job_record(claim.payload or b"").content is not None
            job.suspect = job.spent = False
            job.token, job.lease_end = claim.token, model.now + LEASE_S
            held[claim.id] = claim

    def takes_quarantine(self, worker: int) -> bool:
        model = self.model
        holder, until = model.quarantine or (worker, model.now)
        if until > model.now and holder != worker:
            return False
        model.quarantine = (worker, model.now + 2 * LEASE_S)
        return True

    @rule(worker=st.integers(0, WORKERS - 1))
    def renew(self, worker: int) -> None:
        held = self.held[worker]
        lost = self.run(self.queues[worker].renew(list(held.values())))
        mine = {id_ for id_, claim in held.items() if self.is_holder(claim)}
        assert lost == set(held) - mine
        for job_id in mine:
            job = self.model.live[job_id]
            job.suspect = job.spent = False
            job.lease_end = self.model.now + LEASE_S
        for job_id in lost:
            del held[job_id]

    @rule(worker=st.integers(0, WORKERS - 1))
    def checkpoint(self, worker: int) -> None:
        claims = list(self.held[worker].values())
        added = self.run(self.queues[worker].checkpoint([Piece(c, 0, b"piece") for c in claims]))
        assert added == [self.is_holder(claim) for claim in claims]

    def is_holder(self, claim: Claim) -> bool:
        job = self.model.live.get(claim.id)
        return job is not None and job.token == claim.token

    @rule(worker=st.integers(0, WORKERS - 1), data=st.data())
    def finish(self, worker: int, data: st.DataObject) -> None:
        claim = self.pop_claim(worker, data)
        if claim is None:
            return
        over = claim.tries > MAX_TRIES
        code = "max_tries_exceeded" if over else "internal"
        succeeded = not over and data.draw(st.booleans())
        job = self.model.live.get(claim.id)
        record = encode_result_record(
            {} if succeeded else JobError(code=code, message=""),
            success=succeeded,
            job_id=claim.id,
            queue_name=QUEUE,
            job_try=claim.tries,
            content=decode_job_record(claim.payload or b"").content,
        )
        last = Try(number=claim.tries, worker="", started_ms=1, ended_ms=2, error="spent")
        finished = Finished(claim, record, None, given_up=last if over else None)
        (written,) = self.run(self.queues[worker].finish([finished]))
        assert written == self.is_holder(claim)
        if written:
            assert job is not None
            del self.model.live[claim.id]
            state = JobState.DEAD if over else JobState.FAILED
            self.model.ended[claim.id] = (JobState.DONE if succeeded else state, job.content)
            if over:
                self.model.dead[claim.id] = job

    @rule(
        worker=st.integers(0, WORKERS - 1),
        data=st.data(),
        delay=st.sampled_from([0, 0, DELAY_S]),
        refund=st.booleans(),
    )
    def release(self, worker: int, data: st.DataObject, delay: int, refund: bool) -> None:
        claim = self.pop_claim(worker, data)
        if claim is None:
            return
        given = Release(claim, delay_ms=delay * 1000, refund=refund)
        released = self.run(self.queues[worker].release([given]))
        assert released == self.is_holder(claim)
        if released:
            job = self.model.live[claim.id]
            job.tries -= refund
            job.token = job.lease_end = None
            job.suspect, job.spent = claim.suspect and not delay, False
            job.due = self.model.now + delay

    def pop_claim(self, worker: int, data: st.DataObject) -> Claim | None:
        held = self.held[worker]
        return held.pop(data.draw(st.sampled_from(sorted(held)))) if held else None

    @rule(job_id=st.sampled_from(IDS))
    def cancel(self, job_id: str) -> None:
        model = self.model
        expected = {
            JobState.UNKNOWN: Cancellation.UNKNOWN,
            JobState.QUEUED: Cancellation.CANCELLED,
            JobState.DEFERRED: Cancellation.CANCELLED,
            JobState.RUNNING: Cancellation.STOPPED,
        }.get(model.state(job_id), Cancellation.ENDED)
        job = model.live.get(job_id)
        if job is not None and job.lease_end is not None:
            expected = Cancellation.STOPPED  # its lease ran out, but nobody has looked since
        assert self.run(self.producer.cancel(job_id)) is expected
        if model.live.pop(job_id, None) is not None:
            model.ended[job_id] = (JobState.CANCELLED, None)

    @rule(job_id=st.sampled_from(IDS))
    def forget(self, job_id: str) -> None:
        self.run(self.producer.forget([job_id]))
        self.model.ended.pop(job_id, None)

    @rule(job_id=st.sampled_from(IDS))
    def requeue(self, job_id: str) -> None:
        model = self.model
        queued = self.run(self.producer.dead.requeue([job_id]))[job_id]
        assert queued == (job_id in model.dead and job_id not in model.live)
        if queued:
            job = model.dead.pop(job_id)
            model.ended.pop(job_id, None)
            model.live[job_id] = Modelled(job.content, job.tenant, job.priority, model.now)

    @rule(job_id=st.sampled_from(IDS))
    def drop(self, job_id: str) -> None:
        dropped = self.run(self.producer.dead.drop([job_id]))
        assert dropped == (self.model.dead.pop(job_id, None) is not None)

    @rule(seconds=st.sampled_from(PASSING_S))
    def time_passes(self, seconds: int) -> None:
        self.run(pass_time(self.redis, QUEUE, seconds * 1000))
        self.model.now += seconds

    @invariant()
    def redis_holds_what_the_model_says(self) -> None:
        if not hasattr(self, "redis"):
            return
        model, live = self.model, self.model.live
        now_ms, *answers = self.run(self.producer._connection.script("inspect")([QUEUE], IDS))
        width = len(answers) // len(IDS)
        states = {
            job_id: read_status(now_ms, answers[n * width : (n + 1) * width]).state
            for n, job_id in enumerate(IDS)
        }
        assert states == {job_id: model.state(job_id) for job_id in IDS}

        found = self.run(self.look())
        assert found["members"] == set(live)
        assert found["leases"] == {i for i, job in live.items() if job.lease_end is not None}
        assert found["suspects"] == {i for i, job in live.items() if job.suspect}
        assert found["holders"] == {i for i, job in live.items() if job.token is not None}
        assert found["dead"] == set(model.dead)
        load = {name: int(count) for name, count in found["load"].items()}
        assert load.pop("bytes", 0) == found["bytes"]
        assert set(load) <= {f"={job.tenant}" for job in live.values()}
        per_job = ("JOB", "RETRY", "IN_PROGRESS", "HISTORY", "PROGRESS")
        prefixes = tuple(getattr(keys, f"{name}_PREFIX") for name in per_job)
        of_jobs = {key for key in found["keys"] if key.startswith(prefixes)}
        assert {key.rpartition(":")[2] for key in of_jobs} <= set(live), "left over"

    async def look(self) -> dict[str, Any]:
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.zrange(QUEUE, 0, -1)
            for name in ("leases", "suspects", "dead"):
                pipe.zrange(f"{QUEUE}:{name}", 0, -1)
            pipe.hkeys(f"{QUEUE}:holders")
            pipe.keys("*")
            pipe.hgetall(f"{QUEUE}:load")
            for job_id in IDS:
                pipe.strlen(keys.job_key(job_id))
            answers = await pipe.execute()
        sets, load, sizes = answers[:6], answers[6], answers[7:]
        names = ("members", "leases", "suspects", "dead", "holders", "keys")
        found = {
            name: {raw.decode() for raw in raws} for name, raws in zip(names, sets, strict=True)
        }
        return {
            **found,
            "load": {name.decode(): count for name, count in load.items()},
            "bytes": sum(sizes),
        }


def test_the_scripts_agree_with_the_model(redis_server: EmbeddedRedis) -> None:
    QueueMachine.url = redis_server.url
    run_state_machine_as_test(
        QueueMachine,
        settings=settings(
            max_examples=25,
            phases=(Phase.generate,),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
