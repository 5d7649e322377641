"""Routing vectors: what the paper's kind reveals, where its bound holds and where not, and the safer kinds."""

from __future__ import annotations

import numpy as np
import pytest

from cloister.unify import noise
from cloister.unify.disclosure import routing_vectors as rv
from cloister.unify.views import block_inputs

DRAW = np.random.default_rng(0)
LAYERS, HIDDEN = 3, 16
BASE = DRAW.normal(size=HIDDEN)


def embeddings(count: int, towards: np.ndarray) -> np.ndarray:
    rows = DRAW.normal(size=(count, HIDDEN)) + 2 * towards
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


PRIVATE, PROXIES = embeddings(230, BASE), embeddings(90, np.zeros(HIDDEN))


# ---- recovery --------------------------------------------------------------------------------------------------------


def test_the_direction_is_exact_without_the_count() -> None:
    vector = rv.paper_vector(PRIVATE, PROXIES)
    true = PRIVATE.mean(0) - PROXIES.mean(0)
    assert rv.direction(vector, PROXIES.mean(0)) @ true / np.linalg.norm(true) == pytest.approx(1, abs=1e-12)


def test_the_mean_is_exact_with_the_count() -> None:
    vector = rv.paper_vector(PRIVATE, PROXIES)
    assert np.allclose(rv.mean(vector, PROXIES.mean(0), len(PROXIES), len(PRIVATE)), PRIVATE.mean(0))
    usual = float(np.linalg.norm(PRIVATE.mean(0)))
    assert rv.count_by_length(vector, PROXIES.mean(0), len(PROXIES), usual)[0] == len(PRIVATE)


def test_two_releases_give_the_added_record_and_the_count() -> None:
    candidates = embeddings(500, BASE)
    before = rv.paper_vector(PRIVATE, PROXIES)
    after = rv.paper_vector(np.concatenate([PRIVATE, candidates[321:322]]), PROXIES)
    assert rv.record_between(before, after, len(PROXIES), candidates, range(10, 600)) == (len(PRIVATE), 321)


# ---- the paper's equation 9 ------------------------------------------------------------------------------------------


def test_the_bound_holds_for_a_fixed_encoder_and_fixed_proxies() -> None:
    bound = rv.sensitivity(1.0, len(PROXIES), len(PRIVATE))
    for row in range(0, len(PRIVATE), 10):
        other = PRIVATE.copy()
        other[row] = -other[row]  # the farthest that an embedding of length one can go
        moved = np.linalg.norm(rv.paper_vector(PRIVATE, PROXIES) - rv.paper_vector(other, PROXIES))
        assert moved <= bound + 1e-12 <= rv.sensitivity(1.0, len(PROXIES)) + 1e-12
        assert moved == pytest.approx(bound)  # and it is reached


def test_the_bound_fails_when_the_proxies_depend_on_the_data() -> None:
    """One replaced record changes which public examples are chosen, and so many terms of the mean."""
    public = embeddings(400, np.zeros(HIDDEN))
    private = embeddings(6, np.zeros(HIDDEN))
    other = private.copy()
    other[0] = -8 * private.sum(0) / np.linalg.norm(private.sum(0))
    other[0] /= np.linalg.norm(other[0])
    vectors = [rv.paper_vector(rows, public[np.argsort(-(public @ rows.sum(0)))[:20]]) for rows in (private, other)]
    assert np.linalg.norm(vectors[0] - vectors[1]) > rv.sensitivity(1.0, 20, len(private))


def test_the_bound_fails_when_the_encoder_is_trained_on_the_data() -> None:
    """The encoder is a rotation fitted to the data: one record turns every embedding, the proxies' too."""

    def encoder(rows: np.ndarray) -> np.ndarray:
        axis = np.linalg.svd(rows)[2][0]
        return np.eye(HIDDEN) - 2 * np.outer(axis, axis)  # keeps every length

    private, proxies = np.eye(HIDDEN)[:4].repeat([3, 3, 1, 1], axis=0), embeddings(50, np.eye(HIDDEN)[0])
    other = private.copy()
    private[6], other[6] = np.eye(HIDDEN)[0], np.eye(HIDDEN)[1]
    first, second = (rv.paper_vector(rows @ encoder(rows), proxies @ encoder(rows)) for rows in (private, other))
    assert np.linalg.norm(first - second) > rv.sensitivity(1.0, len(proxies), len(private))


# ---- vectors from proxies only ---------------------------------------------------------------------------------------


def test_vectors_from_proxies_do_not_change_with_private_data() -> None:
    """Nothing private is even passed; and they are those that anyone makes from the ids."""
    pytest.importorskip("transformers")
    import torch
    from transformers import ViTConfig, ViTModel

    from cloister.unify.examples import Examples
    from cloister.unify.seeds import Seed

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4
    )
    seed = Seed.of(ViTModel(config, add_pooling_layer=False))
    images = DRAW.integers(0, 256, (20, 3, 8, 8)).astype(np.uint8)
    public = Examples("image", tuple(map(str, range(20))), images)
    chosen = ["3", "7", "11", "2"]
    own = rv.from_proxies(seed, public.by_id(chosen))
    anyone = block_inputs(seed, public)[[3, 7, 11, 2]].mean(0)
    assert own.shape == (2, HIDDEN)
    assert np.allclose(own, anyone, atol=1e-5)
    assert np.array_equal(own, rv.from_proxies(seed, public.by_id(chosen)))


# ---- noisy vectors ---------------------------------------------------------------------------------------------------


def layered(count: int, towards: float) -> np.ndarray:
    return DRAW.normal(size=(count, LAYERS, HIDDEN)) * [[[1.0], [5.0], [0.2]]] + towards * BASE


YARD = rv.Yardstick.of(layered(300, 0.0))


def test_one_example_counts_for_at_most_the_clip_over_all_layers() -> None:
    rows = rv.clipped(np.concatenate([layered(50, 1.0), 1e9 * layered(2, 1.0)]), YARD)
    assert ((rows.astype(object) ** 2).sum((1, 2)) <= rv.GRID**2).all()


@pytest.mark.parametrize("neighbours", ["added or removed", "replaced"])
def test_noisy_vectors_point_to_the_data_and_are_accounted_for(neighbours: rv.Neighbours) -> None:
    pytest.importorskip("dp_accounting", reason="the optional extra `dp` is not installed")
    private, near = layered(2000, 1.0), layered(100, 0.7)
    found = rv.private_vectors(private, near, YARD, epsilon=4, delta=1e-6, neighbours=neighbours, insecure_seed=5)
    assert found.insecure
    true = private.mean(0) - YARD.centre
    away = found.vectors - YARD.centre
    cosines = (true * away).sum(1) / np.linalg.norm(true, axis=1) / np.linalg.norm(away, axis=1)
    assert cosines.max() > 0.9
    total = rv.accounting.total([found.release], 1e-6, neighbours=neighbours)
    assert total.epsilon == pytest.approx(4, abs=0.02)


def test_noise_is_the_operating_systems_unless_said_otherwise() -> None:
    pytest.importorskip("dp_accounting", reason="the optional extra `dp` is not installed")
    private, near = layered(50, 1.0), layered(10, 0.7)
    first, second = (rv.private_vectors(private, near, YARD, epsilon=1, delta=1e-6) for _ in range(2))
    assert not first.insecure and not np.array_equal(first.vectors, second.vectors)


def test_the_noise_is_a_discrete_gaussian() -> None:
    found = noise.gaussian(20_000, 2.0, insecure_seed=1)
    values = np.arange(-7, 8)
    wanted = np.exp(-(values**2) / 8.0)
    wanted *= len(found) / wanted.sum()
    seen = np.array([(found == value).sum() for value in values])
    assert ((seen - wanted) ** 2 / wanted).sum() < 36  # 15 cells; 99.9 % of true draws are below
    wide = noise.gaussian(400, 3.5 * rv.GRID, insecure_seed=2)
    assert wide.std() == pytest.approx(3.5 * rv.GRID, rel=0.15)
