"""The coordinator's side of a round: invites, takes contributions or refuses them, builds the model.

    round = Coordinator.invite(folder, recipe, key, public=..., seed=...)
    round.receive(path)                         # a contribution that somebody brought
    round.build(out)                            # when all have come, or the deadline has passed and the quorum has

What is built depends on the terms and on the contributions that were taken, in the order of their owners' names, and on
nothing else: an owner that was refused or came too late is as if it had not been invited, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from cloister import storage
from cloister.errors import PeerTimeout, UsageError
from cloister.progress import SILENT, Progress
from cloister.unify import artefacts
from cloister.unify.artefacts import Refused, shown, write_json
from cloister.unify.keys import Key

from . import contribution, invitation
from . import recipe as recipes
from .provenance import PROVENANCE, must_enlarge, provenance_of, read_provenance
from .recipe import Owner, Recipe
from .state import STATE, Book, Entry, State, now
from .steps import Received, Shapes, Steps, right_public

INVITATION, RECEIVED, INBOX, WORK = "invitation", "received", "inbox", "work"
WAS = "it was "  # begins a reason of being late: where the owner stood, and why it had been refused if it had


@dataclass(frozen=True)
class Standing:
    """How far a round has come."""

    taken: tuple[str, ...]
    awaited: tuple[str, ...]  # may still come before their deadline
    out: tuple[str, ...]  # refused, late or left
    quorum: int

    @property
    def complete(self) -> bool:
        """Nobody is awaited and enough have come."""
        return not self.awaited and len(self.taken) >= self.quorum

    @property
    def hopeless(self) -> bool:
        """Even if all who are awaited come, the quorum is not reached."""
        return len(self.taken) + len(self.awaited) < self.quorum


def standing_of(recipe: Recipe, book: Book, at: datetime | None = None) -> Standing:
    """Who has come, who is awaited and who is out. Looks only; `status` may ask while a coordinator is at work."""
    at = at or now()
    taken, awaited, out = [], [], []
    for owner in sorted(recipe.owners, key=lambda owner: owner.name):
        stage = book.entry(owner.name).stage
        if stage in ("received", "built"):
            taken.append(owner.name)
        elif stage == "left" or at > recipe.deadline_of(owner):
            out.append(owner.name)
        else:
            awaited.append(owner.name)
    return Standing(tuple(taken), tuple(awaited), tuple(out), recipe.quorum)


def _written(folder: Path) -> datetime:
    """When an artefact was complete on this disk: the last of its files' times of change.

    Not their times of modification, which archives and `cp -p` carry over from the sender's machine.
    """
    manifest = artefacts.load_manifest(folder)[0]
    times = []
    for name in (artefacts.MANIFEST, *(manifest.files if manifest is not None else ())):
        with suppress(OSError):
            times.append((folder / name).lstat().st_ctime)
    return datetime.fromtimestamp(max(times), UTC) if times else now()


def _told(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _remove_unfinished(place: Path, key: Key) -> None:
    """An invitation that this key has signed and whose `invite` was killed before it wrote down that there is a round:
    nobody was told of it. Any other stays and is in the way."""
    manifest = artefacts.load_manifest(place)[0]
    if (
        manifest is not None
        and manifest.label.purpose == invitation.PURPOSE
        and key.public.signed(manifest.message(), manifest.signature)
    ):
        storage.remove(place)


class CheckFailed(RuntimeError):
    """Computing with a contribution failed, for want of memory say. That is this machine's trouble: it says nothing
    about the contribution, for which nobody is refused."""


class Coordinator:
    """One round in one folder."""

    def __init__(self, folder: Path, steps: Steps, key: Key | None = None) -> None:
        self.folder, self.steps, self.key = folder, steps, key
        self.book = Book.load(folder)
        if self.book.state.party != "coordinator":
            raise UsageError(
                f"{folder} is an owner's folder.", advice="Name the folder that `cloister unify invite` made."
            )
        self.invitation = invitation.read(folder / INVITATION, whole=False)
        self._finish_what_was_begun()

    @classmethod
    def invite(
        cls, folder: Path, recipe: Recipe, key: Key, *, public: Path, seed: Path | None, steps: Steps
    ) -> Coordinator:
        """Begin a round: write `folder/invitation`, which every owner gets."""
        if not (folder / STATE).exists():
            _remove_unfinished(folder / INVITATION, key)
        invitation.write(folder / INVITATION, recipe, key, public=public, seed=seed)
        owners = {owner.name: Entry(since=now().isoformat()) for owner in recipe.owners}
        Book.begin(folder, State("coordinator", recipe.round, "coordinator", owners))
        return cls(folder, steps, key)

    @property
    def recipe(self) -> Recipe:
        """What is agreed on."""
        return self.invitation.recipe

    # Who takes part ---------------------------------------------------------------------------------------------------

    def add(self, owner: Owner, key: Key) -> None:
        """Invite one more owner, or give an invited one another deadline. What others have sent stays good."""
        old = self.recipe.owner(owner.name)
        if old is not None and old.key != owner.key:
            raise UsageError(
                f"{owner.name} is invited with another key.",
                advice="Remove it first, if this really is the same organisation's new key.",
            )
        if old is not None and owner.task is None:
            owner = owner.model_copy(update={"task": old.task})
        elif old is not None and owner.task != old.task and self.book.entry(owner.name).stage in ("received", "built"):
            raise UsageError(
                f"{owner.name} has sent an expert for the task that it was invited with.",
                advice=f"Remove {owner.name} from the round first, then add it with its new task.",
            )
        plain = self.recipe.plain()
        others = [about for about in plain["owners"] if about["name"] != owner.name]
        plain["owners"] = [*others, owner.model_dump(mode="json")]
        self._change(recipes.make(**plain), key)
        self.book.invite(owner.name)
        if self.book.entry(owner.name).stage == "late" and now() < self.recipe.deadline_of(owner):
            self.book.move(owner.name, "invited")

    def remove(self, name: str) -> None:
        """An owner leaves the round; what it sent is deleted."""
        self._known(name)
        self.book.move(name, "left")
        storage.remove(self.folder / RECEIVED / name)
        storage.remove(self.folder / INBOX / name)

    def _change(self, recipe: Recipe, key: Key) -> None:
        invitation.rewrite_recipe(self.folder / INVITATION, recipe, key)
        self.invitation = invitation.read(self.folder / INVITATION, whole=False)

    def _known(self, name: str) -> Owner:
        owner = self.recipe.owner(name)
        if owner is None:
            invited = ", ".join(other.name for other in self.recipe.owners)
            raise UsageError(f"{shown(name)} is not invited.", advice=f"Invited are {invited}.")
        return owner

    # Contributions ----------------------------------------------------------------------------------------------------

    @cached_property
    def _shapes(self) -> tuple[Shapes, Shapes]:
        seed, terms = self.invitation.seed(), self.recipe.terms
        routing = self.steps.routing_shapes(seed, terms) if terms.router.vectors == "private" else {}
        return self.steps.expert_shapes(seed, terms), routing

    @cached_property
    def _public_ids(self) -> Sequence[str]:
        return self.steps.public_ids(self.invitation.public)

    def most_bytes(self, owner: Owner) -> int:
        """How large this owner's contribution can be."""
        return contribution.expected(self.recipe, owner, *self._shapes).most

    def receive(self, source: Path, *, sender: str = "", at: datetime | None = None) -> tuple[str, Entry]:
        """Take a contribution, or say everything that is wrong with it. Returns the owner's name and where it stands.

        `sender` is who brought it, where the connection proves that. A folder brought by hand proves nothing before its
        signature is checked, so nobody is held to what a stranger's folder says. `at`: when it came, if that is not
        when its files were written here; people look at what has come long after the deadline.
        """
        name = sender or self._claimed(source)
        if not name:
            return "", Entry("refused", reasons=(self.book.state.strangers[-1],))
        owner = self._known(name)
        stage = self.book.entry(name).stage
        if stage in ("received", "built", "left"):
            return name, self._again(name, source)
        came, deadline = at or _written(source), self.recipe.deadline_of(owner)
        if came > deadline:
            why = (
                f"it came at {_told(came)}, the deadline was {_told(deadline)}; `cloister unify add` gives another one"
            )
            old = self.book.entry(name)
            before = old.reasons if old.stage == "late" else (WAS + old.sentence(),) if old.reasons else ()
            self.book.move(name, "late", reasons=(why, *(one for one in before if one.startswith(WAS))))
            return name, self.book.entry(name)
        own = self.folder / INBOX / name / "contribution"
        try:
            if source != own:
                storage.private_directory(own.parent)
                artefacts.copy(source, own, self.most_bytes(owner))
            received = self._check(own, owner)
        except Refused as error:
            self.book.move(name, "refused", reasons=tuple(error.reasons))
            storage.remove(own)
            return name, self.book.entry(name)
        storage.remove(self.folder / RECEIVED / name)
        storage.private_directory(self.folder / RECEIVED)
        own.replace(self.folder / RECEIVED / name)
        self.book.move(name, "received", digest=received.digest)
        return name, self.book.entry(name)

    def _claimed(self, source: Path) -> str:
        """The invited owner who has signed the folder's manifest; empty, and a note of it, if there is none."""
        manifest, reasons = artefacts.load_manifest(source)
        place = shown(str(source), 200)
        if manifest is None:
            self.book.stranger(f"{place}: {'; '.join(reasons[:3])}")
            return ""
        claimed = manifest.label.sender
        owner = self.recipe.owner(claimed)
        if owner is None:
            self.book.stranger(f"{place}: it is from {shown(claimed)!r}, who is not invited")
            return ""
        key = contribution.expected(self.recipe, owner, {"": [()]}, {}).key
        if not key.signed(manifest.message(), manifest.signature):
            self.book.stranger(f"{place}: it says it is from {claimed!r}, but is not signed with that owner's key")
            return ""
        return claimed

    def _again(self, name: str, source: Path) -> Entry:
        entry = self.book.entry(name)
        manifest = artefacts.load_manifest(source)[0]
        if entry.stage == "left":
            raise UsageError(f"{name} has left the round.", advice=f"Invite it again: cloister unify add ... {name}")
        if manifest is not None and manifest.digest() != entry.digest:
            raise UsageError(
                f"Another contribution of {name} was taken already.",
                advice=f"If the new one shall count, remove {name} from the round and add it again first.",
            )
        return entry

    def _check(self, folder: Path, owner: Owner) -> Received:
        given, terms = self.invitation, self.recipe.terms

        def unusable(received: Received) -> Sequence[str]:
            try:
                return self.steps.unusable(given.seed(), given.public, received, terms)
            except (MemoryError, RuntimeError) as error:  # torch says the second when it gets no memory
                raise CheckFailed(f"{type(error).__name__}: {error}") from error

        return contribution.check(folder, self.recipe, owner, *self._shapes, self._public_ids, unusable)

    def _finish_what_was_begun(self) -> None:
        """An owner that was added, or a contribution that was checked and moved into place, but not written down
        because the process died."""
        for owner in self.recipe.owners:
            if owner.name not in self.book.state.owners:
                self.book.invite(owner.name)
            place = self.folder / RECEIVED / owner.name
            if place.is_dir() and self.book.entry(owner.name).stage not in ("received", "built", "left"):
                try:
                    self.book.move(owner.name, "received", digest=self._check(place, owner).digest)
                except Refused:
                    storage.remove(place)

    # Building ---------------------------------------------------------------------------------------------------------

    def standing(self, at: datetime | None = None) -> Standing:
        """Who has come and who is awaited; who is too late is written down as late."""
        found = standing_of(self.recipe, self.book, at)
        for name in found.out:
            if self.book.entry(name).stage not in ("refused", "late", "left"):
                self._late(name)
        return found

    def _late(self, name: str) -> None:
        """Its deadline is over. What it was doing then is what its people will ask."""
        old = self.book.entry(name)
        why = {"invited": "nothing came", "late": ""}.get(old.stage, WAS + old.sentence())
        if why:
            self.book.move(name, "late", reasons=(why,))

    def build(
        self,
        out: Path,
        *,
        onto: Path | None = None,
        wait: bool = True,
        at: datetime | None = None,
        progress: Progress = SILENT,
    ) -> Path:
        """Build the unified model of what is here. `wait=False` builds although some may still come."""
        standing = self.standing(at)
        if len(standing.taken) < standing.quorum:
            raise PeerTimeout(
                f"{len(standing.taken)} of {len(self.recipe.owners)} owners have sent what can be used; "
                f"the quorum is {standing.quorum}.",
                advice="`cloister unify status` says who is missing or was refused, and why.",
            )
        if standing.awaited and wait:
            raise UsageError(
                f"{', '.join(standing.awaited)} may still send something.",
                advice="Wait for the deadline, or say --now to build with those who have come.",
            )
        seed = self.invitation.seed()
        self._right_seed(seed)
        right_public(self.steps, self.invitation.public, self.recipe.terms)
        received = [self._once_more(name) for name in standing.taken]
        before = None if onto is None else read_provenance(onto)
        made = provenance_of(self.recipe.terms, received, before)
        if onto is not None and before is not None:
            must_enlarge(onto, before, made)
        which = hashlib.sha256(json.dumps([before, made], sort_keys=True).encode()).hexdigest()
        work = storage.private_directory(self.folder / WORK / which[:16])
        terms = self.recipe.terms_of_all(standing.taken)
        with storage.fresh_directory(out) as partial:
            self.steps.build(seed, self.invitation.public, received, terms, work, partial, progress, onto)
            write_json(partial / PROVENANCE, made)
        for name in standing.taken:
            self.book.move(name, "built")
        storage.remove(work)
        return out

    def _once_more(self, name: str) -> Received:
        """What lies here since days is checked again before it is used."""
        owner = self._known(name)
        try:
            received = self._check(self.folder / RECEIVED / name, owner)
        except Refused as error:
            raise UsageError(
                f"The contribution of {name} was changed after it was taken: {'; '.join(error.reasons)}.",
                advice=f"Remove {name} from the round, add it again and ask for its contribution.",
            ) from None
        if received.digest != self.book.entry(name).digest:
            raise UsageError(f"The contribution of {name} is not the one that was taken.", advice="Put it back.")
        return received

    def _right_seed(self, seed: Path) -> None:
        found = self.steps.fingerprint(seed)
        if found != self.recipe.terms.seed.fingerprint:
            raise UsageError("The seed is not the one of the recipe.", advice="Put back the invitation's seed folder.")
