"""One child process: started, asked, killed with everything that it forked.

The child leads a process group of its own, so that its device workers die with it; it holds the
read end of a pipe whose closing tells it that its parent is gone, however the parent died.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress

import msgspec

from tidemill_contracts.models.pypto.channel import Channel, ChannelClosed, ChannelTimeout
from tidemill_contracts.models.pypto.messages import Answer, Close, Request

logger = logging.getLogger("tidemill.pypto")

CHILD_MODULE = "tidemill_contracts.models.pypto.child"
CLOSE_TIMEOUT_S = 5.0
"""For a child to close its device; a hanging close is upstream's (hw-native-sys/simpler#980)."""
KEPT_LINES = 50


class ChildLost(Exception):
    """The child died or did not answer; it has been killed. The message says what happened."""


class ChildProcess:
    """Owns the process, the channel to it, and the thread that reads what it prints."""

    def __init__(self, root: str, arena_fd: int) -> None:
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        inherited = (theirs.fileno(), lifeline, arena_fd)
        # -P: no current directory on sys.path. -B: no bytecode written into the checkout.
        command = [sys.executable, "-P", "-B", "-m", CHILD_MODULE, *map(str, inherited), root]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=inherited,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self._channel: Channel[Request, Answer] = Channel(ours, Answer)
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._reader = threading.Thread(target=self._read_output, name="pypto-output", daemon=True)
        self._reader.start()
        self._closed = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Request, what: str, timeout_s: float) -> Answer:
        """Sends `request` and waits for its answer. Raises `ChildLost`, after killing the child."""
        started = time.monotonic()
        try:
            self._channel.send(request)
            return self._channel.receive(timeout_s, self._alive)
        except ChannelTimeout:
            raise self._lost(f"did not answer {what} within {timeout_s:g} s") from None
        except ChannelClosed:
            took = time.monotonic() - started
            raise self._lost(f"died during {what}, after {took:.2f} s", died=True) from None
        except msgspec.DecodeError as error:
            raise self._lost(f"answered {what} with nonsense ({error})") from error

    def hello(self, timeout_s: float) -> Answer:
        """The child's first message. Raises `ChildLost`."""
        try:
            return self._channel.receive(timeout_s, self._alive)
        except ChannelTimeout:
            raise self._lost(f"did not start within {timeout_s:g} s") from None
        except ChannelClosed:
            raise self._lost("died at once", died=True) from None
        except msgspec.DecodeError as error:
            raise self._lost(f"started with nonsense ({error})") from error

    def close(self) -> None:
        """Asks the child to release its device, then ends it, whatever it does."""
        if not self._closed:
            with suppress(ChildLost):
                self.ask(Close(), "close", CLOSE_TIMEOUT_S)
            self.kill()

    def kill(self) -> None:
        """Ends the child and all that it forked, and reaps it."""
        if self._closed:
            return
        self._closed = True
        # Before it is reaped: until then no other process group can have its number.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()
        os.close(self._lifeline)
        self._reader.join(timeout=1.0)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()

    def _alive(self) -> bool:
        """Whether the process runs; does not reap it."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def _lost(self, what: str, died: bool = False) -> ChildLost:
        if died:
            # Its end of the socket closes a moment before it can be waited for.
            deadline = time.monotonic() + 1.0
            while self._alive() and time.monotonic() < deadline:
                time.sleep(0.001)
        killed = self._alive()
        self.kill()
        how = "" if killed else f": {_exit_words(self._process.returncode)}"
        last = self._lines[-1] if self._lines else None
        said = f'; its last line was "{last}"' if last else ""
        return ChildLost(f"{what}{how}{said}")

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if line:
                self._lines.append(line)
                logger.info("pypto child %d: %s", self.pid, line)


def _exit_words(code: int) -> str:
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit status {code}"
