"""`cloister demo`: all of it on this machine, with the model that ships with the package."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from cloister.cli import console
from cloister.cli.protect import Transform

SUMMARY = "All of it on this machine"
NEEDS_ARGUMENTS = False


class Part(StrEnum):
    """What the demo can show."""

    CHAT = "chat"
    EMBEDDINGS = "embeddings"
    UNIFY = "unify"


def command(
    question: Annotated[
        str | None, typer.Argument(help="What to ask. [default: a question that suits the small model]")
    ] = None,
    transform: Annotated[Transform, typer.Option(help="Which transform to show.")] = Transform.PERMUTATION,
    part: Annotated[
        list[Part] | None, typer.Option("--part", help="Show only this; may be repeated. [default: everything]")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not stop between the steps.")] = False,
    as_json: console.Json = False,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Protect the small model that ships with Cloister, serve it, ask it a question, and show what each party saw.

    Server and gateway run as processes of their own on loopback and end with the demo. Nothing is downloaded.

    \b
    Examples:
      cloister demo
      cloister demo --transform orthogonal --part chat
      cloister demo "Tell me about the sea" --yes --json
    """
    from cloister import demo

    pause = None if yes or as_json or not (sys.stdin.isatty() and sys.stdout.isatty()) else _pause
    show = None if as_json else console.show
    result = demo.run(
        question=question,
        transform=transform.value,
        parts=tuple(one.value for one in part or Part),
        show=show,
        pause=pause,
        progress=console.progress(),
    )
    if as_json:
        console.data(result)


def _pause() -> None:
    typer.prompt("Return goes on", default="", show_default=False, prompt_suffix=" ", err=True)
