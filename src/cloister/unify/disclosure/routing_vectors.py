"""What a routing vector reveals of the private data, and vectors that reveal nothing more, or boundedly more.

The paper's vector of a layer is the mean of N private and m public (proxy) embeddings, its equation 8:

    e = N/(N+m) mu_private + m/(N+m) mu_proxies     so     e - mu_proxies = N/(N+m) (mu_private - mu_proxies)

Whoever knows the proxies knows mu_proxies, and so has the *direction* of mu_private - mu_proxies exactly, without N.
What N hides is one length, and N is a number of few digits that contracts and data cards tell.

    direction(e, mu_proxies)                # exact
    mean(e, mu_proxies, m, count)           # exact for the right count
    count_by_length(e, mu_proxies, m, usual)    # a guess of it

Two safer kinds of vectors:

    from_proxies(seed, proxies)                                  # the default: reveals nothing beside the proxy ids
    private_vectors(inputs, proxy_inputs, yardstick, epsilon=2, delta=1e-6)     # noisy, bounded over all layers

The paper bounds what one example can change by 2B/(N+m) (its equation 9). That holds for a mean under one encoder over
one proxy set. Its encoder is trained on the private data and its proxies are chosen by it: replace one example and both
change too. So the functions below take the seed as encoder, and a proxy set that is fixed or accounted for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cloister.errors import UsageError
from cloister.progress import SILENT, Progress
from cloister.unify import noise
from cloister.unify.disclosure import accounting
from cloister.unify.disclosure.accounting import Neighbours
from cloister.unify.disclosure.measures import Doubles

if TYPE_CHECKING:
    from cloister.unify.examples import Examples
    from cloister.unify.seeds import Seed

Vectors = NDArray[np.floating]
GRID = 1 << 20  # the clipping norm in steps of the whole numbers that are added up
MOST_COUNT = 20_000


# ---- recovery ----------------------------------------------------------------------------------------------------


def paper_vector(private: Vectors, proxies: Vectors) -> Doubles:
    """The paper's routing vector of one layer: the mean over private examples and proxies together."""
    both = np.concatenate([np.asarray(private, np.float64), np.asarray(proxies, np.float64)])
    found: Doubles = both.mean(0)
    return found


def sensitivity(bound: float, proxies: int, private: int = 0) -> float:
    """The paper's equation 9: what replacing one example can change, for embeddings of length at most `bound` under an
    encoder and proxies that do not change with it."""
    return 2 * bound / (private + proxies)


def direction(vector: Vectors, proxy_mean: Vectors) -> Doubles:
    """The direction from the proxies' mean to the private mean, exact without their number."""
    away = np.asarray(vector, np.float64) - np.asarray(proxy_mean, np.float64)
    length = float(np.linalg.norm(away))
    if not length > 0:
        raise UsageError("The vector is the proxies' mean: there is no direction in it.")
    found: Doubles = away / length
    return found


def mean(vector: Vectors, proxy_mean: Vectors, proxies: int, count: int) -> Doubles:
    """The private mean if there are `count` private examples."""
    away = np.asarray(vector, np.float64) - np.asarray(proxy_mean, np.float64)
    found: Doubles = np.asarray(vector, np.float64) + proxies / count * away
    return found


def count_by_length(
    vector: Vectors, proxy_mean: Vectors, proxies: int, usual: float, most: int = MOST_COUNT
) -> tuple[int, Doubles]:
    """The count whose mean has the length that means of one domain usually have, and that mean."""
    counts = np.arange(1, most + 1)
    away = np.asarray(vector, np.float64) - np.asarray(proxy_mean, np.float64)
    lengths = np.linalg.norm(np.asarray(vector, np.float64) + np.outer(proxies / counts, away), axis=1)
    best = int(counts[np.argmin(np.abs(lengths - usual))])
    return best, mean(vector, proxy_mean, proxies, best)


def record_between(
    before: Vectors, after: Vectors, proxies: int, candidates: Vectors, counts: Sequence[int]
) -> tuple[int, int]:
    """Two releases, the second with one example more: the count before and the example's row among `candidates`.

    For each count the added embedding is solved for; the right one lies on a candidate.
    """
    old, new = np.asarray(before, np.float64), np.asarray(after, np.float64)
    table = np.asarray(candidates, np.float64)
    squares = (table**2).sum(1)
    best = (np.inf, 0, 0)
    for count in counts:
        added = (count + 1 + proxies) * new - (count + proxies) * old
        gaps = squares - 2 * (table @ added) + added @ added
        row = int(np.argmin(gaps))
        best = min(best, (float(gaps[row]), int(count), row))
    return best[1], best[2]


# ---- vectors that are safe to send -----------------------------------------------------------------------------------


def from_proxies(seed: Seed, proxies: Examples, *, progress: Progress = SILENT) -> NDArray[np.float32]:
    """(layers, hidden): the proxies' mean under the seed. Anyone who has the proxy ids can compute it."""
    from cloister.unify.views import block_inputs

    found: NDArray[np.float32] = (
        block_inputs(seed, proxies, progress=progress).mean(0, dtype=np.float64).astype(np.float32)
    )
    return found


@dataclass(frozen=True)
class Yardstick:
    """How embeddings are measured before they are clipped: a function of public examples alone."""

    centre: Doubles  # (layers, hidden)
    scale: Doubles  # (layers,)
    clip: float  # of the length over all layers together

    @staticmethod
    def of(public: Vectors, *, quantile: float = 0.9) -> Yardstick:
        """From block inputs (examples, layers, hidden) of *public* examples: most of them are not clipped."""
        inputs = np.asarray(public, np.float64)
        centre = inputs.mean(0)
        away = inputs - centre
        scale = np.sqrt((away**2).sum(2).mean(0)).clip(min=1e-12)
        lengths = np.sqrt(((away / scale[:, None]) ** 2).sum((1, 2)))
        return Yardstick(centre, scale, float(np.quantile(lengths, quantile)))


@dataclass(frozen=True)
class PrivateVectors:
    """Noisy routing vectors (layers, hidden) and what they cost."""

    vectors: NDArray[np.float32]
    release: accounting.Release
    epsilon: float
    delta: float
    noise: float  # standard deviation over the sensitivity
    insecure: bool = False


def private_vectors(
    private: Vectors,
    proxies: Vectors,
    yardstick: Yardstick,
    *,
    epsilon: float,
    delta: float,
    neighbours: Neighbours = "added or removed",
    insecure_seed: int | None = None,
) -> PrivateVectors:
    """Routing vectors towards the private data, (epsilon, delta)-private over all layers together.

    `private` and `proxies` are `block_inputs` under the seed. Each private example becomes one vector over all layers,
    clipped to the yardstick's length; their sum gets exact Gaussian noise. Of the noisy sum only the direction in each
    layer is used, at the distance that the proxies' mean has from the centre: so the number of examples is neither
    needed nor told, and the noise does not depend on it. The proxies must be fixed, or released with a bound of their
    own: `accounting.total` adds that up.
    """
    rows = np.asarray(private, np.float64)
    if rows.ndim != 3 or rows.shape[1:] != yardstick.centre.shape or not len(rows):
        raise UsageError("Private routing vectors are made of block inputs: examples, layers, hidden.")
    sigma = accounting.noise_for(epsilon, delta)
    step = 1 if neighbours == "added or removed" else 2
    total = clipped(rows, yardstick).sum(0)
    total = total + noise.gaussian(total.size, sigma * step * GRID, insecure_seed=insecure_seed).reshape(total.shape)
    towards = total.astype(np.float64) * yardstick.scale[:, None]
    towards /= np.linalg.norm(towards, axis=1, keepdims=True).clip(min=1e-300)
    distance = np.linalg.norm(np.asarray(proxies, np.float64).mean(0) - yardstick.centre, axis=1, keepdims=True)
    return PrivateVectors(
        (yardstick.centre + distance * towards).astype(np.float32),
        accounting.Release("routing vectors", accounting.Gaussian(sigma), neighbours),
        epsilon,
        delta,
        sigma,
        insecure_seed is not None,
    )


def clipped(rows: Vectors, yardstick: Yardstick) -> NDArray[np.int64]:
    """Whole numbers whose length, over all layers of an example, is at most `GRID`: rounding goes towards zero."""
    flat = (np.asarray(rows, np.float64) - yardstick.centre) / yardstick.scale[:, None]
    lengths = np.sqrt((flat**2).sum((1, 2), keepdims=True))
    if not np.isfinite(lengths).all():
        raise UsageError("A block input is not finite.")
    flat *= (1 - 1e-9) * GRID / np.maximum(lengths, yardstick.clip)
    return np.trunc(flat).astype(np.int64)
