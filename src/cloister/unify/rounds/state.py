"""What a party remembers of a round: one file, written whole or not at all, read again after any interruption.

The coordinator's file has an entry for each owner, an owner's file one for itself. `cloister unify status` shows
either.

    invited -> working -> uploading -> received -> built
                              |-> refused (why)      a refused owner may send again before its deadline
    late: nothing (whole) came before the deadline;  left: removed from the round
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from cloister import storage
from cloister.errors import BrokenManifest, FormatVersion, TooBusy, UsageError
from cloister.unify.artefacts import read_json, shown, write_json

SCHEMA = "cloister.unify.state/1"
STATE = "state.json"
_MOST = 16 << 20

Stage = Literal["invited", "working", "uploading", "received", "refused", "late", "left", "built"]
STAGES: tuple[Stage, ...] = get_args(Stage)
AGAIN: tuple[Stage, ...] = ("working", "uploading")  # what a refused owner may become
_NEXT: dict[Stage, frozenset[Stage]] = {
    "invited": frozenset({"working", "uploading", "received", "refused", "late", "left"}),
    "working": frozenset({"invited", "uploading", "received", "refused", "late", "left"}),
    "uploading": frozenset({"working", "received", "refused", "late", "left"}),
    "refused": frozenset({"working", "uploading", "received", "late", "left"}),
    "received": frozenset({"built", "left"}),
    "late": frozenset({"left", "invited", "working", "uploading", "received", "refused"}),  # a deadline may be moved
    "left": frozenset({"invited"}),
    "built": frozenset({"left"}),
}


_LOCK = ".lock"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else works in a party's folder meanwhile; `TooBusy` if somebody does.

    The lock is the operating system's, so it ends with the process that holds it, however that ends.
    """
    storage.private_directory(folder)
    try:
        import fcntl
    except ImportError:  # not on this platform; every file is still written whole
        yield
        return
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, storage.SECRET_MODE)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TooBusy(
                f"Another command is working in {folder}.",
                advice="Wait for it, or stop it: what it has done so far is kept. `status` may be asked meanwhile.",
            ) from None
        yield
    finally:
        os.close(handle)


def now() -> datetime:
    """The time that deadlines are compared with."""
    return datetime.now(UTC).replace(microsecond=0)


@dataclass(frozen=True)
class Entry:
    """Where one owner stands."""

    stage: Stage = "invited"
    step: str = ""  # of `working`: which, in the owner's own file; that it stopped, in the coordinator's
    done: int = 0  # of `uploading`: chunks
    total: int = 0
    reasons: tuple[str, ...] = ()  # of `refused` and `late`; while an owner tries again, why it was refused before
    digest: str = ""  # of the contribution that was received
    since: str = ""  # when this stage began

    def sentence(self) -> str:
        """The stage for people."""
        told = "; ".join(self.reasons)
        if self.stage in AGAIN:
            what = f"{self.stage} {self.done} of {self.total}" if self.stage == "uploading" else self.stage
            what += f" ({self.step})" if self.step else ""
            return f"{what}, refused before: {told}" if told else what
        return f"{self.stage}: {told}" if told else self.stage


@dataclass(frozen=True)
class State:
    """The whole file."""

    party: Literal["coordinator", "owner"]
    round: str
    name: str  # "coordinator", or the owner's name
    owners: dict[str, Entry] = field(default_factory=dict)
    strangers: tuple[str, ...] = ()  # what came and could not be told to be from anybody who is invited
    private: dict[str, str] = field(default_factory=dict)  # notes to oneself; never sent


class Book:
    """The state file of a party and what may become of it."""

    def __init__(self, folder: Path, state: State) -> None:
        self._path, self.state = folder / STATE, state

    @classmethod
    def begin(cls, folder: Path, state: State) -> Book:
        """A new file; `UsageError` if there is one."""
        if (folder / STATE).exists():
            raise UsageError(f"{folder} holds a round already.", advice="Choose another folder.")
        storage.private_directory(folder)
        book = cls(folder, state)
        book._write()
        return book

    @classmethod
    def load(cls, folder: Path) -> Book:
        """The file that `begin` wrote."""
        if not (folder / STATE).exists():
            raise BrokenManifest(
                f"{folder} is not a round's folder: it has no {STATE}.",
                advice="`cloister unify invite` makes the coordinator's, `contribute` and `join` an owner's.",
            )
        try:
            return cls(folder, _parse(read_json(folder / STATE, _MOST)))
        except (ValueError, TypeError, KeyError) as error:
            raise BrokenManifest(
                f"{folder / STATE} is damaged: {shown(str(error))}.", advice="Put back a copy of it, or begin anew."
            ) from None

    def entry(self, name: str) -> Entry:
        """Where an owner stands."""
        return self.state.owners.get(name, Entry())

    def move(self, name: str, stage: Stage, **details: Any) -> None:
        """The owner is at `stage` now. Saying so twice changes nothing; a step back is a fault of ours."""
        old = self.entry(name)
        if stage != old.stage and stage not in _NEXT[old.stage]:
            raise UsageError(
                f"{name} is {old.stage!r} and cannot become {stage!r}.",
                advice="`cloister unify status` shows where everybody stands.",
            )
        if stage in AGAIN:
            details = {"reasons": old.reasons if old.stage in ("refused", *AGAIN) else (), **details}
        since = old.since if stage == old.stage and old.since else now().isoformat()
        new = Entry(stage=stage, since=since, **{"digest": old.digest, **details})
        if new != old:
            self._put(replace(self.state, owners={**self.state.owners, name: new}))

    def invite(self, name: str) -> None:
        """One more owner."""
        if self.entry(name).stage == "left" or name not in self.state.owners:
            self._put(replace(self.state, owners={**self.state.owners, name: Entry(since=now().isoformat())}))

    def stranger(self, text: str) -> None:
        """Something came that is from nobody who is invited; the last few are remembered."""
        if text not in self.state.strangers:
            self._put(replace(self.state, strangers=(*self.state.strangers[-19:], text)))

    def remember(self, name: str, value: str) -> None:
        """A note to oneself."""
        if self.state.private.get(name) != value:
            self._put(replace(self.state, private={**self.state.private, name: value}))

    def _put(self, state: State) -> None:
        self.state = state
        self._write()

    def _write(self) -> None:
        write_json(self._path, {"schema": SCHEMA, **asdict(self.state)}, mode=storage.SECRET_MODE)


def _parse(raw: Any) -> State:
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        found = raw.get("schema") if isinstance(raw, dict) else None
        raise FormatVersion(
            f"{STATE} has schema {shown(found)}, this Cloister reads {SCHEMA}.",
            advice="Use the version of Cloister that began the round.",
        )
    owners = {}
    for name, about in raw["owners"].items():
        if about["stage"] not in STAGES:
            raise ValueError(f"{about['stage']} is not a stage")
        owners[name] = Entry(**{**about, "reasons": tuple(about["reasons"])})
    rest = {key: value for key, value in raw.items() if key not in ("schema", "owners", "strangers")}
    return State(**rest, owners=owners, strangers=tuple(raw["strangers"]))
