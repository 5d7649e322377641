"""What several server tests need: a server with a tiny model, and its plain twin to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest


@pytest.fixture(scope="session")
def plain(tiny_llama_dir: Path) -> Any:
    """The same model in this process, used through transformers alone."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_llama_dir).eval()


@pytest.fixture(scope="session")
def greedy(plain: Any) -> Any:
    """`greedy(ids, count)`: what `model.generate` says."""
    import torch

    def answer(ids: list[int], count: int) -> list[int]:
        prompt = torch.tensor([ids])
        made = plain.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return made[0, len(ids) :].tolist()

    return answer


@pytest.fixture(scope="session")
def server(start_server: Any, tiny_llama_dir: Path) -> Any:
    """One plain server that many tests share; each leaves it as it found it."""
    return start_server(
        tiny_llama_dir, max_slots=6, max_sessions=3, max_body_bytes=2**20, prefill_chunk=16, log_json=True
    )


@pytest.fixture
def client(server: Any) -> Any:
    with httpx.Client(base_url=str(server), timeout=60) as client:
        yield client
