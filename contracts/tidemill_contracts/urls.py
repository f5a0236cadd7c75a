"""Redis URLs: where a queue may live, read strictly and shown without secrets.

| form | where |
| --- | --- |
| ``redis://[user:password@]host[:6379][/db]`` | one server; ``rediss://`` with TLS |
| ``unix://[user:password@]/path[?db=0]`` | one server on this machine |
| ``redis+sentinel://[user:password@]host[:26379][,host…]/master[/db]`` | the master that these \
Sentinels name; ``rediss+sentinel://`` with TLS |
| ``redis+cluster://[user:password@]host[:6379][,host…]`` | a Redis Cluster; \
``rediss+cluster://`` with TLS |

Everything else is an option of the query. One that is not known is refused: a misspelt
``ssl_ca_certs`` must not connect without a CA. `docs/redis.md` lists them for users.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from tidemill_contracts.wire.errors import TidemillError

Kind = Literal["server", "unix", "sentinel", "cluster"]

REDIS_PORT = 6379
SENTINEL_PORT = 26379
MAX_WAIT_REPLICAS = 100

_SCHEMES: dict[str, tuple[Kind, bool]] = {
    "redis": ("server", False),
    "rediss": ("server", True),
    "unix": ("unix", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
"""What each scheme means: the kind, and whether with TLS."""
_TLS_OPTIONS = (
    "ssl_ca_certs",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_cert_reqs",
    "ssl_check_hostname",
)
_OPTIONS: dict[Kind, tuple[str, ...]] = {
    "server": ("username", "password", "client_name", "db", "wait_replicas"),
    "unix": ("username", "password", "client_name", "db", "wait_replicas"),
    "sentinel": (
        *("username", "password", "client_name", "db", "wait_replicas"),
        *("sentinel_username", "sentinel_password"),
    ),
    "cluster": ("username", "password", "client_name"),
}


class BadRedisUrl(TidemillError, ValueError):
    """A URL that names no Redis; the message says what is wrong, without secrets."""


@dataclass(frozen=True, slots=True)
class Tls:
    """How a server's certificate is checked, and which one is shown to it."""

    ca_certs: str | None = None
    """A file of certificates to trust; those of the system where absent."""
    certfile: str | None = None
    keyfile: str | None = None
    verify: bool = True
    check_hostname: bool = True


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A URL in its parts."""

    kind: Kind
    hosts: tuple[tuple[str, int], ...] = ()
    """Of the server, the Sentinels, or some nodes of the cluster."""
    path: str = ""
    """Of the unix socket."""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    client_name: str | None = None
    tls: Tls | None = None
    master: str = ""
    """The name by which the Sentinels know it."""
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    wait_replicas: int = 0
    """How many replicas must have a job before it counts as enqueued."""


def mask_url(url: str) -> str:
    """The URL without its secrets."""
    login_masked = re.sub(r"^((?:[\w+-]+://)?[^:@/]*):(?!//).*@", r"\1:***@", url)
    return re.sub(r"([?&](?:sentinel_)?password=)[^&]*", r"\1***", login_masked)


def parse_url(url: str) -> RedisUrl:
    """The URL's parts. Raises `BadRedisUrl`."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise BadRedisUrl("its host is malformed") from None
    if parts.scheme not in _SCHEMES:
        raise BadRedisUrl(
            f"it must begin with one of {', '.join(scheme + '://' for scheme in _SCHEMES)}"
        )
    kind, with_tls = _SCHEMES[parts.scheme]
    if parts.fragment:
        raise BadRedisUrl("it has a `#`: write it as %23")
    options = _read_options(parts.query, kind, with_tls)
    login, _, where = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    path = [unquote(part) for part in parts.path.split("/") if part]
    master = ""
    if kind == "unix":
        if where or not path:
            raise BadRedisUrl("a unix:// URL is unix:///path/to/socket")
        path = []
    elif kind == "sentinel":
        if not path:
            raise BadRedisUrl("it lacks the master's name: redis+sentinel://host:26379/name")
        master = path.pop(0)
    elif kind == "cluster" and path:
        raise BadRedisUrl("a cluster has no databases: leave out what follows the hosts")
    if len(path) > 1:
        raise BadRedisUrl("too much follows the host")
    if path:
        options.setdefault("db", path[0])
    return RedisUrl(
        kind=kind,
        hosts=() if kind == "unix" else _read_hosts(where, kind),
        path=unquote(parts.path) if kind == "unix" else "",
        db=_read_number(options, "db", 2**31),
        username=unquote(username) or options.get("username"),
        password=unquote(password) or options.get("password"),
        client_name=options.get("client_name"),
        tls=_read_tls(options) if with_tls else None,
        master=master,
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=options.get("sentinel_password"),
        wait_replicas=_read_number(options, "wait_replicas", MAX_WAIT_REPLICAS),
    )


def _read_options(query: str, kind: Kind, with_tls: bool) -> dict[str, str]:
    known = _OPTIONS[kind] + (_TLS_OPTIONS if with_tls else ())
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in _TLS_OPTIONS and not with_tls:
            raise BadRedisUrl(f"`{name}` needs TLS: rediss:// in place of redis://")
        if name not in known:
            raise BadRedisUrl(f"unknown option `{name}`; there are {', '.join(known)}")
        if name in options:
            raise BadRedisUrl(f"`{name}` is given twice")
        options[name] = value
    return options


def _read_hosts(netloc: str, kind: Kind) -> tuple[tuple[str, int], ...]:
    default_port = SENTINEL_PORT if kind == "sentinel" else REDIS_PORT
    hosts = []
    for where in netloc.split(","):
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::(\d{1,5}))?", where)
        if match is None or not 0 < int(match[2] or default_port) < 65536:
            # Not shown: it may be the tail of a password.
            raise BadRedisUrl(
                "a host or port is malformed; in a password write `/`, `@`, `#`, `?` and `%` as"
                " %2F, %40, %23, %3F and %25"
            )
        if not match[1] and kind != "server":
            raise BadRedisUrl("a host is missing")
        hosts.append((match[1].strip("[]") or "localhost", int(match[2] or default_port)))
    if kind == "server" and len(hosts) > 1:
        raise BadRedisUrl("several hosts need redis+sentinel:// or redis+cluster://")
    return tuple(hosts)


def _read_number(options: dict[str, str], name: str, most: int) -> int:
    value = options.get(name, "0")
    if not re.fullmatch(r"\d{1,10}", value) or int(value) > most:
        raise BadRedisUrl(f"`{name}` is a number from 0 to {most}, not {value!r}")
    return int(value)


def _read_tls(options: dict[str, str]) -> Tls:
    requirement = options.get("ssl_cert_reqs", "required")
    if requirement not in ("required", "none"):
        raise BadRedisUrl(f"`ssl_cert_reqs` is required or none, not {requirement!r}")
    checked = options.get("ssl_check_hostname", "true").lower()
    if checked not in ("true", "false"):
        raise BadRedisUrl(f"`ssl_check_hostname` is true or false, not {checked!r}")
    if "ssl_keyfile" in options and "ssl_certfile" not in options:
        raise BadRedisUrl("`ssl_keyfile` needs `ssl_certfile`")
    verify = requirement == "required"
    return Tls(
        ca_certs=options.get("ssl_ca_certs"),
        certfile=options.get("ssl_certfile"),
        keyfile=options.get("ssl_keyfile"),
        verify=verify,
        check_hostname=verify and checked == "true",
    )
