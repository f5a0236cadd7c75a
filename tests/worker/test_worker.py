"""The worker's loop around a generation that the test controls: claims, answers, drains."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Retry, func
from redis.asyncio import Redis

from tests.worker.conftest import QUEUE, Push
from tidemill_contracts import keys
from tidemill_contracts.wire import (
    ErrorCode,
    GenerationJob,
    GenerationResult,
    JobError,
    JobFailed,
    Outcome,
    SamplingParams,
    Timings,
    Usage,
)
from tidemill_contracts.wire.arq_format import (
    GENERATE,
    decode_outcome,
    deserializer,
    encode_job_record,
    serializer,
)
from tidemill_producer.embedded import EmbeddedRedis
from tidemill_worker.batcher import Batcher
from tidemill_worker.connect import RedisUnreachable
from tidemill_worker.generator import EngineCrashed
from tidemill_worker.queue import Finished, JobQueue
from tidemill_worker.settings import make_config
from tidemill_worker.worker import TidemillWorker


def _result(job_id: str) -> GenerationResult:
    return GenerationResult(
        id=job_id,
        model="fake",
        text="done",
        token_ids=[1],
        finish_reason="stop",
        usage=Usage(prompt_tokens=1, completion_tokens=1),
        timings=Timings(queued_ms=0, first_token_ms=0, total_ms=0),
    )


class Gate:
    """A generation that runs until it is let go; notes what it has seen."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self.error: Exception | None = None

    async def __call__(self, ctx: dict[Any, Any], job: GenerationJob) -> GenerationResult:
        self.started.append(ctx["job_id"])
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.append(ctx["job_id"])
            raise
        if self.error is not None:
            raise self.error
        return _result(ctx["job_id"])


@pytest.fixture
def gate() -> Gate:
    return Gate()


@asynccontextmanager
async def running(
    redis_url: str, gate: Gate, hooks: dict[str, Any] | None = None, **settings: object
) -> AsyncIterator[TidemillWorker]:
    """A worker in this event loop; killed (not drained) at the end."""

    async def generate(ctx: dict[Any, Any], job: GenerationJob) -> GenerationResult:
        return await gate(ctx, job)

    config = make_config({"redis_url": redis_url, "lease_ms": 1_000, **settings})
    options: dict[str, Any] = {
        "functions": [func(generate, name=GENERATE)],
        "on_startup": None,
        "on_shutdown": None,
        "handle_signals": False,
        **(hooks or {}),
    }
    worker = TidemillWorker(config, **options)
    task = asyncio.create_task(worker.async_run())
    try:
        yield worker
    finally:
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await worker.close()


async def outcome(redis: Redis, job_id: str = "job", timeout: float = 10) -> Outcome:
    async with asyncio.timeout(timeout):
        while (raw := await redis.get(keys.result_key(job_id))) is None:
            await asyncio.sleep(0.01)
    return decode_outcome(raw, job_id)


async def until(condition: Callable[[], bool], timeout: float = 10) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.01)


async def error_code(redis: Redis, job_id: str = "job") -> str:
    error = (await outcome(redis, job_id)).error
    assert error is not None
    return error.code


async def test_a_job_is_answered_and_leaves_nothing_behind(
    redis_url: str, redis: Redis, push: Push, gate: Gate
) -> None:
    async with running(redis_url, gate):
        await push()
        assert (await outcome(redis)).unwrap() == _result("job")
    left = {key async for key in redis.scan_iter() if b":health-check" not in key}
    assert left == {b"arq:result:job"}


async def test_malformed_entries_each_become_one_failed_result_and_stop_nobody(
    redis_url: str, redis: Redis, push: Push, gate: Gate
) -> None:
    await redis.zadd(QUEUE, {"lost": 1, b"\xff\xfe": 1})
    await push("garbage", record=b"\x93garbage")
    await push("pickled", record=b"\x80\x04K\x01.")
    record = {"t": None, "f": GENERATE, "a": [{"prompt": "x", "tempo": 1}], "k": {}, "et": 0}
    await push("unknown-field", record=msgspec.msgpack.encode(record))
    record["a"] = [{"prompt": "x", "schema_version": 99}]
    await push("future", record=msgspec.msgpack.encode(record))
    record["a"] = []
    await push("no-argument", record=msgspec.msgpack.encode(record))
    record["f"] = "send_mail"
    await push("function", record=msgspec.msgpack.encode(record))
    await push("good", due_in_ms=-1)
    async with running(redis_url, gate):
        assert (await outcome(redis, "good")).unwrap()
        assert await error_code(redis, "lost") == ErrorCode.PAYLOAD_LOST
        assert await error_code(redis, "garbage") == ErrorCode.UNDECODABLE
        assert await error_code(redis, "pickled") == ErrorCode.UNDECODABLE
        assert await error_code(redis, "future") == ErrorCode.UNSUPPORTED_SCHEMA_VERSION
        assert await error_code(redis, "no-argument") == ErrorCode.INTERNAL
        assert await error_code(redis, "function") == ErrorCode.UNKNOWN_FUNCTION
        error = (await outcome(redis, "unknown-field")).error
        assert error == JobError(
            code="invalid_job", message="Object contains unknown field `tempo`", retryable=False
        )
        raw = await redis.get(b"arq:result:\xff\xfe")
        assert decode_outcome(raw, "?").error is not None
    assert await redis.zcard(QUEUE) == 0


async def test_errors_keep_code_and_message(
    redis_url: str, redis: Redis, push: Push, gate: Gate
) -> None:
    gate.error = JobFailed(JobError(code="teapot", message="short and stout", retryable=True))
    async with running(redis_url, gate):
        await push()
        assert (await outcome(redis)).error == gate.error.error


async def test_a_bug_in_a_function_is_an_internal_error_of_that_job(
    redis_url: str, redis: Redis, push: Push, gate: Gate
) -> None:
    gate.error = ZeroDivisionError("division by zero")
    async with running(redis_url, gate):
        await push()
        error = (await outcome(redis)).error
    assert error is not None
    assert (error.code, error.message) == ("internal", "ZeroDivisionError: division by zero")


async def test_claims_no_more_than_there_is_room_for(
    redis_url: str, redis: Redis, push: Push, gate: Gate
) -> None:
    gate.open.clear()
    for i in range(40):
        await push(f"job-{i}")
    async with running(redis_url, gate, max_rows=8) as worker:
        await until(lambda: len(gate.started) == worker.config.claim_limit)
        await asyncio.sleep(0.1)
        assert len(gate.started) == worker.config.claim_limit < 40
        gate.open.set()
        for i in range(40):
            await outcome(redis, f"job-{i}")
    assert sorted(gate.started) == sorted(f"job-{i}" for i in range(40))


async def test_a_job_longer_than_its_lease_runs_once(
    redis_url: str, redis: Redis, push: Push, gate: Gate
) -> None:
    gate.open.clear()
    await push()
    async with running(redis_url, gate), running(redis_url, gate):
        await asyncio.sleep(3.0)
        gate.open.set()
        await outcome(redis)
    assert gate.started == ["job"]


async def test_a_killed_workers_jobs_go_to_another_soon(
    redis_url: str, redis: Redis, push: Push, gate: Gate
) -> None:
    for i in range(5):
        await push(f"job-{i}")
    claims = (await JobQueue(redis, QUEUE, lease_ms=1_000).claim(5)).claims
    assert len(claims) == 5
    started = time.monotonic()
    async with running(redis_url, gate):
        for i in range(5):
            await outcome(redis, f"job-{i}")
    assert time.monotonic() - started < 5


async def test_a_worker_that_lost_its_lease_drops_the_row(
    redis_url: str, redis: Redis, push: Push, gate: Gate
) -> None:
    gate.open.clear()
    await push()
    async with running(redis_url, gate):
        await until(lambda: gate.started == ["job"])
        await redis.set(keys.in_progress_key("job"), "somebody else", px=60_000)
        await until(lambda: gate.cancelled == ["job"])
    assert await redis.get(keys.in_progress_key("job")) == b"somebody else"
    assert not await redis.exists(keys.result_key("job"))


async def test_a_job_that_kills_its_workers_is_given_up(
    redis_url: str, redis: Redis, push: Push, gate: Gate
) -> None:
    await push()
    await redis.set(keys.retry_key("job"), 5)
    async with running(redis_url, gate, max_tries=5):
        assert await error_code(redis) == ErrorCode.MAX_TRIES_EXCEEDED
    assert gate.started == []


async def test_the_first_signal_finishes_what_runs_and_claims_nothing_more(
    redis_url: str, redis: Redis, push: Push, gate: Gate
) -> None:
    gate.open.clear()
    await push("running")
    async with running(redis_url, gate) as worker:
        await until(lambda: gate.started == ["running"])
        worker.handle_sig(signal.SIGTERM)
        await asyncio.sleep(0.1)
        await push("late")
        await asyncio.sleep(0.2)
        gate.open.set()
        assert worker.main_task is not None
        await asyncio.wait_for(worker.main_task, 5)
    assert (await outcome(redis, "running")).unwrap()
    assert gate.started == ["running"]
    assert await redis.zcard(QUEUE) == 1


@pytest.mark.parametrize("second_signal", [True, False])
async def test_what_does_not_finish_in_time_is_handed_back_without_spending_a_try(
    redis_url: str, redis: Redis, push: Push, gate: Gate, second_signal: bool
) -> None:
    gate.open.clear()
    await push()
    score = await redis.zscore(QUEUE, "job")
    drain_timeout = 60 if second_signal else 0.2
    async with running(redis_url, gate, drain_timeout=drain_timeout) as worker:
        await until(lambda: gate.started == ["job"])
        worker.handle_sig(signal.SIGTERM)
        if second_signal:
            await asyncio.sleep(0.1)
            worker.handle_sig(signal.SIGTERM)
        assert worker.main_task is not None
        await asyncio.wait_for(worker.main_task, 5)
    assert gate.cancelled == ["job"]
    assert await redis.zscore(QUEUE, "job") == score
    (claim,) = (await JobQueue(redis, QUEUE).claim(1)).claims
    assert claim.tries == 1


async def test_a_redis_restart_is_waited_out_and_no_result_is_lost(
    redis_server: EmbeddedRedis, redis_url: str, push: Push, gate: Gate
) -> None:
    gate.open.clear()
    for i in range(4):
        await push(f"job-{i}")
    async with running(redis_url, gate):
        await until(lambda: len(gate.started) == 4)
        await asyncio.sleep(1.1)  # appendfsync everysec
        redis_server.kill()
        gate.open.set()
        await asyncio.sleep(1.5)
        redis_server.start()
        redis = Redis.from_url(redis_server.url)
        for i in range(4):
            assert (await outcome(redis, f"job-{i}", timeout=20)).unwrap()
        await redis.aclose()
    assert sorted(gate.started) == sorted(f"job-{i}" for i in range(4))


async def test_a_job_that_its_own_worker_claims_again_is_answered_by_the_run_under_way(
    redis_url: str, redis: Redis, push: Push, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.open.clear()
    await push()
    # Its last try: only then may a worker that is not idle claim a job whose lease ran out.
    await redis.set(keys.retry_key("job"), 4)
    async with running(redis_url, gate) as worker:
        await until(lambda: gate.started == ["job"])
        first = worker.runner.held.claims["job"]

        async def renew_nothing(claims: object) -> set[str]:
            return set()

        async def write_late(finished: Finished) -> bool:
            await until(lambda: worker.runner.held.claims["job"] is not first)
            return await write(finished)

        # As after an outage: the lease runs out, and the result is on its way with the old token.
        write = worker.results.write
        monkeypatch.setattr(worker.queue, "renew", renew_nothing)
        monkeypatch.setattr(worker.results, "write", write_late)
        gate.open.set()
        assert (await outcome(redis)).unwrap()
    assert gate.started == ["job"]


async def test_a_crash_of_the_engine_hands_the_jobs_to_another_worker_and_ends_this_one(
    redis_url: str, redis: Redis, push: Push, tiny_model: Path
) -> None:
    job = GenerationJob(id="job", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=2))
    config = make_config(
        {"redis_url": redis_url, "model": str(tiny_model), "kv_pages": 8, "threads": 1}
    )
    worker = TidemillWorker(config, handle_signals=False)
    running_worker = asyncio.create_task(worker.async_run())
    await until(lambda: worker.state == "ready")
    batcher: Batcher = worker.ctx["batcher"]

    def broken(**_: object) -> None:
        raise RuntimeError("planted bug")

    batcher._scheduler.plan = broken  # type: ignore[method-assign,assignment]
    await push(record=encode_job_record(job, enqueue_time_ms=0))
    with pytest.raises(EngineCrashed, match="planted bug"):
        await asyncio.wait_for(running_worker, 10)
    await worker.close()
    (claim,) = (await JobQueue(redis, QUEUE).claim(1)).claims
    assert (claim.id, claim.tries) == ("job", 2), "at once, and with the try spent"


async def test_a_function_may_ask_to_be_run_again_later(
    redis_url: str, redis: Redis, push: Push, gate: Gate
) -> None:
    gate.error = Retry(defer=0.2)
    await push()
    async with running(redis_url, gate):
        await until(lambda: len(gate.started) == 2)
        gate.error = None
        assert (await outcome(redis)).unwrap()


async def _commands_sent(redis: Redis) -> int:
    """Commands that clients have sent. The server also counts the calls that scripts make; an
    idle claim makes these, which no idle client sends itself."""
    stats = await redis.info("commandstats")
    inside = ("time", "zrangebyscore", "zrange", "zcard", "exists", "smembers")
    inside_scripts = {f"cmdstat_{name}" for name in inside}
    return sum(s["calls"] for name, s in stats.items() if name not in inside_scripts)


async def test_an_idle_worker_sends_fewer_than_five_commands_a_second(
    redis_url: str, redis: Redis, gate: Gate
) -> None:
    async with running(redis_url, gate):
        await asyncio.sleep(1)
        before = await _commands_sent(redis)
        await asyncio.sleep(4)
        assert 0 < (await _commands_sent(redis) - before) / 4 < 5


async def test_a_job_reaches_an_idle_worker_at_once(
    redis_url: str, redis: Redis, push: Push, gate: Gate
) -> None:
    async with running(redis_url, gate):
        await asyncio.sleep(0.3)
        await push()
        await redis.lpush(keys.doorbell_key(QUEUE), "1")
        await asyncio.sleep(0.3)
        assert gate.started == ["job"], "it must not wait for the next look at the queue"


async def test_plain_arq_enqueues_and_reads_results_and_errors(redis_url: str, gate: Gate) -> None:
    pool = await create_pool(
        RedisSettings.from_dsn(redis_url),
        job_serializer=serializer,
        job_deserializer=deserializer,
        default_queue_name=QUEUE,
    )
    async with running(redis_url, gate):
        job = await pool.enqueue_job(GENERATE, {"prompt": "hello"})
        assert job is not None
        fields = await job.result(timeout=10, poll_delay=0.05)
        assert msgspec.convert(fields, GenerationResult) == _result(job.job_id)
        job = await pool.enqueue_job(GENERATE, {"prompt": "hello", "sampling": {"top_p": 7}})
        assert job is not None
        with pytest.raises(JobFailed, match=r"top_p") as caught:
            await job.result(timeout=10, poll_delay=0.05)
        assert caught.value.error.code == ErrorCode.INVALID_JOB
    await pool.aclose()


async def test_arqs_hooks_run_around_each_job(
    redis_url: str, redis: Redis, push: Push, gate: Gate
) -> None:
    seen: list[str] = []

    def hook(name: str) -> Any:
        async def note(ctx: dict[Any, Any]) -> None:
            seen.append(f"{name} {ctx.get('job_id', '')}".strip())

        return note

    names = ("on_startup", "on_shutdown", "on_job_start", "on_job_end", "after_job_end")
    async with running(redis_url, gate, {name: hook(name) for name in names}):
        await push()
        await outcome(redis)
        await until(lambda: "after_job_end job" in seen)
    assert seen == [
        "on_startup",
        "on_job_start job",
        "on_job_end job",
        "after_job_end job",
        "on_shutdown",
    ]


async def test_burst_stops_once_the_queue_is_empty(
    redis_url: str, redis: Redis, push: Push, gate: Gate
) -> None:
    for i in range(3):
        await push(f"job-{i}")
    async with running(redis_url, gate, burst=True) as worker:
        await until(lambda: worker.main_task is not None and worker.main_task.done())
    assert len(gate.started) == 3


async def test_an_unreachable_redis_is_named_without_its_password() -> None:
    config = make_config({"redis_url": "redis://:secret@127.0.0.1:1/0"})
    worker = TidemillWorker(config, on_startup=None, on_shutdown=None, handle_signals=False)
    with pytest.raises(RedisUnreachable, match=r"redis://:\*\*\*@127\.0\.0\.1:1/0") as caught:
        await worker.async_run()
    assert "secret" not in str(caught.value)
    assert "--redis" in str(caught.value)


async def test_a_full_lease_of_results_is_written_in_few_calls(
    redis_url: str, redis: Redis, push: Push, gate: Gate
) -> None:
    gate.open.clear()
    for i in range(64):
        await push(f"job-{i}")
    async with running(redis_url, gate, max_rows=64):
        await until(lambda: len(gate.started) == 64)
        before = (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"]
        gate.open.set()
        for i in range(64):
            await outcome(redis, f"job-{i}")
        after = (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"]
    assert after - before <= 6


async def test_a_record_enqueued_by_the_producer_names_where_to_reply(
    redis_url: str, redis: Redis, push: Push, gate: Gate
) -> None:
    record = encode_job_record(
        GenerationJob(id="job", prompt="x"), enqueue_time_ms=0, reply_to="tidemill:reply:me"
    )
    async with running(redis_url, gate):
        await push(record=record)
        await outcome(redis)
        assert await redis.xlen("tidemill:reply:me") == 1
