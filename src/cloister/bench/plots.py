"""One picture per report: how far each figure is from its bar."""

from __future__ import annotations

from pathlib import Path

from cloister.bench.schema import Report, Row
from cloister.bench.table import number

MET, MISSED = "#1b7f4d", "#c0392b"


def draw(report: Report, directory: Path | str) -> list[Path]:
    """Draw every row that has a bar: figure divided by bar, on one axis. Returns the files written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in report.rows if row.bar is not None]
    if not rows:
        return []
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(9, 1.4 + 0.5 * len(rows)), layout="constrained")
    positions = range(len(rows) - 1, -1, -1)
    for position, row in zip(positions, rows, strict=True):
        share = _share(row)
        if share is None:
            axes.text(0.02, position, "not measured", va="center", color=MISSED, fontsize=9)
            continue
        color = MET if row.ok else MISSED
        shown = min(share, 3.0)
        axes.plot([0, shown], [position, position], color=color, linewidth=5, alpha=0.35, solid_capstyle="butt")
        axes.plot(shown, position, "o" if share <= 3 else ">", color=color, markersize=8)
        axes.annotate(
            f"{number(row.value, row.unit)}  ({row.bar_text()})",
            (shown, position),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.axvline(1.0, color="#333333", linewidth=1, linestyle="--")
    axes.text(1.0, len(rows) - 0.35, "bar", ha="center", va="bottom", fontsize=9)
    axes.set_yticks(list(positions), [row.name for row in rows], fontsize=9)
    axes.set_xlim(0, 4.2)
    axes.set_ylim(-0.6, len(rows) - 0.2)
    axes.set_xlabel("share of what the bar allows (left of the line: met)")
    axes.set_title(
        f"cloister bench {report.suite}{' --quick' if report.quick else ''}   {report.started[:10]}", fontsize=11
    )
    axes.spines[["top", "right"]].set_visible(False)
    path = directory / f"bench-{report.suite}.png"
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return [path]


def _share(row: Row) -> float | None:
    """How much of its bar a row uses up; below 1 is met, for lower limits too."""
    if row.value is None or row.bar is None:
        return None
    if row.bar == 0:
        return 0.0 if row.ok else 3.0
    if row.at_most:
        return row.value / row.bar
    return row.bar / row.value if row.value else 3.0
