"""How well an attack tells two groups apart, with an interval.

    found = separation(scores_of_members, scores_of_others)
    found.auc, found.tpr        # each an `Estimate` with a 95 % interval

`auc` is the probability that a member scores higher than a non-member: 0.5 is guessing. The rate of true positives at
1 % false ones says how many members can be named with few mistakes; an attack can be bad on average and still be
sure of some (Carlini et al., 2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloister.errors import UsageError

Doubles = NDArray[np.float64]
FEW = 0.01  # the rate of false positives at which true ones are counted
RESAMPLES = 300


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float

    def text(self) -> str:
        """As reports write it."""
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    def holds(self, value: float) -> bool:
        """Whether the interval contains `value`."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Separation:
    """How well scores tell members from others. `tpr` is None where there are too few others to see 1 %."""

    auc: Estimate
    tpr: Estimate | None


def auc(positive: NDArray[np.floating], negative: NDArray[np.floating]) -> float:
    """The probability that a positive scores higher than a negative; ties count half."""
    if not len(positive) or not len(negative):
        raise UsageError("Two groups are needed to tell them apart.")
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, side="left") + np.searchsorted(ordered, positive, side="right")
    return float(below.mean() / 2 / len(negative))


def rate_at(positive: NDArray[np.floating], negative: NDArray[np.floating], few: float = FEW) -> float:
    """The share of positives above a threshold that at most `few` of the negatives exceed."""
    allowed = math.floor(few * len(negative))
    threshold = np.sort(negative)[-allowed - 1]
    return float((positive > threshold).mean())


def curve(positive: NDArray[np.floating], negative: NDArray[np.floating]) -> tuple[Doubles, Doubles]:
    """False and true positive rates of all thresholds, both rising."""
    thresholds = np.unique(np.concatenate([positive, negative]))[::-1]
    above = [
        1 - np.searchsorted(np.sort(group), thresholds, side="left") / len(group) for group in (negative, positive)
    ]
    return np.concatenate([[0.0], above[0]]), np.concatenate([[0.0], above[1]])


def separation(
    scores: NDArray[np.floating],
    member: NDArray[np.bool_],
    *,
    rows: NDArray[np.integer] | None = None,
    few: float = FEW,
    seed: int = 0,
) -> Separation:
    """AUC and true positives at `few` false ones.

    The interval comes from resampling (bootstrap). Scores that share an entry of `rows` concern the same example and
    are drawn together: several models attacked with the same examples are not independent. The resampling is seeded; it
    is no secret.
    """
    scores, member = np.asarray(scores, dtype=np.float64), np.asarray(member, dtype=bool)
    if scores.shape != member.shape or scores.ndim != 1 or not np.isfinite(scores).all():
        raise UsageError("Each score must be finite and say of whom it is.")
    enough = int((~member).sum()) >= 1 / few
    groups = np.arange(len(scores)) if rows is None else np.unique(rows, return_inverse=True)[1]
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(groups.max() + 2))
    whole = auc(scores[member], scores[~member]), rate_at(scores[member], scores[~member], few) if enough else 0.0
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(RESAMPLES):
        drawn = draw.integers(0, len(starts) - 1, len(starts) - 1)
        if rows is None:
            at = drawn
        else:
            lengths = starts[drawn + 1] - starts[drawn]
            offset = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            at = order[np.repeat(starts[drawn], lengths) + offset]
        yes, no = scores[at][member[at]], scores[at][~member[at]]
        if len(yes) and len(no) >= (1 / few if enough else 1):
            found.append((auc(yes, no), rate_at(yes, no, few) if enough else 0.0))
    low, high = np.quantile(np.array(found or [whole]), [0.025, 0.975], axis=0)
    area = Estimate(whole[0], float(low[0]), float(high[0]))
    return Separation(area, Estimate(whole[1], float(low[1]), float(high[1])) if enough else None)


def most_rate(epsilon: float, delta: float, few: float = FEW) -> float:
    """True positives at `few` false ones that no attack exceeds under (epsilon, delta)-differential privacy."""
    rise = math.exp(min(epsilon, 700))
    return max(few, min(1.0, rise * few + delta, 1 - (1 - delta - few) / rise))


def most_auc(epsilon: float, delta: float) -> float:
    """The AUC that no attack exceeds under (epsilon, delta)-differential privacy: the area under `most_rate`."""
    rise = math.exp(min(epsilon, 700))
    bend = (1 - delta) / (1 + rise)  # where its two lines meet, (bend, 1 - bend)
    return bend * (delta + 1 - bend) / 2 + (1 - delta - bend) * (2 - bend) / 2 + delta


def share(count: int, of: int) -> Estimate:
    """A proportion with Wilson's 95 % interval."""
    if not 0 <= count <= of or not of:
        raise UsageError("A share is of something.")
    z, p = 1.959964, count / of
    middle = (p + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return Estimate(p, max(0.0, middle - half), min(1.0, middle + half))
