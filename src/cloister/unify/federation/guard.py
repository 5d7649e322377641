"""What the coordinator's port answers, and to whom. It stands before Flower's own application.

Flower 1.41 serves three things on one port: the Fleet API (for nodes), and the Control and Runtime APIs (for whoever
runs the federation: they start apps on all nodes and register keys), which ask for nothing by default. Flower also
reads a request whole before it looks at who signed it. The guard decides on the headers alone:

* the Fleet API is for requests that an invited owner's key signed, up to a size, and up to a number of bytes for each
  owner, because Flower keeps in memory what owners send;
* everything else is for the coordinator, which shows a secret that changes with every start;
* to anybody else nothing is there.

An owner that comes anew replaces its own earlier connection, which may hang for a minute after its process died.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloister import storage
from cloister.unify.keys import PublicKey

SECRET_HEADER = "x-cloister-secret"
KEY_HEADER, SIGNATURE_HEADER, TIME_HEADER = "flwr-public-key", "flwr-signature", "flwr-timestamp"
CLOCK_SECONDS = 300  # how far clocks may be apart; Flower allows about as much
KNOCK = "/cloister/knock"
FLEET = "/v1/fleet/"
CALLS = frozenset(
    FLEET + call
    for call in (
        *("activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages"),
        *("get-run", "get-fab", "push-object", "pull-object", "confirm-message-received"),
    )
)
ACTIVATE, DEACTIVATE = FLEET + "activate-node", FLEET + "deactivate-node"
MOST_BODY = 40_000_000  # four chunks and what is around them
_REMEMBERED = 20


@dataclass(frozen=True)
class Door:
    """What the process of the SuperLink must know. It travels in a file that only this user can read."""

    secret: str
    host: str
    port: int
    inner: int  # where the SuperLink itself listens, on this machine only
    owners: dict[str, str]  # name -> public key
    most_bytes: dict[str, int]  # name -> what an owner may send in all

    def write(self, path: Path) -> None:
        """For `read` in the other process."""
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write_secret(path, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, path: Path) -> Door:
        """What `write` wrote."""
        return cls(**json.loads(path.read_text()))


@dataclass
class Log:
    """What the coordinator is told of what happens at its door, in a small file."""

    path: Path
    arrivals: dict[str, int] = field(default_factory=dict)  # owner -> how often it has connected
    strangers: list[str] = field(default_factory=list)

    def arrived(self, owner: str) -> None:
        """An owner has connected, for the first time or again."""
        self.arrivals[owner] = self.arrivals.get(owner, 0) + 1
        self._write()

    def stranger(self, text: str) -> None:
        """Somebody was sent away. Only the first few are remembered: a flood must not fill the disk."""
        if text not in self.strangers and len(self.strangers) < _REMEMBERED:
            self.strangers.append(text)
            self._write()

    def _write(self) -> None:
        storage.write_text(self.path, json.dumps({"arrivals": self.arrivals, "strangers": self.strangers}))


def read_log(path: Path) -> tuple[dict[str, int], list[str]]:
    """What `Log` wrote; nothing if it is not there yet."""
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}, []
    return raw["arrivals"], raw["strangers"]


class NotLetIn(Exception):
    """A request that is not answered; `args[0]` is what the sender is told."""


class Guard:
    """ASGI middleware around the SuperLink's application."""

    def __init__(
        self,
        app: Any,
        door: Door,
        log: Log,
        *,
        trust: Callable[[int, str], None] = lambda port, owner: None,
        address: Callable[[int], str] = lambda port: "this machine",
        replace: Callable[[bytes], None] = lambda key: None,
    ) -> None:
        self._app, self._door, self._log = app, door, log
        self._trust, self._address, self._replace = trust, address, replace
        self._owners = {PublicKey(text).pem: (name, PublicKey(text)) for name, text in door.owners.items()}
        self._left = dict(door.most_bytes)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, refuse, or pass on to Flower."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        path, port = scope["path"], (scope.get("client") or ("", 0))[1]
        if secrets.compare_digest(headers.get(SECRET_HEADER, "").encode(), self._door.secret.encode()):
            await self._app(scope, receive, send)
        elif path not in CALLS and path != KNOCK:
            await _answer(send, 404, {})
        else:
            try:
                owner, pem = self._who(headers, port)
                self._trust(port, owner)
                if path == KNOCK:
                    await _answer(send, 200, {"owner": owner})
                    return
                self._measure(owner, path, headers)
            except NotLetIn as error:
                await _answer(send, 413 if error.args[0] == "size" else 401, {"why": error.args[0]})
                return
            if path == ACTIVATE:
                self._replace(pem)
                self._log.arrived(owner)
            await self._app(scope, _counted(receive), send)

    def _who(self, headers: Mapping[str, str], port: int) -> tuple[str, bytes]:
        """The invited owner who signed the request's time, and its key as Flower spells it."""
        try:
            pem = base64.b64decode(headers[KEY_HEADER], validate=True)
            signature = base64.b64decode(headers[SIGNATURE_HEADER], validate=True)
            time = headers[TIME_HEADER]
            at = datetime.fromisoformat(time)
        except (KeyError, ValueError, binascii.Error):
            self._log.stranger(f"{self._address(port)}: sent something that no owner's node sends")
            raise NotLetIn("key") from None
        name, key = self._owners.get(pem, ("", None))
        if key is None:
            self._log.stranger(f"{self._address(port)}: has the key {_fingerprint(pem)}, nobody who is invited has it")
            raise NotLetIn("key")
        if at.tzinfo is None or abs((datetime.now(UTC) - at).total_seconds()) > CLOCK_SECONDS:
            raise NotLetIn("clock")
        if not key.signed_for_node(time.encode(), signature):
            self._log.stranger(f"{self._address(port)}: says it is {name}, but cannot sign with that owner's key")
            raise NotLetIn("key")
        return name, pem

    def _measure(self, owner: str, path: str, headers: Mapping[str, str]) -> None:
        length = headers.get("content-length", "")
        if "content-encoding" in headers or not length.isdigit() or int(length) > MOST_BODY:
            raise NotLetIn("size")
        if path.startswith(FLEET + "push-"):
            if int(length) > self._left[owner]:
                self._log.stranger(f"{owner}: has sent more than a contribution can have; it is not listened to")
                raise NotLetIn("size")
            self._left[owner] -= int(length)


def _counted(receive: Any) -> Any:
    """`receive` that ends the connection when more comes than was announced."""
    left = MOST_BODY

    async def counted() -> Any:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        return message if left >= 0 else {"type": "http.disconnect"}

    return counted


def _fingerprint(pem: bytes) -> str:
    """Of a key that somebody showed; of what it is instead, if it is no key."""
    from cryptography.hazmat.primitives import serialization as forms

    try:
        key = forms.load_pem_public_key(pem[:4096])
        pem = key.public_bytes(forms.Encoding.DER, forms.PublicFormat.SubjectPublicKeyInfo)
    except Exception:  # whatever a stranger sends may be wrong in whatever way
        return "(which is none)"
    return hashlib.sha256(pem).hexdigest()[:16] + "..."


async def _answer(send: Any, status: int, what: dict[str, Any]) -> None:
    body = json.dumps(what).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status != 200:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
