"""The shapes of OpenAI's answers and stream chunks, field by field as clients read them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cloister.modes import Token
from cloister.serving.generation import Piece
from cloister.serving.text import TextCodec


@dataclass
class Choice:
    """One answer as it grows."""

    prefix: str = ""  # an echoed prompt
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    counted: int = 0

    def add(self, piece: Piece) -> None:
        """Take in the next piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.counted += piece.counted
        self.finish = piece.finish or self.finish


class Shapes:
    """All objects of one request: they share id, time and model."""

    def __init__(self, codec: TextCodec, model: str, *, chat: bool, logprobs: int | None, prompt_tokens: int) -> None:
        self.id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self._codec = codec
        self._chat = chat
        self._model = model
        self._created = int(time.time())
        self._logprobs = logprobs
        self._prompt_tokens = prompt_tokens

    def answer(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The whole answer."""
        made = []
        for index, choice in enumerate(choices):
            text = choice.prefix + choice.text
            shape: dict[str, Any] = {"index": index}
            if self._chat:
                shape["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                shape["text"] = text
            made.append(shape | {"logprobs": self.logprobs(choice.tokens), "finish_reason": choice.finish or "length"})
        return self._frame(made, "chat.completion" if self._chat else "text_completion") | {
            "usage": self.usage(choices)
        }

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat choice: who speaks."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, index: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        """A chunk with text."""
        delta = {"content": text} if self._chat else text
        return self._chunk(index, delta, self.logprobs(tokens), None)

    def closing(self, index: int, finish: str) -> dict[str, Any]:
        """The last chunk of a choice: why it ended."""
        return self._chunk(index, {} if self._chat else "", None, finish)

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The chunk that `stream_options.include_usage` asks for."""
        return self._frame([], self._stream_object) | {"usage": self.usage(choices)}

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Token counts."""
        completion = sum(choice.counted for choice in choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Log probabilities in the shape of chat or of completions; None if they were not asked for."""
        if self._logprobs is None:
            return None
        if self._chat:
            content = [
                self._named(token.id, token.logprob)
                | {"top_logprobs": [self._named(other, p) for other, p in token.top[: self._logprobs]]}
                for token in tokens
            ]
            return {"content": content, "refusal": None}
        names = [self._codec.token_text(token.id) for token in tokens]
        offsets, at = [], 0
        for name in names:
            offsets.append(at)
            at += len(name)
        return {
            "tokens": names,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {self._codec.token_text(other): p for other, p in token.top[: self._logprobs]} for token in tokens
            ],
            "text_offset": offsets,
        }

    @property
    def _stream_object(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self._codec.token_text(token),
            "logprob": -9999.0 if logprob is None else logprob,
            "bytes": list(self._codec.token_bytes(token)),
        }

    def _chunk(self, index: int, content: Any, logprobs: Any, finish: str | None) -> dict[str, Any]:
        name = "delta" if self._chat else "text"
        choice = {"index": index, name: content, "logprobs": logprobs, "finish_reason": finish}
        return self._frame([choice], self._stream_object)

    def _frame(self, choices: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "system_fingerprint": None,
        }
