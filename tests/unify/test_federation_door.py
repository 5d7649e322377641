"""The door of the coordinator: who is let in, what a stranger may cost, and what both are told. Needs no Flower."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cloister.errors import PeerUnreachable, TrustError, UsageError
from cloister.unify.federation import certificates, gate, guard, node
from cloister.unify.federation.guard import ACTIVATE, CALLS, KNOCK, SECRET_HEADER, Door, Guard, Log
from cloister.unify.keys import Key, PublicKey

SECRET = "s" * 64


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Key]:
    return {name: Key.create(tmp_path / name) for name in ("ada", "stranger")}


def signed(key: Key, at: datetime | None = None, **more: str) -> dict[str, str]:
    time = (at or datetime.now(UTC)).isoformat()
    return {
        guard.KEY_HEADER: base64.b64encode(key.public.pem).decode(),
        guard.SIGNATURE_HEADER: base64.b64encode(key.sign_for_node(time.encode())).decode(),
        guard.TIME_HEADER: time,
        "content-length": "0",
        **more,
    }


class Flower:
    """Stands for the SuperLink's application: says yes to everything, and reads what it is given."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        self.read = 0
        self.cut = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope["path"])
        while True:
            message = await receive()
            self.cut = message["type"] == "http.disconnect"
            self.read += len(message.get("body", b""))
            if self.cut or not message.get("more_body"):
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


class Case:
    """A guard in front of it."""

    def __init__(self, folder: Path, keys: dict[str, Key], most: int = 1000) -> None:
        self.flower = Flower()
        self.trusted: list[tuple[int, str]] = []
        self.replaced: list[bytes] = []
        door = Door(SECRET, "127.0.0.1", 0, 0, {"ada": keys["ada"].public.text}, {"ada": most})
        self.log = Log(folder / "door.json")
        self.guard = Guard(
            self.flower,
            door,
            self.log,
            trust=lambda port, owner: self.trusted.append((port, owner)),
            address=lambda port: "203.0.113.7",
            replace=self.replaced.append,
        )

    def ask(self, path: str, headers: dict[str, str], pieces: tuple[int, ...] = (0,)) -> tuple[int, Any]:
        sent: list[Any] = []
        coming = [
            {"type": "http.request", "body": bytes(size), "more_body": place + 1 < len(pieces)}
            for place, size in enumerate(pieces)
        ]

        async def receive() -> Any:
            return coming.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "path": path,
            "client": ("127.0.0.1", 4711),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        asyncio.run(self.guard(scope, receive, send))
        return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.fixture
def case(tmp_path: Path, keys: dict[str, Key]) -> Case:
    return Case(tmp_path, keys)


PULL, PUSH = "/v1/fleet/pull-messages", "/v1/fleet/push-object"


def test_an_owner_is_let_in(case: Case, keys: dict[str, Key]) -> None:
    assert case.ask(KNOCK, signed(keys["ada"])) == (200, {"owner": "ada"})
    assert case.flower.reached == []
    for path in sorted(CALLS):
        assert case.ask(path, signed(keys["ada"]))[0] == 200
    assert case.flower.reached == sorted(CALLS) and set(case.trusted) == {(4711, "ada")}
    assert case.replaced == [keys["ada"].public.pem]  # when it activates itself, and only then
    assert guard.read_log(case.log.path) == ({"ada": 1}, [])


def test_only_the_coordinator_reaches_what_runs_a_federation(case: Case, keys: dict[str, Key]) -> None:
    """Flower's Control API begins runs, that is code, on all nodes; its Runtime API reads what is sent."""
    inner = ["/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs", "/", "/health"]
    inner += ["/v1/fleet/register-node", "/v1/fleet/unregister-node", "/v1/fleet/../control/start-run"]
    for path in inner:
        for headers in ({}, signed(keys["ada"]), {SECRET_HEADER: ""}, {SECRET_HEADER: "t" * 64}):
            assert case.ask(path, headers)[0] == 404, path
    assert case.flower.reached == []
    for path in inner:
        assert case.ask(path, {SECRET_HEADER: SECRET})[0] == 200


def test_a_stranger_is_sent_away_before_it_is_read(case: Case, keys: dict[str, Key]) -> None:
    forged = signed(keys["stranger"]) | {guard.KEY_HEADER: signed(keys["ada"])[guard.KEY_HEADER]}
    for headers in ({}, signed(keys["stranger"]), forged, {guard.KEY_HEADER: "%%%"}):
        for path in (ACTIVATE, PUSH, KNOCK):
            assert case.ask(path, headers, (10_000_000,)) == (401, {"why": "key"})
    assert case.flower.reached == [] and case.trusted == [] and case.flower.read == 0
    told = " ".join(case.log.strangers)
    assert keys["stranger"].fingerprint[:16] in told and "203.0.113.7" in told and "says it is ada" in told
    assert len(case.log.strangers) == 3


def test_an_old_signature_is_no_signature(case: Case, keys: dict[str, Key]) -> None:
    now = datetime.now(UTC)
    for at in (now - timedelta(minutes=6), now + timedelta(minutes=6), now.replace(tzinfo=None)):
        assert case.ask(PULL, signed(keys["ada"], at)) == (401, {"why": "clock"})
    assert case.flower.reached == []


def test_an_owner_cannot_fill_the_coordinators_memory(case: Case, keys: dict[str, Key]) -> None:
    own = keys["ada"]
    assert case.ask(PULL, signed(own, **{"content-length": "50000000"}))[0] == 413
    assert case.ask(PULL, signed(own, **{"content-length": "many"}))[0] == 413
    assert case.ask(PULL, signed(own, **{"content-encoding": "gzip"}))[0] == 413
    assert case.flower.reached == []
    assert case.ask(PUSH, signed(own, **{"content-length": "600"}), (600,))[0] == 200
    assert case.ask(PUSH, signed(own, **{"content-length": "600"}), (600,))[0] == 413  # 1,000 in all
    assert any("more than a contribution can have" in text for text in case.log.strangers)
    assert case.ask(PULL, signed(own))[0] == 200  # it may still hear the verdict
    case.ask(PULL, signed(own), (30_000_000, 30_000_000, 30_000_000))  # more than it announced
    assert case.flower.cut and case.flower.read <= 31_000_000


def test_a_flood_of_names_does_not_fill_the_disk(tmp_path: Path, keys: dict[str, Key]) -> None:
    log = Log(tmp_path / "door.json")
    for number in range(1000):
        log.stranger(f"10.0.{number // 256}.{number % 256}: knocked")
    assert len(guard.read_log(log.path)[1]) == 20


def test_a_door_that_is_not_there_yet(tmp_path: Path) -> None:
    assert guard.read_log(tmp_path / "nothing") == ({}, [])


# The gate -------------------------------------------------------------------------------------------------------------


class Inner:
    """Stands for the SuperLink: an answer to every line that ends a request, over TLS or without."""

    def __init__(self, folder: Path, *, tls: bool = True, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host, self.port = host, port
        self.certificate, key = certificates.ensure(folder, [])
        self.heard: Callable[[int], None] = lambda port: None
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if tls else None
        if self._context is not None:
            self._context.load_cert_chain(self.certificate, key)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._lines: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        server = await asyncio.start_server(self._come, self._host, self.port, ssl=self._context)
        self.port = int(server.sockets[0].getsockname()[1])
        self._ready.set()
        await self._over.wait()
        server.close()
        for line in self._lines:
            line.transport.abort()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.05)

    async def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._lines.add(writer)
        with suppress(OSError, asyncio.CancelledError):
            while (await reader.readline()).strip() or not reader.at_eof():
                while (await reader.readline()).strip():
                    pass
                self.heard(writer.get_extra_info("peername")[1])
                body = b'{"owner": "ada"}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
                await writer.drain()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


@pytest.fixture
def inner(tmp_path: Path) -> Iterator[Inner]:
    found = Inner(tmp_path / "tls")
    yield found
    found.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def doorway(inner: Inner) -> Iterator[gate.Gate]:
    found = gate.Gate("127.0.0.1", free_port(), inner.port)
    found.start()
    yield found
    found.stop()


def is_closed(line: socket.socket) -> bool:
    line.settimeout(5)
    try:
        return line.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def soon(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def test_no_tls_no_answer(doorway: gate.Gate) -> None:
    line = socket.create_connection(("127.0.0.1", doorway._port))
    line.sendall(b"POST /v1/fleet/activate-node HTTP/1.1\r\nhost: x\r\n\r\n")
    assert is_closed(line) and doorway.turned_away == 1
    line.close()


def test_who_comes_before_the_superlink_listens_waits_for_it(tmp_path: Path, keys: dict[str, Key]) -> None:
    """The gate's port opens first: an owner that comes between must not hear that nobody speaks TLS here."""
    port = free_port()
    early = gate.Gate("127.0.0.1", free_port(), port)
    early.start()
    certificate, _ = certificates.ensure(tmp_path / "tls", [])
    heard: list[str] = []
    address, context = f"localhost:{early._port}", node.trusting(certificate)
    knocking = threading.Thread(target=lambda: heard.append(node.knock(address, keys["ada"], context)))
    knocking.start()
    time.sleep(0.5)
    assert not heard and early._strangers
    late = Inner(tmp_path / "tls", port=port)
    knocking.join(10)
    assert heard == ["ada"]
    late.close()
    early.stop()


def test_who_waits_for_a_superlink_that_never_listens(
    tmp_path: Path, keys: dict[str, Key], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "KNOWN_SECONDS", 0.3)
    early = gate.Gate("127.0.0.1", free_port(), free_port())
    early.start()
    with socket.create_connection(("127.0.0.1", early._port)) as line:
        line.sendall(b"\x16\x03\x01\x02\x00")
        assert is_closed(line)
    assert soon(lambda: not early._strangers) and early.turned_away == 1
    monkeypatch.setattr(gate, "KNOWN_SECONDS", 60)
    with socket.create_connection(("127.0.0.1", early._port)) as line:
        line.sendall(b"\x16\x03\x01\x02\x00")
        assert soon(lambda: early._strangers)
    assert soon(lambda: not early._strangers) and early.turned_away == 2  # gone, so it holds no place
    line = socket.create_connection(("127.0.0.1", early._port))
    line.sendall(b"\x16\x03\x01\x02\x00")
    assert soon(lambda: early._strangers)
    early.stop()  # with somebody who waits
    assert is_closed(line)
    line.close()


def test_who_says_nothing_goes(doorway: gate.Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "HELLO_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", doorway._port)) as line:
        assert is_closed(line)


def test_who_does_not_show_a_key_goes(doorway: gate.Gate, inner: Inner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "KNOWN_SECONDS", 0.3)
    context = node.trusting(inner.certificate)
    with (
        socket.create_connection(("127.0.0.1", doorway._port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as line,
    ):
        assert is_closed(line)
    inner.heard = lambda port: doorway.trust(port, "ada")
    with (
        socket.create_connection(("127.0.0.1", doorway._port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as line,
    ):
        line.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert line.recv(1000).startswith(b"HTTP/1.1 200")
        time.sleep(0.6)
        line.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")  # it is known, so it may stay
        assert line.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_flood_of_strangers(doorway: gate.Gate, inner: Inner, keys: dict[str, Key]) -> None:
    """Four hundred connections that say nothing or half a handshake: few stay, and the owner still gets in."""
    inner.heard = lambda port: doorway.trust(port, "ada")
    context = node.trusting(inner.certificate)
    lines = []
    address = f"localhost:{doorway._port}"
    for number in range(400):
        line = socket.create_connection(("127.0.0.1", doorway._port))
        if number % 2:
            line.sendall(b"\x16\x03\x01\x02\x00")
        lines.append(line)
        if number % 100 == 99:
            assert node.knock(address, keys["ada"], context) == "ada"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and len(doorway._strangers) > gate.STRANGERS:
        time.sleep(0.05)
    assert len(doorway._strangers) <= gate.STRANGERS and len(doorway._lines) <= gate.STRANGERS + gate.EACH_OWNER
    assert all(is_closed(line) for line in lines[:300])
    for line in lines:
        line.close()


def test_one_owner_cannot_take_all_places(doorway: gate.Gate, inner: Inner, keys: dict[str, Key]) -> None:
    inner.heard = lambda port: doorway.trust(port, "ada")
    context = node.trusting(inner.certificate)
    lines = []
    for _ in range(gate.EACH_OWNER + 10):
        line = context.wrap_socket(socket.create_connection(("127.0.0.1", doorway._port)), server_hostname="localhost")
        line.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert line.recv(1000).startswith(b"HTTP/1.1 200")
        lines.append(line)
    assert is_closed(lines[0]) and len(doorway._known["ada"]) <= gate.EACH_OWNER
    for line in lines:
        line.close()


def test_a_port_that_is_taken(inner: Inner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BIND_SECONDS", 0.1)
    with pytest.raises(OSError, match="in use"):
        gate.Gate("127.0.0.1", inner.port, 1).start()


# Knocking -------------------------------------------------------------------------------------------------------------


def test_another_certificate(inner: Inner, keys: dict[str, Key], tmp_path: Path) -> None:
    """Somebody between us and the coordinator, with a certificate of its own for the same name."""
    other, _ = certificates.ensure(tmp_path / "other", [])
    with pytest.raises(TrustError, match="another certificate") as caught:
        node.knock(f"localhost:{inner.port}", keys["ada"], node.trusting(other))
    assert "Do not go on" in caught.value.advice


def test_another_name(keys: dict[str, Key], tmp_path: Path) -> None:
    elsewhere = Inner(tmp_path / "tls", host="127.0.0.2")
    with pytest.raises(TrustError, match="not for 127\\.0\\.0\\.2"):
        node.knock(f"127.0.0.2:{elsewhere.port}", keys["ada"], node.trusting(elsewhere.certificate))
    elsewhere.close()


def test_nobody_there(inner: Inner, keys: dict[str, Key]) -> None:
    with pytest.raises(PeerUnreachable, match="Nobody answers"):
        node.knock(f"localhost:{free_port()}", keys["ada"], node.trusting(inner.certificate))


def test_no_tls_there(inner: Inner, keys: dict[str, Key], tmp_path: Path) -> None:
    plain = Inner(tmp_path / "plain", tls=False)
    with pytest.raises(PeerUnreachable):
        node.knock(f"localhost:{plain.port}", keys["ada"], node.trusting(inner.certificate))
    plain.close()


def test_what_is_no_certificate_or_address(keys: dict[str, Key], inner: Inner, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        node.trusting(tmp_path / "nothing.pem")
    (tmp_path / "text.pem").write_text("hello")
    with pytest.raises(UsageError, match="no certificate"):
        node.trusting(tmp_path / "text.pem")
    with pytest.raises((UsageError, PeerUnreachable)):
        node.knock("coordinator:port", keys["ada"], node.trusting(inner.certificate))


def test_the_certificate_is_kept_and_made_anew_for_more_names(tmp_path: Path) -> None:
    certificate, key = certificates.ensure(tmp_path, ["coordinator.example.org"])
    first = certificate.read_bytes()
    assert key.stat().st_mode & 0o077 == 0
    assert certificates.ensure(tmp_path, ["127.0.0.1", "0.0.0.0"])[0].read_bytes() == first
    assert certificates.ensure(tmp_path, ["other.example.org"])[0].read_bytes() != first


def test_a_nodes_signature_signs_no_artefact(keys: dict[str, Key]) -> None:
    """Requests and artefacts are signed with one key; neither signature counts as the other."""
    message = b"2026-01-01T00:00:00+00:00"
    public = PublicKey(keys["ada"].public.text)
    assert public.signed_for_node(message, keys["ada"].sign_for_node(message))
    assert not public.signed(message, keys["ada"].sign_for_node(message))
    assert not public.signed_for_node(message, keys["ada"].sign(message))
