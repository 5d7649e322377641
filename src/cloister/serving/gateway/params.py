"""The one table of request parameters: what is honoured, what is refused, and how each value is checked.

    parsed = parse("chat", body)          # a 400 that names the parameter, or plain data
    python -m cloister.serving.gateway.params > docs/parameters.md

A parameter that would change the answer is honoured or refused, never ignored. A parameter that the table does not know
is ignored with a warning that names it, because clients add fields of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloister.errors import InvalidParameter, UnsupportedParameter

log = logging.getLogger("cloister.gateway")

MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_PROMPTS = 64
MAX_INPUTS = 2048
MAX_TEXT = 4 * 2**20

Check = Callable[[Any, str], Any]
"""Takes the value and the parameter's name; returns the checked value or raises `InvalidParameter`."""


@dataclass(frozen=True)
class Parameter:
    """One row of the table."""

    name: str
    routes: tuple[str, ...]  # of "chat", "completions", "embeddings"
    treatment: str  # "honoured", "refused", or "accepted": has no influence on the answer and stays on this machine
    check: Check
    note: str  # values taken, what is done with it, or why it is refused
    where: str = ""  # "gateway" (never leaves this machine) or "server" (is sent)
    neutral: tuple[Any, ...] = ()  # values of a refused parameter that ask for nothing
    token_loop: str = ""  # what differs in the token loop


def _wrong(name: str, should: str) -> InvalidParameter:
    return InvalidParameter(f"{name} must be {should}.", param=name)


def _number(low: float, high: float, *, above: bool = False) -> Check:
    def check(value: Any, name: str) -> float:
        fine = isinstance(value, int | float) and not isinstance(value, bool)  # NaN and infinity fail the comparison
        if not fine or not low <= value <= high or (above and value == low):
            raise _wrong(name, f"a number {'above' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}")
        return float(value)

    return check


def _integer(low: int, high: int) -> Check:
    def check(value: Any, name: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _wrong(
                name, f"a whole number from {low} to {high}" if high < 2**31 else f"a whole number of at least {low}"
            )
        return value

    return check


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "true or false")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a string")
    return value


def _anything(value: Any, name: str) -> Any:
    return value


def _stop(value: Any, name: str) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise _wrong(name, f"a string or a list of at most {MAX_STOPS} non-empty strings")
    if any(len(stop) > 1000 for stop in stops):
        raise _wrong(name, "made of strings of at most 1000 characters")
    return tuple(stops)


def _logit_bias(value: Any, name: str) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > 4096:
        raise _wrong(name, "an object of at most 4096 token ids, each with a number from -100 to 100")
    bias = {}
    for key, amount in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise _wrong(name, "an object whose keys are token ids")
        bias[int(key)] = _number(-100, 100)(amount, name)
    return bias


def _stream_options(value: Any, name: str) -> bool:
    if not isinstance(value, dict):
        raise _wrong(name, "an object")
    include = value.get("include_usage")
    return False if include is None else _flag(include, "stream_options.include_usage")


def _response_format(value: Any, name: str) -> None:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise _wrong(name, 'an object with a "type"')
    if value["type"] != "text":
        raise UnsupportedParameter(
            'response_format can only be {"type": "text"}: the server has no text whose form it could enforce.',
            advice="Ask for the form in the prompt and check it in your application.",
            param=name,
        )


def _messages(value: Any, name: str) -> list[dict[str, Any]]:
    """Roles and texts; neighbouring system messages become one, because many templates take only one."""
    if not isinstance(value, list) or not 1 <= len(value) <= 10_000:
        raise _wrong(name, "a list of at least one message")
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise InvalidParameter(f"{where} must be an object with role and content.", param=where)
        role = message.get("role")
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise InvalidParameter(
                f"{where}.role must be system, developer, user, assistant or tool.", param=f"{where}.role"
            )
        for forbidden in ("tool_calls", "function_call", "audio"):
            if message.get(forbidden):
                raise UnsupportedParameter(f"{where}.{forbidden} is not supported.", param=f"{where}.{forbidden}")
        content = _content(message.get("content"), f"{where}.content")
        role = "system" if role == "developer" else role
        if role == "system" and messages and messages[-1]["role"] == "system":
            messages[-1]["content"] += "\n\n" + content
        else:
            messages.append({"role": role, "content": content})
    if sum(len(message["content"]) for message in messages) > MAX_TEXT:
        raise _wrong(name, f"shorter than {MAX_TEXT} characters together")
    return messages


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidParameter(f"{where} must be a string or a list of text parts.", param=where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise UnsupportedParameter(
                f"{where}[{index}] is of type {str(kind)[:40]!r}; only text is supported.", param=f"{where}[{index}]"
            )
        texts.append(_text(part.get("text"), f"{where}[{index}].text"))
    return "\n".join(texts)


def _prompts(most: int) -> Check:
    """A text, texts, token ids, or lists of token ids: always a list of `str | list[int]` afterwards."""

    def check(value: Any, name: str) -> list[str | list[int]]:
        if isinstance(value, str) or (isinstance(value, list) and value and all(type(item) is int for item in value)):
            value = [value]
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            raise _wrong(name, f"a string, a list of token ids, or a list of at most {most} of these")
        for item in value:
            if isinstance(item, list) and item and all(type(token) is int for token in item):
                continue
            if not isinstance(item, str) or not item:
                raise _wrong(name, "made of non-empty strings or non-empty lists of token ids")
            if len(item) > MAX_TEXT:
                raise _wrong(name, f"made of strings of at most {MAX_TEXT} characters")
        return value

    return check


def _encoding(value: Any, name: str) -> str:
    if value not in ("float", "base64"):
        raise _wrong(name, '"float" or "base64"')
    return str(value)


def _token_ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 1024 or not all(type(item) is int and item >= 0 for item in value):
        raise _wrong(name, "a list of at most 1024 token ids")
    return tuple(value)


_CHAT, _TEXT, _BOTH, _ALL = ("chat",), ("completions",), ("chat", "completions"), ("chat", "completions", "embeddings")
_NO_TOOLS = "The gateway does not parse tool calls."
_ONLY_TEXT = "Only text goes in and out."
_SAME = "logit bias, computed here"


def _honoured(
    name: str, routes: tuple[str, ...], check: Check, where: str, note: str, token_loop: str = ""
) -> Parameter:
    return Parameter(name, routes, "honoured", check, note, where, token_loop=token_loop)


def _refused(name: str, routes: tuple[str, ...], note: str, *neutral: Any) -> Parameter:
    return Parameter(name, routes, "refused", _anything, note, neutral=neutral)


def _accepted(name: str, routes: tuple[str, ...], note: str) -> Parameter:
    return Parameter(name, routes, "accepted", _anything, note)


# fmt: off
TABLE: tuple[Parameter, ...] = (
    _honoured("model", _ALL, _text, "gateway", "A name from /v1/models. May be left out if there is only one."),
    _honoured(
        "messages", _CHAT, _messages, "gateway",
        "Texts, or lists of text parts. The chat template is applied on this machine; developer counts as system, "
        "neighbouring system messages become one.",
    ),
    _honoured(
        "prompt", _TEXT, _prompts(MAX_PROMPTS), "gateway",
        f"A string, token ids of the plain vocabulary, or a list of at most {MAX_PROMPTS} of these.",
    ),
    _honoured(
        "input", ("embeddings",), _prompts(MAX_INPUTS), "gateway",
        f"A string, token ids, or a list of at most {MAX_INPUTS} of these.",
    ),
    _honoured(
        "encoding_format", ("embeddings",), _encoding, "gateway",
        '"float" (default) or "base64": little-endian float32.',
    ),
    _honoured("max_tokens", _BOTH, _integer(1, 2**31), "server", "Default: 16 for completions, what fits for chat."),
    _honoured("max_completion_tokens", _CHAT, _integer(1, 2**31), "server", "The newer name of max_tokens."),
    _honoured("temperature", _BOTH, _number(0, 2), "server", "0 to 2, default 1. 0 takes the most likely token."),
    _honoured("top_p", _BOTH, _number(0, 1, above=True), "server", "Above 0, up to 1."),
    _honoured(
        "seed", _BOTH, _integer(-(2**63), 2**63 - 1), "server",
        "Same seed, same answer on the same server.", "seed + step",
    ),
    _honoured(
        "n", _BOTH, _integer(1, MAX_CHOICES), "gateway",
        f"1 to {MAX_CHOICES}: as many generations, each of which leaves this machine; seeds are derived from seed.",
    ),
    _honoured(
        "stop", _BOTH, _stop, "gateway",
        f"A string or at most {MAX_STOPS}. Found here, also across tokens; the server is then told to stop.",
    ),
    _honoured("presence_penalty", _BOTH, _number(-2, 2), "server", "-2 to 2.", _SAME),
    _honoured("frequency_penalty", _BOTH, _number(-2, 2), "server", "-2 to 2.", _SAME),
    _honoured("logit_bias", _BOTH, _logit_bias, "server", "Plain token ids; they are translated by the key."),
    _honoured("logprobs", _CHAT, _flag, "server", "The alternatives are translated back here."),
    _honoured("top_logprobs", _CHAT, _integer(0, MAX_LOGPROBS), "server", f"0 to {MAX_LOGPROBS}, with logprobs: true."),
    _honoured("logprobs", _TEXT, _integer(0, MAX_LOGPROBS), "server", f"0 to {MAX_LOGPROBS}."),
    _honoured("stream", _BOTH, _flag, "gateway", "Server-sent events, with comments while nothing comes."),
    _honoured("stream_options", _BOTH, _stream_options, "gateway", "include_usage. Only with stream."),
    _honoured("echo", _TEXT, _flag, "gateway", "The prompt's text before the answer. Not together with logprobs."),
    _honoured("top_k", _BOTH, _integer(-1, 2**31), "server", "Extension, as in vLLM. 0 or -1: all."),
    _honoured("min_p", _BOTH, _number(0, 1), "server", "Extension, as in vLLM."),
    _honoured("min_tokens", _BOTH, _integer(0, 2**31), "server", "Extension, as in vLLM.", _SAME),
    _honoured("repetition_penalty", _BOTH, _number(0.01, 100), "server", "Extension, as in vLLM.", "refused, except 1"),
    _honoured("stop_token_ids", _BOTH, _token_ids, "server", "Extension, as in vLLM; plain ids.", "found here"),
    _honoured("ignore_eos", _BOTH, _flag, "server", "Extension, as in vLLM."),
    Parameter(
        "response_format", _CHAT, "refused", _response_format,
        'Except `{"type": "text"}`: the server has no text whose form it could enforce.',
    ),
    _refused("tools", _CHAT, _NO_TOOLS, []),
    _refused("tool_choice", _CHAT, _NO_TOOLS, "none", "auto"),
    _refused("parallel_tool_calls", _CHAT, _NO_TOOLS, True, False),
    _refused("functions", _CHAT, _NO_TOOLS, []),
    _refused("function_call", _CHAT, _NO_TOOLS, "none", "auto"),
    _refused("audio", _CHAT, _ONLY_TEXT),
    _refused("modalities", _CHAT, _ONLY_TEXT, ["text"]),
    _refused("web_search_options", _CHAT, "Nothing else may learn what was asked."),
    _refused("moderation", _CHAT, "Nothing else may learn what was asked."),
    _refused("prediction", _CHAT, "The server's vocabulary is not that of the prediction."),
    _refused("reasoning_effort", _CHAT, "The models here have no such setting."),
    _refused("verbosity", _CHAT, "The models here have no such setting."),
    _refused("store", _CHAT, "Answers are not kept.", False),
    _refused("service_tier", _CHAT, "There is one service.", "auto", "default"),
    _refused("best_of", _TEXT, "Ask for n and choose.", 1),
    _refused("suffix", _TEXT, "The models here do not fill in the middle.", ""),
    _refused("dimensions", ("embeddings",), "A vector is only meaningful whole."),
    _accepted("user", _ALL, "Not sent."),
    _accepted("metadata", _CHAT, "Not sent."),
    _accepted("safety_identifier", _CHAT, "Not sent."),
    _accepted("prompt_cache_key", _CHAT, "Not sent."),
    _accepted("prompt_cache_options", _CHAT, "Not sent."),
    _accepted("prompt_cache_retention", _CHAT, "Not sent."),
)
# fmt: on


@dataclass(frozen=True)
class Parsed:
    """A checked body: only parameters that were given and are honoured, and the names of those that were ignored."""

    values: dict[str, Any]
    ignored: list[str] = field(default_factory=list)

    def get(self, name: str, default: Any = None) -> Any:
        """The checked value, or `default` if it was not given."""
        return self.values.get(name, default)


def parse(route: str, body: Mapping[str, Any]) -> Parsed:
    """Check `body` against the table. `null` counts as not given, as it does for OpenAI."""
    known = {parameter.name: parameter for parameter in TABLE if route in parameter.routes}
    parsed = Parsed({})
    for name, value in body.items():
        if value is None:
            continue
        parameter = known.get(name)
        if parameter is None:
            parsed.ignored.append(name)
        elif parameter.treatment == "refused":
            _refuse(parameter, value)
        elif parameter.treatment == "honoured":
            parsed.values[name] = parameter.check(value, name)
    if parsed.ignored:
        log.warning("ignored unknown parameters: %s", ", ".join(_plain(name) for name in parsed.ignored[:20]))
    _check_together(route, parsed.values)
    return parsed


def _refuse(parameter: Parameter, value: Any) -> None:
    if parameter.check is not _anything:
        parameter.check(value, parameter.name)
    elif value not in parameter.neutral:
        raise UnsupportedParameter(
            f"{parameter.name} is not supported. {parameter.note}",
            advice="Leave it out. docs/parameters.md lists what is honoured.",
            param=parameter.name,
        )


def _check_together(route: str, values: dict[str, Any]) -> None:
    required = {"chat": "messages", "completions": "prompt", "embeddings": "input"}[route]
    if required not in values:
        raise InvalidParameter(f"{required} is missing.", param=required)
    if "stream_options" in values and not values.get("stream"):
        raise InvalidParameter("stream_options is only possible with stream: true.", param="stream_options")
    if "top_logprobs" in values and not values.get("logprobs"):
        raise InvalidParameter("top_logprobs is only possible with logprobs: true.", param="top_logprobs")
    if values.get("echo") and "logprobs" in values:
        raise UnsupportedParameter("echo is not possible together with logprobs.", param="echo")
    if len({values[name] for name in ("max_tokens", "max_completion_tokens") if name in values}) > 1:
        raise InvalidParameter("max_tokens and max_completion_tokens differ.", param="max_completion_tokens")
    if values.get("min_tokens", 0) > values.get("max_completion_tokens", values.get("max_tokens", 2**31)):
        raise InvalidParameter("min_tokens is larger than max_tokens.", param="min_tokens")


def _plain(name: str) -> str:
    return name[:60].encode("unicode_escape").decode()


def document() -> str:
    """docs/parameters.md."""
    lines = [
        "# Parameters of the gateway",
        "",
        "<!-- Written by `python -m cloister.serving.gateway.params`; a test keeps it in step with the code. -->",
        "",
        "Every parameter of the OpenAI API that would change an answer is **honoured** or **refused** with a 400 that",
        "names it. **Accepted** ones have no influence on an answer and stay on this machine. A parameter that is not",
        "listed is ignored; its name is logged and returned in the header `x-cloister-ignored`.",
        "",
        "*Where* says what the server gets to know: `gateway` means that the parameter never leaves this machine,",
        "`server` that it is sent. *Loop token* says what differs when the model was protected with `--loop token`.",
    ]
    titles = {
        "chat": "POST /v1/chat/completions",
        "completions": "POST /v1/completions",
        "embeddings": "POST /v1/embeddings",
    }
    for route, title in titles.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| parameter | mode permute | where | values and notes | loop token |",
            "|---|---|---|---|---|",
        ]
        for parameter in TABLE:
            if route in parameter.routes:
                neutral = ", ".join(f"`{_json(value)}`" for value in parameter.neutral)
                note = parameter.note + (f" Taken: {neutral}." if neutral else "")
                cells = (f"`{parameter.name}`", parameter.treatment, parameter.where, note, parameter.token_loop)
                lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def _json(value: Any) -> str:
    import json

    return json.dumps(value)


if __name__ == "__main__":
    print(document(), end="")
