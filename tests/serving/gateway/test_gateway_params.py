"""Every parameter is honoured or refused by name; the documented table is the table in the code."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.resources.chat.completions import Completions as Chat
from openai.resources.completions import Completions
from openai.resources.embeddings import Embeddings
from parties import Gateway, StandIn

from cloister.errors import UsageError
from cloister.serving.gateway import params

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
OF_THE_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


@pytest.mark.parametrize(
    ("route", "method"), [("chat", Chat.create), ("completions", Completions.create), ("embeddings", Embeddings.create)]
)
def test_the_table_knows_every_parameter_of_the_stock_client(route: str, method: Any) -> None:
    offered = set(inspect.signature(method).parameters) - OF_THE_CLIENT
    known = {parameter.name for parameter in params.TABLE if route in parameter.routes}
    assert offered <= known


def test_the_documented_table_is_the_one_in_the_code() -> None:
    page = Path(__file__).parents[3] / "docs" / "parameters.md"
    assert page.read_text() == params.document(), "run `python -m cloister.serving.gateway.params > docs/parameters.md`"


REFUSED = [
    (route, parameter.name)
    for parameter in params.TABLE
    if parameter.treatment == "refused" and parameter.name != "response_format"
    for route in parameter.routes
]
NEEDED: dict[str, dict[str, Any]] = {"chat": CHAT, "completions": {"prompt": "x"}, "embeddings": {"input": "x"}}


@pytest.mark.parametrize(("route", "name"), REFUSED)
def test_a_refused_parameter_is_named(route: str, name: str) -> None:
    with pytest.raises(UsageError) as error:
        params.parse(route, NEEDED[route] | {name: {"some": "wish"}})
    assert error.value.param == name and name in error.value.message and error.value.status == 400
    neutral = next(p.neutral for p in params.TABLE if p.name == name)
    for value in (None, *neutral):
        assert name not in params.parse(route, NEEDED[route] | {name: value}).values


WRONG: list[tuple[str, str, Any]] = [
    ("chat", "messages", []),
    ("chat", "messages", "hello"),
    ("chat", "max_tokens", 0),
    ("chat", "max_tokens", -1),
    ("chat", "max_tokens", 1.5),
    ("chat", "max_tokens", True),
    ("chat", "max_completion_tokens", 0),
    ("chat", "temperature", -0.1),
    ("chat", "temperature", 2.1),
    ("chat", "temperature", "hot"),
    ("chat", "temperature", float("nan")),
    ("chat", "top_p", 0),
    ("chat", "top_p", 1.1),
    ("chat", "n", 0),
    ("chat", "n", 1000),
    ("chat", "seed", 1.5),
    ("chat", "stop", ""),
    ("chat", "stop", ["x"] * 17),
    ("chat", "stop", [1]),
    ("chat", "presence_penalty", 3),
    ("chat", "frequency_penalty", -3),
    ("chat", "logit_bias", {"x": 1}),
    ("chat", "logit_bias", {"1": 101}),
    ("chat", "logit_bias", [1]),
    ("chat", "logprobs", 5),
    ("chat", "top_logprobs", 21),
    ("chat", "top_logprobs", 5),  # without logprobs
    ("chat", "stream", "yes"),
    ("chat", "stream_options", {"include_usage": True}),  # without stream
    ("chat", "response_format", {"type": "json_object"}),
    ("chat", "response_format", "text"),
    ("chat", "stop_token_ids", [-1]),
    ("completions", "prompt", []),
    ("completions", "prompt", ""),
    ("completions", "prompt", [[1], [2.5]]),
    ("completions", "prompt", ["x"] * 65),
    ("completions", "logprobs", 21),
    ("completions", "logprobs", True),
    ("completions", "echo", 1),
    ("completions", "best_of", 3),
    ("completions", "suffix", "."),
    ("embeddings", "input", {}),
    ("embeddings", "input", [""]),
    ("embeddings", "encoding_format", "hex"),
    ("embeddings", "dimensions", 8),
]


@pytest.mark.parametrize(("route", "name", "value"), WRONG)
def test_a_wrong_value_is_refused_by_name(route: str, name: str, value: Any) -> None:
    with pytest.raises(UsageError) as error:
        params.parse(route, NEEDED[route] | {name: value})
    assert error.value.param == name and error.value.status == 400


MESSAGES: list[tuple[Any, str]] = [
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls"),
    (["x"], "messages[0]"),
]


@pytest.mark.parametrize(("messages", "param"), MESSAGES)
def test_a_wrong_message_is_named_with_its_place(messages: Any, param: str) -> None:
    with pytest.raises(UsageError) as error:
        params.parse("chat", {"messages": messages})
    assert error.value.param == param


def test_unknown_parameters_are_ignored_and_said_so(
    pair: tuple[Gateway, StandIn], caplog: pytest.LogCaptureFixture
) -> None:
    gateway, standin = pair
    response = httpx.post(
        f"{gateway.url}/v1/chat/completions", json=CHAT | {"frobnicate": "secret words", "max_tokens": 2}
    )
    assert response.status_code == 200 and response.headers["x-cloister-ignored"] == "frobnicate"
    assert "frobnicate" not in standin.seen()[0]
    params.parse("chat", CHAT | {"frobnicate": "secret words"})
    assert "frobnicate" in caplog.text and "secret words" not in caplog.text


ERRORS: list[tuple[str, str, dict[str, Any], int]] = [
    ("GET", "/nothing", {}, 404),
    ("GET", "/v1/chat/completions", {}, 405),
    ("DELETE", "/v1/models", {}, 405),
    ("POST", "/v1/chat/completions", {"json": {}}, 400),
    ("POST", "/v1/chat/completions", {"json": [1]}, 400),
    ("POST", "/v1/chat/completions", {"content": b"{", "headers": {"content-type": "application/json"}}, 400),
    ("POST", "/v1/chat/completions", {"content": b"\xff", "headers": {"content-type": "application/json"}}, 400),
    ("POST", "/v1/chat/completions", {"content": b"{}", "headers": {"content-type": "text/plain"}}, 415),
    ("POST", "/v1/chat/completions", {"json": CHAT | {"model": "gpt-4"}}, 404),
    ("POST", "/v1/chat/completions", {"json": CHAT | {"max_tokens": 100000}}, 400),
    ("POST", "/v1/responses", {"json": {"input": "x"}}, 404),
    ("POST", "/chat/completions", {"json": CHAT}, 404),
    ("GET", "/v1/models/nothing", {}, 404),
]


@pytest.mark.parametrize(("method", "path", "options", "status"), ERRORS)
def test_every_error_has_the_one_shape(
    pair: tuple[Gateway, StandIn], method: str, path: str, options: dict[str, Any], status: int
) -> None:
    gateway, standin = pair
    response = httpx.request(method, gateway.url + path, **options)
    assert response.status_code == status
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-should-retry"] == "false" and response.headers["x-request-id"]
    assert not standin.seen()


def test_a_body_that_is_too_large_is_refused(pair: tuple[Gateway, StandIn]) -> None:
    gateway, _ = pair
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{gateway.url}/v1/completions", content=b" " * (33 * 2**20), headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "too_large")


def test_errors_that_say_where_to_go(pair: tuple[Gateway, StandIn]) -> None:
    gateway, _ = pair
    with (
        openai.OpenAI(base_url=gateway.url, api_key="x") as client,
        pytest.raises(openai.NotFoundError, match=f"{gateway.url}/v1"),
    ):
        client.chat.completions.create(model="tiny", messages=CHAT["messages"])
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        gateway.client().responses.create(model="tiny", input="x")
    with pytest.raises(openai.BadRequestError) as error:
        gateway.client().chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 300}])
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError, match="no tools here"):
        gateway.client().chat.completions.create(
            model="tiny", messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}]
        )


def test_health_version_and_metrics(pair: tuple[Gateway, StandIn]) -> None:
    gateway, _ = pair
    assert httpx.get(f"{gateway.url}/health").json() == {"status": "ok"}
    assert set(httpx.get(f"{gateway.url}/version").json()) == {"version"}
    gateway.client().completions.create(model="tiny", prompt="secret", temperature=0, max_tokens=3)
    metrics = httpx.get(f"{gateway.url}/metrics").text
    assert 'cloister_gateway_requests_total{path="/v1/completions",status="200"}' in metrics
    assert "secret" not in metrics
