"""Each option with differential privacy against an attack that wins without it, and with it stays below the bound.

The attacker knows every private example but one, and asks whether that one is there: the worst case that differential
privacy speaks of. Noise is seeded here, so that a test gives the same answer every time.
"""

from __future__ import annotations

import random
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import TOPICS, WORDS, encoder

from cloister.unify import noise
from cloister.unify.disclosure import accounting
from cloister.unify.disclosure import routing_vectors as rv
from cloister.unify.disclosure.measures import auc, most_auc
from cloister.unify.examples import Examples, concat
from cloister.unify.selection import Selection, choose

Vectors = NDArray[np.float32]
DELTA = 1e-5


def points(n: int, seed: int, towards: int, strength: float = 3.0, width: int = 24) -> Vectors:
    vectors = np.random.default_rng(seed).normal(size=(n, width))
    vectors[:, towards] += strength
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def advantage_at_most(epsilon: float) -> float:
    """True less false positives of any attack."""
    return float((np.exp(epsilon) - 1 + 2 * DELTA) / (np.exp(epsilon) + 1))


# ---- proxy ids -------------------------------------------------------------------------------------------------------


def test_the_choice_tells_of_a_public_record_that_is_private_too() -> None:
    """The record also lies in the public set, and is not like the owner's other data."""
    private, record = points(30, 1, towards=0), points(1, 2, towards=5, strength=12)
    public = np.concatenate([points(300, 3, towards=0, strength=0.0), record])
    own = len(public) - 1
    with_it, without = np.concatenate([private, record]), private
    plain = Selection(method="relevance", count=60, folds=4)
    assert own in choose(with_it, public, plain).indices and own not in choose(without, public, plain).indices

    bounded = Selection(method="relevance", count=60, folds=4, epsilon=1.0, delta=DELTA)

    def named(vectors: Vectors, seed: int) -> float:
        found = choose(vectors, public, bounded, insecure_seed_for_noise=seed).indices
        return -found.index(own) if own in found else -1000.0  # the earlier it is chosen, the surer

    yes = np.array([named(with_it, seed) for seed in range(100)])
    no = np.array([named(without, 1000 + seed) for seed in range(100)])
    assert max((yes >= t).mean() - (no >= t).mean() for t in np.unique(yes)) <= advantage_at_most(1.0)
    assert auc(yes, no) <= most_auc(1.0, DELTA)


# ---- routing vectors -------------------------------------------------------------------------------------------------


def test_the_vectors_tell_of_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dp_accounting", reason="the optional extra `dp` is not installed")
    draw = np.random.default_rng(0)
    public, private = draw.normal(size=(60, 2, 8)), draw.normal(size=(25, 2, 8)) + 1.0
    record = -4 * np.ones((1, 2, 8))
    with_it, without = np.concatenate([private, record]), private

    def paper(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.stack([rv.paper_vector(rows[:, layer], public[:20, layer]) for layer in range(2)])

    # Without noise one look settles it: what is released is one of two known vectors.
    assert np.abs(paper(with_it) - paper(without)).max() > 0.05

    monkeypatch.setattr(accounting, "noise_for", lru_cache(accounting.noise_for))
    yard, towards = rv.Yardstick.of(public), np.sign(record[0] - private.mean(0))

    def score(rows: NDArray[np.float64], seed: int) -> float:
        found = rv.private_vectors(rows, public[:20], yard, epsilon=1.0, delta=DELTA, insecure_seed=seed)
        return float(((found.vectors - yard.centre) * towards).sum())

    yes = np.array([score(with_it, seed) for seed in range(200)])
    no = np.array([score(without, 1000 + seed) for seed in range(200)])
    assert 0.4 < auc(yes, no) <= most_auc(1.0, DELTA)
    # It is the noise that does it: with hardly any the same attack wins.
    monkeypatch.setattr(accounting, "noise_for", lambda *_: 0.05)
    yes = np.array([score(with_it, seed) for seed in range(30)])
    no = np.array([score(without, 1000 + seed) for seed in range(30)])
    assert auc(yes, no) > 0.95


# ---- expert weights --------------------------------------------------------------------------------------------------


def _owners_data() -> tuple[Examples, Examples]:
    words, labels = [TOPICS["bank"][i % 4] for i in range(8)], TOPICS["bank"]
    texts = tuple(f"{WORDS[12 + i]} {word}" for i, word in enumerate(words))
    private = Examples("text", tuple(map(str, range(8))), texts, tuple(words))
    canary = Examples("text", ("c",), ("soup salt pan cook",), (labels[0],))
    return private, canary


def test_the_weights_tell_of_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that fits nothing else: whoever sees its loss under the expert knows whether it was trained on."""
    pytest.importorskip("opacus", reason="the optional extra `dp` is not installed")
    pytest.importorskip("peft", reason="PEFT is not installed")
    from cloister.unify import dp
    from cloister.unify.disclosure.contribution import scorer
    from cloister.unify.experts import DpSettings, Settings, apply_delta, train_expert
    from cloister.unify.seeds import with_state
    from cloister.unify.tasks import Classify

    torch.set_num_threads(1)
    seed, task = encoder(), Classify(tuple(TOPICS["bank"]))
    private, canary = _owners_data()
    with_it = concat([private, canary])

    def score(examples: Examples, number: int, settings: DpSettings | None) -> float:
        dice = random.Random(number)
        monkeypatch.setattr(dp, "secrets", SimpleNamespace(randbits=dice.getrandbits))
        asked = Settings(method="lora", rank=4, epochs=6, lr=2e-2, batch=3, seed_for_order=number, dp=settings)
        made = train_expert(seed, task, examples, None, asked)
        return float(scorer(with_state(seed, apply_delta(seed, made.delta)), seed, task, canary)(np.array([0]))[0])

    def groups(settings: DpSettings | None, runs: int) -> tuple[Any, Any]:
        return (
            np.array([score(with_it, number, settings) for number in range(runs)]),
            np.array([score(private, 500 + number, settings) for number in range(runs)]),
        )

    assert auc(*groups(None, 3)) == 1.0
    monkeypatch.setattr(dp, "_noise", lru_cache(dp._noise))
    monkeypatch.setattr(dp.discrete, "laplace", lambda _: 0)  # below; here it would only make the steps many
    assert auc(*groups(DpSettings(epsilon=1.0, delta=DELTA), 10)) <= most_auc(1.0, DELTA)


def test_training_reads_the_count_through_noise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows from the number of private examples follows from its noisy reading: equal readings, equal plans."""
    pytest.importorskip("opacus", reason="the optional extra `dp` is not installed")
    from cloister.unify import dp

    settings = SimpleNamespace(epsilon=2.0, delta=DELTA)
    scales: list[int] = []
    found = []
    for count in (90, 100, 140):
        monkeypatch.setattr(dp.discrete, "laplace", lambda scale, count=count: scales.append(scale) or 120 - count)
        found.append(dp.plan(count, settings, batch=16, epochs=2))
    assert found[0] == found[1] == found[2] and found[0].steps == 16 and found[0].count == 120
    assert scales == [10, 10, 10] and found[0].count_epsilon == 0.1
    assert 1.8 < found[0].epsilon <= 2.0


def test_the_count_s_noise_is_a_discrete_laplace() -> None:
    dice, scale = random.Random(3), 4
    drawn = np.array([noise._laplace(scale, dice.randrange) for _ in range(20_000)])
    k = np.arange(-60, 61)
    p = np.exp(-np.abs(k) / scale)
    expected = np.cumsum(p / p.sum())
    found = np.array([(drawn <= x).mean() for x in k])
    assert np.abs(found - expected).max() < 1.95 / np.sqrt(20_000)
    # So the ratio of neighbours is what a (1/scale)-private count has.
    assert np.allclose(np.log(p[:-1] / p[1:]), np.where(k[:-1] < 0, -1, 1) / scale)
