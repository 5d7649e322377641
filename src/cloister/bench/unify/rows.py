"""What trials of all methods become in a report, for images and for language: two figures with bars, then the table.

A spread is the standard deviation over draws of the data. What is kept between runs: see `text_rows`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cloister.bench.schema import Row
from cloister.bench.suites import Options
from cloister.bench.unify.text import NO_PRIVACY, OURS
from cloister.bench.unify.text_rows import DRAWS, NO_BAR, cache

Scores = Mapping[str, Mapping[str, float]]  # method -> owner -> accuracy or perplexity


def gather(make: Callable[[int, Path | None], Any], options: Options, what: str) -> list[Scores]:
    """Every method's scores on every draw; `make(draw, cache)` gives a trial. The draws share one seed."""
    found: list[Scores] = []
    first: Any = None
    kept = cache()
    for draw in DRAWS[:1] if options.quick else DRAWS:
        trial = make(draw, kept and kept / what.lower())
        first = first or trial
        trial.seed = first.seed
        names = [name for name in trial.methods() if not name.startswith(f"{OURS}:")]
        scores = {}
        with options.progress.task(f"{what}, draw {draw}", total=len(names), unit="methods") as told:
            for name in names:
                told.describe(f"{what}, draw {draw}: {name}")
                scores[name] = trial.score(name)
                told.advance()
        found.append(scores)
    return found


def accuracies(name: str, draws: Sequence[Scores], *, behind: float, bars: bool = True, paper: str = "") -> list[Row]:
    """Accuracies in percent, compared in points of their mean over owners."""
    return _rows(name, draws, behind=behind, bars=bars, paper=paper, unit="points")


def perplexities(name: str, draws: Sequence[Scores], *, behind: float, bars: bool = True) -> list[Row]:
    """Perplexities, compared by the mean over owners of their logarithms: 0.01 nats are one percent of perplexity."""
    return _rows(name, draws, behind=behind, bars=bars, paper="", unit="nats")


def _rows(name: str, draws: Sequence[Scores], *, behind: float, bars: bool, paper: str, unit: str) -> list[Row]:
    points = unit == "points"

    def mean(scores: Mapping[str, float]) -> float:
        """More is better."""
        return statistics.fmean(100 * value if points else -math.log(value) for value in scores.values())

    def shown(value: float) -> float:
        return value if points else math.exp(-value)

    by_method = {method: [mean(one[method]) for one in draws] for method in draws[0]}
    whole = {method: statistics.fmean(values) for method, values in by_method.items()}
    private = max((m for m in whole if m not in (OURS, *NO_PRIVACY)), key=whole.__getitem__)
    pooling = max(NO_PRIVACY, key=whole.__getitem__)
    above = [a - b for a, b in zip(by_method[OURS], by_method[private], strict=True)]
    below = [b - a for a, b in zip(by_method[OURS], by_method[pooling], strict=True)]
    many = f"{len(draws)} draw{'s' if len(draws) > 1 else ''} of the data" + ("" if bars else f"; {NO_BAR}")
    suffix = " %" if points else ""
    rows = [
        Row.measured(
            f"{name}-above-baselines", statistics.fmean(above), unit, spread=_spread(above), at_most=False,
            bar=0.0 if bars else None,
            baseline=f"best that keeps privacy: {private}, {shown(whole[private]):.1f}{suffix}",
            note=f"unified {shown(whole[OURS]):.1f}{suffix}, mean over owners; smallest {min(above):.2f}; {many}",
        ),
        Row.measured(
            f"{name}-behind-pooling", statistics.fmean(below), unit, spread=_spread(below),
            bar=behind if bars else None, baseline=f"best that pools: {pooling}, {shown(whole[pooling]):.1f}{suffix}",
            note=f"largest {max(below):.2f}; {many}",
        ),
    ]  # fmt: skip
    for method, values in by_method.items():
        owners = {
            o: statistics.fmean(one[method][o] * (100 if points else 1) for one in draws) for o in draws[0][method]
        }
        rows.append(
            Row.measured(
                f"{name} {method}", shown(whole[method]), "%" if points else "perplexity",
                spread=_spread([shown(value) for value in values]), at_most=not points, figures=owners,
                note=", ".join(f"{owner} {value:.1f}" for owner, value in owners.items()),
                paper=paper if method == OURS else "",
            )
        )  # fmt: skip
    return rows


def _spread(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
