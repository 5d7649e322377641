"""The published measure of leakage, the measure it is named after, and why neither is a guarantee.

The STIP paper prints `1 - Pearson` (or its complement) between one vector and its permuted form and calls it distance
correlation: small for any shuffled vector, even where sorting recovers every token. The distance correlation of
Szekely, Rizzo and Bakirov, with tokens as samples, is exactly 1 for a permutation and for an orthogonal matrix, since
all distances are kept. Neither says what an attacker recovers: measure that.
"""

from __future__ import annotations

import numpy as np

from cloister.permute.attacks.matching import Array


def paper_correlation(plain: Array, seen: Array) -> float:
    """|Pearson correlation| of the entries of two vectors, as the paper's figure 7 uses it."""
    left = np.asarray(plain, dtype=np.float64).ravel()
    right = np.asarray(seen, dtype=np.float64).ravel()
    left, right = left - left.mean(), right - right.mean()
    return float(abs(left @ right) / (np.linalg.norm(left) * np.linalg.norm(right)))


def distance_correlation(plain: Array, seen: Array) -> float:
    """Distance correlation of paired samples [n, d] and [n, e] (V-statistic, biased upwards for small n)."""
    left, right = _centred_distances(plain), _centred_distances(seen)
    scale = np.sqrt(np.mean(left * left) * np.mean(right * right))
    return float(np.sqrt(max(0.0, float(np.mean(left * right))) / scale)) if scale > 0 else 0.0


def _centred_distances(rows: Array) -> Array:
    rows = np.asarray(rows, dtype=np.float64)
    squares = np.einsum("nd,nd->n", rows, rows)
    distances = np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * rows @ rows.T, 0))
    centred: Array = distances - distances.mean(axis=0) - distances.mean(axis=1)[:, None] + distances.mean()
    return centred
