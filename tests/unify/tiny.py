"""Tiny seeds made on the spot, and examples for them."""

from __future__ import annotations

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cloister.unify.examples import Examples
from cloister.unify.seeds import Seed

WORDS = [
    "card", "lost", "bank", "pay", "flight", "hotel", "book", "train", "cook", "soup", "salt", "pan",
    "the", "a", "my", "is", "of", "and", "please", "now",
]  # fmt: skip
TOPICS = {"bank": WORDS[:4], "travel": WORDS[4:8], "kitchen": WORDS[8:12]}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def encoder() -> Seed:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, vocab_size=32, max_position_embeddings=32, architectures=["BertModel"])
    return Seed.of(transformers.BertModel(config), tokenizer=tokenizer(), max_tokens=16)


def decoder(kind: str = "llama") -> Seed:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=32, n_positions=32, architectures=["GPT2LMHeadModel"]
        )
        return Seed.of(transformers.GPT2LMHeadModel(config), tokenizer=tokenizer(), max_tokens=16)
    config = transformers.LlamaConfig(
        **SMALL, num_key_value_heads=2, vocab_size=32, max_position_embeddings=32, architectures=["LlamaForCausalLM"]
    )
    return Seed.of(transformers.LlamaForCausalLM(config), tokenizer=tokenizer(), max_tokens=16)


def vision(kind: str = "vit") -> Seed:
    torch.manual_seed(0)
    shape = {**SMALL, "image_size": 8, "patch_size": 4}
    if kind == "clip":
        return Seed.of(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**shape)))
    return Seed.of(transformers.ViTModel(transformers.ViTConfig(**shape, num_channels=1, architectures=["ViTModel"])))


def sentences(topic: str, count: int, *, seed: int = 0) -> Examples:
    """Texts of a topic; the label is the topic's word that occurs."""
    draw = np.random.default_rng([seed, len(topic)])
    texts, labels = [], []
    for _ in range(count):
        label = str(draw.choice(TOPICS[topic]))
        words = [*draw.choice(WORDS[12:], int(draw.integers(2, 7))).tolist(), label]
        draw.shuffle(words)
        texts.append(" ".join(words))
        labels.append(label)
    return Examples("text", tuple(f"{topic}-{i}" for i in range(count)), tuple(texts), tuple(labels))


def images(count: int, *, seed: int = 0) -> Examples:
    """Squares that are bright above or below."""
    draw = np.random.default_rng(seed)
    pixels = draw.integers(0, 60, (count, 1, 8, 8)).astype(np.uint8)
    above = draw.random(count) < 0.5
    for i, bright in enumerate(above):
        pixels[i, 0, slice(0, 4) if bright else slice(4, 8)] += 150
    labels = tuple("above" if bright else "below" for bright in above)
    return Examples("image", tuple(str(i) for i in range(count)), pixels, labels)
