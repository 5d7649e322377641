"""Between text and token ids, on the user's machine: tokenizer, chat template, streaming text, stop strings.

    codec = TextCodec("out/client")
    ids = codec.encode_chat([{"role": "user", "content": "Hello"}])
    writer = codec.writer(ids)
    text = writer.push(token_id) ... writer.finish()

Only the `tokenizers` and `jinja2` packages are used. Text leaves a `TextWriter` in whole characters: a token that ends
inside a UTF-8 sequence is held until the rest of the character has come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from cloister.errors import BrokenManifest, InvalidParameter, UsageError

_MAX_RENDERED = 16 * 2**20  # characters; a template that writes more is broken
_MAX_REPEAT = 1 << 20
_CONTEXT = 6  # prompt tokens that the first decoded text is read after: spaces depend on what came before
_MAX_HELD = 64  # undecodable tokens before they are written as they are
_REPLACEMENT = "\ufffd"


class TextCodec:
    """The tokenizer and chat template of one client directory."""

    def __init__(self, directory: str | Path) -> None:
        directory = Path(directory)
        self._tokenizer = _load_tokenizer(directory)
        self._config = _read_json(directory / "tokenizer_config.json")
        generation = _read_json(directory / "generation_config.json")
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos = _token_text(self._config.get("bos_token"))
        self.eos = _token_text(self._config.get("eos_token"))
        self._bos_id = self._id_of(self.bos)
        self.eos_ids = self._read_eos(generation)
        self._byte_level = "ByteLevel" in json.dumps(json.loads(self._tokenizer.to_str()).get("decoder") or {})
        source = _template_source(directory, self._config)
        self._template = None if source is None else _compile(source)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model was made for conversations."""
        return self._template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`; with `special`, framed as the model expects a fresh text."""
        ids: list[int] = self._tokenizer.encode(_utf8(text), add_special_tokens=special).ids
        wanted = self._config.get("add_bos_token")
        if special and self._bos_id is not None and isinstance(wanted, bool):
            has = ids[:1] == [self._bos_id]
            if wanted and not has:
                return [self._bos_id, *ids]
            if has and not wanted:
                return ids[1:]
        return ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, generate: bool = True) -> str:
        """The conversation as one text, by the model's own template."""
        if self._template is None:
            raise UsageError(
                "This model has no chat template.",
                advice="Use /v1/completions (or generate() with a text), or choose a model made for conversations.",
            )
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=[dict(message) for message in messages],
                add_generation_prompt=generate,
                bos_token=self.bos or "",
                eos_token=self.eos or "",
                tools=None,
                documents=None,
            ):
                size += len(piece)
                if size > _MAX_RENDERED:
                    raise InvalidParameter("The conversation is too long for its template.", param="messages")
                pieces.append(piece)
        except (jinja2.TemplateError, SecurityError, TypeError, KeyError, ValueError, OverflowError) as error:
            said = str(error) if isinstance(error, _Raised) else type(error).__name__
            raise InvalidParameter(
                f"The model's chat template refuses this conversation: {said}", param="messages"
            ) from None
        return "".join(pieces)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, generate: bool = True) -> list[int]:
        """Token ids of the conversation. The template writes the special tokens itself, so none are added."""
        text = self.render_chat(messages, generate=generate)
        ids: list[int] = self._tokenizer.encode(_utf8(text), add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of `ids`; special tokens are left out unless asked for."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=not special)
        return text

    def token_text(self, token: int) -> str:
        """One token on its own, as log probabilities name it."""
        return self.decode([token], special=True)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, also when they are only a part of a character."""
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if self._byte_level and all(letter in _BYTES_OF_LETTERS for letter in name):
            return bytes(_BYTES_OF_LETTERS[letter] for letter in name)
        fallback = re.fullmatch(r"<0x([0-9A-F]{2})>", name)
        return bytes([int(fallback[1], 16)]) if fallback else self.token_text(token).encode()

    def writer(self, prompt: Sequence[int] = ()) -> TextWriter:
        """A writer for the text that follows `prompt`."""
        return TextWriter(self, prompt)

    def _id_of(self, token: str | None) -> int | None:
        found: int | None = None if token is None else self._tokenizer.token_to_id(token)
        return found

    def _read_eos(self, generation: Mapping[str, Any]) -> tuple[int, ...]:
        raw = generation.get("eos_token_id")
        if isinstance(raw, int):
            return (raw,)
        if isinstance(raw, list) and all(isinstance(item, int) for item in raw):
            return tuple(raw)
        known = self._id_of(self.eos)
        return () if known is None else (known,)


class TextWriter:
    """Turns a stream of token ids into pieces of text that never end inside a character."""

    def __init__(self, codec: TextCodec, prompt: Sequence[int] = ()) -> None:
        self._codec = codec
        # Some tokens before the new ones are decoded with them, because spaces and joins depend on neighbours. They
        # must not begin or end inside a character.
        sizes = range(min(_CONTEXT, len(prompt)), 0, -1)
        tails = (list(prompt[-size:]) for size in sizes)
        self._ids = next((tail for tail in tails if _REPLACEMENT not in codec.decode(tail)), [])
        self._fresh = len(self._ids)  # tokens from here on have not been written
        self._written = len(codec.decode(self._ids))

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._ids.append(token)
        text = self._codec.decode(self._ids)
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._fresh < _MAX_HELD:
            return ""
        return self._settle(text)

    def finish(self) -> str:
        """What was held back, when no further token will come."""
        return self._settle(self._codec.decode(self._ids))

    def _settle(self, text: str) -> str:
        piece = text[self._written :]
        if not piece and len(self._ids) < _MAX_HELD:  # a special token: the context before it still counts
            self._fresh = len(self._ids)
            return ""
        # The tokens of this piece are whole characters, and the context of the next one.
        self._ids = self._ids[self._fresh :][-_MAX_HELD:]
        self._fresh = len(self._ids)
        self._written = len(self._codec.decode(self._ids))
        return piece


class StopScanner:
    """Finds stop strings in a stream of text, also across the borders of its pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that is safe to show, and whether a stop string was reached."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """What was held back in case it became a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


# Templates ------------------------------------------------------------------------------------------------------------


class _Raised(jinja2.TemplateError):
    """`raise_exception` in a template: its message is meant for the user."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; for us it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a bound on the one operator that makes gigabytes out of two numbers."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or max(_weight(left) * _weight(right), 0) > _MAX_REPEAT:
            raise SecurityError("too large")
        return super().call_binop(context, operator, left, right)


def _weight(value: Any) -> int:
    if isinstance(value, (str, list, tuple)):
        return len(value)
    return abs(int(value)) if isinstance(value, (int, float)) else 1


def _compile(source: str) -> jinja2.Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise BrokenManifest(
            f"The chat template cannot be read: {error}.", advice="Copy the client directory again."
        ) from None


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: object) -> NoReturn:
    raise _Raised(str(message)[:500])


def _template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    raw = config.get("chat_template")
    if isinstance(raw, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in raw if isinstance(item, dict)}
        raw = named.get("default")
    return raw if isinstance(raw, str) else None


# Files ----------------------------------------------------------------------------------------------------------------


def _load_tokenizer(directory: Path) -> Any:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise BrokenManifest(f"{directory} has no tokenizer.json.", advice="Copy the client directory again.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise BrokenManifest(f"{path} cannot be read: {error}.", advice="Copy the client directory again.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BrokenManifest(f"{path} cannot be read: {error}.", advice="Copy the client directory again.") from None
    return value if isinstance(value, dict) else {}


def _token_text(raw: Any) -> str | None:
    """Special tokens are written as a string or as an object with `content`."""
    value = raw.get("content") if isinstance(raw, dict) else raw
    return value if isinstance(value, str) else None


def _utf8(text: str) -> str:
    """`text` with lone surrogates (possible in JSON, impossible in UTF-8) replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _byte_letters() -> Iterator[tuple[str, int]]:
    """Byte-level vocabularies spell each byte as one printable letter: itself, or the next free one above 255."""
    spare = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            yield chr(byte), byte
        else:
            yield chr(spare), byte
            spare += 1


_BYTES_OF_LETTERS = dict(_byte_letters())
