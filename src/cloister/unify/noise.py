"""Gaussian noise on whole numbers, drawn exactly.

Noise made of floating-point numbers has gaps, and the low bits of a noisy sum can tell what was added to it (Mironov,
2012). Here sums are whole numbers and so is the noise: the discrete Gaussian, drawn by the rejection method of Canonne,
Kamath and Steinke (2020) with rational arithmetic only. Of a sum with sensitivity s, noise of standard deviation
z s has the Renyi divergence of continuous Gaussian noise at most (their theorem 14), which is what `accounting` counts.

Randomness is the operating system's. A seed can be given under a name that says what it does to privacy.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from cloister.errors import UsageError

Below = Callable[[int], int]  # a whole number from 0 to below the argument


def source(insecure_seed: int | None = None) -> Below:
    """The operating system's randomness, or numbers that anyone can repeat and so remove."""
    return secrets.randbelow if insecure_seed is None else random.Random(insecure_seed).randrange


def gaussian(count: int, deviation: float, *, insecure_seed: int | None = None) -> NDArray[np.int64]:
    """`count` whole numbers with probability proportional to exp(-x^2 / (2 deviation^2))."""
    if not (deviation > 0 and math.isfinite(deviation)) or deviation > 1 << 55:
        raise UsageError("The noise needs a standard deviation that is positive and fits in 64 bits.")
    return of_variance(count, Fraction(deviation) ** 2, insecure_seed=insecure_seed)


def of_variance(count: int, variance: Fraction | int, *, insecure_seed: int | None = None) -> NDArray[np.int64]:
    """`gaussian` by its variance, which is exact."""
    below = source(insecure_seed)
    return np.array([_gaussian(Fraction(variance), below) for _ in range(count)], dtype=np.int64)


def laplace(scale: int, *, insecure_seed: int | None = None) -> int:
    """A whole number with probability proportional to exp(-|x| / scale): a count with it is 1/scale-private."""
    if scale < 1:
        raise UsageError("The noise needs a scale of at least 1.")
    return _laplace(scale, source(insecure_seed))


def _gaussian(variance: Fraction, below: Below) -> int:
    scale = math.isqrt(variance.numerator // variance.denominator) + 1
    top, bottom = variance.numerator, variance.denominator * scale
    while True:
        found = _laplace(scale, below)
        away = abs(abs(found) * bottom - top)
        if _bernoulli_exp(away * away * variance.denominator, 2 * variance.numerator * bottom * bottom, below):
            return found


def _laplace(scale: int, below: Below) -> int:
    """A whole number with probability proportional to exp(-|x| / scale)."""
    while True:
        rest = below(scale)
        if not _bernoulli_exp(rest, scale, below):
            continue
        times = 0
        while _bernoulli_exp(1, 1, below):
            times += 1
        size = rest + scale * times
        if below(2) == 0:
            return size
        if size:
            return -size


def _bernoulli_exp(top: int, bottom: int, below: Below) -> bool:
    """True with probability exp(-top / bottom)."""
    for _ in range(top // bottom):
        if not _at_most_one(1, 1, below):
            return False
    return _at_most_one(top % bottom, bottom, below)


def _at_most_one(top: int, bottom: int, below: Below) -> bool:
    """True with probability exp(-top / bottom), for top <= bottom: the alternating series as coin tosses."""
    step = 1
    while below(bottom * step) < top:
        step += 1
    return step % 2 == 1
