"""Public base: the transform of the features computed from the uploaded weights alone, before any user sends anything.

Who      a server that holds transformed weights and has the public base, perhaps before a fine-tune.
Needs    one matrix that reads the residual stream ([m, d]: a gate or up projection, a router, an embedding table, a
         head). Its rows may stand in any order and carry any scale; both are found on the way.
Wins     the order of the features (permutation) or the coordinates of enough of them (orthogonal), and with that every
         token of every user, for as long as these weights are served.

Rows of such a matrix go through the same map as embedding rows, so this is `sorted_rows` and `gram` once more, on rows
that the server holds instead of rows that it is sent. The norm scales folded by an orthogonal `protect` must be folded
into the public matrix too, which needs only the public base.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cloister.permute.attacks.gram import Frame, match_norms, most_anchors
from cloister.permute.attacks.matching import Array, Matches, chunks, map_rows, nearest
from cloister.permute.attacks.sorted_rows import match_and_learn

_MOST_ROWS = 1024  # rows of a matrix that are worked on
_ALL_DIRECTIONS = 1024  # up to this width all principal directions are computed, above it the leading ones
_LEADING = 64
_POWER_STEPS = 8
_PLENTY = 40.0  # percent explained from which no second start is tried
_FIT = 0.3  # a row counts as explained when its best partner is this much nearer than the next


@dataclass(frozen=True)
class Alignment:
    """How transformed rows are read in plain coordinates.

    `row_order[i]` is the plain row that server row `i` was taken for, `explained` the share (percent) of rows for which
    that is beyond doubt: the attacker sees this figure too and needs no truth for it.
    """

    rows_used: Array  # indices of the server rows that were worked on
    row_order: Array
    explained: float
    order: Array | None = None  # permutation: seen[:, j] = plain[:, order[j]]
    frame: Frame | None = None  # orthogonal

    def match(self, seen: Array, table: Array) -> Matches:
        """Nearest table rows for transformed rows, in the aligned coordinates."""
        if self.order is not None:
            order = self.order
            return nearest(seen, table, lambda rows: rows[:, order])
        assert self.frame is not None
        return nearest(self.frame.of_seen(seen), table, self.frame.of_plain)


def align_permuted(server: Array, public: Array, *, seed: int = 0) -> Alignment:
    """The feature order between two matrices [m, d] whose rows also differ in order and scale."""
    used = _sample(len(server), seed)
    learned = match_and_learn(np.asarray(server[used], dtype=np.float32), public, ignore_scale=True)
    return Alignment(used, learned.matches.index, _explained(learned.matches), order=learned.order)


def align_ordered(server: Array, public: Array) -> Array:
    """The feature order from matrices whose row order is public (position tables, norm scales): compare columns."""
    ours = np.asarray(server, dtype=np.float32).T
    theirs = np.asarray(public, dtype=np.float32).T
    return nearest(ours, theirs).index


def align_rotated(server: Array, public: Array, *, seed: int = 0, rounds: int = 6) -> Alignment:
    """Orthogonal: principal directions of both row clouds agree up to sign; rows are told apart by their absolute
    coordinates, the signs follow from the matched rows, Procrustes does the rest."""
    used = _sample(len(server), seed)
    ours = np.asarray(server[used], dtype=np.float32)
    matches, frame = _refine(ours, public, _start_from_directions(server, public, ours), rounds)
    if _explained(matches) < _PLENTY:
        by_norms = _refine(ours, public, match_norms(ours, public), rounds)
        matches, frame = max((matches, frame), by_norms, key=lambda pair: _explained(pair[0]))
    return Alignment(used, matches.index, _explained(matches), frame=frame)


def _refine(ours: Array, theirs: Array, matches: Matches, rounds: int) -> tuple[Matches, Frame]:
    for _ in range(rounds):
        doubt = matches.distance / np.maximum(matches.runner_up, 1e-300)
        trusted = np.argsort(doubt, kind="stable")[: min(most_anchors(ours.shape[1]), max(4, len(doubt) // 2))]
        frame = Frame.from_pairs(ours[trusted], theirs[matches.index[trusted]])
        previous = matches
        matches = nearest(frame.of_seen(ours), theirs, frame.of_plain)
        if np.array_equal(previous.index, matches.index):
            break
    return matches, frame


def _start_from_directions(server: Array, public: Array, ours: Array) -> Matches:
    directions, public_directions = _principal(server), _principal(public)
    seen = ours @ directions
    plain = map_rows(public, lambda rows: rows @ public_directions)
    first = nearest(np.abs(seen), np.abs(plain))
    certain = np.flatnonzero(first.certain(0.8))
    if len(certain) < 4:
        return first
    signs = np.sign(np.einsum("nk,nk->k", seen[certain], plain[first.index[certain]]))
    return nearest(seen * signs, plain)


def _principal(rows: Array) -> Array:
    """Principal directions [d, k] of the rows, strongest first; of wide rows the leading ones (subspace iteration)."""
    width = rows.shape[1]
    if width <= _ALL_DIRECTIONS:
        moments = np.zeros((width, width))
        for _, piece in chunks(rows):
            moments += piece.T.astype(np.float64) @ piece.astype(np.float64)
        _, vectors = np.linalg.eigh(moments)
        return np.asarray(vectors[:, ::-1])
    basis = np.random.default_rng(0).standard_normal((width, _LEADING + 16)).astype(np.float32)
    for _ in range(_POWER_STEPS):
        basis = np.linalg.qr(_times_moments(rows, basis))[0]
    _, inner = np.linalg.eigh(basis.T.astype(np.float64) @ _times_moments(rows, basis))
    return np.asarray((basis @ inner)[:, ::-1][:, :_LEADING])


def _times_moments(rows: Array, basis: Array) -> Array:
    total = np.zeros_like(basis)
    for _, piece in chunks(rows):
        total += piece.T @ (piece @ basis)
    return total


def _explained(matches: Matches) -> float:
    return 100.0 * float(np.mean(matches.certain(_FIT)))


def _sample(count: int, seed: int) -> Array:
    if count <= _MOST_ROWS:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, _MOST_ROWS, replace=False))
