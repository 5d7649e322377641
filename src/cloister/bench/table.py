"""A report as a table: on the terminal and as Markdown for the documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloister.bench.schema import Report, Row

if TYPE_CHECKING:
    from rich.console import RenderableType

HEADINGS = ("row", "value", "bar", "met", "compared with", "paper", "note")


def number(value: float | None, unit: str = "") -> str:
    """A figure with as many digits as mean something."""
    if value is None:
        return "not measured"
    if value == 0 or (float(value).is_integer() and abs(value) < 1e6):
        text = f"{value:.0f}"
    elif abs(value) < 1e-3:
        text = f"{value:.1e}"
    elif unit == "ratio":
        text = f"{value:.3f}"
    else:
        text = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{text} {unit}".strip() if unit != "ratio" else text


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table."""
    value = number(row.value, row.unit)
    if row.value is not None and row.spread:
        value += f" ± {number(row.spread)}"
    met = "" if row.bar is None and row.ok else "yes" if row.ok else "no"
    return (row.name, value, row.bar_text(), met, row.baseline, row.paper, row.note)


def markdown(report: Report) -> str:
    """A Markdown table, with the command that made it and where."""
    quick = " --quick" if report.quick else ""
    lines = [
        f"`cloister bench {report.suite}{quick}` on {report.machine.get('cores')} cores of "
        f"{report.machine.get('processor')}, {report.started[:10]}, commit {report.commit or 'unknown'}:",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in report.rows]
    return "\n".join(lines) + "\n"


def rich(report: Report) -> RenderableType:
    """A table for the terminal. Notes stand below it: they are sentences."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    missed = sum(not row.ok for row in report.rows)
    verdict = "all bars met" if not missed else f"{missed} of {len(report.rows)} rows missed or not measured"
    table = Table(title=f"{report.suite}: {verdict}, {report.seconds:.0f} s{' (quick)' if report.quick else ''}")
    for heading in HEADINGS[:-1]:
        table.add_column(heading, overflow="fold", no_wrap=heading in {"row", "value", "met"})
    notes = []
    for row in report.rows:
        shown = cells(row)
        table.add_row(
            *(
                Text(cell, style="bold red" if index == 3 and not row.ok else "")
                for index, cell in enumerate(shown[:-1])
            )
        )
        if row.note:
            notes.append(Text(f"{row.name}: {row.note}"))
    return Group(table, *notes)
