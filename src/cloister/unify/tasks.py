"""What a model is trained for, and how well it does it.

    task = Classify(labels=("card_arrival", ...))
    task.loss(model, seed, examples, rows)      # of private examples
    task.evaluate(model, seed, examples)        # Score("accuracy", 0.93, 3080)
    public_loss(model, seed, examples, rows, public_targets(seed, examples))

Nobody needs a head: a text is compared with the names of the labels, so the seed already works before any training,
and models of different owners differ in nothing but their feed-forward blocks. The names' vectors are the *seed's*
(`names="seed"`), whatever model reads the texts, as a CLIP model's text tower stays what it was while its vision tower
is trained: a name says little about whose it is, and a router would send many of them to the wrong expert. With
`names="own"` the model at hand reads both.

A task says for every item the log-probabilities of the candidates and which one is right. Loss, accuracy, perplexity
and ensembles (the logarithm of the mean probability) all follow from that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cloister.errors import DataError, UsageError
from cloister.progress import SILENT, Progress
from cloister.unify.examples import Choice, Examples
from cloister.unify.seeds import Seed

SCALE = 20.0  # what cosines are multiplied by before the softmax; usual for sentence vectors
Rows = Sequence[int]
Names = Literal["seed", "own"]


@dataclass(frozen=True)
class Score:
    """How well: accuracy (higher is better) or perplexity (lower is better) over `n` items."""

    name: Literal["accuracy", "perplexity"]
    value: float
    n: int


@dataclass(frozen=True)
class Prediction:
    """For each item the log-probabilities of the candidates, and the index of the right one."""

    log_probabilities: Tensor  # (items, candidates)
    right: Tensor  # (items,)


class Task(Protocol):
    """What an owner wants its expert for."""

    @property
    def name(self) -> str:
        """One word, as recipes and reports call it."""
        ...

    def key(self) -> str:
        """The same text for the same task, for checkpoints."""
        ...

    def check(self, examples: Examples) -> None:
        """Raise `DataError` for the first example that this task cannot use."""
        ...

    def fixed(self, model: Any, seed: Seed) -> Tensor | None:
        """What stays the same for all examples under one model, such as the vectors of the label names."""
        ...

    def predict(self, model: Any, seed: Seed, examples: Examples, rows: Rows, fixed: Tensor | None) -> Prediction:
        """Predictions for these rows; with gradients where they are enabled."""
        ...

    def loss(self, model: Any, seed: Seed, examples: Examples, rows: Rows) -> Tensor:
        """The mean cross-entropy of these rows."""
        ...

    def evaluate(
        self, model: Any, seed: Seed, examples: Examples, *, batch: int = 64, progress: Progress = SILENT
    ) -> Score:
        """The score of one model."""
        ...


class _Scored:
    """What every task gets from its predictions."""

    metric: Literal["accuracy", "perplexity"] = "accuracy"

    def key(self) -> str:
        return repr(self)

    def fixed(self, model: Any, seed: Seed) -> Tensor | None:
        return None

    def loss(self: Any, model: Any, seed: Seed, examples: Examples, rows: Rows) -> Tensor:
        found = self.predict(model, seed, examples, rows, self.fixed(model, seed))
        return functional.nll_loss(found.log_probabilities, found.right)

    def evaluate(
        self: Any, model: Any, seed: Seed, examples: Examples, *, batch: int = 64, progress: Progress = SILENT
    ) -> Score:
        return evaluate(self, [model], seed, examples, batch=batch, progress=progress)


@dataclass(frozen=True)
class Classify(_Scored):
    """The label whose name is closest to the text."""

    labels: tuple[str, ...]
    scale: float = SCALE
    name: str = "classify"
    names: Names = "seed"

    def check(self, examples: Examples) -> None:
        """Every text needs one of the labels."""
        examples.texts()
        known = set(self.labels)
        for index, name in enumerate(examples.ids):
            if examples.target(index) not in known:
                raise DataError(f"Example {name} has the label {examples.target(index)!r}, which is not in the task.")

    def fixed(self, model: Any, seed: Seed) -> Tensor:
        """The vectors of the label names."""
        return _named(model, seed, [spoken(label) for label in self.labels], self.names)

    def predict(self, model: Any, seed: Seed, examples: Examples, rows: Rows, fixed: Tensor | None) -> Prediction:
        """Scaled cosines of texts and label names."""
        assert fixed is not None
        place = {label: i for i, label in enumerate(self.labels)}
        vectors = seed.encode(model, [examples.inputs[i] for i in rows])
        right = torch.tensor([place[examples.target(i)] for i in rows])  # type: ignore[index]
        return Prediction(functional.log_softmax(self.scale * vectors @ fixed.T, dim=-1), right)


@dataclass(frozen=True)
class Choose(_Scored):
    """The choice that is closest to the question."""

    scale: float = SCALE
    name: str = "choose"
    names: Names = "seed"

    def check(self, examples: Examples) -> None:
        """Every text needs its choices."""
        examples.texts()
        for index, name in enumerate(examples.ids):
            if not isinstance(examples.target(index), Choice):
                raise DataError(f"Example {name} has no choices.")

    def predict(self, model: Any, seed: Seed, examples: Examples, rows: Rows, fixed: Tensor | None) -> Prediction:
        """Scaled cosines of questions and choices; places without a choice have probability zero."""
        targets = [examples.target(i) for i in rows]
        choices = [t.choices for t in targets if isinstance(t, Choice)]
        questions = seed.encode(model, [examples.inputs[i] for i in rows])
        answers = _named(model, seed, [text for row in choices for text in row], self.names)
        counts = torch.tensor([len(row) for row in choices])
        owner = torch.repeat_interleave(torch.arange(len(rows)), counts)
        place = torch.cat([torch.arange(len(row)) for row in choices])
        cosines = (questions[owner] * answers).sum(-1)
        scores = torch.full((len(rows), int(counts.max())), -math.inf).index_put((owner, place), self.scale * cosines)
        right = torch.tensor([t.answer for t in targets if isinstance(t, Choice)])
        return Prediction(functional.log_softmax(scores, dim=-1), right)


@dataclass(frozen=True)
class Language(_Scored):
    """The next token, over the first `block` tokens of each text."""

    block: int = 128
    name: str = "language"
    metric: Literal["accuracy", "perplexity"] = "perplexity"

    def check(self, examples: Examples) -> None:
        """Any text will do."""
        examples.texts()

    def predict(self, model: Any, seed: Seed, examples: Examples, rows: Rows, fixed: Tensor | None) -> Prediction:
        """One item for each real token but the first of each text."""
        batch = {k: v[:, : self.block] for k, v in seed.tokens([str(examples.inputs[i]) for i in rows]).items()}
        real = batch["attention_mask"][:, 1:].bool()
        logits = model(**batch, use_cache=False).logits[:, :-1][real]
        return Prediction(functional.log_softmax(logits.float(), dim=-1), batch["input_ids"][:, 1:][real])


@dataclass(frozen=True, eq=False)
class Images(_Scored):
    """The class whose vector is closest to the image's; `vectors` has one row a label, see `prototypes`."""

    labels: tuple[str, ...]
    vectors: NDArray[np.float32]
    scale: float = SCALE
    name: str = "images"

    def key(self) -> str:
        """The labels and the bytes of their vectors."""
        return f"{self.labels} {self.scale} {np.asarray(self.vectors, dtype=np.float32).tobytes().hex()}"

    def check(self, examples: Examples) -> None:
        """Every image needs one of the labels."""
        examples.pixels()
        if len(self.vectors) != len(self.labels):
            raise UsageError("The task needs one vector for each label.")
        known = set(self.labels)
        for index, name in enumerate(examples.ids):
            if examples.target(index) not in known:
                raise DataError(f"Image {name} has the label {examples.target(index)!r}, which is not in the task.")

    def predict(self, model: Any, seed: Seed, examples: Examples, rows: Rows, fixed: Tensor | None) -> Prediction:
        """Scaled cosines of images and class vectors."""
        place = {label: i for i, label in enumerate(self.labels)}
        vectors = seed.encode(model, examples.pixels()[list(rows)])
        classes = torch.from_numpy(np.asarray(self.vectors, dtype=np.float32))
        right = torch.tensor([place[examples.target(i)] for i in rows])  # type: ignore[index]
        return Prediction(functional.log_softmax(self.scale * vectors @ classes.T, dim=-1), right)


def prototypes(seed: Seed, examples: Examples, labels: Sequence[str]) -> NDArray[np.float32]:
    """A vector for each label: the mean of the seed's vectors of its examples, less what all have in common.

    Made from *public* labelled images it reveals nothing; made from an owner's own it is a function of them, and
    whoever uses the unified model for that owner's classes needs it.
    """
    vectors = seed.vectors(examples)
    rows = []
    for label in labels:
        own = [i for i, target in enumerate(examples.targets or ()) if target == label]
        if not own:
            raise DataError(f"No example is called {label!r}, so the class has no vector.")
        rows.append(vectors[own].mean(axis=0))
    found = np.stack(rows) - np.mean(rows, axis=0)
    return np.asarray(found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12), dtype=np.float32)


def evaluate(
    task: Task,
    models: Sequence[Any],
    seed: Seed,
    examples: Examples,
    *,
    weights: NDArray[np.float32] | None = None,
    batch: int = 64,
    progress: Progress = SILENT,
) -> Score:
    """The score of one model, or of several whose probabilities are averaged.

    `weights` (examples, models) says how much each model counts for each example; without it all count the same.
    """
    task.check(examples)
    if not len(examples):
        raise UsageError("There is nothing to evaluate on.")
    shares = np.full((len(examples), len(models)), 1 / len(models)) if weights is None else weights
    before = [model.training for model in models]
    for model in models:
        model.eval()
    hits, loss, items = 0, 0.0, 0
    with torch.inference_mode(), progress.task("Evaluating", total=len(examples), unit="examples") as told:
        fixed = [task.fixed(model, seed) for model in models]
        order = sorted(range(len(examples)), key=lambda i: _length(examples, i))
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            found = [task.predict(m, seed, examples, rows, f) for m, f in zip(models, fixed, strict=True)]
            log_probabilities = _mixture(found, shares[rows])
            right = found[0].right
            hits += int((log_probabilities.argmax(-1) == right).sum())
            loss += float(functional.nll_loss(log_probabilities.double(), right, reduction="sum"))
            items += len(right)
            told.advance(len(rows))
    for model, training in zip(models, before, strict=True):
        model.train(training)
    if getattr(task, "metric", "accuracy") == "perplexity":
        return Score("perplexity", math.exp(loss / max(items, 1)), items)
    return Score("accuracy", hits / items, items)


def _mixture(found: Sequence[Prediction], shares: NDArray[np.floating[Any]]) -> Tensor:
    if len(found) == 1:
        return found[0].log_probabilities
    weights = torch.from_numpy(np.log(np.maximum(shares, 1e-30)).astype(np.float32))  # (rows, models)
    items = len(found[0].right)
    if items != len(weights):  # several items a row (tokens): every model counts the same for all of them
        weights = weights[:1].expand(items, -1)
    stacked = torch.stack([one.log_probabilities for one in found], dim=-1)
    return torch.logsumexp(stacked + weights.unsqueeze(1), dim=-1)


def _named(model: Any, seed: Seed, texts: Sequence[str], names: Names) -> Tensor:
    return seed.remembered(texts) if names == "seed" else seed.encode(model, texts)


def _length(examples: Examples, index: int) -> int:
    return 0 if isinstance(examples.inputs, np.ndarray) else len(examples.inputs[index])


def public_targets(seed: Seed, examples: Examples) -> Tensor:
    """Where public examples belong, by the seed: a pair at its second half, any other example where it is."""
    if seed.kind == "decoder":
        return torch.zeros(0)
    if seed.kind == "vision":
        return torch.from_numpy(seed.vectors(examples))
    texts = examples.texts()
    wanted = [text if examples.target(i) is None else second(examples.target(i)) for i, text in enumerate(texts)]
    return seed.remembered(wanted)


def public_loss(model: Any, seed: Seed, examples: Examples, rows: Rows, targets: Tensor) -> Tensor:
    """What public examples are trained on; `targets` are those of `public_targets`, for all examples.

    Language: the next token. Otherwise an example with a second half (a pair, a question with choices) is pulled
    towards it and away from the others' in the batch; one without keeps the vector that the seed gives it.
    """
    if seed.kind == "decoder":
        return Language(seed.max_tokens).loss(model, seed, examples, rows)
    inputs = examples.pixels()[list(rows)] if seed.kind == "vision" else [examples.texts()[i] for i in rows]
    paired = torch.tensor([seed.kind == "encoder" and examples.target(i) is not None for i in rows])
    return vector_loss(seed.encode(model, inputs), targets[list(rows)], paired)


def vector_loss(vectors: Tensor, targets: Tensor, paired: Tensor) -> Tensor:
    """Of vectors and what they should be: contrastive among those that are `paired`, cosine for the others."""
    loss = (1 - (vectors[~paired] * targets[~paired]).sum(-1)).sum() * SCALE / 2
    if int(paired.sum()) > 1:  # a single pair has nothing that it could be told apart from
        cosines = SCALE * vectors[paired] @ targets[paired].T
        right = torch.arange(len(cosines))
        both = functional.cross_entropy(cosines, right) + functional.cross_entropy(cosines.T, right)
        loss = loss + both / 2 * len(cosines)
    return loss / len(vectors)


def second(target: Any) -> str:
    """The text that a public example is paired with."""
    return target.choices[target.answer] if isinstance(target, Choice) else str(target)


def spoken(label: str) -> str:
    """A label as people would say it: "card_arrival" becomes "card arrival"."""
    return " ".join(label.replace("_", " ").split())
