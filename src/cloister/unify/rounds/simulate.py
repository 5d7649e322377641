"""All parties of a round on one machine, through the same files as if they were far apart.

No network, no Flower, no Ray: owners work one after the other. What comes out is what the same parties would have made
apart from each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloister.errors import CloisterError
from cloister.progress import SILENT, Progress
from cloister.unify.keys import Key

from . import owner as owners
from . import recipe as recipes
from .begin import begin
from .coordinator import INVITATION, Coordinator
from .state import STATE
from .steps import Steps

COORDINATOR, OWNERS, MODEL, PUBLIC = "coordinator", "owners", "model", "public"


def prepare(
    folder: Path,
    seed: Path,
    public: Path,
    names: Mapping[str, Path],
    *,
    steps: Steps,
    terms: Mapping[str, Any],
    task: recipes.Task,
    quorum: int = 0,
    tasks: Mapping[str, recipes.Task] | None = None,
) -> Coordinator:
    """Keys for everybody and an invitation; what was prepared is taken as it is. `tasks`: owners' own ones."""
    keys = {name: Key.at(folder / OWNERS / name / "key") for name in sorted(names)}
    key = Key.at(folder / COORDINATOR / "key")
    if (folder / COORDINATOR / STATE).exists():
        return Coordinator(folder / COORDINATOR, steps, key)
    return begin(
        folder / COORDINATOR,
        seed,
        public,
        [recipes.Owner(name=name, key=keys[name].public.text, task=(tasks or {}).get(name)) for name in sorted(names)],
        key=key,
        steps=steps,
        task=task,
        terms=terms,
        quorum=quorum or len(names),
    )


def run(
    folder: Path,
    round_: Coordinator,
    private: Mapping[str, Path],
    out: Path,
    *,
    steps: Steps,
    progress: Progress = SILENT,
) -> dict[str, str]:
    """Every owner's work, then the model; what happened to each owner. What is done already is not done again."""
    failed: dict[str, str] = {}
    for name, data in sorted(private.items()):
        if round_.book.entry(name).stage in ("received", "built"):
            continue
        own = folder / OWNERS / name
        try:
            made = owners.contribute(
                round_.folder / INVITATION,
                data,
                own,
                key=Key.load(own / "key"),
                steps=steps,
                progress=progress,
            )
            round_.receive(made)
        except CloisterError as error:
            failed[name] = error.message
    round_.build(out, wait=False, progress=progress)
    return {name: failed.get(name, round_.book.entry(name).sentence()) for name in private}
