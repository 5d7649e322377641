"""Client directories made by hand, without torch: one token for each byte, so that characters split over tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cloister.manifest import SUBSTITUTION, Manifest, Model, Protection

SPECIALS = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
VOCABULARY = 256 + len(SPECIALS)
HIDDEN = 16
END = 256
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_client(
    directory: Path,
    *,
    name: str = "tiny",
    loop: str = "server",
    key_id: str = "key-0001",
    task: str = "generate",
    template: str | None = TEMPLATE,
    label: str = SUBSTITUTION,
    seed: int = 7,
    **changes: Any,
) -> np.ndarray:
    """Write a client directory; the result is its `vocab_to_server`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [END]}))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    rng = np.random.default_rng(seed)
    order = rng.permutation(VOCABULARY).astype(np.int32)
    tensors: dict[str, np.ndarray] = {"vocab_to_server": order}
    if loop == "token":
        tensors["embedding"] = rng.standard_normal((VOCABULARY, HIDDEN)).astype(np.float32)
    if task == "embed":
        tensors["output_order"] = rng.permutation(HIDDEN).astype(np.int32)
    save_file(tensors, directory / "client.safetensors")
    manifest = Manifest(
        mode="permute",
        role="client",
        model=Model(name, "llama", "LlamaForCausalLM", task, HIDDEN, VOCABULARY, 256),
        protection=Protection("permutation", "secret", label, loop, "context-0", key_id),
        created="2026-01-02T03:04:05+00:00",
        measured={"percent": 12.3, "sentence": "With a secret base a server recovers 12.3 % of 2,000 tokens."},
    )
    replace(manifest, **changes).write(directory)
    return order


def byte_tokenizer() -> Tokenizer:
    """Byte-level, without merges: the id of a byte is its place in the byte alphabet."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def listing(key_id: str = "key-0001", name: str = "tiny", **changes: Any) -> list[dict[str, Any]]:
    """What a Cloister server says at /v1/models."""
    about = {"key_id": key_id, "format": 1, "loop": "server", "label": SUBSTITUTION, "context": "context-0"}
    return [{"id": name, "object": "model", "max_model_len": 256, "cloister": about | changes}]
