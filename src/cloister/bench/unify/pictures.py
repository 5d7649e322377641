"""A picture of each table of accuracies or perplexities: who fares how well under which method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cloister.bench.schema import Report, Row

TABLES = ("text", "vision", "language")  # what the names of their rows begin with, before a space


def draw(report: Report, directory: Path | str) -> list[Path]:
    """Draw the tables that the report holds; returns the files written."""
    found = []
    for name in TABLES:
        rows = [row for row in report.rows if row.name.startswith(f"{name} ") and row.figures]
        if rows:
            found.append(_table(name, rows, report, Path(directory)))
    return found


def _table(name: str, rows: Sequence[Row], report: Report, directory: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    owners = list(rows[0].figures)
    whole = "average" if not rows[0].at_most else "geometric mean"
    cells = np.array([[*(row.figures[owner] for owner in owners), row.value or 0.0] for row in rows])
    figure, axes = pyplot.subplots(figsize=(2.8 + 1.15 * len(owners), 1.6 + 0.36 * len(rows)), layout="constrained")
    # One colour scale a column, greener is better: what is easy for one owner is hard for another.
    good = -np.log(cells) if rows[0].at_most else cells
    low, high = good.min(0), good.max(0)
    axes.imshow((good - low) / np.maximum(high - low, 1e-9), cmap="Greens", vmin=-0.1, vmax=1.4, aspect="auto")
    for (line, column), value in np.ndenumerate(cells):
        best = good[line, column] == high[column]
        axes.text(
            column, line, f"{value:.1f}", ha="center", va="center", fontsize=8, weight="bold" if best else "normal"
        )
    axes.axvline(len(owners) - 0.5, color="#333333", linewidth=1)
    axes.set_xticks(range(len(owners) + 1), [*(owner.replace("_", " ") for owner in owners), whole], fontsize=8)
    axes.tick_params(axis="x", rotation=20, top=True, bottom=False, labeltop=True, labelbottom=False)
    axes.set_yticks(range(len(rows)), [row.name.removeprefix(f"{name} ") for row in rows], fontsize=8)
    what = "perplexity" if rows[0].at_most else "accuracy in %"
    axes.set_title(f"{name}: {what} by owner and method   {report.started[:10]}", fontsize=10)
    axes.spines[:].set_visible(False)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"bench-{report.suite}-{name}.png"
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
