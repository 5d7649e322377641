"""`cloister push`: put a protected server checkpoint on the model hub; directories with keys are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cloister.cli import console

SUMMARY = "Upload OUT/server to the model hub"
NEEDS_ARGUMENTS = True


def command(
    directory: Annotated[Path, typer.Argument(metavar="OUT/server", help="A protected server checkpoint.")],
    repository: Annotated[str, typer.Argument(metavar="ORGANISATION/NAME", help="The repository on the hub.")],
    public: Annotated[bool, typer.Option("--public", help="Create the repository for everybody to see.")] = False,
    as_json: console.Json = False,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Upload OUT/server with its model card. OUT/client and OUT/developer hold keys and are refused.

    The token is taken from HF_TOKEN or from where the hub's own tools keep it.

    \b
    Examples:
      cloister push out/server my-company/assistant-protected
      cloister push out/server me/demo-protected --public
    """
    from cloister import hub

    address = hub.push(directory, repository, private=not public)
    if as_json:
        console.data({"address": address})
    else:
        print(address)
