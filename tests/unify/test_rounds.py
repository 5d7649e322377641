"""A round with files alone: what is agreed, what is remembered, who is taken; killing anybody changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from round_parties import ROUND, Parties, StandIn, later, make_parties

from cloister.errors import BrokenManifest, FormatVersion, InvalidParameter, PeerTimeout, UsageError, WrongKey
from cloister.unify.artefacts import Refused
from cloister.unify.keys import Key
from cloister.unify.rounds import contribution, invitation
from cloister.unify.rounds import owner as owners
from cloister.unify.rounds import recipe as recipes
from cloister.unify.rounds.coordinator import Coordinator
from cloister.unify.rounds.provenance import PROVENANCE, read_provenance
from cloister.unify.rounds.state import STATE, Book, State


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    return make_parties(tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Killed(BaseException):
    """What no handler of ordinary errors catches."""


def killing(at: str) -> Callable[[str], None]:
    def fail(step: str) -> None:
        if step == at:
            raise Killed

    return fail


# The whole of it ------------------------------------------------------------------------------------------------------


def test_a_round(parties: Parties, tmp_path: Path) -> None:
    round_ = parties.begin(quorum=3)
    assert [round_.book.entry(name).stage for name in parties.names] == ["invited"] * 3
    for name in parties.names:
        made = parties.contribute(name)
        assert Book.load(made.parent).entry(name).sentence() == f"working ({owners.READY})"
        assert round_.receive(made)[1].stage == "received"
    round_.build(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["owners"] == ["ada", "ben", "cyd"]
    found = read_provenance(tmp_path / "model")
    assert sorted(found["owners"]) == ["ada", "ben", "cyd"] and found["terms"] == round_.recipe.terms.digest()
    again = Coordinator(parties.round_folder, StandIn())
    assert [again.book.entry(name).stage for name in parties.names] == ["built"] * 3


def test_what_leaves_is_these_files_and_no_others(parties: Parties) -> None:
    parties.begin()
    assert sorted(contents(parties.contribute("ada"))) == [
        "expert.safetensors",
        "manifest.json",
        "proxies.json",
        "report.json",
    ]


def test_the_number_of_private_examples_does_not_leave(tmp_path: Path) -> None:
    """7919 is in no file that leaves, in no spelling; and nothing has another size because of it."""
    few, many = make_parties(tmp_path / "few", examples=104), make_parties(tmp_path / "many", examples=7919)
    sizes = []
    for parties in (few, many):
        parties.begin()
        sizes.append({name: len(data) for name, data in contents(parties.contribute("ada")).items()})
    made = many.folder / "owners" / "ada" / "contribution"
    spelled = [b"7919", b"7,919", b"1eef", b"1EEF", *(struct.pack(kind, 7919) for kind in ("<I", ">I", "<f", "<d"))]
    for name, data in contents(made).items():
        for spelling in spelled:
            assert spelling not in data, f"{name} holds {spelling!r}"
    for name in ("expert.safetensors", "report.json"):
        assert sizes[0][name] == sizes[1][name]
    assert (many.folder / "ada.txt").read_text().count("\n") == 7919


def test_an_owners_own_files_are_for_itself(parties: Parties) -> None:
    parties.begin()
    own = parties.contribute("ada").parent
    assert (own / STATE).stat().st_mode & 0o077 == 0 and (own / "work").stat().st_mode & 0o077 == 0


# Killed and started again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["choose", "train", "report"])
def test_an_owner_killed_in_a_step(parties: Parties, step: str, tmp_path: Path) -> None:
    parties.begin()
    other = make_parties(tmp_path / "undisturbed")
    other.begin()
    with pytest.raises(Killed):
        parties.contribute("ada", StandIn(killing(step)))
    assert Book.load(parties.folder / "owners" / "ada").entry("ada").stage == "working"
    assert not (parties.folder / "owners" / "ada" / "contribution").exists()
    steps = StandIn()
    made = contents(parties.contribute("ada", steps))
    assert steps.done == ["choose", "train", "report"][["choose", "train", "report"].index(step) :]
    undisturbed = contents(other.contribute("ada"))
    for name in ("proxies.json", "expert.safetensors", "report.json"):
        assert made[name] == undisturbed[name]
    steps = StandIn()
    assert contents(parties.contribute("ada", steps)) == made and steps.done == []


@pytest.mark.parametrize("step", ["choose", "train", "report"])
def test_an_owner_killed_by_the_system(parties: Parties, step: str) -> None:
    """SIGKILL in a process of its own: nothing gets to clean up."""
    parties.begin()
    parties.contribute("ben")  # imports what is needed before the process divides

    def fail(at: str) -> None:
        if at == step:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            parties.contribute("ada", StandIn(fail))
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    round_ = Coordinator(parties.round_folder, StandIn())
    assert round_.receive(parties.contribute("ada"))[1].stage == "received"


def test_a_coordinator_killed_while_it_builds(parties: Parties, tmp_path: Path) -> None:
    round_ = parties.begin()
    for name in parties.names:
        round_.receive(parties.contribute(name))
    with pytest.raises(Killed):
        Coordinator(parties.round_folder, StandIn(killing("build"))).build(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    Coordinator(parties.round_folder, StandIn()).build(tmp_path / "model")
    assert (tmp_path / "model" / PROVENANCE).exists()


def test_a_coordinator_killed_before_it_wrote_down_what_it_took(parties: Parties) -> None:
    round_ = parties.begin()
    before = (parties.round_folder / STATE).read_bytes()
    round_.receive(parties.contribute("ada"))
    (parties.round_folder / STATE).write_bytes(before)
    assert Coordinator(parties.round_folder, StandIn()).book.entry("ada").stage == "received"


# As if it had not been invited ----------------------------------------------------------------------------------------


def test_the_bad_ones_leave_no_trace(tmp_path: Path) -> None:
    """Five invited; one refused, one late, one left, against two invited: the same model, byte for byte."""
    names = ["ada", "ben", "cyd", "dan", "eve"]
    five = make_parties(tmp_path / "five", names)
    round_ = five.begin(quorum=2)
    made = {name: five.contribute(name) for name in names}
    (made["cyd"] / "expert.safetensors").write_bytes(b"spoilt")
    assert round_.receive(made["cyd"])[1].stage == "refused"
    assert round_.receive(made["dan"], at=later())[1].stage == "late"
    assert round_.receive(made["eve"])[1].stage == "received"
    round_.remove("eve")
    for name in ("ben", "ada"):
        assert round_.receive(made[name])[1].stage == "received"
    round_.build(tmp_path / "from-five", at=later())

    two = Parties(five.folder, ["ada", "ben"])
    shutil.rmtree(five.round_folder)
    round_ = two.begin(quorum=2)
    for name in ("ada", "ben"):
        assert round_.receive(made[name])[1].stage == "received"
    round_.build(tmp_path / "from-two")
    assert contents(tmp_path / "from-five") == contents(tmp_path / "from-two")


def test_a_refused_owner_may_send_again(parties: Parties) -> None:
    round_ = parties.begin()
    made = parties.contribute("ada")
    good = (made / "proxies.json").read_bytes()
    (made / "proxies.json").write_bytes(b"{}")
    name, entry = round_.receive(made)
    assert (name, entry.stage) == ("ada", "refused") and entry.reasons
    (made / "proxies.json").write_bytes(good)
    assert round_.receive(made)[1].stage == "received"
    assert round_.receive(made)[1].stage == "received"  # once more changes nothing


def test_a_second_contribution_does_not_replace_the_first(parties: Parties) -> None:
    round_ = parties.begin()
    round_.receive(parties.contribute("ada"))
    parties.private("ada").write_text("other\n")
    with pytest.raises(UsageError, match="was taken already"):
        round_.receive(parties.contribute("ada", reconsider=True))


def test_what_was_taken_is_checked_again_before_it_is_used(parties: Parties, tmp_path: Path) -> None:
    round_ = parties.begin()
    round_.receive(parties.contribute("ada"))
    path = parties.round_folder / "received" / "ada" / "expert.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UsageError, match="was changed after it was taken"):
        round_.build(tmp_path / "model", wait=False)


def test_strangers_do_not_harm_the_invited(parties: Parties) -> None:
    """A folder that says it is ada's, signed by somebody else, must not make ada a refused owner."""
    round_ = parties.begin()
    made = parties.contribute("ada")
    raw = json.loads((made / "manifest.json").read_text())
    forged = shutil.copytree(made, parties.folder / "forged")
    (forged / "manifest.json").write_text(json.dumps({**raw, "signature": "AAAA"}))
    name, entry = round_.receive(forged)
    assert name == "" and "not signed" in entry.reasons[0]
    raw["sender"] = "mallory\x1b[31m"
    (forged / "manifest.json").write_text(json.dumps(raw))
    assert "not invited" in round_.receive(forged)[1].reasons[0]
    assert round_.receive(parties.folder / "nothing")[0] == ""
    assert round_.book.entry("ada").stage == "invited" and len(round_.book.state.strangers) == 3
    assert not any("\x1b" in text for text in round_.book.state.strangers)
    assert round_.receive(made)[1].stage == "received"


# Quorum and deadlines -------------------------------------------------------------------------------------------------


def test_too_few(parties: Parties, tmp_path: Path) -> None:
    round_ = parties.begin(quorum=2)
    round_.receive(parties.contribute("ada"))
    with pytest.raises(PeerTimeout, match="1 of 3"):
        round_.build(tmp_path / "model", at=later())
    assert round_.standing(later()).hopeless


def test_waiting_for_those_who_may_come(parties: Parties, tmp_path: Path) -> None:
    round_ = parties.begin(quorum=2)
    for name in ("ada", "ben"):
        round_.receive(parties.contribute(name))
    with pytest.raises(UsageError, match="cyd may still send"):
        round_.build(tmp_path / "model")
    assert not round_.standing().complete and round_.standing(later()).complete
    round_.build(tmp_path / "model", at=later())
    assert round_.book.entry("cyd").stage == "late"


def test_a_deadline_of_ones_own(parties: Parties) -> None:
    round_ = parties.begin()
    past = datetime.now(UTC) - timedelta(hours=1)
    made = parties.contribute("ada")
    round_.add(recipes.Owner(name="ada", key=parties.key("ada").public.text, deadline=past), parties.key("coordinator"))
    assert round_.receive(made)[1].stage == "late"
    with pytest.raises(PeerTimeout, match="deadline of ada"):
        parties.contribute("ada")
    future = datetime.now(UTC) + timedelta(hours=1)
    round_.add(
        recipes.Owner(name="ada", key=parties.key("ada").public.text, deadline=future), parties.key("coordinator")
    )
    assert round_.receive(parties.contribute("ada"))[1].stage == "received"


def test_why_an_owner_was_refused_is_told_until_it_is_received(parties: Parties) -> None:
    round_ = parties.begin()
    made = {name: parties.contribute(name) for name in ("ada", "ben")}
    for folder in made.values():
        (folder / "expert.safetensors").write_bytes(b"spoilt")
    reasons = round_.receive(made["ada"])[1].reasons
    assert reasons and round_.receive(made["ben"])[1].stage == "refused"
    for _ in range(2):
        assert reasons[0] in " ".join(round_.receive(made["ada"], at=later())[1].reasons)
    round_.book.move("ben", "working", step="training")
    assert round_.book.entry("ben").sentence().startswith("working (training), refused before: ")
    round_.book.move("ben", "uploading", done=1, total=2)
    assert reasons[0] in round_.book.entry("ben").sentence()
    round_.standing(later())
    assert round_.book.entry("ben").stage == "late" and reasons[0] in round_.book.entry("ben").sentence()
    assert reasons[0] in " ".join(round_.receive(made["ben"], at=later())[1].reasons)


# One more, one fewer --------------------------------------------------------------------------------------------------


def test_one_more_owner_later(parties: Parties, tmp_path: Path) -> None:
    round_ = parties.begin(owners=["ada", "ben"], quorum=2)
    for name in ("ada", "ben"):
        round_.receive(parties.contribute(name))
    round_.build(tmp_path / "two")
    with pytest.raises(WrongKey, match="Nobody with this key"):
        parties.contribute("cyd")
    round_.add(recipes.Owner(name="cyd", key=parties.key("cyd").public.text), parties.key("coordinator"))
    round_ = Coordinator(parties.round_folder, StandIn())
    assert round_.receive(parties.contribute("cyd"))[1].stage == "received"
    round_.build(tmp_path / "three", onto=tmp_path / "two")
    assert sorted(read_provenance(tmp_path / "three")["owners"]) == ["ada", "ben", "cyd"]


def test_one_fewer(parties: Parties, tmp_path: Path) -> None:
    round_ = parties.begin()
    for name in parties.names:
        round_.receive(parties.contribute(name))
    round_.remove("ben")
    assert not (parties.round_folder / "received" / "ben").exists()
    with pytest.raises(UsageError, match="has left"):
        round_.receive(parties.folder / "owners" / "ben" / "contribution")
    round_.build(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["owners"] == ["ada", "cyd"]
    with pytest.raises(UsageError, match="Invited are ada"):
        round_.remove("nobody")


# Invitations ----------------------------------------------------------------------------------------------------------


def test_an_invitation_that_was_changed(parties: Parties) -> None:
    parties.begin()
    with (parties.invitation / "public" / "examples.jsonl").open("a") as file:
        file.write('{"id": "trap", "text": "is this yours?"}\n')
    with pytest.raises(Refused, match="invitation is refused"):
        parties.contribute("ada")


def test_another_coordinator(parties: Parties) -> None:
    parties.begin()
    with pytest.raises(WrongKey, match="another coordinator"):
        parties.contribute("ada", coordinator="0" * 64)
    shown = parties.key("coordinator").fingerprint.upper()
    parties.contribute("ada", coordinator=":".join(shown[i : i + 2] for i in range(0, 64, 2)))
    shutil.rmtree(parties.round_folder)
    shutil.rmtree(parties.folder / "keys" / "coordinator")
    parties.begin()
    with pytest.raises(WrongKey, match="another coordinator than before"):
        parties.contribute("ada")


def test_terms_that_changed(parties: Parties) -> None:
    parties.begin()
    parties.contribute("ada")
    shutil.rmtree(parties.round_folder)
    parties.begin(terms={"selection": {"count": 7}})
    with pytest.raises(UsageError, match="terms are not those"):
        parties.contribute("ada")


def test_a_seed_that_is_not_the_recipes(parties: Parties) -> None:
    class Changed(StandIn):
        def fingerprint(self, seed: Path) -> str:
            return "0" * 64

    parties.begin()
    with pytest.raises(UsageError, match="fingerprint"):
        parties.contribute("ada", Changed())


def test_private_examples_that_changed(parties: Parties) -> None:
    parties.begin()
    with pytest.raises(Killed):
        parties.contribute("ada", StandIn(killing("train")))
    parties.private("ada").write_text("something else\n")
    with pytest.raises(UsageError, match="is not what it was"):
        parties.contribute("ada")
    steps = StandIn()
    parties.contribute("ada", steps, reconsider=True)
    assert steps.done == ["choose", "train", "report"]


def test_a_folder_of_another_round(parties: Parties) -> None:
    parties.begin()
    parties.contribute("ada")
    with pytest.raises(UsageError, match="another round or party"):
        owners.begin(
            invitation.read(parties.invitation),
            recipes.Owner(name="ben", key=parties.key("ben").public.text),
            parties.folder / "owners" / "ada",
        )
    with pytest.raises(UsageError, match="owner's folder"):
        Coordinator(parties.folder / "owners" / "ada", StandIn())


# Recipes and states ---------------------------------------------------------------------------------------------------


def fields(parties: Parties) -> dict[str, Any]:
    return parties.begin().recipe.plain()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda raw: raw.update(quorum=4), "the quorum is 4 of 3 owners"),
        (lambda raw: raw.update(quorum=0), "quorum"),
        (lambda raw: raw["owners"].append(raw["owners"][0]), "invited twice"),
        (lambda raw: raw["owners"][0].update(key=raw["owners"][1]["key"]), "same key"),
        (lambda raw: raw["owners"][0].update(key="ssh-rsa AAAA"), "not a party's public key"),
        (lambda raw: raw["owners"][0].update(name="../ada"), "small letters"),
        (lambda raw: raw["owners"][0].update(name="coordinator"), "cannot be called coordinator"),
        (lambda raw: raw["terms"]["router"].update(top_k=2), "top_k 2"),
        (lambda raw: raw["terms"]["task"].update(labels=[]), "need the labels"),
        (lambda raw: raw["terms"]["task"].update(labels=["a", "a"]), "named twice"),
        (lambda raw: raw["terms"]["expert"].update(lr=float("nan")), "expert.lr"),
        (lambda raw: raw["terms"]["expert"].update(examples=7919), "expert.examples"),
        (lambda raw: raw.update(deadline="2026-01-01T00:00:00"), "timezone"),
        (lambda raw: raw.update(round="../x"), "round"),
    ],
)
def test_recipes_that_do_not_fit(parties: Parties, change: Callable[[dict[str, Any]], None], reason: str) -> None:
    raw = fields(parties)
    change(raw)
    with pytest.raises(InvalidParameter, match=reason):
        recipes.make(**raw)


def test_a_recipe_survives_being_written(parties: Parties, tmp_path: Path) -> None:
    recipe = parties.begin().recipe
    recipes.write(tmp_path / "recipe.json", recipe)
    assert recipes.read(tmp_path / "recipe.json") == recipe
    raw = recipe.plain()
    for schema, kind in (("cloister.unify.recipe/1", FormatVersion), (recipes.SCHEMA, BrokenManifest)):
        (tmp_path / "recipe.json").write_text(json.dumps({**raw, "schema": schema, "quorum": "many"}))
        with pytest.raises(kind):
            recipes.read(tmp_path / "recipe.json")
    assert recipes.Recipe.model_json_schema()["properties"]["quorum"]["minimum"] == 1


def test_inviting_changes_the_recipe_and_not_the_terms(parties: Parties) -> None:
    round_ = parties.begin(owners=["ada"])
    terms = round_.recipe.terms.digest()
    round_.add(recipes.Owner(name="ben", key=parties.key("ben").public.text), parties.key("coordinator"))
    assert round_.recipe.terms.digest() == terms and round_.recipe.round == ROUND
    with pytest.raises(UsageError, match="another key"):
        round_.add(recipes.Owner(name="ben", key=parties.key("cyd").public.text), parties.key("coordinator"))


def test_states(tmp_path: Path) -> None:
    book = Book.begin(tmp_path, State("coordinator", ROUND, "coordinator"))
    book.invite("ada")
    book.move("ada", "uploading", done=3, total=9)
    assert Book.load(tmp_path).entry("ada").sentence() == "uploading 3 of 9"
    book.move("ada", "refused", reasons=("one", "two"))
    assert Book.load(tmp_path).entry("ada").sentence() == "refused: one; two"
    book.move("ada", "received", digest="d")
    with pytest.raises(UsageError, match="cannot become"):
        book.move("ada", "working")
    assert Book.load(tmp_path).state == book.state
    with pytest.raises(UsageError, match="holds a round already"):
        Book.begin(tmp_path, State("coordinator", ROUND, "coordinator"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "cloister.unify.state/1"}', '{"schema": "x"}'])
def test_damaged_states(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE).write_text(text)
    with pytest.raises((BrokenManifest, FormatVersion)):
        Book.load(tmp_path)


def test_not_a_rounds_folder(tmp_path: Path) -> None:
    with pytest.raises(BrokenManifest, match="not a round's folder"):
        Book.load(tmp_path)
    with pytest.raises(UsageError, match="not a unified model"):
        read_provenance(tmp_path)


# Keys and reports -----------------------------------------------------------------------------------------------------


def test_keys_that_others_can_read(tmp_path: Path) -> None:
    Key.create(tmp_path)
    (tmp_path / "party-key.pem").chmod(0o644)
    with pytest.raises(BrokenManifest, match="can be read by others"):
        Key.load(tmp_path)


def test_reports_are_bounded(parties: Parties) -> None:
    round_ = parties.begin()
    owner = round_.recipe.owner("ada")
    assert owner is not None
    expected = contribution.expected(round_.recipe, owner, *round_._shapes)
    assert expected.files["report.json"] == 1 << 20 and expected.most < 10 << 20
