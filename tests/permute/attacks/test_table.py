"""The command behind docs/permute-leakage.md: its cheap sections run, and its output is what the page shows."""

from __future__ import annotations

import pytest

from cloister.permute.attacks import table
from cloister.permute.attacks.table import Row

ROWS = [
    Row("Public base", "banking77, permutation, bfloat16", "sorted_rows", 100.0),
    Row("Public base", "banking77, orthogonal, bfloat16", "norms", 8.84),
    Row("Controls", "unrelated secret table", "sorted_rows", 0.0, control=True),
    Row("Row scaling", "factors", "worst relative error", 3.35e-8, unit=""),
]


def test_markdown_has_settings_down_and_attacks_across():
    text = table.to_markdown(ROWS)
    assert "| setting | sorted rows | norms |" in text
    assert "| banking77, orthogonal, bfloat16 |  | 8.8 % |" in text
    assert "| unrelated secret table | 0.0 % (control) |" in text
    assert "3.4e-08" in text


@pytest.mark.parametrize("section", [table.linked_contexts, table.correlations, table.row_scalings, table.one_request])
def test_sections_win_where_they_should_and_lose_where_they_must(minilm, data_dir, section):
    rows = list(section(table.Material(minilm, data_dir, tokens=200, seed=1)))
    for row in rows:
        if row.unit == "%":
            assert row.value < 25 if row.control else row.value > 99, row
    assert rows


def test_the_chart_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    from cloister.permute.attacks.plot import draw

    draw(ROWS, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
