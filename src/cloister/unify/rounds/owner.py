"""An owner's side of a round: from an invitation and private examples to a contribution.

    made = owner.contribute(invitation, private, folder, key=key, steps=steps)     # folder/contribution

Each step leaves its result in `folder/work` and is not done again: a killed run goes on where it stopped, and ends with
the same bytes. Only `folder/contribution` is meant to leave.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cloister import storage
from cloister.errors import PeerTimeout, UsageError, WrongKey
from cloister.progress import SILENT, Progress
from cloister.unify.artefacts import digest_of, load_manifest, open_file, read_json, write_json
from cloister.unify.keys import Key, PublicKey

from . import contribution, invitation
from .invitation import Invitation
from .recipe import Owner
from .state import STATE, Book, State, now
from .steps import Steps

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
) -> Path:
    """Make `folder/contribution`. `reconsider` begins anew, for private examples that have changed."""
    given = invitation.read(invited, coordinator=coordinator)
    me = who(given, key)
    if now() > given.recipe.deadline_of(me):
        raise PeerTimeout(
            f"The deadline of {me.name} was {given.recipe.deadline_of(me).isoformat()}.",
            advice="Ask the coordinator for another one: `cloister unify invite` writes it into a new invitation.",
        )
    book = begin(given, me, folder)
    work = folder / WORK
    _same_as_before(book, private, steps.decisions, work, folder / CONTRIBUTION, reconsider)
    work.mkdir(mode=0o700, exist_ok=True)
    if not contribution_is_ready(folder, given, me):
        _work(given, me, private, folder, key, steps, book, progress)
    if book.entry(me.name).stage in ("invited", "working"):
        book.move(me.name, "working", step=READY)
    return folder / CONTRIBUTION


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


def contribution_is_ready(folder: Path, given: Invitation, me: Owner) -> bool:
    """Whether a complete contribution for these terms lies there, made by an earlier run."""
    manifest = load_manifest(folder / CONTRIBUTION)[0]
    return manifest is not None and manifest.label == contribution.label(given.recipe, me.name)


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
    proxies = read_json(chosen, _MOST_OWN)
    step(
        "training the expert",
        expert,
        lambda: _keep(expert, steps.train(seed, public, private, proxies, terms, work, progress)),
    )
    routing = work / "routing.safetensors"
    if terms.router.vectors == "private":
        step(
            "routing vectors",
            routing,
            lambda: _keep(routing, steps.routing(seed, public, private, proxies, terms, work, progress) or {}),
        )
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
        report=read_json(report, contribution.MOST_REPORT),
        routing=routing if terms.router.vectors == "private" else None,
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
