"""An owner's side of a round: from an invitation and private examples to a contribution.

    made = owner.contribute(invitation, private, folder, key=key, steps=steps)     # folder/contribution

Each step leaves its result in `folder/work` and is not done again: a killed run goes on where it stopped, and ends with
the same bytes. Only `folder/contribution` is meant to leave.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cloister import storage
from cloister.errors import BrokenManifest, PeerTimeout, UsageError, WrongKey
from cloister.progress import SILENT, Progress
from cloister.unify import tensors
from cloister.unify.artefacts import Refused, digest_of, open_file, read_json, shown, write_json
from cloister.unify.keys import Key, PublicKey

from . import contribution, invitation
from .invitation import Invitation
from .recipe import Owner
from .state import STATE, Book, State, now
from .steps import Shapes, Steps, right_public

CONTRIBUTION, WORK = "contribution", "work"
READY = "the contribution is ready"
_MOST_OWN = 1 << 30


def contribute(
    invited: Path,
    private: Path,
    folder: Path,
    *,
    key: Key,
    steps: Steps,
    coordinator: str = "",
    progress: Progress = SILENT,
    reconsider: bool = False,
    deadline: bool = True,
) -> Path:
    """Make `folder/contribution`, which was checked as the coordinator checks it.

    `reconsider` begins anew, for private examples that have changed. `deadline=False` leaves it to the coordinator to
    say who is late: over the network it may have moved a deadline since this invitation came.
    """
    given = invitation.read(invited, coordinator=coordinator)
    me = who(given, key)
    right_public(steps, given.public, given.recipe.terms)
    if deadline and now() > given.recipe.deadline_of(me):
        raise PeerTimeout(
            f"The deadline of {me.name} was {given.recipe.deadline_of(me).isoformat()}.",
            advice="Ask the coordinator for another one and for the invitation with it: `cloister unify add` makes it.",
        )
    book = begin(given, me, folder)
    work, made = folder / WORK, folder / CONTRIBUTION
    _same_as_before(book, private, steps.decisions, work, made, reconsider)
    storage.private_directory(work)
    if wrong := _wrong(made, given, me, steps):
        if made.exists():
            progress.note(f"{made} is not what was made: {wrong[0]}. It is made again.")
        _work(given, me, private, folder, key, steps, book, progress)
        if wrong := _wrong(made, given, me, steps):
            raise Refused(
                "The contribution that was made here",
                wrong,
                advice=f"The coordinator would refuse it. If a file in {work} was damaged, remove that folder and run "
                "this again; if it comes out the same, the recipe's settings are to blame: tell the coordinator.",
            )
    if book.entry(me.name).stage in ("invited", "working"):
        book.move(me.name, "working", step=READY)
    return made


def who(given: Invitation, key: Key) -> Owner:
    """The invited owner that has this key."""
    found = next((owner for owner in given.recipe.owners if owner.key == key.public.text), None)
    if found is None:
        raise WrongKey(
            f"Nobody with this key is invited to the round (fingerprint {key.fingerprint}).",
            advice=f"Send {key.folder}/party-key.pub to the coordinator, or use the key that you sent.",
        )
    return found


def begin(given: Invitation, me: Owner, folder: Path) -> Book:
    """The owner's state file, made if it is not there; `UsageError` if it is another round's."""
    terms = given.recipe.terms_of(me).digest()
    key = PublicKey(given.recipe.coordinator).fingerprint
    if not (folder / STATE).exists():
        book = Book.begin(folder, State("owner", given.recipe.round, me.name))
        book.invite(me.name)
        book.remember("terms", terms)
        book.remember("coordinator", key)
        return book
    book = Book.load(folder)
    if (book.state.party, book.state.round, book.state.name) != ("owner", given.recipe.round, me.name):
        raise UsageError(f"{folder} belongs to another round or party.", advice="Choose another folder.")
    if book.state.private.get("terms", terms) != terms:
        raise UsageError(
            "The invitation's terms are not those that this folder was begun with.",
            advice="Ask the coordinator what changed, then begin in another folder.",
        )
    if book.state.private.get("coordinator", key) != key:
        raise WrongKey(
            "The invitation is signed by another coordinator than before.",
            advice="Ask the coordinator for the fingerprint of the key, over a channel that you trust.",
        )
    return book


def _same_as_before(book: Book, private: Path, decisions: str, work: Path, made: Path, reconsider: bool) -> None:
    """A step that is not done again must not have been done with other data, or otherwise than is asked for now."""
    found = data_digest(private)
    if book.state.private.get("data", found) != found:
        if not reconsider:
            raise UsageError(
                f"{private} is not what it was when this round was begun here.",
                advice="Put it back, or say --reconsider to begin anew with the new examples.",
            )
        storage.remove(work)
        storage.remove(made)
    elif book.state.private.get("decisions", decisions) != decisions:
        if not reconsider:
            raise UsageError(
                f"This round was begun here with other decisions: {book.state.private['decisions']} instead of "
                f"{decisions}.",
                advice="Say the same as before, or --reconsider to begin anew.",
            )
        storage.remove(work)
        storage.remove(made)
    book.remember("data", found)
    book.remember("decisions", decisions)


def data_digest(private: Path) -> str:
    """SHA-256 of a file, or of all files of a folder. It stays in the owner's own state file."""
    if not private.exists():
        raise UsageError(f"There is no {private}.", advice="Name the file that holds your examples.")
    files = [private] if private.is_file() else sorted(path for path in private.rglob("*") if path.is_file())
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            whole.update(f"{path.name}\0{digest_of(file)}\0".encode())
    return whole.hexdigest()


def _wrong(made: Path, given: Invitation, me: Owner, steps: Steps) -> Sequence[str]:
    """What keeps the coordinator from taking what lies there: an owner who hears it at home can still mend it."""
    if not made.is_dir():
        return ["it is not there"]
    seed, terms = given.seed(), given.recipe.terms
    try:
        contribution.check(
            made,
            given.recipe,
            me,
            steps.expert_shapes(seed, terms),
            steps.routing_shapes(seed, terms) if terms.router.vectors == "private" else {},
            steps.public_ids(given.public),
            lambda received: steps.unusable(seed, given.public, received, terms),
        )
    except Refused as error:
        return error.reasons
    return []


def _work(
    given: Invitation, me: Owner, private: Path, folder: Path, key: Key, steps: Steps, book: Book, progress: Progress
) -> None:
    terms, public, work = given.recipe.terms_of(me), given.public, folder / WORK
    seed = given.seed()
    book.move(me.name, "working", step="checking the seed")
    if (found := steps.fingerprint(seed)) != terms.seed.fingerprint:
        raise UsageError(
            f"The seed's fingerprint is {found[:16]}..., the recipe says {terms.seed.fingerprint[:16]}...",
            advice="The checkpoint of that name has changed since; ask the coordinator to put it into the invitation.",
        )
    chosen, expert, report = work / "proxies.json", work / "expert.safetensors", work / "report.json"

    def step(name: str, result: Path, make: Callable[[], object]) -> None:
        if not result.exists():
            book.move(me.name, "working", step=name)
            make()

    step(
        "choosing public examples",
        chosen,
        lambda: _keep_json(chosen, list(steps.choose(seed, public, private, me.name, terms, work, progress))),
    )
    proxies = kept_json(chosen, list)
    step(
        "training the expert",
        expert,
        lambda: _keep(expert, steps.train(seed, public, private, proxies, terms, work, progress)),
    )
    _kept(expert, steps.expert_shapes(seed, given.recipe.terms))
    routing = work / "routing.safetensors"
    if terms.router.vectors == "private":
        step(
            "routing vectors",
            routing,
            lambda: _keep(routing, steps.routing(seed, public, private, proxies, terms, work, progress) or {}),
        )
        _kept(routing, steps.routing_shapes(seed, given.recipe.terms))
    step(
        "measuring what leaves",
        report,
        lambda: _keep_json(report, dict(steps.report(seed, public, private, proxies, expert, terms, work, progress))),
    )
    book.move(me.name, "working", step="writing the contribution")
    contribution.write(
        folder / CONTRIBUTION,
        given.recipe,
        me.name,
        key,
        proxies=proxies,
        expert=expert,
        report=kept_json(report, dict),
        routing=routing if terms.router.vectors == "private" else None,
    )


def kept_json(path: Path, kind: type) -> Any:
    """What an earlier step has left, or where to mend it."""
    try:
        found = read_json(path, _MOST_OWN)
        if not isinstance(found, kind):
            raise ValueError("it holds something else")
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    return found


def _kept(path: Path, shapes: Shapes) -> None:
    if wrong := tensors.wrong(path.parent, path.name, shapes):
        raise _damaged(path, wrong[0])


def _damaged(path: Path, why: str) -> BrokenManifest:
    """Nothing is made again unasked: with differential privacy that would be a second release."""
    return BrokenManifest(
        f"{path} cannot be used: {shown(why, 300)}.",
        advice=f"Put back a copy of it, or remove {path.parent} and the {CONTRIBUTION} beside it and run the same "
        "command again: it begins anew. (If it comes out the same, the recipe's settings are to blame: tell the "
        "coordinator.)",
    )


def _keep_json(path: Path, value: object) -> None:
    write_json(path, value, mode=storage.SECRET_MODE)


def _keep(path: Path, tensors: Mapping[str, Any]) -> None:
    """Tensors without metadata: the same tensors always make the same bytes."""
    from safetensors.torch import save_file

    partial = path.with_suffix(".partial")
    with storage.disk_errors(path):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(partial))
        with open_file(partial.parent, partial.name) as file:
            os.fsync(file.fileno())
        partial.chmod(storage.SECRET_MODE)
        partial.replace(path)
        storage.sync_directory(path.parent)
