"""What an owner decides about its privacy, and how it is shown what its contribution reveals."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloister.cli import console

if TYPE_CHECKING:
    from cloister.unify.rounds.real import RealSteps

DpEpsilon = Annotated[
    float,
    typer.Option(
        "--dp-epsilon", min=0, metavar="E",
        help="Train the expert with differential privacy. Bounds what the weights reveal only together with "
        "--dp-selection-epsilon (or a random choice): they depend on the chosen examples too. 0: without.",
    ),
]  # fmt: skip
SelectionEpsilon = Annotated[
    float,
    typer.Option("--dp-selection-epsilon", min=0, metavar="E", help="Choose public examples with it. 0: without."),
]
RoutingEpsilon = Annotated[
    float,
    typer.Option(
        "--dp-routing-epsilon", min=0, metavar="E", help="Of noisy routing vectors, where the round asks for them."
    ),
]
Delta = Annotated[float, typer.Option("--dp-delta", metavar="D", help="The delta that belongs to each epsilon.")]
NoMeasure = Annotated[
    bool, typer.Option("--no-measure", help="Do not attack your own contribution to see what it reveals.")
]
References = Annotated[
    int,
    typer.Option(
        "--measure-references", min=0, metavar="N",
        help="Reference experts of the attack on the weights: each is half a training; more find more. 0: none.",
    ),
]  # fmt: skip
MaxMembership = Annotated[
    float,
    typer.Option(
        "--max-membership", min=0.5, max=1, metavar="AUC",
        help="Make no contribution if the attack on the weights does better than this. 0.5 is guessing.",
    ),
]  # fmt: skip
LearningRate = Annotated[
    float | None,
    typer.Option(
        "--learning-rate", metavar="R",
        help="Of your expert, instead of the round's. One that is too high makes an expert that ruins what the router "
        "sends to it by mistake.",
    ),
]  # fmt: skip
REFERENCES = 4  # `disclosure.contribution.REFERENCES`, which would be slow to import for --help


def private_steps(
    epsilon: float = 0.0,
    selection: float = 0.0,
    routing: float = 0.0,
    delta: float = 1e-5,
    *,
    measure: bool = True,
    references: int = REFERENCES,
    max_membership: float = 1.0,
    learning_rate: float | None = None,
) -> RealSteps:
    """An owner's steps with its decisions."""
    from cloister.unify.rounds.real import Privacy, RealSteps

    if epsilon and not selection:
        console.note(
            "--dp-epsilon alone bounds nothing, because the expert is trained on chosen public examples too. Say "
            "--dp-selection-epsilon as well, unless this round chooses at random."
        )
    return RealSteps(
        Privacy(epsilon, selection, routing, delta),
        measure=measure,
        references=references,
        max_membership=max_membership,
        learning_rate=learning_rate,
    )


def show(home: Mapping[str, Any], page: Path) -> None:
    """The report that stays, as one table on stderr: the result of the command is the folder."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from cloister.unify.disclosure.report import HEADS, rows

    if console.Settings.quiet:
        return
    table = Table(*HEADS, title="What your contribution reveals")
    for row in rows(home):
        table.add_row(*(Text(cell) for cell in row))
    told = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 120)
    told.print(table)
    told.print(Text(home["together"]))
    for item in home["artefacts"]:
        for note in item["notes"]:
            told.print(Text(f"- {item['artefact']}: {note}"))
    console.note(f"The whole page, which stays with you: {page}")
