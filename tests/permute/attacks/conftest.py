"""Real material for the attacks; skipped where it is not installed."""

from __future__ import annotations

import numpy as np
import pytest

from cloister.errors import NotAvailable
from cloister.permute.attacks import scenarios
from cloister.permute.attacks.matching import Array


@pytest.fixture(scope="session")
def minilm() -> scenarios.Model:
    try:
        return scenarios.load_minilm()
    except NotAvailable as error:
        pytest.skip(str(error))


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(scope="session")
def small_table() -> Array:
    """A made-up embedding table with rows of differing length around a common mean, as real ones have."""
    random = np.random.default_rng(3)
    scales = np.exp(0.2 * random.standard_normal((1500, 1)))
    strengths = np.exp(0.5 * random.standard_normal(96))
    return (0.3 * random.standard_normal(96) + scales * random.standard_normal((1500, 96)) * strengths).astype(
        np.float32
    )
