"""A unified model all the way: protect, serve, gateway, stock client; its answer is the plain model's."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from parties import Gateway

import cloister

PROMPT = "To be, or not to be"


def test_a_unified_decoder_answers_through_the_gateway_as_it_does_in_the_clear(
    start_server: Callable[..., str], start_gateway: Callable[..., Gateway], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    from cloister.unify import moe

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(files("cloister") / "embedded" / "olmoe"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    seed = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in seed.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    own = {name: p.detach() for name, p in seed.named_parameters() if name in moe.feed_forward_names(seed)}
    experts = {who: {n: t + 0.3 * torch.randn_like(t) for n, t in own.items()} for who in ("bank", "clinic")}
    model = moe.unify(seed, experts, fallback=True)
    moe.set_router(model, [torch.randn(3, 32) for _ in range(2)])
    model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    cloister.protect(tmp_path / "plain", tmp_path / "out", base="secret", measure=False, name="union")

    gateway = start_gateway(tmp_path / "out" / "client", start_server(tmp_path / "out" / "server"))
    with gateway.client() as client:
        answer = client.completions.create(model="union", prompt=PROMPT, max_tokens=16, temperature=0).choices[0].text
    inputs = tokenizer(PROMPT, return_tensors="pt")
    found = model.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=16, do_sample=False, pad_token_id=0
    )
    assert answer == tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
