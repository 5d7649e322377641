"""What a server of mode permute answers, read with suspicion: ids, reasons, sessions, vectors."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.errors import InvalidParameter, PeerDied, PeerError
from cloister.serving.client_tensors import ClientTensors


class Vocabulary:
    """Token ids here and there."""

    def __init__(self, tensors: ClientTensors, size: int) -> None:
        self.size = size
        if "vocab_to_server" in tensors:
            self.to_server = tensors.order("vocab_to_server", size)
        else:
            self.to_server = np.arange(size)
        self._to_plain = np.argsort(self.to_server)

    def sent(self, plain: Sequence[int]) -> list[int]:
        """Plain ids as the server knows them."""
        if any(not 0 <= token < self.size for token in plain):
            raise InvalidParameter(f"Token ids must be whole numbers below {self.size}.")
        sent: list[int] = self.to_server[list(plain)].tolist() if len(plain) else []
        return sent

    def plain(self, server: Any, party: str) -> int:
        """An id from the server as a plain one; anything else is the server's fault."""
        if type(server) is not int or not 0 <= server < self.size:
            raise PeerError(f"{party} answered with something that is not a token id of this vocabulary.")
        return int(self._to_plain[server])

    def named(self, name: str, party: str) -> int:
        """`token_id:17` as a plain id."""
        prefix, _, digits = name.partition(":")
        if prefix != "token_id" or not digits.isascii() or not digits.isdigit() or len(digits) > 9:
            raise PeerError(f"{party} named a token by its text, not by its id.", advice="See docs/serving-vllm.md.")
        return self.plain(int(digits), party)


def key_of(model: Mapping[str, Any]) -> str | None:
    """The key id that a listed model names; None on servers that are not ours."""
    about = model.get("cloister")
    key = about.get("key_id") if isinstance(about, dict) else None
    return key if isinstance(key, str) else None


def one_choice(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The one choice of an answer or chunk; None in a usage chunk."""
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else None


def finish_reason(choice: Mapping[str, Any]) -> str | None:
    """Why the answer ended, if it did."""
    reason = choice.get("finish_reason")
    if reason is None:
        return None
    if reason not in ("stop", "length"):
        raise PeerDied(f"The server gave up on this answer ({str(reason)[:40]}).", advice="Ask again.")
    return str(reason)


def session_of(answer: Mapping[str, Any], party: str) -> str:
    """The id of the session that the server opened."""
    about = answer.get("cloister")
    session = about.get("session") if isinstance(about, dict) else None
    if not isinstance(session, str) or not 0 < len(session) <= 64:
        raise PeerError(f"{party} opened no session.", advice="Install the same Cloister version on both sides.")
    return session


def vectors_of(answer: Mapping[str, Any], count: int, width: int, party: str) -> list[NDArray[np.float32]]:
    """The vectors of an /v1/embeddings answer, checked."""
    data = answer.get("data")
    if not isinstance(data, list) or len(data) != count:
        raise PeerError(f"{party} did not answer with {count} vectors.")
    vectors = []
    for item in data:
        raw = item.get("embedding") if isinstance(item, dict) else None
        try:
            vector = (
                np.frombuffer(base64.b64decode(raw, validate=True), "<f4")
                if isinstance(raw, str)
                else np.asarray(raw, dtype=np.float32)
            )
        except (binascii.Error, ValueError, TypeError):
            vector = np.empty(0, np.float32)
        if vector.shape != (width,) or not np.isfinite(vector).all():
            raise PeerError(f"{party} answered with something that is not a vector of {width} numbers.")
        vectors.append(vector)
    return vectors
