"""The coordinator's loop without Flower: an owner's answer never ends it, and how a round ended can be told again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from round_parties import Parties, StandIn, make_parties

from cloister import storage
from cloister.errors import DiskFull, PeerDied, UsageError
from cloister.progress import SILENT, Progress
from cloister.unify.federation import coordinate
from cloister.unify.federation.coordinate import _Talk, is_built
from cloister.unify.federation.join import _end
from cloister.unify.federation.protocol import OwnerSide, Said
from cloister.unify.rounds.coordinator import Coordinator
from cloister.unify.rounds.state import STATE, Book


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    return make_parties(tmp_path, ["ada", "ben"])


class Line:
    """What `Link` is, with the owners' answers at hand."""

    def __init__(self, owners: dict[str, Any]) -> None:
        self.owners, self.questions = owners, dict[str, Said]()
        self.asked: list[tuple[str, str]] = []

    def check(self) -> None:
        pass

    def door(self) -> tuple[dict[str, int], list[str]]:
        return {}, []

    def online(self) -> set[str]:
        return set(self.owners)

    def ask(self, name: str, question: Said) -> str:
        self.asked.append((name, str(question.what["do"])))
        self.questions[name] = question
        return name

    def answer(self, name: str) -> Said | None:
        answer: Said = self.owners[name](self.questions[name])
        return answer


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinate, "PAUSE", 0.0)
    monkeypatch.setattr(coordinate, "IDLE_PAUSE", 0.0)
    monkeypatch.setattr(coordinate, "LAST_SECONDS", 2.0)


def ready(parties: Parties, name: str) -> OwnerSide:
    side = OwnerSide(parties.folder / "owners" / name)
    parties.contribute(name)
    side.invitation = parties.invitation
    side.ready = True
    return side


@pytest.mark.parametrize("error", [ValueError, OverflowError, RecursionError, UnicodeError, RuntimeError, TypeError])
def test_whatever_an_answer_leads_to_the_others_go_on(
    parties: Parties, quick: None, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Stands for the hostile answer that nobody has thought of."""
    round_ = parties.begin(quorum=1)
    talk = _Talk(round_, ["ada", "ben"], SILENT)
    side = talk.peers["ada"].side

    def heard(said: Said) -> None:
        raise error("something")

    monkeypatch.setattr(side, "heard", heard)
    standing = round_.standing
    monkeypatch.setattr(round_, "standing", lambda: standing(later_when(round_)))
    talk.go(Line({"ada": lambda _: Said({"is": "ready"}), "ben": ready(parties, "ben").answer}))  # type: ignore[arg-type]
    assert round_.book.entry("ben").stage == "received"
    assert round_.book.entry("ada").sentence() == (f"refused: it sent what nothing here expects ({error.__name__})")


def later_when(round_: Coordinator) -> Any:
    """The deadlines pass as soon as ben's contribution is here."""
    from round_parties import later

    return later() if round_.book.entry("ben").stage == "received" else None


@pytest.mark.parametrize("error", [DiskFull("full"), OSError(5, "Input/output error")])
def test_a_disk_that_fails_refuses_nobody(
    parties: Parties, quick: None, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """What came cannot be kept; it is asked for again."""
    round_ = parties.begin(owners=["ben"], quorum=1)
    talk = _Talk(round_, ["ben"], SILENT)
    monkeypatch.setattr(coordinate._Talk, "_wait_longer", lambda *_: None)
    ordinary, failed = storage.require_space, []

    def require_space(path: Path, needed: int) -> None:
        if not failed:
            failed.append(path)
            raise error
        ordinary(path, needed)

    monkeypatch.setattr(storage, "require_space", require_space)
    talk.go(Line({"ben": ready(parties, "ben").answer}))  # type: ignore[arg-type]
    assert failed and round_.book.entry("ben").stage == "received"


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()])
def test_a_check_that_fails_here_refuses_nobody(
    parties: Parties, quick: None, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """What torch says when the coordinator has no memory left says nothing about the owner: it is asked again."""
    round_ = parties.begin(owners=["ben"], quorum=1)
    notes: list[str] = []
    talk = _Talk(round_, ["ben"], Progress())
    monkeypatch.setattr(talk.progress, "note", notes.append)
    monkeypatch.setattr(coordinate, "QUIET_SECONDS", 0.2)
    ordinary, stages = round_.steps.unusable, list[str]()

    def unusable(*given: Any) -> Any:
        stages.append(round_.book.entry("ben").stage)
        if len(stages) == 1:
            raise error
        return ordinary(*given)

    monkeypatch.setattr(round_.steps, "unusable", unusable)
    talk.go(Line({"ben": ready(parties, "ben").answer}))  # type: ignore[arg-type]
    assert stages == ["uploading"] * 2 and round_.book.entry("ben").stage == "received"
    assert any(f"cannot be checked now: {type(error).__name__}" in note for note in notes)


def test_a_superlink_that_died_is_not_an_owners_fault(parties: Parties, quick: None) -> None:
    round_ = parties.begin(quorum=1)

    def gone(_: Said) -> Said:
        raise PeerDied("gone")

    with pytest.raises(PeerDied):
        _Talk(round_, ["ada", "ben"], SILENT).go(Line({"ada": gone}))  # type: ignore[arg-type]
    assert round_.book.entry("ada").stage == "invited"


# Once more when the model is there ------------------------------------------------------------------------------------


def built(parties: Parties, out: Path) -> Coordinator:
    round_ = parties.begin(quorum=2)
    for name in parties.names:
        round_.receive(parties.contribute(name))
    round_.build(out)
    return round_


def test_owners_hear_how_a_round_ended_that_is_built(parties: Parties, quick: None, tmp_path: Path) -> None:
    """An owner whose line broke before it heard: the same command tells it, and builds nothing again."""
    built(parties, tmp_path / "model")
    round_ = Coordinator(parties.round_folder, StandIn())
    assert is_built(round_, tmp_path / "model")
    side = ready(parties, "ada")
    line = Line({"ada": side.answer})
    _Talk(round_, ["ada", "ben"], SILENT).go(line)  # type: ignore[arg-type]
    assert line.asked[-1] == ("ada", "verdict")
    assert side.verdict is not None and side.verdict.what["stage"] == "built"
    _end(side, side.folder)
    assert Book.load(side.folder).entry("ada").stage == "received"


def test_a_run_that_was_killed_before_it_noted_that_it_had_built(parties: Parties, tmp_path: Path) -> None:
    built(parties, tmp_path / "model")
    path = parties.round_folder / STATE
    path.write_text(path.read_text().replace('"built"', '"received"'))
    round_ = Coordinator(parties.round_folder, StandIn())
    assert is_built(round_, tmp_path / "model")
    assert [round_.book.entry(name).stage for name in parties.names] == ["built"] * 2


def test_a_folder_that_is_something_else_is_refused_before_anybody_waits(parties: Parties, tmp_path: Path) -> None:
    round_ = parties.begin(quorum=1)
    out = tmp_path / "model"
    assert not is_built(round_, out)
    out.mkdir()
    assert not is_built(round_, out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not the model of the owners whose contributions are here; ada, ben may"):
        is_built(round_, out)
    storage.remove(out)
    for name in parties.names:
        round_.receive(parties.contribute(name))
    round_.build(out)
    round_.remove("ben")
    with pytest.raises(UsageError, match="is not the model"):
        is_built(round_, out)
