"""The routes of a running server, over a real socket."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from typing import Any

import httpx
import numpy as np
import pytest

from cloister.serving.wire import decode_tensor, encode_tensor


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(client: httpx.Client, **body: Any) -> list[Any]:
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def metric(client: httpx.Client, name: str) -> float:
    line = next(line for line in client.get("/metrics").text.splitlines() if line.startswith(name))
    return float(line.rsplit(" ", 1)[1])


def test_greedy_answer_is_that_of_transformers(client: httpx.Client, greedy: Any) -> None:
    answer = complete(client, prompt=[5, 6, 7], max_tokens=20, temperature=0)
    choice = answer["choices"][0]
    assert choice["token_ids"] == greedy([5, 6, 7], 20)
    assert choice["text"] == "" and choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23}
    assert "cloister" not in answer


def test_embeddings_in_token_ids_out(client: httpx.Client, plain: Any, greedy: Any) -> None:
    rows = plain.get_input_embeddings().weight[[5, 6, 7]].detach().numpy()
    answer = complete(client, prompt_embeds=encode_tensor(rows), max_tokens=8, temperature=0)
    assert answer["choices"][0]["token_ids"] == greedy([5, 6, 7], 8)


def test_stream_has_the_same_tokens_and_ends_as_documented(client: httpx.Client, greedy: Any) -> None:
    wish = {"prompt": [9, 10], "max_tokens": 15, "temperature": 0}
    *chunks, done = events(client, **wish)
    assert done == "[DONE]"
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == greedy([9, 10], 15)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    *chunks, usage, done = events(client, **wish, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 15


def test_log_probabilities_have_names_by_token_id(client: httpx.Client) -> None:
    choice = complete(client, prompt=[5], max_tokens=3, temperature=0, logprobs=4)["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    for name, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert len(top) == 4 and top[name] == value == max(top.values())


def test_sixteen_mixed_requests_at_once(server: Any, plain: Any, greedy: Any) -> None:
    table = plain.get_input_embeddings().weight.detach().numpy()

    async def ask(client: httpx.AsyncClient, at: int) -> list[int]:
        ids, count = list(range(1 + at, 2 + at + at % 5 * 7)), 5 + at
        body: dict[str, Any] = {"max_tokens": count, "temperature": 0}
        body |= {"prompt_embeds": encode_tensor(table[ids])} if at % 3 == 0 else {"prompt": ids}
        if at % 2:
            return (await client.post("/v1/completions", json=body)).json()["choices"][0]["token_ids"]
        made: list[int] = []
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    made += json.loads(line[6:])["choices"][0]["token_ids"]
        return made

    async def all_at_once() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=str(server), timeout=120) as client:
            return await asyncio.gather(*(ask(client, at) for at in range(16)))

    answers = asyncio.run(all_at_once())
    assert answers == [greedy(list(range(1 + at, 2 + at + at % 5 * 7)), 5 + at) for at in range(16)]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(server: Any, client: httpx.Client, stream: bool) -> None:
    before = metric(client, 'cloister_tokens_total{kind="answer"') if stream else 0
    body = {"prompt": [5], "max_tokens": 120, "temperature": 0, "stream": stream, "ignore_eos": True}
    for _ in range(8):  # more than there are places
        with httpx.Client(base_url=str(server), timeout=httpx.Timeout(60, read=60 if stream else 0.01)) as leaving:
            if stream:
                with leaving.stream("POST", "/v1/completions", json=body) as response:
                    next(response.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    leaving.post("/v1/completions", json=body)
    deadline = time.monotonic() + 60
    while metric(client, "cloister_running") + metric(client, "cloister_waiting") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert metric(client, "cloister_running") == 0
    if stream:
        assert metric(client, 'cloister_tokens_total{kind="answer"') - before < 8 * 120


def test_session_over_http(client: httpx.Client, plain: Any, greedy: Any) -> None:
    table = plain.get_input_embeddings().weight.detach().numpy()
    answer: list[int] = []
    inputs, session = [5, 6, 7, 8], "new"
    for _ in range(6):
        body = {"prompt_embeds": encode_tensor(table[inputs]), "max_tokens": 1, "temperature": 0}
        reply = complete(client, **body, cloister={"session": session})
        answer += reply["choices"][0]["token_ids"]
        inputs, session = answer[-1:], reply["cloister"]["session"]
    assert answer == greedy([5, 6, 7, 8], 6)
    assert complete(client, cloister={"session": session, "close": True})["cloister"]["closed"] is True
    gone = client.post("/v1/completions", json={"prompt": [1], "cloister": {"session": session}})
    assert gone.status_code == 404 and gone.json()["error"]["param"] == "cloister.session"
    assert metric(client, "cloister_sessions") == 0


def test_models_say_what_they_are(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    (about,) = listed["data"]
    assert listed["object"] == "list" and about["object"] == "model" and about["max_model_len"] == 128
    assert about["cloister"] is None  # a plain checkpoint
    assert client.get(f"/v1/models/{about['id']}").json() == about
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/version").json()["server"] == "cloister"


def test_forward_gives_the_logits_of_every_position(client: httpx.Client, plain: Any) -> None:
    import torch

    expected = plain(torch.tensor([[5, 6, 7]])).logits[0].detach().numpy()
    rows = plain.get_input_embeddings().weight[[5, 6, 7]].detach().numpy()
    for body in ({"prompt": [5, 6, 7]}, {"prompt_embeds": encode_tensor(rows)}):
        answer = client.post("/cloister/v1/forward", json=body).json()
        assert answer["kind"] == "logits"
        np.testing.assert_allclose(
            decode_tensor(answer["output"], expected_columns=101, max_rows=3), expected, atol=1e-5
        )


NAN = np.full((2, 32), np.nan, np.float32)
BAD_BODIES: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("not json", {"raw": b"{"}, 400, None),
    ("not an object", {"raw": b"[1]"}, 400, None),
    ("NaN in json", {"raw": b'{"prompt":[1],"temperature":NaN}'}, 400, None),
    ("deep json", {"raw": b"[" * 200_000}, 400, None),
    ("no prompt", {}, 400, "prompt"),
    ("text", {"prompt": "hello"}, 400, "prompt"),
    ("ids that are not numbers", {"prompt": [1, "2"]}, 400, "prompt"),
    ("id outside", {"prompt": [101]}, 400, "prompt"),
    ("negative id", {"prompt": [-1]}, 400, "prompt"),
    ("too long", {"prompt": [1] * 200}, 413, "prompt"),
    ("both", {"prompt": [1], "prompt_embeds": "AAAA"}, 400, "prompt_embeds"),
    ("base64 junk", {"prompt_embeds": "!!"}, 400, "prompt_embeds"),
    ("NaN tensor", {"prompt_embeds": encode_tensor(NAN)}, 400, "prompt_embeds"),
    ("wrong size", {"prompt_embeds": encode_tensor(np.ones((2, 31), np.float32))}, 400, "prompt_embeds"),
    ("too many rows", {"prompt_embeds": encode_tensor(np.ones((129, 32), np.float32))}, 413, "prompt_embeds"),
    ("tensor is a number", {"prompt_embeds": 3}, 400, "prompt_embeds"),
    ("zero tokens", {"prompt": [1], "max_tokens": 0}, 400, "max_tokens"),
    ("too many tokens", {"prompt": [1], "max_tokens": 1000}, 400, "max_tokens"),
    ("fraction", {"prompt": [1], "max_tokens": 1.5}, 400, "max_tokens"),
    ("boolean", {"prompt": [1], "max_tokens": True}, 400, "max_tokens"),
    ("temperature", {"prompt": [1], "temperature": -1}, 400, "temperature"),
    ("top_p", {"prompt": [1], "top_p": 0}, 400, "top_p"),
    ("logprobs", {"prompt": [1], "logprobs": 21}, 400, "logprobs"),
    ("logit_bias", {"prompt": [1], "logit_bias": {"x": 1}}, 400, "logit_bias"),
    ("logit_bias value", {"prompt": [1], "logit_bias": {"1": "2"}}, 400, "logit_bias"),
    ("n", {"prompt": [1], "n": 2}, 400, "n"),
    ("stop strings", {"prompt": [1], "stop": ["x"]}, 400, "stop"),
    ("echo", {"prompt": [1], "echo": True}, 400, "echo"),
    ("unknown model", {"prompt": [1], "model": "other"}, 404, "model"),
    ("model is a list", {"prompt": [1], "model": []}, 400, "model"),
    ("session type", {"prompt": [1], "cloister": {"session": 5}}, 400, "session"),
    ("unknown session", {"prompt": [1], "cloister": {"session": "guess"}}, 404, "cloister.session"),
]


@pytest.mark.parametrize(
    ("body", "status", "param"), [case[1:] for case in BAD_BODIES], ids=[case[0] for case in BAD_BODIES]
)
def test_bad_bodies(client: httpx.Client, body: dict[str, Any], status: int, param: str | None) -> None:
    response = client.post("/v1/completions", content=body["raw"] if "raw" in body else json.dumps(body))
    assert_error(response, status)
    assert response.json()["error"]["param"] == param


def assert_error(response: httpx.Response, status: int) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["code"] and error["type"]
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/chat/completions", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("POST", "/v1/completions", 400),
        ("POST", "/v1/embeddings", 400),
        ("POST", "/cloister/v1/forward", 400),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/cloister/v1/attestation", 400),
        ("GET", "/cloister/v1/attestation?nonce=zz", 400),
        ("GET", "/cloister/v1/attestation?nonce=" + "00" * 16, 404),
    ],
)
def test_every_route_has_one_error_shape(client: httpx.Client, method: str, path: str, status: int) -> None:
    assert_error(client.request(method, path), status)


def test_embeddings_of_a_language_model_are_refused(client: httpx.Client) -> None:
    response = client.post("/v1/embeddings", json={"input": [[1, 2]]})
    assert_error(response, 400)
    assert response.json()["error"]["code"] == "unsupported_parameter"


def test_request_ids_are_returned_and_logged_but_prompts_are_not(server: Any, client: httpx.Client) -> None:
    secret = [77, 78, 79, 77]
    response = client.post(
        "/v1/completions?prompt=77,78,79", json={"prompt": secret, "max_tokens": 2}, headers={"x-request-id": "mine-1"}
    )
    assert response.headers["x-request-id"] == "mine-1"
    odd = client.get("/health", headers={"x-request-id": "a b\tc"})
    assert odd.headers["x-request-id"].startswith("req-")
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == "mine-1"]
    assert line["message"] == "POST /v1/completions 200" and "milliseconds" in line
    messages = json.dumps([line["message"] for line in lines])
    assert not re.search(r"(?<!\d)77(?!\d)", messages)  # a port such as 39977 is no prompt


def test_the_openai_client_works(server: Any, greedy: Any) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        name = client.models.list().data[0].id
        made = client.completions.create(model=name, prompt=[5, 6, 7], max_tokens=6, temperature=0)
        assert made.choices[0].model_extra["token_ids"] == greedy([5, 6, 7], 6)
        stream = client.completions.create(model=name, prompt=[5, 6, 7], max_tokens=6, temperature=0, stream=True)
        assert [token for chunk in stream for token in chunk.choices[0].model_extra["token_ids"]] == greedy(
            [5, 6, 7], 6
        )
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=name, prompt="text")
        assert caught.value.code == "unsupported_parameter" and caught.value.param == "prompt"


def test_stored_tensor_of_torch_is_read(client: httpx.Client, plain: Any, greedy: Any) -> None:
    import io

    import torch

    buffer = io.BytesIO()
    torch.save(plain.get_input_embeddings()(torch.tensor([5, 6, 7])).detach(), buffer)
    text = base64.b64encode(buffer.getvalue()).decode()
    answer = complete(client, prompt="", prompt_embeds=text, max_tokens=5, temperature=0)
    assert answer["choices"][0]["token_ids"] == greedy([5, 6, 7], 5)
