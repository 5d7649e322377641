"""The enclave's functions against their slow, obvious counterparts."""

from __future__ import annotations

import numpy as np
import pytest
from enclave_models import HIDDEN, tiny

from cloister.permute.enclave.functions import Functions, Session
from cloister.permute.enclave.making import make_bundle


def softmax_plainly(scores, alpha, rest, masked):
    """One row at a time, in float64."""
    out = np.zeros(scores.shape)
    for b, h, i in np.ndindex(scores.shape[:3]):
        row = scores[b, h, i].astype(np.float64) / (rest[b, i] * rest[b])
        row[masked[b, i]] = -np.inf
        if np.isinf(row).all():
            continue
        row = np.exp(row - row.max())
        out[b, h, i] = alpha[b, i] * row / row.sum() / rest[b]
    return out


@pytest.mark.parametrize("name", ["llama", "mistral", "bert without biases"])
@pytest.mark.parametrize("padded", [False, True])
def test_softmax(name, padded):
    functions = Functions(make_bundle(tiny(name), np.arange(HIDDEN), np.arange(HIDDEN if "bert" in name else 96)))
    draw = np.random.default_rng(1)
    alpha, rest = draw.uniform(0.3, 3, (2, 12)).astype(np.float32), draw.uniform(0.9, 1.1, (2, 12)).astype(np.float32)
    lengths = np.array([12, 3], np.int32) if padded else None
    session = Session(alpha, rest, np.zeros((2, 12, HIDDEN), np.float32), lengths)
    scores = draw.standard_normal((2, 3, 12, 12)).astype(np.float32) * 4
    form = functions.bundle.form
    distance = np.arange(12)[:, None] - np.arange(12)[None]
    masked = np.zeros((2, 12, 12), bool)
    if form.causal:
        masked |= distance < 0
    if form.window:
        masked |= distance >= form.window
    if padded:
        masked |= np.arange(12)[None, None] >= lengths[:, None, None]
    out = np.empty_like(scores)
    functions.softmax(scores, session, 1.0, out)
    assert np.abs(out - softmax_plainly(scores, alpha, rest, masked)).max() < 1e-5
    assert np.isfinite(out).all()  # rows of padding that see nothing are zero


def test_randomness_is_the_operating_systems_unless_named_insecure():
    bundle = make_bundle(tiny("llama"), np.arange(HIDDEN), np.arange(96))
    ids = np.arange(3, 9, dtype=np.int32)[None]
    fixed = [Functions(bundle, insecure_random=bytes).embed(ids, None)[1].alpha for _ in range(2)]
    free = [Functions(bundle).embed(ids, None)[1].alpha for _ in range(2)]
    assert np.array_equal(*fixed) and not np.array_equal(*free)
