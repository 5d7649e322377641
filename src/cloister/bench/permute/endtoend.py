"""End to end per token: through gateway and protected server, beside a plain server asked directly."""

from __future__ import annotations

import tempfile
from pathlib import Path

from cloister import embedded
from cloister.bench import models, parties, timing
from cloister.bench.schema import Row
from cloister.bench.suites import Options

TOKENS = 32
PROMPT = "The sea was calm and the king wrote a letter to his daughter about the garden at night. "


def token(options: Options) -> list[Row]:
    """One message per token, as in the paper."""
    return [_row(options, loop="token", bar=1.10, paper="1.12 in production")]


def server(options: Options) -> list[Row]:
    """The whole loop on the server."""
    return [_row(options, loop="server", bar=1.03, paper="")]


def _row(options: Options, *, loop: str, bar: float, paper: str) -> Row:
    import httpx

    from cloister.permute.protect import protect

    size = models.QUICK if options.quick else models.MIDDLE
    pairs = 4 if options.quick else 24
    with tempfile.TemporaryDirectory(prefix="cloister-bench-") as folder, parties.Parties(Path(folder)) as started:
        plain = models.write(Path(folder) / "plain", size)
        # A tokenizer is needed to speak text to the gateway; its ids all exist in the random model.
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (plain / file).write_bytes((embedded.path() / file).read_bytes())
        out = Path(folder) / "out"
        protect(plain, out, base="secret", loop=loop, measure=False, progress=options.progress)
        plain_url = started.serve(plain, "--dtype", "float32")
        gateway = started.gateway(out / "client", started.serve(out / "server", "--dtype", "float32"))
        ids = _prompt_ids(out / "client")
        with httpx.Client(timeout=120, trust_env=False) as client:
            plain_model = client.get(f"{plain_url}/v1/models").json()["data"][0]["id"]
            model = client.get(f"{gateway}/v1/models").json()["data"][0]["id"]
            shared = {"max_tokens": TOKENS, "temperature": 0, "prompt": ids, "ignore_eos": True}

            def direct() -> object:
                extra = {"model": plain_model, "return_token_ids": True, "detokenize": False}
                return _completed(client.post(f"{plain_url}/v1/completions", json={**shared, **extra}))

            def private() -> object:
                return _completed(client.post(f"{gateway}/v1/completions", json={**shared, "model": model}))

            found = timing.compare(private, direct, pairs=pairs, warm_up=2, deadline=240)
    return Row.measured(
        f"end-to-end-{loop}", found.ratio, "ratio", spread=found.spread, bar=bar, paper=paper,
        baseline=f"plain server asked directly, {1e3 * found.b_median / TOKENS:.1f} ms per token",
        note=f"{TOKENS} tokens after {len(ids)}, d = {size.hidden}, {size.layers} layers, {len(found.a)} pairs",
        figures={"private_ms": 1e3 * found.a_median / TOKENS, "plain_ms": 1e3 * found.b_median / TOKENS},
    )  # fmt: skip


def _prompt_ids(client: Path) -> list[int]:
    from cloister.serving.text import TextCodec

    return TextCodec(client).encode(PROMPT * 3, special=False)[:24]


def _completed(answer: object) -> object:
    import httpx

    assert isinstance(answer, httpx.Response)
    answer.raise_for_status()
    used = answer.json()["usage"]["completion_tokens"]
    if used != TOKENS:
        raise ValueError(f"an answer has {used} tokens instead of {TOKENS}")
    return answer
