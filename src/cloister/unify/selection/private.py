"""Relevance with differential privacy: the private vectors enter through one noisy sum, and through nothing else.

    scores, spent = dp_relevance(private, public, epsilon=1.0, delta=1e-5)

*What is released.* Each private vector x, of length at most 1, is written on a grid of steps 2^-16 (towards zero, so
that it does not grow), together with the number 1/4; s is the sum of these rows of integers over the private examples.
Released is s + z, z discrete Gaussian in every coordinate.

*Sensitivity.* Neighbours differ by one example more or less. Then s differs by one row, whose squared length is at most
1 + 1/16 (in steps: 2^32 + 2^28, all in exact integers). Replacing an example differs by two such changes.

*Privacy.* Discrete Gaussian noise of variance v on integers gives rho-zero-concentrated privacy with
rho = sensitivity^2 / (2 v) (Canonne, Kamath, Steinke 2020), and rho gives (epsilon, delta) with

    delta = inf over a > 1 of exp((a - 1)(a rho - epsilon)) / (a - 1) * (1 - 1/a)^a         (their conversion).

v is the least integer for which that delta is at most the one asked for. The noise is drawn exactly, in integers, from
the operating system's randomness; no floating-point number touches it, so rounding cannot betray what was added.

*The rest is post-processing.* The count hidden in s + z estimates how many examples there are, the other coordinates
their mean. The classifier is the public examples' distribution tilted, p(x) exp(w x) / Z, until its mean is the
estimated one (a quadratic penalty on w keeps noise from being followed): logistic regression's model fitted by its
sufficient statistic. It reads public vectors and s + z alone. So do all folds of the cross-fitting, which share the one
s + z: the whole of what is released, scores and choice included, costs (epsilon, delta) once.

*Assumed.* A vector depends on its own example and a seed that is public, on nothing else: not on batch mates, not on
weights trained on the data. One example is one unit of protection; who contributed k is protected k times less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cloister.errors import UsageError
from cloister.progress import SILENT, Progress
from cloister.unify import noise

from .greedy import Doubles, Indices, Vectors
from .relevance import Classifier, cross_fit

STEPS = 1 << 16  # of the grid, per unit of length
COUNT_STEPS = STEPS // 4  # what each example adds to the count's coordinate
SENSITIVITY_SQUARED = STEPS**2 + COUNT_STEPS**2


@dataclass(frozen=True)
class Privacy:
    """What a release costs: for examples added or removed, (epsilon, delta), and rho for composition with others."""

    epsilon: float
    delta: float
    rho: float


def dp_relevance(
    private: Vectors,
    public: Vectors,
    *,
    epsilon: float,
    delta: float,
    folds: int = 5,
    negatives: int = 10_000,
    seed_for_folds: int = 0,
    insecure_seed_for_noise: int | None = None,
    progress: Progress = SILENT,
) -> tuple[Doubles, Privacy]:
    """`relevance` with (epsilon, delta)-differential privacy for the private examples, and what was spent."""
    if private.ndim != 2 or public.ndim != 2 or private.shape[1] != public.shape[1]:
        raise UsageError(f"Private vectors {private.shape} and public ones {public.shape} differ in width.")
    variance = noise_variance(epsilon, delta)
    noisy = noisy_sum(statistic(private), variance, insecure_seed=insecure_seed_for_noise)
    count = max(float(noisy[-1]) / COUNT_STEPS, 1.0)
    mean = noisy[:-1].astype(np.float64) / STEPS / count
    penalty = min(max(3 * math.sqrt(variance) / STEPS / count, 0.01), 1.0)  # three times the noise of a coordinate

    def made(others: Indices) -> Classifier:
        return tilt(mean, public[others].astype(np.float64), penalty)

    scores = cross_fit(public, made, folds=folds, negatives=negatives, seed_for_folds=seed_for_folds, progress=progress)
    return scores, Privacy(epsilon, delta, SENSITIVITY_SQUARED / (2 * variance))


def statistic(private: Vectors) -> Indices:
    """The exact sum of the examples' rows of integers: vectors of length at most `STEPS`, and the count's steps.

    A longer vector is shortened. The bound is enforced on the integers, not on what floating point says of them.
    """
    total = np.zeros(private.shape[1] + 1, dtype=np.int64)
    for start in range(0, len(private), 4096):
        total[:-1] += _on_grid(private[start : start + 4096]).sum(0)
    total[-1] = COUNT_STEPS * len(private)
    return total


def _on_grid(vectors: Vectors) -> Indices:
    """Each vector in steps of the grid, towards zero; one that is too long becomes shorter, a bad one becomes zero."""
    doubles = np.where(np.isfinite(vectors), vectors, 0.0).astype(np.float64)
    length = np.abs(doubles).max(axis=1, initial=0.0)
    doubles /= np.maximum(length, 1.0)[:, None]  # first, so that no square overflows
    doubles /= np.maximum(np.sqrt(np.einsum("ij,ij->i", doubles, doubles)), 1.0)[:, None]
    whole = np.trunc(doubles * STEPS).astype(np.int64)
    while (over := np.einsum("ij,ij->i", whole, whole) > STEPS**2).any():  # by the last bit of a square root
        whole[over] -= np.sign(whole[over])
    return whole


def noise_variance(epsilon: float, delta: float) -> int:
    """The least variance, in squared steps, that gives (epsilon, delta)."""
    if not (0 < epsilon < math.inf and 0 < delta < 1):
        raise UsageError(
            f"({epsilon}, {delta}) is no privacy guarantee.", advice="Give epsilon > 0 and delta between 0 and 1."
        )
    low, high = 0, 1
    while delta_of(SENSITIVITY_SQUARED / (2 * high), epsilon) > delta:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if delta_of(SENSITIVITY_SQUARED / (2 * middle), epsilon) > delta:
            low = middle
        else:
            high = middle
    return high


def delta_of(rho: float, epsilon: float) -> float:
    """The delta that rho-zero-concentrated privacy gives at `epsilon`: the best of many orders, so never too small."""
    order = 1 + np.exp(np.linspace(-12, 12, 4001))
    log = (order - 1) * (order * rho - epsilon) - np.log(order - 1) + order * np.log1p(-1 / order)
    return float(min(1.0, math.exp(min(float(log.min()), 0.0))))


def noisy_sum(total: Indices, variance: int, *, insecure_seed: int | None = None) -> Indices:
    """`total` with discrete Gaussian noise in every coordinate. A seed makes it repeatable, and worthless."""
    return total + noise.of_variance(len(total), variance, insecure_seed=insecure_seed)


def tilt(mean: Doubles, public: Doubles, penalty: float) -> Classifier:
    """The w for which `public`, weighted by exp(w x), has mean `mean`, but for `penalty` w: Newton's method.

    Its score is the density ratio exp(w x) / Z as log-odds, so even odds are where private and public are equally
    likely.
    """
    at = np.zeros(len(mean))

    def partition(at: Doubles) -> tuple[float, Doubles]:
        inner = public @ at
        top = float(inner.max())
        share = np.exp(inner - top)
        total = float(share.sum())
        return top + math.log(total / len(public)), share / total

    log_z, share = partition(at)
    value = log_z - float(mean @ at) + 0.5 * penalty * float(at @ at)
    for _ in range(50):
        tilted = share @ public
        gradient = tilted - mean + penalty * at
        if np.linalg.norm(gradient) <= 1e-9:
            break
        spread = (public * share[:, None]).T @ public - np.outer(tilted, tilted)
        step = np.linalg.solve(spread + penalty * np.eye(len(at)), gradient)
        length = 1.0
        while True:
            ahead = at - length * step
            log_z, share = partition(ahead)
            now = log_z - float(mean @ ahead) + 0.5 * penalty * float(ahead @ ahead)
            if now <= value or length < 1e-9:
                break
            length /= 2
        at, done, value = ahead, value - now <= 1e-13, now
        if done:
            break
    return Classifier(at, -log_z)
