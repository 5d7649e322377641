"""`cloister contexts`: which contexts there are, who was given which, and what to hand to a user."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cloister.cli import console

SUMMARY = "Contexts of a protected model and their users"
NEEDS_ARGUMENTS = True


def command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="What `cloister protect` wrote.")],
    assign: Annotated[str | None, typer.Option(metavar="USER", help="Give this user a context.")] = None,
    context: Annotated[
        str | None, typer.Option(metavar="CONTEXT", help="Which one. [default: the one with the fewest users]")
    ] = None,
    as_json: console.Json = False,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """List the contexts of OUT and their users, or assign a user and print the client directory to hand over.

    Contexts are for operations: ending one customer's access, rotating keys. They do not isolate users from each other
    against the server, which can link two contexts of one model through their weights alone.

    \b
    Examples:
      cloister contexts out
      cloister contexts out --assign ada@example.org
      cloister contexts out --assign ben --context context-2
    """
    from cloister import manifest as manifests
    from cloister.permute import contexts

    if assign is not None:
        directory = contexts.assign(out, assign, context)
        given = contexts.assigned(out)[assign]
        if as_json:
            console.data({"user": assign, "context": given, "client": str(directory)})
        else:
            print(directory)
            console.note(f"{assign} has {given}. Hand over this directory; it holds keys.")
        return
    users = contexts.assigned(out)
    rows = [
        {
            "context": name,
            "key_id": manifests.read(directory).protection.key_id,
            "not_after": manifests.read(directory).not_after,
            "users": sorted(user for user, given in users.items() if given == name),
            "client": str(directory),
        }
        for name, directory in contexts.directories(out, "client").items()
    ]
    if as_json:
        console.data(rows)
        return
    for row in rows:
        until = f"until {row['not_after']}" if row["not_after"] else "no expiry"
        print(f"{row['context']}  key {row['key_id']}  {until}  users: {', '.join(row['users']) or 'none'}")
