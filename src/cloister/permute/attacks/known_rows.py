"""Known plaintext: the server knows the tokens behind some rows, for instance because it is a user itself.

Who      a server that knows a template or typed some requests; or one that holds a client directory, because one of
         the users of the context is its own account.
Needs    one to three rows for a permutation, as many as the width for a whole orthogonal matrix (but `gram` reads
         tokens from two or three). With a client directory: nothing else.
Wins     with the directory every request of every user of that context, whatever the base, by looking rows up.
"""

from __future__ import annotations

import numpy as np

from cloister.permute.attacks.matching import Array, nearest, percent


def settled_features(plain_rows: Array) -> float:
    """Percent of the features whose place a permutation gives away when these rows are known in both forms.

    A feature is settled when no other one has the same entries in all known rows.
    """
    columns = np.ascontiguousarray(np.asarray(plain_rows, dtype=np.float32).T)
    _, kinds, counts = np.unique(columns, axis=0, return_inverse=True, return_counts=True)
    return percent(counts[kinds.ravel()] == 1)


def rotation_error(seen: Array, plain: Array, rotation: Array) -> float:
    """|Q' - Q| / |Q| of the least-norm solution from known rows; sqrt(1 - m/d) for m generic rows, 0 from m = d on."""
    solved, *_ = np.linalg.lstsq(np.asarray(plain, dtype=np.float64), np.asarray(seen, dtype=np.float64), rcond=None)
    return float(np.linalg.norm(solved - rotation) / np.linalg.norm(rotation))


def read_with_client(seen: Array, client_embedding: Array) -> Array:
    """Plain ids of the rows, looked up in a client directory's own transformed table."""
    return nearest(np.asarray(seen, dtype=np.float32), client_embedding).index
