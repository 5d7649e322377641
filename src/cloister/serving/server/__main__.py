"""`python -m cloister.serving.server DIR`: every field of `ServerSettings` as a flag."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from cloister.errors import CloisterError
from cloister.serving.server.settings import ServerSettings

_PATHS = {"tokens", "ssl_certfile", "ssl_keyfile", "tls_self_signed", "port_file"}


def main(arguments: list[str] | None = None) -> int:
    """Parse, serve, and turn errors into a sentence and an exit code."""
    parser = argparse.ArgumentParser(prog="python -m cloister.serving.server", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--new-token", metavar="NAME", help="add a token to the --tokens file, print it, and stop")
    for field in dataclasses.fields(ServerSettings):
        if field.name in ("directory", "attest"):
            continue
        flag = "--" + field.name.replace("_", "-")
        if field.name in _PATHS:
            parser.add_argument(flag, type=Path, default=None)
        elif isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(field.default), default=field.default)
    chosen = vars(parser.parse_args(arguments))
    name = chosen.pop("new_token")
    try:
        if name is not None:
            from cloister.serving.server.tokens import create_token

            print(create_token(chosen["tokens"] or Path("tokens.txt"), name))
            return 0
        from cloister.serving.server.main import serve

        serve(ServerSettings(**chosen))
    except CloisterError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
