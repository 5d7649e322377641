"""How good a unified model is on examples of one owner, and where its router sends them.

    found = evaluate(model_folder, {"bank": "bank-test.csv"})
    found["bank"].score.value, found["bank"].routes       # 0.86, {"bank": 0.81, "travel": 0.12, ...}

What the examples hold decides the task: labels are chosen among the model's own (or among those that the examples have,
where `among="examples"`), choices among the choices, and a decoder's texts are scored by perplexity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from cloister.errors import DataError, UsageError
from cloister.progress import SILENT, Progress
from cloister.unify import examples as tables
from cloister.unify import labels, moe
from cloister.unify.examples import Choice, Examples
from cloister.unify.joint import routes
from cloister.unify.seeds import Seed, batches_by_length, pooled
from cloister.unify.tasks import Choose, Classify, Images, Language, Score, Task

Among = Literal["model", "examples"]
FALLBACK = "(fallback)"


@dataclass(frozen=True)
class Evaluated:
    """One file's score, and the share of its tokens, over all layers, that each expert gets first."""

    score: Score
    routes: dict[str, float]


def evaluate(
    model: Path,
    files: Mapping[str, Path],
    *,
    among: Among = "model",
    seed: Path | None = None,
    progress: Progress = SILENT,
) -> dict[str, Evaluated]:
    """Evaluate a unified checkpoint on files of examples. `seed`, what it was made from, is needed for choices."""
    unified = Seed.load(model)
    if not unified.model.config.model_type.startswith(moe.PREFIX):
        raise UsageError(f"{model} is not a unified model.", advice="Name what `cloister unify build` wrote.")
    found: dict[str, Evaluated] = {}
    with progress.task("Evaluating", total=len(files), unit="files") as task:
        for name, path in files.items():
            held = tables.read(path)
            wanted: Task
            reader = unified
            if unified.kind == "encoder" and isinstance(held.target(0), Choice):
                if seed is None:
                    raise UsageError(
                        f"{path} holds choices, which are compared under the seed.",
                        advice="Name it: --seed CHECKPOINT.",
                    )
                wanted, reader = Choose(), Seed.load(seed)
            else:
                wanted = _task(unified, model, held, among)
            wanted.check(held)
            found[name] = Evaluated(wanted.evaluate(unified.model, reader, held), _routes(unified, held))
            task.advance()
    return found


def _task(seed: Seed, model: Path, held: Examples, among: Among) -> Task:
    if seed.kind == "decoder":
        return Language()
    known = labels.read(model)
    names = known.names if among == "model" else held.labels()
    if unknown := [name for name in held.labels() if name not in known.names]:
        raise DataError(f"The model has no label {unknown[0]!r}.", advice="Its labels are those of the recipe.")
    rows = [known.names.index(name) for name in names]
    if seed.kind == "vision":
        return Images(names, known.vectors[rows])
    return _Known(names, vectors=torch.from_numpy(known.vectors[rows]))


@dataclass(frozen=True)
class _Known(Classify):
    """Labels whose vectors came with the model."""

    vectors: Any = None

    def fixed(self, model: Any, seed: Seed) -> torch.Tensor:
        return torch.as_tensor(self.vectors)


def _routes(seed: Seed, held: Examples) -> dict[str, float]:
    names = [FALLBACK] * int(seed.model.config.fallback) + moe.owners(seed.model)
    counts, total = torch.zeros(len(names)), 0.0
    with torch.inference_mode():
        for rows in batches_by_length(held.inputs, 64):
            inputs: Any = held.pixels()[rows] if held.kind == "image" else [held.texts()[i] for i in rows]
            batch = seed.batch(inputs)
            with routes(seed.model) as weights:
                pooled(seed.model, batch, seed.kind)
            for layer in weights:
                first = layer.argmax(-1)
                real = batch.get("attention_mask", torch.ones_like(first)).bool()
                counts += torch.bincount(first[real], minlength=len(names))
                total += float(real.sum())
    return {name: float(count) / max(total, 1) for name, count in zip(names, counts, strict=True)}
