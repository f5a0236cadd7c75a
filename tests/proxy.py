"""A proxy in front of a server, for what a network does: it delays, stalls, cuts, speaks TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from types import TracebackType


class Proxy:
    """Forwards each connection to a server; one that speaks TLS is decrypted, any other is not."""

    def __init__(
        self, target: tuple[str, int] | str, *, context: ssl.SSLContext | None = None
    ) -> None:
        """`target`: a host and port, or the path of a unix socket; for connections to come it may
        be changed."""
        self.delay_s = 0.0
        """Each way, for every piece."""
        self.target = target
        self._context = context
        self._flowing = threading.Event()
        self._flowing.set()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        """Keep connections open and accept new ones, but forward nothing."""
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def cut(self) -> int:
        """Close every connection; returns how many there were."""
        with self._lock:
            cut, self._open = self._open, set()
        for each in cut:
            _close(each)
        return len(cut) // 2

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _close(self._listener)
        self.cut()
        self.flow()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            if self._context is not None and client.recv(1, socket.MSG_PEEK) == b"\x16":
                client = self._context.wrap_socket(client, server_side=True)
            family = socket.AF_UNIX if isinstance(self.target, str) else socket.AF_INET
            server = socket.socket(family)
            server.connect(self.target)
        except OSError:  # a refused handshake among them
            _close(client)
            return
        with self._lock:
            self._open |= {client, server}
        threading.Thread(target=self._pump, args=(client, server), daemon=True).start()
        self._pump(server, client)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while piece := source.recv(65536):
                time.sleep(self.delay_s)
                self._flowing.wait()
                sink.sendall(piece)
        with self._lock:
            self._open -= {source, sink}
        _close(source)
        _close(sink)


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
