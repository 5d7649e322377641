"""The only way out of this machine: HTTP to one server, with an entry in the ledger for every exchange.

    transport = Transport("https://host:8443", ledger, fingerprint=manifest.identity.tls_fingerprint)
    models = await transport.json("GET", "/v1/models", step="handshake", reveals="that a client with this key exists")
    async for event in transport.events("/v1/completions", body, step="completion", reveals="..."):
        ...

Bytes are counted on the connection itself, below HTTP and above TLS, so a head, a chunk border or an answer that nobody
reads is counted too. A pinned certificate is compared before the first byte of a request is written. Failures arrive as
the classes of `cloister.errors`; nothing is ever sent a second time from here.

A test passes a plain function in place of the network: `Transport(url, ledger, handler=function)`.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

import httpcore
import httpx

from cloister.errors import (
    CloisterError,
    ExpiredKey,
    NotFound,
    PeerDied,
    PeerError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    TooBusy,
    TooLarge,
    TrustError,
    Unauthorised,
    UsageError,
    WrongKey,
)
from cloister.ledger import Entry, Ledger

Handler = Callable[[httpx.Request], httpx.Response | Awaitable[httpx.Response]]

_CONNECT_SECONDS = 10.0
_MAX_ERROR_BODY = 64 * 1024
_MAX_EVENT = 16 * 2**20
_entry: ContextVar[Entry | None] = ContextVar("ledger entry of the request being sent", default=None)


class Transport:
    """HTTP/1.1 to the server at `url`. Its only state is the connection pool, so it can be shared by many requests."""

    def __init__(
        self,
        url: str,
        ledger: Ledger,
        *,
        fingerprint: str = "",
        token: str | None = None,
        insecure_plain_http: bool = False,
        idle_timeout: float = 300.0,
        max_answer: int = 16 << 20,
        handler: Handler | None = None,
    ) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host = parts.hostname or ""
        if parts.scheme not in ("http", "https") or not host or parts.username or parts.query or parts.fragment:
            raise UsageError(f"{_shown(url)!r} is not the address of a server.", advice="Give http(s)://host:port.")
        if parts.scheme == "http" and not is_loopback(host) and not insecure_plain_http:
            raise UsageError(
                f"Plain http to {host} would show every message to the network.",
                advice="Use https://, or say insecure_plain_http=True if the connection is protected by other means.",
            )
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise UsageError(f"{_shown(url)!r} has no valid port.", advice="Give http(s)://host:port.") from None
        self.url = f"{parts.scheme}://{_bracketed(host)}:{port}{parts.path.rstrip('/')}"
        self.party = f"{_bracketed(host)}:{port}"
        self.ledger = ledger
        self.max_answer = max_answer
        self._idle_timeout = idle_timeout
        pin = fingerprint.replace(":", "").lower()
        self._network = _Network(pin, self.party, idle_timeout)
        inner: httpx.AsyncBaseTransport = _Mock(handler) if handler is not None else self._network
        headers = {"user-agent": "cloister", "accept-encoding": "identity"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        # trust_env=False: no proxy from the environment may become a party that the ledger does not name.
        self._client = httpx.AsyncClient(transport=inner, headers=headers, trust_env=False, timeout=None)

    @property
    def peer_certificate(self) -> bytes | None:
        """The certificate (DER) seen on the latest TLS connection; None before it, or without TLS."""
        return self._network.certificate

    def pin_peer(self) -> None:
        """From now on every connection must show the certificate seen last: what was attested is what is asked."""
        if self._network.certificate is not None:
            self._network.pin = hashlib.sha256(self._network.certificate).hexdigest()

    async def json(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        step: str,
        reveals: str,
        request: str = "",
        entry: Entry | None = None,
        expected: int = 0,
    ) -> dict[str, Any]:
        """Send one request, read one JSON object. With `entry`, another round of the exchange that it records.

        `expected`: bytes of payload that the caller has reason to await, on top of what any answer may have.
        """
        most = self.max_answer + expected
        async with self._exchange(method, path, body, step, reveals, request, entry) as response:
            raw = bytearray()
            async for chunk in response.aiter_raw():
                raw += chunk
                if len(raw) > most:
                    raise TooLarge(f"The answer of {self.party} is larger than {most} bytes.")
            try:
                answer = json.loads(raw, parse_constant=_no_number)
            except (ValueError, RecursionError):
                answer = None
            if not isinstance(answer, dict):
                raise PeerError(f"{self.party} did not answer with a JSON object.", advice=_NOT_OURS)
            return answer

    async def events(
        self, path: str, body: Mapping[str, Any], *, step: str, reveals: str, request: str = ""
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Send one request, yield its server-sent events until `[DONE]`.

        Closing the iterator closes the connection, which is how the server learns that nobody waits any more. A stream
        that ends without `[DONE]` raises `PeerDied`; an error event raises what the server said.
        """
        async with self._exchange("POST", path, body, step, reveals, request) as response:
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise PeerError(f"{self.party} answered with {kind[:60]!r}, not with a stream.", advice=_NOT_OURS)
            async for data in _sse_data(response.aiter_raw(), self.party):
                if data == b"[DONE]":
                    return
                try:
                    event = json.loads(data, parse_constant=_no_number)
                except (ValueError, RecursionError):
                    event = None
                if not isinstance(event, dict):
                    raise PeerError(f"{self.party} sent an event that is not a JSON object.", advice=_NOT_OURS)
                if event.get("error"):
                    raise _refusal(event, 500, self.party)
                yield event
            raise PeerDied(
                f"{self.party} ended the stream before the answer was complete.",
                advice="What arrived so far is only a part. Ask again; see the server's log if it happens twice.",
            )

    def open_entry(self, step: str, reveals: str, request: str = "") -> Entry:
        """A ledger entry for an exchange of several rounds; each round counts itself."""
        entry = self.ledger.open(step, self.party, reveals, request)
        entry.rounds = 0
        return entry

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    @asynccontextmanager
    async def _exchange(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        step: str,
        reveals: str,
        request: str,
        entry: Entry | None = None,
    ) -> AsyncIterator[httpx.Response]:
        if entry is None:
            entry = self.open_entry(step, reveals, request)
        entry.rounds += 1
        began = time.monotonic()
        response: httpx.Response | None = None
        try:
            content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
            headers = {} if content is None else {"content-type": "application/json"}
            outgoing = self._client.build_request(method, self.url + path, content=content, headers=headers)
            outgoing.extensions["timeout"] = {
                "connect": _CONNECT_SECONDS,
                "read": self._idle_timeout,
                "write": self._idle_timeout,
                "pool": self._idle_timeout,
            }
            outgoing.extensions["cloister_entry"] = entry
            token = _entry.set(entry)
            try:
                response = await self._client.send(outgoing, stream=True)
            finally:
                _entry.reset(token)
            if response.status_code >= 400:
                raise _refusal(await _error_body(response), response.status_code, self.party)
            yield response
        except CloisterError as error:
            entry.note = f"failed: {error.code}"
            raise
        except (asyncio.CancelledError, GeneratorExit):
            entry.note = "cancelled"
            raise
        except httpx.HTTPError as error:
            translated = _translate(error, self.party, self._idle_timeout)
            entry.note = f"failed: {translated.code}"
            raise translated from None
        finally:
            entry.seconds += time.monotonic() - began
            if response is not None:
                await response.aclose()


def is_loopback(host: str) -> bool:
    """Whether `host` can only mean this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# What the other side says ---------------------------------------------------------------------------------------------

_NOT_OURS = "Check that the address is that of `cloister serve` or of a vLLM server."
_KNOWN = {kind.code: kind for kind in (WrongKey, ExpiredKey, TooBusy, TooLarge)}


async def _error_body(response: httpx.Response) -> Any:
    raw = bytearray()
    async for chunk in response.aiter_raw():
        raw += chunk
        if len(raw) > _MAX_ERROR_BODY:
            break
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _refusal(body: Any, status: int, party: str) -> CloisterError:
    """The server's own error as one of ours, with its own message."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):  # older vLLM puts the fields at the top
        error = body if isinstance(body, dict) else {}
    said = error.get("message") or error.get("detail") or f"HTTP status {status}"
    message = f"{party} refused: {str(said)[:1000]}"
    code = error.get("code")
    if status == 401 or code == Unauthorised.code:
        return Unauthorised(message, advice="Give the bearer token that the server's operator issued to you.")
    if isinstance(code, str) and code in _KNOWN:
        return _KNOWN[code](message)
    if status == 404:
        return NotFound(message, advice=_NOT_OURS)
    if status in (429, 503):
        return TooBusy(message, advice="Try again in a while.")
    param = error.get("param")
    return PeerRefused(message, param=param if isinstance(param, str) else None)


def _translate(error: httpx.HTTPError, party: str, idle: float) -> PeerError:
    """The one place where errors of the HTTP library become ours."""
    if isinstance(error, httpx.ConnectTimeout):
        return PeerUnreachable(
            f"{party} did not answer within {_CONNECT_SECONDS:g} s.", advice="Is the address right and the server up?"
        )
    if isinstance(error, httpx.TimeoutException):
        return PeerTimeout(f"{party} sent nothing for {idle:g} s.", advice="Ask for fewer tokens, or raise the limit.")
    if isinstance(error, httpx.ConnectError):
        return PeerUnreachable(f"Nobody answers at {party}.", advice="Start the server, or check the address.")
    return PeerDied(
        f"The connection to {party} broke in the middle.",
        advice="Ask again; see the server's log if it happens twice.",
    )


async def _sse_data(chunks: AsyncIterator[bytes], party: str) -> AsyncIterator[bytes]:
    """The `data` of each event; comments and other fields are skipped. One event is bounded in size."""
    pending, lines, held = b"", [], 0
    async for chunk in chunks:
        *complete, pending = (pending + chunk).split(b"\n")
        held += sum(map(len, complete))
        if len(pending) + held > _MAX_EVENT:
            raise TooLarge(f"One event from {party} is larger than {_MAX_EVENT} bytes.")
        for line in complete:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line:
                if lines:
                    yield b"\n".join(lines)
                lines, held = [], 0


# The network ----------------------------------------------------------------------------------------------------------


class _Stream(httpcore.AsyncNetworkStream):
    """A connection that counts into the ledger entry of whoever wrote to it last (HTTP/1.1: one request at a time)."""

    def __init__(self, inner: httpcore.AsyncNetworkStream, network: _Network) -> None:
        self._inner = inner
        self._network = network
        self._entry: Entry | None = None

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._inner.read(max_bytes, timeout)
        if self._entry is not None:
            self._entry.bytes_received += len(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._entry = _entry.get()
        if self._entry is not None:
            self._entry.bytes_sent += len(buffer)
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        secured = await self._inner.start_tls(ssl_context, server_hostname, timeout)
        certificate: bytes = secured.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
        self._network.certificate = certificate
        seen = hashlib.sha256(certificate).hexdigest()
        if self._network.pin and seen != self._network.pin:
            await secured.aclose()
            raise TrustError(
                f"The certificate of {self._network.party} is not the one this client expects: "
                f"expected SHA-256 {self._network.pin}, got {seen}.",
                advice="Nothing was sent. If the operator has changed the certificate, ask for a new client directory.",
            )
        return _Stream(secured, self._network)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Backend(httpcore.AsyncNetworkBackend):
    def __init__(self, network: _Network) -> None:
        self._network = network
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        stream = await self._inner.connect_tcp(host, port, timeout, local_address, socket_options)
        return _Stream(stream, self._network)

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


class _Network(httpx.AsyncBaseTransport):
    """The connection pool, with our counting streams below it."""

    def __init__(self, pin: str, party: str, idle_timeout: float) -> None:
        self.pin = pin
        self.party = party
        self.certificate: bytes | None = None
        context = ssl.create_default_context()
        if pin:  # the fingerprint says more than any authority could, and works for self-signed certificates
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=context,
            max_connections=None,
            max_keepalive_connections=32,
            # shorter than the 5 s of uvicorn, so that a request is not written to a connection that is being closed
            keepalive_expiry=3.0,
            http1=True,
            http2=False,
            network_backend=_Backend(self),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        outgoing = httpcore.Request(
            method=request.method,
            url=httpcore.URL(
                scheme=request.url.raw_scheme,
                host=request.url.raw_host,
                port=request.url.port,
                target=request.url.raw_path,
            ),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        with _httpx_errors():
            answer = await self._pool.handle_async_request(outgoing)
        assert isinstance(answer.stream, AsyncIterable)
        return httpx.Response(
            answer.status, headers=answer.headers, stream=_Body(answer.stream), extensions=answer.extensions
        )

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, inner: AsyncIterable[bytes]) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _httpx_errors():
            async for chunk in self._inner:
                yield chunk

    async def aclose(self) -> None:
        if hasattr(self._inner, "aclose"):
            await self._inner.aclose()


class _httpx_errors:
    """httpcore's exceptions under the names of httpx, so that `_translate` sees one family for network and mock."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None or error is None or issubclass(kind, CloisterError):
            return
        for cause, result in (
            (httpcore.ConnectTimeout, httpx.ConnectTimeout),
            (httpcore.TimeoutException, httpx.ReadTimeout),
            (httpcore.ConnectError, httpx.ConnectError),
            ((httpcore.NetworkError, httpcore.ProtocolError), httpx.RemoteProtocolError),
        ):
            if issubclass(kind, cause):
                raise result(str(error)) from None


class _Mock(httpx.AsyncBaseTransport):
    """A function in place of the network; bytes are counted as HTTP/1.1 would have written them."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        entry: Entry = request.extensions["cloister_entry"]
        body = await request.aread()
        first = f"{request.method} {request.url.raw_path.decode()} HTTP/1.1"
        entry.bytes_sent += _head_size(first, request.headers) + len(body)
        answer = self._handler(request)
        response = await answer if isinstance(answer, Awaitable) else answer
        entry.bytes_received += _head_size(f"HTTP/1.1 {response.status_code} OK", response.headers)
        stream = response.stream
        assert isinstance(stream, AsyncIterable)
        return httpx.Response(response.status_code, headers=response.headers, stream=_Counted(stream, entry))


class _Counted(httpx.AsyncByteStream):
    def __init__(self, inner: AsyncIterable[bytes], entry: Entry) -> None:
        self._inner = inner
        self._entry = entry

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._inner:
            self._entry.bytes_received += len(chunk)
            yield chunk


def _head_size(first: str, headers: httpx.Headers) -> int:
    return len(first) + 4 + sum(len(name) + len(value) + 4 for name, value in headers.raw)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _shown(url: str) -> str:
    """`url` without anything that could be a password."""
    return url.split("@")[-1][:200]
