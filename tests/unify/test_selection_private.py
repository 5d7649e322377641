"""Differential privacy of the relevance: sensitivity, calibration, and that nothing else is read."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cloister.errors import UsageError
from cloister.unify import noise
from cloister.unify.selection import Selection, choose, dp_relevance
from cloister.unify.selection import private as module
from cloister.unify.selection.private import (
    SENSITIVITY_SQUARED,
    delta_of,
    noise_variance,
    noisy_sum,
    statistic,
)

HOSTILE = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-300, -1e-9, 0.5, 2.0, 1e200, -1e300, math.inf, -math.inf, math.nan])
NUMBER = st.one_of(HOSTILE, st.floats(-1, 1), st.floats(allow_nan=True, allow_infinity=True))


@settings(deadline=None, max_examples=120)
@given(st.lists(st.lists(NUMBER, min_size=5, max_size=5), min_size=1, max_size=6), st.data())
def test_one_example_moves_the_sum_by_no_more_than_stated(rows: list[list[float]], data: st.DataObject) -> None:
    vectors = np.array(rows)
    gone = data.draw(st.integers(0, len(rows) - 1))
    change = statistic(vectors) - statistic(np.delete(vectors, gone, axis=0))
    assert sum(int(c) ** 2 for c in change) <= SENSITIVITY_SQUARED
    # replaced by anything: at most twice as far
    other = vectors.copy()
    other[gone] = data.draw(st.lists(NUMBER, min_size=5, max_size=5))
    moved = statistic(vectors) - statistic(other)
    assert sum(int(c) ** 2 for c in moved) <= 4 * SENSITIVITY_SQUARED


def test_the_bound_is_tight_and_would_be_missed_without_the_grid() -> None:
    change = statistic(np.eye(3)[:1]) - statistic(np.empty((0, 3)))
    assert sum(int(c) ** 2 for c in change) == SENSITIVITY_SQUARED
    rng = np.random.default_rng(0)
    long = rng.normal(size=(2000, 17)) * 100
    assert max((np.array(statistic(long[i : i + 1]), dtype=object) ** 2).sum() for i in range(2000)) <= (
        SENSITIVITY_SQUARED
    )


def exact_delta(variance: int, shift: int, epsilon: float) -> float:
    """Of one coordinate moved by `shift`, summed over every outcome that matters."""
    k = np.arange(-40 * math.isqrt(variance), 40 * math.isqrt(variance) + shift + 1)
    p, q = np.exp(-(k**2) / (2 * variance)), np.exp(-((k - shift) ** 2) / (2 * variance))
    total = p.sum()
    return float(np.maximum(p / total - math.exp(epsilon) * q / total, 0).sum())


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0, 10.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_the_noise_is_calibrated(epsilon: float, delta: float) -> None:
    variance = noise_variance(epsilon, delta)
    rho = SENSITIVITY_SQUARED / (2 * variance)
    assert delta_of(rho, epsilon) <= delta < delta_of(rho * 1.0001, epsilon)  # the least that suffices
    # The same ratio of noise to sensitivity on a coarser grid, where every outcome can be summed: no more than stated,
    # and not wasteful either.
    shift = 200
    coarse = math.ceil(shift**2 / (2 * rho))
    assert delta / 20 < exact_delta(coarse, shift, epsilon) <= delta
    # A quarter of the variance would break the promise.
    assert exact_delta(max(coarse // 4, 1), shift, epsilon) > delta


@pytest.mark.parametrize("variance", [1, 9, 400])
def test_the_noise_is_a_discrete_gaussian(variance: int) -> None:
    drawn = noise.of_variance(6000, variance, insecure_seed=5)
    k = np.arange(-8 * math.isqrt(variance) - 8, 8 * math.isqrt(variance) + 9)
    p = np.exp(-(k**2) / (2 * variance))
    expected = np.cumsum(p / p.sum())
    found = np.array([(drawn <= x).mean() for x in k])
    assert np.abs(found - expected).max() < 1.95 / math.sqrt(6000)  # Kolmogorov, once in 1000 seeds
    assert len(set(drawn.tolist())) > 2


def points(n: int, seed: int, towards: float = 0.0) -> NDArray[np.float32]:
    vectors = np.random.default_rng(seed).normal(size=(n, 12))
    vectors[:, 0] += towards
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_all_folds_share_one_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of folds: the private vectors are read once, by the sum, and noise is drawn once."""
    calls: list[int] = []

    def counted(total: NDArray[np.intp], variance: int, *, insecure_seed: int | None = None) -> NDArray[np.intp]:
        calls.append(variance)
        assert variance >= noise_variance(1.0, 1e-5)
        return noisy_sum(total, variance, insecure_seed=insecure_seed)

    monkeypatch.setattr(module, "noisy_sum", counted)
    dp_relevance(points(50, 1), points(80, 2), epsilon=1.0, delta=1e-5, folds=9)
    assert len(calls) == 1


def test_everything_after_the_sum_reads_nothing_private(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the released integers held fixed, quite different private examples give the very same proxies."""
    private, public = points(60, 1, towards=2), points(90, 2)
    fixed = statistic(private)
    monkeypatch.setattr(module, "noisy_sum", lambda total, variance, insecure_seed=None: fixed)
    selection = Selection(pool=40, count=20, epsilon=2.0, delta=1e-5)
    first = choose(private, public, selection)
    for other in (points(3, 9), points(500, 8, towards=-4), points(60, 1, towards=2) * 0):
        again = choose(other, public, selection)
        assert again.indices == first.indices and (again.relevance == first.relevance).all()
        assert again.privacy == first.privacy and again.stopped == first.stopped


def test_noise_is_fresh_unless_it_is_called_insecure() -> None:
    private, public = points(60, 1), points(90, 2)
    options = {"epsilon": 1.0, "delta": 1e-5}
    one, two = (dp_relevance(private, public, **options)[0] for _ in range(2))
    assert (one != two).any()
    fixed = [dp_relevance(private, public, **options, insecure_seed_for_noise=4)[0] for _ in range(2)]
    assert (fixed[0] == fixed[1]).all()


def test_it_still_finds_what_is_alike() -> None:
    private = points(800, 1, towards=4)
    public = np.concatenate([points(300, 2), points(100, 3, towards=4)])
    scores, spent = dp_relevance(private, public, epsilon=1.0, delta=1e-5, insecure_seed_for_noise=1)
    assert (np.argsort(-scores)[:80] >= 300).mean() > 0.8
    assert (spent.epsilon, spent.delta) == (1.0, 1e-5) and 0 < spent.rho < 0.1


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (-1.0, 1e-5), (1.0, 0.0), (1.0, 1.0), (math.inf, 0.1)])
def test_no_guarantee_is_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(UsageError, match="guarantee"):
        noise_variance(epsilon, delta)
