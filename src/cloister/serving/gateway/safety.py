"""Who may use the gateway: this machine's programs and its own page, not the pages of other sites.

A gateway on loopback can be reached by every page that the browser has open. Three checks keep them out: the `Host`
must name this machine (a rebound DNS name does not), a foreign `Origin` is refused on every route, and a POST must be
declared as JSON (a plain cross-site form cannot do that).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloister.errors import TrustError, Unauthorised, UsageError
from cloister.serving.transport import is_loopback

_OPEN = ("/", "/health", "/version", "/page.css", "/page.js")  # need no API key
_CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_ALWAYS = (
    (b"content-security-policy", _CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


def guard(
    app: ASGIApp, *, hosts: Collection[str] = (), origins: Collection[str] = (), keys: Collection[str] = ()
) -> ASGIApp:
    """Check every request before the application sees it.

    `hosts`: names besides loopback. `origins`: other sites that may call, with CORS headers for them only.
    `keys`: hex SHA-256 of accepted API keys; empty: any key.
    """
    allowed_hosts = {host.lower() for host in hosts}

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host = _check_host(headers, allowed_hosts)
        cors = _check_origin(scope, headers, host, origins)

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *_ALWAYS, *cors]}
            await send(message)

        if scope["method"] == "OPTIONS" and cors:
            await secured({"type": "http.response.start", "status": 204, "headers": []})
            await secured({"type": "http.response.body", "body": b""})
            return
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").split(";")[0].strip().lower()
            if kind != "application/json":
                error = UsageError("The body must be JSON.", advice="Send content-type: application/json.")
                error.status = 415
                raise error
        if keys and scope["path"] not in _OPEN:
            _check_key(headers, keys)
        await app(scope, receive, secured)

    return guarded


def read_keys(path: Path) -> frozenset[str]:
    """The hashes of the API keys in a file, one key a line; `#` begins a comment."""
    if path.stat().st_mode & 0o077:
        raise UsageError(f"{path} can be read by others.", advice=f"chmod 600 {path}")
    lines = [line.strip() for line in path.read_text().splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"{path} holds no API key.", advice="Write one key a line.")
    return frozenset(hashlib.sha256(key.encode()).hexdigest() for key in keys)


def _check_host(headers: Headers, allowed: Collection[str]) -> str:
    named = headers.getlist("host")
    host = named[0].lower() if len(named) == 1 else ""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        shaped = not set(host) & set("/@?#\\ ")
    except ValueError:
        name, shaped = "", False
    if not shaped or not name or not (is_loopback(name) or name in allowed):
        raise TrustError(
            "This gateway is only for programs on its own machine.",
            advice="Call it as 127.0.0.1 or localhost; --allow-remote names other addresses.",
        )
    return host


def _check_origin(scope: Scope, headers: Headers, host: str, origins: Collection[str]) -> list[tuple[bytes, bytes]]:
    """Refuse requests that another site's page makes. The result are the CORS headers for a site that may."""
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host}":
        if origin in origins:
            return [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
                (b"access-control-allow-headers", b"authorization, content-type"),
                (b"access-control-expose-headers", b"x-request-id"),
                (b"vary", b"origin"),
            ]
        raise TrustError(
            "Pages of other sites may not use this gateway.",
            advice="If this page is yours, start the gateway with --allow-origin and its address.",
        )
    # Images, scripts and forms of other sites carry no Origin on GET, but browsers say where they come from.
    if origin is None and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        visits = headers.get("sec-fetch-mode") == "navigate" and scope["path"] == "/" and scope["method"] == "GET"
        if not visits:  # following a link to the chat page is fine
            raise TrustError("Pages of other sites may not use this gateway.")
    return []


def _check_key(headers: Headers, keys: Collection[str]) -> None:
    kind, _, key = headers.get("authorization", "").partition(" ")
    digest = hashlib.sha256(key.strip().encode()).hexdigest() if kind.lower() == "bearer" else ""
    if not any(hmac.compare_digest(digest, known) for known in keys):
        raise Unauthorised(
            "The API key is missing or wrong.", advice="Set OPENAI_API_KEY to one of this gateway's keys."
        )
