"""Nearest neighbours, assignment and rounding against slow obvious twins."""

from __future__ import annotations

import builtins

import numpy as np
import pytest

from cloister.permute.attacks import matching


def test_nearest_equals_the_obvious_search(random, monkeypatch):
    monkeypatch.setattr(matching, "_CHUNK_BYTES", 4 * 5 * 7)  # many chunks, the last one short
    queries, table = random.standard_normal((20, 5)), random.standard_normal((101, 5)).astype(np.float32)
    distances = np.linalg.norm(queries[:, None, :] - table[None], axis=2)
    found = matching.nearest(queries, table)
    np.testing.assert_array_equal(found.index, distances.argmin(axis=1))
    np.testing.assert_allclose(found.distance, np.sort(distances, axis=1)[:, 0], rtol=1e-6)
    np.testing.assert_allclose(found.runner_up, np.sort(distances, axis=1)[:, 1], rtol=1e-6)


def test_nearest_of_a_single_candidate():
    found = matching.nearest(np.ones((2, 3)), np.zeros((1, 3), dtype=np.float32))
    assert found.index.tolist() == [0, 0]
    assert np.isinf(found.runner_up).all()


def test_assignment_is_one_to_one_and_finds_a_planted_permutation(random):
    order = random.permutation(60)
    gain = 0.4 * random.standard_normal((60, 60))
    gain[np.arange(60), order] += 3
    np.testing.assert_array_equal(matching.assign(gain), order)
    np.testing.assert_array_equal(matching.assign_greedily(gain), order)
    noise_only = matching.assign(random.standard_normal((60, 60)))
    assert sorted(noise_only) == list(range(60))


def test_assignment_works_without_scipy(random, monkeypatch):
    real = builtins.__import__

    def no_scipy(name, *args, **kwargs):
        if name.startswith("scipy"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_scipy)
    columns = matching.assign(random.standard_normal((40, 40)))
    assert sorted(columns) == list(range(40))


@pytest.mark.parametrize(
    ("value", "rounded"), [(1.0, 1.0), (1.00390625, 1.0), (1.01171875, 1.015625), (-3.1415927, -3.140625), (0.0, 0.0)]
)
def test_bfloat16_rounds_to_nearest_even(value, rounded):
    assert matching.round_bfloat16(np.array([value], dtype=np.float32))[0] == rounded


def test_distinct_rows_and_ids():
    first, kinds = matching.distinct_rows(np.array([[1.0, 2], [3, 4], [1, 2]]))
    assert first.tolist() == [0, 1]
    assert kinds.tolist() == [0, 1, 0]
    first, kinds = matching.distinct_rows(np.array([5, 5, 2]))
    assert (first.tolist(), kinds.tolist()) == ([0, 2], [0, 0, 1])
