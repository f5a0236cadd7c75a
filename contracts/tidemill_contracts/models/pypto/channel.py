"""A narrow typed channel over a socket: four bytes of length, then one msgpack message.

Never pickle. Knows no processes; `process` says what a closed or silent channel means.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 16 << 20
POLL_S = 0.05
"""How often a waiting side looks whether the other one still lives."""

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class ChannelClosed(Exception):
    """The other side is gone."""


class ChannelTimeout(Exception):
    """The other side did not answer in time."""


class Channel(Generic[Sent, Received]):
    """One end, which sends `Sent` and receives messages of the union `received`."""

    def __init__(self, sock: socket.socket, received: object) -> None:
        self._socket = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)

    def send(self, message: Sent) -> None:
        """Raises `ChannelClosed`."""
        data = self._encoder.encode(message)
        try:
            self._socket.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(
        self, timeout_s: float | None = None, alive: Callable[[], bool] = lambda: True
    ) -> Received:
        """The next message; waits for ever where no time is given.

        Raises `ChannelTimeout` after `timeout_s` seconds, `ChannelClosed` where the other side has
        closed its end or `alive` says no (a grandchild may hold the end of a dead child open), and
        `msgspec.DecodeError` for what is no message.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        length = int.from_bytes(self._read(LENGTH_BYTES, deadline, alive), "little")
        if length > MAX_MESSAGE_BYTES:
            raise msgspec.DecodeError(f"a message of {length:,} bytes")
        return self._decoder.decode(self._read(length, deadline, alive))

    def close(self) -> None:
        self._socket.close()

    def _read(self, count: int, deadline: float | None, alive: Callable[[], bool]) -> bytearray:
        data = bytearray()
        while len(data) < count:
            wait = None
            if deadline is not None:
                wait = min(POLL_S, deadline - time.monotonic())
                if wait <= 0:
                    raise ChannelTimeout
            self._socket.settimeout(wait)
            try:
                part = self._socket.recv(count - len(data))
            except TimeoutError:
                # Whatever it said before it died is still read first.
                if not alive():
                    raise ChannelClosed("the process is gone") from None
                continue
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not part:
                raise ChannelClosed("end of file")
            data += part
        return data
