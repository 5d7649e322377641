"""Public table, permuted features: sort the entries of each row.

Who      a server that sees rows of `table[:, order]` (or holds the permuted table) and has the public table, perhaps in
         an older version.
Needs    one forward pass. No known text, no weights.
Wins     all tokens: a permutation of the features changes the order of a row's entries, never their multiset. With a
         table that has drifted, the first matches betray the order of the features, and then everything is compared
         directly. A fresh permutation for every row would not help: each row is sorted by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cloister.permute.attacks.matching import Array, Matches, assign, nearest, unit_rows

_SIGNATURE = 1024  # numbers kept of a sorted row; sorted rows are smooth, so averaging neighbours loses little
_ENOUGH_ROWS = 1024  # matched rows used to learn the order


@dataclass(frozen=True)
class LearnedOrder:
    """`seen[:, j]` is `table[:, order[j]]`, as far as the attacker can tell."""

    order: Array  # [d] int64
    matches: Matches


def signature(rows: Array) -> Array:
    """Each row's entries in ascending order, neighbours averaged so that at most 1,024 numbers remain."""
    ordered = np.sort(np.asarray(rows, dtype=np.float32), axis=1)
    width = ordered.shape[1]
    block = -(-width // _SIGNATURE)
    if block == 1:
        return ordered
    whole = width - width % block
    means = ordered[:, :whole].reshape(len(ordered), -1, block).mean(axis=2)
    return np.concatenate([means, ordered[:, whole:]], axis=1)


def match_sorted(seen: Array, table: Array, *, ignore_scale: bool = False) -> Matches:
    """The table row whose sorted entries are nearest. `ignore_scale` compares unit rows (a hidden factor per row)."""
    if ignore_scale:
        return nearest(signature(unit_rows(seen)), table, lambda rows: signature(unit_rows(rows)))
    return nearest(signature(seen), table, signature)


def learn_order(seen: Array, plain: Array) -> Array:
    """The order of the features from matched rows, some of them wrong: correlate columns, assign one to one.

    Each row is centred and scaled so that no single large row decides; the mean over the rows is taken off, because it
    is the part that wrong matches share.
    """
    return assign(_columns(seen).T @ _columns(plain))


def match_and_learn(seen: Array, table: Array, *, rounds: int = 4, ignore_scale: bool = False) -> LearnedOrder:
    """Sorted matching, then rounds of learning the order from the best matches and matching directly."""
    matches = match_sorted(seen, table, ignore_scale=ignore_scale)
    reading = unit_rows(seen) if ignore_scale else seen
    order = np.arange(seen.shape[1])
    for _ in range(rounds):
        trusted = _best(matches)
        learned = learn_order(seen[trusted], np.asarray(table[matches.index[trusted]], dtype=np.float32))
        if np.array_equal(learned, order):
            break
        order = learned
        matches = nearest(reading, table, lambda rows, order=order: _view(rows, order, ignore_scale))  # type: ignore[misc]
    return LearnedOrder(order, matches)


def _view(rows: Array, order: Array, ignore_scale: bool) -> Array:
    return (unit_rows(rows) if ignore_scale else rows)[:, order]


def _best(matches: Matches) -> Array:
    """The more certain half of the matches, at most as many as are needed."""
    doubt = matches.distance / np.maximum(matches.runner_up, np.finfo(np.float64).tiny)
    return np.argsort(doubt, kind="stable")[: min(_ENOUGH_ROWS, max(8, len(doubt) // 2))]


def _columns(rows: Array) -> Array:
    rows = np.asarray(rows, dtype=np.float32)
    rows = unit_rows(rows - rows.mean(axis=1, keepdims=True))
    if len(rows) < 8:
        return rows
    centred = rows - rows.mean(axis=0)
    return np.asarray(centred / np.maximum(centred.std(axis=0), 1e-12))
