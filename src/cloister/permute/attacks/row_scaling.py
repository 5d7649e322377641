"""The enclave path with a secret factor per token: the factors are in what the enclave hands out.

Who      the server of the published enclave scheme. It gets B = diag(a) P diag(a)^-1 from the enclave, where every row
         of the attention weights P sums to one.
Needs    one such B; several heads make it more exact.
Wins     a up to one common factor: P 1 = 1, so B a = a. And even without B: the direction of a row does not depend on
         its factor, so `sorted_rows` and `gram` work on unit rows.
"""

from __future__ import annotations

import numpy as np

from cloister.permute.attacks.matching import Array, unit_rows

__all__ = ["recover_row_scaling", "scaling_error", "unit_rows"]


def recover_row_scaling(scaled_attention: Array) -> Array:
    """The factors a [n] from B [n, n] or [heads, n, n], up to one common factor: the null vector of B - I.

    Returned with a mean magnitude of 1 and a positive first entry.
    """
    stacked = np.asarray(scaled_attention, dtype=np.float64)
    stacked = stacked.reshape(-1, *stacked.shape[-2:])
    size = stacked.shape[-1]
    # Rows of B differ in size by the very factors that are sought: balance them, or the large ones hide the small.
    equations = (stacked - np.eye(size)).reshape(-1, size)
    scaling = np.ones(size)
    for _ in range(3):
        scaled = equations * scaling
        scaled = scaled / np.maximum(np.linalg.norm(scaled, axis=1, keepdims=True), 1e-300)
        _, _, directions = np.linalg.svd(scaled, full_matrices=False)
        scaling = scaling * directions[-1]
        if not np.all(np.isfinite(scaling)) or np.any(scaling == 0):
            break
    first = np.sign(scaling[0]) or 1.0
    return np.asarray(first * scaling / np.abs(scaling).mean())


def scaling_error(found: Array, true: Array) -> float:
    """Largest relative error after the best common factor."""
    ratio = np.asarray(found, dtype=np.float64) / np.asarray(true, dtype=np.float64)
    return float(np.max(np.abs(ratio / np.median(ratio) - 1)))
