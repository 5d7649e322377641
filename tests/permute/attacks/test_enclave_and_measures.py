"""The enclave's scaling is in its output; distance correlation is no measure of what is recovered."""

from __future__ import annotations

import numpy as np
import pytest

from cloister.permute.attacks import distance_correlation, row_scaling, scenarios


def attention(random, heads, size, *, causal):
    scores = np.exp(2 * random.standard_normal((heads, size, size)))
    if causal:
        scores = np.tril(scores)
    return scores / scores.sum(axis=2, keepdims=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 12])
def test_row_scaling_is_recovered_from_the_enclave_output(random, causal, heads):
    alpha = random.lognormal(size=24)
    weights = attention(random, heads, 24, causal=causal)
    handed_out = (alpha[:, None] * weights / alpha).astype(np.float32)
    assert row_scaling.scaling_error(row_scaling.recover_row_scaling(handed_out), alpha) < 1e-4


def test_signs_of_the_scaling_are_recovered_too(random):
    alpha = random.lognormal(size=24) * random.choice([-1, 1], 24)
    handed_out = alpha[:, None] * attention(random, 4, 24, causal=False) / alpha
    assert row_scaling.scaling_error(row_scaling.recover_row_scaling(handed_out), alpha) < 1e-8


def test_row_scaling_is_not_found_where_rows_do_not_sum_to_one(random):
    alpha = random.lognormal(size=24)
    weights = attention(random, 4, 24, causal=False) * random.lognormal(size=(4, 24, 1))
    found = row_scaling.recover_row_scaling(alpha[:, None] * weights / alpha)
    assert row_scaling.scaling_error(found, alpha) > 0.1


@pytest.mark.parametrize("kind", scenarios.TRANSFORMS)
def test_real_distance_correlation_is_one_where_the_paper_prints_nearly_nothing(small_table, random, kind):
    rows = small_table[:200] - small_table.mean()
    seen = scenarios.draw_transform(kind, 96, random)(rows)
    assert distance_correlation.distance_correlation(rows, seen) == pytest.approx(1, abs=1e-4)
    assert distance_correlation.paper_correlation(rows[0], seen[0]) < 0.5


def test_distance_correlation_of_unrelated_data_is_lower(random):
    left, right = random.standard_normal((2, 300, 3))
    assert distance_correlation.distance_correlation(left, right) < 0.4
    assert distance_correlation.distance_correlation(left, np.ones((300, 2))) == 0
