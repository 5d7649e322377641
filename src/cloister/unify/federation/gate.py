"""The gate in front of the coordinator's port: what a stranger may cost before it has shown who it is.

Every connection is a stranger's until `Guard` has seen a request on it that an invited owner signed. Strangers have a
few places and a few seconds. When all places are taken, the oldest connection of the address that holds the most of
them goes, so a flood drives out itself before it drives out anybody else. Bytes are passed on as they are: TLS ends
behind the gate, and the gate reads nothing of it.

It runs on a thread of its own, with its own event loop, in the SuperLink's process.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

STRANGERS = 64  # connections that have not shown who they are
EACH_OWNER = 16  # connections of one owner; a SuperNode has two or three
HELLO_SECONDS = 5.0  # for the first bytes
KNOWN_SECONDS = 20.0  # for the first signed request
BIND_SECONDS = 15.0  # a coordinator that was killed leaves the port a moment later
_PIECE = 1 << 16
_TLS_HANDSHAKE = b"\x16"


@dataclass(eq=False)
class _Line:
    """One connection."""

    address: str
    outer: asyncio.StreamWriter
    owner: str = ""  # once it is known


class Gate:
    """Listens on `host:port` and passes on to `inner` on this machine."""

    def __init__(self, host: str, port: int, inner: int) -> None:
        self._host, self._port, self._inner = host, port, inner
        self._strangers: dict[_Line, None] = {}  # oldest first
        self._known: dict[str, dict[_Line, None]] = {}
        self._lines: dict[int, _Line] = {}  # by the port that the inner side sees
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._problem: OSError | None = None
        self.turned_away = 0

    def start(self) -> None:
        """Listen; `OSError` if that is not possible."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="gate")
        self._thread.start()
        self._ready.wait()
        if self._problem is not None:
            raise self._problem

    def stop(self) -> None:
        """Close everything."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def trust(self, port: int, owner: str) -> None:
        """The connection that comes from `port` is this owner's. Called from the SuperLink's thread."""
        self._loop.call_soon_threadsafe(self._trust, port, owner)

    def address(self, port: int) -> str:
        """Where the connection that comes from `port` really comes from."""
        line = self._lines.get(port)
        return line.address if line else "this machine"

    # On the gate's own thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        try:
            server = await self._listen()
        except OSError as error:
            self._problem = error
            return
        self._ready.set()
        await self._over.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self) -> asyncio.Server:
        until = time.monotonic() + BIND_SECONDS
        while True:
            try:
                return await asyncio.start_server(self._come, self._host, self._port, backlog=128)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise
            await asyncio.sleep(0.3)

    async def _come(self, reader: asyncio.StreamReader, outer: asyncio.StreamWriter) -> None:
        peer = outer.get_extra_info("peername")
        line = _Line(str(peer[0]) if peer else "somewhere", outer)
        self._make_room()
        self._strangers[line] = None
        try:
            first = await asyncio.wait_for(reader.read(_PIECE), HELLO_SECONDS)
            if first.startswith(_TLS_HANDSHAKE):
                await self._pass_on(line, reader, first)
            else:
                self.turned_away += 1
        except (OSError, TimeoutError):
            self.turned_away += line in self._strangers  # else `_drop` has counted it
        except asyncio.CancelledError:
            pass  # the gate stops; asyncio's own callback would log it as an error
        finally:
            self._strangers.pop(line, None)
            self._known.get(line.owner, {}).pop(line, None)
            outer.close()

    def _make_room(self) -> None:
        if len(self._strangers) < STRANGERS:
            return
        most = Counter(line.address for line in self._strangers).most_common(1)[0][0]
        self._drop(next(line for line in self._strangers if line.address == most))

    def _drop(self, line: _Line) -> None:
        self.turned_away += 1
        self._strangers.pop(line, None)
        line.outer.transport.abort()

    async def _pass_on(self, line: _Line, reader: asyncio.StreamReader, first: bytes) -> None:
        overdue = self._loop.call_later(KNOWN_SECONDS, self._overdue, line)
        try:
            inner_reader, inner = await self._inside(line, reader)
        except BaseException:
            overdue.cancel()
            raise
        port = inner.get_extra_info("sockname")[1]
        self._lines[port] = line
        inner.write(first)
        ways = {asyncio.create_task(_flow(reader, inner)), asyncio.create_task(_flow(inner_reader, line.outer))}
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            overdue.cancel()
            del self._lines[port]
            inner.close()

    async def _inside(
        self, line: _Line, reader: asyncio.StreamReader
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A way to the SuperLink, which listens a moment after the gate does: who comes between waits for it."""
        pause = 0.05
        while True:
            try:
                return await asyncio.open_connection("127.0.0.1", self._inner)
            except ConnectionRefusedError:
                if line.outer.is_closing() or reader.at_eof():
                    raise
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, 0.5)

    def _overdue(self, line: _Line) -> None:
        if not line.owner:
            self._drop(line)

    def _trust(self, port: int, owner: str) -> None:
        line = self._lines.get(port)
        if line is None or line.owner:
            return
        line.owner = owner
        self._strangers.pop(line, None)
        known = self._known.setdefault(owner, {})
        known[line] = None
        if len(known) > EACH_OWNER:
            oldest = next(iter(known))
            del known[oldest]
            oldest.outer.transport.abort()


async def _flow(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await source.read(_PIECE):
            target.write(piece)
            await target.drain()
