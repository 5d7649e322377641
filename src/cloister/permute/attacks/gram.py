"""Public table, orthogonal matrix on the features: norms and inner products do not change.

Who      a server that sees rows of `table @ Q` and has the public table, perhaps in another version or precision.
Needs    the rows of one request. Tokens known for free (the request's first and last, a chat template) make it easy;
         without any, rows of nearly equal norm vote for each other through their inner products.
Wins     all tokens in float32 and bfloat16, from two known tokens or from none. Every lossless linear transform of the
         features whose norms the server computes reveals these numbers, so no better matrix exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cloister.permute.attacks.matching import Array, Matches, map_rows, nearest, unit_rows

_FEW_AXES = 64
_ANCHOR_NUMBERS = 1 << 19  # known rows that make a frame, times their width: fewer do for wide rows
_SETTLED = 0.98  # share of certain matches at which no further round is worth its time
_VOTERS = 128  # rows that vote when nothing is known
_CANDIDATES = 32  # table rows of nearly the right norm, per voter
_MIN_SUPPORT = 0.15  # share of voters that must agree with a candidate


@dataclass(frozen=True)
class Frame:
    """Known pairs of rows turned into coordinates that mean the same on both sides (Procrustes on their span).

    A row is described by its coordinates along the known rows and by the length of what is left.
    """

    seen_axes: Array  # [d, m]
    plain_axes: Array  # [d, m]

    @classmethod
    def from_pairs(cls, seen: Array, plain: Array) -> Frame:
        """From matched rows [m, d] of both sides; m may be smaller or larger than d."""
        seen64, plain64 = np.asarray(seen, dtype=np.float64), np.asarray(plain, dtype=np.float64)
        seen_basis, seen_parts = np.linalg.qr(seen64.T)
        plain_basis, plain_parts = np.linalg.qr(plain64.T)
        left, _, right = np.linalg.svd(seen_parts @ plain_parts.T)
        return cls(seen_basis @ left, plain_basis @ right.T)

    def of_seen(self, rows: Array) -> Array:
        """Coordinates of transformed rows."""
        return _coordinates(rows, self.seen_axes)

    def of_plain(self, rows: Array) -> Array:
        """Coordinates of plain rows; equal to those of the same rows transformed."""
        return _coordinates(rows, self.plain_axes)


def most_anchors(width: int) -> int:
    """How many known rows a frame is made of: 512, for wide rows fewer, as time grows with both."""
    return int(np.clip(_ANCHOR_NUMBERS // width, 64, 512))


def match_norms(seen: Array, table: Array) -> Matches:
    """The table row of nearest norm: all that is left when nothing is known and rows are looked at one by one."""
    return nearest(_norms(seen), table, _norms)


def match_known(seen: Array, table: Array, known_seen: Array, known_ids: Array, *, rounds: int = 0) -> Matches:
    """Norms and inner products with known rows. With `rounds`, certain matches become known rows themselves."""
    frame = Frame.from_pairs(known_seen, _rows(table, known_ids))
    matches = nearest(frame.of_seen(seen), table, frame.of_plain)
    for _ in range(rounds):
        certain = np.flatnonzero(matches.certain(0.3))
        if len(certain) == 0 or len(certain) > _SETTLED * len(seen):
            break
        anchors = certain[np.argsort((matches.distance / matches.runner_up)[certain])][: most_anchors(seen.shape[1])]
        frame = Frame.from_pairs(
            np.concatenate([known_seen, seen[anchors]]),
            np.concatenate([_rows(table, known_ids), _rows(table, matches.index[anchors])]),
        )
        matches = nearest(frame.of_seen(seen), table, frame.of_plain)
    return matches


def match_blind(seen: Array, table: Array, *, tolerance: float = 5e-4, rounds: int = 2) -> Matches:
    """Nothing known. Candidates by norm; a candidate is believed when its inner products with candidates of many other
    rows are those that were seen. The believed ones are then the known rows of `match_known`.

    `tolerance` is on cosines; the rounding of bfloat16 moves them by about 1e-4.
    """
    voters = np.linspace(0, len(seen) - 1, min(_VOTERS, len(seen))).astype(np.int64)
    candidates = _nearest_norms(seen[voters], table)
    support, choice = _vote(unit_rows(np.asarray(seen[voters], np.float32)), table, candidates, tolerance)
    believed = np.flatnonzero(support >= max(_MIN_SUPPORT, 0.5 * float(support.max())))
    if len(believed) < 3:
        return match_norms(seen, table)
    return match_known(seen, table, seen[voters[believed]], candidates[believed, choice[believed]], rounds=rounds)


def _vote(seen: Array, table: Array, candidates: Array, tolerance: float) -> tuple[Array, Array]:
    """For each voter: the support of its best candidate (share of voters that agree with it) and which one it is."""
    count, width = candidates.shape
    rows = unit_rows(_rows(table, candidates.ravel()).astype(np.float32))
    wanted = seen @ seen.T
    everyone = np.arange(count)
    # First every candidate of every other voter may agree; a cosine that half of them hit by chance counts for little.
    support = np.empty((count, width))
    for voter in everyone:
        cosines = (rows[voter * width : (voter + 1) * width] @ rows.T).reshape(width, count, width)
        agrees = (np.abs(cosines - wanted[voter][None, :, None]) < tolerance).any(axis=2)
        agrees[:, voter] = False
        support[voter] = agrees @ (1 - agrees.mean(axis=0))
    # Then only the chosen candidates vote, each with the weight of its own support.
    wanted_flat = np.repeat(wanted, width, axis=0)
    for _ in range(4):
        choice = support.argmax(axis=1)
        weight = support[everyone, choice] / max(1e-12, float(support.max()))
        agrees = np.abs(rows @ rows[everyone * width + choice].T - wanted_flat) < tolerance
        support = (agrees * weight).reshape(count, width, count)
        support[everyone, :, everyone] = 0
        support = support.sum(axis=2) / max(1, count - 1)
    choice = support.argmax(axis=1)
    return support[everyone, choice], choice


def _nearest_norms(seen: Array, table: Array) -> Array:
    """[n, k] ids of the table rows whose norms are nearest."""
    norms = map_rows(table, _norms)[:, 0]
    order = np.argsort(norms)
    ranked = norms[order]
    width = min(_CANDIDATES, len(norms))
    found = np.empty((len(seen), width), dtype=np.int64)
    for position, norm in enumerate(_norms(seen)[:, 0]):
        middle = int(np.searchsorted(ranked, norm))
        window = np.arange(max(0, middle - width), min(len(ranked), middle + width))
        nearby = window[np.argsort(np.abs(ranked[window] - norm), kind="stable")[:width]]
        found[position] = order[nearby]
    return found


def _coordinates(rows: Array, axes: Array) -> Array:
    # Along few axes the last digits decide; along many, single precision is enough and twice as fast.
    kind: type[Any] = np.float64 if axes.shape[1] <= _FEW_AXES else np.float32
    along = (rows.astype(kind) @ axes.astype(kind)).astype(np.float64)
    squares = np.einsum("nd,nd->n", rows, rows, dtype=np.float64)
    rest = squares - np.einsum("nm,nm->n", along, along)
    return np.concatenate([along, np.sqrt(np.maximum(rest, 0))[:, None]], axis=1)


def _norms(rows: Array) -> Array:
    rows64 = np.asarray(rows, dtype=np.float64)
    return np.asarray(np.sqrt(np.einsum("nd,nd->n", rows64, rows64))[:, None])


def _rows(table: Array, ids: Array) -> Array:
    return np.asarray(table[ids], dtype=np.float64)
