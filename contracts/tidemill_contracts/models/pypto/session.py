"""A backend that outlives its child: asks, and starts the child anew after it was lost.

The requests that set a model up are remembered and repeated for the next child. What cannot be
repeated is the KV cache: `generation` counts its losses, and `contract` refuses rows whose pages
were written in an earlier one.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from typing import TypeVar

from tidemill_contracts.models.errors import BackendError, CheckpointError, ModelError
from tidemill_contracts.models.pypto.arena import make_arena_file
from tidemill_contracts.models.pypto.messages import Answer, Failed, Hello, Request
from tidemill_contracts.models.pypto.options import PyptoOptions
from tidemill_contracts.models.pypto.process import ChildLost, ChildProcess

logger = logging.getLogger("tidemill.pypto")

MAX_FAILURES_IN_A_ROW = 12
"""Steps that may raise inside a living child before it is taken for broken (an AICore fault leaves
the device context unusable). Above what bisecting a step for one bad row needs: log2(4096)."""

AnswerType = TypeVar("AnswerType", bound=Answer)


class RequestFailed(ModelError):
    """The child answered that a request raised; `failed` has the particulars."""

    def __init__(self, what: str, failed: Failed) -> None:
        super().__init__(f"The PyPTO backend: {what} raised {failed.error}: {failed.message}")
        self.failed = failed


class Session:
    """The conversation with one checkout. Calls are serialised; usable from any thread."""

    def __init__(self, options: PyptoOptions) -> None:
        self.options = options
        self.arena_fd = make_arena_file()
        self.generation = 0
        """Children lost while a model was set up."""
        self._lock = threading.RLock()
        self._child: ChildProcess | None = None
        self._setup: list[tuple[Request, str, Answer]] = []
        self._failures = 0
        self._file_closer = weakref.finalize(self, os.close, self.arena_fd)
        atexit.register(_close, weakref.ref(self))

    @property
    def child_pid(self) -> int | None:
        """Process id of the child that runs, if one does."""
        return None if self._child is None else self._child.pid

    def ask(self, request: Request, answer: type[AnswerType], what: str) -> AnswerType:
        """One question, outside of any model's set-up.

        Raises `BackendError` where the child died or did not answer in ``start_timeout_s``,
        `RequestFailed` and `CheckpointError` where the request raised.
        """
        with self._lock:
            return self._ask(request, answer, what, self.options.start_timeout_s)

    def begin(self, request: Request, answer: type[AnswerType], what: str) -> AnswerType:
        """The first request of a model's set-up; forgets that of the model before."""
        with self._lock:
            self._setup.clear()
            return self.set_up(request, answer, what)

    def set_up(self, request: Request, answer: type[AnswerType], what: str) -> AnswerType:
        """A request that every later child must be asked too, before it runs a step."""
        with self._lock:
            given = self.ask(request, answer, what)
            self._setup.append((request, what, given))
            return given

    def step(self, request: Request, answer: type[AnswerType], what: str) -> AnswerType:
        """A step, within ``step_timeout_s`` once a child is up. Raises as `ask` does."""
        with self._lock:
            self._running()
            try:
                given = self._ask(request, answer, what, self.options.step_timeout_s)
            except RequestFailed:
                self._failures += 1
                if self._failures > MAX_FAILURES_IN_A_ROW:
                    self._forget_child(f"{self._failures} steps in a row raised; it is restarted")
                raise
            self._failures = 0
            return given

    def release(self) -> None:
        """Ends a child in which no model is set up."""
        with self._lock:
            if not self._setup:
                self.close()

    def close(self) -> None:
        """Ends the child; the next question starts another."""
        with self._lock:
            if self._child is not None:
                self._child.close()
                self._child = None
                self._count_loss()

    def _ask(
        self, request: Request, answer: type[AnswerType], what: str, timeout_s: float
    ) -> AnswerType:
        child = self._running()
        try:
            given = child.ask(request, what, timeout_s)
        except ChildLost as error:
            self._forget_child(str(error))
            raise BackendError(
                f"The PyPTO backend {error}. It is restarted for the next step; what rows had in"
                " its KV cache is lost."
            ) from error
        return _expect(given, answer, what)

    def _running(self) -> ChildProcess:
        """The child, started and set up again where there is none."""
        if self._child is not None:
            return self._child
        started = time.monotonic()
        child = ChildProcess(self.options.lib_root, self.arena_fd)
        timeout_s = self.options.start_timeout_s
        try:
            hello = _expect(child.hello(timeout_s), Hello, "start")
            for request, what, before in self._setup:
                given = _expect(child.ask(request, what, timeout_s), type(before), what)
                if given != before:
                    raise ModelError(
                        f"The checkout {self.options.lib_root} has changed since this process"
                        f" started ({what} answers differently). Restart the worker."
                    )
        except ChildLost as error:
            raise BackendError(f"The PyPTO backend cannot be started: it {error}.") from error
        except BaseException:
            child.kill()
            raise
        self._child = child
        self._failures = 0
        logger.info(
            "pypto child %d is up in %.1fs: python %s, torch %s%s",
            child.pid,
            time.monotonic() - started,
            hello.python,
            hello.torch,
            f", cache generation {self.generation}" if self.generation else "",
        )
        return child

    def _forget_child(self, why: str) -> None:
        if self._child is not None:
            logger.error("pypto child %d %s", self._child.pid, why)
            self._child.kill()
            self._child = None
            self._count_loss()

    def _count_loss(self) -> None:
        if self._setup:
            self.generation += 1


def _expect(given: Answer, answer: type[AnswerType], what: str) -> AnswerType:
    if isinstance(given, Failed):
        if given.checkpoint:
            raise CheckpointError(given.message)
        raise RequestFailed(what, given)
    if not isinstance(given, answer):
        raise BackendError(f"The PyPTO backend answered {what} with {type(given).__name__}.")
    return given


def _close(session: weakref.ref[Session]) -> None:
    alive = session()
    if alive is not None:
        alive.close()
