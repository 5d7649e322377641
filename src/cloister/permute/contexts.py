"""Contexts of one model: who was given which, and when they end.

Contexts exist for operations: to rotate keys, to end one customer's access, to limit what one lost laptop opens.
They are not isolation against the server: two contexts of one model link to each other through their weights alone
(docs/permute-leakage.md).
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import tomli_w

from cloister import manifest as manifests
from cloister import storage
from cloister.errors import BrokenManifest, UsageError

USERS = "users.toml"


def directories(out: Path | str, role: str) -> dict[str, Path]:
    """Context name -> directory, for `role` "developer", "server" or "client"."""
    folder = Path(out) / role
    found = sorted(folder.glob("context-*"), key=lambda path: int(path.name.rsplit("-", 1)[1])) or [folder]
    return {manifests.read(path, role=role).protection.context: path for path in found}


def assign(out: Path | str, user: str, context: str | None = None) -> Path:
    """Give `user` a context (the one with the fewest users unless named) and return the client directory to hand over.

    A user keeps the context once given.
    """
    if not user or len(user) > 200 or not user.isprintable():
        raise UsageError(f"{user!r} is no name for a user.", advice="Use up to 200 printable characters.")
    clients = directories(out, "client")
    users = assigned(out)
    if context is not None and context not in clients:
        raise UsageError(f"There is no context {context!r}.", advice=f"There are: {', '.join(clients)}.")
    if context is None:
        load = Counter(users.values())
        context = users.get(user) or min(clients, key=lambda name: load[name])
    users[user] = context
    storage.write_bytes(Path(out) / "developer" / USERS, tomli_w.dumps({"users": users}).encode())
    return clients[context]


def assigned(out: Path | str) -> dict[str, str]:
    """User -> context."""
    path = Path(out) / "developer" / USERS
    if not path.exists():
        return {}
    try:
        users = tomllib.loads(path.read_text())["users"]
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError) as error:
        raise BrokenManifest(f"{path} cannot be read: {error}.", advice="Restore it from a backup.") from None
    return {str(user): str(context) for user, context in users.items()}
