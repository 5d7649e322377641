"""Who was in the training data? Membership inference against an expert, as strong as one's own machine allows.

    found = attack(train, rows=600, references=16)      # train(rows) -> scorer;  scorer(rows) -> log-probabilities
    found.likelihood.auc, found.likelihood.tpr          # the strong attack
    found.loss.auc                                      # the cheap one: members have lower loss

The strong attack is LiRA (Carlini et al., 2022). Experts are trained on random halves of the rows; so every row has
experts that saw it ("in") and experts that did not ("out"). The logit of the true label of a row,
log(p / (1 - p)), is about Gaussian over experts; the attack compares its value at the attacked expert under the two
Gaussians of that row. Means are the row's own, drawn towards the common shift where experts are few; variances are
common until there are 64 experts, because eight numbers do not give one.

Attacked is either the expert that is going to leave (`target`, with rows that it did not see), or each of the
reference experts in turn, with all others as its references. The second needs no spare data, but its experts saw half
of the rows, and small sets leak more: it errs on the side of reporting too much.

The training function is passed in, so nothing here knows what an expert is. With `workdir` every finished expert's
scores are kept and a killed run goes on; they are a function of private data and stay at home.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister import storage
from cloister.errors import DataError, UsageError
from cloister.progress import SILENT, Progress
from cloister.unify.disclosure.measures import Doubles, Separation, separation

Rows = NDArray[np.int64]
Scorer = Callable[[Rows], "NDArray[np.floating]"]  # the log-probability of each row's true label
Train = Callable[[Rows], Scorer]

REFERENCES, QUICK = 16, 4
MANY = 64  # references from which a row's own variance is used
PULL = 2.0  # how many experts the common shift counts for
CERTAIN = 1e-12


@dataclass(frozen=True)
class Leak:
    """What the two attacks found. `scores`, `member` and `rows` are of the strong one, one entry a decision."""

    likelihood: Separation
    loss: Separation
    references: int
    quick: bool
    own_expert: bool  # whether the expert that leaves was attacked, not experts like it
    scores: Doubles
    member: NDArray[np.bool_]
    rows: Rows

    def caveats(self) -> list[str]:
        """What a reader must know beside the figures."""
        found = []
        if self.quick:
            found.append(
                f"Quick: only {self.references} reference experts. The attack is weaker than it could be, so the "
                f"figures are too low; run it with {REFERENCES} or more before you rely on them."
            )
        if not self.own_expert:
            found.append(
                "The attacked experts saw half of the rows that the real one sees. Smaller sets leak more, so the "
                "figures are rather too high in this respect."
            )
        if self.likelihood.tpr is None:
            found.append("Too few rows outside the training data to see one false positive in a hundred.")
        return found


def scaled_logit(log_probabilities: NDArray[np.floating]) -> Doubles:
    """log(p / (1 - p)) from log(p), without losing a p close to 1."""
    log_p = np.minimum(np.asarray(log_probabilities, dtype=np.float64), -CERTAIN)
    return log_p - np.log(-np.expm1(log_p))


def halves(rows: int, experts: int, seed: int) -> NDArray[np.bool_]:
    """Who sees what: (experts, rows), each expert a random half, independent of the others."""
    draw = np.random.default_rng(seed)
    seen = np.zeros((experts, rows), dtype=bool)
    for expert in seen:
        expert[draw.permutation(rows)[: rows // 2]] = True
    return seen


def attack(
    train: Train,
    rows: int,
    *,
    references: int = REFERENCES,
    target: Scorer | None = None,
    member: NDArray[np.bool_] | None = None,
    logits: bool = True,
    quick: bool = False,
    seed: int = 0,
    stamp: str = "",
    workdir: Path | None = None,
    progress: Progress = SILENT,
) -> Leak:
    """Train reference experts on halves of the rows 0..rows-1 and attack.

    With `target` that expert is attacked; `member` says which rows it saw. Without, the references are attacked in
    turn. `logits=False`: the scorer's numbers are compared as they are (a mean over many tokens is no probability).
    `stamp` names the data and settings: kept scores of anything else are not used.
    """
    if rows < 4 or (target is None) != (member is None) or (member is not None and member.shape != (rows,)):
        raise UsageError("The attack needs rows, and for a target of one's own which of them it saw.")
    count = min(references, QUICK) if quick else references
    if count < 2:
        raise UsageError("At least two reference experts are needed.")
    if target is None:
        count += 1  # one is attacked, the others are its references
    seen = halves(rows, count, seed)
    everything = np.arange(rows, dtype=np.int64)
    kept = _Kept(workdir, stamp, rows, count, seed)
    log_p = np.empty((count, rows))
    with progress.task("Reference experts", total=count, unit="experts") as task:
        for number in range(count):
            held = kept.read(number)
            if held is None:
                held = _checked(train(np.flatnonzero(seen[number]).astype(np.int64))(everything), rows)
                kept.write(number, held)
            log_p[number] = held
            task.advance()
    values = scaled_logit(log_p) if logits else log_p
    if target is not None and member is not None:
        own = _checked(target(everything), rows)
        strong = likelihood_ratio(scaled_logit(own) if logits else own, values, seen)
        cheap, truth, at = own, np.asarray(member, dtype=bool), everything
    else:
        others = [np.arange(count) != number for number in range(count)]
        strong = np.concatenate([likelihood_ratio(values[i], values[o], seen[o]) for i, o in enumerate(others)])
        cheap, truth, at = log_p.ravel(), seen.ravel(), np.tile(everything, count)
    return Leak(
        separation(strong, truth, rows=at),
        separation(cheap, truth, rows=at),
        references=count - (target is None),
        quick=count < REFERENCES,
        own_expert=target is not None,
        scores=strong,
        member=truth,
        rows=at,
    )


def likelihood_ratio(values: Doubles, references: Doubles, seen: NDArray[np.bool_]) -> Doubles:
    """Log of how much likelier each row's value is if the row was seen; (rows,), (experts, rows), (experts, rows)."""
    count_in, count_out = seen.sum(0), (~seen).sum(0)
    if not count_in.sum() or not count_out.sum():
        raise UsageError("The reference experts must differ in what they saw.")
    middle = references.mean(0)
    mean_in = np.where(seen, references, 0).sum(0) / np.maximum(count_in, 1)
    mean_out = np.where(seen, 0, references).sum(0) / np.maximum(count_out, 1)
    both = (count_in > 0) & (count_out > 0)
    shift = float((mean_in - mean_out)[both].mean()) if both.any() else 0.0
    weight = count_in * count_out / np.maximum(count_in + count_out, 1)  # how well this row's own shift is known
    own = np.where(both, mean_in - mean_out, shift)
    gap = (weight * own + PULL * shift) / (weight + PULL)
    mean_out = middle - gap * count_in / (count_in + count_out)
    mean_in = mean_out + gap
    spread_in = _variance(np.where(seen, references - mean_in, 0.0), count_in)
    spread_out = _variance(np.where(seen, 0.0, references - mean_out), count_out)
    return _log_density(values, mean_in, spread_in) - _log_density(values, mean_out, spread_out)


def _variance(deviation: Doubles, count: NDArray[np.int64]) -> Doubles:
    """Of each row where experts are many, of all rows together where they are few."""
    common = float((deviation**2).sum() / max(int(count.sum()), 1))
    if len(deviation) < MANY:
        return np.full(deviation.shape[1], max(common, CERTAIN))
    return np.maximum(((deviation**2).sum(0) + PULL * common) / (count + PULL), CERTAIN)


def _log_density(values: Doubles, mean: Doubles, variance: Doubles) -> Doubles:
    found: Doubles = -((values - mean) ** 2) / (2 * variance) - np.log(variance) / 2
    return found


def _checked(scores: NDArray[np.floating], rows: int) -> Doubles:
    found = np.asarray(scores, dtype=np.float64)
    if found.shape != (rows,) or not np.isfinite(found).all():
        raise DataError("A scorer must give one finite log-probability a row.", advice="Lower the learning rate.")
    return found


class _Kept:
    """Scores of finished experts, one file each, written whole or not at all."""

    def __init__(self, workdir: Path | None, stamp: str, rows: int, count: int, seed: int) -> None:
        about = json.dumps([stamp, rows, count, seed])
        self._folder = workdir and workdir / f"references-{hashlib.sha256(about.encode()).hexdigest()[:16]}"
        self._rows = rows
        if self._folder:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def read(self, number: int) -> Doubles | None:
        path = self._folder and self._folder / f"{number}.npy"
        if not path or not path.is_file():
            return None
        try:
            return _checked(np.load(io.BytesIO(path.read_bytes()), allow_pickle=False), self._rows)
        except (ValueError, EOFError, DataError):
            return None  # damaged: it is trained again

    def write(self, number: int, scores: Doubles) -> None:
        if self._folder:
            file = io.BytesIO()
            np.save(file, scores, allow_pickle=False)
            storage.write_secret(self._folder / f"{number}.npy", file.getvalue())
