"""What the user's machine does per generated token: the client's own code, on one core, at the paper's size."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cloister import embedded
from cloister.bench import timing
from cloister.bench.schema import Row
from cloister.bench.suites import Options

HIDDEN, VOCABULARY = 4096, 32000
BAR = 2.0


def run(options: Options) -> list[Row]:
    """Our client's work per token, and the paper's, which un-permutes a whole row of logits."""
    from cloister.serving.text import TextCodec

    with tempfile.TemporaryDirectory(prefix="cloister-bench-") as folder:
        session: Any = _session(Path(folder))
        codec = TextCodec(embedded.path())
        repeats = 200 if options.quick else 2000
        ours, ours_spread = timing.measure(_ours(session, codec), repeats=repeats, warm_up=20)
        papers, papers_spread = timing.measure(_papers(session), repeats=repeats, warm_up=20)
    size = f"d = {HIDDEN}, vocabulary {VOCABULARY}, bfloat16 rows"
    return [
        Row.measured(
            "device-token", 1e3 * ours, "ms", spread=1e3 * ours_spread, bar=BAR, paper="1.7 ms",
            note=f"{size}: token id to plain id, row lookup, tensor encoding, request body, text (embedded tokenizer)",
        ),
        Row.measured(
            "device-token-paper", 1e3 * papers, "ms", spread=1e3 * papers_spread, bar=BAR, paper="1.7 ms",
            note=f"{size}: a row of logits put in order, its largest found, its embedding row permuted and encoded",
        ),
    ]  # fmt: skip


def _session(folder: Path) -> Any:
    """A real client directory of the paper's size, opened by the real client. It never reaches a server."""
    from cloister.manifest import SUBSTITUTION, Manifest, Model, Protection
    from cloister.permute.checkpoint import Planned, write_shard
    from cloister.serving.permute_session import PermuteSession

    model = Model("bench", "llama", "LlamaForCausalLM", "generate", HIDDEN, VOCABULARY, 4096, "bfloat16")
    protection = Protection("permutation", "secret", SUBSTITUTION, "token", "context-0", "0" * 16)
    Manifest("permute", "client", model, protection).write(folder)
    generator = np.random.default_rng(0)

    def pieces() -> Iterator[np.ndarray]:
        yield generator.permutation(VOCABULARY).astype(np.int32)
        for _ in range(0, VOCABULARY, 1000):
            rows = generator.standard_normal((1000, HIDDEN), dtype=np.float32)
            yield (rows.view(np.uint32) >> 16).astype(np.uint16)

    planned = [Planned("vocab_to_server", "I32", (VOCABULARY,)), Planned("embedding", "BF16", (VOCABULARY, HIDDEN))]
    write_shard(folder / "client.safetensors", planned, pieces(), tag_key=bytes(32), mode=0o600)
    return PermuteSession(folder, "http://127.0.0.1:9")


def _ours(session: Any, codec: Any) -> Any:
    """From the server's answer to the next request and the text on the screen."""
    import json

    from cloister.modes import Sampling

    answers = np.random.default_rng(1).integers(0, VOCABULARY, 4096)
    state = {"next": 0, "writer": codec.writer([1])}
    sampling = Sampling(max_tokens=1)

    def token() -> object:
        number = int(answers[state["next"] % len(answers)])
        state["next"] += 1
        if state["next"] % 256 == 0:  # an answer of ordinary length, then the next one
            state["writer"] = codec.writer([1])
        (found,) = session._tokens({"index": 0, "token_ids": [number], "text": "", "finish_reason": None})
        text = state["writer"].push(found.id % codec.vocab_size)
        body = {
            **session._body(sampling),
            "prompt_embeds": session._rows(np.array([found.id])),
            "cloister": {"session": "s"},
        }
        return json.dumps(body), text

    return token


def _papers(session: Any) -> Any:
    from cloister.serving.wire import encode_tensor

    generator = np.random.default_rng(2)
    logits = generator.standard_normal((16, VOCABULARY), dtype=np.float32)
    order = np.argsort(session._vocabulary.to_server)
    stream = generator.permutation(HIDDEN)
    table = session._tensors.mapped("embedding")
    state = {"next": 0}

    def token() -> object:
        state["next"] += 1
        plain = logits[state["next"] % len(logits)][order]
        return encode_tensor(table[[int(plain.argmax())]][:, stream], "bfloat16")

    return token
