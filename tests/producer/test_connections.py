"""The producer on every kind of Redis that a URL can name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.certificates import Authority
from tests.producer.conftest import WorkerDouble
from tests.proxy import Proxy
from tests.servers import Group, cluster, documented_rules, sentinel_group
from tidemill_contracts import keys
from tidemill_contracts.connections import open_client
from tidemill_contracts.urls import parse_url
from tidemill_contracts.wire import GenerationJob
from tidemill_producer import (
    Admission,
    Cancellation,
    JobState,
    Producer,
    QueueLimits,
    QueueUnavailable,
)
from tidemill_producer.embedded import EmbeddedRedis


async def run_jobs(producer: Producer, redis: Redis, count: int = 20) -> list[str]:
    """Enqueues jobs, runs them by a double and awaits them; returns their ids."""
    jobs = [GenerationJob(id=f"j{n}", prompt=f"p{n}") for n in range(count)]
    handles = [handle async for handle in producer.enqueue_many(jobs)]
    assert [handle.admission for handle in handles] == [Admission.QUEUED] * count
    waiting = asyncio.gather(*(handle.result(timeout=30) for handle in handles))
    assert await WorkerDouble(redis, producer.queue).run_all() == count
    assert [result.text for result in await waiting] == [f"P{n}" for n in range(count)]
    return [handle.id for handle in handles]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def socket_path(redis_server: EmbeddedRedis, redis_url: str) -> str:
    return redis_url.removeprefix("unix://")


async def test_tls_with_a_ca_of_ones_own(
    socket_path: str, authority: Authority, redis: Redis
) -> None:
    with Proxy(socket_path, context=authority.server_context()) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={authority.ca}"
        async with Producer(url) as producer:
            await run_jobs(producer, redis)


async def test_tls_with_a_certificate_of_the_clients(
    socket_path: str, authority: Authority, redis: Redis
) -> None:
    certificate, key = authority.sign("client")
    with Proxy(socket_path, context=authority.server_context(clients_must_sign=True)) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={authority.ca}"
        async with Producer(f"{url}&ssl_certfile={certificate}&ssl_keyfile={key}") as producer:
            await run_jobs(producer, redis)
        async with Producer(url, patience_s=0) as producer:
            with pytest.raises(QueueUnavailable):
                await producer.enqueue("x")


async def test_a_server_that_an_unknown_ca_signed_is_refused(
    socket_path: str, authority: Authority
) -> None:
    with Proxy(socket_path, context=authority.server_context()) as proxy:
        for query in ("", f"?ssl_ca_certs={authority.sign('other')[0]}"):
            url = f"rediss://127.0.0.1:{proxy.port}/0{query}"
            async with Producer(url, patience_s=0) as producer:
                with pytest.raises(QueueUnavailable, match=r"certificate verify failed"):
                    await producer.ping()
        unchecked = f"rediss://127.0.0.1:{proxy.port}/0?ssl_cert_reqs=none"
        async with Producer(unchecked) as producer:
            await producer.ping()


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_ca_file_that_cannot_be_read_is_told_at_once(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(QueueUnavailable, match=rf"no usable certificates in {file}"):
        Producer(f"rediss://h/0?ssl_ca_certs={file}")


async def test_a_user_with_the_documented_commands_and_keys_can_do_everything(
    redis_url: str, redis: Redis
) -> None:
    rules = documented_rules("producer")
    await redis.execute_command("ACL", "SETUSER", *rules)  # type: ignore[no-untyped-call]
    url = redis_url.replace("unix://", "unix://producer:s3cret@")
    try:
        async with Producer(url) as producer:
            await producer.ping()
            (job_id, *_) = await run_jobs(producer, redis)
            assert (await producer.status(job_id)).state is JobState.DONE
            assert await producer.workers() == []
            async with Producer(redis_url) as other:
                theirs = await other.enqueue("theirs")
                waiting = asyncio.create_task(producer.result(theirs.id, timeout=30))
                await asyncio.sleep(0.1)
                await WorkerDouble(redis).run_all()
                assert (await waiting).text == "THEIRS"
            queued = await producer.enqueue("x", tenant="one", priority=-1)
            assert await queued.cancel() is Cancellation.CANCELLED
            await producer.set_limits(QueueLimits(jobs=10))
            assert await producer.limits() == QueueLimits(jobs=10)
            assert await producer.dead.count() == 0
            assert await producer.dead.list() == []
            assert await producer.dead.get(job_id) is None
            assert await producer.dead.requeue([job_id]) == {job_id: False}
            assert await producer.dead.drop([job_id]) == 0
            await producer.forget([job_id])
            assert (await producer.status(job_id)).state is JobState.UNKNOWN
        with pytest.raises(QueueUnavailable, match="refused the login"):
            await Producer(url.replace("s3cret", "wrong")).ping()
    finally:
        await redis.execute_command("ACL", "DELUSER", "producer")  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with sentinel_group() as group:
        yield group


async def test_a_master_that_sentinel_names(group: Group) -> None:
    redis = open_client(parse_url(group.url))
    async with Producer(group.url) as producer:
        await run_jobs(producer, redis)
    await redis.aclose()


async def test_a_sentinel_that_hangs_is_passed_over(group: Group) -> None:
    with Proxy(("127.0.0.1", group.sentinel.port)) as hanging:
        hanging.stall()
        url = group.url.replace("127.0.0.1", f"127.0.0.1:{hanging.port},127.0.0.1", 1)
        async with Producer(url) as producer:
            await producer.ping()


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("/queue", "/other", "No master found for 'other'"),
        ("sentinel_password=watch", "sentinel_password=wrong", "Sentinel that refused the login"),
        (":s3cret@", ":wrong@", "refused the login"),
    ],
)
async def test_what_sentinel_or_its_master_refuse_is_said(
    group: Group, old: str, new: str, why: str
) -> None:
    async with Producer(group.url.replace(old, new), patience_s=0) as producer:
        with pytest.raises(QueueUnavailable, match=why) as caught:
            await producer.ping()
    assert "s3cret" not in str(caught.value)


async def test_a_job_counts_as_enqueued_once_a_replica_has_it(group: Group) -> None:
    url = f"{group.url}&wait_replicas=1"
    (replica,) = [each for each in group.servers.values() if each is not group.master()]
    async with Producer(url, patience_s=30) as producer:
        job = await producer.enqueue(GenerationJob(id="replicated", prompt="x"))
        with replica.client() as client:
            assert client.exists(keys.job_key(job.id))
        replica.pause()
        try:
            waiting = asyncio.create_task(producer.enqueue(GenerationJob(id="late", prompt="x")))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            async with Producer(url, patience_s=0) as impatient:
                with pytest.raises(QueueUnavailable, match="0 of 1 replicas"):
                    await impatient.enqueue("x")
        finally:
            replica.resume()
        assert (await waiting).admission is Admission.QUEUED
    group.wait_for_replica()


async def test_a_cluster_keeps_a_queue_and_its_jobs_on_one_node() -> None:
    with cluster() as servers:
        url = f"redis+cluster://127.0.0.1:{servers[0].port}"
        redis = open_client(parse_url(url))
        for queue in ("first", "second", "third"):
            async with Producer(url, queue) as producer:
                assert producer.queue == f"{{{queue}}}"
                job_ids = await run_jobs(producer, redis)
                assert job_ids[0] == f"{{{queue}}}j0"
                for job_id in ("j0", job_ids[0]):
                    assert (await producer.result(job_id, timeout=5)).text == "P0"
                    assert (await producer.status(job_id)).state is JobState.DONE
                await producer.forget([*job_ids[1:], "j0"])
                assert (await producer.status("j1")).state is JobState.UNKNOWN
                assert await producer.workers() == []
                queued = await producer.enqueue("x", tenant="one")
                assert await queued.cancel() is Cancellation.CANCELLED
                await producer.set_limits(QueueLimits(jobs=10))
                assert await producer.limits() == QueueLimits(jobs=10)
                assert await producer.dead.get("j0") is None
                assert await producer.dead.requeue(["j0"]) == {"j0": False}
                again = await producer.enqueue(GenerationJob(prompt="x"))
                assert again.id.startswith(f"{{{queue}}}")
        used = [server for server in servers if server.client().dbsize()]
        assert len(used) > 1, "the queues of this test are meant to be on several nodes"
        await redis.aclose()
