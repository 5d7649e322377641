"""`cloister ask`: one private question from the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cloister.cli import console
from cloister.errors import UsageError

SUMMARY = "Ask one question"
NEEDS_ARGUMENTS = True


def command(
    client: Annotated[Path, typer.Argument(metavar="CLIENT_DIR", help="The client directory that `protect` wrote.")],
    question: Annotated[str, typer.Argument(help='The question; "-" reads it from stdin, so that it is not in `ps`.')],
    server: Annotated[str, typer.Option(metavar="URL|OUT/server", help="The server, or its directory to run it here.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 always takes the likeliest token.")] = 0.0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    ledger: Annotated[bool, typer.Option("--ledger", help="Print what left this machine, on stderr.")] = False,
    as_json: console.Json = False,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Ask the protected model one question.

    The server's access token, if it wants one, is read from CLOISTER_SERVER_TOKEN.

    \b
    Examples:
      cloister ask out/client --server https://models.example:8420 "What is a cloister?"
      cloister ask out/client --server out/server "Hello" --ledger
      echo "Once upon a time" | cloister ask out/client --server out/server - --raw --json
    """
    import cloister

    text = sys.stdin.read().strip() if question == "-" else question
    if not text:
        raise UsageError("The question is empty.", advice='Put it in quotes, or pass "-" and write it to stdin.')
    token = os.environ.get("CLOISTER_SERVER_TOKEN")
    options = {"token": token} if token else {}
    with cloister.connect(client, server, **options) as model:
        prompt: str | list[dict[str, str]] = text if raw else [{"role": "user", "content": text}]
        answer = model.generate(prompt, max_new_tokens=max_tokens, temperature=temperature)
        if as_json:
            console.data(
                {
                    "answer": str(answer),
                    "label": model.manifest.protection.label,
                    "ledger": [entry.as_dict() for entry in model.ledger],
                    "totals": model.ledger.totals(),
                }
            )
        else:
            print(answer)
            if ledger:
                print(model.ledger, file=sys.stderr)
