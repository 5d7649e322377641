"""The disclosure report: what leaves an owner, what it reveals, and what would mend it. Written before anything leaves.

    report = Report(items=(proxies(...), expert(...), vectors(...)), bound=accounting.total(...))
    report.write(home, leaves=folder, count=len(private), texts=private_texts)

Two versions. The one that *stays* has every figure with its interval. The one that may *leave* is made of fixed
sentences and coarse numbers only, because a report about private data is a function of them like everything else: an
exact AUC or the width of an interval tells how many examples there are. Figures leave in steps of 0.05, and not at all
where a differential-privacy bound is stated: no bound covers them.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cloister import storage
from cloister.errors import WouldRevealSecret
from cloister.unify.disclosure import measures
from cloister.unify.disclosure.accounting import Bound
from cloister.unify.disclosure.measures import Estimate
from cloister.unify.disclosure.membership import Leak

SCHEMA = "cloister.unify.report/1"  # of the part that leaves
HOME_SCHEMA = "cloister.unify.report.home/1"
STEP = 0.05
FEWEST_CHECKED = 10  # a smaller count of examples is too common a number to look for

Artefact = Literal["proxy ids", "expert weights", "routing vectors"]
FigureName = Literal[
    "classes betrayed", "regions betrayed", "own records chosen", "proxies changed by one record",
    "membership, likelihood ratio", "membership at 1 % false positives", "membership, loss", "direction of the mean",
]  # fmt: skip

MEANINGS: Mapping[str, str] = {
    "classes betrayed": "Probability that a class you hold ranks above one you do not, judged by the proxy ids alone. "
    "0.5 is guessing, 1 is certainty.",
    "regions betrayed": "The same for regions of the public set in which you hold more than the public does.",
    "own records chosen": "Share of your records in the public set that were chosen, less the share of public examples "
    "like them. 0: being chosen says nothing about who is yours.",
    "proxies changed by one record": "Share of the proxies that change when one private record is left out.",
    "membership, likelihood ratio": "Probability that a training example scores above one that is none, by "
    "the strong attack. 0.5 is guessing, 1 is certainty.",
    "membership at 1 % false positives": "Share of the training examples that the strong attack names when one in a "
    "hundred others is named wrongly. 0.01 is guessing.",
    "membership, loss": "The same probability by the cheap attack, which only looks at the loss.",
    "direction of the mean": "Cosine of the direction that anyone reads from the vectors with the true one. "
    "1 is exact.",
}
THROUGH: Mapping[str, str] = {
    "proxy ids": "the relevance classifier, which is trained on your examples",
    "expert weights": "training on your examples",
    "routing vectors": "the mean over your examples",
}
OPTIONS: Mapping[str, str] = {
    "proxy ids": "Choose them with differential privacy (--dp-selection-epsilon): the classifier gets noise, the rest "
    "is a function of its output.",
    "expert weights": "Train with differential privacy (--dp-epsilon). It costs accuracy. Nothing else bounds this.",
    "routing vectors": "Leave them to the coordinator, who makes them from the proxies (the default), or add noise "
    "(--dp-routing-epsilon).",
}
NEVER_MEASURED = (
    "whether an example can be read out of the weights (only whether it can be recognised)",
    "attacks that are stronger than those named here: a figure is a lower limit of what leaks",
    "what several owners' parts, or the unified model trained on them, reveal together",
    "time, sizes and the fact of taking part",
)


@dataclass(frozen=True)
class Figure:
    """A measured figure. `interval` stays at home."""

    name: FigureName
    value: float
    interval: Estimate | None = None

    def coarse(self) -> float:
        """What may leave of it."""
        return round(round(self.value / STEP) * STEP, 2)


@dataclass(frozen=True)
class Item:
    """One artefact. `depends` False: a function of what else leaves. `notes` are for the owner only."""

    artefact: Artefact
    leaves: bool = True
    depends: bool = True
    figures: tuple[Figure, ...] = ()
    private: bool = False  # made with differential privacy
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What leaves, measured. `bound` None: nobody asked for one."""

    items: tuple[Item, ...]
    bound: Bound
    not_measured: tuple[str, ...] = ()
    leak: Leak | None = None  # for the picture; stays at home

    def shared(self) -> dict[str, Any]:
        """The part that may leave, as JSON, without the schema. Fixed sentences and coarse numbers only."""
        told = [_shared_item(item, figures=not self.bound.holds) for item in self.items]
        found: dict[str, Any] = {"artefacts": told, "not_measured": list(NEVER_MEASURED)}
        if self.bound.holds:
            found["differential_privacy"] = {
                "epsilon": _up(self.bound.epsilon),
                "delta": self.bound.delta,
                "with_respect_to": f"one example {self.bound.neighbours}",
                "covers": "proxy ids, expert weights and routing vectors together",
            }
            found["figures"] = "not sent: the bound does not cover figures that were measured on private data"
        else:
            found["differential_privacy"] = "none"
            found["figures"] = "in steps of 0.05, so that they tell little of the data's size"
        return found

    def home(self) -> dict[str, Any]:
        """The part that stays, as JSON."""
        return {
            "schema": HOME_SCHEMA,
            "stays": "Keep this file. Its figures are functions of your data and tell its size.",
            "artefacts": [_home_item(item) for item in self.items],
            "differential_privacy": self.bound.text(),
            "not_measured": [*self.not_measured, *NEVER_MEASURED],
        }

    def write(self, home: Path, leaves: Path, *, count: int, texts: Sequence[str] = ()) -> None:
        """Write `home`/disclosure.{json,md,html} (readable by the owner only) and `leaves`/report.json and report.md.

        `count` and `texts` of the private data are looked for in what leaves; `WouldRevealSecret` if they are there.
        """
        shared = {"schema": SCHEMA, **self.shared()}
        page = markdown(shared)
        check_leaving(
            json.dumps(shared) + page, count=count, texts=texts, allowed=(self.bound.epsilon, self.bound.delta)
        )
        for folder in (home, leaves):
            folder.mkdir(parents=True, exist_ok=True)
        plot = draw(self, home / "disclosure.png")
        own = self.home()
        storage.write_secret(home / "disclosure.json", (json.dumps(own, indent=2) + "\n").encode())
        storage.write_secret(home / "disclosure.md", home_markdown(own, plot).encode())
        storage.write_secret(home / "disclosure.html", as_html(home_markdown(own, plot)).encode())
        storage.write_text(leaves / "report.json", json.dumps(shared, indent=2) + "\n")
        storage.write_text(leaves / "report.md", page)


def check_leaving(text: str, *, count: int, texts: Sequence[str] = (), allowed: Sequence[float] = ()) -> None:
    """Refuse a report that carries the number of private examples or one of their texts.

    A net below `Report.shared`, which has no place for either. Numbers below ten and texts of a few letters are too
    common to be looked for; `allowed` are numbers that everyone knows from the recipe.
    """
    numbers = {float(found) for found in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", text.replace(",", ""))}
    if count >= FEWEST_CHECKED and float(count) in numbers - {float(a) for a in allowed}:
        raise WouldRevealSecret(
            "The report that would leave carries the number of private examples.", advice="It was not written."
        )
    lowered = text.lower()
    if any(len(t) >= 8 and t.lower() in lowered for t in texts):
        raise WouldRevealSecret("The report that would leave carries a private text.", advice="It was not written.")


def membership_figures(leak: Leak) -> tuple[Figure, ...]:
    """The figures of the attack on the expert."""
    found = [Figure("membership, likelihood ratio", leak.likelihood.auc.value, leak.likelihood.auc)]
    if leak.likelihood.tpr is not None:
        found.append(Figure("membership at 1 % false positives", leak.likelihood.tpr.value, leak.likelihood.tpr))
    return (*found, Figure("membership, loss", leak.loss.auc.value, leak.loss.auc))


def _shared_item(item: Item, *, figures: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "artefact": item.artefact,
        "leaves": item.leaves,
        "function_of_private_data_through": THROUGH[item.artefact] if item.leaves and item.depends else "nothing",
        "made_with_differential_privacy": item.private,
        "option": OPTIONS[item.artefact],
    }
    if figures and item.leaves:
        found["figures"] = {f.name: {"value": f.coarse(), "meaning": MEANINGS[f.name]} for f in item.figures}
        if item.depends and not item.figures:
            found["figures"] = "not measured"
    return found


def _home_item(item: Item) -> dict[str, Any]:
    figures = [
        {
            "name": f.name,
            "value": round(f.value, 4),
            "interval": None if f.interval is None else [round(f.interval.low, 4), round(f.interval.high, 4)],
            "meaning": MEANINGS[f.name],
        }
        for f in item.figures
    ]
    return {**_shared_item(item, figures=False), "figures": figures, "notes": list(item.notes)}


def _up(epsilon: float) -> float:
    """Two digits, rounded up: the exact value may tell the size of the data that it was computed with."""
    if epsilon <= 0:
        return 0.0
    place = 10.0 ** (math.floor(math.log10(epsilon)) - 1)
    return float(f"{math.ceil(epsilon / place - 1e-9) * place:.2g}")


# ---- pages -----------------------------------------------------------------------------------------------------------


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return [*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows), ""]


def markdown(shared: Mapping[str, Any]) -> str:
    """The part that leaves, for people."""
    rows = [_row(item) for item in shared["artefacts"]]
    lines = ["# What this contribution reveals", ""]
    lines += _table(("what", "leaves", "a function of private data through", "what would mend it"), rows)
    figures = [
        (item["artefact"], name, f"{figure['value']:.2f}", figure["meaning"])
        for item in shared["artefacts"] if isinstance(item.get("figures"), dict)
        for name, figure in item["figures"].items()
    ]  # fmt: skip
    lines += _table(("what", "figure", "about", "meaning"), figures) if figures else []
    bound = shared["differential_privacy"]
    if isinstance(bound, dict):
        text = f"epsilon {bound['epsilon']}, delta {bound['delta']}, with respect to {bound['with_respect_to']}"
        lines += [f"Differential privacy: {text}; it covers {bound['covers']}.", ""]
    else:
        lines += ["Differential privacy: none. No bound can be stated.", ""]
    lines += [f"Figures: {shared['figures']}.", "", "Not measured:", ""]
    return "\n".join([*lines, *(f"- {one}" for one in shared["not_measured"]), ""])


def home_markdown(home: Mapping[str, Any], plot: Path | None) -> str:
    """The part that stays, for the owner."""
    lines = ["# What your contribution reveals", "", home["stays"], "", home["differential_privacy"], ""]
    lines += _table(
        ("what", "leaves", "a function of your data through", "what would mend it"),
        [_row(item) for item in home["artefacts"]],
    )
    for item in home["artefacts"]:
        lines += [f"## {item['artefact'].capitalize()}", ""]
        rows = [
            (
                f["name"],
                f"{f['value']:.3f}",
                "{:.3f} to {:.3f}".format(*f["interval"]) if f["interval"] else "",
                f["meaning"],
            )
            for f in item["figures"]
        ]
        lines += _table(("figure", "value", "95 % interval", "meaning"), rows) if rows else ["Nothing measured.", ""]
        lines += [*(f"- {note}" for note in item["notes"]), ""] if item["notes"] else []
    lines += [f"![membership]({plot.name})", ""] if plot else []
    return "\n".join([*lines, "## Not measured", "", *(f"- {one}" for one in home["not_measured"]), ""])


def _row(item: Mapping[str, Any]) -> tuple[str, ...]:
    leaves = "yes" if item["leaves"] else "no"
    return (item["artefact"], leaves, item["function_of_private_data_through"], item["option"])


def as_html(text: str) -> str:
    """Our own Markdown (headings, tables, lists, paragraphs, pictures) as one page."""
    body: list[str] = []
    table = 0
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            cells = [html.escape(c.strip().replace("\\|", "|")) for c in re.split(r"(?<!\\)\|", line)[1:-1]]
            table += 1
            if table == 2:
                continue
            tag = "th" if table == 1 else "td"
            body.append(
                ("<table>" if table == 1 else "") + "<tr>" + "".join(f"<{tag}>{c}</{tag}>" for c in cells) + "</tr>"
            )
            continue
        if table:
            body.append("</table>")
            table = 0
        if heading := re.match(r"(#+) (.*)", line):
            level = len(heading[1])
            body.append(f"<h{level}>{html.escape(heading[2])}</h{level}>")
        elif picture := re.match(r"!\[(.*)\]\((.*)\)", line):
            body.append(f'<img alt="{html.escape(picture[1])}" src="{html.escape(picture[2])}">')
        elif line:
            body.append(f"<p>{html.escape(line)}</p>")
    style = (
        "body{font:16px sans-serif;max-width:60em;margin:2em auto}table{border-collapse:collapse}"
        "td,th{border:1px solid #bbb;padding:.4em;text-align:left}"
    )
    head = f'<!doctype html><meta charset="utf-8"><title>Disclosure report</title><style>{style}</style>'
    return head + "\n".join(body) + "\n"


def draw(report: Report, path: Path) -> Path | None:
    """How many training examples the attack names against how many others it names wrongly; None without matplotlib."""
    if report.leak is None:
        return None
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    leak = report.leak
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
