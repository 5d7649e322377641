"""Artefacts: hostile ones by name, each refused with its reason, and several reasons at once."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_parties import Parties, StandIn, make_parties
from safetensors.numpy import load_file, save_file

from cloister.errors import UsageError
from cloister.unify import artefacts, tensors
from cloister.unify.artefacts import File, Label, Manifest, Refused
from cloister.unify.keys import Key
from cloister.unify.rounds import contribution
from cloister.unify.rounds.coordinator import Coordinator

EXPERT, PROXIES = contribution.EXPERT, contribution.PROXIES


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Parties, Coordinator, Path]:
    parties = make_parties(tmp_path_factory.mktemp("parties"))
    round_ = parties.begin()
    return parties, round_, parties.contribute("ada")


@pytest.fixture
def good(made: tuple[Parties, Coordinator, Path], tmp_path: Path) -> Path:
    return shutil.copytree(made[2], tmp_path / "contribution")


def reasons(made: tuple[Parties, Coordinator, Path], folder: Path, owner: str = "ada") -> list[str]:
    _, round_, _ = made
    invited = round_.recipe.owner(owner)
    assert invited is not None
    try:
        contribution.check(folder, round_.recipe, invited, *round_._shapes, round_._public_ids, lambda _: [])
    except Refused as refused:
        return refused.reasons
    return []


def sign(folder: Path, key: Key, change: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
    """A manifest that fits the files as they are now, signed by an owner who means no good."""
    raw = json.loads((folder / artefacts.MANIFEST).read_text())
    names = sorted(artefacts._names(folder))
    raw["files"] = {}
    for name in names:
        if name != artefacts.MANIFEST:
            size, digest = artefacts._measure(folder / name)
            raw["files"][name] = {"size": size, "sha256": digest}
    change(raw)
    label = Label(raw["purpose"], raw["round"], raw["terms"], raw["sender"])
    files = {name: File(about["size"], about["sha256"]) for name, about in raw["files"].items()}
    raw["signature"] = base64.b64encode(key.sign(Manifest(label, files).message())).decode()
    (folder / artefacts.MANIFEST).write_text(json.dumps(raw))


def sign_as_it_is(folder: Path, key: Key) -> None:
    """A right signature under whatever the manifest says, which the reader need not be able to read."""
    raw = json.loads((folder / artefacts.MANIFEST).read_text())
    files = {name: File(about["size"], about["sha256"]) for name, about in raw["files"].items()}
    unsigned = Manifest(Label(raw["purpose"], raw["round"], raw["terms"], raw["sender"]), files)
    signed = Manifest(unsigned.label, files, key.sign(unsigned.message()))
    (folder / artefacts.MANIFEST).write_text(signed.text())


def header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header of a safetensors file."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    raw = json.loads(data[8 : 8 + length])
    change(raw)
    new = json.dumps(raw).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + data[8 + length :])


def test_a_good_one_is_taken(made: tuple[Parties, Coordinator, Path], good: Path) -> None:
    assert reasons(made, good) == []


def test_the_manifest_is_as_documented(good: Path) -> None:
    raw = json.loads((good / artefacts.MANIFEST).read_text())
    assert raw["schema"] == "cloister.unify.artefact/1" and raw["purpose"] == "contribution" and raw["sender"] == "ada"
    assert set(raw["files"]) == {"proxies.json", "expert.safetensors", "report.json"}


# What happens on the way: nobody has signed it ------------------------------------------------------------------------


def truncated(folder: Path) -> None:
    path = folder / EXPERT
    path.write_bytes(path.read_bytes()[:-5])


def flipped_bit(folder: Path) -> None:
    data = bytearray((folder / EXPERT).read_bytes())
    data[-3] ^= 4
    (folder / EXPERT).write_bytes(data)


def extra_file(folder: Path) -> None:
    (folder / "notes.txt").write_text("hello")


def extra_folder_file(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "notes.txt").write_text("hello")


def symlink(folder: Path) -> None:
    (folder / EXPERT).unlink()
    (folder / EXPERT).symlink_to("/etc/passwd")


def linked_folder(folder: Path) -> None:
    (folder / "deep").symlink_to("/etc")


def pipe(folder: Path) -> None:
    (folder / EXPERT).unlink()
    os.mkfifo(folder / EXPERT)


def no_manifest(folder: Path) -> None:
    (folder / artefacts.MANIFEST).unlink()


def manifest_is_no_json(folder: Path) -> None:
    (folder / artefacts.MANIFEST).write_text("{")


def manifest_is_deep(folder: Path) -> None:
    (folder / artefacts.MANIFEST).write_text("[" * 100_000)


def manifest_is_huge(folder: Path) -> None:
    (folder / artefacts.MANIFEST).write_text(" " * (artefacts.MOST_MANIFEST + 1))


def manifest_has_doubled_names(folder: Path) -> None:
    text = (folder / artefacts.MANIFEST).read_text()
    (folder / artefacts.MANIFEST).write_text(text.replace('"purpose"', '"sender": "eve", "purpose"'))


def signature_of_another_text(folder: Path) -> None:
    path = folder / artefacts.MANIFEST
    raw = json.loads(path.read_text())
    raw["files"][EXPERT]["sha256"] = "0" * 64
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (truncated, "bytes, the manifest says"),
        (flipped_bit, "does not have the SHA-256"),
        (extra_file, "notes.txt is not in the manifest"),
        (extra_folder_file, "deep/notes.txt is not in the manifest"),
        (symlink, "is a link"),
        (linked_folder, "deep is a link"),
        (pipe, "neither a file nor a folder"),
        (no_manifest, "is missing"),
        (manifest_is_no_json, "not JSON"),
        (manifest_is_deep, "nested too deep"),
        (manifest_is_huge, "more than"),
        (manifest_has_doubled_names, "occurs twice"),
        (signature_of_another_text, "not signed with the key of 'ada'"),
    ],
)
def test_damaged_on_the_way(
    made: tuple[Parties, Coordinator, Path], good: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    spoil(good)
    found = reasons(made, good)
    assert any(reason in text for text in found), found


# What an owner does who means no good: it is all signed ---------------------------------------------------------------


def tensors_of(folder: Path) -> dict[str, Any]:
    return load_file(folder / EXPERT)


def wrong_shape(folder: Path) -> None:
    values = tensors_of(folder)
    values["layer.0.up.weight"] = values["layer.0.up.weight"].T.copy()
    save_file(values, folder / EXPERT)


def missing_tensor(folder: Path) -> None:
    values = tensors_of(folder)
    del values["layer.1.up.weight"]
    save_file(values, folder / EXPERT)


def unknown_tensor(folder: Path) -> None:
    save_file({**tensors_of(folder), "embeddings\x1b[2J": np.zeros(3, np.float32)}, folder / EXPERT)


def integers(folder: Path) -> None:
    save_file({name: value.astype(np.int32) for name, value in tensors_of(folder).items()}, folder / EXPERT)


def not_a_number(folder: Path) -> None:
    values = tensors_of(folder)
    values["layer.1.down.weight"][3, 3] = np.nan
    save_file(values, folder / EXPERT)


def infinity(folder: Path) -> None:
    values = tensors_of(folder)
    values["layer.1.down.weight"][0, 0] = -np.inf
    save_file(values, folder / EXPERT)


def metadata(folder: Path) -> None:
    save_file(tensors_of(folder), folder / EXPERT, metadata={"examples": "7919"})


def huge_header(folder: Path) -> None:
    (folder / EXPERT).write_bytes(struct.pack("<Q", 1 << 62) + b"{}")


def long_header(folder: Path) -> None:
    header(folder / EXPERT, lambda raw: raw.update({"x" * 8000: raw["layer.0.up.weight"]}))


def header_is_a_list(folder: Path) -> None:
    (folder / EXPERT).write_bytes(struct.pack("<Q", 2) + b"[]")


def overlapping(folder: Path) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["layer.0.up.weight"]["data_offsets"] = raw["layer.1.up.weight"]["data_offsets"]

    header(folder / EXPERT, change)


def gap_behind(folder: Path) -> None:
    with (folder / EXPERT).open("ab") as file:
        file.write(b"secret")


def too_large(folder: Path) -> None:
    with (folder / EXPERT).open("ab") as file:
        file.truncate(1 << 24)


def doubled_ids(folder: Path) -> None:
    raw = json.loads((folder / PROXIES).read_text())
    raw["ids"][1] = raw["ids"][0]
    (folder / PROXIES).write_text(json.dumps(raw))


def unknown_ids(folder: Path) -> None:
    raw = json.loads((folder / PROXIES).read_text())
    raw["ids"][4] = "ada 3"
    (folder / PROXIES).write_text(json.dumps(raw))


def too_many_ids(folder: Path) -> None:
    raw = json.loads((folder / PROXIES).read_text())
    raw["ids"] = [f"p{i}" for i in range(100)]
    (folder / PROXIES).write_text(json.dumps(raw))


def no_ids(folder: Path) -> None:
    (folder / PROXIES).write_text(json.dumps({"schema": contribution.PROXIES_SCHEMA, "ids": []}))


def ids_are_numbers(folder: Path) -> None:
    (folder / PROXIES).write_text(json.dumps({"schema": contribution.PROXIES_SCHEMA, "ids": [1, 2]}))


def a_pickle(folder: Path) -> None:
    (folder / "expert.pkl").write_bytes(pickle.dumps({"a": 1}))


def a_pickle_called_safetensors(folder: Path) -> None:
    (folder / EXPERT).write_bytes(pickle.dumps({"a": 1}))


def unasked_routing_vectors(folder: Path) -> None:
    save_file({"layer.0": np.zeros(8, np.float32)}, folder / contribution.ROUTING)


def no_report(folder: Path) -> None:
    (folder / contribution.REPORT).unlink()


def report_is_not_one(folder: Path) -> None:
    (folder / contribution.REPORT).write_text('{"schema": "x", "value": NaN}')


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (wrong_shape, "layer.0.up.weight has shape [16, 8], the seed's is [8, 16]"),
        (missing_tensor, "layer.1.up.weight is missing"),
        (unknown_tensor, "does not belong in it"),
        (integers, "has type I32"),
        (not_a_number, "layer.1.down.weight has values that are not finite"),
        (infinity, "layer.1.down.weight has values that are not finite"),
        (metadata, "carries metadata"),
        (huge_header, "truncated or not a safetensors file"),
        (long_header, "were agreed"),
        (header_is_a_list, "not an object"),
        (overlapping, "does not begin where"),
        (gap_behind, "its tensors need"),
        (too_large, "were agreed"),
        (doubled_ids, "1 ids are named again"),
        (unknown_ids, "1 ids are not in the public set"),
        (too_many_ids, "1 to 20 were agreed"),
        (no_ids, "has 0 ids"),
        (ids_are_numbers, "not a list of texts"),
        (a_pickle, "could hold code"),
        (a_pickle_called_safetensors, "safetensors"),
        (unasked_routing_vectors, "routing.safetensors does not belong in it"),
        (no_report, "report.json is missing"),
        (report_is_not_one, "report.json"),
    ],
)
def test_signed_and_hostile(
    made: tuple[Parties, Coordinator, Path], good: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    spoil(good)
    sign(good, made[0].key("ada"))
    found = reasons(made, good)
    assert any(reason in text for text in found), found
    assert not any("\x1b" in text for text in found)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("round", "f" * 32, "it belongs to round"),
        ("terms", "f" * 64, "other terms"),
        ("sender", "ben", "it is from 'ben', not from 'ada'"),
        ("purpose", "invitation", "it is an invitation, not a contribution"),
    ],
)
def test_another_label(
    made: tuple[Parties, Coordinator, Path], good: Path, field: str, value: str, reason: str
) -> None:
    sign(good, made[0].key("ada"), lambda raw: raw.update({field: value}))
    assert any(reason in text for text in reasons(made, good))


def test_another_owners_name(made: tuple[Parties, Coordinator, Path], good: Path) -> None:
    """ben sends ada's artefact, or signs one of his own with ada's name: neither is taken for ada's."""
    sign(good, made[0].key("ben"))
    assert any("not signed with the key of 'ada'" in text for text in reasons(made, good))
    assert any("not signed with the key of 'ben'" in text for text in reasons(made, made[2], owner="ben"))


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/../b", "..", ".hidden", "a//b", "a\\b", "a\0b", "é", ""])
def test_paths_that_lead_elsewhere(made: tuple[Parties, Coordinator, Path], good: Path, name: str) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["files"][name] = {"size": 1, "sha256": "0" * 64}

    sign(good, made[0].key("ada"), change)
    assert any("is not allowed" in text for text in reasons(made, good))


def test_all_reasons_at_once(made: tuple[Parties, Coordinator, Path], good: Path) -> None:
    wrong_shape(good)
    doubled_ids(good)
    unknown_ids(good)
    no_report(good)
    extra = {"round": "f" * 32}
    sign(good, made[0].key("ben"), lambda raw: raw.update(extra))
    found = "\n".join(reasons(made, good))
    for part in ("round", "signed", "report.json is missing", "shape", "named again", "not in the public set"):
        assert part in found, found


def test_reasons_are_bounded() -> None:
    refused = Refused("It", [str(i) for i in range(1000)])
    assert len(refused.reasons) == artefacts.MOST_REASONS + 1 and refused.reasons[-1] == "and 950 more"


def test_bounds_come_before_memory(made: tuple[Parties, Coordinator, Path], good: Path) -> None:
    """A file of a terabyte, which takes no room on the disk, is refused without being read."""
    with (good / EXPERT).open("ab") as file:
        try:
            file.truncate(1 << 40)
        except OSError:
            pytest.skip("this file system has no sparse files of that size")
    path = good / artefacts.MANIFEST
    raw = json.loads(path.read_text())
    raw["files"][EXPERT]["size"] = 1 << 40
    path.write_text(json.dumps(raw))
    assert any("were agreed" in text for text in reasons(made, good))
    with pytest.raises(Refused, match="were agreed"):
        artefacts.copy(good, good.parent / "copy", 1 << 20)
    assert not (good.parent / "copy").exists()


def test_a_copy_follows_no_links(good: Path, tmp_path: Path) -> None:
    symlink(good)
    with pytest.raises(Refused, match="link"):
        artefacts.copy(good, tmp_path / "copy", 1 << 20)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(("file", "below"), [("a", "a/b"), ("a/b", "a/b/c/d"), (None, "manifest.json/x")])
def test_a_file_below_a_file(
    made: tuple[Parties, Coordinator, Path], good: Path, tmp_path: Path, file: str | None, below: str
) -> None:
    """Copying it would make a folder where a file is. The coordinator says so and goes on with the others."""
    parties, round_, _ = made
    about = {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    raw = json.loads((good / artefacts.MANIFEST).read_text())
    raw["files"] |= {name: about for name in (file, below) if name}
    (good / artefacts.MANIFEST).write_text(json.dumps(raw))
    sign_as_it_is(good, parties.key("ada"))
    if file:
        (good / file).parent.mkdir(exist_ok=True)
        (good / file).touch()
    assert f"{below} lies below a file" in reasons(made, good)
    with pytest.raises(Refused, match="lies below a file"):
        artefacts.copy(good, tmp_path / "own", 10**6)
    assert not (tmp_path / "own").exists()
    name, entry = round_.receive(good)
    assert not name and "lies below a file" in entry.reasons[0] and round_.book.entry("ada").stage == "invited"


def test_a_folder_that_cannot_be_read(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (good / "more").mkdir()
    ordinary = os.scandir

    def scandir(path: Any) -> Any:
        if isinstance(path, Path) and path.name == "more":
            raise PermissionError(13, "Permission denied")
        return ordinary(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(Refused, match=r"more cannot be read \(Permission denied\)"):
        artefacts.copy(good, tmp_path / "own", 10**6)


def test_what_leaves_and_what_was_copied_is_for_oneself(
    made: tuple[Parties, Coordinator, Path], good: Path, tmp_path: Path
) -> None:
    for path in good.iterdir():
        path.chmod(0o644)
    artefacts.copy(good, tmp_path / "own", 10**6)
    for folder in (made[2], tmp_path / "own"):
        assert all(path.stat().st_mode & 0o077 == 0 for path in [folder, *folder.rglob("*")])


def test_nothing_half_written(tmp_path: Path) -> None:
    key = Key.create(tmp_path / "key")
    with (
        pytest.raises(ZeroDivisionError),
        artefacts.writing(tmp_path / "out", Label("a", "b", "c", "d"), key) as folder,
    ):
        (folder / "x.json").write_text("{}")
        raise ZeroDivisionError
    assert not (tmp_path / "out").exists()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_flipped_byte_is_noticed(made: tuple[Parties, Coordinator, Path], data: st.DataObject) -> None:
    """In any file, the manifest included: some reason is found (white space in the manifest may change)."""
    folder = made[2]
    name = data.draw(st.sampled_from(sorted(artefacts._names(folder))))
    path = folder / name
    before = path.read_bytes()
    at = data.draw(st.integers(0, len(before) - 1))
    changed = bytearray(before)
    changed[at] ^= data.draw(st.integers(1, 255))
    try:
        path.write_bytes(changed)
        found = reasons(made, folder)
        if not found:
            assert name == artefacts.MANIFEST and json.loads(changed) == json.loads(before)
    finally:
        path.write_bytes(before)


@settings(max_examples=100, deadline=None)
@given(junk=st.binary(max_size=200))
def test_junk_is_no_safetensors_file(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    folder = tmp_path_factory.mktemp("junk")
    (folder / "x.safetensors").write_bytes(junk)
    assert tensors.wrong(folder, "x.safetensors", {"a": [(2, 2)]})


def test_a_long_header_is_not_read(tmp_path: Path) -> None:
    save_file({"a": np.zeros((2, 2), np.float32), "b" * 9000: np.zeros(1, np.float32)}, tmp_path / "x.safetensors")
    assert "its header has" in tensors.wrong(tmp_path, "x.safetensors", {"a": [(2, 2)]})[0]


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_types_of_numbers(tmp_path: Path, kind: str) -> None:
    import torch
    from safetensors.torch import save_file as save

    shapes = {"a": [(3, 5)], "b": [(2,)]}
    values = {"a": torch.randn(3, 5, dtype=getattr(torch, kind)), "b": torch.randn(2, dtype=getattr(torch, kind))}
    save(values, str(tmp_path / "x.safetensors"))
    assert tensors.wrong(tmp_path, "x.safetensors", shapes) == []
    values["b"][1] = float("nan")
    save(values, str(tmp_path / "x.safetensors"))
    assert tensors.wrong(tmp_path, "x.safetensors", shapes) == ["x.safetensors: b has values that are not finite"]


def test_keys(tmp_path: Path) -> None:
    key = Key.create(tmp_path / "a")
    assert (tmp_path / "a" / "party-key.pem").stat().st_mode & 0o777 == 0o600
    assert Key.load(tmp_path / "a").fingerprint == key.fingerprint and len(key.fingerprint) == 64
    assert key.public.signed(b"x", key.sign(b"x")) and not key.public.signed(b"y", key.sign(b"x"))
    assert not Key.create(tmp_path / "b").public.signed(b"x", key.sign(b"x"))
    assert "PRIVATE" not in repr(key)
    with pytest.raises(UsageError, match="already"):
        Key.create(tmp_path / "a")


def test_the_stand_in_is_a_steps() -> None:
    from cloister.unify.rounds.steps import Steps

    steps: Steps = StandIn()
    assert steps
