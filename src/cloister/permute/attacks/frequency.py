"""Secret base: a substitution cipher, attacked with word counts and bigram counts of other text.

Who      a server without table or model, but with text of the same language and the public tokenizer.
Needs    many requests in which equal tokens can be linked (`equality`).
Wins     the frequent tokens. Counts alone give a few; the graph of bigrams, matched by Frank-Wolfe, gives more when
         the reference resembles the traffic. These are simple attacks: a language-model prior would do better, so the
         figures are lower bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from cloister.permute.attacks.equality import split_like
from cloister.permute.attacks.matching import Array, assign

_ROUNDS = 40
_SMALL_GAIN = 1e-3  # relative gain at which the matching has settled


def match_counts(kinds: Array, reference: Array) -> dict[int, int]:
    """The most frequent kind is taken for the most frequent reference token, and so on down both lists."""
    return dict(zip(_by_count(kinds), _by_count(reference), strict=False))


def match_bigrams(
    requests: Sequence[Array], kinds: Array, reference: Sequence[Array], *, most: int = 1000
) -> dict[int, int]:
    """Counts first, then the `most` frequent kinds are rearranged so that their bigrams resemble the reference's.

    Maximises the agreement of two weighted graphs over one-to-one assignments (relaxed to doubly stochastic matrices,
    Frank-Wolfe steps with exact line search), starting from the ranks. `requests` only say where each request ends.
    """
    guess = match_counts(kinds, np.concatenate(list(reference)))
    seen = _by_count(kinds)[:most]
    known = _by_count(np.concatenate(list(reference)))[:most]
    size = min(len(seen), len(known))
    if size < 3:
        return guess
    graph = _bigrams(split_like(requests, kinds), seen[:size])
    target = _bigrams(reference, known[:size])
    for place, column in enumerate(_match_graphs(graph, target)):
        guess[seen[place]] = known[column]
    return guess


def read(kinds: Array, guess: dict[int, int]) -> Array:
    """Every occurrence through the guessed table; -1 where there is no guess."""
    return np.array([guess.get(int(kind), -1) for kind in kinds], dtype=np.int64)


def _by_count(values: Array) -> list[int]:
    counts = np.bincount(values)
    order = np.argsort(-counts, kind="stable")
    return [int(value) for value in order[: int(np.count_nonzero(counts))]]


def _bigrams(sequences: Sequence[Array], members: Sequence[int]) -> Array:
    """[k+2, k+2] square roots of bigram shares among `members`; the last two stand for the ends of a sequence."""
    size = len(members)
    places = {member: place for place, member in enumerate(members)}
    counts = np.zeros((size + 2, size + 2))
    for sequence in sequences:
        walk = [size, *(places.get(int(value), -1) for value in sequence), size + 1]
        for left, right in pairwise(walk):
            if left >= 0 and right >= 0:
                counts[left, right] += 1
    # Square roots keep the few very frequent pairs from deciding everything.
    return np.asarray(np.sqrt(counts / max(1.0, counts.sum())))


def _match_graphs(graph: Array, target: Array) -> Array:
    """Places of `graph` to places of `target`; the two end marks at the end of both are fixed."""
    size = len(graph) - 2
    inner, outer = graph[:size, :size], target[:size, :size]
    starts = np.outer(graph[size, :size], target[size, :size]) + np.outer(
        graph[:size, size + 1], target[:size, size + 1]
    )
    # Ranks are roughly right: start from them, blurred more for rare tokens, whose ranks are less certain.
    rank = np.arange(size)
    blur = np.exp(-(((rank[:, None] - rank[None, :]) / (1 + 0.2 * np.minimum(rank[:, None], rank[None, :]))) ** 2))
    plan = blur / blur.sum(axis=1, keepdims=True)
    for _ in range(_ROUNDS):
        gradient = inner @ plan @ outer.T + inner.T @ plan @ outer + starts
        corner = np.zeros_like(plan)
        corner[rank, assign(gradient)] = 1
        step = corner - plan
        # The objective along the step is a + b t + c t^2.
        bend = float(np.sum((inner @ step @ outer.T) * step))
        slope = float(np.sum(gradient * step))
        length = 1.0 if bend >= 0 else min(1.0, -slope / (2 * bend))
        if slope <= _SMALL_GAIN * float(np.sum(gradient * plan)) or length <= 0:
            break
        plan = plan + length * step
    return assign(plan)
