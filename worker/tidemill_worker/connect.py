"""The worker's connection to Redis, and what it asks of the server before it takes a job."""

from __future__ import annotations

import asyncio
import logging
import time

from arq.connections import ArqRedis, RedisSettings
from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import RedisError, ResponseError

from tidemill_contracts.connections import backoff, is_passing, open_client, within
from tidemill_contracts.urls import BadRedisUrl, RedisUrl, Tls, mask_url, parse_url
from tidemill_contracts.wire import TidemillError
from tidemill_contracts.wire.arq_format import deserializer, serializer
from tidemill_worker.settings import SettingsError, WorkerConfig

logger = logging.getLogger("tidemill.worker")

START_PATIENCE_S = 5.0
"""How long a worker that starts waits for Redis: longer outages are for whoever starts it."""


class RedisUnreachable(TidemillError):
    """Redis does not answer when the worker starts."""


class RedisUnfit(TidemillError):
    """Redis is set up so that it would lose jobs; the message says what to change."""


async def connect(config: WorkerConfig) -> Redis:
    """A client of a Redis that has answered and keeps what it is given: `ArqRedis`, or redis-py's
    own in a cluster. Raises `RedisUnreachable`, `RedisUnfit`, `SettingsError`."""

    def make(pool: ConnectionPool) -> Redis:
        client = ArqRedis(
            pool,
            job_serializer=serializer,
            job_deserializer=deserializer,
            default_queue_name=config.queue,
        )
        client.auto_close_connection_pool = True
        return client

    try:
        client = open_client(parse_url(config.redis_url), make)
    except BadRedisUrl as error:
        raise SettingsError(f"redis_url: {error}") from error
    try:
        await _wait_for(client, config)
        await _check_eviction(client)
    except BaseException:
        await client.aclose()
        raise
    return client


async def _wait_for(client: Redis, config: WorkerConfig) -> None:
    give_up_at = time.monotonic() + START_PATIENCE_S
    for delay_s in backoff():
        try:
            await within(client.exists(config.queue), START_PATIENCE_S)
            return
        except (RedisError, OSError) as error:
            if not is_passing(error) or time.monotonic() + delay_s > give_up_at:
                what = str(error).rstrip(".") or "it hangs"
                raise RedisUnreachable(
                    f"Redis does not answer at {mask_url(config.redis_url)}: {what}."
                    " Start it, or give its URL with --redis or TIDEMILL_REDIS_URL"
                ) from error
        await asyncio.sleep(delay_s)


async def _check_eviction(client: Redis) -> None:
    """Refuses a server that would make room by deleting queued jobs."""
    try:
        # INFO and not CONFIG: hosted servers forbid the latter. In a cluster one node speaks for
        # all.
        info = await within(client.info("memory"))
        policy = str(info["maxmemory_policy"])
    except (ResponseError, KeyError) as error:
        logger.warning(
            "Redis does not tell its maxmemory-policy (%s): make sure that it is noeviction, or"
            " jobs and results may vanish",
            error,
        )
        return
    if policy.startswith("allkeys"):
        raise RedisUnfit(
            f"Redis has maxmemory-policy {policy}: once its memory is full it would delete queued"
            " jobs. Set maxmemory-policy noeviction"
        )
    if policy != "noeviction":
        logger.warning(
            "Redis has maxmemory-policy %s: once its memory is full it deletes results before"
            " they are read. Set maxmemory-policy noeviction",
            policy,
        )


def stock_arq_settings(config: WorkerConfig) -> RedisSettings:
    """The configured URL for stock arq. Raises `SettingsError` for what arq cannot do."""
    url = parse_url(config.redis_url)
    lacking = _lacking_in_arq(url)
    if lacking:
        raise SettingsError(
            f"redis_url: stock arq has no {lacking}; run `tidemill worker` in its place"
        )
    tls = url.tls or Tls()
    settings = RedisSettings(
        database=url.db,
        username=url.username,
        password=url.password,
        ssl=url.tls is not None,
        ssl_ca_certs=tls.ca_certs,
        ssl_certfile=tls.certfile,
        ssl_keyfile=tls.keyfile,
        ssl_cert_reqs="required" if tls.verify else "none",
        ssl_check_hostname=tls.check_hostname,
    )
    if url.kind == "unix":
        settings.unix_socket_path = url.path
    elif url.kind == "sentinel":
        settings.host, settings.sentinel = list(url.hosts), True
        settings.sentinel_master = url.master
    else:
        settings.host, settings.port = url.hosts[0]
    return settings


def _lacking_in_arq(url: RedisUrl) -> str:
    if url.kind == "cluster":
        return "Redis Cluster"
    if url.sentinel_username or url.sentinel_password:
        return "login at Sentinels"
    if url.kind == "sentinel" and url.tls is not None:
        return "TLS to Sentinels"
    return ""
