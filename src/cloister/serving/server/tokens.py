"""Named bearer tokens. The file holds their SHA-256 hashes, one `name hash` per line, so that reading it opens nothing.

create_token(Path("tokens.txt"), "alice")   # -> "clo-...", shown once
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from cloister.errors import DataError, InvalidParameter, Unauthorised
from cloister.serving.http import error_response

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")


def hash_token(token: str) -> str:
    """What is stored of a token. Tokens are random, so a plain hash is enough."""
    return hashlib.sha256(token.encode()).hexdigest()


def create_token(path: Path, name: str) -> str:
    """Add a new token for `name` to the file and return it; an older one of the same name stays valid."""
    if not _NAME.fullmatch(name):
        raise InvalidParameter(f"{name!r} cannot be the name of a token.", advice="Use letters, digits and . _ @ -")
    token = "clo-" + secrets.token_urlsafe(32)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "a") as file:
        file.write(f"{name} {hash_token(token)}\n")
    return token


def read_tokens(path: Path) -> dict[str, str]:
    """Hash -> name."""
    try:
        lines = path.read_text().splitlines()
    except OSError as exc:
        raise DataError(
            f"The token file {path} cannot be read: {exc.strerror}.", advice="Make one with --new-token NAME."
        ) from None
    tokens: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split()
        if len(parts) != 2 or not _NAME.fullmatch(parts[0]) or not _HASH.fullmatch(parts[1]):
            raise DataError(
                f"Line {number} of {path} is not `name sha256`.", advice="Plain tokens do not belong into this file."
            )
        tokens[parts[1]] = parts[0]
    if not tokens:
        raise DataError(f"{path} has no tokens, so nobody could come in.", advice="Make one with --new-token NAME.")
    return tokens


def require_token(app: ASGIApp, tokens: Mapping[str, str]) -> ASGIApp:
    """Let only holders of a token pass, except to /health. The name is put into the scope as `cloister.owner`."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await app(scope, receive, send)
            return
        owner = _owner(scope, tokens)
        if owner is None:
            refusal = Unauthorised("A valid bearer token is needed.", advice="Send Authorization: Bearer TOKEN.")
            await error_response(refusal)(scope, receive, send)
            return
        scope["cloister.owner"] = owner
        await app(scope, receive, send)

    return guarded


def _owner(scope: Scope, tokens: Mapping[str, str]) -> str | None:
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            presented = hash_token(value[7:].strip().decode("latin-1"))
            found = None
            for stored, owner in tokens.items():  # all of them, so that time does not tell which came close
                if hmac.compare_digest(stored, presented):
                    found = owner
            return found
    return None
