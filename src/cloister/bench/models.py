"""Random models of the sizes that the benchmarks need, written as ordinary checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cloister import families
from cloister.families.layout import TensorSpec
from cloister.permute.checkpoint import Planned, write_index, write_shard

PERIOD = 4_194_301  # prime, so that noise repeated over a tensor never gives two equal rows
SEED = 20260101  # random weights are not secrets; the same ones make runs comparable


@dataclass(frozen=True)
class Size:
    """How large a benchmark model is."""

    hidden: int
    layers: int
    feed_forward: int
    heads: int
    vocabulary: int
    experts: int = 0
    chosen: int = 0
    positions: int = 1024


MIDDLE = Size(hidden=1024, layers=12, feed_forward=2816, heads=16, vocabulary=32000)
MIDDLE_EXPERTS = Size(hidden=1024, layers=12, feed_forward=512, heads=16, vocabulary=32000, experts=8, chosen=2)
QUICK = Size(hidden=256, layers=4, feed_forward=704, heads=8, vocabulary=4096)
QUICK_EXPERTS = Size(hidden=256, layers=4, feed_forward=128, heads=8, vocabulary=4096, experts=8, chosen=2)


def config(size: Size, dtype: str = "float32") -> dict[str, Any]:
    """A LLaMA configuration, or an OLMoE one where there are experts."""
    shared = {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.feed_forward,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": size.positions,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": dtype,
    }
    if not size.experts:
        return {**shared, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    experts = {"num_experts": size.experts, "num_experts_per_tok": size.chosen, "norm_topk_prob": True}
    return {**shared, **experts, "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"]}


def write(directory: Path, size: Size, *, dtype: str = "float32", shard_bytes: int = 1 << 30) -> Path:
    """Write a random checkpoint, shard by shard, with memory for one tensor."""
    directory.mkdir(parents=True, exist_ok=True)
    about = config(size, dtype)
    (directory / "config.json").write_text(json.dumps(about, indent=2))
    layout = families.layout(about, ())
    kind, width = ("F32", 4) if dtype == "float32" else ("BF16", 2)
    tensors = [(name, spec) for name, spec in layout.tensors.items() if not spec.stacked]
    shards: list[list[tuple[str, TensorSpec]]] = [[]]
    filled = 0
    for name, spec in tensors:
        needed = int(np.prod(spec.shape)) * width
        if filled and filled + needed > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, spec))
        filled += needed
    noise = np.random.default_rng(SEED).standard_normal(PERIOD, dtype=np.float32) * 0.02
    index: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        planned = [Planned(name, kind, spec.shape) for name, spec in shard]
        write_shard(directory / file, planned, _pieces(shard, noise, kind), tag_key=bytes(32))
        index.update(dict.fromkeys((name for name, _ in shard), file))
        total += sum(int(np.prod(spec.shape)) * width for _, spec in shard)
    if len(shards) > 1:
        write_index(directory, index, total)
    return directory


def _pieces(shard: list[tuple[str, TensorSpec]], noise: np.ndarray, kind: str) -> Iterator[np.ndarray]:
    """Values for each tensor, from a different place of the noise each; norms are near one."""

    def stored(values: np.ndarray) -> np.ndarray:
        return values if kind == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)

    around_zero, around_one = stored(noise), stored(noise + 1)
    for number, (_, spec) in enumerate(shard):
        values = around_one if len(spec.shape) == 1 else around_zero
        start = number * 7919 % PERIOD
        count = int(np.prod(spec.shape))
        yield np.resize(values[start:], min(count, PERIOD - start))
        for begin in range(PERIOD - start, count, PERIOD):
            yield values[: min(PERIOD, count - begin)]
