"""Rounds whose folders people carry: deadlines, what everybody must have got, enlarged models, killed commands."""

from __future__ import annotations

import json
import os
import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from round_parties import Parties, StandIn, later, make_parties, sign_again

from cloister.errors import UsageError
from cloister.unify.artefacts import Refused
from cloister.unify.rounds import contribution, coordinator, invitation
from cloister.unify.rounds import recipe as recipes
from cloister.unify.rounds.coordinator import Coordinator
from cloister.unify.rounds.provenance import PROVENANCE, read_provenance, without
from cloister.unify.rounds.state import STATE, Book


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    return make_parties(tmp_path)


class Killed(BaseException):
    """What no handler of ordinary errors catches."""


def invited(parties: Parties, name: str, **more: Any) -> recipes.Owner:
    return recipes.Owner(name=name, key=parties.key(name).public.text, **more)


# Deadlines ------------------------------------------------------------------------------------------------------------


def test_what_came_in_time_may_be_looked_at_later(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders lie in an inbox until the deadline is over; then somebody runs `build`."""
    round_ = parties.begin(quorum=2)
    inbox = parties.folder / "inbox"
    for name in ("ada", "ben"):
        shutil.copytree(parties.contribute(name), inbox / name)
    (inbox / "ada").rename(inbox / "moved")  # within a disk that is no new arrival
    monkeypatch.setattr(coordinator, "now", later)
    assert [round_.receive(inbox / name)[1].stage for name in ("moved", "ben")] == ["received"] * 2
    round_.build(parties.folder / "model")
    assert round_.book.entry("cyd").sentence() == "late: nothing came"


def test_what_came_after_the_deadline_is_late(parties: Parties) -> None:
    round_ = parties.begin()
    made = parties.contribute("ada")
    brought = shutil.copytree(made, parties.folder / "inbox" / "ada")
    round_.add(invited(parties, "ada", deadline=datetime.now(UTC) + timedelta(seconds=0.5)), parties.key("coordinator"))
    time.sleep(0.6)
    expert = brought / contribution.EXPERT
    expert.write_bytes(expert.read_bytes())  # the last of it comes now
    for path in brought.iterdir():  # times of modification travel with archives, and are whatever a sender likes
        os.utime(path, (0, 0))
    name, entry = round_.receive(brought)
    assert (name, entry.stage) == ("ada", "late")
    assert entry.reasons[0].startswith("it came at ") and "cloister unify add" in entry.reasons[0]
    assert round_.receive(brought, at=later())[1].stage == "late"
    # The way out that it names.
    round_.add(invited(parties, "ada", deadline=datetime.now(UTC) + timedelta(days=1)), parties.key("coordinator"))
    assert round_.book.entry("ada").stage == "invited"
    assert round_.receive(brought)[1].stage == "received"


# What every owner must have got ---------------------------------------------------------------------------------------


def probes(folder: Path) -> None:
    """Other public examples under the same recipe, with ids that all exist."""
    path = folder / "public" / "examples.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "text": "is this yours?"}) + "\n" for line in lines))


def test_a_coordinator_with_other_public_examples_for_one_owner(parties: Parties) -> None:
    parties.begin()
    terms = invitation.read(parties.invitation).recipe.terms.digest()
    probes(parties.invitation)
    sign_again(parties.invitation, parties.key("coordinator"))
    assert invitation.read(parties.invitation).recipe.terms.digest() == terms  # signed, whole, under the same terms
    with pytest.raises(Refused, match="its public examples have the SHA-256") as caught:
        parties.contribute("ada")
    assert "Ask the other owners" in caught.value.advice
    assert not (parties.folder / "owners" / "ada").exists()  # nothing was computed


def test_other_terms_for_one_owner_show_in_one_digest(parties: Parties) -> None:
    """The recipe fits the probes now, so the terms have another digest, and the reports say so."""
    parties.begin()
    others = contribution.agreed_on(parties.contribute("ben"))
    shutil.rmtree(parties.round_folder)
    public = parties.folder / "public.jsonl"
    public.write_text(public.read_text().replace("public 7", "is this yours?"))
    round_ = parties.begin()
    made = parties.contribute("ada")
    own = contribution.agreed_on(made)
    assert own["public"] == round_.recipe.terms.public != others["public"] and own["terms"] != others["terms"]
    assert "compare it" in own["note"]
    # And a contribution made under other terms is of no use in the round of the others.
    name, entry = round_.receive(parties.folder / "owners" / "ben" / "contribution")
    assert name == "ben" and any("terms" in reason for reason in entry.reasons)


def test_a_report_that_names_other_public_examples(parties: Parties) -> None:
    round_ = parties.begin()
    made = parties.contribute("ada")
    report = json.loads((made / contribution.REPORT).read_text())
    report["agreed"]["public"] = "0" * 64
    (made / contribution.REPORT).write_text(json.dumps(report))
    sign_again(made, parties.key("ada"))
    assert round_.receive(made)[1].reasons == ("report.json names other terms or public examples",)


def test_a_model_is_not_built_with_other_public_examples(parties: Parties) -> None:
    round_ = parties.begin()
    round_.receive(parties.contribute("ada"))
    probes(parties.invitation)
    with pytest.raises(Refused, match="its public examples"):
        round_.build(parties.folder / "model", wait=False)
    assert not (parties.folder / "model").exists()


# Enlarging a model ----------------------------------------------------------------------------------------------------


def two_of(parties: Parties) -> tuple[Coordinator, Path]:
    """A round of three of which two have come, and their model."""
    round_ = parties.begin()
    for name in ("ada", "ben"):
        round_.receive(parties.contribute(name))
    return round_, round_.build(parties.folder / "two", wait=False)


def mended(parties: Parties, round_: Coordinator, name: str) -> None:
    """The owner leaves, is invited again and sends another expert."""
    round_.remove(name)
    round_.add(invited(parties, name), parties.key("coordinator"))
    parties.private(name).write_text("other examples\n")
    assert round_.receive(parties.contribute(name, reconsider=True))[1].stage == "received"


def test_an_enlarged_model_names_no_contribution_that_is_not_inside(parties: Parties) -> None:
    round_, two = two_of(parties)
    old = read_provenance(two)
    mended(parties, round_, "ben")
    round_.receive(parties.contribute("cyd"))
    with pytest.raises(UsageError, match="expert of ben that was made of another contribution") as caught:
        round_.build(parties.folder / "three", onto=two)
    assert "without --onto" in caught.value.advice and "remove MODEL ben" in caught.value.advice
    assert not (parties.folder / "three").exists()
    # Both ways out: take it out of the model first, or build anew.
    one = parties.folder / "one"
    one.mkdir()
    StandIn().remove(two, "ben", one)
    (one / PROVENANCE).write_text(json.dumps(without(old, "ben")))
    made = read_provenance(round_.build(parties.folder / "three", onto=one))
    new = round_.book.entry("ben").digest
    assert made["owners"]["ben"] == new != old["owners"]["ben"] and made["owners"]["ada"] == old["owners"]["ada"]
    assert made["removed"] == {old["owners"]["ben"]: "ben"}  # the others' experts were trained beside it
    anew = read_provenance(round_.build(parties.folder / "anew"))
    assert anew["owners"] == made["owners"] and anew["removed"] == {}


def test_a_model_of_other_terms_is_not_enlarged(parties: Parties) -> None:
    _, two = two_of(parties)
    shutil.rmtree(parties.round_folder)
    shutil.rmtree(parties.folder / "owners")
    round_ = parties.begin(terms={"selection": {"count": 7}})
    for name in parties.names:
        round_.receive(parties.contribute(name))
    with pytest.raises(UsageError, match="the digest of its terms is"):
        round_.build(parties.folder / "three", onto=two)
    (two / PROVENANCE).write_text(json.dumps({**read_provenance(two), "seed": "0" * 64}))
    with pytest.raises(UsageError, match="the digest of its seed is"):
        round_.build(parties.folder / "three", onto=two)
    assert not (parties.folder / "three").exists()


def test_a_model_with_an_owner_whom_nobody_knows(parties: Parties) -> None:
    round_, two = two_of(parties)
    round_.remove("ben")
    with pytest.raises(UsageError, match="expert of ben, of whom no contribution is here"):
        round_.build(parties.folder / "three", onto=two, wait=False)
    (two / PROVENANCE).write_text(json.dumps({**read_provenance(two), "owners": ["ada"]}))
    with pytest.raises(UsageError, match="is damaged"):
        round_.build(parties.folder / "three", onto=two, wait=False)
    with pytest.raises(UsageError, match="not a unified model"):
        round_.build(parties.folder / "three", onto=parties.folder / "seed", wait=False)


# One more owner -------------------------------------------------------------------------------------------------------


def test_an_owner_with_labels_that_nobody_had_before(parties: Parties) -> None:
    round_ = parties.begin(owners=["ada"])
    round_.receive(parties.contribute("ada"))
    task = recipes.Task(kind="classify", labels=("wet", "dry"))
    round_.add(invited(parties, "ben", task=task), parties.key("coordinator"))
    assert round_.recipe.terms_of(round_._known("ben")).task == task
    assert round_.recipe.terms.task.labels == ("cold", "warm")
    round_.receive(parties.contribute("ben"))
    other = recipes.Task(kind="classify", labels=("old", "new"))
    with pytest.raises(UsageError, match="has sent an expert for the task"):
        round_.add(invited(parties, "ben", task=other), parties.key("coordinator"))
    assert round_.recipe.terms_of(round_._known("ben")).task == task
    # Another deadline changes nothing about its task.
    round_.add(invited(parties, "ben", deadline=later()), parties.key("coordinator"))
    assert round_.recipe.terms_of(round_._known("ben")).task == task


# Killed ---------------------------------------------------------------------------------------------------------------


def dies(*_: Any) -> Any:
    raise Killed


def test_an_invite_that_was_killed_is_taken_up_again(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as dying:
        dying.setattr(Book, "begin", dies)
        with pytest.raises(Killed):
            parties.begin()
    assert parties.invitation.is_dir() and not (parties.round_folder / STATE).exists()
    round_ = parties.begin()
    assert sorted(Book.load(parties.round_folder).state.owners) == parties.names
    assert round_.receive(parties.contribute("ada"))[1].stage == "received"
    with pytest.raises(UsageError, match="exists and is not empty"):
        parties.begin()  # a round that has begun is not begun again
    assert round_.invitation.manifest == invitation.read(parties.invitation).manifest


def test_an_invitation_of_somebody_else_is_not_removed(parties: Parties) -> None:
    """`invite` into the folder of an owner who has fetched an invitation and done nothing yet."""
    parties.begin()
    shutil.copytree(parties.invitation, parties.folder / "mine" / "invitation")
    stranger = Parties(parties.folder, parties.names)
    stranger.key = lambda name: parties.key(f"other-{name}")  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="exists and is not empty"):
        Coordinator.invite(
            parties.folder / "mine", invitation.read(parties.invitation).recipe, stranger.key("coordinator"),
            public=parties.invitation / "public", seed=parties.folder / "seed", steps=StandIn(),
        )  # fmt: skip
    invitation.read(parties.folder / "mine" / "invitation")


def test_an_add_that_was_killed_shows_everybody(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    round_ = parties.begin(owners=["ada"])
    with monkeypatch.context() as dying:
        dying.setattr(Book, "invite", dies)
        with pytest.raises(Killed):
            round_.add(invited(parties, "ben"), parties.key("coordinator"))
    Coordinator(parties.round_folder, StandIn())
    assert sorted(Book.load(parties.round_folder).state.owners) == ["ada", "ben"]
