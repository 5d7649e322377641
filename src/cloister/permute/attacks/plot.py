"""The bar chart of docs/permute-leakage.md: recovered tokens per attack, transform and base."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cloister.permute.recovery import DESCRIPTIONS

if TYPE_CHECKING:
    from cloister.permute.attacks.table import Row

_TEXT = "banking77"
_GROUPS = (
    ("Public base, permutation", f"{_TEXT}, permutation, bfloat16", "#b5473c"),
    ("Public base, orthogonal", f"{_TEXT}, orthogonal, bfloat16", "#d9893b"),
    ("Secret base, reference text of the same kind", f"{_TEXT}, 40,000 tokens seen, reference {_TEXT}", "#3d6f9e"),
    ("Secret base, reference text of another kind", f"{_TEXT}, 40,000 tokens seen, reference wikitext2", "#7aa6cc"),
)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the chart as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels: list[str] = []
    values: list[float] = []
    colours: list[str] = []
    for _, setting, colour in _GROUPS:
        for row in rows:
            if row.setting == setting and row.attack in DESCRIPTIONS:
                labels.append(DESCRIPTIONS[row.attack])
                values.append(row.value)
                colours.append(colour)
    figure, axes = pyplot.subplots(figsize=(10, 0.42 * len(labels) + 1.6), layout="constrained")
    places = range(len(labels))
    bars = axes.barh(places, values, color=colours, height=0.72)
    axes.bar_label(bars, labels=[f"{value:.0f} %" for value in values], padding=4, fontsize=10)
    axes.set_yticks(places, labels, fontsize=10)
    axes.invert_yaxis()
    axes.set_xlim(0, 112)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("% of tokens recovered by the server")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for _, _, colour in _GROUPS]
    axes.set_title("MiniLM embedding table, Banking77 questions, bfloat16 rows", fontsize=10, loc="left")
    figure.legend(handles, [name for name, _, _ in _GROUPS], loc="outside upper left", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
