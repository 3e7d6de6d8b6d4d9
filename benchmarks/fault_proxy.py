"""A wire that can be cut: carries a node's connections to its link, and harms them when it is told to."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress


class Proxy:
    """Listens on a port of loopback and passes on to another.

    Attributes:
        port: where it listens.
        delay: seconds that every piece of data is held back.
        corrupt: how many of the next pieces get a byte changed.
    """

    def __init__(self, target: int) -> None:
        self.target, self.delay, self.corrupt, self._cut = target, 0.0, 0, False
        self._open: set[socket.socket] = set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> None:
        """End all connections, and take no other for so long."""
        self._cut = True
        for one in list(self._open):
            self._end(one)
        time.sleep(seconds)
        self._cut = False

    def close(self) -> None:
        """End."""
        self._end(self._server)
        for one in list(self._open):
            self._end(one)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            try:
                if self._cut:
                    raise OSError("cut")
                far = socket.create_connection(("127.0.0.1", self.target), timeout=5)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            self._open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.delay:
                    time.sleep(self.delay)
                if self.corrupt > 0 and len(data) > 64:
                    self.corrupt -= 1
                    data = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
                sink.sendall(data)
        self._end(source)
        self._end(sink)

    def _end(self, one: socket.socket) -> None:
        self._open.discard(one)
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
