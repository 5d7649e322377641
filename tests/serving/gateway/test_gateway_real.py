"""The whole road with the embedded model: protect, serve, gateway, stock client; three processes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from parties import Gateway

import cloister

PROMPT = "To be, or not to be"


@pytest.fixture(scope="session", params=["server", "token"])
def protected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, protected."""
    pytest.importorskip("torch")
    source = Path(str(files("cloister"))) / "embedded" / "olmoe"
    if not (source / "model.safetensors").exists():
        pytest.skip("the embedded model is not here")
    out = tmp_path_factory.mktemp("protected") / request.param
    cloister.protect(source, out, base="secret", loop=request.param, measure=False, name="bard")
    return out


@pytest.fixture(scope="session")
def road(
    protected: Path, start_server: Callable[..., str], start_gateway: Callable[..., Gateway]
) -> tuple[Gateway, str, Path]:
    server = start_server(protected / "server")
    return start_gateway(protected / "client", server), server, protected


@pytest.fixture(scope="session")
def plain() -> Callable[[str, int], str]:
    """The plain model's greedy answer, by transformers."""
    transformers: Any = pytest.importorskip("transformers")
    import torch

    source = str(files("cloister") / "embedded" / "olmoe")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)

    def answer(prompt: str, count: int) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=count, do_sample=False)
        return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    return answer


def test_the_answer_is_the_plain_model_s(road: tuple[Gateway, str, Path], plain: Callable[[str, int], str]) -> None:
    gateway, _, _ = road
    made = gateway.client().completions.create(model="bard", prompt=PROMPT, temperature=0, max_tokens=16)
    expected = plain(PROMPT, 16)
    # the server runs in bfloat16, where two nearly equal tokens may change places: the beginning must agree
    assert made.choices[0].text[:12] == expected[:12]
    assert len(gateway.ledger("completion")) >= 1


def test_everything_that_the_stock_client_can_ask(road: tuple[Gateway, str, Path]) -> None:
    gateway, _, _ = road
    client = gateway.client()
    chat: dict[str, Any] = {"model": "bard", "messages": [{"role": "user", "content": "Speak of love — ☂"}]}
    made = client.chat.completions.create(
        **chat, max_tokens=8, temperature=0.8, top_p=0.9, seed=3, n=2, logprobs=True, top_logprobs=2,
        presence_penalty=0.3, frequency_penalty=0.2, stop=["\n\n"], logit_bias={"5": -100},
    )  # fmt: skip
    assert len(made.choices) == 2
    logprobs = made.choices[0].logprobs
    assert logprobs is not None and logprobs.content and len(logprobs.content[0].top_logprobs) == 2
    again = client.chat.completions.create(**chat, max_tokens=8, temperature=0.8, top_p=0.9, seed=3)
    repeat = client.chat.completions.create(**chat, max_tokens=8, temperature=0.8, top_p=0.9, seed=3)
    assert again.choices[0].message.content == repeat.choices[0].message.content
    whole = client.chat.completions.create(**chat, max_tokens=8, temperature=0).choices[0].message.content
    streamed = client.chat.completions.create(**chat, max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole


def test_the_library_and_the_gateway_agree(road: tuple[Gateway, str, Path]) -> None:
    gateway, server, out = road
    by_gateway = gateway.client().completions.create(model="bard", prompt=PROMPT, temperature=0, max_tokens=12)
    with cloister.connect(out / "client", server) as model:
        assert model.generate(PROMPT, max_new_tokens=12) == by_gateway.choices[0].text
        assert "".join(model.stream(PROMPT, max_new_tokens=12)) == by_gateway.choices[0].text
        logits = model.logits(PROMPT)
        assert logits.shape[1] == model.manifest.model.vocab_size
        entries = [entry.step for entry in model.ledger]
    assert entries == ["handshake", "completion", "completion", "logits"]


def test_another_key_is_refused_by_name(
    road: tuple[Gateway, str, Path], tmp_path: Path, start_gateway: Callable[..., Gateway]
) -> None:
    _, server, _ = road
    source = Path(str(files("cloister"))) / "embedded" / "olmoe"
    cloister.protect(source, tmp_path / "other", base="secret", measure=False, name="bard")
    with pytest.raises(cloister.CloisterError, match="does not serve the key") as error:
        cloister.connect(tmp_path / "other" / "client", server)
    assert error.value.code == "wrong_key"
    with pytest.raises(AssertionError, match="does not serve the key"):
        start_gateway(tmp_path / "other" / "client", server)


def test_a_client_that_left_frees_its_place(road: tuple[Gateway, str, Path]) -> None:
    gateway, _, _ = road
    for _ in range(3):
        stream = gateway.client().completions.create(model="bard", prompt=PROMPT, max_tokens=400, stream=True)
        next(iter(stream))
        stream.close()
    with pytest.raises(openai.BadRequestError):
        gateway.client().completions.create(model="bard", prompt=PROMPT, max_tokens=4000)
    made = gateway.client().completions.create(model="bard", prompt=PROMPT, temperature=0, max_tokens=2)
    assert made.choices[0].text


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_gateway_that_is_stopped_stops_its_local_server(
    protected: Path, start_gateway: Callable[..., Gateway], signum: signal.Signals
) -> None:
    gateway = start_gateway(protected / "client", str(protected / "server"))
    (entry,) = gateway.ledger("handshake")
    server = f"http://{entry['party']}"
    assert httpx.get(f"{server}/health").status_code == 200
    gateway.process.send_signal(signum)
    assert gateway.process.wait(30) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server}/health")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_both_parties_on_this_machine_without_starting_anything(protected: Path) -> None:
    with cloister.connect(protected / "client", protected / "server") as model:
        assert model.generate(PROMPT, max_new_tokens=4)
        assert repr(model) == "<Model bard (substitution cipher under a secret base)>"
