"""`tidemill worker` processes that may be killed, paused or told to stop, and are started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.e2e.conftest import TIDEMILL
from tidemill_producer.process import dying_with_us

START_TIMEOUT_S = 90.0

_SKEWED = """
import sys, time
ahead_s = int(sys.argv.pop(1))
now, now_ns = time.time, time.time_ns
time.time = lambda: now() + ahead_s
time.time_ns = lambda: now_ns() + ahead_s * 10**9
from tidemill_producer.cli import main
main()
"""


class WorkerProcess:
    """One run of a worker, with a log of its own."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, log: Path) -> None:
        self.process = process
        self.name = name
        self.log = log
        self.paused = False
        self.signalled = False
        """Whether we have ended it, or told it to end."""

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def is_ready(self) -> bool:
        return self.process.returncode is None and "ready, at most" in self.said

    def kill(self) -> None:
        self.signalled = True
        self._send(signal.SIGKILL)

    def drain(self) -> None:
        self.signalled = True
        self._send(signal.SIGTERM)

    def pause(self) -> None:
        self.paused = True
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self.paused = False
        self._send(signal.SIGCONT)

    def _send(self, signum: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signum)

    async def until_ready(self) -> None:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self.is_ready:
                assert self.process.returncode is None, self.said
                await asyncio.sleep(0.05)


@asynccontextmanager
async def working(
    redis_url: str, name: str, logs: Path, *options: str, ahead_s: int = 0
) -> AsyncIterator[WorkerProcess]:
    """A worker with the demo model whose clock goes ahead by so much; killed at the end."""
    start = (sys.executable, "-c", _SKEWED, str(ahead_s)) if ahead_s else TIDEMILL
    command = [
        *start, "worker", "--model", "demo", "--redis", redis_url, "--worker-id", name,
        "--threads", "1", "--max-rows", "8", "--kv-pages", "256", *options,
    ]  # fmt: skip
    log = logs / f"worker-{name}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *dying_with_us(command), stdout=output, stderr=output, env=os.environ
        )
    worker = WorkerProcess(process, name, log)
    try:
        yield worker
    finally:
        worker.kill()
        await process.wait()
