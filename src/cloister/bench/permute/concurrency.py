"""Many streams at once through one gateway and one server; every answer is compared with the plain model's."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloister import embedded
from cloister.bench import parties
from cloister.bench.schema import Row
from cloister.bench.suites import Options

STREAMS = 64
TOKENS = 24
TOPICS = ["sea", "king", "garden", "letter", "night", "road", "music", "winter", "doctor", "river"]


@dataclass
class Tally:
    """What happened to the answers."""

    answers: int = 0
    tokens: int = 0
    failures: int = 0
    mixed_up: int = 0
    reasons: list[str] = field(default_factory=list)


def run(options: Options) -> list[Row]:
    """Two rows: failures and mixed-up answers must be none; the rate is information."""
    from cloister.permute.protect import protect

    seconds = 10 if options.quick else 60
    prompts = [f"{topic} {number}" for number in range(STREAMS) for topic in TOPICS[: 1 + number % 2]][:STREAMS]
    expected = _expected(prompts)
    with tempfile.TemporaryDirectory(prefix="cloister-bench-") as folder, parties.Parties(Path(folder)) as started:
        out = Path(folder) / "out"
        protect(embedded.path(), out, base="secret", measure=False, progress=options.progress)
        server = started.serve(out / "server", "--dtype", "float32")
        gateway = started.gateway(out / "client", server)
        with options.progress.task(f"{STREAMS} streams for {seconds} s"):
            begun = time.perf_counter()
            tally = asyncio.run(_load(gateway, prompts, expected, seconds))
            elapsed = time.perf_counter() - begun
    note = f"{tally.answers} answers of {TOKENS} tokens in {elapsed:.0f} s over {STREAMS} streams; each one checked"
    if tally.reasons:
        note += f"; first failure: {tally.reasons[0]}"
    failed = tally.failures if tally.answers else max(1, tally.failures)
    return [
        Row.measured("concurrency-failures", failed, "failures", bar=0, paper="10 contexts", note=note),
        Row.measured("concurrency-mixed-up", tally.mixed_up, "answers", bar=0, note="not what the plain model answers"),
        Row.measured("concurrency-rate", tally.tokens / elapsed, "tokens/s", note="all parties on one machine"),
    ]  # fmt: skip


def _expected(prompts: list[str]) -> list[str]:
    """The plain model's greedy answers, computed one by one with transformers alone."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(embedded.path(), dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = tokenizer.encode(prompt, add_special_tokens=False).ids
            done = model.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
                max_new_tokens=TOKENS, pad_token_id=model.generation_config.pad_token_id or 0,
            )  # fmt: skip
            answers.append(tokenizer.decode(done[0, len(ids) :].tolist(), skip_special_tokens=True))
    return answers


async def _load(gateway: str, prompts: list[str], expected: list[str], seconds: float) -> Tally:
    import httpx

    tally = Tally()
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=gateway, timeout=120, limits=limits, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        end = time.perf_counter() + seconds

        async def stream(index: int) -> None:
            turn = index
            while time.perf_counter() < end:
                which = turn % len(prompts)
                turn += 7  # every stream asks many of the questions
                await _one(client, model, prompts[which], expected[which], tally)

        await asyncio.gather(*(stream(index) for index in range(STREAMS)))
    return tally


async def _one(client: Any, model: str, prompt: str, expected: str, tally: Tally) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    text, finished = "", False
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise ValueError(f"status {answer.status_code}: {(await answer.aread())[:200]!r}")
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    finished = True
                elif line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise ValueError(chunk["error"].get("code", "error in the stream"))
                    text += "".join(choice.get("text") or "" for choice in chunk["choices"])
        if not finished:
            raise ValueError("the stream ended early")
    except Exception as error:
        tally.failures += 1
        tally.reasons.append(f"{type(error).__name__}: {error}")
        return
    tally.answers += 1
    tally.tokens += TOKENS
    tally.mixed_up += text != expected
