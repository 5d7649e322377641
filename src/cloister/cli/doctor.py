"""`cloister doctor`: what this machine can do, and which modes fit a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cloister.cli import console

SUMMARY = "What works here; which modes fit a checkpoint"
NEEDS_ARGUMENTS = False


def command(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(metavar="[CHECKPOINT]", help="A checkpoint directory; only its config.json is needed."),
    ] = None,
    contexts: Annotated[int, typer.Option(min=1, max=1000, help="Costs for this many contexts.")] = 1,
    as_json: console.Json = False,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Say what works on this machine; with CHECKPOINT, which modes fit it, what they cost and every reason against.

    A checkpoint is judged from its configuration alone: no weights are read. If no mode fits, the exit code is 2.

    \b
    Examples:
      cloister doctor
      cloister doctor my-model
      cloister doctor my-model --contexts 4 --json
    """
    from cloister import doctor

    if checkpoint is None:
        machine = doctor.machine()
        if as_json:
            console.data(machine.as_dict())
        else:
            print(machine.text())
        return
    report = doctor.checkpoint(checkpoint, contexts=contexts)
    if as_json:
        console.data(report.as_dict())
    else:
        print(report.text())
    if not report.fits:
        raise typer.Exit(2)
