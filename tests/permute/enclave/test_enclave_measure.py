"""The measurement runs and reports sane figures; no bar is asserted here."""

from __future__ import annotations

import json

import pytest

from cloister.errors import InvalidParameter
from cloister.permute.enclave import measure


def test_measure_overhead(monkeypatch):
    monkeypatch.setitem(measure.SHAPES, "tiny", lambda: measure._llama(128, 2))
    found = measure.measure_overhead("tiny", batch=2, tokens=12, rounds=2)
    assert found.ratio > 0 and found.cpu_ratio > 0 and found.max_difference < 1e-4
    json.dumps(found.as_dict())


def test_unknown_shape_is_refused():
    with pytest.raises(InvalidParameter, match="no shape"):
        measure.measure_overhead("no-such-model")
