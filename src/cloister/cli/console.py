"""What a command prints and where: data on stdout, everything else on stderr.

`-v`, `-q` and `--json` are understood by every command and mean the same everywhere. Colours and bars appear only on a
terminal, and never with NO_COLOR.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloister.errors import CloisterError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from cloister.progress import Progress


class Settings:
    """How much to say. One per process."""

    verbose = False
    quiet = False


def _set_verbose(value: bool) -> bool:
    Settings.verbose = Settings.verbose or value
    return value


def _set_quiet(value: bool) -> bool:
    Settings.quiet = Settings.quiet or value
    return value


Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", callback=_set_verbose, show_envvar=False, help="Say more; show where an error came from."
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", callback=_set_quiet, show_envvar=False, help="No progress and no notes.")
]
Json = Annotated[bool, typer.Option("--json", show_envvar=False, help="Print the result as JSON.")]


def progress() -> Progress:
    """The progress display that suits `-q` and this terminal."""
    from cloister.progress import Progress

    return Progress(quiet=Settings.quiet)


def start_logging() -> None:
    """Send the library's log to stderr."""
    level = logging.DEBUG if Settings.verbose else logging.ERROR if Settings.quiet else logging.INFO
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("cloister")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


def out() -> Console:
    """A rich console on stdout, for tables; as wide as the terminal, or 120 columns in a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def show(renderable: RenderableType) -> None:
    """Print a rich table or text on stdout."""
    out().print(renderable)


def data(value: Any) -> None:
    """Print JSON on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False))


def note(text: str) -> None:
    """Something worth knowing that is not the result."""
    if not Settings.quiet:
        print(text, file=sys.stderr, flush=True)


def fail(message: str, advice: str = "", more: str = "") -> None:
    """An error, in the one shape that all commands use."""
    print(f"error: {message}", file=sys.stderr)
    if advice:
        print(f"what to do: {advice}", file=sys.stderr)
    if more:
        print(f"more: {more}", file=sys.stderr)


def fail_with(error: CloisterError) -> None:
    """A `CloisterError`: what was wrong, what to do, where to read on. With -v also the place it came from."""
    fail(error.message, error.advice, f"docs/errors.md#{error.code}")
    if Settings.verbose:
        frames(error)


def frames(error: BaseException) -> None:
    """The calls that led to `error`: files, lines and names only. Values and source text could be secret."""
    for frame in traceback.extract_tb(error.__traceback__):
        print(f"  at {frame.filename}:{frame.lineno} in {frame.name}", file=sys.stderr)
