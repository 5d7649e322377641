"""From a prompt to pieces of text: a session's tokens, made readable, cut at stop strings.

The gateway and `cloister.api` both use it, so that both stop at the same place.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import cast

from cloister.modes import Sampling, Session, Token
from cloister.serving.text import StopScanner, TextCodec


@dataclass(frozen=True)
class Piece:
    """Some text and the tokens that came with it; their own text may be held for the next piece."""

    text: str
    tokens: tuple[Token, ...] = ()
    finish: str | None = None  # "stop" or "length"
    counted: int = 0  # generated tokens in this piece, the end-of-text token included


async def write(
    session: Session,
    codec: TextCodec,
    prompt: Sequence[int],
    sampling: Sampling,
    stops: Sequence[str] = (),
    *,
    request: str = "",
) -> AsyncGenerator[Piece, None]:
    """Generate after `prompt`. Closing the iterator cancels the work on both sides; so does reaching a stop string."""
    writer = codec.writer(prompt)
    scanner = StopScanner(stops)
    finish: str | None = None
    # `Session.generate` promises an iterator that can be closed.
    tokens = cast("AsyncGenerator[Token, None]", session.generate(prompt, sampling, request=request))
    try:
        async for token in tokens:
            ended = token.finish == "stop"
            text, stopped = scanner.push(writer.finish() if ended else writer.push(token.id))
            if token.finish == "length" and not stopped:
                last, stopped = scanner.push(writer.finish())
                text += last
            if token.finish and not stopped:
                text += scanner.finish()
            finish = "stop" if stopped else token.finish
            yield Piece(text, () if ended else (token,), finish, 1)
            if stopped:
                return
        if finish is None:
            yield Piece(scanner.push(writer.finish())[0] + scanner.finish(), (), "length")
    finally:
        await tokens.aclose()
