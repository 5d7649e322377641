"""How much a public example looks like an owner's: a classifier of "private" against "public" on the seed's vectors.

    scores = relevance(private, public, seed_for_folds=0)       # one probability for each public example

A classifier that saw a public example as a negative scores it too low, so no example is scored by a classifier that
saw it: the public examples are cut into folds, and each fold is scored by the classifier of the other folds
(cross-fitting). The classifier is logistic regression with a quadratic penalty, solved to the optimum by Newton's
method (steps by conjugate gradients, so that wide vectors cost no large matrix); there is no learning rate.

Both sides weigh one half, whatever their numbers: having each private example three times changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloister.errors import UsageError
from cloister.progress import SILENT, Progress

from .greedy import Doubles, Indices, Vectors, check_vectors

PENALTY = 1e-4  # of half the squared weights, beside the mean loss
MOST_STEPS = 100
TOLERANCE = 1e-7  # length of the gradient at which the optimum is reached


@dataclass(frozen=True)
class Classifier:
    """log-odds = vectors @ weights + intercept."""

    weights: Doubles
    intercept: float

    def log_odds(self, vectors: Vectors) -> Doubles:
        """Above zero: more like the private examples."""
        blocks = [vectors[i : i + 8192].astype(np.float64) @ self.weights for i in range(0, len(vectors), 8192)]
        return np.concatenate([np.empty(0), *blocks]) + self.intercept


def fit(private: Vectors, public: Vectors, *, penalty: float = PENALTY, start: Classifier | None = None) -> Classifier:
    """The classifier of `private` against `public`; `start` only makes it faster."""
    features = np.concatenate([private, public]).astype(np.float64)
    sign = np.concatenate([np.ones(len(private)), -np.ones(len(public))])
    weight = np.concatenate([np.full(len(part), 0.5 / len(part)) for part in (private, public)])
    at = np.zeros(features.shape[1] + 1) if start is None else np.append(start.weights, start.intercept)

    def odds_of(at: Doubles) -> Doubles:
        return features @ at[:-1] + at[-1]

    def back(values: Doubles) -> Doubles:
        return np.append(values @ features, values.sum())

    def loss_of(at: Doubles, odds: Doubles) -> float:
        return float(weight @ np.logaddexp(0, -sign * odds) + 0.5 * penalty * (at @ at))

    odds = odds_of(at)
    loss = loss_of(at, odds)
    for _ in range(MOST_STEPS):
        wrong = logistic(-sign * odds)
        gradient = back(-sign * weight * wrong) + penalty * at
        size = float(np.linalg.norm(gradient))
        if size <= TOLERANCE:
            break
        curvature = weight * wrong * (1 - wrong)
        step = _conjugate_gradients(
            lambda v, c=curvature: back(c * odds_of(v)) + penalty * v,  # type: ignore[misc]
            gradient,
            min(0.1, size**0.5) * size,
        )
        length = 1.0
        while True:
            ahead = at - length * step
            odds = odds_of(ahead)
            now = loss_of(ahead, odds)
            if now <= loss - 1e-4 * length * float(gradient @ step) or length < 1e-9:
                break
            length /= 2
        done = now > loss - 1e-15
        at, loss = ahead, now
        if done:
            break
    return Classifier(at[:-1], float(at[-1]))


def _conjugate_gradients(matrix: Callable[[Doubles], Doubles], target: Doubles, tolerance: float) -> Doubles:
    """x with |matrix(x) - target| <= tolerance, or as near as 250 products come."""
    x = np.zeros_like(target)
    rest, way = target.copy(), target.copy()
    square = float(rest @ rest)
    for _ in range(250):
        if square**0.5 <= tolerance:
            break
        product = matrix(way)
        length = square / float(way @ product)
        x += length * way
        rest -= length * product
        square, before = float(rest @ rest), square
        way = rest + (square / before) * way
    return x


def relevance(
    private: Vectors,
    public: Vectors,
    *,
    folds: int = 5,
    negatives: int = 10_000,
    penalty: float = PENALTY,
    seed_for_folds: int = 0,
    progress: Progress = SILENT,
) -> Doubles:
    """The probability that each public example is private, by a classifier that did not see it.

    At most `negatives` public examples train each classifier. `seed_for_folds` cuts the folds; it is no secret.
    """
    if len(private) < 2:
        raise UsageError(
            f"{len(private)} private examples cannot be told from public ones.", advice="Two are the least that can."
        )
    check_vectors(private, "private example")
    last: list[Classifier] = []

    def made(others: Indices) -> Classifier:
        last[:] = [fit(private, public[others], penalty=penalty, start=last[0] if last else None)]
        return last[0]

    return cross_fit(public, made, folds=folds, negatives=negatives, seed_for_folds=seed_for_folds, progress=progress)


def cross_fit(
    public: Vectors,
    make: Callable[[Indices], Classifier],
    *,
    folds: int,
    negatives: int,
    seed_for_folds: int,
    progress: Progress,
) -> Doubles:
    """Probabilities for all public examples; `make` gets the indices of those that a classifier may see."""
    if not 2 <= folds <= len(public):
        raise UsageError(
            f"{folds} folds do not fit {len(public)} public examples.",
            advice="Give at least two folds, and at least as many public examples.",
        )
    if negatives < 1:
        raise UsageError("`negatives` must be at least 1.")
    check_vectors(public, "public example")
    draw = np.random.default_rng(seed_for_folds)
    order = draw.permutation(len(public))
    scores = np.empty(len(public))
    with progress.task("Scoring public examples", total=folds, unit="folds") as task:
        for fold in range(folds):
            held = order[fold::folds]
            others = np.setdiff1d(order, held)
            if len(others) > negatives:
                others = np.sort(draw.choice(others, negatives, replace=False))
            scores[held] = logistic(make(others).log_odds(public[held]))
            task.advance()
    return scores


def logistic(odds: NDArray[np.float64]) -> Doubles:
    """1 / (1 + exp(-odds)), for any odds."""
    return np.exp(-np.logaddexp(0, -odds))
