"""The command `cloister`: parse, call, print, exit code. No logic lives here.

Each command is one file. They import nothing heavy until they run, so that `cloister --help` answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    from cloister.cli.app import run

    return run(arguments)
