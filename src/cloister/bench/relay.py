"""A relay on loopback that keeps what passes through it: what the server really received, byte for byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

_KEEP = 4 << 20


class Relay:
    """Stands between a gateway and a server (plain HTTP) and remembers the bytes of each direction."""

    def __init__(self, server: str) -> None:
        parts = urlsplit(server)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._kept = bytearray()
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def received(self) -> bytes:
        """Everything that the server has received so far."""
        with self._lock:
            return bytes(self._kept)

    def bodies(self) -> list[bytes]:
        """The bodies of the requests, in order."""
        found = []
        rest = self.received()
        while (end := rest.find(b"\r\n\r\n")) >= 0:
            head, rest = rest[:end].lower(), rest[end + 4 :]
            length = (
                head.rpartition(b"content-length:")[2].split(b"\r\n")[0].strip() if b"content-length:" in head else b"0"
            )
            body, rest = rest[: int(length)], rest[int(length) :]
            if body:
                found.append(body)
        return found

    def close(self) -> None:
        """Close every connection."""
        for one in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target, timeout=10)
                server.settimeout(None)
                self._open += [client, server]
                threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                if keep:
                    with self._lock:
                        if len(self._kept) < _KEEP:
                            self._kept += piece
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)
