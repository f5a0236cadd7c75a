"""The worker on every kind of Redis that a URL can name, and what it refuses to start on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from arq.connections import create_pool
from redis.asyncio import Redis

from tests.certificates import Authority
from tests.proxy import Proxy
from tests.servers import cluster, documented_rules, sentinel_group
from tests.worker.test_worker import Gate, running
from tidemill_contracts.wire import GenerationJob
from tidemill_producer import Producer
from tidemill_worker.connect import RedisUnfit, RedisUnreachable, connect, stock_arq_settings
from tidemill_worker.settings import SettingsError, make_config


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


async def run_jobs(url: str, gate: Gate, count: int = 20, producers_url: str = "") -> None:
    """Jobs from a producer, through a worker, and back; each runs once."""
    async with running(url, gate), Producer(producers_url or url) as producer:
        jobs = [GenerationJob(prompt=f"p{n}") for n in range(count)]
        handles = [handle async for handle in producer.enqueue_many(jobs)]
        results = await asyncio.gather(*(handle.result(timeout=60) for handle in handles))
    assert [result.id for result in results] == [handle.id for handle in handles]
    assert sorted(gate.started) == sorted(handle.id for handle in handles)


async def test_tls_with_a_ca_of_ones_own(redis_url: str, authority: Authority, gate: Gate) -> None:
    path = redis_url.removeprefix("unix://")
    with Proxy(path, context=authority.server_context()) as proxy:
        await run_jobs(f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={authority.ca}", gate)


async def test_a_master_that_sentinel_names(gate: Gate) -> None:
    with sentinel_group() as group:
        await run_jobs(group.url, gate)


async def test_200_jobs_in_a_cluster(gate: Gate) -> None:
    with cluster() as servers:
        await run_jobs(f"redis+cluster://127.0.0.1:{servers[0].port}", gate, count=200)
        assert sum(server.client().dbsize() > 0 for server in servers) == 1


@asynccontextmanager
async def acl_user(redis: Redis, rules: list[str]) -> AsyncIterator[None]:
    await redis.execute_command("ACL", "SETUSER", *rules)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        await redis.execute_command("ACL", "DELUSER", rules[0])  # type: ignore[no-untyped-call]


async def test_a_user_with_the_documented_commands_and_keys_can_do_everything(
    redis_url: str, redis: Redis, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    async with acl_user(redis, documented_rules("worker")):
        url = redis_url.replace("unix://", "unix://worker:s3cret@")
        await run_jobs(url, gate, producers_url=redis_url)
    assert "Redis refuses" not in caplog.text


async def test_a_policy_that_cannot_be_read_is_a_warning(
    redis_url: str, redis: Redis, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    rules = [rule for rule in documented_rules("worker") if rule != "+info"]
    async with acl_user(redis, rules):
        url = redis_url.replace("unix://", "unix://worker:s3cret@")
        await run_jobs(url, gate, producers_url=redis_url)
    assert "does not tell its maxmemory-policy" in caplog.text


@pytest.fixture
async def policy(redis: Redis) -> AsyncIterator[Redis]:
    yield redis
    await redis.config_set("maxmemory-policy", "noeviction")


async def test_a_server_that_deletes_queued_jobs_is_refused(redis_url: str, policy: Redis) -> None:
    await policy.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(RedisUnfit, match=r"allkeys-lru.*Set maxmemory-policy noeviction"):
        await connect(make_config({"redis_url": redis_url}))


async def test_a_server_that_deletes_results_is_warned_of(
    redis_url: str, policy: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await policy.config_set("maxmemory-policy", "volatile-ttl")
    await (await connect(make_config({"redis_url": redis_url}))).aclose()
    assert "volatile-ttl" in caplog.text


async def test_a_server_that_hangs_at_start_is_told_in_time(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill_worker.connect.START_PATIENCE_S", 0.3)
    with Proxy(redis_url.removeprefix("unix://")) as proxy:
        proxy.stall()
        with pytest.raises(RedisUnreachable, match="it hangs"):
            await connect(make_config({"redis_url": f"redis://127.0.0.1:{proxy.port}"}))


async def test_stock_arq_gets_every_part_of_the_url(redis_url: str, authority: Authority) -> None:
    path = redis_url.removeprefix("unix://")
    with Proxy(path, context=authority.server_context()) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={authority.ca}"
        pool = await create_pool(stock_arq_settings(make_config({"redis_url": url})))
        await pool.aclose()


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("redis+cluster://h", "no Redis Cluster"),
        ("redis+sentinel://h/q?sentinel_password=s3cret", "no login at Sentinels"),
        ("rediss+sentinel://h/q", "no TLS to Sentinels"),
    ],
)
def test_what_stock_arq_cannot_do_is_said(url: str, what: str) -> None:
    with pytest.raises(SettingsError, match=what):
        stock_arq_settings(make_config({"redis_url": url}))


def test_stock_arq_gets_sentinels() -> None:
    settings = stock_arq_settings(make_config({"redis_url": "redis+sentinel://:p@a,b:2/q/3"}))
    assert settings.host == [("a", 26379), ("b", 2)]
    assert (settings.sentinel, settings.sentinel_master) == (True, "q")
    assert (settings.password, settings.database) == ("p", 3)
