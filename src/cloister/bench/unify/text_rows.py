"""The rows of the text trials: accuracy of every method, how far ours is from the best of the others, ablations.

Three draws of the data; a spread is the standard deviation over them. With CLOISTER_BENCH_CACHE naming a folder, a run
that was stopped goes on where it was, and what was measured there before is not measured again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cloister.bench.schema import Row
from cloister.bench.suites import Options, Workload
from cloister.bench.unify.text import ABLATIONS, NO_PRIVACY, OURS, QUICK, Plan, Scores, Trial, average

DRAWS = (0, 1, 2)
ABLATION_DRAWS = (0,)
BEHIND_POOLING = 1.5  # points
SELECTION_SHARE = 0.05
NO_BAR = "too small to be compared: run without --quick"
ACCURACY = "text "  # what rows of accuracies begin with
PAPER = {OURS: "74.4 (LLaMA-3.2-3B, three commonsense sets)", "FlexOlmo": "72.5", "BTM": "72.7", "unrestricted": "75.2"}


def cache() -> Path | None:
    """The folder that keeps what was measured, if one is named."""
    named = os.environ.get("CLOISTER_BENCH_CACHE")
    return Path(named) if named else None


_known: dict[tuple[bool, int, Path | None], Trial] = {}  # ablations go on from what the methods have trained


def _trials(options: Options, draws: Sequence[int]) -> list[Trial]:
    found = []
    for draw in draws:
        key = (options.quick, draw, cache())
        if key not in _known:
            _known[key] = Trial(QUICK if options.quick else Plan(), draw=draw, cache=cache())
        _known[key].progress = options.progress
        found.append(_known[key])
    return found


def methods(options: Options) -> list[Row]:
    """Every method on every draw."""
    trials = _trials(options, DRAWS[:1] if options.quick else DRAWS)
    names = [name for name in trials[0].methods() if not name.startswith(f"{OURS}:")]
    found: dict[str, list[Scores]] = {name: [] for name in names}
    for trial in trials:
        with options.progress.task(f"Texts, draw {trial.draw}", total=len(names), unit="methods") as told:
            for name in names:
                told.describe(f"Texts, draw {trial.draw}: {name}")
                found[name].append(trial.score(name))
                told.advance()
        if cache() is not None or trial.draw not in ABLATION_DRAWS:
            trial.forget()
    return [*compared(found, bars=not options.quick), selection_share(trials, bars=not options.quick)]


def compared(found: Mapping[str, Sequence[Scores]], *, bars: bool = True) -> list[Row]:
    """Ours beside the best privacy-preserving method and the best that pools; then every method's accuracy."""
    averages = {name: np.array([100 * average(scores) for scores in draws]) for name, draws in found.items()}
    mean = {name: float(values.mean()) for name, values in averages.items()}
    private = max((n for n in mean if n != OURS and n not in NO_PRIVACY), key=mean.__getitem__)
    pooling = max(NO_PRIVACY, key=mean.__getitem__)
    count = len(averages[OURS])
    above, behind = averages[OURS] - averages[private], averages[pooling] - averages[OURS]
    draws = f"{count} draw{'s' if count > 1 else ''} of the data" + ("" if bars else f"; {NO_BAR}")
    rows = [
        Row.measured(
            "text-above-baselines", float(above.mean()), "points", spread=_spread(above), bar=0.0 if bars else None,
            at_most=False, baseline=f"best that keeps privacy: {private}, {mean[private]:.1f} %",
            note=f"unified {mean[OURS]:.1f} %, average over owners; {draws}",
        ),
        Row.measured(
            "text-behind-pooling", float(behind.mean()), "points", spread=_spread(behind),
            bar=BEHIND_POOLING if bars else None, baseline=f"best that pools: {pooling}, {mean[pooling]:.1f} %",
            note=draws,
        ),
    ]  # fmt: skip
    return rows + [accuracy(name, scores, PAPER.get(name, "")) for name, scores in found.items()]


def accuracy(name: str, draws: Sequence[Scores], paper: str = "", baseline: str = "") -> Row:
    """One method's accuracy, in percent: the average over owners, and each owner's in the figures."""
    owners = {owner: 100 * float(np.mean([scores[owner] for scores in draws])) for owner in draws[0]}
    averages = np.array([100 * average(scores) for scores in draws])
    each = ", ".join(f"{owner} {value:.1f}" for owner, value in owners.items())
    return Row.measured(
        ACCURACY + name, float(averages.mean()), "%", spread=_spread(averages), at_most=False, paper=paper, note=each,
        baseline=baseline, figures=owners,
    )  # fmt: skip


def selection_share(trials: Sequence[Trial], *, bars: bool = True) -> Row:
    """Selection's part of the making of one unified model, all owners and the coordinator together."""
    stages = {stage: float(np.median([t.seconds.get(stage, 0.0) for t in trials])) for stage in trials[0].seconds}
    chosen = stages.get("selection dpp", 0.0)
    rest = sum(stages.get(stage, 0.0) for stage in ("vectors", "experts aligned", "router start", "joint training"))
    if not chosen or not rest:
        return Row.failed("text-selection-share", "ratio", "the cache does not hold the times of one whole unification")
    note = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in stages.items())
    return Row.measured(
        "text-selection-share", chosen / (chosen + rest), "ratio", bar=SELECTION_SHARE if bars else None,
        baseline="the whole unification", paper="0.03 to 0.05", note=note, figures=stages,
    )  # fmt: skip


def ablations(options: Options) -> list[Row]:
    """Our model with one thing changed at a time, on the first draw."""
    rows: list[Row] = []
    for trial in _trials(options, ABLATION_DRAWS):
        ours = trial.score(OURS)
        whole = f"{OURS} {100 * average(ours):.1f} % on the same draw"
        names = list(ABLATIONS)[:2] if options.quick else list(ABLATIONS)
        with options.progress.task("Ablations", total=len(names), unit="variants") as told:
            for name in names:
                told.describe(f"Ablations: {name}")
                rows.append(accuracy(f"{OURS}: {name}", [trial.score(f"{OURS}: {name}")], baseline=whole))
                told.advance()
    return rows


def _spread(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float | None:
    return float(values.std(ddof=1)) if len(values) > 1 else None


WORKLOADS = (
    Workload("text", "7 owners of texts, MiniLM: accuracy beside every baseline", methods, "points", 0.0),
    Workload("text-ablations", "our model with one thing changed at a time", ablations, "%"),
)
