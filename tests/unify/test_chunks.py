"""Chunks: out of order, repeated, damaged, interrupted; and never more than one in memory."""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.errors import BrokenManifest, DiskFull, UsageError
from cloister.unify import chunks
from cloister.unify.artefacts import Refused
from cloister.unify.chunks import BadChunk, Index, Place, Receiver, Sender

SMALL = 1000
MOST = 10**6


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(chunks, "SIZE", SMALL)
    yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "a.safetensors").write_bytes(random.Random(1).randbytes(7777))
    (source / "deep" / "b.json").write_bytes(b"{}")
    (source / "empty.txt").touch()
    (source / "exact.txt").write_bytes(b"x" * (2 * SMALL))
    return source


def same(left: Path, right: Path) -> bool:
    def files(root: Path) -> dict[str, bytes]:
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    return files(left) == files(right)


def test_a_whole_folder(folder: Path, tmp_path: Path) -> None:
    sender = Sender(folder)
    assert sender.index.count == 8 + 1 + 2
    receiver = Receiver(tmp_path / "inbox", Index.parse(json.loads(json.dumps(sender.index.plain()))), MOST)
    for place in receiver.missing():
        assert receiver.put(place, sender.get(place))
    receiver.finish(tmp_path / "out")
    assert same(folder, tmp_path / "out") and not (tmp_path / "inbox").exists()


def test_in_any_order_repeated_and_interrupted(folder: Path, tmp_path: Path) -> None:
    sender = Sender(folder)
    places = [*sender.index.places(), *sender.index.places()]
    random.Random(3).shuffle(places)
    receiver = Receiver(tmp_path / "inbox", sender.index, MOST)
    for number, place in enumerate(places):
        receiver.put(place, sender.get(place))
        if number % 3 == 0:  # the process died, another goes on
            resumed = Receiver.resume(tmp_path / "inbox", MOST)
            assert resumed is not None and resumed.received == receiver.received
            receiver = resumed
    assert not list(receiver.missing())
    receiver.finish(tmp_path / "out")
    assert same(folder, tmp_path / "out")


def test_a_damaged_chunk_is_refused_and_asked_for_again(folder: Path, tmp_path: Path) -> None:
    sender = Sender(folder)
    receiver = Receiver(tmp_path / "inbox", sender.index, MOST)
    place = Place("a.safetensors", 3)
    chunk = bytearray(sender.get(place))
    chunk[10] ^= 1
    for wrong in (bytes(chunk), b"", sender.get(place) + b"x", sender.get(Place("a.safetensors", 2))):
        with pytest.raises(BadChunk):
            receiver.put(place, wrong)
    assert place in list(receiver.missing())
    assert receiver.put(place, sender.get(place)) and not receiver.put(place, sender.get(place))
    assert place not in list(receiver.missing())


@pytest.mark.parametrize("place", [Place("a.safetensors", 8), Place("a.safetensors", -1), Place("../x", 0)])
def test_chunks_that_do_not_exist(folder: Path, tmp_path: Path, place: Place) -> None:
    sender = Sender(folder)
    with pytest.raises(UsageError):
        sender.get(place)
    with pytest.raises(BadChunk):
        Receiver(tmp_path / "inbox", sender.index, MOST).put(place, b"x")
    assert not (tmp_path / "x").exists()


def test_what_was_written_down_is_not_trusted_in_the_end(folder: Path, tmp_path: Path) -> None:
    sender = Sender(folder)
    receiver = Receiver(tmp_path / "inbox", sender.index, MOST)
    for place in receiver.missing():
        receiver.put(place, sender.get(place))
    path = tmp_path / "inbox" / "files" / "a.safetensors"
    path.write_bytes(b"\0" * 7777)  # a disk that forgot
    with pytest.raises(BadChunk):
        receiver.finish(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    resumed = Receiver.resume(tmp_path / "inbox", MOST)
    assert resumed is not None and {place.name for place in resumed.missing()} == {"a.safetensors"}
    for place in resumed.missing():
        resumed.put(place, sender.get(place))
    resumed.finish(tmp_path / "out")
    assert same(folder, tmp_path / "out")


def test_a_file_that_vanished_is_asked_for_again(folder: Path, tmp_path: Path) -> None:
    sender = Sender(folder)
    receiver = Receiver(tmp_path / "inbox", sender.index, MOST)
    for place in receiver.missing():
        receiver.put(place, sender.get(place))
    (tmp_path / "inbox" / "files" / "exact.txt").unlink()
    assert [place.name for place in Receiver(tmp_path / "inbox", sender.index, MOST).missing()] == ["exact.txt"] * 2


def test_another_folder_begins_anew(folder: Path, tmp_path: Path) -> None:
    sender = Sender(folder)
    receiver = Receiver(tmp_path / "inbox", sender.index, MOST)
    receiver.put(Place("a.safetensors", 0), sender.get(Place("a.safetensors", 0)))
    (folder / "deep" / "b.json").write_bytes(b"[]")
    assert Receiver(tmp_path / "inbox", Sender(folder).index, MOST).received == 0


def test_more_than_agreed(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="were agreed"):
        Receiver(tmp_path / "inbox", Sender(folder).index, 5000)
    assert not (tmp_path / "inbox").exists()


def test_a_disk_that_is_too_full(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = type("Usage", (), {"free": 5000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(DiskFull):
        Receiver(tmp_path / "inbox", Sender(folder).index, MOST)


def test_not_finished(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="11 chunks are missing"):
        Receiver(tmp_path / "inbox", Sender(folder).index, MOST).finish(tmp_path / "out")


def test_memory_of_one_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of 40 chunks; sender and receiver together never hold more than a few."""
    monkeypatch.setattr(chunks, "SIZE", 1_000_000)
    source = tmp_path / "source"
    source.mkdir()
    with (source / "big.safetensors").open("wb") as file:
        for _ in range(40):
            file.write(random.randbytes(1_000_000))
    tracemalloc.start()
    sender = Sender(source)
    receiver = Receiver(tmp_path / "inbox", sender.index, 10**9)
    for place in receiver.missing():
        receiver.put(place, sender.get(place))
    receiver.finish(tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12_000_000, peak  # two blocks of 4 MB where whole files are hashed


def test_the_size_that_is_agreed_on() -> None:
    import importlib

    assert importlib.import_module("cloister.unify.chunks").SCHEMA == "cloister.unify.chunks/1"
    assert Path(chunks.__file__).read_text().count("SIZE = 8_000_000") == 1


@settings(max_examples=50, deadline=None)
@given(junk=st.binary(max_size=100))
def test_junk_is_no_index(junk: bytes) -> None:
    with pytest.raises((BrokenManifest, Refused)):
        chunks.load_index(junk)


@pytest.mark.parametrize(
    "change",
    [
        {"size": 10**12},
        {"size": -1},
        {"size": 1.5},
        {"chunks": []},
        {"chunks": ["0" * 63] * 8},
        {"chunks": ["\ud800" * 64] * 8},
        {"chunks": ["G" * 64] * 8},
        {"sha256": "\ud800" * 64},
        {"size": 10**400},
        {"size": 1 << 50},
        {"size": True},
        {"sha256": None},
        {"more": 1},
    ],
)
def test_an_index_that_does_not_agree_with_itself(folder: Path, change: dict[str, object]) -> None:
    plain = Sender(folder).index.plain()
    plain["files"]["a.safetensors"].update(change)
    with pytest.raises(Refused):
        Index.parse(plain)


@pytest.mark.parametrize(
    ("file", "below"),
    [("a", "a/b"), ("empty.txt", "empty.txt/b"), ("a", "a/b/c"), ("manifest.json", "manifest.json/x")],
)
def test_an_index_with_a_file_below_a_file(folder: Path, tmp_path: Path, file: str, below: str) -> None:
    """No disk can hold both: it would fail in the middle, at whoever receives it."""
    plain = Sender(folder).index.plain()
    listed = plain["files"]
    listed |= {file: listed["empty.txt"], below: listed["exact.txt"]}
    with pytest.raises(Refused, match="lies below a file"):
        Index.parse(plain)


def test_an_index_of_nothing(folder: Path) -> None:
    with pytest.raises(Refused):
        Index.parse({**Sender(folder).index.plain(), "files": {}})


def test_a_list_is_no_longer_than_what_was_agreed_needs(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A list of a million empty lists is short to send and takes a hundred times as much memory."""
    small = json.dumps(Sender(folder).index.plain()).encode()
    assert chunks.load_index(small, chunks.most_index(MOST)).size == Sender(folder).index.size
    monkeypatch.setattr(chunks, "SIZE", 8_000_000)
    assert chunks.most_index(10**6) < 2_000_000 < chunks.most_index(10**12) < chunks.MOST_INDEX
    with pytest.raises(BrokenManifest, match="more than"):
        chunks.load_index(b"[" + b"[]," * 500_000 + b"[]]", chunks.most_index(10**6))


def test_what_was_received_is_for_oneself(folder: Path, tmp_path: Path) -> None:
    sender = Sender(folder)
    receiver = Receiver(tmp_path / "all" / "inbox", sender.index, MOST)
    for place in receiver.missing():
        receiver.put(place, sender.get(place))
    assert (tmp_path / "all").stat().st_mode & 0o077 == 0
    receiver.finish(tmp_path / "all" / "out")
    assert all(path.stat().st_mode & 0o077 == 0 for path in [tmp_path / "all" / "out", *(tmp_path / "all").rglob("*")])


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", ".ssh", "x.pkl", "a\0"])
def test_an_index_with_a_path_that_leads_elsewhere(folder: Path, name: str) -> None:
    plain = Sender(folder).index.plain()
    plain["files"][name] = plain["files"].pop("a.safetensors")
    with pytest.raises(Refused):
        Index.parse(plain)
