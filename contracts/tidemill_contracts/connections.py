"""Clients for whatever a `RedisUrl` names, and what producer and worker agree on about trouble.

redis-py's retries are off, because ours must know whether an earlier attempt may have got
through, and so are its socket timeouts: it keeps them by `asyncio.wait_for`, which in Python 3.11
may swallow the cancellation of whoever calls. `within` bounds a call instead.
"""

from __future__ import annotations

import asyncio
import random
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar, cast

import redis as redis_py
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tidemill_contracts.urls import BadRedisUrl, RedisUrl, Tls

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
SENTINEL_TIMEOUT_S = 2.0
"""A Sentinel that does not answer within this is passed over for the next."""
CALL_TIMEOUT_S = 15.0
"""Longer than any of our calls takes, those that block included."""
FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 2.0

_LOGIN_REFUSED = (AuthenticationError, AuthorizationError)
DISCONNECTED = (RedisConnectionError, RedisTimeoutError, OSError)
"""No answer. The call may have got through all the same."""
_PASSING = "LOADING|READONLY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS|BUSY|UNBLOCKED"
_passing = re.compile(rf"(?:^|[ -])(?:{_PASSING})\b|read only replica|NOREPLICAS")


def open_client(url: RedisUrl, make: Callable[[ConnectionPool], Redis] = Redis.from_pool) -> Redis:
    """A client that connects with its first command and answers in bytes.

    `make` turns a pool into a client. A cluster has none: its client has the same commands, all
    that we use, under another class. Raises `BadRedisUrl` where a file of TLS cannot be read.
    """
    options: dict[str, Any] = {
        "username": url.username,
        "password": url.password,
        "client_name": url.client_name,
        **_habits(),
    }
    if url.tls is not None:
        options |= _tls_options(url.tls)
    if url.kind == "cluster":
        return _open_cluster(url, options)
    options["db"] = url.db
    if url.kind == "sentinel":
        return make(_open_sentinel_pool(url, options))
    kind: type[AbstractConnection]
    if url.kind == "unix":
        kind = UnixDomainSocketConnection
        options["path"] = url.path
    else:
        kind = Connection if url.tls is None else SSLConnection
        options["host"], options["port"] = url.hosts[0]
        options["socket_keepalive"] = True
    return make(ConnectionPool(connection_class=kind, **options))


async def within(call: Awaitable[T], seconds: float = CALL_TIMEOUT_S) -> T:
    """The answer of one call. Raises `TimeoutError` where a server hangs."""
    async with asyncio.timeout(seconds):
        return await call


def backoff() -> Iterator[float]:
    """Seconds to wait before each next attempt, without end; jittered, so that a thousand
    clients do not come back in the same instant."""
    delay_s = FIRST_DELAY_S
    while True:
        yield delay_s * random.uniform(0.5, 1.0)
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)


def is_login_refused(error: BaseException) -> bool:
    """Whether user or password are wrong. A connection error to redis-py, which may wrap it in
    another one; trying again changes nothing."""
    return isinstance(error, _LOGIN_REFUSED) or isinstance(error.__cause__, _LOGIN_REFUSED)


def is_passing(error: Exception) -> bool:
    """Whether a restart, a failover or a cut connection looks like this: try again."""
    if is_login_refused(error):
        return False
    return isinstance(error, DISCONNECTED) or _passing.search(str(error)) is not None


async def leave_replica(client: Redis, error: Exception) -> None:
    """Where a server turned out to be a read-only replica, drop the connections to it, so that
    the next call asks Sentinel or DNS again where the master is."""
    pool = getattr(client, "connection_pool", None)
    if pool is not None and (isinstance(error, ReadOnlyError) or "READONLY" in str(error)):
        await pool.disconnect(inuse_connections=False)


def _habits() -> dict[str, Any]:
    return {
        "protocol": 2,
        "decode_responses": False,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": None,
    }


def _tls_options(tls: Tls) -> dict[str, Any]:
    try:
        context = ssl.create_default_context(cafile=tls.ca_certs)
        if tls.certfile is not None:
            context.load_cert_chain(tls.certfile, tls.keyfile)
    except OSError as error:
        names = (tls.ca_certs, tls.certfile, tls.keyfile)
        files = ", ".join(name for name in names if name)
        raise BadRedisUrl(f"no usable certificates in {files}: {error}") from error
    return {
        "ssl_ca_certs": tls.ca_certs,
        "ssl_certfile": tls.certfile,
        "ssl_keyfile": tls.keyfile,
        "ssl_cert_reqs": "required" if tls.verify else "none",
        "ssl_check_hostname": tls.check_hostname,
    }


def _open_cluster(url: RedisUrl, options: dict[str, Any]) -> Redis:
    if int(redis_py.__version__.split(".")[0]) < 6:
        options["cluster_error_retry_attempts"] = 0  # from 6 on `retry` rules this too
    client: Any = _SingleSlotCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in url.hosts],
        ssl=url.tls is not None,
        socket_keepalive=True,
        **options,
    )
    return cast("Redis", client)


def _open_sentinel_pool(url: RedisUrl, options: dict[str, Any]) -> ConnectionPool:
    tls = {"ssl": True, **_tls_options(url.tls)} if url.tls is not None else {}
    manager = Sentinel([])  # type: ignore[no-untyped-call]
    manager.sentinels = [
        _SentinelClient(
            host=host,
            port=port,
            username=url.sentinel_username,
            password=url.sentinel_password,
            **_habits(),
            **tls,
        )
        for host, port in url.hosts
    ]
    options |= {"ssl": url.tls is not None, "socket_keepalive": True}
    return SentinelConnectionPool(url.master, manager, **options)  # type: ignore[no-untyped-call]


class _SingleSlotCluster(RedisCluster):
    """Sends a command for several keys as one: those of a call of ours always share a slot.
    redis-py would make it a pipeline, and redis-py 5 has none without retries."""

    def _split_command_across_slots(self, command: str, *keys: Any) -> Any:
        return self.execute_command(command, *keys)


class SentinelRefused(ResponseError):
    """A Sentinel refuses the login: not one to be passed over, as redis-py does."""


class _SentinelClient(Redis):
    """Asks one Sentinel, for a bounded time and without staying connected: it is asked once in
    many days, and then the connection must not be one that a firewall has forgotten."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            answer = super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
            return await within(answer, SENTINEL_TIMEOUT_S)
        except TimeoutError as error:
            raise RedisTimeoutError("no answer from this Sentinel") from error
        except RedisConnectionError as error:
            if is_login_refused(error):
                raise SentinelRefused(str(error)) from error
            raise
        finally:
            await self.connection_pool.disconnect(inuse_connections=False)
