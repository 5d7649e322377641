"""Changes of coordinates and the randomness behind them."""

from __future__ import annotations

import numpy as np
import pytest

from cloister import families
from cloister.families.layout import Heads
from cloister.permute import selfcheck
from cloister.permute.draw import Draws
from cloister.permute.entropy import MasterKey
from cloister.permute.maps import Blocks, Dense, Identity, Map, Permutation, ScaledPermutation, side_by_side
from cloister.permute.numbers import narrow, widen


def matrix(drawn: Map) -> np.ndarray:
    return drawn.columns(np.eye(drawn.size, dtype=np.float32)).T


def all_maps() -> list[Map]:
    stream = MasterKey.from_insecure_seed(1).stream("test")
    head_matrices = np.array([stream.invertible(4) for _ in range(3)])
    return [
        Identity(12),
        Permutation(stream.permutation(12)),
        ScaledPermutation(stream.permutation(12), stream.scales(12) * stream.signs(12)),
        Dense(stream.orthogonal(12)),
        Blocks(stream.permutation(3), head_matrices),
        side_by_side([Permutation(stream.permutation(5)), Dense(stream.orthogonal(7))]),
    ]


@pytest.mark.parametrize("drawn", all_maps(), ids=lambda drawn: type(drawn).__name__)
def test_rows_columns_and_contragredient_agree(drawn: Map) -> None:
    t = matrix(drawn)
    a = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
    np.testing.assert_allclose(drawn.rows(a, 0, 12), t @ a, atol=1e-5)
    grain = drawn.granularity()
    if grain < 12:
        np.testing.assert_allclose(drawn.rows(a, grain, 2 * grain), (t @ a)[grain : 2 * grain], atol=1e-5)
    np.testing.assert_allclose(drawn.columns(np.ascontiguousarray(a.T)), (t @ a).T, atol=1e-5)
    np.testing.assert_allclose(matrix(drawn.contragredient()).T @ t, np.eye(12), atol=1e-5)
    assert "array" not in repr(drawn)


def test_orthogonal_draws() -> None:
    stream = MasterKey.fresh().stream("q")
    q = stream.orthogonal(40)
    np.testing.assert_allclose(q @ q.T, np.eye(40), atol=1e-12)
    kept = stream.orthogonal_keeping_ones(40)
    np.testing.assert_allclose(kept @ kept.T, np.eye(40), atol=1e-12)
    np.testing.assert_allclose(kept @ np.ones(40), np.ones(40), atol=1e-12)
    assert np.abs(kept - np.eye(40)).max() > 0.3
    singular = np.linalg.svd(stream.invertible(40), compute_uv=False)
    assert singular.max() / singular.min() < 2.0


def test_permutations_are_uniform() -> None:
    stream = MasterKey.fresh().stream("p")
    counts = np.zeros((4, 4))
    for _ in range(4000):
        counts[np.arange(4), stream.permutation(4)] += 1
    assert abs(counts - 1000).max() < 160  # five standard deviations


def test_streams_are_independent_and_repeatable() -> None:
    key = MasterKey.fresh()
    assert np.array_equal(key.stream("a").words(8), key.stream("a").words(8))
    assert not np.array_equal(key.stream("a").words(8), key.stream("b").words(8))
    assert not np.array_equal(key.stream("a").words(8), MasterKey.fresh().stream("a").words(8))


@pytest.mark.parametrize("transform", families.TRANSFORMS)
def test_heads_stay_in_their_group(transform: str) -> None:
    """Grouped queries: a query head may only move with the key/value head that serves it."""
    layout = families.layout({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **selfcheck._SMALL}, [])
    draws = Draws(layout, MasterKey.fresh(), transform)
    space = layout.spaces["layer0.attention"]
    assert isinstance(space, Heads)
    q, k = matrix(draws.map("layer0.attention.q")), matrix(draws.map("layer0.attention.k"))
    group = space.heads // space.kv_heads
    size = space.qk_dim
    owner_of_k = [int(np.abs(k[i * size : (i + 1) * size]).sum(0).reshape(-1, size).sum(1).argmax()) for i in range(2)]
    for head in range(space.heads):
        origin = int(np.abs(q[head * size : (head + 1) * size]).sum(0).reshape(-1, size).sum(1).argmax())
        assert origin // group == owner_of_k[head // group]


@pytest.mark.parametrize("name", ["BF16", "F16", "F32"])
def test_numbers_round_to_nearest_even(name: str) -> None:
    import torch

    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    torch_type = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[name]
    expected = torch.from_numpy(values).to(torch_type).float().numpy()
    assert np.array_equal(widen(narrow(values, name), name), expected)
