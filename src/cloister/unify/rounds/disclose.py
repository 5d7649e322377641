"""What an owner's contribution reveals, for an owner who wants to know before it sends, or to know better.

home = disclose.measured(invitation, private, folder, steps=steps)

`contribute` has measured already; asking with more reference experts measures again. The contribution stays as it is:
nothing in it depends on the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloister.errors import UsageError
from cloister.progress import SILENT, Progress

from . import invitation
from .owner import WORK, kept_json
from .real import DISCLOSURE, RealSteps
from .state import Book


def measured(
    invited: Path, private: Path, folder: Path, *, steps: RealSteps, progress: Progress = SILENT
) -> Mapping[str, Any]:
    """The report that stays, as JSON; its page is in `page(folder)`."""
    given, work = invitation.read(invited, whole=False), folder / WORK
    if not (work / "proxies.json").exists():
        raise UsageError(f"{folder} holds no contribution yet.", advice="Run `cloister unify contribute` first.")
    name = Book.load(folder).state.name
    me = given.recipe.owner(name)
    if me is None:
        raise UsageError(f"{name} is not invited by {invited}.", advice="Name the invitation of this folder's round.")
    proxies = kept_json(work / "proxies.json", list)
    # What it trained for, which may be a task of its own.
    return steps.measured(given.seed(), given.public, private, proxies, given.recipe.terms_of(me), work, progress)


def page(folder: Path) -> Path:
    """Where the page is that stays."""
    return folder / WORK / DISCLOSURE / "report.md"
