"""What coordinator and owner say to each other, without anything that carries it: odd answers, lost ones, cheats."""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from round_parties import Parties, StandIn, later, make_parties

from cloister.errors import CloisterError, DiskFull, ProtocolViolation
from cloister.progress import SILENT
from cloister.unify.chunks import SCHEMA, SIZE, Index, Sender
from cloister.unify.federation.protocol import CoordinatorSide, OwnerSide, Said, places
from cloister.unify.rounds.coordinator import Coordinator


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    return make_parties(tmp_path, ["ada", "ben"])


class Talk:
    """A coordinator and ada, message by message."""

    def __init__(self, parties: Parties) -> None:
        self.parties, self.round = parties, Coordinator(parties.round_folder, StandIn())
        self.index: Index = Sender(parties.invitation).index
        self.coordinator = CoordinatorSide(self.round, "ada")
        self.owner = OwnerSide(parties.folder / "owners" / "ada")
        self.last: Said | None = None

    def step(self) -> Said:
        """One question, its answer, and what became of it."""
        question = self.coordinator.question(self.index, self.last)
        self.last = self.owner.answer(question)
        self.coordinator.heard(self.last)
        return question

    def until(self, done: Any, most: int = 60) -> list[str]:
        asked = []
        while not done():
            asked.append(str(self.step().what["do"]))
            assert len(asked) < most, asked
        return asked

    @property
    def stage(self) -> str:
        return self.round.book.entry("ada").stage

    def contribute(self, **more: Any) -> None:
        from cloister.unify.rounds import owner

        owner.contribute(
            self.owner.invitation,
            self.parties.private("ada"),
            self.owner.folder,
            key=self.parties.key("ada"),
            steps=StandIn(),
            **more,
        )
        self.owner.ready = True


@pytest.fixture
def talk(parties: Parties) -> Talk:
    parties.begin()
    return Talk(parties)


def test_from_the_invitation_to_the_verdict(talk: Talk) -> None:
    asked = talk.until(lambda: talk.owner.invited)
    assert asked[:2] == ["hello", "offer"] and set(asked[2:]) == {"take"}
    talk.step()
    assert talk.stage == "working"
    talk.contribute()
    asked = talk.until(lambda: talk.owner.verdict)
    assert "index" in asked and "give" in asked and talk.stage == "received" and talk.coordinator.done
    assert talk.owner.verdict is not None and talk.owner.verdict.what["stage"] == "received"


def test_an_owner_that_dies_in_the_middle_of_either_way(talk: Talk) -> None:
    """A new process knows nothing of what was said; what has arrived is on its disk."""
    talk.until(lambda: talk.last is not None and talk.last.what.get("missing"))
    talk.step()
    talk.owner, talk.last = OwnerSide(talk.owner.folder), None
    talk.coordinator.forget()
    talk.until(lambda: talk.owner.invited)
    talk.contribute()
    talk.until(lambda: talk.stage == "uploading" and talk.round.book.entry("ada").done)
    before = talk.round.book.entry("ada").done
    talk.owner, talk.last = OwnerSide(talk.owner.folder), None
    talk.owner.ready = True
    talk.coordinator.forget()
    asked = talk.until(lambda: talk.owner.verdict)
    assert talk.stage == "received" and asked.count("give") == 4 - before


def test_a_coordinator_that_dies_in_the_middle_of_either_way(talk: Talk) -> None:
    talk.until(lambda: talk.last is not None and talk.last.what.get("missing"))
    other = Talk(talk.parties)
    other.owner = talk.owner
    other.until(lambda: other.owner.invited)
    other.contribute()
    other.until(lambda: other.stage == "uploading" and other.round.book.entry("ada").done)
    third = Talk(talk.parties)
    third.owner = other.owner
    third.until(lambda: third.owner.verdict)
    assert third.stage == "received"


def test_an_invitation_that_changes_on_its_way(talk: Talk) -> None:
    """Another owner is added while ada fetches the invitation: it gets the new one whole."""
    from cloister.unify.rounds.recipe import Owner

    talk.until(lambda: talk.last is not None and talk.last.what.get("missing"))
    talk.step()
    talk.round.add(Owner(name="cyd", key=talk.parties.key("cyd").public.text), talk.parties.key("coordinator"))
    other = Talk(talk.parties)
    other.owner = talk.owner
    other.until(lambda: other.owner.invited)
    other.contribute()
    other.until(lambda: other.owner.verdict)
    assert other.stage == "received"


def test_a_refused_owner_hears_why_once_and_may_mend_it(talk: Talk) -> None:
    talk.until(lambda: talk.owner.invited)
    talk.contribute()
    good = (talk.owner.made / "proxies.json").read_bytes()
    (talk.owner.made / "proxies.json").write_bytes(b"{}")
    talk.until(lambda: talk.owner.verdict)
    assert talk.stage == "refused" and talk.owner.verdict is not None
    assert "proxies.json" in " ".join(talk.owner.verdict.what["reasons"])
    assert {str(talk.step().what["do"]) for _ in range(5)} == {"hello"}, "it is not asked for the same again"
    (talk.owner.made / "proxies.json").write_bytes(good)
    talk.owner, talk.last = OwnerSide(talk.owner.folder), None
    talk.owner.ready = True
    talk.coordinator.forget()
    talk.until(lambda: talk.owner.verdict)
    assert talk.stage == "received"


def test_a_contribution_that_is_larger_than_agreed(talk: Talk) -> None:
    """Refused by its list alone: not a byte of it is taken."""
    talk.until(lambda: talk.owner.invited)
    talk.contribute()
    with (talk.owner.made / "expert.safetensors").open("ab") as file:
        file.truncate(50_000_000)
    talk.until(lambda: talk.owner.verdict)
    assert talk.stage == "refused" and "at most" in str(talk.round.book.entry("ada").reasons)
    assert not list((talk.coordinator.inbox).rglob("expert.safetensors"))


def test_an_owner_that_is_late_is_told(talk: Talk) -> None:
    talk.until(lambda: talk.owner.invited)
    talk.step()
    talk.round.standing(later())
    asked = talk.until(lambda: talk.owner.verdict)
    assert asked[-1] == "verdict" and talk.owner.verdict is not None
    assert talk.owner.verdict.what["stage"] == "late" and talk.owner.verdict.what["reasons"] == ["it was working"]


def test_a_late_owner_gets_another_deadline(parties: Parties) -> None:
    """It keeps the invitation with the old deadline; only the coordinator knows the new one."""
    from cloister.unify.federation.join import _Work
    from cloister.unify.rounds.recipe import Owner
    from cloister.unify.rounds.state import Book, now

    parties.begin(days=-1)
    talk = Talk(parties)
    talk.until(lambda: talk.owner.invited)
    talk.round.standing()
    assert talk.stage == "late"
    until = now() + timedelta(days=3)
    talk.round.add(Owner(name="ada", key=parties.key("ada").public.text, deadline=until), parties.key("coordinator"))
    again = Talk(parties)  # both commands are started again
    work = _Work(
        again.owner, parties.private("ada"), again.owner.folder, parties.key("ada"), StandIn(), "", False, SILENT
    )
    work.start()
    work.join(0.5)
    assert work.is_alive() and not (again.owner.folder / "work").exists(), "nothing is trained before somebody asks"
    again.step()
    work.join(20)
    assert again.owner.problem is None and again.owner.ready
    again.until(lambda: again.owner.verdict)
    assert again.stage == "received" and Book.load(again.owner.folder).entry("ada").stage == "working"


def test_a_finally_late_owner_does_nothing_before_it_hears_so(parties: Parties) -> None:
    """The first question says that it is not awaited."""
    from cloister.unify.federation.join import _Work

    parties.begin(days=-1)
    talk = Talk(parties)
    talk.until(lambda: talk.owner.invited)
    again = Talk(parties)  # the owner comes anew; nobody has looked at deadlines since
    steps = StandIn()
    work = _Work(again.owner, parties.private("ada"), again.owner.folder, parties.key("ada"), steps, "", False, SILENT)
    work.start()
    assert again.step().what == {"do": "hello", "awaited": False}
    again.round.standing()
    again.until(lambda: again.owner.verdict)
    work.join(0.6)
    assert again.owner.verdict is not None and again.owner.verdict.what["stage"] == "late"
    assert work.is_alive() and steps.done == [] and not (again.owner.folder / "work").exists()
    again.owner.awaited = True  # lets the thread end
    work.join(20)


def test_who_is_awaited_is_said_each_time(talk: Talk) -> None:
    from cloister.unify.rounds.recipe import Owner
    from cloister.unify.rounds.state import now

    assert talk.step().what == {"do": "hello", "awaited": True} and talk.owner.awaited
    talk.until(lambda: talk.owner.invited)
    over = Owner(name="ada", key=talk.parties.key("ada").public.text, deadline=now() - timedelta(seconds=1))
    talk.round.add(over, talk.parties.key("coordinator"))
    talk.step()
    assert not talk.owner.awaited
    talk.owner.answer(Said({"do": "hello"}))
    assert talk.owner.awaited, "a coordinator that does not say has nothing against it"


def test_an_owner_without_another_deadline_is_told(parties: Parties) -> None:
    from cloister.errors import PeerTimeout
    from cloister.unify.federation.join import _end

    parties.begin(days=-1)
    talk = Talk(parties)
    talk.until(lambda: talk.owner.invited)
    talk.round.standing()
    talk.last = None
    talk.until(lambda: talk.owner.verdict)
    with pytest.raises(PeerTimeout, match="after the deadline") as told:
        _end(talk.owner, talk.owner.folder)
    assert "cloister unify add" in told.value.advice and "run the same again" in told.value.advice


def test_what_fails_at_an_owner_is_not_told_in_words(talk: Talk) -> None:
    talk.until(lambda: talk.owner.invited)
    talk.owner.failed = "bad_data"
    talk.step()
    assert talk.last is not None and talk.last.what == {"is": "failed", "why": "bad_data"}
    assert talk.round.book.entry("ada").sentence() == "working (stopped at the owner's: bad_data)"


@pytest.mark.parametrize(
    "answer",
    [
        Said({"is": "ready"}, (b"{",)),
        Said({"is": "ready"}, (json.dumps({"schema": "x"}).encode(),)),
        Said({"is": "ready"}, (b"[" * 100_000,)),
        Said({"is": "inviting", "missing": [["../../etc/passwd", 0]]}),
        Said({"is": "inviting", "missing": [["recipe.json", -1]]}),
        Said({"is": "inviting", "missing": [["recipe.json", 10**30]]}),
        Said({"is": "inviting", "missing": "all"}),
        Said({"is": "inviting", "missing": [["recipe.json", 0]] * 1000}),
    ],
)
def test_odd_answers_are_held_against_their_owner_alone(talk: Talk, answer: Said) -> None:
    try:
        talk.coordinator._offered = True
        talk.coordinator.heard(answer)
        question = talk.coordinator.question(talk.index, answer)
    except CloisterError:
        return  # whoever carries messages writes it down as refused
    assert talk.stage == "refused" and question.what["do"] == "verdict"
    assert talk.round.book.entry("ben").stage == "invited"


def listing(files: object) -> Said:
    """An answer with a list of chunks."""
    return Said({"is": "ready"}, (json.dumps({"schema": SCHEMA, "chunk": SIZE, "files": files}).encode(),))


HASH = hashlib.sha256(b"x").hexdigest()
ONE = {"size": 1, "sha256": HASH, "chunks": [HASH]}
NONE = {"size": 0, "sha256": hashlib.sha256(b"").hexdigest(), "chunks": []}


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"a": ONE, "a/b": ONE},
        {"a": NONE, "a/b": ONE},
        {"manifest.json": ONE, "manifest.json/x": ONE},
        {"a": {**ONE, "sha256": "\ud800" * 64}},
        {"a": {**ONE, "chunks": ["\ud800" * 64]}},
        {"a": {**ONE, "size": 10**400}},
        {"a": {**ONE, "size": -(10**400)}},
    ],
)
def test_a_hostile_list_is_held_against_its_owner_alone(talk: Talk, files: dict[str, Any]) -> None:
    """Each of these would end a coordinator that believes it, for all owners and again at every start."""
    talk.coordinator.heard(listing(files))
    places_ = [[name, 0] for name in files]
    talk.coordinator.heard(Said({"is": "ready", "places": places_}, (b"x",) * len(places_)))
    assert talk.stage == "refused" and talk.round.book.entry("ben").stage == "invited"
    assert Coordinator(talk.parties.round_folder, StandIn()).book.entry("ada").stage == "refused"
    talk.coordinator.forget()
    talk.until(lambda: talk.owner.invited)
    talk.contribute()
    talk.until(lambda: talk.stage == "received")  # it may mend it


NAMES = st.sampled_from(
    ["a", "a/b", "a/b/c", "b", "manifest.json", "manifest.json/a", "A", "..", "a.pkl", "\ud800", ""]
)
HASHES = st.sampled_from([HASH, NONE["sha256"], "\ud800" * 64, "G" * 64, "", None])
SIZES = st.sampled_from([0, 1, -1, 2, SIZE, SIZE + 1, 1 << 50, 10**400, 1.5, True, None])
FILES = st.fixed_dictionaries({"size": SIZES, "sha256": HASHES, "chunks": st.lists(HASHES, max_size=2)})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.dictionaries(NAMES, st.one_of(FILES, st.just(ONE), st.just(NONE)), max_size=4), data=st.data())
def test_no_list_and_no_chunk_ends_a_coordinator(talk: Talk, files: dict[str, Any], data: st.DataObject) -> None:
    """Whatever is wrong with them is a reason to refuse this owner, or chunks that do not count."""
    talk.coordinator.heard(listing(files))
    for _ in range(2):
        asked = data.draw(st.lists(st.tuples(NAMES, st.integers(-1, 2)), max_size=4))
        talk.coordinator.heard(Said({"is": "ready", "places": [list(one) for one in asked]}, (b"x",) * len(asked)))
    talk.coordinator.forget()
    assert talk.stage in ("invited", "uploading", "refused")


def test_a_full_disk_is_not_an_owners_fault(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    from cloister import storage

    talk.until(lambda: talk.owner.invited)
    talk.contribute()

    def full(path: Path, needed: int) -> None:
        raise DiskFull("no space")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "require_space", full)
        with pytest.raises(DiskFull):
            talk.until(lambda: talk.owner.verdict)
    assert talk.stage == "working", "it is not refused for it"
    talk.last = None
    talk.until(lambda: talk.owner.verdict)
    assert talk.stage == "received"


def test_odd_answers_while_it_sends(talk: Talk) -> None:
    """Chunks that nobody asked for, of other contents, too many: none of them counts."""
    talk.until(lambda: talk.owner.invited)
    talk.contribute()
    talk.until(lambda: talk.stage == "uploading")
    done = talk.round.book.entry("ada").done
    for answer in (
        Said({"is": "ready", "places": [["expert.safetensors", 0]]}, (b"spoilt",)),
        Said({"is": "ready", "places": [["expert.safetensors", 7]]}, (b"spoilt",)),
        Said({"is": "ready", "places": []}, (b"spoilt",) * 10),
    ):
        talk.coordinator.heard(answer)
        assert talk.round.book.entry("ada").done == done
    talk.last = Said({"is": "ready"})
    talk.until(lambda: talk.owner.verdict)
    assert talk.stage == "received"


@pytest.mark.parametrize(
    "question",
    [
        {"do": "give", "places": [["../work/proxies.json", 0]]},
        {"do": "give", "places": [["../../../ada.txt", 0]]},
        {"do": "give", "places": [["/etc/passwd", 0]]},
        {"do": "give", "places": "all"},
        {"do": "run", "code": "import os"},
        {"do": "offer"},
        {"do": ["index"]},
        {},
    ],
)
def test_a_curious_coordinator_gets_the_contribution_and_nothing_else(talk: Talk, question: dict[str, Any]) -> None:
    talk.until(lambda: talk.owner.invited)
    talk.contribute()
    try:
        answer = talk.owner.answer(Said(question))
    except CloisterError:
        return
    assert answer.data == () and answer.what == {"is": "ready"}


def test_nothing_is_given_before_it_is_ready(talk: Talk) -> None:
    talk.until(lambda: talk.owner.invited)
    talk.contribute()
    talk.owner.ready = False
    for question in ({"do": "index"}, {"do": "give", "places": [["report.json", 0]]}):
        assert talk.owner.answer(Said(question)) == Said({"is": "working"})


def test_an_invitation_is_not_replaced(talk: Talk) -> None:
    talk.until(lambda: talk.owner.invited)
    before = (talk.owner.invitation / "recipe.json").read_bytes()
    answer = talk.owner.answer(Said({"do": "offer"}, (json.dumps(talk.index.plain()).encode(),)))
    assert answer.what == {"is": "working"} and (talk.owner.invitation / "recipe.json").read_bytes() == before


def test_messages_that_are_none() -> None:
    for text in ("", "[]", "{", '{"a": NaN}', '{"a": 1, "a": 2}', "x" * (2 << 20)):
        with pytest.raises(ProtocolViolation):
            Said.parse(text)
    for raw in (None, [1], [["a"]], [["a", "b"]], [["a", True]], [[1, 1]], [["a", 1]] * 5):
        with pytest.raises(ProtocolViolation):
            places(raw)
