"""The only way out: what it counts, whom it trusts, how failures are named."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloister import errors
from cloister.ledger import Ledger
from cloister.serving.transport import Transport, is_loopback

OK = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"a": 17}'
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


@contextmanager
def listening(
    answer: Callable[[socket.socket, bytes], None], tls: ssl.SSLContext | None = None
) -> Iterator[tuple[int, list[bytes]]]:
    """A server of one function, on a port that the system chooses; what arrived is in the list."""
    listener = socket.create_server(("127.0.0.1", 0))
    got: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    secured = tls.wrap_socket(connection, server_side=True) if tls else connection
                    with secured:
                        request = b""
                        while b"\r\n\r\n" not in request:
                            more = secured.recv(65536)
                            if not more:
                                break
                            request += more
                        head, _, body = request.partition(b"\r\n\r\n")
                        length = next(
                            (
                                int(line.split(b":")[1])
                                for line in head.lower().split(b"\r\n")
                                if line.startswith(b"content-length")
                            ),
                            0,
                        )
                        while len(body) < length:
                            body += secured.recv(65536)
                        got.append(head + b"\r\n\r\n" + body)
                        if head:
                            answer(secured, request)
                except OSError:
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1], got
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def ask(url: str, body: dict[str, Any] | None = None, **options: Any) -> tuple[Ledger, Any]:
    ledger = Ledger()

    async def run() -> Any:
        transport = Transport(url, ledger, **options)
        try:
            return await transport.json("POST" if body else "GET", "/x", body, step="test", reveals="r", request="q")
        except errors.CloisterError as error:
            return error
        finally:
            await transport.close()

    return ledger, asyncio.run(run())


def stream(url: str, take: int = 10**9, **options: Any) -> tuple[Ledger, list[Any]]:
    ledger, events = Ledger(), []

    async def run() -> None:
        transport = Transport(url, ledger, **options)
        try:
            async with aclosing(transport.events("/x", {}, step="test", reveals="")) as iterator:
                async for event in iterator:
                    events.append(event)
                    if len(events) >= take:
                        break
        except errors.CloisterError as error:
            events.append(error)
        finally:
            await transport.close()

    asyncio.run(run())
    return ledger, events


def certificate(folder: Path) -> tuple[ssl.SSLContext, str]:
    """A self-signed certificate for nobody in particular, and its fingerprint."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cloister")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1)).sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = folder / "pem"
    pem.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    return context, sha256(made.public_bytes(serialization.Encoding.DER)).hexdigest()


def test_every_byte_is_counted() -> None:
    with listening(lambda connection, _: connection.sendall(OK)) as (port, got):
        ledger, answer = ask(f"http://127.0.0.1:{port}", {"hello": 1})
    (entry,) = ledger
    assert answer == {"a": 17}
    assert entry.bytes_sent == len(got[0]) and entry.bytes_received == len(OK)
    assert (entry.step, entry.party, entry.reveals, entry.request) == ("test", f"127.0.0.1:{port}", "r", "q")
    assert (entry.rounds, entry.note) == (1, "") and entry.seconds > 0


def test_parallel_requests_count_apart() -> None:
    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(OK)

    async def run(port: int) -> Ledger:
        ledger = Ledger()
        transport = Transport(f"http://127.0.0.1:{port}", ledger)
        await asyncio.gather(
            *(transport.json("POST", "/x", {"n": "x" * n}, step=str(n), reveals="") for n in (10, 200, 3000))
        )
        await transport.close()
        return ledger

    with listening(answer) as (port, _):
        sizes = {entry.step: entry.bytes_sent for entry in asyncio.run(run(port))}
    # a digit more in the content-length for each power of ten
    assert (sizes["200"] - sizes["10"], sizes["3000"] - sizes["200"]) == (190 + 1, 2800 + 1)


def test_a_pinned_certificate_is_compared_before_anything_is_sent(tmp_path: Path) -> None:
    tls, fingerprint = certificate(tmp_path)
    with listening(lambda connection, _: connection.sendall(OK), tls) as (port, got):
        url = f"https://127.0.0.1:{port}"
        assert ask(url, {"a": 1}, fingerprint=fingerprint.upper())[1] == {"a": 17}
        ledger, error = ask(url, {"a": 1}, fingerprint="ab" * 32)
        assert isinstance(error, errors.TrustError) and fingerprint in str(error) and "ab" * 32 in str(error)
        assert [entry.bytes_sent for entry in ledger] == [0] and next(iter(ledger)).note == "failed: trust_error"
        _, unknown = ask(url, {"a": 1})  # self-signed, and nothing pinned
        assert isinstance(unknown, errors.PeerError)
    assert len([request for request in got if request.strip()]) == 1


def test_what_was_attested_is_what_is_asked(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tls, fingerprint), (other, _) = certificate(tmp_path / "a"), certificate(tmp_path / "b")
    current = [tls]

    async def run(port: int) -> None:
        transport = Transport(f"https://127.0.0.1:{port}", Ledger(), fingerprint=fingerprint)
        assert transport.peer_certificate is None
        await transport.json("GET", "/x", step="", reveals="")
        assert sha256(transport.peer_certificate or b"").hexdigest() == fingerprint
        transport.pin_peer()
        tls.sni_callback = lambda connection, name, context: setattr(connection, "context", other)
        with pytest.raises(errors.TrustError):
            await transport.json("GET", "/x", step="", reveals="")
        await transport.close()

    closing = OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with listening(lambda connection, _: connection.sendall(closing), current[0]) as (port, _):
        asyncio.run(run(port))


@pytest.mark.parametrize(
    "url",
    ["http://server.example", "ftp://127.0.0.1", "http://", "http://u:secret@127.0.0.1", "http://127.0.0.1:99999"],
)
def test_addresses_that_are_refused(url: str) -> None:
    with pytest.raises(errors.UsageError) as error:
        Transport(url, Ledger())
    assert "secret" not in str(error.value)


def test_plain_http_elsewhere_must_be_asked_for() -> None:
    assert Transport("http://server.example", Ledger(), insecure_plain_http=True).party == "server.example:80"
    assert Transport("https://server.example", Ledger()).party == "server.example:443"
    assert Transport("[::1]:80", Ledger()).url == "http://[::1]:80"
    assert is_loopback("localhost") and is_loopback("127.9.9.9") and not is_loopback("127.0.0.1.example")


def test_failures_have_names() -> None:
    _, nobody = ask("http://127.0.0.1:9")
    assert isinstance(nobody, errors.PeerUnreachable)
    with listening(lambda connection, _: None) as (port, _):
        ledger, died = ask(f"http://127.0.0.1:{port}")
    assert isinstance(died, errors.PeerDied) and next(iter(ledger)).note == "failed: peer_died"
    release = threading.Event()
    with listening(lambda connection, _: bool(release.wait(10))) as (port, _):
        _, late = ask(f"http://127.0.0.1:{port}", idle_timeout=0.2)
        release.set()
    assert isinstance(late, errors.PeerTimeout)


STATUS = [
    (401, "x", errors.Unauthorised), (409, "wrong_key", errors.WrongKey), (403, "expired_key", errors.ExpiredKey),
    (503, None, errors.TooBusy), (413, "too_large", errors.TooLarge), (404, None, errors.NotFound),
    (500, None, errors.PeerRefused), (400, "bad_tensor", errors.PeerRefused),
]  # fmt: skip


@pytest.mark.parametrize(("status", "code", "expected"), STATUS)
def test_the_server_s_own_words_arrive(status: int, code: str | None, expected: type[errors.CloisterError]) -> None:
    body = {"error": {"message": "its own words", "type": "t", "param": "p", "code": code}}
    ledger, error = ask("http://127.0.0.1", handler=lambda request: httpx.Response(status, json=body))
    assert type(error) is expected and "its own words" in error.message
    assert next(iter(ledger)).note == f"failed: {error.code}"


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"object":"error","message":"its own words"}', b"\xff" * 200_000])
def test_errors_in_other_shapes(body: bytes) -> None:
    _, error = ask("http://127.0.0.1", handler=lambda request: httpx.Response(500, content=body))
    assert isinstance(error, errors.PeerRefused) and len(str(error)) < 2000


def test_an_answer_is_bounded_and_must_be_an_object() -> None:
    _, large = ask("http://127.0.0.1", handler=lambda r: httpx.Response(200, content=b"x" * 3000), max_answer=2000)
    assert isinstance(large, errors.TooLarge)
    for content in (b"no", b"[1]"):
        _, wrong = ask("http://127.0.0.1", handler=lambda r, c=content: httpx.Response(200, content=c))
        assert isinstance(wrong, errors.PeerError)


def test_events_across_chunk_borders() -> None:
    text = b': hello\r\n\r\ndata: {"a":\ndata: 1}\n\ndata:{"b":"\xf0\x9f\x98\x80"}\n\ndata: [DONE]\n\n'

    def answer(connection: socket.socket, _: bytes) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(SSE_HEAD)
        for byte in text:
            connection.sendall(bytes([byte]))

    with listening(answer) as (port, _):
        ledger, events = stream(f"http://127.0.0.1:{port}")
    assert events == [{"a": 1}, {"b": "😀"}]
    assert next(iter(ledger)).bytes_received == len(SSE_HEAD) + len(text)


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (b"", errors.PeerDied),
        (b"data: {", errors.PeerDied),
        (b"data: {\n\n", errors.PeerError),
        (b"data: 5\n\n", errors.PeerError),
        (b'data: {"error": {"message": "no memory", "code": "x"}}\n\n', errors.PeerRefused),
    ],
)
def test_a_stream_that_does_not_end_well(rest: bytes, expected: type[errors.CloisterError]) -> None:
    content = b'data: {"a": 1}\n\n' + rest
    head = {"content-type": "text/event-stream"}
    _, events = stream("http://127.0.0.1", handler=lambda r: httpx.Response(200, headers=head, content=content))
    assert events[0] == {"a": 1} and type(events[1]) is expected


def test_closing_a_stream_closes_the_connection_and_is_noted() -> None:
    closed = threading.Event()

    def answer(connection: socket.socket, _: bytes) -> None:
        connection.sendall(SSE_HEAD + b'data: {"a": 1}\n\n')
        connection.settimeout(10)
        if connection.recv(1) == b"":
            closed.set()

    with listening(answer) as (port, _):
        ledger, events = stream(f"http://127.0.0.1:{port}", take=1)
        assert closed.wait(10)
    assert events == [{"a": 1}] and next(iter(ledger)).note == "cancelled"


def test_nothing_secret_is_in_a_repr_and_no_proxy_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with listening(lambda connection, _: connection.sendall(OK)) as (port, got):
        transport = Transport(f"http://127.0.0.1:{port}", Ledger(), token="sesame")
        assert "sesame" not in repr(transport) + repr(vars(transport))
        assert ask(f"http://127.0.0.1:{port}", token="sesame")[1] == {"a": 17}
    assert b"authorization: Bearer sesame" in got[0] and json.loads(OK.split(b"\r\n\r\n")[1]) == {"a": 17}
