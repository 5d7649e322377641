"""`import cloister`: light, and the same answers synchronously and asynchronously."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "serving"))
from client_dirs import END, listing, write_client

import cloister
from cloister import errors


@pytest.fixture
def served(tmp_path: Path) -> dict[str, Any]:
    """Options that connect to a function in place of a server; it answers the prompt backwards."""
    order = write_client(tmp_path)
    plain = np.argsort(order)

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": listing()})
        body = json.loads(request.content)
        reply = [*reversed(body["prompt"]), int(order[END])][: body["max_tokens"]]
        assert all(0 <= plain[token] <= 260 for token in reply)
        lines = []
        for index, token in enumerate(reply):
            last = index == len(reply) - 1
            finish = ("stop" if token == order[END] else "length") if last else None
            lines.append({"choices": [{"index": 0, "token_ids": [token], "finish_reason": finish}]})
        text = "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n"
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=text)

    return {"client": tmp_path, "server": "http://127.0.0.1:1", "handler": handler}


def test_import_is_light() -> None:
    code = "import cloister, sys; assert not {'torch', 'numpy', 'httpx', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(cloister.__all__) <= set(dir(cloister))
    assert all(getattr(cloister, name) for name in cloister.__all__)


def test_generate_and_stream(served: dict[str, Any]) -> None:
    with cloister.connect(**served) as model:
        assert model.generate("abc") == "cba"
        assert model.generate("abc", max_new_tokens=2) == "cb"
        assert model.generate("abcdef", stop="cb") == "fed"
        assert list(model.stream("abc")) == ["c", "b", "a"]
        for piece in model.stream("abc"):
            assert piece == "c"
            break
        assert "Hi" in model.generate([{"role": "user", "content": "iH"}])
        assert model.generate([5, 6]) == model.generate(np.array([5, 6]))
        assert [entry.step for entry in model.ledger][:2] == ["handshake", "completion"]
        assert "completion" in str(model.ledger)


def test_the_asynchronous_twin(served: dict[str, Any]) -> None:
    async def run() -> tuple[str, list[str]]:
        async with cloister.aconnect(**served) as model:
            return await model.generate("abc"), [piece async for piece in model.stream("xy")]

    assert asyncio.run(run()) == ("cba", ["y", "x"])


def test_wrong_use_is_named(served: dict[str, Any], tmp_path: Path) -> None:
    model = cloister.connect(**served)
    with pytest.raises(errors.InvalidParameter, match="Unknown sampling options: heat"):
        model.generate("x", heat=1)
    with pytest.raises(errors.InvalidParameter):
        model.generate("x", max_new_tokens=0)
    with pytest.raises(errors.InvalidParameter, match="A prompt is"):
        model.generate([1, "x"])  # type: ignore[list-item]
    model.close()
    model.close()
    with pytest.raises(errors.UsageError, match="closed"):
        model.generate("x")
    with pytest.raises(errors.BrokenManifest):
        cloister.connect(tmp_path / "nothing", "http://127.0.0.1:1")
    with pytest.raises(errors.PeerUnreachable):
        cloister.connect(tmp_path, "http://127.0.0.1:9")
    with pytest.raises(errors.BrokenManifest, match="client directory"):
        cloister.connect(tmp_path, tmp_path)  # the client's directory in place of the server's
    with pytest.raises(errors.NotAvailable):
        cloister.protect(tmp_path, tmp_path / "out", mode="crypto")
    with pytest.raises(errors.UsageError):
        cloister.protect(tmp_path, tmp_path / "out", mode="magic")
