"""The greedy choice against the one from determinants, and its edges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cloister.errors import UsageError
from cloister.unify.selection import greedy as module
from cloister.unify.selection.greedy import Cosine, Gaussian, Kernel, greedy


def unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def naive_gains(kernel: Kernel, vectors: NDArray[np.float64], q: NDArray[np.float64], chosen: list[int]) -> list[float]:
    """By what each candidate multiplies the determinant: the slow obvious twin."""
    plain = unit(vectors.astype(np.float64))
    full = q[:, None] * kernel(plain @ plain.T) * q[None, :]
    before = np.linalg.det(full[np.ix_(chosen, chosen)]) if chosen else 1.0
    found = []
    for i in range(len(vectors)):
        some = [*chosen, i]
        found.append(0.0 if i in chosen else float(np.linalg.det(full[np.ix_(some, some)]) / before))
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[NDArray[np.float64], NDArray[np.float64], int, float]:
    seed = draw(st.integers(0, 2**31))
    n, width = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(n, width))
    for i in range(1, n):
        kind = draw(st.sampled_from(["new", "new", "near", "equal"]))
        if kind != "new":
            j = draw(st.integers(0, i - 1))
            vectors[i] = vectors[j] + (1e-2 * rng.normal(size=width) if kind == "near" else 0)
    relevance = rng.uniform(0.05, 1, size=n)
    relevance[rng.random(n) < draw(st.sampled_from([0.0, 0.0, 0.3]))] = 0
    if draw(st.booleans()):
        relevance[relevance > 0] = 0.5  # ties
    return unit(vectors), relevance, draw(st.integers(0, 12)), draw(st.sampled_from([0.0, 0.25, 1.0]))


@settings(deadline=None, max_examples=150)
@given(cases(), st.sampled_from([Gaussian(2.0), Gaussian(0.3), Cosine()]), st.sampled_from([np.float32, np.float64]))
def test_equal_to_determinants(
    case: tuple[NDArray[np.float64], NDArray[np.float64], int, float], kernel: Kernel, dtype: type[np.floating]
) -> None:
    vectors, relevance, count, tempering = case
    vectors = vectors.astype(dtype)
    choice = greedy(vectors, relevance, count, kernel=kernel, tempering=tempering)
    assert len(set(choice.indices)) == len(choice.indices) <= min(count, len(vectors))
    q = relevance**tempering
    for step, index in enumerate(choice.indices):
        gains = naive_gains(kernel, vectors, q, choice.indices[:step])
        if np.prod(np.exp(choice.gains[:step])) < 1e-6:
            return  # a determinant of doubles says no more
        assert gains[index] >= max(gains) - 1e-7
        assert np.exp(choice.gains[step]) == pytest.approx(gains[index], abs=1e-7)
    if len(choice.indices) < count:
        assert max(naive_gains(kernel, vectors, q, choice.indices)) < 1e-6
        assert choice.stopped or len(choice.indices) == len(vectors)


def eager(vectors: NDArray[np.float64], relevance: NDArray[np.float64], count: int, tempering: float) -> list[int]:
    """The same without laziness, from the whole kernel."""
    full, weight = Gaussian()(vectors @ vectors.T), 2 * tempering * np.log(relevance)
    columns, variance, chosen = np.zeros((count, len(vectors))), np.ones(len(vectors)), []
    for step in range(count):
        score = weight + np.log(np.maximum(variance, 1e-300))
        score[chosen] = -np.inf
        best = int(np.argmax(score))
        columns[step] = (full[best] - columns[:step, best] @ columns[:step]) / np.sqrt(variance[best])
        variance -= columns[step] ** 2
        chosen.append(best)
    return chosen


@pytest.mark.parametrize("tempering", [0.0, 0.25, 2.0])
def test_laziness_changes_nothing(tempering: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    vectors = unit(rng.normal(size=(60, 40))[rng.integers(60, size=600)] + 0.7 * rng.normal(size=(600, 40)))
    relevance = rng.uniform(0.01, 1, size=600)
    wanted = eager(vectors, relevance, 150, tempering)
    assert greedy(vectors, relevance, 150, tempering=tempering).indices == wanted
    for name, value in {"PANEL": 3, "FIRST_LOOK": 2, "MOST_AT_ONCE": 8, "WASTE": 0, "SMALL": 0}.items():
        monkeypatch.setattr(module, name, value)
    assert greedy(vectors, relevance, 150, tempering=tempering).indices == wanted
    assert greedy(vectors, relevance, 150, tempering=tempering, memory=0).indices[:20] == wanted[:20]


def test_the_cosine_kernel_ends_at_its_rank() -> None:
    rng = np.random.default_rng(0)
    vectors = unit(rng.normal(size=(300, 24))).astype(np.float32)
    for memory in (0, 1 << 30):
        choice = greedy(vectors, np.ones(300), 50, kernel=Cosine(), memory=memory)
        assert len(choice.indices) == 24 and "276 others" in choice.stopped
    assert len(greedy(vectors, np.ones(300), 50, kernel=Gaussian()).indices) == 50


def test_equal_candidates_are_chosen_once_and_the_first_of_them() -> None:
    vectors = np.repeat(np.eye(3), 5, axis=0)
    choice = greedy(vectors, np.ones(15), 10)
    assert sorted(choice.indices) == [0, 5, 10] and choice.stopped


def test_no_relevance_is_never_chosen() -> None:
    choice = greedy(np.eye(4), np.array([0.0, 1.0, 0.0, 0.5]), 4)
    assert choice.indices == [1, 3] and "relevance" in choice.stopped


@pytest.mark.parametrize(
    ("vectors", "relevance", "said"),
    [
        (np.eye(3), np.ones(2), "one relevance"),
        (np.eye(3), np.array([1.0, -1.0, 1.0]), "not negative"),
        (np.eye(3), np.array([1.0, np.nan, 1.0]), "finite"),
        (np.array([[1.0, 0.0], [0.0, 0.0]]), np.ones(2), "candidate 1"),
        (np.array([[np.inf, 0.0], [0.0, 1.0]]), np.ones(2), "candidate 0"),
    ],
)
def test_bad_input_is_named(vectors: NDArray[np.float64], relevance: NDArray[np.float64], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        greedy(vectors, relevance, 2)
