"""All parties of a round on one machine, through the same files as if they were far apart.

No network, no Flower, no Ray: owners work one after the other. What comes out is what the same parties would have made
apart from each other.

A folder holds one simulation. The same command again goes on where it stopped; a command with another recipe, other
examples or other decisions of the owners is refused, because what was made would be taken for what was asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloister import storage
from cloister.errors import CloisterError, DataError, UsageError
from cloister.progress import SILENT, Progress
from cloister.unify.keys import Key

from . import disclose
from . import owner as owners
from . import recipe as recipes
from .begin import begin
from .coordinator import INVITATION, Coordinator
from .provenance import is_made_of
from .real import RealSteps
from .state import STATE, Book
from .steps import Steps

_ELSEWHERE = "Say the same as before, choose another OUT, or remove this one."
COORDINATOR, OWNERS, MODEL, PUBLIC = "coordinator", "owners", "model", "public"
DONE = ("received", "built")


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
    """Keys for everybody and an invitation. What was prepared is taken as it is if it is what is asked for now, and
    refused otherwise. `tasks`: owners' own ones."""
    wanted = _Asked(seed, public, names, terms, task, quorum or len(names), tasks or {})
    if (folder / COORDINATOR / STATE).exists():
        round_ = Coordinator(folder / COORDINATOR, steps, Key.load(folder / COORDINATOR / "key"))
        _same_round(folder, round_, wanted, steps)
        return round_
    keys = {name: Key.at(folder / OWNERS / name / "key") for name in sorted(names)}
    return begin(
        folder / COORDINATOR,
        seed,
        public,
        [recipes.Owner(name=name, key=keys[name].public.text, task=wanted.tasks.get(name)) for name in sorted(names)],
        key=Key.at(folder / COORDINATOR / "key"),
        steps=steps,
        task=task,
        terms=terms,
        quorum=wanted.quorum,
    )


@dataclass(frozen=True)
class _Asked:
    """What a round is made of, as the command says it."""

    seed: Path
    public: Path
    names: Collection[str]
    terms: Mapping[str, Any]
    task: recipes.Task
    quorum: int
    tasks: Mapping[str, recipes.Task]


def _same_round(folder: Path, round_: Coordinator, asked: _Asked, steps: Steps) -> None:
    """`UsageError` if the round that is here is not the one that is asked for."""
    again = folder / ".public"
    storage.remove(again)
    try:
        sha = steps.public(asked.public, again, licence="", description="")
    finally:
        storage.remove(again)
    have = round_.recipe
    if {owner.name for owner in have.owners} != set(asked.names):
        raise UsageError(f"{folder} holds a simulation with other owners.", advice=_ELSEWHERE)
    want = recipes.make(
        round=have.round,
        coordinator=have.coordinator,
        terms={
            "task": asked.task,
            "seed": {"fingerprint": steps.fingerprint(asked.seed)},
            "public": sha,
            **asked.terms,
        },
        owners=[owner.model_copy(update={"task": asked.tasks.get(owner.name)}) for owner in have.owners],
        quorum=asked.quorum,
        deadline=have.deadline,
    )
    other = [name for name in recipes.Terms.model_fields if getattr(have.terms, name) != getattr(want.terms, name)]
    if have.owners != want.owners:
        other.append("owner's task or labels")
    if have.quorum != want.quorum:
        other.append("quorum")
    if other:
        raise UsageError(f"{folder} holds a simulation with another {', another '.join(other)}.", advice=_ELSEWHERE)


def run(
    folder: Path,
    round_: Coordinator,
    private: Mapping[str, Path],
    out: Path,
    *,
    steps: Steps,
    progress: Progress = SILENT,
) -> dict[str, str]:
    """Every owner's work, then the model; what happened to each owner. What is done already is not done again, and a
    model that is there stays if it is made of what the owners have contributed."""
    _same_work(folder, round_, private, steps)
    failed: dict[str, str] = {}
    for name, data in sorted(private.items()):
        if round_.book.entry(name).stage in DONE:
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
                reconsider=True,  # of an owner that has sent nothing, what was made of other examples is made anew
            )
            entry = round_.receive(made)[1]
            if entry.stage not in DONE:
                failed[name] = entry.sentence()
        except CloisterError as error:
            failed[name] = error.message
    taken = round_.standing().taken
    if len(taken) < round_.recipe.quorum:
        reasons = "".join(f"\n  - {name}: {why}" for name, why in failed.items())
        raise DataError(
            f"{len(taken)} of {len(private)} owners have made what can be used; the quorum is {round_.recipe.quorum}."
            + reasons,
            advice="Mend what is named here and run the same command again; what is done stays.",
        )
    if is_made_of(out, round_.recipe.terms, {name: round_.book.entry(name).digest for name in taken}):
        for name in taken:  # the run that built it may have been killed before it noted that
            round_.book.move(name, "built")
    else:
        round_.build(out, wait=False, progress=progress)
    return {name: failed.get(name, round_.book.entry(name).sentence()) for name in private}


def _same_work(folder: Path, round_: Coordinator, private: Mapping[str, Path], steps: Steps) -> None:
    """What an owner has contributed was made of these examples, and with these decisions; `UsageError` otherwise.
    Nothing of it may be taken for something that it is not."""
    for name, data in sorted(private.items()):
        if round_.book.entry(name).stage not in DONE:
            continue
        noted = Book.load(folder / OWNERS / name).state.private
        if noted.get("decisions") != steps.decisions:
            raise UsageError(
                f"What {name} contributed was made with other decisions: {noted.get('decisions')} instead"
                f" of {steps.decisions}.",
                advice=_ELSEWHERE,
            )
        if noted.get("data") != owners.data_digest(data):
            raise UsageError(f"What {name} contributed was made of other examples than {data}.", advice=_ELSEWHERE)


def measure(
    folder: Path,
    round_: Coordinator,
    private: Mapping[str, Path],
    *,
    steps: RealSteps,
    progress: Progress = SILENT,
) -> None:
    """Attack the contributions that are here as often as is asked for now. What has been measured so is taken."""
    for name, data in sorted(private.items()):
        if round_.book.entry(name).stage in DONE:
            disclose.measured(round_.folder / INVITATION, data, folder / OWNERS / name, steps=steps, progress=progress)
