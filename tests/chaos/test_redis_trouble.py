"""Producer and worker through what happens to a Redis: nothing that it acknowledged is lost, and
nothing is answered twice. The worker lives in this process, so its task must never end."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from redis.asyncio import Redis

from tests.proxy import Proxy
from tests.servers import MASTER, Server, sentinel_group, wait_until
from tests.worker.test_worker import Gate, running, until
from tidemill_contracts import keys
from tidemill_contracts.wire import GenerationJob
from tidemill_contracts.wire.arq_format import _result_record_decoder
from tidemill_producer import Admission, JobHandle, Producer, QueueUnavailable
from tidemill_worker.worker import TidemillWorker

PATIENCE_S = 60.0


@pytest.fixture
def gate() -> Gate:
    return Gate()


@asynccontextmanager
async def serving(
    url: str, gate: Gate, patience_s: float = PATIENCE_S
) -> AsyncIterator[tuple[TidemillWorker, Producer]]:
    """A worker and a producer; the worker must be alive at the end."""
    async with (
        running(url, gate, lease_ms=3_000) as worker,
        Producer(url, patience_s=patience_s) as producer,
    ):
        await until(lambda: worker.state == "ready")
        yield worker, producer
        assert worker.main_task is not None
        assert not worker.main_task.done()


class Traffic:
    """Enqueues jobs one by one, without end, and awaits every one that was acknowledged."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._handles: list[JobHandle] = []
        self._task = asyncio.create_task(self._enqueue())

    async def _enqueue(self) -> None:
        while True:
            job = GenerationJob(id=f"job-{len(self._handles)}", prompt="x")
            handle = await self._producer.enqueue(job)
            # One that was tried again may have been run meanwhile.
            assert handle.admission is not Admission.DUPLICATE
            self._handles.append(handle)
            await asyncio.sleep(0.01)

    async def until_more(self, count: int = 10) -> None:
        """Returns once so many more are acknowledged."""
        wanted = len(self._handles) + count
        async with asyncio.timeout(PATIENCE_S):
            while len(self._handles) < wanted:
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.01)

    async def finish(self) -> list[str]:
        """Stops, and returns the ids when all have their results."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        async with asyncio.timeout(PATIENCE_S):
            results = await asyncio.gather(*(handle.result() for handle in self._handles))
        ids = [handle.id for handle in self._handles]
        assert [result.id for result in results] == ids
        return ids


@pytest.fixture
def durable() -> Iterator[Server]:
    """A server that has on disk what it acknowledges."""
    with Server("--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


@pytest.mark.parametrize("outage_s", [0.2, 2.0])
async def test_restarts_lose_and_repeat_nothing(
    durable: Server, gate: Gate, outage_s: float
) -> None:
    async with serving(durable.url, gate) as (_, producer):
        traffic = Traffic(producer)
        await traffic.until_more()
        durable.kill()
        await asyncio.sleep(outage_s)
        durable.start()
        await traffic.until_more()
        ids = await traffic.finish()
    assert set(ids) <= set(gate.started)
    assert len(gate.started) == len(set(gate.started))


async def test_cut_connections_lose_nothing_and_spend_no_try(
    redis_url: str, redis: Redis, gate: Gate
) -> None:
    with Proxy(redis_url.removeprefix("unix://")) as proxy:
        async with serving(f"redis://127.0.0.1:{proxy.port}", gate) as (_, producer):
            traffic = Traffic(producer)
            for _ in range(10):
                await traffic.until_more(3)
                proxy.cut()
            ids = await traffic.finish()
    assert len(gate.started) == len(set(gate.started))
    raws = await redis.mget([keys.result_key(job_id) for job_id in ids])
    assert {_result_record_decoder.decode(raw).job_try for raw in raws} == {1}


async def test_a_claim_whose_answer_is_lost_is_taken_up_again(
    redis_url: str, redis: Redis, gate: Gate
) -> None:
    with Proxy(redis_url.removeprefix("unix://")) as proxy:
        async with serving(f"redis://127.0.0.1:{proxy.port}", gate) as (worker, producer):
            claims: list[object] = []
            lose_answer = worker.queue.link.call

            async def lose_first(name: str, call: object, *rest: float) -> object:
                answer = await lose_answer(name, call, *rest)  # type: ignore[arg-type]
                if name == "claim" and len(answer) > 2 and not claims:  # type: ignore[arg-type]
                    claims.append(answer)
                    raise ConnectionResetError("the answer is lost")
                return answer

            worker.queue.link.call = lose_first  # type: ignore[method-assign,assignment]
            async with Producer(redis_url) as other:
                handle = await other.enqueue("x")
                started = time.monotonic()
                await handle.result(timeout=30)
            assert claims
            assert time.monotonic() - started < 2.5, "before the lease of 3 s ran out"
            raw = await redis.get(keys.result_key(handle.id))
            assert _result_record_decoder.decode(raw).job_try == 1
            assert producer.queue == worker.queue_name


async def test_a_server_that_hangs_is_waited_for(redis_url: str, gate: Gate) -> None:
    with Proxy(redis_url.removeprefix("unix://")) as proxy:
        async with serving(f"redis://127.0.0.1:{proxy.port}", gate) as (worker, producer):
            gate.open.clear()
            handle = await producer.enqueue("x")
            await until(lambda: gate.started == [handle.id])
            proxy.stall()
            gate.open.set()
            await until(lambda: worker.queue.link.trouble is not None)
            assert str(worker.queue.link.trouble).startswith("unreachable since ")
            proxy.flow()
            assert (await handle.result(timeout=30)).id == handle.id
            await until(lambda: worker.queue.link.trouble is None)


async def test_a_slow_server_is_only_slow(redis_url: str, gate: Gate) -> None:
    with Proxy(redis_url.removeprefix("unix://")) as proxy:
        async with serving(f"redis://127.0.0.1:{proxy.port}", gate) as (worker, producer):
            proxy.delay_s = 0.1
            traffic = Traffic(producer)
            await traffic.until_more(5)
            await traffic.finish()
            assert worker.queue.link.trouble is None


@contextmanager
def full_disk(server: Server) -> Iterator[None]:
    """No file of the server grows any further."""
    (log,) = server.directory.glob("appendonlydir/*.incr.aof")
    _, most = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (log.stat().st_size, most))
    with server.client() as client:
        wait_until(lambda: _is_refused(client.set, "x", "y"))
    yield
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (most, most))


def _is_refused(call: Callable[..., object], *args: str) -> bool:
    try:
        call(*args)
    except Exception as error:
        return "MISCONF" in str(error)
    return False


async def test_a_full_memory_takes_results_but_no_jobs(
    redis_url: str, redis: Redis, gate: Gate
) -> None:
    async with serving(redis_url, gate) as (worker, producer):
        gate.open.clear()
        handles = [await producer.enqueue("x") for _ in range(5)]
        await until(lambda: len(gate.started) == 5)
        await redis.config_set("maxmemory", 1)
        try:
            gate.open.set()
            await asyncio.gather(*(handle.result(timeout=60) for handle in handles))
            with pytest.raises(QueueUnavailable, match="is full"):
                await producer.enqueue("y")
        finally:
            await redis.config_set("maxmemory", 0)
        assert await (await producer.enqueue("z")).result(timeout=60)
        await until(lambda: worker.queue.link.trouble is None, timeout=30)


async def test_results_are_kept_while_redis_takes_none(gate: Gate) -> None:
    with Server("--appendonly", "yes", "--appendfsync", "everysec") as server:
        async with serving(server.url, gate) as (worker, producer):
            gate.open.clear()
            handles = [await producer.enqueue("x") for _ in range(5)]
            await until(lambda: len(gate.started) == 5)
            with full_disk(server):
                gate.open.set()
                await until(lambda: worker.results.unwritten == 5)
                await until(lambda: not worker.results.flowing.is_set())
                assert str(worker.queue.link.trouble).startswith("refuses since ")
                with pytest.raises(QueueUnavailable, match="its disk"):
                    await producer.enqueue("y")
            results = await asyncio.gather(*(handle.result(timeout=60) for handle in handles))
            assert len(results) == 5
            await until(lambda: worker.queue.link.trouble is None, timeout=30)
        assert len(gate.started) == 5


async def test_scripts_that_the_server_forgot_are_loaded_again(
    redis_url: str, redis: Redis, gate: Gate
) -> None:
    async with serving(redis_url, gate) as (_, producer):
        for _ in range(5):
            await redis.script_flush()
            assert await (await producer.enqueue("x")).result(timeout=30)


@pytest.mark.parametrize("killed", [True, False])
async def test_a_failover_loses_nothing_that_a_replica_had_confirmed(
    gate: Gate, killed: bool
) -> None:
    with sentinel_group() as group:
        async with serving(f"{group.url}&wait_replicas=1", gate) as (worker, producer):
            traffic = Traffic(producer)
            await traffic.until_more()
            old = group.master()
            if killed:
                old.kill()
            else:
                with group.sentinel.client() as sentinel:
                    sentinel.execute_command("SENTINEL", "FAILOVER", MASTER)
            await asyncio.to_thread(wait_until, lambda: group.master() is not old)
            if killed:
                old.options = ("--replicaof", f"127.0.0.1 {group.master().port}")
                await asyncio.to_thread(old.start)
            else:
                with old.client() as client:  # sooner than Sentinel does it
                    client.slaveof("127.0.0.1", group.master().port)
            await traffic.until_more()
            ids = await traffic.finish()
            await until(lambda: not worker.tasks)
        assert set(ids) <= set(gate.started)


async def test_a_master_that_became_a_replica_is_left_for_where_its_name_leads_now(
    redis_url: str, gate: Gate
) -> None:
    """As where a name in DNS is pointed to the new master, and the old one keeps its clients."""
    with Server() as old, Proxy(("127.0.0.1", old.port)) as proxy, old.client() as client:
        async with serving(f"redis://127.0.0.1:{proxy.port}", gate) as (_, producer):
            await (await producer.enqueue("x")).result(timeout=30)
            proxy.target = redis_url.removeprefix("unix://")
            client.slaveof("127.0.0.1", 1)
            assert await (await producer.enqueue("y")).result(timeout=30)


async def test_an_enqueue_in_an_outage_fails_in_bounded_time(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill_producer.connection.CALL_TIMEOUT_S", 0.5)
    with Proxy(redis_url.removeprefix("unix://")) as proxy:
        proxy.stall()
        async with Producer(f"redis://127.0.0.1:{proxy.port}", patience_s=1) as producer:
            async with asyncio.timeout(10):
                with pytest.raises(QueueUnavailable, match="cannot be reached"):
                    await producer.enqueue("x")


async def test_an_enqueue_whose_answer_got_lost_is_queued_once(
    redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill_producer.connection.CALL_TIMEOUT_S", 0.5)
    with Proxy(redis_url.removeprefix("unix://")) as proxy:
        async with Producer(f"redis://127.0.0.1:{proxy.port}", patience_s=30) as producer:
            await producer.ping()
            proxy.stall()
            waiting = asyncio.create_task(producer.enqueue(GenerationJob(id="a", prompt="x")))
            await asyncio.sleep(1)
            proxy.flow()  # what was sent before the caller gave up arrives as well
            assert (await waiting).admission is Admission.QUEUED
    assert await redis.zrange(keys.DEFAULT_QUEUE, 0, -1) == [b"a"]


async def test_a_call_that_is_cancelled_at_any_moment_ends_then(redis_url: str) -> None:
    with Proxy(redis_url.removeprefix("unix://")) as proxy:
        async with Producer(f"redis://127.0.0.1:{proxy.port}") as producer:
            cancelled = 0
            for n in range(200):
                call = asyncio.create_task(producer.enqueue(GenerationJob(id=f"j{n}", prompt="x")))
                await asyncio.sleep(0.00002 * n)
                call.cancel()
                done, _ = await asyncio.wait({call}, timeout=10)
                assert done
                cancelled += call.cancelled()
            assert cancelled > 10
            await producer.ping()
