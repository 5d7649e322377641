"""`cloister bench`: measure, compare with the bars, and draw."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cloister.cli import console

SUMMARY = "Measure, compare with the bars, draw"
NEEDS_ARGUMENTS = True


def command(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="What to measure: permute, engine, unify.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes, to see that it runs. The figures mean little.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this row, or rows that begin so; may be repeated.")
    ] = None,
    list_rows: Annotated[bool, typer.Option("--list", help="List the rows and what each measures.")] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help='Write the rows as JSON; "-" prints them instead of the table.'),
    ] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw each ratio against its bar into DIR.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a row misses its bar.")] = False,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Measure a suite on this machine. Each figure is a ratio of two things measured in the same run.

    A missed bar is reported as missed and a row that could not be measured says why; none is left out.

    \b
    Examples:
      cloister bench permute --quick
      cloister bench permute --list
      cloister bench permute --only server-step --only device-token
      cloister bench permute --json artefacts/permute.json --plots artefacts
    """
    from cloister.bench import suites, table

    chosen = suites.get(suite)
    if list_rows:
        print("\n".join(f"{row.name:<24} {row.summary}" for row in chosen.rows))
        return
    report = suites.run(chosen, only=only or [], quick=quick, progress=console.progress())
    printed = json_file is not None and str(json_file) == "-"
    if printed:
        console.data(report.as_dict())
    else:
        if json_file is not None:
            report.write(json_file)
            console.note(f"Rows written to {json_file}.")
        console.show(table.rich(report))
    if plots is not None:
        from cloister.bench import plots as drawing

        for draw in (drawing.draw, *chosen.pictures):
            for path in draw(report, plots):
                console.note(f"Drawn: {path}")
    if strict and not all(row.ok for row in report.rows):
        raise typer.Exit(1)
