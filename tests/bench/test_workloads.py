"""The parts of the suite that can be checked without waiting: models, the relay, the device's work."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path

import httpx
import pytest

from cloister.bench import models
from cloister.bench.relay import Relay

TINY = models.Size(hidden=32, layers=2, feed_forward=48, heads=4, vocabulary=64, positions=32)
TINY_EXPERTS = models.Size(
    hidden=32, layers=2, feed_forward=16, heads=4, vocabulary=64, experts=4, chosen=2, positions=32
)


@pytest.mark.parametrize("size", [TINY, TINY_EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_benchmark_models_load_with_plain_transformers(tmp_path: Path, size: models.Size, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    models.write(tmp_path, size, dtype=dtype, shard_bytes=20_000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.inference_mode():
        logits = model(input_ids=torch.arange(8)[None]).logits
    assert torch.isfinite(logits).all() and logits.float().std() > 0


class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_the_relay_keeps_what_the_server_received() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with Relay(f"http://127.0.0.1:{server.server_port}") as relay, httpx.Client(trust_env=False) as client:
                for word in ("one", "two"):
                    assert client.post(relay.url, content=word).text == word
                assert relay.bodies() == [b"one", b"two"]
                assert b"POST / HTTP/1.1" in relay.received()
        finally:
            server.shutdown()
            thread.join()
