"""Rows, reports, tables and plots: a missed bar stays visible."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cloister.bench import plots, suites, table
from cloister.bench.schema import Report, Row
from cloister.bench.suites import Options, Suite, Workload
from cloister.errors import DataError, UsageError

ROWS = (
    Row.measured("fast", 1.01, "ratio", bar=1.02, spread=0.01, baseline="plain, 3 ms", figures={"ms": 3.1}),
    Row.measured("slow", 1.5, "ratio", bar=1.02, paper="1.0"),
    Row.measured("same", 0.99, "agreement", bar=1.0, at_most=False),
    Row.measured("rate", 1234.5, "tokens/s"),
    Row.failed("gone", "ms", "not measured: no server", bar=2.0),
    Row.measured("none", 0, "failures", bar=0),
)


@pytest.fixture
def report() -> Report:
    return Report("permute", "2026-01-01T00:00:00+00:00", 1.0, {"cores": 2}, "abc", {"torch": "2"}, True, ROWS)


def test_ok_follows_from_the_bar() -> None:
    assert [row.ok for row in ROWS] == [True, False, False, True, False, True]


def test_a_report_survives_json(report: Report, tmp_path: Path) -> None:
    report.write(tmp_path / "new" / "report.json")
    assert Report.read(tmp_path / "new" / "report.json") == report


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"schema": 9}, "schema"),
        ({"rows": "none"}, "rows"),
        ({"extra": 1}, "unknown"),
        ({"suite": 3}, "suite"),
        ({"quick": "yes"}, "quick"),
    ],
)
def test_a_damaged_report_is_refused(report: Report, change: dict[str, object], why: str) -> None:
    with pytest.raises(DataError, match=why):
        Report.from_dict({**report.as_dict(), **change})


def test_a_row_that_lies_is_refused(report: Report) -> None:
    raw = report.as_dict()
    raw["rows"][1]["ok"] = True
    with pytest.raises(DataError, match="misses its bar"):
        Report.from_dict(raw)
    raw = report.as_dict()
    raw["rows"][4]["note"] = ""
    with pytest.raises(DataError, match="no value"):
        Report.from_dict(raw)
    del raw["rows"][0]["spread"]
    with pytest.raises(DataError, match="lacks spread"):
        Report.from_dict(raw)


def test_tables_show_every_row(report: Report) -> None:
    text = table.markdown(report)
    for row in ROWS:
        assert f"| {row.name} |" in text
    assert "not measured" in text and "1.500" in text and "at least 1" in text
    from rich.console import Console

    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(table.rich(report))
        assert "3 of 6 rows missed" in console.export_text()


def test_plots_are_drawn(report: Report, tmp_path: Path) -> None:
    (path,) = plots.draw(report, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert plots.draw(replace(report, rows=(ROWS[3],)), tmp_path) == []


def good(options: Options) -> list[Row]:
    return [Row.measured("good", 1.0, "ratio", bar=2.0)]


def bad(options: Options) -> list[Row]:
    raise ValueError("broken on purpose")


SUITE = Suite("trial", (Workload("good", "works", good), Workload("bad", "fails", bad, bar=1.5)))


def test_a_failing_row_leaves_the_others() -> None:
    report = suites.run(SUITE, quick=True)
    assert [(row.name, row.ok) for row in report.rows] == [("good", True), ("bad", False)]
    assert "broken on purpose" in report.rows[1].note and report.rows[1].bar == 1.5
    assert Report.from_dict(json.loads(json.dumps(report.as_dict()))) == report


def test_rows_run_alone() -> None:
    assert [row.name for row in suites.run(SUITE, only=["go"]).rows] == ["good"]
    with pytest.raises(UsageError, match="nothing"):
        suites.run(SUITE, only=["nothing"])
    with pytest.raises(UsageError, match="no suite"):
        suites.get("nothing")


def test_the_suite_permute_has_every_figure_of_the_plan() -> None:
    names = {workload.name for workload in suites.get("permute").rows}
    assert names >= {
        "server-step",
        "end-to-end-token",
        "end-to-end-server",
        "device-token",
        "concurrency",
        "enclave",
        "protect",
        "lossless",
    }
