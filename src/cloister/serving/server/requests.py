"""What clients may ask for: bodies parsed into plain data, every field checked, unknown ones that matter refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.errors import InvalidParameter, TooLarge, UnsupportedParameter
from cloister.modes import Sampling
from cloister.serving.wire import decode_tensor

MAX_LOGPROBS = 20
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # fields that are taken only with the value that changes nothing
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "stop": (None, [], ""),
    "use_beam_search": (None, False),
    "detokenize": (None, False),
    "prompt_logprobs": (None,),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}),
    "logits_processors": (None, []),
    "truncate_prompt_tokens": (None,),
}


@dataclass(frozen=True)
class SessionWish:
    """The `cloister` object of a request."""

    id: str  # "new" opens one
    close: bool = False


@dataclass(frozen=True)
class CompletionRequest:
    """A parsed body of /v1/completions. Exactly one of `ids` and `rows` is set, except when a session is closed."""

    model: str
    ids: tuple[int, ...] | None
    rows: NDArray[np.float32] | None
    sampling: Sampling
    stream: bool = False
    include_usage: bool = False
    session: SessionWish | None = None
    tokens_as_ids: bool = True

    @property
    def length(self) -> int:
        """How many prompt positions were sent."""
        if self.rows is not None:
            return int(self.rows.shape[0])
        return len(self.ids or ())


@dataclass(frozen=True)
class Shape:
    """What the parser has to know about a model to bound what it reads."""

    vocab_size: int
    hidden_size: int
    max_model_len: int


@dataclass
class Fields:
    """Typed access to the fields of a body, with errors that name the field."""

    body: Mapping[str, Any]
    seen: set[str] = field(default_factory=set)

    def text(self, name: str, default: str = "") -> str:
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > 512:
            raise InvalidParameter(f"{name} must be a string.", param=name)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InvalidParameter(f"{name} must be true or false.", param=name)
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self._get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidParameter(f"{name} must be a whole number from {low} to {high}.", param=name)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self._get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise InvalidParameter(f"{name} must be a number from {low:g} to {high:g}.", param=name)
        return float(value)

    def ids(self, name: str, vocab_size: int, most: int) -> tuple[int, ...]:
        value = self._get(name)
        return () if value is None else checked_ids(value, name, vocab_size, most)

    def _get(self, name: str) -> Any:
        self.seen.add(name)
        return self.body.get(name)


def checked_ids(value: Any, name: str, vocab_size: int, most: int) -> tuple[int, ...]:
    """A list of token ids inside the vocabulary."""
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise InvalidParameter(f"{name} must be a list of token ids.", param=name)
    if len(value) > most:
        raise TooLarge(f"{name} has {len(value)} ids, the limit is {most}.", advice="Send fewer.", param=name)
    if value and not (min(value) >= 0 and max(value) < vocab_size):
        raise InvalidParameter(f"{name} has ids outside 0 to {vocab_size - 1}.", param=name)
    return tuple(value)


def checked_rows(value: Any, name: str, columns: int, most: int) -> NDArray[np.float32]:
    """A tensor [n, columns]; its error names the field."""
    from cloister.errors import CloisterError

    try:
        return decode_tensor(value, expected_columns=columns, max_rows=most)
    except CloisterError as exc:
        exc.param = name
        raise


def parse_completion(body: Mapping[str, Any], shape: Shape) -> CompletionRequest:
    """Check a /v1/completions body against the model's shape."""
    fields = Fields(body)
    for name, allowed in _NEUTRAL.items():
        if name in body and body[name] not in allowed:
            raise UnsupportedParameter(
                f"This server cannot honour {name}: it has token ids and no text.",
                advice="Ask through `cloister gateway`, which does this on your machine.",
                param=name,
            )
    session = _session(body)
    ids, rows = _prompt(body, shape, optional=session is not None and session.close)
    return CompletionRequest(
        model=fields.text("model"),
        ids=ids,
        rows=rows,
        sampling=_sampling(fields, shape),
        stream=fields.flag("stream"),
        include_usage=_include_usage(body),
        session=session,
    )


def _sampling(fields: Fields, shape: Shape) -> Sampling:
    vocabulary = shape.vocab_size
    logprobs = fields.body.get("logprobs")
    if logprobs is not None:
        logprobs = fields.integer("logprobs", 0, 0, MAX_LOGPROBS)
    seed = fields.body.get("seed")
    if seed is not None:
        seed = fields.integer("seed", 0, -(2**63), 2**63 - 1)
    top_k = fields.integer("top_k", 0, -1, 2**31)
    sampling = Sampling(
        max_tokens=fields.integer("max_tokens", 16, 1, 2**31),
        min_tokens=fields.integer("min_tokens", 0, 0, 2**31),
        temperature=fields.number("temperature", 1.0, 0.0, 100.0),
        top_p=fields.number("top_p", 1.0, 0.0, 1.0),
        top_k=max(top_k, 0),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        seed=seed,
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100.0),
        logit_bias=_logit_bias(fields.body.get("logit_bias"), vocabulary),
        logprobs=logprobs,
        stop_token_ids=fields.ids("stop_token_ids", vocabulary, 4096),
        ignore_eos=fields.flag("ignore_eos"),
    )
    if sampling.top_p == 0.0:
        raise InvalidParameter("top_p must be above 0.", param="top_p")
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidParameter("min_tokens is larger than max_tokens.", param="min_tokens")
    return sampling


def _finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _logit_bias(value: Any, vocab_size: int) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > vocab_size:
        raise InvalidParameter("logit_bias must be an object of token id to number.", param="logit_bias")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
            raise InvalidParameter(f"logit_bias has keys that are not ids below {vocab_size}.", param="logit_bias")
        if isinstance(amount, bool) or not (isinstance(amount, int) or _finite(amount)):
            raise InvalidParameter("logit_bias has values that are not numbers.", param="logit_bias")
        # clipped before it becomes a float: JSON's whole numbers may be larger than any float
        bias[int(key)] = float(max(-100, min(100, amount)))
    return bias


def _prompt(
    body: Mapping[str, Any], shape: Shape, *, optional: bool
) -> tuple[tuple[int, ...] | None, NDArray[np.float32] | None]:
    prompt, embeds = body.get("prompt"), body.get("prompt_embeds")
    if prompt in ("", []) and embeds is not None:
        prompt = None  # vLLM's own client examples send an empty prompt beside the embeddings
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if prompt is not None and embeds is not None:
        raise InvalidParameter("Send either prompt or prompt_embeds.", param="prompt_embeds")
    if embeds is not None:
        if isinstance(embeds, list) and len(embeds) == 1:
            embeds = embeds[0]
        return None, checked_rows(embeds, "prompt_embeds", shape.hidden_size, shape.max_model_len)
    if prompt is None or prompt == []:
        if optional:
            return None, None
        raise InvalidParameter("There is no prompt.", advice="Send prompt or prompt_embeds.", param="prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and isinstance(prompt[0], str)):
        raise UnsupportedParameter(
            "This server has no tokenizer, so prompt must be a list of token ids.",
            advice="Ask through `cloister gateway`, which turns text into ids on your machine.",
            param="prompt",
        )
    return checked_ids(prompt, "prompt", shape.vocab_size, shape.max_model_len), None


def _include_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise InvalidParameter("stream_options must be an object.", param="stream_options")
    return Fields(options).flag("include_usage")


def _session(body: Mapping[str, Any]) -> SessionWish | None:
    wish = body.get("cloister")
    if wish is None:
        return None
    if not isinstance(wish, dict):
        raise InvalidParameter("cloister must be an object.", param="cloister")
    fields = Fields(wish)
    if wish.get("session") is None:
        return None
    identity = fields.text("session")
    if not identity or len(identity) > 64:
        raise InvalidParameter('cloister.session must be "new" or the id of a session.', param="cloister.session")
    return SessionWish(identity, fields.flag("close"))
