"""Any base: equal tokens give equal rows.

Who      any server, whatever it knows.
Needs    what users send.
Wins     which tokens of a request, of all requests and of all users of a context are the same. This is what turns
         "secret base" into a substitution cipher; `frequency` is the next step. Scaled rows are equal up to a factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cloister.permute.attacks.matching import Array, distinct_rows, percent, unit_rows


@dataclass(frozen=True)
class Linked:
    """Both in percent."""

    repeated: float  # token occurrences whose token occurs more than once
    linked: float  # of those, occurrences that the server puts together with all their equals and with nothing else


def kinds_of(rows: Array, *, ignore_scale: bool = False) -> Array:
    """A number per row, equal for equal rows. `ignore_scale` compares directions, to five digits of every entry."""
    if not ignore_scale:
        return distinct_rows(rows)[1]
    directions = unit_rows(np.asarray(rows, dtype=np.float64))
    # One pass in the order of a fixed random projection: equal directions are neighbours there.
    projection = directions @ np.random.default_rng(0).standard_normal(directions.shape[1])
    order = np.argsort(projection)
    kinds = np.empty(len(rows), dtype=np.int64)
    kind = -1
    for position, row in enumerate(order):
        if position == 0 or directions[row] @ directions[order[position - 1]] < 1 - 1e-5:
            kind += 1
        kinds[row] = kind
    return kinds


def measure_equality(kinds: Array, truth: Array) -> Linked:
    """How well the server's `kinds` agree with the true ids of the same occurrences."""
    counts = np.bincount(truth)
    repeated = counts[truth] > 1
    pairs, pair_counts = np.unique(np.stack([kinds, truth]), axis=1, return_counts=True)
    together = {(int(kind), int(token)): int(count) for (kind, token), count in zip(pairs.T, pair_counts, strict=True)}
    size = np.bincount(kinds)
    linked = np.array(
        [
            together[int(kind), int(token)] == counts[token] == size[kind]
            for kind, token in zip(kinds[repeated], truth[repeated], strict=True)
        ],
        dtype=bool,
    )
    return Linked(percent(repeated), percent(linked))


def split_like(requests: Sequence[Array], values: Array) -> list[Array]:
    """`values` of all occurrences cut into pieces as long as the requests."""
    return np.split(values, np.cumsum([len(request) for request in requests])[:-1])
