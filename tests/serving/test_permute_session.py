"""The client of mode permute against the documented answers of vLLM and against a server that lies."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from client_dirs import END, HIDDEN, VOCABULARY, listing, write_client
from safetensors.numpy import load_file, save_file

from cloister import errors
from cloister.manifest import OBFUSCATION, Identity
from cloister.modes import Sampling, Token
from cloister.serving.client_tensors import ClientTensors
from cloister.serving.permute_session import PermuteSession, connect_permute
from cloister.serving.wire import decode_tensor, encode_tensor

URL = "http://127.0.0.1:1"
Handler = Callable[[httpx.Request], httpx.Response]


def vllm_stream(*choices: dict[str, Any], usage: bool = False) -> httpx.Response:
    """A completion stream as vLLM documents it for `return_token_ids` and `return_tokens_as_token_ids`."""
    lines = [
        {
            "id": "cmpl-5c2b", "object": "text_completion", "created": 1760000000, "model": "tiny-key-0001",
            "choices": [
                {"index": 0, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None,
                 "token_ids": None, "prompt_token_ids": None} | choice
            ],
        }
        for choice in choices
    ]  # fmt: skip
    if usage:
        lines.append({"id": "cmpl-5c2b", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    text = "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n"
    return httpx.Response(200, headers={"content-type": "text/event-stream; charset=utf-8"}, content=text)


VLLM_MODELS = [{"id": "tiny-key-0001", "object": "model", "created": 1, "owned_by": "vllm", "root": "/models/out",
                "parent": None, "max_model_len": 128, "permission": []}]  # fmt: skip


def session(
    client: Path, answer: Handler, models: list[dict[str, Any]] | None = None, **options: Any
) -> PermuteSession:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"object": "list", "data": listing() if models is None else models})
        return answer(request)

    return connect_permute(client, URL, handler=handler, **options)


def generate(made: PermuteSession, prompt: list[int], **sampling: Any) -> list[Token]:
    async def run() -> list[Token]:
        return [token async for token in made.generate(prompt, Sampling(**sampling), request="q")]

    return asyncio.run(run())


def test_vllm_s_documented_stream_in_the_server_loop(tmp_path: Path) -> None:
    order = write_client(tmp_path)
    seen: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        first, second, end = (int(order[token]) for token in (65, 66, END))
        logprobs = {
            "text_offset": [0, 0],
            "token_logprobs": [-0.25, -0.5],
            "tokens": [f"token_id:{first}", f"token_id:{second}"],
            "top_logprobs": [{f"token_id:{first}": -0.25, f"token_id:{end}": -3.0}, {f"token_id:{second}": -0.5}],
        }
        return vllm_stream(
            {"token_ids": [], "prompt_token_ids": seen[-1]["prompt"]},
            {"token_ids": [first, second], "logprobs": logprobs},
            {"token_ids": [end], "finish_reason": "stop", "stop_reason": end},
            usage=True,
        )

    tokens = generate(session(tmp_path, answer, VLLM_MODELS), [1, 2, 3], max_tokens=9, logprobs=2, seed=4)
    assert tokens == [
        Token(65, -0.25, ((65, -0.25), (END, -3.0))),
        Token(66, -0.5, ((66, -0.5),)),
        Token(END, finish="stop"),
    ]
    (body,) = seen
    assert body["model"] == "tiny-key-0001" and body["prompt"] == [int(order[i]) for i in (1, 2, 3)]
    assert body["return_token_ids"] and body["return_tokens_as_token_ids"] and body["detokenize"] is False
    assert body["stop_token_ids"] == [int(order[END])] and "cloister" not in body
    assert (body["temperature"], body["top_p"], body["seed"], body["logprobs"]) == (0.0, 1.0, 4, 2)


def test_vllm_in_the_token_loop_gets_the_whole_prefix_each_time(tmp_path: Path) -> None:
    order = write_client(tmp_path, loop="token")
    table = load_file(tmp_path / "client.safetensors")["embedding"]
    reply = [70, 71, END]
    seen: list[np.ndarray] = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert "cloister" not in body and "prompt" not in body and body["max_tokens"] == 1
        seen.append(decode_tensor(body["prompt_embeds"], expected_columns=HIDDEN, max_rows=99))
        token = int(order[reply[len(seen) - 1]])
        choice = {"index": 0, "text": "", "token_ids": [token], "finish_reason": "length", "stop_reason": None}
        return httpx.Response(200, json={"id": "cmpl-1", "object": "text_completion", "choices": [choice]})

    made = session(tmp_path, answer, VLLM_MODELS)
    tokens = generate(made, [5, 6], max_tokens=9)
    assert [token.id for token in tokens] == reply and tokens[-1].finish == "stop"
    for rows, ids in zip(seen, ([5, 6], [5, 6, 70], [5, 6, 70, 71]), strict=True):
        np.testing.assert_array_equal(rows, table[ids])
    entry = list(made.ledger)[-1]
    assert entry.rounds == 3 and entry.step == "completion" and entry.request == "q"


def test_the_token_loop_with_our_server_sends_only_new_rows_and_says_goodbye(tmp_path: Path) -> None:
    order = write_client(tmp_path, loop="token")
    seen: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        choice = {"index": 0, "token_ids": [int(order[60 + len(seen)])], "finish_reason": "length"}
        return httpx.Response(200, json={"choices": [choice], "cloister": {"session": "s1"}})

    made = session(tmp_path, answer)

    async def two() -> list[int]:
        async with aclosing(
            made.generate([1, 2, 3], Sampling(max_tokens=9, presence_penalty=0.5, min_tokens=2))
        ) as tokens:
            return [(await anext(tokens)).id, (await anext(tokens)).id]

    assert asyncio.run(two()) == [61, 62]
    assert [body["cloister"] for body in seen] == [
        {"session": "new"},
        {"session": "s1"},
        {"session": "s1", "close": True},
    ]
    counts = [len(decode_tensor(b["prompt_embeds"], expected_columns=HIDDEN, max_rows=9)) for b in seen[:2]]
    assert counts == [3, 1]
    assert seen[0]["logit_bias"] == {str(order[END]): -100.0}  # min_tokens, without telling the server
    assert seen[1]["logit_bias"] == {str(order[61]): -0.5, str(order[END]): -100.0}
    assert list(made.ledger)[-1].note == "cancelled"
    with pytest.raises(errors.UnsupportedParameter, match="repetition_penalty"):
        generate(made, [1], repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (listing("other"), errors.WrongKey),
        ([{"id": "llama", "object": "model"}], errors.WrongKey),
        ([], errors.WrongKey),
        (listing(format=99), errors.FormatVersion),
        (listing(weights_digest="bb"), errors.TrustError),
    ],
)
def test_the_handshake_refuses(
    tmp_path: Path, models: list[dict[str, Any]], expected: type[errors.CloisterError]
) -> None:
    write_client(tmp_path, identity=Identity(weights_digest="aa"))

    def never(request: httpx.Request) -> httpx.Response:
        raise AssertionError("something was sent")

    made = session(tmp_path, never, models)
    with pytest.raises(expected):
        generate(made, [1])
    assert [entry.step for entry in made.ledger] == ["handshake"]


def test_attestation_comes_before_everything(tmp_path: Path) -> None:
    write_client(tmp_path, identity=Identity(measurement="ab"))
    with pytest.raises(errors.NotAvailable):
        session(tmp_path, lambda request: httpx.Response(500))

    async def refuse(url: str, get_evidence: Any, certificate: bytes | None) -> None:
        assert url == URL and certificate is None  # plain http on loopback
        assert await get_evidence("00ff") == {"evidence": "00ff"}
        raise errors.AttestationFailed("not what was expected")

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/version":
            return httpx.Response(200, json={"version": "1"})
        assert request.url.path == "/cloister/v1/attestation"
        return httpx.Response(200, json={"evidence": request.url.params["nonce"]})

    made = session(tmp_path, answer, verify_attestation=refuse)
    with pytest.raises(errors.AttestationFailed):
        generate(made, [1])
    assert [entry.step for entry in made.ledger] == ["attestation", "attestation"]


LIES: list[dict[str, Any]] = [
    {"token_ids": [VOCABULARY]},
    {"token_ids": [-1]},
    {"token_ids": ["5"]},
    {"token_ids": [True]},
    {"text": "plain words"},
    {"token_ids": [5], "logprobs": {"token_logprobs": [0.0], "top_logprobs": [{"words": -1.0}]}},
    {"token_ids": [5], "logprobs": {"token_logprobs": [0.0], "top_logprobs": [{"token_id:999999": -1.0}]}},
    {"token_ids": [5], "finish_reason": "abort"},
    {"token_ids": [5]},  # and then the end, without a reason
]


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_is_an_error(tmp_path: Path, lie: dict[str, Any]) -> None:
    write_client(tmp_path)
    with pytest.raises(errors.PeerError):
        generate(session(tmp_path, lambda request: vllm_stream(lie)), [1])


@pytest.mark.parametrize("prompt", [[], [-1], [VOCABULARY], [1] * 257, [[1]]])
def test_impossible_prompts_never_leave(tmp_path: Path, prompt: Any) -> None:
    write_client(tmp_path)
    made = session(tmp_path, lambda request: httpx.Response(500))
    with pytest.raises((errors.InvalidParameter, errors.TooLarge)):
        generate(made, prompt)
    assert not len(made.ledger)


def test_logits_come_back_in_the_plain_vocabulary(tmp_path: Path) -> None:
    order = write_client(tmp_path)
    plain = np.random.default_rng(0).standard_normal((3, VOCABULARY)).astype(np.float32)
    served = np.empty_like(plain)
    served[:, order] = plain

    def answer(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content)["prompt"] == [int(order[i]) for i in (7, 8, 9)]
        return httpx.Response(200, json={"output": encode_tensor(served), "kind": "logits"})

    np.testing.assert_array_equal(asyncio.run(session(tmp_path, answer).logits([7, 8, 9])), plain)
    with pytest.raises(errors.NotAvailable, match="vLLM"):
        asyncio.run(session(tmp_path, answer, VLLM_MODELS).logits([7]))


def test_class_scores_and_images(tmp_path: Path) -> None:
    write_client(tmp_path)
    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal((3 * 4 * 4, HIDDEN)).astype(np.float32), np.ones(HIDDEN, np.float32)
    order = np.array([2, 0, 1], np.int32)
    old = load_file(tmp_path / "client.safetensors")
    save_file(old | {"patch_weight": weight, "patch_bias": bias, "class_order": order}, tmp_path / "client.safetensors")
    image = rng.standard_normal((3, 8, 8)).astype(np.float32)
    patches = [image[:, y : y + 4, x : x + 4].reshape(-1) @ weight + bias for y in (0, 4) for x in (0, 4)]

    def answer(request: httpx.Request) -> httpx.Response:
        sent = decode_tensor(json.loads(request.content)["pixel_embeds"], expected_columns=HIDDEN, max_rows=9)
        np.testing.assert_allclose(sent, np.stack(patches), rtol=1e-4, atol=1e-4)
        return httpx.Response(200, json={"output": encode_tensor(np.array([[0.0, 1.0, 2.0]])), "kind": "classes"})

    scores = asyncio.run(session(tmp_path, answer).classify(image[None]))
    np.testing.assert_array_equal(scores, [[2.0, 0.0, 1.0]])
    with pytest.raises(errors.InvalidParameter, match="patches"):
        asyncio.run(session(tmp_path, answer).classify(np.zeros((1, 3, 9, 8))))


def test_the_reveal_is_honest_about_a_public_base(tmp_path: Path) -> None:
    write_client(tmp_path, label=OBFUSCATION)
    made = session(tmp_path, lambda request: vllm_stream({"token_ids": [5], "finish_reason": "length"}))
    generate(made, [1])
    assert "can work out the words" in list(made.ledger)[-1].reveals


def test_rows_of_bfloat16_are_sent_as_they_are(tmp_path: Path) -> None:
    bits = np.arange(VOCABULARY * HIDDEN, dtype="<u2").reshape(VOCABULARY, HIDDEN) % 30000
    header = json.dumps(
        {"embedding": {"dtype": "BF16", "shape": [VOCABULARY, HIDDEN], "data_offsets": [0, bits.nbytes]}}
    )
    path = tmp_path / "t.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bits.tobytes())
    tensors = ClientTensors(path)
    np.testing.assert_array_equal(tensors.mapped("embedding")[[3, 1]], bits[[3, 1]])
    expected = (bits.astype("<u4") << 16).view("<f4")
    np.testing.assert_array_equal(tensors.floats("embedding"), expected)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8 + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b"not json!",
        struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}     ',  # no data
        struct.pack("<Q", 59) + b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}   ',
        struct.pack("<Q", 57) + b'{"a":{"dtype":"XX","shape":[1],"data_offsets":[0,4]}}    ' + b"1234",
    ],
)
def test_damaged_client_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "client.safetensors"
    path.write_bytes(content)
    with pytest.raises(errors.BrokenManifest):
        ClientTensors(path)


def test_a_vocabulary_that_is_no_permutation_is_refused(tmp_path: Path) -> None:
    write_client(tmp_path)
    save_file({"vocab_to_server": np.zeros(VOCABULARY, np.int32)}, tmp_path / "client.safetensors")
    with pytest.raises(errors.BrokenManifest, match="order"):
        session(tmp_path, lambda request: httpx.Response(500))


def test_a_stream_without_end_is_cut_at_the_tokens_asked_for(tmp_path: Path) -> None:
    write_client(tmp_path)
    endless = [{"token_ids": [5] * 4}] * 50
    with pytest.raises(errors.PeerError, match="more than the 6 tokens"):
        generate(session(tmp_path, lambda request: vllm_stream(*endless), VLLM_MODELS), [1], max_tokens=6)


@pytest.mark.parametrize(
    "lie",
    [
        {"token_ids": 5},
        {"token_ids": [5], "logprobs": {"token_logprobs": 3}},
        {"token_ids": [5], "logprobs": {"token_logprobs": ["low"]}},
        {"token_ids": [5], "logprobs": {"token_logprobs": [10**400]}},
        {"token_ids": [5], "logprobs": {"top_logprobs": [{"token_id:5": None}]}},
        {"token_ids": [5], "finish_reason": "length", "logprobs": {"token_logprobs": [float("nan")]}},
    ],
)
def test_answers_of_wrong_types_are_the_server_s_fault(tmp_path: Path, lie: dict[str, Any]) -> None:
    write_client(tmp_path)
    with pytest.raises(errors.PeerError):
        generate(session(tmp_path, lambda request: vllm_stream(lie), VLLM_MODELS), [1], max_tokens=2, logprobs=1)


def test_a_deeply_nested_answer_is_no_answer(tmp_path: Path) -> None:
    write_client(tmp_path, loop="token")
    made = session(tmp_path, lambda request: httpx.Response(200, content=b"[" * 200_000))
    with pytest.raises(errors.PeerError, match="JSON"):
        generate(made, [1])
