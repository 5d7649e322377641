"""All parties on one machine: what was made is never taken for something else, and failures have names and reasons."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from round_parties import Parties, StandIn, make_parties

from cloister.errors import DataError, InvalidParameter, UsageError
from cloister.unify.rounds import recipe as recipes
from cloister.unify.rounds import simulate
from cloister.unify.rounds.provenance import PROVENANCE
from cloister.unify.rounds.state import STATE


class Played:
    """A simulation, and the same command again with something else in it."""

    def __init__(self, parties: Parties, folder: Path, out: Path) -> None:
        self.parties, self.folder, self.out = parties, folder, out
        self.private = {name: parties.private(name) for name in parties.names}

    def __call__(self, out: str, *, steps: StandIn | None = None, **other: Any) -> dict[str, str]:
        steps = steps or StandIn()
        asked: dict[str, Any] = {
            "terms": {"selection": {"count": 20}},
            "task": recipes.Task(kind="choose"),
            "quorum": 2,
        }
        places = {"seed": self.parties.folder / "seed", "public": self.parties.folder / "public.jsonl"}
        asked |= {"names": self.private} | other
        round_ = simulate.prepare(self.folder, **(places | asked), steps=steps)
        return simulate.run(self.folder, round_, asked["names"], self.out / out, steps=steps)


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    return make_parties(tmp_path)


@pytest.fixture
def played(parties: Parties, tmp_path: Path) -> Played:
    return Played(parties, tmp_path / "all", tmp_path)


def test_simulation(played: Played, parties: Parties, tmp_path: Path) -> None:
    assert played("one") == {"ada": "built", "ben": "built", "cyd": "built"}
    again = StandIn()
    assert set(played("same", steps=again).values()) == {"built"} and again.done == ["build"]
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "same" / "model.safetensors"
    ).read_bytes()
    shutil.rmtree(played.folder / "coordinator")
    shutil.rmtree(played.folder / "owners")
    parties.private("ben").unlink()
    told = played("other")
    assert told["ada"] == "built" and "There is no" in told["ben"]
    assert json.loads((tmp_path / "other" / "config.json").read_text())["owners"] == ["ada", "cyd"]


def test_the_same_command_again_takes_the_model_that_is_there(played: Played, tmp_path: Path) -> None:
    played("one", quorum=2)
    book = played.folder / "coordinator" / STATE
    book.write_text(book.read_text().replace('"built"', '"received"'))  # killed before it noted that
    again = StandIn()
    assert played("one", steps=again) == {"ada": "built", "ben": "built", "cyd": "built"} and again.done == []
    made = tmp_path / "one" / PROVENANCE
    about = json.loads(made.read_text())
    for other in ({"owners": {**about["owners"], "ben": "0" * 64}}, {"terms": "0" * 64}):
        made.write_text(json.dumps(about | other))
        with pytest.raises(UsageError, match="exists and is not empty"):
            played("one")


def test_a_simulation_is_not_taken_for_another_one(played: Played, parties: Parties, tmp_path: Path) -> None:
    """What was made without privacy, with other options or of other examples must not pass for what is asked now."""
    played("one")
    private = StandIn()
    private.decisions = "expert epsilon 4"
    with pytest.raises(UsageError, match="What ada contributed was made with other decisions:  instead of exp"):
        played("out", steps=private)
    more = parties.folder / "more.jsonl"
    more.write_text((parties.folder / "public.jsonl").read_text() + '{"id": "new", "text": "new"}\n')
    shutil.copytree(parties.folder / "seed", parties.folder / "retrained")
    (parties.folder / "retrained" / "model.safetensors").write_bytes(b"other weights")
    two = {name: played.private[name] for name in ("ada", "ben")}
    for other, said in (
        ({"terms": {"selection": {"count": 5}}}, "another selection"),
        ({"terms": {"selection": {"count": 20}, "expert": {"steps": 9}}}, "another expert"),
        ({"terms": {"selection": {"count": 20}, "router": {"fallback": True}}}, "another router"),
        ({"task": recipes.Task(kind="classify", labels=("x",))}, "another task"),
        ({"tasks": {"ada": recipes.Task(kind="classify", labels=("x",))}}, "another owner's task or labels"),
        ({"public": more}, "another public"),
        ({"seed": parties.folder / "retrained"}, "another seed"),
        ({"names": two}, "other owners"),
        ({"quorum": 3}, "another quorum"),
    ):
        with pytest.raises(UsageError, match=said):
            played("out", **other)
    with pytest.raises(InvalidParameter, match="count"):
        played("out", terms={"selection": {"count": 0}})
    moved = {**played.private, "cyd": parties.private("ada")}
    with pytest.raises(UsageError, match=r"What cyd contributed was made of other examples than .*ada\.txt"):
        played("out", names=moved)
    assert not (tmp_path / "out").exists() and not (played.folder / ".public").exists()
    assert set(played("two").values()) == {"built"}


def test_a_simulation_says_who_failed_and_why(played: Played, parties: Parties, tmp_path: Path) -> None:
    good = parties.private("ben").read_text()
    parties.private("ben").unlink()
    with pytest.raises(DataError, match=r"2 of 3 owners .* quorum is 3\.\n  - ben: There is no .*ben.txt"):
        played("out", quorum=3)
    assert not (tmp_path / "out").exists()
    # It had chosen already when the training failed; its mended examples begin anew, the others' work stays.
    parties.private("ben").write_text(good + "broken\n")

    def fail(step: str) -> None:
        if step == "train":
            raise DataError("line 31 has no label")

    with pytest.raises(DataError, match="- ben: line 31 has no label"):
        played("out", quorum=3, steps=StandIn(fail))
    parties.private("ben").write_text(good)
    steps = StandIn()
    assert set(played("out", quorum=3, steps=steps).values()) == {"built"}
    assert steps.done == ["choose", "train", "report", "build"]
