"""Servers on loopback ports: alone, in front of a replica and a Sentinel, or as a cluster."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import redis

from tidemill_producer.embedded import find_server
from tidemill_producer.process import dying_with_us

START_TIMEOUT_S = 30.0
MASTER = "queue"
"""The name by which Sentinel knows the master."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_until(condition: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
    """Returns once it is so; an error of Redis counts as not yet."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        assert time.monotonic() < give_up_at, "did not happen in time"
        time.sleep(0.02)


def documented_rules(user: str) -> list[str]:
    """The arguments of ``ACL SETUSER`` in docs/redis.md, with `s3cret` for the password."""
    page = (Path(__file__).parents[1] / "docs" / "redis.md").read_text()
    start = page.index(f"ACL SETUSER {user} ")
    command = page[start : page.index("```", start)].split("\n\n")[0]
    words = command.replace("\\\n", " ").split()[2:]
    return [">s3cret" if word.startswith(">") else word for word in words]


class Server:
    """A server process; the options are those of its command line."""

    def __init__(self, *options: str, port: int | None = None, password: str = "") -> None:
        self.port = port or free_ports(1)[0]
        self.password = password
        self.directory = Path(tempfile.mkdtemp(prefix="tidemill-test-"))
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        login = f":{self.password}@" if self.password else ""
        return f"redis://{login}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, password=self.password or None, socket_timeout=10)

    def start(self) -> Server:
        """Returns once it answers."""
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                dying_with_us(self._command()), stdout=log, stderr=log, cwd=self.directory
            )
        with self.client() as client:
            wait_until(lambda: bool(client.ping()))
        return self

    def _command(self) -> list[str]:
        login = ["--requirepass", self.password, "--masterauth", self.password]
        return [
            *(str(find_server()), "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--dir", str(self.directory), "--save", ""),
            *(login if self.password else ()),
            *self.options,
        ]

    def kill(self) -> None:
        """SIGKILL; `start` starts it again on the same data."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Server:
        try:
            return self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


class SentinelServer(Server):
    """Watches one master; calls it dead after a second."""

    def __init__(self, master: Server, *, password: str, sentinel_password: str) -> None:
        super().__init__(password=sentinel_password)
        self._config = self.directory / "sentinel.conf"
        self._config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.directory}\n"
            f"requirepass {sentinel_password}\n"
            f"sentinel monitor {MASTER} 127.0.0.1 {master.port} 1\n"
            f"sentinel auth-pass {MASTER} {password}\n"
            f"sentinel down-after-milliseconds {MASTER} 1000\n"
            f"sentinel failover-timeout {MASTER} 3000\n"
        )

    def _command(self) -> list[str]:
        return [str(find_server()), str(self._config), "--sentinel"]


class Group:
    """A master, its replica, and a Sentinel that has seen both."""

    def __init__(self, master: Server, replica: Server, sentinel: SentinelServer) -> None:
        self.servers = {master.port: master, replica.port: replica}
        self.sentinel = sentinel

    @property
    def url(self) -> str:
        password = next(iter(self.servers.values())).password
        return (
            f"redis+sentinel://:{password}@127.0.0.1:{self.sentinel.port}/{MASTER}"
            f"?sentinel_password={self.sentinel.password}"
        )

    def master(self) -> Server:
        with self.sentinel.client() as client:
            _, port = client.sentinel_get_master_addr_by_name(MASTER)
            return self.servers[port]

    def wait_for_replica(self) -> None:
        """Until Sentinel could fail over: both are up, in step, and it knows them."""

        def in_step() -> bool:
            with self.master().client() as master, self.sentinel.client() as sentinel:
                states = sentinel.sentinel_slaves(MASTER)
                lag = master.info("replication")
                return (
                    lag["connected_slaves"] == 1
                    and lag["slave0"]["state"] == "online"
                    and len(states) == 1
                    and not states[0]["is_sdown"]
                    and states[0]["master-link-status"] == "ok"
                )

        wait_until(in_step)


@contextlib.contextmanager
def sentinel_group() -> Iterator[Group]:
    with contextlib.ExitStack() as stack:
        # Replicas are sent what is written at once, not after waiting for more of them.
        options = ("--repl-diskless-sync-delay", "0")
        master = stack.enter_context(Server(*options, password="s3cret"))
        replica = stack.enter_context(
            Server(*options, "--replicaof", f"127.0.0.1 {master.port}", password="s3cret")
        )
        sentinel = stack.enter_context(
            SentinelServer(master, password="s3cret", sentinel_password="watch")
        )
        group = Group(master, replica, sentinel)
        group.wait_for_replica()
        yield group


@contextlib.contextmanager
def cluster(nodes: int = 3) -> Iterator[list[Server]]:
    """Masters that share the slots evenly, without replicas."""
    slots = 16384
    with contextlib.ExitStack() as stack:
        servers = []
        # The port of the cluster's bus is 10,000 higher by default: over 65535 for most free ports.
        for port, bus in zip(free_ports(nodes), free_ports(nodes), strict=True):
            options = ("--cluster-enabled", "yes", "--cluster-port", str(bus))
            servers.append(stack.enter_context(Server(*options, port=port)))
        clients = [stack.enter_context(server.client()) for server in servers]
        for n, client in enumerate(clients):
            first, last = slots * n // nodes, slots * (n + 1) // nodes - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            for server in servers:
                bus_port = server.options[-1]
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, bus_port)

        def agreed() -> bool:
            infos = [client.execute_command("CLUSTER", "INFO") for client in clients]
            return all(b"cluster_state:ok" in info for info in infos)

        wait_until(agreed)
        yield servers
