"""The rows of the inference benchmark, at their smallest."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from cloister.bench.suites import Options
from cloister.bench.unify import inference
from cloister.progress import SILENT
from cloister.unify.moe import dispatch


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        (
            "inference-vision",
            ["inference-vision-2", "inference-vision-mixed-2", "inference-vision-core", "inference-vision-random"],
        ),
        (
            "inference-decoder",
            [
                *("inference-prompt-1", "inference-prompt-2", "inference-prompt-mixed-2"),
                *("inference-decoding-1", "inference-decoding-2", "inference-decoding-core"),
                "inference-decoding-mixed-2",
            ],
        ),
    ],
)
def test_the_rows_compare_one_expert_with_the_unified_model(name: str, rows: list[str]) -> None:
    workload = next(one for one in inference.WORKLOADS if one.name == name)
    found = workload.run(Options(quick=True, progress=SILENT))
    assert [row.name for row in found] == rows
    cores = [row for row in found if row.name.endswith("-core")]
    assert all(not row.ok if dispatch._core() is None else row.figures["operations_seconds"] > 0 for row in cores)
    for row in found:
        if row in cores:
            continue
        assert row.bar == (None if row.name.endswith("random") else inference.BAR) and row.value is not None
        assert row.figures["unified_seconds"] > 0 and row.figures["dense_seconds"] > 0
        assert row.ok == (row.bar is None or row.value <= inference.BAR)
