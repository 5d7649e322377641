"""The whole choice of proxies: relevance, a pool of the most relevant, and a diverse choice of them.

    chosen = choose(private_vectors, public_vectors, Selection(pool=3000, count=500))
    chosen.indices      # of public examples, best first, never one twice

The indices are a function of the private examples and they leave the owner: see docs/unify.md for what they tell, and
`Selection(epsilon=..., delta=...)` for what bounds it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cloister.errors import UsageError
from cloister.progress import SILENT, Progress

from .greedy import Cosine, Doubles, Gaussian, Kernel, Vectors, greedy
from .private import Privacy, dp_relevance
from .relevance import relevance

METHODS = ("dpp", "relevance", "random")


@dataclass(frozen=True)
class Selection:
    """How proxies are chosen. `relevance` is FlexOlmo's way; `random` looks at no private example."""

    method: Literal["dpp", "relevance", "random"] = "dpp"
    pool: int = 3000
    count: int = 500
    tempering: float = 0.25  # the exponent of relevance: 0 is diversity alone, 1 the paper's
    gamma: float = 2.0  # of the Gaussian kernel
    folds: int = 5
    negatives: int = 10_000
    seed_for_folds: int = 0  # owners that choose at random need different ones
    kernel: Literal["gaussian", "cosine"] = "gaussian"
    epsilon: float | None = None  # with delta: relevance with differential privacy
    delta: float | None = None

    def check(self) -> None:
        """`UsageError` names the first setting that makes no sense."""
        wrong = (
            (self.method not in METHODS, "method", f"one of {', '.join(METHODS)}"),
            (self.kernel not in ("gaussian", "cosine"), "kernel", "gaussian or cosine"),
            (self.count < 1, "count", "at least 1"),
            (self.method == "dpp" and self.pool < self.count, "pool", f"at least `count`, {self.count}"),
            (not 0 <= self.tempering < np.inf, "tempering", "0 or more"),
            (not 0 < self.gamma < np.inf, "gamma", "more than 0"),
            (self.folds < 2, "folds", "at least 2"),
            (self.negatives < 1, "negatives", "at least 1"),
            (self.seed_for_folds < 0, "seed_for_folds", "0 or more"),
            ((self.epsilon is None) != (self.delta is None), "delta", "given with `epsilon`, and only with it"),
        )
        for bad, name, wanted in wrong:
            if bad:
                raise UsageError(f"`{name}` is {getattr(self, name)!r}.", advice=f"It must be {wanted}.")


@dataclass(frozen=True)
class Chosen:
    """Indices of public examples, best first. Only they are meant to leave; the rest is for the owner's eyes."""

    indices: tuple[int, ...]
    relevance: Doubles  # of each of them (without private data: ones)
    stopped: str  # why there are fewer than asked for, "" if there are not
    seconds: float
    privacy: Privacy | None = None  # what they cost, if they were chosen with differential privacy


def choose(
    private: Vectors,
    public: Vectors,
    selection: Selection = Selection(),
    *,
    insecure_seed_for_noise: int | None = None,
    progress: Progress = SILENT,
) -> Chosen:
    """Choose the public examples that stand for `private`. Both are the seed's vectors, one row an example."""
    began = time.perf_counter()
    selection.check()
    if private.ndim != 2 or public.ndim != 2 or private.shape[1] != public.shape[1]:
        raise UsageError(
            f"Private vectors {private.shape} and public ones {public.shape} do not fit.",
            advice="Both must be rows made by the same seed.",
        )
    if selection.method == "random":
        order = np.random.default_rng(selection.seed_for_folds).permutation(len(public))[: selection.count]
        scores, spent, indices, stopped = np.ones(len(public)), None, order.tolist(), ""
    else:
        scores, spent = _scores(private, public, selection, insecure_seed_for_noise, progress)
        indices, stopped = _best(scores, public, selection, progress)
    if not stopped and len(indices) < selection.count:
        stopped = f"there are only {len(public)} public examples"
    seconds = time.perf_counter() - began
    return Chosen(tuple(indices), scores[np.array(indices, dtype=np.intp)], stopped, seconds, spent)


def _scores(
    private: Vectors, public: Vectors, selection: Selection, noise: int | None, progress: Progress
) -> tuple[Doubles, Privacy | None]:
    folds, negatives, seed = selection.folds, selection.negatives, selection.seed_for_folds
    if selection.epsilon is None or selection.delta is None:
        return relevance(
            private, public, folds=folds, negatives=negatives, seed_for_folds=seed, progress=progress
        ), None
    return dp_relevance(
        private, public, epsilon=selection.epsilon, delta=selection.delta, folds=folds, negatives=negatives,
        seed_for_folds=seed, insecure_seed_for_noise=noise, progress=progress,
    )  # fmt: skip


def _best(scores: Doubles, public: Vectors, selection: Selection, progress: Progress) -> tuple[list[int], str]:
    order = np.argsort(-scores, kind="stable")
    if selection.method == "relevance":
        return order[: selection.count].tolist(), ""
    kernel: Kernel = Gaussian(selection.gamma) if selection.kernel == "gaussian" else Cosine()
    # A pool of everything is not copied.
    whole = selection.pool >= len(public)
    pool = np.arange(len(public)) if whole else np.sort(order[: selection.pool])
    choice = greedy(
        public if whole else public[pool], scores[pool], selection.count,
        kernel=kernel, tempering=selection.tempering, progress=progress,
    )  # fmt: skip
    return pool[choice.indices].tolist(), choice.stopped
