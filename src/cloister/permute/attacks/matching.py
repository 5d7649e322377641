"""What the attacks share: nearest neighbours in bounded memory, one-to-one assignment, bfloat16 rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Feature = Callable[[Array], Array]

_CHUNK_BYTES = 64 << 20  # of candidate rows worked on at once
_FEW_FEATURES = 256  # up to here distances are computed in double precision


@dataclass(frozen=True)
class Matches:
    """For each query: the nearest candidate, its distance, and the distance of the second nearest."""

    index: Array  # [n] int64
    distance: Array  # [n]
    runner_up: Array  # [n]

    def certain(self, ratio: float = 0.5) -> Array:
        """Queries whose nearest candidate is much nearer than the second; the attacker can see this too."""
        certain: Array = self.distance < ratio * self.runner_up
        return certain


def chunks(table: Array) -> Iterator[tuple[int, Array]]:
    """`table` in float32 pieces of bounded size, each with the index of its first row. Works on memory maps."""
    step = max(1, _CHUNK_BYTES // (4 * max(1, table.shape[1])))
    for start in range(0, len(table), step):
        yield start, np.asarray(table[start : start + step], dtype=np.float32)


def map_rows(table: Array, feature: Feature) -> Array:
    """`feature` of every row, computed piece by piece."""
    return np.concatenate([feature(rows) for _, rows in chunks(table)])


def nearest(queries: Array, table: Array, feature: Feature | None = None) -> Matches:
    """Nearest rows of `table` (after `feature`, if given) to `queries`, by Euclidean distance.

    With few features differences as small as a float32 rounding decide, so they are compared in double precision.
    """
    kind: type[Any] = np.float64 if queries.shape[1] <= _FEW_FEATURES else np.float32
    queries = queries.astype(kind)
    count = len(queries)
    index = np.zeros(count, dtype=np.int64)
    best = np.full(count, np.inf)
    second = np.full(count, np.inf)
    everyone = np.arange(count)
    query_squares = np.einsum("nk,nk->n", queries, queries)[:, None]
    for start, rows in chunks(table):
        candidates: Array = (rows if feature is None else feature(rows)).astype(kind)
        squares = query_squares + np.einsum("ck,ck->c", candidates, candidates) - 2 * (queries @ candidates.T)
        here = squares.argmin(axis=1)
        value = squares[everyone, here].astype(np.float64)
        squares[everyone, here] = np.inf
        follower = squares.min(axis=1).astype(np.float64)
        closer = value < best
        second = np.where(closer, np.minimum(best, follower), np.minimum(second, value))
        index = np.where(closer, start + here, index)
        best = np.where(closer, value, best)
    return Matches(index, np.sqrt(np.maximum(best, 0)), np.sqrt(np.maximum(second, 0)))


def assign(gain: Array) -> Array:
    """One-to-one assignment of rows to columns of a square matrix: `columns[row]`, with a large total gain.

    Where a row and a column prefer each other that is final; the rest goes to scipy's exact solver if scipy is there,
    else to the largest remaining entries one after another. For the sharp matrices that arise here both agree.
    """
    size = len(gain)
    choice = gain.argmax(axis=1)
    mutual = gain.argmax(axis=0)[choice] == np.arange(size)
    columns = np.full(size, -1, dtype=np.int64)
    columns[mutual] = choice[mutual]
    rows_left = np.flatnonzero(~mutual)
    if len(rows_left) == 0:
        return columns
    columns_left = np.setdiff1d(np.arange(size), columns[mutual])
    rest = gain[np.ix_(rows_left, columns_left)]
    columns[rows_left] = columns_left[_assign_exactly(rest)]
    return columns


def _assign_exactly(gain: Array) -> Array:
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        return assign_greedily(gain)
    _, columns = linear_sum_assignment(gain, maximize=True)
    return np.asarray(columns, dtype=np.int64)


def assign_greedily(gain: Array) -> Array:
    """Largest entry first, then the largest in another row and column, and so on. Needs nothing but numpy."""
    size = len(gain)
    columns = np.full(size, -1, dtype=np.int64)
    taken = np.zeros(size, dtype=bool)
    left = size
    for flat in np.argsort(gain, axis=None)[::-1]:
        row, column = divmod(int(flat), size)
        if columns[row] < 0 and not taken[column]:
            columns[row] = column
            taken[column] = True
            left -= 1
            if left == 0:
                break
    return columns


def unit_rows(rows: Array) -> Array:
    """Rows divided by their norm: what a row scaling cannot change."""
    rows = np.asarray(rows)
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    unit: Array = rows / np.where(norms > 0, norms, 1)
    return unit


def round_bfloat16(values: Array) -> Array:
    """float32 values rounded to the nearest bfloat16 (ties to even), still stored as float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def percent(hits: Array) -> float:
    """Share of true entries in percent; 0 for nothing."""
    return 100.0 * float(np.mean(hits)) if len(hits) else 0.0


def distinct_rows(rows: Array) -> tuple[Array, Array]:
    """Indices of the first row of each kind, and for every row the number of its kind. Equality is bit for bit."""
    seen: dict[bytes, int] = {}
    first: list[int] = []
    kinds = np.empty(len(rows), dtype=np.int64)
    for position, row in enumerate(np.ascontiguousarray(rows)):
        kind = seen.setdefault(row.tobytes(), len(seen))
        if kind == len(first):
            first.append(position)
        kinds[position] = kind
    return np.array(first, dtype=np.int64), kinds
