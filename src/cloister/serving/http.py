"""The HTTP pieces that the server and the gateway share: one error shape, limits, request ids, server-sent events.

    app = Starlette(routes=[...])
    install_error_handlers(app)                       # 404, 405, 413, bad JSON, CloisterError: all in one shape
    app = limit_body(app, 64 * 2**20)                 # refuses before and while reading
    app = request_boundary(app)                       # request ids, access log, nothing escapes as a traceback

`request_boundary` must be the outermost. Nothing here logs a body, a query string or a header value; the one exception
is a well-formed x-request-id.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import h11
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from cloister.errors import (
    CloisterError,
    InvalidParameter,
    NotFound,
    PeerTimeout,
    TooBusy,
    TooLarge,
    UsageError,
)

log = logging.getLogger("cloister.http")

SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
SSE_DONE = b"data: [DONE]\n\n"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_DRAIN_BYTES = 16 * 2**20  # how much of a refused body is thrown away so that the client gets to read the refusal
_DRAIN_SECONDS = 2.0


def listen(host: str, port: int) -> socket.socket:
    """A bound socket (port 0: the system chooses) whose connections send at once.

    The protocol is named because asyncio leaves Nagle's algorithm on for sockets that do not name it, and small
    answers then wait 40 ms for the other side's delayed acknowledgement.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"Port {port} on {host} cannot be opened: {error.strerror or error}.",
            advice="Choose another with --port; 0 lets the system choose.",
        ) from None
    return listener


# Errors ---------------------------------------------------------------------------------------------------------------


def error_status(exc: BaseException) -> int:
    """The HTTP status that belongs to `exc`; 500 for anything that is not a `CloisterError`."""
    return exc.status if isinstance(exc, CloisterError) else 500


def error_body(exc: BaseException) -> dict[str, dict[str, str | None]]:
    """`{"error": {...}}`. An exception that is not ours gives away nothing but that it happened."""
    if not isinstance(exc, CloisterError):
        exc = CloisterError("The server failed on this request.", advice="Its log has the place under the request id.")
    kind = _TYPES.get(exc.status, "server_error" if exc.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(exc), "type": kind, "param": exc.param, "code": exc.code}}


def error_response(exc: BaseException, *, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The response for `exc`, on every route the same shape."""
    extra = dict(headers or {})
    if isinstance(exc, TooBusy):
        extra.setdefault("retry-after", "1")
    if error_status(exc) == 401:
        extra.setdefault("www-authenticate", "Bearer")
    return JSONResponse(error_body(exc), status_code=error_status(exc), headers=extra)


def from_http_exception(exc: HTTPException, scope: Scope) -> CloisterError:
    """Starlette's own 404, 405 and 4xx as one of our errors; the status is kept."""
    if exc.status_code == 404:
        return NotFound(f"There is no route {scope.get('path', '')[:200]!r} here.", advice="See docs/serving.md.")
    if exc.status_code == 405:
        allowed = (exc.headers or {}).get("Allow", "another method")
        error = UsageError(f"{scope.get('method')} is not possible on this route.", advice=f"Use {allowed}.")
    else:
        error = UsageError(f"The request was refused: {exc.detail}.")
    error.status = exc.status_code
    return error


def install_error_handlers(app: Starlette) -> None:
    """Answer routing errors and every `CloisterError` raised in a route with the one error shape."""

    def ours(request: Request, exc: Exception) -> Response:
        return error_response(exc)

    def routing(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        return error_response(from_http_exception(exc, request.scope), headers=exc.headers)

    app.add_exception_handler(Exception, ours)  # Starlette answers with it and raises again, to `request_boundary`
    app.add_exception_handler(CloisterError, ours)
    app.add_exception_handler(HTTPException, routing)


# Reading requests -----------------------------------------------------------------------------------------------------


async def read_json(request: Request, *, max_items: int = 1_000_000) -> dict[str, Any]:
    """The JSON object in the body. `max_items` bounds what a small body of brackets can grow to in memory."""
    body = await request.body()
    if body.count(b",") + body.count(b"[") + body.count(b"{") > max_items:
        raise TooLarge(f"The JSON body has more than {max_items} items.", advice="Send less in one request.")

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError):  # the message could quote the body, so it is left out
        raise InvalidParameter("The body is not valid JSON.", advice="Send one JSON object in UTF-8.") from None
    if not isinstance(value, dict):
        raise InvalidParameter("The body is not a JSON object.", advice="Send one JSON object.")
    return value


@dataclass
class _Load:
    bodies: int = 0
    requests: int = 0


def limit_body(
    app: ASGIApp,
    max_bytes: int,
    *,
    idle_seconds: float = 30.0,
    total_seconds: float = 300.0,
    max_total_bytes: int | None = None,
    max_requests: int = 1024,
) -> ASGIApp:
    """Bound what request bodies can cost.

    A body over `max_bytes` is refused from its Content-Length before it is read, or while it arrives if it is chunked.
    A client that sends nothing for `idle_seconds`, or is not done after `total_seconds`, gets a 408. All bodies of one
    process together stay under `max_total_bytes` (default: eight full ones), all requests under `max_requests`.
    """
    total_limit = max_total_bytes or 8 * max_bytes
    load = _Load()

    def too_large() -> TooLarge:
        return TooLarge(f"The body is larger than {max_bytes} bytes.", advice="Send less, or raise the limit.")

    async def bounded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        length, chunked = _announced(scope)
        if load.requests >= max_requests:
            await _refuse(TooBusy("Too many requests are open.", advice="Try again soon."), scope, receive, send)
            return
        if length > max_bytes:
            await _refuse(too_large(), scope, receive, send)
            return
        if load.bodies + length > total_limit:
            await _refuse(TooBusy("Too many large bodies at once.", advice="Try again soon."), scope, receive, send)
            return
        taken = 0
        finished = length == 0 and not chunked
        deadline = time.monotonic() + total_seconds
        close = _closing(receive, send)

        async def counted() -> Message:
            nonlocal taken, finished
            if finished:  # now it waits for the disconnect, which may take as long as the answer takes
                return await receive()
            patience = min(idle_seconds, deadline - time.monotonic())
            try:
                message = await asyncio.wait_for(receive(), max(patience, 0.001))
            except TimeoutError:
                slow = PeerTimeout("The body did not arrive in time.", advice="Send it without long pauses.")
                slow.status = 408
                raise slow from None
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                taken += size
                load.bodies += size
                finished = not message.get("more_body", False)
                if taken > max_bytes:
                    raise too_large()
                if load.bodies > total_limit:
                    raise TooBusy("Too many large bodies at once.", advice="Try again soon.")
            else:
                finished = True
            return message

        begun_early = False

        async def answer(message: Message) -> None:
            nonlocal begun_early
            if message["type"] == "http.response.start":
                begun_early = not finished
            await (close if begun_early else send)(message)

        load.requests += 1
        try:
            await app(scope, counted, answer)
        finally:
            load.requests -= 1
            load.bodies -= taken

    return bounded


def _announced(scope: Scope) -> tuple[int, bool]:
    """The length of the body by its head, and whether it comes in chunks of unknown number."""
    length, chunked = 0, False
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = int(value) if value.isdigit() and len(value) < 20 else 2**63
        elif name == b"transfer-encoding":
            chunked = True
    return length, chunked


async def _refuse(exc: CloisterError, scope: Scope, receive: Receive, send: Send) -> None:
    await error_response(exc)(scope, receive, _closing(receive, send))


def _closing(receive: Receive, send: Send) -> Send:
    """A `send` for an answer that comes before the body was read: it ends the connection.

    A bounded part of the body is discarded first: a client that is still writing would otherwise see a reset
    connection in place of the reason.
    """

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send({**message, "headers": [*message["headers"], (b"connection", b"close")]})
        elif message.get("more_body", False):
            await send(message)
        else:
            await send({**message, "more_body": True})
            discarded, deadline = 0, time.monotonic() + _DRAIN_SECONDS
            while discarded < _DRAIN_BYTES:
                try:
                    part = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0.001))
                except TimeoutError:
                    break
                if part["type"] != "http.request" or not part.get("more_body"):
                    break
                discarded += len(part.get("body", b""))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return closing


# Around every request -------------------------------------------------------------------------------------------------


def request_id(scope_or_request: Scope | Request) -> str:
    """The id that `request_boundary` gave this request."""
    scope = scope_or_request.scope if isinstance(scope_or_request, Request) else scope_or_request
    found: str = scope.get("cloister.request_id", "")
    return found


def request_boundary(app: ASGIApp) -> ASGIApp:
    """Give each request an id (that of `x-request-id` if it is plain), return it, log one line, stop exceptions."""

    async def boundary(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        identity = _chosen_id(scope)
        scope["cloister.request_id"] = identity
        began = time.monotonic()
        status = 0
        complete = False

        async def tagged(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [item for item in message.get("headers", []) if item[0].lower() != b"x-request-id"]
                message = {**message, "headers": [*headers, (b"x-request-id", identity.encode())]}
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
            await send(message)

        outcome = ""
        try:
            await app(scope, receive, tagged)
        except (ClientDisconnect, asyncio.CancelledError):
            outcome = "client left"
            raise
        except CloisterError as exc:  # raised by a middleware, outside of Starlette's handlers
            outcome = exc.code
            if status and not complete:
                raise _CutShort from None
            if not status:
                await error_response(exc)(scope, receive, tagged)
        except Exception as exc:
            # Only the type and the place: messages and locals of foreign exceptions may quote what was sent.
            outcome = f"{type(exc).__name__} at {_place(exc)}"
            if status and not complete:
                raise _CutShort from None
            if not status:
                await error_response(exc)(scope, receive, tagged)
        finally:
            milliseconds = (time.monotonic() - began) * 1000
            level = logging.ERROR if status >= 500 and outcome else logging.INFO
            log.log(
                level,
                "%s %s %d",
                scope["method"],
                scope["path"][:200].encode("unicode_escape").decode(),
                status,
                extra={"request_id": identity, "milliseconds": round(milliseconds, 1), "outcome": outcome},
            )

    return boundary


class _CutShort(Exception):
    """Raised after a response began and could not be finished, so that the connection is closed, not left open."""


def _chosen_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(text):
                return str(text)
    return "req-" + secrets.token_hex(12)


def _place(exc: BaseException) -> str:
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "unknown place"
    code = trace.tb_frame.f_code
    return f"{code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} in {code.co_name}"


class LogFormatter(logging.Formatter):
    """One line per event with its request id; JSON with `as_json`."""

    def __init__(self, *, as_json: bool = False) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("request_id", "milliseconds", "outcome"):
            value = getattr(record, name, None)
            if value not in (None, ""):
                fields[name] = value
        if record.exc_info and record.exc_info[1] is not None:
            fields["error"] = f"{type(record.exc_info[1]).__name__} at {_place(record.exc_info[1])}"
        if self._as_json:
            return json.dumps(fields)
        rest = " ".join(f"{name}={fields[name]}" for name in list(fields)[4:])
        return f"{fields['time']} {fields['level']:<7} {fields['message']}{'  ' + rest if rest else ''}"


# Server-sent events ---------------------------------------------------------------------------------------------------


def sse(data: Mapping[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def sse_comment(text: str) -> bytes:
    """A line that clients skip; it keeps idle timers of proxies and runtimes from ending the stream."""
    return b": " + " ".join(text.split()).encode() + b"\n\n"


def sse_error(exc: BaseException) -> bytes:
    """An error inside a stream that has begun; the caller closes the stream after it, without `SSE_DONE`."""
    return sse(error_body(exc))


# The connection -------------------------------------------------------------------------------------------------------


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with three bounds that it lacks; use it as `uvicorn.Config(http=BoundedProtocol)`.

    A connection must bring its request head within `head_seconds`. A client that stops reading an answer is cut off
    after `stalled_seconds`, so that it cannot hold a place. A request that is not HTTP gets the common error shape.
    """

    head_seconds = 15.0
    stalled_seconds = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        if self.cycle is None or self.conn.their_state is h11.IDLE:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        idle_before = self.conn.their_state is h11.IDLE
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            _cancel(self._head_timer)
            self._head_timer = None
        elif idle_before and self._head_timer is None:  # the slow beginning of another request on a kept connection
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.stalled_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._stall_timer)
        self._stall_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head_timer)
        _cancel(self._stall_timer)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        body = json.dumps(error_body(UsageError("This is not a valid HTTP/1.1 request."))).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (h11.Response(status_code=400, headers=headers, reason=b"Bad Request"), h11.Data(data=body)):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write(self.conn.send(h11.EndOfMessage()) or b"")
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
