"""Relevance without bias, and the whole choice."""

from __future__ import annotations

import io

import numpy as np
import pytest
from numpy.typing import NDArray

from cloister.errors import UsageError
from cloister.progress import Progress
from cloister.unify.selection import Selection, choose, relevance
from cloister.unify.selection.relevance import fit

Vectors = NDArray[np.float32]


def points(n: int, seed: int, towards: float = 0.0, width: int = 24) -> Vectors:
    vectors = np.random.default_rng(seed).normal(size=(n, width))
    vectors[:, 0] += towards
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_cross_fitting_takes_the_bias_away() -> None:
    # Public and private come from one distribution: nothing may look less private for having been a negative.
    # "Seen" are the examples that a classifier of all public ones would have seen, "fresh" more of the same kind.
    with_bias, without = [], []
    for seed in range(12):
        private, seen, fresh = points(40, 3 * seed), points(40, 3 * seed + 1), points(2000, 3 * seed + 2)
        classifier = fit(private, seen)
        with_bias.append(classifier.log_odds(fresh).mean() - classifier.log_odds(seen).mean())
        scores = relevance(private, np.concatenate([seen, fresh]), folds=8, negatives=35)
        odds = np.log(scores / (1 - scores))
        without.append(odds[40:].mean() - odds[:40].mean())
    assert min(with_bias) > 0 and np.mean(with_bias) > 0.7
    assert abs(np.mean(without)) < 0.25 and min(without) < 0 < max(without)


def test_the_optimum_is_reached_from_anywhere() -> None:
    private, public = points(60, 1, towards=3), points(200, 2)
    first = fit(private, public)
    again = fit(private, public, start=fit(private, -public))
    assert np.allclose(first.weights, again.weights, atol=2e-3)


def test_the_number_of_private_examples_does_not_show() -> None:
    private, public = points(30, 1, towards=2), points(150, 2)
    once, thrice = relevance(private, public), relevance(np.repeat(private, 3, axis=0), public)
    assert np.allclose(once, thrice, atol=1e-4)


@pytest.mark.parametrize("private", [points(2, 5, towards=9), points(50, 5, towards=50)])
def test_few_or_separable_examples(private: Vectors) -> None:
    public = np.concatenate([points(200, 6), points(20, 7, towards=50)])
    public[:, 3] = 0.1  # a constant feature
    scores = relevance(private, public)
    assert np.isfinite(scores).all() and (scores > 0).all() and (scores < 1).all()
    assert scores[200:].min() > np.median(scores[:200])


def test_methods() -> None:
    private, public = points(100, 1, towards=4), np.concatenate([points(400, 2), points(100, 3, towards=4)])
    inside = {}
    for method in ("dpp", "relevance", "random"):
        chosen = choose(private, public, Selection(method=method, pool=100, count=50))  # type: ignore[arg-type]
        assert len(set(chosen.indices)) == 50 == len(chosen.relevance) and not chosen.stopped
        assert (
            chosen == chosen
            and chosen.indices
            == choose(
                private,
                public,
                Selection(method=method, pool=100, count=50),  # type: ignore[arg-type]
            ).indices
        )
        inside[method] = np.mean([i >= 400 for i in chosen.indices])
    assert inside["relevance"] > 0.8 and inside["dpp"] > 0.5 and inside["random"] < 0.4
    best = choose(private, public, Selection(method="relevance", count=50))
    assert (np.diff(best.relevance) <= 0).all()
    # random looks at no private example
    assert (
        choose(public, public, Selection(method="random", count=9)).indices
        == choose(private, public, Selection(method="random", count=9)).indices
    )


def test_fewer_public_examples_than_asked_for() -> None:
    private, public = points(20, 1), points(30, 2)
    for method in ("dpp", "relevance", "random"):
        chosen = choose(private, public, Selection(method=method))  # type: ignore[arg-type]
        assert sorted(chosen.indices) == list(range(30)) and "30" in chosen.stopped
    cosine = choose(private, points(100, 2), Selection(kernel="cosine", pool=90, count=60))
    assert len(cosine.indices) == 24 and "rank" in cosine.stopped


def test_progress_is_told() -> None:
    told = io.StringIO()
    choose(points(20, 1), points(60, 2), Selection(pool=20, count=10), progress=Progress(stream=told, interval=0))
    assert "Scoring public examples: 5/5 folds" in told.getvalue()
    assert "Choosing examples: 10/10 examples" in told.getvalue()


@pytest.mark.parametrize(
    ("selection", "said"),
    [
        (Selection(count=0), "count"),
        (Selection(pool=10, count=20), "pool"),
        (Selection(folds=1), "folds"),
        (Selection(folds=99), "99 folds"),
        (Selection(tempering=-1), "tempering"),
        (Selection(epsilon=1.0), "delta"),
        (Selection(method="best"), "method"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_make_no_sense(selection: Selection, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        choose(points(20, 1), points(60, 2), selection)
    assert caught.value.advice


def test_vectors_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="same seed"):
        choose(points(20, 1, width=8), points(60, 2))
    with pytest.raises(UsageError, match="1 private"):
        choose(points(1, 1), points(60, 2))
    bad = points(60, 2)
    bad[7] = 0
    with pytest.raises(UsageError, match="public example 7"):
        choose(points(20, 1), bad)
