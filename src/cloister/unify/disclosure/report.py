"""The report that stays with the owner: what leaves, what it reveals as measured, and what would mend it.

    found = contribution.of_contribution(...)
    found.write(folder)         # report.json, report.md and, where matplotlib is there, membership.png

Its figures are functions of the private examples and tell how many they are. What may leave is `claims.public`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cloister import storage
from cloister.errors import BrokenManifest
from cloister.unify.disclosure import claims, measures
from cloister.unify.disclosure.accounting import Bound
from cloister.unify.disclosure.claims import Done, Part
from cloister.unify.disclosure.measures import Estimate
from cloister.unify.disclosure.membership import Leak

SCHEMA = "cloister.unify.report.home/1"
JSON, PAGE, PLOT = "report.json", "report.md", "membership.png"
_MOST = 16 << 20

FigureName = Literal[
    "labels betrayed", "regions betrayed", "own records chosen", "direction of the mean",
    "membership, likelihood ratio", "membership at 1 % false positives", "membership, loss",
]  # fmt: skip

MEANINGS: Mapping[FigureName, str] = {
    "labels betrayed": "Probability that a label you hold ranks above one you do not, judged by this alone. "
    "0.5 is guessing, 1 is certainty.",
    "regions betrayed": "The same for regions of the public set in which you hold more than the public does.",
    "own records chosen": "Share of your records in the public set that were chosen, less the share of public examples "
    "like them. 0: being chosen says nothing about whose they are.",
    "direction of the mean": "Cosine of the direction in which anyone would look for the mean of your examples with "
    "the true one. 1 is exact, 0 is guessing.",
    "membership, likelihood ratio": "Probability that a training example scores above one that is none, by the strong "
    "attack. 0.5 is guessing, 1 is certainty.",
    "membership at 1 % false positives": "Share of your training examples that the strong attack names when it names "
    "one in a hundred others wrongly. 0.01 is guessing.",
    "membership, loss": "As above by the cheap attack, which only looks at the loss.",
}
NEVER_MEASURED = (
    "whether an example can be read out of the weights (only whether it can be recognised)",
    "attacks that are stronger than those named here: a figure is a lower limit of what leaks",
)


@dataclass(frozen=True)
class Figure:
    """A measured figure. `limit`: what no attack exceeds by the differential privacy that was used."""

    name: FigureName
    value: float
    interval: Estimate | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Item:
    """What was measured of one part."""

    part: Part
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What leaves, measured."""

    done: tuple[Done, ...]
    items: tuple[Item, ...]
    not_measured: tuple[str, ...] = ()
    asked: int = 0  # reference experts for the attack on the weights; none is trained where there are too few examples
    leak: Leak | None = None  # for the picture

    def home(self) -> dict[str, Any]:
        """As JSON."""
        items = {item.part: item for item in self.items}
        bounds = {one.part: claims.alone(one, self.done) for one in self.done}
        warnings = {one.part: claims.warning(one, self.done) for one in self.done}
        return {
            "schema": SCHEMA,
            "stays": "Keep this page. Its figures are functions of your examples and tell how many they are.",
            "artefacts": [
                {
                    "artefact": one.part,
                    "leaves": one.how != "absent",
                    "function_of_private_data": one.how not in ("independent", "absent"),
                    "bounded_by": claims.sentence(one, self.done),
                    "limit": _limit(one, bounds[one.part]),
                    "figures": [_plain(figure) for figure in items[one.part].figures],
                    "notes": [*items[one.part].notes, *filter(None, [warnings[one.part]])],
                    "option": claims.OPTIONS[one.part],
                }
                for one in self.done
            ],
            "together": claims.together(self.done).text(),
            "asked": self.asked,
            "not_measured": [*self.not_measured, *NEVER_MEASURED],
            "not_covered": list(claims.NOT_COVERED),
        }

    def write(self, folder: Path) -> Path:
        """Write the page, its JSON and the plot, readable by the owner alone. Returns the page."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        plot = draw(self.leak, folder / PLOT) if self.leak is not None else None
        home = self.home()
        storage.write_secret(folder / JSON, (json.dumps(home, indent=2) + "\n").encode())
        storage.write_secret(folder / PAGE, markdown(home, plot).encode())
        return folder / PAGE

    @property
    def membership(self) -> Estimate | None:
        """The AUC of the strong attack on the weights."""
        return None if self.leak is None else self.leak.likelihood.auc


def read(folder: Path) -> dict[str, Any]:
    """The JSON that `Report.write` wrote."""
    path = folder / JSON
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MOST))
    except (OSError, ValueError) as error:
        raise BrokenManifest(f"{path} cannot be read: {error}.", advice="Run the same command again.") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise BrokenManifest(f"{path} is not {SCHEMA}.", advice="Remove it and run the same command again.")
    return found


def value(home: Mapping[str, Any], name: FigureName) -> float | None:
    """A figure of a report, None if it was not measured."""
    every = (figure for item in home["artefacts"] for figure in item["figures"])
    return next((figure["value"] for figure in every if figure["name"] == name), None)


def membership_figures(leak: Leak, bound: Bound) -> tuple[Figure, ...]:
    """The figures of the attack on the expert. `bound` is the weights' own: of the choice and the training together."""
    auc = measures.most_auc(bound.epsilon, bound.delta) if bound.holds else None
    rate = measures.most_rate(bound.epsilon, bound.delta) if bound.holds else None
    found = [Figure("membership, likelihood ratio", leak.likelihood.auc.value, leak.likelihood.auc, auc)]
    if leak.likelihood.tpr is not None:
        found.append(Figure("membership at 1 % false positives", leak.likelihood.tpr.value, leak.likelihood.tpr, rate))
    return (*found, Figure("membership, loss", leak.loss.auc.value, leak.loss.auc, auc))


def _limit(one: Done, bound: Bound) -> str:
    if one.how in ("independent", "absent"):
        return ""
    return f"epsilon {bound.epsilon:g}, delta {bound.delta:g}" if bound.holds else "no limit"


def _plain(figure: Figure) -> dict[str, Any]:
    interval = figure.interval
    return {
        "name": figure.name,
        "value": round(figure.value, 4),
        "interval": None if interval is None else [round(interval.low, 4), round(interval.high, 4)],
        "at_most": None if figure.limit is None else round(figure.limit, 4),
        "meaning": MEANINGS[figure.name],
    }


# ---- pages -----------------------------------------------------------------------------------------------------------


HEADS = ("what leaves", "what it reveals", "measured (95 %)", "at most, by any attack")


def rows(home: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The report as the lines of one table, under `HEADS`."""
    found: list[tuple[str, ...]] = []
    for item in home["artefacts"]:
        name = item["artefact"]
        if not item["leaves"]:
            found.append((f"no {name}", "nothing", "", ""))
            continue
        bound = item["limit"]
        if not item["figures"]:
            found.append((name, "not measured" if item["function_of_private_data"] else "nothing", "", bound))
        for figure in item["figures"]:
            limit = bound if figure["at_most"] is None else f"{figure['at_most']:.3f}"
            found.append((name, figure["name"], _measured(figure), limit))
            name, bound = "", ""
    return found


def _measured(figure: Mapping[str, Any]) -> str:
    if figure["interval"] is None:
        return f"{figure['value']:.3f}"
    return "{:.3f} ({:.3f} to {:.3f})".format(figure["value"], *figure["interval"])


def markdown(home: Mapping[str, Any], plot: Path | None = None) -> str:
    """The page."""
    lines = ["# What your contribution reveals", "", home["stays"], "", f"**{home['together']}**", ""]
    lines += _table(HEADS, rows(home))
    seen: set[str] = set()
    for item in home["artefacts"]:
        lines += [f"## {item['artefact'].capitalize()}", ""]
        lines += [f"Leave: {'yes' if item['leaves'] else 'no'}. Bounded by: {item['bounded_by']}.", ""]
        for figure in item["figures"]:
            if figure["name"] not in seen:
                lines.append(f"- *{figure['name'].capitalize()}*: {figure['meaning']}")
            seen.add(figure["name"])
        lines += [*(f"- {note}" for note in item["notes"]), f"- What would mend it: {item['option']}", ""]
    lines += [f"![membership]({plot.name})", ""] if plot else []
    lines += ["## Not measured", "", *(f"- {one}" for one in home["not_measured"]), ""]
    return "\n".join([*lines, "## Covered by no bound", "", *(f"- {one}" for one in home["not_covered"]), ""])


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    found = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return [*found, *("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines), ""]


def draw(leak: Leak, path: Path) -> Path | None:
    """How many training examples the attack names against how many others it names wrongly; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    false, true = measures.curve(leak.scores[leak.member], leak.scores[~leak.member])
    figure, axes = pyplot.subplots(figsize=(5, 5), layout="constrained")
    axes.plot(np.maximum(false, 1e-4), np.maximum(true, 1e-4), color="#c0392b", label="likelihood ratio")
    axes.plot([1e-4, 1], [1e-4, 1], "--", color="#333333", linewidth=1, label="guessing")
    axes.set(
        xscale="log", yscale="log", xlabel="others named wrongly", ylabel="training examples named", title="Membership"
    )
    axes.legend()
    with storage.fresh_file(path, mode=storage.SECRET_MODE) as file:
        figure.savefig(file, dpi=120, format="png")
    pyplot.close(figure)
    return path
