"""An owner's folder: it is for its owner alone, and what is damaged in it is noticed at home, before it is sent."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from round_parties import Parties, StandIn, make_parties

from cloister import storage
from cloister.errors import BrokenManifest
from cloister.unify.artefacts import Refused
from cloister.unify.rounds import recipe as recipes
from cloister.unify.rounds.coordinator import INVITATION, Coordinator
from cloister.unify.rounds.state import Book


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    return make_parties(tmp_path, ["ada", "ben"])


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# Who may read it ------------------------------------------------------------------------------------------------------


def open_to_others(folder: Path) -> list[str]:
    """What others on this machine could read; a folder that is closed hides what is in it."""
    found = []
    for place, folders, names in os.walk(folder):
        closed = [name for name in folders if (Path(place) / name).stat().st_mode & 0o077 == 0]
        folders[:] = [name for name in folders if name not in closed]
        found += [name for name in names if (Path(place) / name).stat().st_mode & 0o044]
    return sorted(found)


def test_a_rounds_folders_are_for_their_party_alone(parties: Parties, tmp_path: Path) -> None:
    """Also where the folder itself was there before, and so stays as open as its user made it."""
    old = os.umask(0o022)
    try:
        parties.round_folder.mkdir()
        (parties.folder / "owners" / "ada").mkdir(parents=True)
        round_ = parties.begin(owners=["ada", "ben"])
        (parties.folder / "owners").chmod(0o755)
        for name in parties.names:
            round_.receive(parties.contribute(name))
        round_.build(tmp_path / "model")
    finally:
        os.umask(old)
    owners = parties.folder / "owners"
    assert open_to_others(owners) == []
    assert (owners / "ada").stat().st_mode & 0o077 == 0o055, "what its user made stays as it was"
    assert (owners / "ben").stat().st_mode & 0o077 == 0
    kept = parties.round_folder / "received" / "ada"
    assert all(path.stat().st_mode & 0o077 == 0 for path in [kept.parent, kept, *kept.rglob("*")])
    invitation = {path.name for path in (parties.round_folder / INVITATION).rglob("*")}
    assert set(open_to_others(parties.round_folder)) <= invitation, "which everybody invited gets"


def test_a_new_rounds_folder_is_for_the_coordinator_alone(parties: Parties) -> None:
    parties.begin()
    assert parties.round_folder.stat().st_mode & 0o077 == 0


# What is damaged ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["expert.safetensors", "proxies.json", "report.json", "manifest.json"])
@pytest.mark.parametrize("damage", [truncated, flipped, Path.unlink])
def test_a_damaged_contribution_is_made_again(parties: Parties, name: str, damage: Callable[[Path], None]) -> None:
    """The same command used to say that it was ready, and the coordinator refused it again and again."""
    round_ = parties.begin()
    made = parties.contribute("ada")
    before = {path.name: path.read_bytes() for path in made.iterdir() if path.name != "manifest.json"}
    damage(made / name)
    steps = StandIn()
    assert parties.contribute("ada", steps) == made and steps.done == [], "from what is there, without training anew"
    assert {path.name: path.read_bytes() for path in made.iterdir() if path.name != "manifest.json"} == before
    assert round_.receive(made)[1].stage == "received"


@pytest.mark.parametrize("name", ["proxies.json", "expert.safetensors", "report.json"])
def test_damaged_work_is_named(parties: Parties, name: str) -> None:
    parties.begin()
    made = parties.contribute("ada")
    path = made.parent / "work" / name
    truncated(path)
    truncated(made / name)
    steps = StandIn()
    with pytest.raises(BrokenManifest, match=f"work/{name} cannot be used") as told:
        parties.contribute("ada", steps)
    assert f"remove {path.parent}" in told.value.advice
    assert steps.done == [], "with noise, what is made again is a second release: nobody does that unasked"
    storage.remove(path.parent)
    steps = StandIn()
    parties.contribute("ada", steps)
    assert steps.done == ["choose", "train", "report"]


@pytest.mark.parametrize("text", ["[1, 2", '{"ids": []}', '"p1"', "[NaN]"])
def test_proxies_that_are_something_else(parties: Parties, text: str) -> None:
    parties.begin()
    made = parties.contribute("ada")
    (made.parent / "work" / "proxies.json").write_text(text)
    (made / "proxies.json").write_text(text)
    with pytest.raises(BrokenManifest, match=r"work/proxies.json cannot be used"):
        parties.contribute("ada")


class Odd(StandIn):
    """An expert that the coordinator would not take."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def train(self, *arguments: Any, **named: Any) -> Mapping[str, Any]:
        found = dict(super().train(*arguments, **named))
        next(iter(found.values()))[0, 0] = self.value
        return found


@pytest.mark.parametrize(
    ("value", "error", "why"),
    [
        (float("nan"), BrokenManifest, "not finite"),
        (1e6, Refused, "a change of 1e"),
        (float("inf"), BrokenManifest, "not finite"),
    ],
)
def test_what_the_coordinator_would_refuse_is_heard_at_home(
    parties: Parties, value: float, error: type[Exception], why: str
) -> None:
    parties.begin()
    for _ in range(2):
        with pytest.raises(error, match=why):
            parties.contribute("ada", Odd(value))
    entry = Book.load(parties.folder / "owners" / "ada").entry("ada")
    assert entry.stage == "working" and entry.step != "the contribution is ready"


def test_ids_that_are_not_public_are_heard_at_home(parties: Parties) -> None:
    parties.begin()
    made = parties.contribute("ada")
    for path in (made.parent / "work" / "proxies.json", made / "proxies.json"):
        path.write_text(json.dumps(["p1", "my own customer"]))
    with pytest.raises(Refused, match="not in the public set"):
        parties.contribute("ada")


# A coordinator's folder -----------------------------------------------------------------------------------------------


def test_add_killed_while_it_replaces_the_invitation(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL between the two renames: the next command finds the old invitation, and says the same once more."""
    parties.begin(owners=["ada"])
    ben = recipes.Owner(name="ben", key=parties.key("ben").public.text)
    child = os.fork()
    if child == 0:
        ordinary = Path.replace

        def replace(self: Path, target: Path) -> Path:
            if Path(target).name == INVITATION:
                os.kill(os.getpid(), signal.SIGKILL)
            return ordinary(self, target)

        monkeypatch.setattr(Path, "replace", replace)
        Coordinator(parties.round_folder, StandIn()).add(ben, parties.key("coordinator"))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not parties.invitation.exists()
    round_ = Coordinator(parties.round_folder, StandIn())
    assert [owner.name for owner in round_.recipe.owners] == ["ada"]
    round_.add(ben, parties.key("coordinator"))
    assert round_.receive(parties.contribute("ben"))[1].stage == "received"
    assert [path.name for path in parties.round_folder.iterdir() if "old" in path.name] == []
