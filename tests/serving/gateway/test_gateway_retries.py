"""The retry contract, with the stock client: what went wrong is told once, and nothing is sent twice."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from client_dirs import listing, write_client
from parties import REPLY, Gateway, StandIn, until

ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}


def test_a_client_that_times_out_and_retries_joins_its_own_request(pair: tuple[Gateway, StandIn]) -> None:
    gateway, standin = pair
    standin.set(first_delay=3.0)
    client = gateway.client(timeout=1.0, max_retries=5)
    answer = client.chat.completions.create(**ASK | {"temperature": 1, "seed": None})
    assert answer.usage is not None and answer.usage.completion_tokens == len(REPLY.encode()) + 1
    assert len(standin.seen()) == 1
    (entry,) = gateway.ledger("completion")
    assert entry["note"] == ""
    joined = gateway.ledger("joined")
    assert joined and all("joined a running request" in item["note"] and not item["bytes_sent"] for item in joined)


def test_a_retry_that_comes_after_the_end_gets_the_same_answer(pair: tuple[Gateway, StandIn]) -> None:
    gateway, standin = pair
    body = json.dumps(ASK | {"temperature": 1})
    headers = {"content-type": "application/json"}
    url = f"{gateway.url}/v1/chat/completions"
    first = httpx.post(url, content=body, headers=headers).json()
    again = httpx.post(url, content=body, headers=headers | {"x-stainless-retry-count": "1"}).json()
    assert again["choices"] == first["choices"] and len(standin.seen()) == 1


def test_two_users_with_the_same_question_get_two_samples(pair: tuple[Gateway, StandIn]) -> None:
    gateway, standin = pair
    standin.set(first_delay=0.5)

    def ask(_: int) -> str:
        answer = gateway.client().chat.completions.create(**ASK | {"temperature": 1})
        return str(answer.choices[0].message.content)

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(ask, range(2))
    assert one != two and len(standin.seen()) == 2


def test_determined_requests_share_one_computation(pair: tuple[Gateway, StandIn]) -> None:
    gateway, standin = pair
    standin.set(first_delay=1.0)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: gateway.client().chat.completions.create(**ASK), range(3)))
    assert {answer.choices[0].message.content for answer in answers} == {REPLY}
    assert len(standin.seen()) == 1 and len(gateway.ledger("joined")) == 2


def test_a_disconnect_without_a_retry_cancels_on_the_server(pair: tuple[Gateway, StandIn]) -> None:
    gateway, standin = pair
    standin.set(delay=0.5)
    with pytest.raises(openai.APITimeoutError):
        gateway.client(timeout=0.7, max_retries=0).chat.completions.create(**ASK)
    until(lambda: standin.seen("cancelled"))
    (entry,) = gateway.ledger("completion")
    assert entry["note"] == "cancelled"


def test_leaving_a_stream_cancels_at_once(pair: tuple[Gateway, StandIn]) -> None:
    gateway, standin = pair
    standin.set(delay=0.05)
    with gateway.client().chat.completions.create(**ASK, stream=True) as stream:
        for chunk in stream:
            if chunk.choices[0].delta.content:
                break
    until(lambda: standin.seen("cancelled"))
    until(lambda: gateway.ledger("completion")[0]["note"] == "cancelled")


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (500, None, openai.InternalServerError),
        (503, "too_busy", openai.InternalServerError),
        (401, "invalid_api_key", openai.AuthenticationError),
        (409, "wrong_key", openai.ConflictError),
        (429, None, openai.InternalServerError),
    ],
)
def test_a_server_that_refuses_is_asked_once(
    pair: tuple[Gateway, StandIn], status: int, code: str | None, expected: type[openai.APIStatusError]
) -> None:
    gateway, standin = pair
    standin.set(status=status, code=code, message="the server's own words")
    for stream in (False, True):
        with pytest.raises(expected) as error:
            gateway.client().chat.completions.create(**ASK, stream=stream)
        assert "the server's own words" in error.value.message
        assert error.value.response.headers["x-should-retry"] == "false"
        assert "retry-after" not in error.value.response.headers
        standin.set(message="the server's own words, again")
    assert len(standin.seen()) == len(gateway.ledger("completion")) == 2


def test_a_server_that_dies_in_the_middle_of_an_answer(
    tiny_client: Path, tiny_order: Any, start_standin: Callable[..., StandIn], start_gateway: Callable[..., Gateway]
) -> None:
    standin = start_standin(tiny_order, die_after=4, delay=0.05)
    gateway = start_gateway(tiny_client, standin.url)
    text = ""
    with pytest.raises(openai.APIError) as error:
        for chunk in gateway.client().chat.completions.create(**ASK, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == "Hell" and error.value.code == "peer_died"
    (entry,) = gateway.ledger("completion")
    assert entry["note"] == "failed: peer_died" and entry["bytes_received"] > 0
    # Now nobody answers: nothing leaves, the client may and does try again, and says so in the end.
    with pytest.raises(openai.InternalServerError) as down:
        gateway.client().chat.completions.create(**ASK)
    assert down.value.status_code == 503 and down.value.code == "peer_unreachable"
    assert down.value.response.headers["retry-after"] == "1"
    assert not [e for e in gateway.ledger() if e["started"] > entry["started"] and e["bytes_sent"]]
    # And it works again once the server is back, without restarting the gateway.
    back = start_standin(tiny_order, port=standin.port)
    assert gateway.client().chat.completions.create(**ASK).choices[0].message.content == REPLY
    assert len(back.seen("models")) == 1  # who came back was asked for its key before anything was sent


def test_the_stock_client_waits_for_a_server_that_comes_back(
    tiny_client: Path, tiny_order: Any, start_standin: Callable[..., StandIn], start_gateway: Callable[..., Gateway]
) -> None:
    standin = start_standin(tiny_order)
    gateway = start_gateway(tiny_client, standin.url)
    standin.stop()
    timer = threading.Timer(0.5, lambda: start_standin(tiny_order, port=standin.port))
    timer.start()
    answer = gateway.client(max_retries=20).chat.completions.create(**ASK)
    timer.join()
    assert answer.choices[0].message.content == REPLY
    assert len([entry for entry in gateway.ledger("completion") if entry["bytes_sent"]]) == 1


@pytest.mark.parametrize("fault", ["cut_after", "error_after"])
def test_a_stream_that_ends_too_early_is_an_error_not_a_short_answer(pair: tuple[Gateway, StandIn], fault: str) -> None:
    gateway, standin = pair
    standin.set(**{fault: 3})
    with pytest.raises(openai.APIError):
        list(gateway.client().chat.completions.create(**ASK, stream=True))
    with pytest.raises(openai.InternalServerError):
        gateway.client().chat.completions.create(**ASK | {"user": "another"})
    assert len(standin.seen()) == 2


def test_an_error_in_a_stream_has_the_one_shape_and_no_done(pair: tuple[Gateway, StandIn]) -> None:
    gateway, standin = pair
    standin.set(error_after=2)
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=ASK | {"stream": True}) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data:")]
    error = json.loads(lines[-1][5:])["error"]
    assert set(error) == {"message", "type", "param", "code"} and "out of memory" in error["message"]
    assert "data: [DONE]" not in lines


def test_a_silent_server_is_bridged_with_comments(pair: tuple[Gateway, StandIn]) -> None:
    gateway, standin = pair
    standin.set(first_delay=1.8)
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=ASK | {"stream": True}) as response:
        lines = list(response.iter_lines())
    assert sum(line.startswith(": working") for line in lines) >= 2
    assert "data: [DONE]" in lines


def test_a_hanging_server_does_not_hold_a_client_that_leaves(pair: tuple[Gateway, StandIn]) -> None:
    gateway, standin = pair
    standin.set(hang_after=2)
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=ASK | {"stream": True}) as response:
        next(response.iter_lines())
    until(lambda: standin.seen("cancelled"))
    assert httpx.get(f"{gateway.url}/metrics").text.count("cloister_gateway_running 0") == 1


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"models": listing("another-key")}, "does not serve the key"),
        ({"models": listing(format=2)}, "format version 2"),
        ({"models": []}, "does not serve the key"),
    ],
)
def test_a_gateway_does_not_start_with_the_wrong_server(
    tiny_client: Path, tiny_order: Any, start_standin: Callable[..., StandIn],
    start_gateway: Callable[..., Gateway], fault: dict[str, Any], told: str,
) -> None:  # fmt: skip
    standin = start_standin(tiny_order, **fault)
    with pytest.raises(AssertionError, match=told):
        start_gateway(tiny_client, standin.url)
    lazy = start_gateway(tiny_client, standin.url, "--lazy")
    with pytest.raises(openai.APIStatusError, match=told) as error:
        lazy.client().chat.completions.create(**ASK)
    assert error.value.response.headers["x-should-retry"] == "false"
    assert not standin.seen()  # nothing of the prompt was sent


def test_an_expired_key_is_refused_before_anything_is_sent(
    tmp_path: Path, start_standin: Callable[..., StandIn], start_gateway: Callable[..., Gateway]
) -> None:
    order = write_client(tmp_path / "client", not_after="2020-01-01T00:00:00+00:00")
    standin = start_standin(order)
    gateway = start_gateway(tmp_path / "client", standin.url, "--lazy")
    with pytest.raises(openai.PermissionDeniedError, match="expired") as error:
        gateway.client().chat.completions.create(**ASK)
    assert error.value.code == "expired_key" and not standin.seen() and not standin.seen("models")


def test_a_gateway_that_cannot_reach_its_server_says_so_at_once(
    tiny_client: Path, start_gateway: Callable[..., Gateway]
) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match="Nobody answers"):
        start_gateway(tiny_client, "http://127.0.0.1:9")
    assert time.monotonic() - began < 100
