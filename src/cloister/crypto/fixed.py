"""The fixed-point numbers of a computation, the same for every backend: a real x is the integer round(x * 2^fraction),
and no integer reaches a quarter of the prime."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.crypto.checks import array_of, whole
from cloister.errors import InvalidParameter

PRIME = 2_199_023_190_017
"""Shares are numbers below it: the largest prime below 2^41 that is 1 mod 16384."""
VALUE_BOUND = PRIME // 4
"""No value may reach this size."""
FRACTION_BITS = 12
"""Fraction bits where nothing else is said."""
MOST_FRACTION = 24
"""Of a session."""


def scaled(values: Any, fraction: int = FRACTION_BITS) -> NDArray[np.int64]:
    """Real numbers as integers at 2^fraction, rounded to nearest; refuses what does not fit."""
    whole(fraction, "fraction", 0, 39)
    numbers = np.rint(array_of(values, "The values", "biuf").astype(np.float64) * (1 << fraction))
    if not np.isfinite(numbers).all():
        raise InvalidParameter("Infinite numbers and NaN cannot be shared.")
    if numbers.size and np.abs(numbers).max() >= VALUE_BOUND:
        raise too_large(fraction)
    return numbers.astype(np.int64)


def too_large(fraction: int) -> InvalidParameter:
    """The error for a number that no share can hold."""
    return InvalidParameter(
        f"A number does not fit into a share: with {fraction} fraction bits the limit is "
        f"{VALUE_BOUND / (1 << fraction):.6g}.",
        advice="Scale the values down or use fewer fraction bits.",
    )
