"""What the choice of proxies betrays. Their ids are public; that an owner chose *these* is a function of its data.

    scores = rank_classes(proxy_vectors, public_vectors, class_vectors)     # what anyone with the ids can compute
    classes_betrayed(scores, held)                                          # AUC against what the owner knows is true

`class_vectors` holds an array of vectors for each candidate class. Where an owner has no list of classes, `clusters` of
the public set stand for them: which of these regions does the owner hold data in?

An owner's records may also lie in the public set. `chosen_more` says whether those are chosen more often than public
examples like them; `changed_without` how many proxies change when one private record is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloister.errors import UsageError
from cloister.unify.disclosure.measures import Doubles, Estimate, separation, share

Vectors = NDArray[np.floating]
Choose = Callable[[NDArray[np.int64]], Sequence[int]]  # rows of the private data -> chosen rows of the public set
SHARPNESS = 10.0  # of the softmax over cosines


def rank_classes(proxies: Vectors, public: Vectors, classes: Sequence[Vectors]) -> Doubles:
    """How much more of the proxies than of the public set each class draws: the higher, the likelier it is held.

    Every example is shared out among the classes by its similarity to their means. Of nine ways tried on CLINC150 this
    was among the best two; counting only the nearest class is as good, similarity alone is worse.
    """
    if not len(proxies) or not len(public) or not classes:
        raise UsageError("Ranking needs proxies, the public set and candidate classes.")
    means = _unit(np.stack([_unit(one).mean(0) for one in classes]))
    return _shares(proxies, means) - _shares(public, means)


def classes_betrayed(scores: Doubles, held: NDArray[np.bool_]) -> Estimate:
    """The probability that a class that the owner holds ranks above one that it does not."""
    return separation(scores, np.asarray(held, dtype=bool)).auc


@dataclass(frozen=True)
class Regions:
    """Clusters of the public set: which one each public example is in, and their centres."""

    of: NDArray[np.int64]
    centres: Doubles

    def assign(self, vectors: Vectors) -> NDArray[np.int64]:
        """The nearest region of each vector."""
        return np.argmax(_unit(vectors) @ self.centres.T, axis=1).astype(np.int64)


def clusters(public: Vectors, count: int = 50, *, rounds: int = 15, seed: int = 0) -> Regions:
    """Spherical k-means of the public set, which anyone can repeat."""
    rows = _unit(public)
    count = min(count, len(rows))
    draw = np.random.default_rng(seed)
    centres = rows[draw.permutation(len(rows))[:count]]
    for _ in range(rounds):
        near = np.argmax(rows @ centres.T, axis=1)
        sums = np.zeros_like(centres)
        np.add.at(sums, near, rows)
        empty = np.linalg.norm(sums, axis=1) < 1e-12
        sums[empty] = centres[empty]
        centres = _unit(sums)
    return Regions(np.argmax(rows @ centres.T, axis=1).astype(np.int64), centres)


def regions_betrayed(regions: Regions, chosen: Sequence[int], private: Vectors) -> Estimate | None:
    """Ranks regions by the share of their public examples that were chosen, scored against where the private data lie.

    None where the private data lie in all regions or in none more than the public set does.
    """
    count = len(regions.centres)
    size = np.bincount(regions.of, minlength=count)
    picked = np.bincount(regions.of[np.asarray(chosen, dtype=np.int64)], minlength=count)
    private_share = np.bincount(regions.assign(private), minlength=count) / len(private)
    held = private_share > size / size.sum()
    if held.all() or not held.any():
        return None
    return classes_betrayed(picked / np.maximum(size, 1), held)


@dataclass(frozen=True)
class Chosen:
    """How often the owner's own records in the public set were chosen, and public examples like them."""

    own: Estimate
    alike: Estimate

    @property
    def betrays(self) -> bool:
        """Whether the intervals are apart, so that being chosen says something."""
        return self.own.low > self.alike.high


def chosen_more(chosen: Sequence[int], own: NDArray[np.integer], alike: NDArray[np.integer]) -> Chosen:
    """`own` and `alike` are rows of the public set: the owner's records, and others of the same kind."""
    taken = set(map(int, chosen))
    rates = [share(sum(int(row) in taken for row in rows), len(rows)) for rows in (own, alike)]
    return Chosen(*rates)


def shared_records(private: Sequence[str], public: Sequence[str]) -> NDArray[np.int64]:
    """Rows of the public set whose text is also a private one, whatever its case and spacing."""
    have = {_plain(text) for text in private}
    return np.array([row for row, text in enumerate(public) if _plain(text) in have], dtype=np.int64)


def changed_without(choose: Choose, rows: int, *, tries: int = 5, seed: int = 0) -> tuple[float, int]:
    """Proxies that change when one private record is left out: mean over `tries` records, and how many there are."""
    everything = np.arange(rows, dtype=np.int64)
    base = set(choose(everything))
    left_out = np.random.default_rng(seed).permutation(rows)[:tries]
    changed = [len(base - set(choose(everything[everything != row]))) for row in left_out]
    return float(np.mean(changed)), len(base)


def _shares(vectors: Vectors, means: Doubles) -> Doubles:
    scores = np.exp(SHARPNESS * (_unit(vectors) @ means.T))
    found: Doubles = (scores / scores.sum(1, keepdims=True)).mean(0)
    return found


def _unit(vectors: Vectors) -> Doubles:
    rows = np.asarray(vectors, dtype=np.float64)
    found: Doubles = rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(min=1e-12)
    return found


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
