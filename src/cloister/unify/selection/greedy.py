"""A diverse choice among relevant candidates: greedy maximisation of the determinant of a relevance-weighted kernel.

    choice = greedy(vectors, relevance, count=500, kernel=Gaussian(gamma=2.0), tempering=0.25)
    choice.indices      # in the order in which they were chosen, never one twice
    choice.stopped      # why there are fewer than `count`, if there are

The kernel is diag(q) K diag(q) with q = relevance ** tempering. Adding candidate i to the chosen set S multiplies the
determinant by q_i^2 d_i, where

    d_i = K_ii - K_iS K_SS^-1 K_Si = 1 - |c_i|^2,      c_i = K_iS L^-T,      L L^T = K_SS

is what S does not yet explain of i. The greedy step takes the largest. One more chosen candidate adds one number to
every c_i and so d_i can only fall: a value computed earlier is an upper bound. A candidate whose bound is below the
best up-to-date value cannot win, and its row c_i is left as it is until it might (lazy evaluation, exact); then its
missing entries are made together, by products of matrices instead of one product with a vector a step.

At most O(n m (m + d)) multiplications and n (m + d) numbers; the n x n kernel never exists. Vectors are brought to
length one and multiplied in double precision, because the noise of single precision would look like rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cloister.errors import UsageError
from cloister.progress import SILENT, Progress

Vectors = NDArray[np.floating]
Doubles = NDArray[np.float64]
Indices = NDArray[np.intp]

MEMORY = 512 << 20
SMALL = 64 << 20  # bytes of vectors that are kept as doubles instead of converted when needed
# Speed only; none of these changes what is chosen.
PANEL = 128  # entries of a row that are solved for together
FIRST_LOOK, MOST_AT_ONCE = 64, 2048  # rows that are brought up to date together
WASTE = 4096  # entries that may be made again to save one product of matrices


class Kernel(Protocol):
    """A similarity of vectors of length one, as a function of their inner product: 1 for a vector with itself."""

    def __call__(self, inner: Doubles) -> Doubles:
        """The similarities."""
        ...


@dataclass(frozen=True)
class Gaussian:
    """exp(-gamma |x - y|^2): of full rank on distinct points, whatever their dimension."""

    gamma: float = 2.0

    def __call__(self, inner: Doubles) -> Doubles:
        """The similarities."""
        return np.exp((2 * self.gamma) * (np.minimum(inner, 1.0) - 1.0))


@dataclass(frozen=True)
class Cosine:
    """The inner product: the paper's kernel, whose rank is at most the vectors' dimension."""

    def __call__(self, inner: Doubles) -> Doubles:
        """The similarities."""
        return inner


@dataclass(frozen=True)
class Choice:
    """What was chosen, best first. `gains` are the logarithms of the factors by which the determinant grew."""

    indices: list[int]
    gains: list[float]
    stopped: str = ""

    @property
    def log_determinant(self) -> float:
        """Of the weighted kernel of the chosen."""
        return float(np.sum(self.gains))


def greedy(
    vectors: Vectors,
    relevance: NDArray[np.floating],
    count: int,
    *,
    kernel: Kernel | None = None,
    tempering: float = 0.25,
    memory: int = MEMORY,
    progress: Progress = SILENT,
) -> Choice:
    """Choose at most `count` of the candidates; where two are equally good, the earlier one.

    `memory` bounds the factor: where it would not fit in double precision it is kept in single precision, all sums are
    still made in double, and the choice stops at a rank that single precision can tell.
    """
    _check(vectors, relevance, count, tempering)
    count = min(count, len(vectors))
    dtype: type[np.floating] = np.float64 if len(vectors) * count * 8 <= memory else np.float32
    # What an addition may lose decides when a variance is only noise.
    noise = 64 * float(np.finfo(dtype).eps) * max(count, 1) ** 0.5
    weight = _weight(relevance, tempering)
    factor = _Factor(vectors, kernel or Gaussian(), count, dtype)
    bound = weight.copy()
    search = _Search(factor, weight, bound, noise)
    chosen: list[int] = []
    gains: list[float] = []
    with progress.task("Choosing examples", total=count, unit="examples") as task:
        while len(chosen) < count:
            best = search.best()
            if best is None:
                break
            chosen.append(best)
            gains.append(float(bound[best]))
            factor.add(best)
            bound[best] = -np.inf
            task.advance()
    stopped = ""
    if len(chosen) < count:
        rest = int(np.isfinite(weight).sum()) - len(chosen)
        stopped = (
            f"the {rest} others add nothing to the {len(chosen)} chosen (numerical rank)"
            if rest
            else f"only {len(chosen)} candidates have any relevance"
        )
    return Choice(chosen, gains, stopped)


class _Search:
    """Where the largest gain is. `bound` holds an upper bound of every candidate's, made exact where that matters."""

    def __init__(self, factor: _Factor, weight: Doubles, bound: Doubles, noise: float) -> None:
        self._factor = factor
        self._weight = weight
        self._bound = bound
        self._noise = noise
        self._contenders: Indices = np.empty(0, dtype=np.intp)  # of the last step: likely again

    def best(self) -> int | None:
        """The candidate with the largest gain, None if nothing is to be gained."""
        best = int(np.argmax(self._bound))
        if best not in self._contenders:
            self._contenders = np.append(self._contenders, best)
        look, room, floor = self._largest(self._contenders, FIRST_LOOK), 2 * FIRST_LOOK, -np.inf
        seen: list[Indices] = []
        while self._bound[best] > -np.inf and not self._factor.is_current(best):
            self._make_exact(look)
            seen.append(look)
            floor = max(floor, float(self._bound[look].max()))
            best = int(np.argmax(self._bound))
            look = self._largest(np.flatnonzero(self._bound >= floor), room)
            room = min(4 * room, MOST_AT_ONCE)
        self._contenders = np.concatenate(seen) if seen else self._contenders
        return best if self._bound[best] > -np.inf else None

    def _largest(self, who: Indices, count: int) -> Indices:
        """Of those of `who` whose bounds are not exact the `count` with the largest ones."""
        who = self._factor.outdated(who[self._bound[who] > -np.inf])
        return who if len(who) <= count else who[np.argpartition(self._bound[who], -count)[-count:]]

    def _make_exact(self, who: Indices) -> None:
        variance = self._factor.variances(who)
        with np.errstate(divide="ignore", invalid="ignore"):
            self._bound[who] = np.where(variance > self._noise, self._weight[who] + np.log(variance), -np.inf)


class _Factor:
    """The candidates' rows c_i, each as long as it was last needed."""

    def __init__(self, vectors: Vectors, kernel: Kernel, count: int, dtype: type[np.floating]) -> None:
        self._ready = vectors.size * 8 <= SMALL
        self._vectors = _unit(vectors) if self._ready else vectors
        self._kernel = kernel
        # Rows are handed out in the order of need, so that memory is touched only for candidates that were looked at.
        self._rows = np.empty((len(vectors), count), dtype)
        self._place = np.full(len(vectors), -1, dtype=np.intp)
        self._used = 0
        self._length = np.zeros(len(vectors), dtype=np.intp)
        self._corner = np.zeros((count, count))  # the chosen candidates' rows: L
        self._inverse = np.zeros((count, count))  # of L; a block on its diagonal is the inverse of that block of L
        self._chosen = np.empty((count, vectors.shape[1]))  # and vectors
        self._size = 0

    def is_current(self, index: int) -> bool:
        """Whether the row of candidate `index` has an entry for every chosen one."""
        return bool(self._length[index] == self._size)

    def outdated(self, who: Indices) -> Indices:
        """Those of `who` whose rows are too short."""
        return who[self._length[who] < self._size]

    def add(self, index: int) -> None:
        """Candidate `index`, whose row is current, is chosen."""
        row = self._rows[self._place[index], : self._size].astype(np.float64) if self._size else np.empty(0)
        pivot = np.sqrt(1.0 - row @ row)
        self._corner[self._size, : self._size] = row
        self._corner[self._size, self._size] = pivot
        near = self._size - self._size % PANEL  # only blocks of a panel are needed
        self._inverse[self._size, near : self._size] = (
            -(row[near:] @ self._inverse[near : self._size, near : self._size]) / pivot
        )
        self._inverse[self._size, self._size] = 1.0 / pivot
        self._chosen[self._size] = self._unit(index)
        self._size += 1

    def variances(self, who: Indices) -> Doubles:
        """d_i of each of `who`, whose rows are brought up to date."""
        new = who[self._place[who] < 0]
        self._place[new] = np.arange(self._used, self._used + len(new))
        self._used += len(new)
        found = np.empty(len(who))
        # Rows that lack about the same number of entries go together; some entries are then made again.
        order = np.argsort(-self._length[who], kind="stable")
        jumps = -np.diff(self._length[who[order]]) * np.arange(1, len(who))
        for group in np.split(order, np.flatnonzero(jumps > WASTE) + 1):
            found[group] = self._extend(who[group])
        return found

    def _unit(self, who: Indices | int) -> Doubles:
        return np.asarray(self._vectors[who], np.float64) if self._ready else _unit(self._vectors[who])

    def _extend(self, who: Indices) -> Doubles:
        size, start = self._size, int(self._length[who].min())
        place = self._place[who]
        rows = np.empty((len(who), size))
        rows[:, :start] = self._rows[place, :start]
        rows[:, start:] = self._kernel(self._unit(who) @ self._chosen[start:size].T)
        left = start
        while left < size:  # panel by panel
            right = min(left - left % PANEL + PANEL, size)
            part = rows[:, left:right]
            part -= rows[:, :left] @ self._corner[left:right, :left].T
            part[:] = part @ self._inverse[left:right, left:right].T
            left = right
        self._rows[place, start:size] = rows[:, start:]
        self._length[who] = size
        return 1.0 - np.einsum("ij,ij->i", rows, rows)


def _unit(vectors: Vectors) -> Doubles:
    doubles = vectors.astype(np.float64)
    doubles /= np.sqrt(np.einsum("...i,...i", doubles, doubles))[..., None]
    return doubles


def _weight(relevance: NDArray[np.floating], tempering: float) -> Doubles:
    """2 log q; without tempering all are equal, those of no relevance too."""
    if tempering == 0:
        return np.zeros(len(relevance))
    with np.errstate(divide="ignore"):
        return 2 * tempering * np.log(np.asarray(relevance, dtype=np.float64))


def _check(vectors: Vectors, relevance: NDArray[np.floating], count: int, tempering: float) -> None:
    if vectors.ndim != 2 or relevance.shape != vectors.shape[:1]:
        raise UsageError(
            f"Each candidate needs one vector and one relevance, not {vectors.shape} and {relevance.shape}."
        )
    if count < 0 or not 0 <= tempering < np.inf:
        raise UsageError("`count` and `tempering` cannot be negative.")
    if not (np.isfinite(relevance).all() and (relevance >= 0).all()):
        raise UsageError("Relevance must be finite and not negative.")
    check_vectors(vectors, "candidate")


def check_vectors(vectors: Vectors, what: str) -> None:
    """Finite and not zero, or `UsageError` names the first that is not."""
    for start in range(0, len(vectors), 1 << 13):
        part = vectors[start : start + (1 << 13)]
        length = np.einsum("ij,ij->i", part, part, dtype=np.float64)
        if not (fine := np.isfinite(length) & (length > 0)).all():
            first = start + int(np.argmin(fine))
            raise UsageError(
                f"The vector of {what} {first} is zero or not finite.",
                advice="Is that example empty? Leave it out, or look at the seed that made the vectors.",
            )
