"""What the experts of a round are for, owner by owner, and `cloister unify evaluate`. Parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloister.cli import console
from cloister.cli.unify_common import Kind, pairs, task_of
from cloister.errors import InvalidParameter

if TYPE_CHECKING:
    from cloister.unify.rounds.recipe import Owner

OwnerTasks = Annotated[
    list[str] | None,
    typer.Option("--owner-task", metavar="NAME=TASK", help="Another task for this owner: classify or choose; repeat."),
]
OwnerLabels = Annotated[
    list[str] | None,
    typer.Option("--owner-labels", metavar="NAME=FILE", help="Labels of this owner alone, one a line; repeat it."),
]


def tasks_of(names: list[str], kind: Kind, tasks: list[str] | None, labels: list[str] | None) -> dict[str, Any]:
    """The owners that have a task of their own, by name."""
    files = pairs(labels or [], "NAME=FILE", option="--owner-labels")
    kinds = {name: str(text) for name, text in pairs(tasks or [], "NAME=TASK", option="--owner-task").items()}
    found: dict[str, Any] = {}
    for name in {**kinds, **files}:
        if name not in names:
            raise InvalidParameter(f"{name} has a task or labels and is no owner.", advice="Name it with --owner too.")
        wanted = kinds.get(name, kind.value)
        if wanted not in [one.value for one in Kind]:
            raise InvalidParameter(f"There is no task {wanted!r}.", advice=f"Known: {', '.join(one for one in Kind)}.")
        found[name] = task_of(Kind(wanted), files.get(name))
    return found


def with_tasks(owners: list[Owner], tasks: dict[str, Any]) -> list[Owner]:
    """The owners, each with its task if it has one of its own."""
    return [one.model_copy(update={"task": tasks[one.name]}) if one.name in tasks else one for one in owners]


def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A unified model.")],
    examples: Annotated[
        list[str], typer.Option(metavar="NAME=FILE", help="Examples that nobody has trained on; repeat it.")
    ],
    among_own: Annotated[
        bool, typer.Option("--among-own", help="Choose only among the labels of the file, not all of the model's.")
    ] = False,
    seed: Annotated[
        Path | None, typer.Option(metavar="CHECKPOINT", help="What the model was made from; for examples with choices.")
    ] = None,
    as_json: console.Json = False,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """How good a unified model is on each file, and which owners' experts its tokens go to.

    Give the files the names of the owners, and the column "own" says how many tokens found their own expert.

    \b
    Examples:
      cloister unify evaluate model --examples bank=bank-test.csv --examples clinic=clinic-test.csv
    """
    from cloister.unify.evaluation import evaluate as measure
    from cloister.unify.seeds import own_progress_only

    own_progress_only()
    found = measure(
        model,
        pairs(examples, "NAME=FILE", option="--examples"),
        among="examples" if among_own else "model",
        seed=seed,
        progress=console.progress(),
    )
    if as_json:
        console.data(
            {
                name: {
                    "metric": one.score.name,
                    "value": one.score.value,
                    "examples": one.score.n,
                    "routes": one.routes,
                }
                for name, one in found.items()
            }
        )
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("file", "examples", "score", "own", "first experts of its tokens")
    for name, one in found.items():
        value = f"{one.score.value:.1%} right" if one.score.name == "accuracy" else f"perplexity {one.score.value:.1f}"
        first = sorted(one.routes.items(), key=lambda pair: -pair[1])[:3]
        own = f"{one.routes[name]:.0%}" if name in one.routes else ""
        cells = [name, str(one.score.n), value, own, ", ".join(f"{owner} {share:.0%}" for owner, share in first)]
        table.add_row(*(Text(cell) for cell in cells))
    console.show(table)
