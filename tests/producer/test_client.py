"""The producer against a real server and a double of the worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

import tidemill_producer
from tidemill_contracts import keys
from tidemill_contracts.wire import (
    ChatMessage,
    ErrorCode,
    GenerationJob,
    InvalidMessage,
    JobError,
    JobFailed,
    SamplingParams,
    decode_job,
)
from tidemill_contracts.wire.arq_format import decode_job_record
from tidemill_producer import (
    Admission,
    JobConflict,
    JobState,
    Producer,
    QueueUnavailable,
    ResultTimeout,
    UnknownJob,
    client,
    replies,
)


def job(job_id: str, prompt: str = "hello", **fields: Any) -> GenerationJob:
    return GenerationJob(id=job_id, prompt=prompt, **fields)


async def enqueue_all(producer: Producer, jobs: Any) -> list[tidemill_producer.JobHandle]:
    return [handle async for handle in producer.enqueue_many(jobs)]


async def eventually(condition: Any, within_s: float = 5.0) -> None:
    give_up_at = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < give_up_at, "did not happen in time"
        await asyncio.sleep(0.02)


def test_the_public_names_are_importable_and_sorted() -> None:
    assert tidemill_producer.__all__ == sorted(tidemill_producer.__all__)
    for name in tidemill_producer.__all__:
        assert getattr(tidemill_producer, name) is not None


async def test_a_result_comes_back(producer: Producer, worker: Any) -> None:
    async with worker.serving():
        handle = await producer.enqueue("hello", max_tokens=3)
        result = await handle.result(timeout=5)
    assert handle.admission is Admission.QUEUED
    assert (result.id, result.text) == (handle.id, "HELLO")


async def test_enqueue_writes_an_arq_record_and_rings_once(
    producer: Producer, redis: Redis
) -> None:
    before_ms = time.time() * 1000
    await producer.enqueue(job("a", "one", sampling=SamplingParams(seed=7)))
    await producer.enqueue(job("b", "two"))
    raw = await redis.get(keys.job_key("a"))
    record = decode_job_record(raw)
    assert record.function == "generate"
    assert record.enqueue_time_ms >= int(before_ms)
    assert decode_job(bytes(record.args[0])).sampling.seed == 7
    assert await redis.ttl(keys.job_key("a")) == -1
    scores = dict(await redis.zrange(keys.DEFAULT_QUEUE, 0, -1, withscores=True))
    assert before_ms - 3 < scores[b"a"] < scores[b"b"] < time.time() * 1000 - 1
    assert await redis.llen(keys.doorbell_key(keys.DEFAULT_QUEUE)) == 1


async def test_keywords_become_fields_of_the_job(producer: Producer, worker: Any) -> None:
    await producer.enqueue("x", temperature=0.5, top_k=3, priority=2, metadata={"k": "v"})
    prompt, _ = await worker.claim()
    await producer.enqueue(messages=[ChatMessage(role="user", content="hi")], seed=1)
    chat, _ = await worker.claim()
    assert prompt.sampling == SamplingParams(temperature=0.5, top_k=3)
    assert (prompt.priority, prompt.metadata) == (2, {"k": "v"})
    assert chat.messages == [ChatMessage(role="user", content="hi")]


@pytest.mark.parametrize(
    ("bad", "path"),
    [
        ({"max_tokens": 0}, "$.sampling.max_tokens"),
        ({"temprature": 1}, "temprature"),
        ({"id": "has space"}, "$.id"),
        ({"temperature": float("nan")}, "$.sampling.temperature"),
        ({"priority": 101}, "$.priority"),
        ({"prompt_token_ids": [1]}, "exactly one"),
        ({"metadata": {"k": object()}}, "cannot be encoded"),
        ({"metadata": {"k": "\ud800"}}, "cannot be encoded"),
    ],
)
async def test_a_bad_job_is_refused_before_anything_is_written(
    producer: Producer, redis: Redis, bad: dict[str, object], path: str
) -> None:
    with pytest.raises(InvalidMessage, match=path.replace("$", r"\$")) as caught:
        await producer.enqueue("x", **bad)
    assert caught.value.error.code == ErrorCode.INVALID_JOB
    assert await redis.dbsize() == 0


async def test_a_struct_that_python_built_badly_is_refused(
    producer: Producer, redis: Redis
) -> None:
    with pytest.raises(InvalidMessage, match=r"max_tokens"):
        await producer.enqueue(job("a", sampling=SamplingParams(max_tokens=-1)))
    assert await redis.dbsize() == 0


async def test_an_id_runs_once_and_says_so(producer: Producer, worker: Any) -> None:
    first = await producer.enqueue(job("a", "one"))
    again = await producer.enqueue(job("a", "one", priority=3))
    assert (first.admission, again.admission) == (Admission.QUEUED, Admission.DUPLICATE)
    assert await worker.run_all() == 1
    late = await producer.enqueue(job("a", "one"))
    assert late.admission is Admission.FINISHED
    results = [await handle.result(timeout=5) for handle in (first, again, late)]
    assert [result.text for result in results] == ["ONE"] * 3


async def test_an_id_of_another_content_is_a_conflict(producer: Producer, worker: Any) -> None:
    await producer.enqueue(job("a", "one"))
    with pytest.raises(JobConflict, match="a already"):
        await producer.enqueue(job("a", "two"))
    await worker.run_all()
    with pytest.raises(JobConflict):
        await producer.enqueue(job("a", "three"))
    assert (await producer.result("a", timeout=5)).text == "ONE"


async def test_a_hundred_enqueues_of_one_id_at_once_run_once(redis_url: str, worker: Any) -> None:
    async with Producer(redis_url) as one, Producer(redis_url) as two:
        handles = await asyncio.gather(
            *(producer.enqueue(job("a")) for producer in (one, two) for _ in range(50))
        )
        assert [handle.admission for handle in handles].count(Admission.QUEUED) == 1
        assert await worker.run_all() == 1
        results = await asyncio.gather(*(handle.result(timeout=30) for handle in handles))
        assert {result.text for result in results} == {"HELLO"}


async def test_a_duplicate_of_another_producer_hears_as_well(redis_url: str, worker: Any) -> None:
    async with Producer(redis_url) as one, Producer(redis_url) as two:
        mine = await one.enqueue(job("a"))
        theirs = await two.enqueue(job("a"))
        both = asyncio.gather(mine.result(timeout=5), theirs.result(timeout=5))
        await asyncio.sleep(0.1)
        await worker.run_all()
        assert [result.text for result in await both] == ["HELLO", "HELLO"]


async def test_a_job_of_another_producer_can_be_awaited(
    redis_url: str, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "SWEEP_S", 3600)
    async with Producer(redis_url) as one, Producer(redis_url) as two:
        await one.enqueue(job("a"))
        waiting = asyncio.create_task(two.result("a", timeout=5))
        await eventually(lambda: worker.redis.exists(keys.waiters_key("a")))
        await worker.run_all()
        assert (await waiting).text == "HELLO"
        assert not await worker.redis.exists(keys.waiters_key("a"))


async def test_a_finished_job_can_be_awaited_by_anyone(redis_url: str, worker: Any) -> None:
    async with Producer(redis_url) as one:
        await one.enqueue(job("a"))
        await worker.run_all()
    async with Producer(redis_url) as two:
        assert (await two.result("a", timeout=5)).text == "HELLO"
        assert (await two.result("a", timeout=5)).text == "HELLO"


async def test_waiting_for_ones_own_job_registers_nothing(producer: Producer, redis: Redis) -> None:
    handle = await producer.enqueue("x")
    with pytest.raises(ResultTimeout):
        await handle.result(timeout=0.2)
    assert not await redis.exists(keys.waiters_key(handle.id))


async def test_results_that_nobody_awaits_are_dropped(
    producer: Producer, worker: Any, redis: Redis
) -> None:
    handles = await enqueue_all(producer, (job(f"j{n}") for n in range(1200)))
    assert await worker.run_all() == 1200

    async def stream_is_empty() -> bool:
        return bool(await redis.xlen(producer._stream) == 0)

    await eventually(stream_is_empty)
    assert producer._replies._waiting == {}
    assert (await handles[7].result(timeout=5)).id == "j7"


async def test_a_failed_job_raises_its_error(producer: Producer, worker: Any) -> None:
    worker.answer = lambda job: JobError.of(ErrorCode.PROMPT_TOO_LONG, "9 tokens, 8 fit")
    handle = await producer.enqueue("x")
    await worker.run_all()
    with pytest.raises(JobFailed, match="9 tokens") as caught:
        await handle.result(timeout=5)
    assert caught.value.error.code == "prompt_too_long"
    outcome = await handle.outcome(timeout=5)
    assert outcome.error == caught.value.error


async def test_an_unknown_id_says_so(producer: Producer) -> None:
    for job_id in ("nobody", "", "white space", "x" * 200):
        with pytest.raises(UnknownJob):
            await producer.result(job_id, timeout=5)


async def test_one_unknown_id_disturbs_no_other(producer: Producer, worker: Any) -> None:
    handle = await producer.enqueue("x")
    good = asyncio.create_task(handle.result(timeout=5))
    bad = asyncio.create_task(producer.result("nobody", timeout=5))
    await asyncio.sleep(0.1)
    await worker.run_all()
    assert (await good).text == "X"
    with pytest.raises(UnknownJob):
        await bad


async def test_a_timeout_leaves_the_job_alone(producer: Producer, worker: Any) -> None:
    handle = await producer.enqueue("x")
    with pytest.raises(ResultTimeout, match=handle.id):
        await handle.result(timeout=0.05)
    assert producer._replies._waiting == {}
    await worker.run_all()
    assert (await handle.result(timeout=5)).text == "X"


async def test_a_cancelled_waiter_leaves_the_other_alone(producer: Producer, worker: Any) -> None:
    handle = await producer.enqueue("x")
    one, two = (asyncio.create_task(handle.result(timeout=5)) for _ in range(2))
    await asyncio.sleep(0.1)
    one.cancel()
    await asyncio.sleep(0)
    await worker.run_all()
    assert (await two).text == "X"


async def test_five_thousand_jobs_are_enqueued_in_five_calls_and_all_awaited(
    producer: Producer, worker: Any, redis: Redis
) -> None:
    await producer.enqueue("warm up")
    before = (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"]
    handles = await enqueue_all(producer, (job(f"j{n}", f"p{n}") for n in range(5000)))
    assert (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"] - before == 5
    waiting = asyncio.gather(*(handle.result(timeout=60) for handle in handles))
    async with worker.serving():
        results = await waiting
    assert [result.text for result in results] == [f"P{n}" for n in range(5000)]
    assert worker.ran[1:] == [handle.id for handle in handles]
    assert producer._replies._waiting == {}


async def test_calls_are_bounded_by_bytes(producer: Producer, redis: Redis) -> None:
    prompt = "x" * (1024 * 1024)
    await producer.enqueue("warm up")
    before = (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"]
    await enqueue_all(producer, (job(f"j{n}", prompt) for n in range(9)))
    assert (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"] - before == 3


async def test_enqueue_many_draws_jobs_only_as_it_is_iterated(
    producer: Producer, redis: Redis
) -> None:
    drawn = 0

    async def endless() -> AsyncIterator[GenerationJob]:
        nonlocal drawn
        while True:
            drawn += 1
            yield job(f"j{drawn}")

    handles = producer.enqueue_many(endless())
    async for handle in handles:
        if handle.id == "j1500":
            break
    await handles.aclose()  # type: ignore[attr-defined]
    assert drawn == 2 * client.MAX_CALL_JOBS + 1
    assert await redis.zcard(keys.DEFAULT_QUEUE) == 2 * client.MAX_CALL_JOBS


async def test_enqueue_many_enqueues_all_before_a_bad_job_and_none_after(
    producer: Producer, redis: Redis
) -> None:
    handles = producer.enqueue_many([job("a"), job("b"), job("no good"), job("c")])
    assert [(await anext(handles)).id for _ in range(2)] == ["a", "b"]
    with pytest.raises(InvalidMessage):
        await anext(handles)
    assert await redis.zcard(keys.DEFAULT_QUEUE) == 2


@pytest.mark.parametrize("text", ["", "żółw 🐢 龜", "a\x00b", "\u202e", "🏳️‍🌈" * 1000])
async def test_text_survives_the_way_there_and_back(
    producer: Producer, worker: Any, text: str
) -> None:
    seen: list[str | None] = []
    echo = worker.answer

    def answer(job: GenerationJob) -> tidemill_producer.GenerationResult:
        seen.append(job.prompt)
        result: tidemill_producer.GenerationResult = echo(job)
        return msgspec.structs.replace(result, text=job.prompt)

    worker.answer = answer
    handle = await producer.enqueue(text)
    await worker.run_all()
    assert (await handle.result(timeout=5)).text == text
    assert seen == [text]


async def test_priority_goes_first_and_equals_keep_their_order(
    producer: Producer, worker: Any
) -> None:
    low = [job(f"z{n}", priority=-1) for n in range(3)]
    plain = [job(f"y{9 - n}") for n in range(10)]
    high = [job(f"x{n}", priority=1) for n in range(3)]
    await enqueue_all(producer, [*low, *plain, *high])
    await worker.run_all()
    assert worker.ran == [each.id for each in (*high, *plain, *low)]


async def test_jobs_enqueued_one_by_one_keep_their_order(producer: Producer, worker: Any) -> None:
    ids = [f"{n:03}" for n in reversed(range(300))]
    for job_id in ids:
        await producer.enqueue(job(job_id))
    await worker.run_all()
    assert worker.ran == ids


async def test_a_step_of_priority_is_a_minute_of_waiting(producer: Producer, redis: Redis) -> None:
    await enqueue_all(producer, [job("a"), job("b", priority=2)])
    scores = dict(await redis.zrange(keys.DEFAULT_QUEUE, 0, -1, withscores=True))
    assert 119_999 < scores[b"a"] - scores[b"b"] < 120_001


async def test_status_follows_the_job(producer: Producer, worker: Any) -> None:
    assert (await producer.status("a")).state is JobState.UNKNOWN
    handle = await producer.enqueue(job("a"))
    assert (await handle.status()).state is JobState.QUEUED
    claimed = await worker.claim()
    assert (await handle.status()).state is JobState.RUNNING
    await worker.finish(*claimed)
    assert (await handle.status()).state is JobState.DONE
    worker.answer = lambda job: JobError.of(ErrorCode.EMPTY_PROMPT, "empty")
    failing = await producer.enqueue("x")
    await worker.run_all()
    assert (await failing.status()).state is JobState.FAILED


async def test_a_lost_reply_is_found_by_the_sweep(
    producer: Producer, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "SWEEP_S", 0.1)
    worker.tells = False
    handles = await enqueue_all(producer, [job(f"j{n}") for n in range(700)])
    waiting = asyncio.gather(*(handle.result(timeout=10) for handle in handles))
    await asyncio.sleep(0.1)
    await worker.run_all()
    assert len(await waiting) == 700


async def test_a_job_that_vanishes_fails_its_waiter(
    producer: Producer, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "SWEEP_S", 0.1)
    handle = await producer.enqueue("x")
    waiting = asyncio.create_task(handle.result(timeout=5))
    await asyncio.sleep(0.05)
    await redis.delete(keys.job_key(handle.id))
    with pytest.raises(UnknownJob):
        await waiting


async def test_a_result_that_is_no_record_fails_its_waiter_alone(
    producer: Producer, worker: Any, redis: Redis
) -> None:
    good, bad = await enqueue_all(producer, [job("good"), job("bad")])
    waiting = [asyncio.create_task(handle.result(timeout=5)) for handle in (good, bad)]
    await asyncio.sleep(0.05)
    await redis.set(keys.result_key("bad"), b"\xc1junk")
    await redis.xadd(producer._stream, {"id": "bad"})
    await worker.run_one()
    assert (await waiting[0]).text == "HELLO"
    with pytest.raises(tidemill_producer.TidemillError, match="not a result record"):
        await waiting[1]


async def test_a_cut_connection_is_waited_out(
    producer: Producer, worker: Any, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    handle = await producer.enqueue("x")
    waiting = asyncio.create_task(handle.result(timeout=10))
    for _ in range(3):
        await asyncio.sleep(0.1)
        await redis.client_kill_filter(_type="normal", skipme=True)
    later = await producer.enqueue("y")
    await worker.run_all()
    assert (await waiting).text == "X"
    assert (await later.result(timeout=5)).text == "Y"
    assert "cannot be reached" in caplog.text


async def test_a_restart_of_the_server_is_waited_out(
    producer: Producer, redis_server: Any, redis: Redis, worker: Any
) -> None:
    handles = await enqueue_all(producer, [job(f"j{n}") for n in range(100)])
    waiting = asyncio.gather(*(handle.result(timeout=30) for handle in handles))
    await asyncio.sleep(1.5)  # the append-only file is synced every second
    redis_server.kill()
    try:
        during = asyncio.create_task(producer.enqueue(job("during")))
        await asyncio.sleep(1.0)
    finally:
        redis_server.start()
    assert (await during).admission is Admission.QUEUED
    async with worker.serving():
        results = await waiting
        assert len(results) == 100
        assert (await producer.result("during", timeout=10)).text == "HELLO"


async def test_an_enqueue_whose_answer_was_lost_counts_as_queued(
    producer: Producer, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = producer._connection.script("enqueue")
    attempts = 0

    async def cut_once(**call: Any) -> Any:
        nonlocal attempts
        attempts += 1
        answer = await script(**call)
        if attempts == 1:
            raise RedisConnectionError("cut")
        return answer

    monkeypatch.setattr(producer._connection, "enqueue", cut_once)
    handle = await producer.enqueue("x")
    assert handle.admission is Admission.QUEUED
    assert attempts == 2
    assert await redis.zcard(keys.DEFAULT_QUEUE) == 1


async def test_a_server_that_is_not_there_is_named_without_its_secrets() -> None:
    url = "redis://me:s3cret@127.0.0.1:1/0"
    async with Producer(url, patience_s=0.2) as producer:
        for call in (
            producer.enqueue("x"),
            producer.result("x"),
            producer.status("x"),
        ):
            with pytest.raises(QueueUnavailable, match=r"127\.0\.0\.1:1.*Is it running") as caught:
                await call
            assert "s3cret" not in str(caught.value)


async def test_a_full_server_says_so(producer: Producer, redis: Redis) -> None:
    await redis.config_set("maxmemory", "1")
    try:
        with pytest.raises(QueueUnavailable, match=r"is full.*maxmemory"):
            await producer.enqueue("x")
    finally:
        await redis.config_set("maxmemory", "0")
    assert await redis.dbsize() == 0


@pytest.mark.parametrize("url", ["http://127.0.0.1", "127.0.0.1:6379", ""])
async def test_a_bad_url_says_so(url: str) -> None:
    with pytest.raises(QueueUnavailable, match="not a Redis URL"):
        Producer(url)


async def test_closing_ends_waits_and_deletes_the_reply_stream(redis_url: str, worker: Any) -> None:
    producer = Producer(redis_url)
    handle = await producer.enqueue("x")
    other = await producer.enqueue("y")
    waiting = asyncio.create_task(other.result())
    await worker.run_one()
    await asyncio.sleep(0.1)
    await producer.aclose()
    with pytest.raises(QueueUnavailable, match="closed"):
        await waiting
    assert not await worker.redis.exists(producer._stream)
    with pytest.raises(QueueUnavailable, match="closed"):
        await handle.result()


async def test_queues_are_apart(redis_url: str, redis: Redis, worker: Any) -> None:
    async with Producer(redis_url, queue="other") as producer:
        await producer.enqueue("x")
    assert await redis.zcard("other") == 1
    assert await redis.llen(keys.doorbell_key("other")) == 1
    assert await worker.run_all() == 0
