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
from cloister.unify.artefacts import read_json

from . import invitation
from .owner import WORK
from .real import DISCLOSURE, RealSteps

_MOST = 1 << 30


def measured(
    invited: Path, private: Path, folder: Path, *, steps: RealSteps, progress: Progress = SILENT
) -> Mapping[str, Any]:
    """The report that stays, as JSON; its page is in `page(folder)`."""
    given, work = invitation.read(invited, whole=False), folder / WORK
    if not (work / "proxies.json").exists():
        raise UsageError(f"{folder} holds no contribution yet.", advice="Run `cloister unify contribute` first.")
    proxies = read_json(work / "proxies.json", _MOST)
    return steps.measured(given.seed(), given.public, private, proxies, given.recipe.terms, work, progress)


def page(folder: Path) -> Path:
    """Where the page is that stays."""
    return folder / WORK / DISCLOSURE / "report.md"
