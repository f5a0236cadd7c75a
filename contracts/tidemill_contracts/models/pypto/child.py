"""The child process: answers one request after the other until it is told to close.

    python -m tidemill_contracts.models.pypto.child SOCKET LIFELINE ARENA ROOT

The first three are inherited file descriptors. Whatever the checkout and PyPTO print goes to the
parent's log.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import sys
import threading
import traceback

import torch

from tidemill_contracts.models.errors import CheckpointError, ContractMismatch, ModelError
from tidemill_contracts.models.pypto.channel import Channel, ChannelClosed
from tidemill_contracts.models.pypto.checkout import Checkout
from tidemill_contracts.models.pypto.messages import (
    AllocateCache,
    Answer,
    Close,
    Compile,
    Describe,
    Done,
    Failed,
    Hello,
    Match,
    Prepared,
    PrepareWeights,
    Request,
    Run,
    Validate,
)
from tidemill_contracts.models.pypto.served import ServedModel


class Child:
    """The state between requests: the checkout, and the model once `Validate` has begun one."""

    def __init__(self, root: str, arena_fd: int) -> None:
        self._root = root
        self._arena_fd = arena_fd
        self._checkout: Checkout | None = None
        self._served: ServedModel | None = None

    def answer(self, request: Request) -> Answer:
        """Never raises: what a request raises is its answer."""
        try:
            return self._answer(request)
        except Exception as error:
            if not isinstance(error, ModelError):
                traceback.print_exc()
            return _failed(error)

    def _answer(self, request: Request) -> Answer:
        match request:
            case Run():
                self._model.run(request)
            case Describe():
                return self._imported.describe(request.family, request.variant)
            case Match():
                return self._imported.match(request.model)
            case Validate():
                self._close()
                self._served = ServedModel(self._imported, request, self._arena_fd)
            case Compile():
                self._model.compile(request)
            case PrepareWeights():
                return Prepared(self._model.prepare_weights(request.model_dir))
            case AllocateCache():
                self._model.allocate_cache(request.pages)
            case Close():
                self._close()
        return Done()

    @property
    def _imported(self) -> Checkout:
        if self._checkout is None:
            self._checkout = Checkout(self._root)
        return self._checkout

    @property
    def _model(self) -> ServedModel:
        if self._served is None:
            raise ModelError("no model has been begun: validate comes first")
        return self._served

    def _close(self) -> None:
        if self._served is not None:
            self._served.close()
            self._served = None


def _failed(error: Exception) -> Failed:
    if isinstance(error, ContractMismatch):
        return Failed(
            error=type(error).__name__,
            message=str(error),
            field=error.field,
            found=str(error.found),
            expected=str(error.expected),
            hint=error.hint,
        )
    return Failed(
        error=type(error).__name__,
        message=str(error),
        checkpoint=isinstance(error, CheckpointError),
    )


def _die_with_parent(lifeline: int) -> None:
    """Waits, in a thread of its own, for the parent's end of the pipe to close."""
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    socket_fd, lifeline, arena_fd = map(int, arguments[:3])
    root = arguments[3]
    for fd in (socket_fd, lifeline, arena_fd):
        os.set_inheritable(fd, False)
    threading.Thread(target=_die_with_parent, args=(lifeline,), daemon=True).start()
    channel: Channel[Answer, Request] = Channel(socket.socket(fileno=socket_fd), Request)
    child = Child(root, arena_fd)
    channel.send(Hello(platform.python_version(), str(torch.__version__)))
    while True:
        try:
            request = channel.receive()
        except ChannelClosed:
            return
        channel.send(child.answer(request))
        if isinstance(request, Close):
            return


if __name__ == "__main__":
    main(sys.argv[1:])
