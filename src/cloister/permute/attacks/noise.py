"""What is sold elsewhere as private embeddings: Gaussian noise on each row.

Who      any receiver that has the public table.
Needs    one noisy row at a time.
Wins     nearly everything at strengths that a model survives, by taking the nearest row. No prior over text is used, so
         the figures are lower bounds.
"""

from __future__ import annotations

import numpy as np

from cloister.permute.attacks.matching import Array, Matches, nearest


def add_noise(rows: Array, strength: float, random: np.random.Generator) -> Array:
    """Isotropic Gaussian noise whose norm is `strength` times the norm of each row."""
    rows = np.asarray(rows, dtype=np.float32)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    noise = random.standard_normal(rows.shape, dtype=np.float32) / np.float32(np.sqrt(rows.shape[1]))
    return np.asarray(rows + np.float32(strength) * norms * noise)


def match_noisy(seen: Array, table: Array) -> Matches:
    """The nearest table row."""
    return nearest(seen, table)
