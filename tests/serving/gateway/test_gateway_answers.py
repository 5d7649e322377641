"""What the stock client gets: answers, streams, samples, log probabilities; gateway and server as real processes."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from client_dirs import SPECIALS, listing, write_client
from parties import REPLY, Gateway, StandIn, until

HELLO = [{"role": "user", "content": "Hi"}]


def test_a_chat_answer_has_every_field(pair: tuple[Gateway, StandIn]) -> None:
    gateway, standin = pair
    response = httpx.post(f"{gateway.url}/v1/chat/completions", json={"model": "tiny", "messages": HELLO})
    answer = response.json()
    assert answer.pop("id").startswith("chatcmpl-") and isinstance(answer.pop("created"), int)
    reply_tokens = len(REPLY.encode()) + 1
    prompt_tokens = 1 + 2 + 1  # <|user|>, two bytes, <|assistant|>
    assert standin.seen()[0]["temperature"] == 1.0
    text = answer["choices"][0]["message"].pop("content")
    assert len(text) > 10  # a sample, because the default temperature is 1
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": reply_tokens,
            "total_tokens": prompt_tokens + reply_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "system_fingerprint": None,
    }
    assert response.headers["x-request-id"]


def test_the_prompt_is_the_rendered_template_under_the_key(
    pair: tuple[Gateway, StandIn], codec_ids: Callable[[str], list[int]], tiny_order: np.ndarray
) -> None:
    gateway, standin = pair
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Grüße"}, {"type": "text", "text": "😀"}]},
    ]
    gateway.client().chat.completions.create(model="tiny", messages=messages, temperature=0)
    text = "<|system|>Be brief.\n\nBe kind.<|user|>Grüße\n😀<|assistant|>"
    expected = [int(tiny_order[token]) for token in codec_ids(text)]
    body = standin.seen()[0]
    assert body["prompt"] == expected
    assert not {"messages", "stop", "user", "n"} & set(body)
    assert b"Gr" not in json.dumps(body).encode()


def test_a_stream_has_the_chunks_in_order(pair: tuple[Gateway, StandIn]) -> None:
    gateway, _ = pair
    body = {
        "model": "tiny",
        "messages": HELLO,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        lines = [line for line in response.iter_lines() if line.startswith("data:")]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line[5:]) for line in lines]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    *content, closing, usage = chunks[1:]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in content) == REPLY
    assert all(chunk["choices"][0]["finish_reason"] is None and chunk["usage"] is None for chunk in content)
    assert closing["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(REPLY.encode()) + 1


def test_without_include_usage_no_chunk_has_usage(pair: tuple[Gateway, StandIn]) -> None:
    gateway, _ = pair
    chunks = list(gateway.client().chat.completions.create(model="tiny", messages=HELLO, temperature=0, stream=True))
    assert all("usage" not in chunk.model_dump(exclude_unset=True) for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)


def test_characters_that_span_tokens_come_whole(pair: tuple[Gateway, StandIn]) -> None:
    gateway, _ = pair
    stream = gateway.client().completions.create(model="tiny", prompt="x", temperature=0, max_tokens=99, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == REPLY
    assert not any("\ufffd" in piece for piece in pieces) and "😀" in pieces


def test_the_asynchronous_client(pair: tuple[Gateway, StandIn]) -> None:
    gateway, _ = pair

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="local") as client:
            stream = await client.chat.completions.create(model="tiny", messages=HELLO, temperature=0, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == REPLY


@pytest.mark.parametrize("stop", ["END", ["nothing", " END of"], "wörld", "😀"])
def test_a_stop_string_ends_the_answer_and_the_server_s_work(
    pair: tuple[Gateway, StandIn], stop: str | list[str]
) -> None:
    gateway, standin = pair
    standin.set(delay=0.01)
    answer = gateway.client().completions.create(model="tiny", prompt="x", temperature=0, max_tokens=99, stop=stop)
    found = next(s for s in ([stop] if isinstance(stop, str) else stop) if s in REPLY)
    assert answer.choices[0].text == REPLY[: REPLY.index(found)]
    assert answer.choices[0].finish_reason == "stop"
    until(lambda: standin.seen("cancelled"))
    assert not standin.seen("finished")


def test_length_ends_an_answer_and_is_counted(pair: tuple[Gateway, StandIn]) -> None:
    gateway, _ = pair
    answer = gateway.client().chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_completion_tokens=5
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hello", "length")
    assert answer.usage is not None and answer.usage.completion_tokens == 5


def test_n_gives_different_samples_and_a_seed_gives_them_again(pair: tuple[Gateway, StandIn]) -> None:
    gateway, standin = pair
    client = gateway.client()

    def ask(n: int, seed: int) -> list[str | None]:
        made = client.chat.completions.create(model="tiny", messages=HELLO, temperature=1, seed=seed, n=n)
        assert [choice.index for choice in made.choices] == list(range(n))
        return [choice.message.content for choice in made.choices]

    first = ask(3, 5)
    assert len(set(first)) == 3
    assert ask(3, 5) == first and ask(1, 5) == first[:1] and ask(1, 6) != first[:1]
    assert len(standin.seen()) == 8  # every choice left this machine, and the ledger says so
    assert len(gateway.ledger("completion")) == 8


def test_n_in_a_stream(pair: tuple[Gateway, StandIn]) -> None:
    gateway, _ = pair
    texts = ["", ""]
    for chunk in gateway.client().chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, n=2, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [REPLY, REPLY]


def test_log_probabilities_are_those_of_plain_tokens(pair: tuple[Gateway, StandIn]) -> None:
    gateway, _ = pair
    answer = gateway.client().chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert b"".join(bytes(item.bytes or []) for item in logprobs.content).decode() == REPLY
    first = logprobs.content[0]
    assert (first.token, first.logprob) == ("H", -0.5)
    assert len(first.top_logprobs) == 3 and first.top_logprobs[0].token == "H"
    old = gateway.client().completions.create(model="tiny", prompt="x", temperature=0, max_tokens=5, logprobs=2)
    old_logprobs = old.choices[0].logprobs
    assert old_logprobs is not None and old_logprobs.tokens == list("Hello")
    assert old_logprobs.top_logprobs is not None and old_logprobs.top_logprobs[0]["H"] == -0.5


def test_completions_take_lists_ids_and_echo(pair: tuple[Gateway, StandIn]) -> None:
    gateway, standin = pair
    client = gateway.client()
    many = client.completions.create(model="tiny", prompt=["a", "b"], n=2, temperature=0, max_tokens=3, echo=True)
    assert [choice.text for choice in many.choices] == ["aHel", "aHel", "bHel", "bHel"]
    ids = client.completions.create(model="tiny", prompt=[5, 6, 7], temperature=0, max_tokens=3)
    assert ids.choices[0].text == "Hel" and ids.usage is not None and ids.usage.prompt_tokens == 3
    assert len(standin.seen()[-1]["prompt"]) == 3


def test_logit_bias_and_stop_ids_are_translated(pair: tuple[Gateway, StandIn], tiny_order: np.ndarray) -> None:
    gateway, standin = pair
    order = tiny_order
    gateway.client().completions.create(
        model="tiny", prompt="x", temperature=0, logit_bias={"65": -100}, presence_penalty=0.5,
        extra_body={"stop_token_ids": [66], "top_k": 5},
    )  # fmt: skip
    body = standin.seen()[0]
    assert body["logit_bias"] == {str(order[65]): -100.0}
    assert set(body["stop_token_ids"]) == {int(order[256]), int(order[66])}
    assert (body["presence_penalty"], body["top_k"]) == (0.5, 5)


def test_embeddings_as_floats_and_as_base64(
    tmp_path: Path, start_standin: Callable[..., StandIn], start_gateway: Callable[..., Gateway]
) -> None:
    from safetensors.numpy import load_file

    order = write_client(tmp_path / "client", name="vectors", task="embed")
    standin = start_standin(order)
    gateway = start_gateway(tmp_path / "client", standin.url)
    output_order = load_file(tmp_path / "client" / "client.safetensors")["output_order"]
    answer = gateway.client().embeddings.create(model="vectors", input=["abc", "😀"])  # the client asks for base64
    expected = [(np.arange(16) + length / 8)[output_order] for length in (3, 4)]
    np.testing.assert_allclose([item.embedding for item in answer.data], expected)
    assert answer.usage.prompt_tokens == 7
    raw = httpx.post(f"{gateway.url}/v1/embeddings", json={"model": "vectors", "input": "abc"}).json()
    assert raw["data"][0]["embedding"] == pytest.approx(expected[0].tolist())
    coded = {"model": "vectors", "input": [1, 2, 3], "encoding_format": "base64"}
    raw = httpx.post(f"{gateway.url}/v1/embeddings", json=coded).json()
    assert struct.unpack("<16f", base64.b64decode(raw["data"][0]["embedding"])) == pytest.approx(expected[0].tolist())
    assert "completion_tokens" not in raw["usage"]
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.client().chat.completions.create(model="vectors", messages=HELLO)
    assert refused.value.param == "model"


def test_models_are_listed_with_their_label(pair: tuple[Gateway, StandIn]) -> None:
    gateway, _ = pair
    (model,) = gateway.client().models.list().data
    assert (model.id, model.object, model.owned_by, model.created) == ("tiny", "model", "cloister", 1767323045)
    raw = httpx.get(f"{gateway.url}/v1/models/tiny").json()
    assert raw["cloister"]["label"] == "substitution cipher under a secret base"
    assert raw["cloister"]["measured"]["percent"] == 12.3 and raw["max_model_len"] == 256
    with pytest.raises(openai.NotFoundError) as missing:
        gateway.client().models.retrieve("other")
    assert missing.value.code == "model_not_found"


def test_two_client_directories_two_servers(
    tmp_path: Path, start_standin: Callable[..., StandIn], start_gateway: Callable[..., Gateway]
) -> None:
    one = start_standin(write_client(tmp_path / "a", name="a", key_id="k-a"), reply="one", models=listing("k-a"))
    two = start_standin(write_client(tmp_path / "b", name="b", key_id="k-b"), reply="two", models=listing("k-b"))
    gateway = start_gateway([tmp_path / "a", tmp_path / "b"], one.url, "--server", two.url)
    client = gateway.client()
    for name, text in (("a", "one"), ("b", "two")):
        assert client.completions.create(model=name, prompt="x", temperature=0).choices[0].text == text
    nameless = httpx.post(f"{gateway.url}/v1/completions", json={"prompt": "x"})
    assert (nameless.status_code, nameless.json()["error"]["param"]) == (400, "model")


def test_two_gateways_with_one_key(
    pair: tuple[Gateway, StandIn], tiny_client: Path, start_gateway: Callable[..., Gateway]
) -> None:
    gateway, standin = pair
    other = start_gateway(tiny_client, standin.url)
    for party in (gateway, other):
        assert (
            party.client().completions.create(model="tiny", prompt="x", temperature=0, max_tokens=5).choices[0].text
            == "Hello"
        )
    assert len(gateway.ledger("completion")) == len(other.ledger("completion")) == 1


def test_loop_token_sends_one_message_a_token(
    tmp_path: Path, start_standin: Callable[..., StandIn], start_gateway: Callable[..., Gateway]
) -> None:
    standin = start_standin(write_client(tmp_path / "client", loop="token"))
    gateway = start_gateway(tmp_path / "client", standin.url)
    answer = gateway.client().chat.completions.create(model="tiny", messages=HELLO, temperature=0, frequency_penalty=1)
    assert answer.choices[0].message.content == REPLY
    sent = standin.seen()
    assert len(sent) == len(REPLY.encode()) + 1 + 1  # one a token, the end token, and the goodbye
    assert sent[-1]["cloister"]["close"] and standin.seen("closed")
    assert all("prompt" not in body for body in sent)
    assert sent[1]["logit_bias"] and not sent[0]["logit_bias"]  # the penalty is worked out on this side
    (entry,) = gateway.ledger("completion")
    assert entry["rounds"] == len(sent)


def test_the_ledger_counts_what_really_left(pair: tuple[Gateway, StandIn]) -> None:
    gateway, standin = pair
    response = httpx.post(
        f"{gateway.url}/v1/completions", json={"prompt": "x" * 50, "temperature": 0, "user": "alice", "max_tokens": 4}
    )
    (entry,) = gateway.ledger("completion")
    body = standin.seen()[0]
    assert entry["request"] == response.headers["x-request-id"]
    assert len(json.dumps(body, separators=(",", ":"))) < entry["bytes_sent"] < len(json.dumps(body)) + 600
    assert entry["bytes_received"] > 400 and entry["rounds"] == 1 and entry["party"] == f"127.0.0.1:{standin.port}"
    assert "which are equal" in entry["reveals"] and entry["note"] == ""
    assert SPECIALS and "alice" not in json.dumps(body)
