"""Any base: two deployments of one model, with fresh and independent transforms, are linked by their weights alone.

Who      a server (or two that talk) that holds two contexts of the same model. Nothing public is needed.
Needs    one matrix of the same name from each.
Wins     the map from one context's coordinates into the other's. Whoever opens one context, for instance with a user
         account of its own, has then opened all: several contexts and rotation do not isolate users.
"""

from __future__ import annotations

from collections.abc import Mapping

from cloister.permute.attacks.matching import Array
from cloister.permute.attacks.weights import Alignment, align_permuted, align_rotated


def align_contexts(weights_a: Mapping[str, Array], weights_b: Mapping[str, Array]) -> Alignment | None:
    """The best alignment of rows of context a with rows of context b over the names that both have."""
    best: Alignment | None = None
    for name in sorted(weights_a.keys() & weights_b.keys()):
        if weights_a[name].shape != weights_b[name].shape or len(weights_a[name]) < 2:
            continue
        for align in (align_permuted, align_rotated):
            found = align(weights_a[name], weights_b[name])
            if best is None or found.explained > best.explained:
                best = found
            if best.explained > 99:
                return best
    return best


def link_contexts(weights_a: Mapping[str, Array], weights_b: Mapping[str, Array]) -> float:
    """Percent of rows of context a whose partner in context b is beyond doubt; unrelated models give about 0."""
    best = align_contexts(weights_a, weights_b)
    return 0.0 if best is None else best.explained
