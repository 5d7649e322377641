"""Timing on machines that are not quiet.

Two things are compared by running them in turn, many times, in the order A B B A, and taking the median of the ratios
of neighbours: a disturbance that lasts longer than a pair hits both, and one that does not is an outlier that the
median ignores. Absolute times are medians too, and are information only.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RESAMPLES = 400


@dataclass(frozen=True)
class Comparison:
    """Seconds of A (the thing measured) and B (what it is compared with), pair by pair."""

    a: tuple[float, ...]
    b: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median of A / B."""
        return statistics.median(self._ratios())

    @property
    def spread(self) -> float:
        """Half the width of a 95 % bootstrap interval of that median."""
        return median_spread(self._ratios())

    @property
    def a_median(self) -> float:
        """Seconds of A."""
        return statistics.median(self.a)

    @property
    def b_median(self) -> float:
        """Seconds of B."""
        return statistics.median(self.b)

    def _ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.a, self.b, strict=True)]


def compare(
    a: Callable[[], object],
    b: Callable[[], object],
    *,
    pairs: int,
    warm_up: int = 2,
    inner: int = 1,
    deadline: float = 120.0,
) -> Comparison:
    """Run A and B in turn. `inner` calls make one measurement; after `deadline` seconds it is enough."""
    for _ in range(warm_up):
        a()
        b()
    seconds_a, seconds_b = [], []
    end = time.perf_counter() + deadline
    for pair in range(pairs):
        if pair % 2 == 0:
            seconds_a.append(_seconds(a, inner))
            seconds_b.append(_seconds(b, inner))
        else:
            seconds_b.append(_seconds(b, inner))
            seconds_a.append(_seconds(a, inner))
        if pair >= 4 and time.perf_counter() > end:
            break
    return Comparison(tuple(seconds_a), tuple(seconds_b))


def measure(function: Callable[[], object], *, repeats: int, warm_up: int = 2, inner: int = 1) -> tuple[float, float]:
    """Median seconds of one call, and the spread of that median."""
    for _ in range(warm_up):
        function()
    seconds = [_seconds(function, inner) for _ in range(repeats)]
    return statistics.median(seconds), median_spread(seconds)


def median_spread(values: Sequence[float]) -> float:
    """Half the width of a 95 % bootstrap interval of the median. The resampling is seeded: it is not a secret."""
    if len(values) < 2:
        return 0.0
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return (medians[int(0.975 * RESAMPLES)] - medians[int(0.025 * RESAMPLES)]) / 2


def _seconds(function: Callable[[], object], inner: int) -> float:
    start = time.perf_counter()
    for _ in range(inner):
        function()
    return (time.perf_counter() - start) / inner
