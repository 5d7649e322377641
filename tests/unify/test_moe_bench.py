"""The rows of the inference benchmark, at their smallest."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from cloister.bench.suites import Options
from cloister.bench.unify import inference
from cloister.progress import SILENT


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("inference-vision", ["inference-vision-2"]),
        ("inference-decoder", ["inference-prompt-2", "inference-decoding-2"]),
    ],
)
def test_the_rows_compare_one_expert_with_the_unified_model(name: str, rows: list[str]) -> None:
    workload = next(one for one in inference.WORKLOADS if one.name == name)
    found = workload.run(Options(quick=True, progress=SILENT))
    assert [row.name for row in found] == rows
    for row in found:
        assert row.bar == inference.BAR and row.value is not None
        assert row.figures["unified_seconds"] > 0 and row.figures["dense_seconds"] > 0
        assert row.ok == (row.value <= inference.BAR)
