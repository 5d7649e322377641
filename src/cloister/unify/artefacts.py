"""What the parties of a round exchange: folders of safetensors and JSON under one signed manifest.

    with artefacts.writing(out, label, key) as folder:          # complete and signed afterwards, or not there
        (folder / "proxies.json").write_text(...)

    manifest = artefacts.read(folder, expected)                  # raises `Refused` with every reason at once

The reader trusts nothing. It is told what to expect (who, which round, which files, how large at most) and looks at
names, kinds and sizes before it opens anything, at hashes before it parses anything, and at a safetensors header
before it maps anything. Links are not followed, nothing is unpickled, and text from the other side is shortened and
escaped before it is shown.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from cloister import storage
from cloister.errors import DataError

from .keys import Key, PublicKey

SCHEMA = "cloister.unify.artefact/1"
MANIFEST = "manifest.json"
MOST_MANIFEST = 1 << 20
MOST_FILES = 1000
MOST_REASONS = 50
BLOCK = 1 << 22
NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,46}[a-z0-9])?")  # of a party; also the name of its folder
_PATH = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}/){0,3}[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_HEX = re.compile(r"[0-9a-f]{64}")
MOST_SIZE = 1 << 50  # of one file: more than anybody has, and small enough for every kind of number
_UNSAFE = (".bin", ".ckpt", ".dill", ".joblib", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth", ".py", ".so")


class Refused(DataError):
    """An artefact that is not what was agreed. `reasons` lists everything that is wrong, not only the first."""

    def __init__(self, what: str, reasons: Sequence[str], *, advice: str = "") -> None:
        self.reasons = bounded(reasons)
        super().__init__("\n  - ".join([f"{what} is refused:", *self.reasons]), advice=advice)


def bounded(reasons: Sequence[str]) -> list[str]:
    """At most `MOST_REASONS` of them, and how many more there were."""
    kept = list(reasons[:MOST_REASONS])
    return kept if len(kept) == len(reasons) else [*kept, f"and {len(reasons) - len(kept)} more"]


def shown(text: object, most: int = 80) -> str:
    """Text from the other side, safe to print: short, and without control characters."""
    short = text if isinstance(text, str) else repr(text)[: most + 1]
    cut = short if len(short) <= most else short[: most - 3] + "..."
    return cut.encode("unicode_escape").decode("ascii")


@dataclass(frozen=True)
class Label:
    """Whose artefact it is, of which round, and what for."""

    purpose: str  # "invitation" or "contribution"
    round: str
    terms: str  # SHA-256 of what the parties agreed on
    sender: str


@dataclass(frozen=True)
class File:
    """One file as the manifest describes it."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What an artefact says of itself."""

    label: Label
    files: Mapping[str, File]
    signature: bytes = field(default=b"", repr=False)

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files.values())

    def message(self) -> bytes:
        """What is signed: everything but the signature, in one spelling."""
        return json.dumps(self._plain(), sort_keys=True, separators=(",", ":")).encode()

    def digest(self) -> str:
        """By this an artefact is known; it covers every byte of every file."""
        return hashlib.sha256(self.message()).hexdigest()

    def text(self) -> str:
        """The file `manifest.json`."""
        return json.dumps({**self._plain(), "signature": base64.b64encode(self.signature).decode()}, indent=2) + "\n"

    def _plain(self) -> dict[str, Any]:
        label = self.label
        files = {name: {"size": file.size, "sha256": file.sha256} for name, file in sorted(self.files.items())}
        return {
            "schema": SCHEMA,
            "purpose": label.purpose,
            "round": label.round,
            "terms": label.terms,
            "sender": label.sender,
            "files": files,
        }


@dataclass(frozen=True)
class Expected:
    """What a reader knows before it looks. `files` says how many bytes each may have; a name that ends in "/" stands
    for everything in that folder together."""

    label: Label
    key: PublicKey
    files: Mapping[str, int]
    optional: frozenset[str] = frozenset()

    @property
    def most(self) -> int:
        """Bytes that the whole artefact may have."""
        return sum(self.files.values()) + MOST_MANIFEST


# Writing --------------------------------------------------------------------------------------------------------------


@contextmanager
def writing(out: Path, label: Label, key: Key, *, replace: bool = False, private: bool = True) -> Iterator[Path]:
    """Yield an empty folder; when the block ends well, `out` is that folder with a signed manifest over its files.

    `private`: nobody else on this machine can read it. Not for files that are links to somebody's own.
    """
    mode = storage.SECRET_FOLDER if private else storage.ORDINARY_FOLDER
    with storage.fresh_directory(out, replace=replace, mode=mode) as folder:
        yield folder
        files = {name: File(*_measure(folder / name)) for name in sorted(_names(folder))}
        manifest = Manifest(label, files)
        signed = Manifest(label, files, key.sign(manifest.message()))
        storage.write_text(folder / MANIFEST, signed.text())
        if private:
            storage.make_private(folder)


def _names(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if not path.is_dir():
            yield path.relative_to(folder).as_posix()


def _measure(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return file.tell(), digest.hexdigest()


# Reading --------------------------------------------------------------------------------------------------------------


def read(folder: Path, expected: Expected, what: str = "The artefact") -> Manifest:
    """The manifest of an artefact that is complete, intact and from whom it should be; else `Refused`."""
    manifest, reasons = inspect(folder, expected)
    if manifest is None or reasons:
        raise Refused(what, reasons, advice="Ask its sender to make and send it again.")
    return manifest


def inspect(folder: Path, expected: Expected) -> tuple[Manifest | None, list[str]]:
    """The manifest, if it can be read at all, and everything that is wrong."""
    manifest, reasons = load_manifest(folder)
    if manifest is None:
        return None, reasons
    reasons += _wrong_label(manifest, expected)
    reasons += _wrong_names(manifest, expected)
    present, found = _present(folder)
    reasons += found
    reasons += [f"{shown(name)} is not in the manifest" for name in sorted(present - set(manifest.files) - {MANIFEST})]
    if reasons:  # sizes may be beyond what was agreed; nothing large is read of such an artefact
        return manifest, reasons + _wrong_sizes(folder, manifest)
    return manifest, _wrong_contents(folder, manifest)


def load_manifest(folder: Path) -> tuple[Manifest | None, list[str]]:
    """`manifest.json` alone, not compared with anything. What it says is a claim of whoever wrote it."""
    if folder.is_symlink() or not folder.is_dir():
        return None, [f"{shown(str(folder), 200)} is not a folder"]
    try:
        raw = read_json(folder / MANIFEST, MOST_MANIFEST)
    except ValueError as error:
        return None, [f"{MANIFEST}: {error}"]
    except OSError as error:
        return None, [f"{shown(str(folder), 200)} cannot be read ({error.strerror})"]
    reasons = []
    if not isinstance(raw, dict):
        return None, [f"{MANIFEST} is not an object"]
    if raw.get("schema") != SCHEMA:
        return None, [f"{MANIFEST} has schema {shown(raw.get('schema'))}, this version reads {SCHEMA}"]
    wanted = {"schema", "purpose", "round", "terms", "sender", "files", "signature"}
    if set(raw) != wanted:
        reasons.append(f"{MANIFEST} has the fields {shown(sorted(raw), 200)}, not {sorted(wanted)}")
    texts = {name: raw.get(name) for name in ("purpose", "round", "terms", "sender", "signature")}
    reasons += [f"{MANIFEST}: {name} is not a text" for name, text in texts.items() if not isinstance(text, str)]
    files: dict[str, File] = {}
    listed = raw.get("files")
    if not isinstance(listed, dict) or len(listed) > MOST_FILES:
        reasons.append(f"{MANIFEST}: files is not a list of at most {MOST_FILES} files")
        listed = {}
    for name, about in listed.items():
        reason = wrong_path(name)
        size = about.get("size") if isinstance(about, dict) and set(about) == {"size", "sha256"} else None
        if reason:
            reasons.append(reason)
        elif type(size) is not int or not 0 <= size < MOST_SIZE or not is_hash(about["sha256"]):
            reasons.append(f"{MANIFEST}: {name} has no size and SHA-256")
        else:
            files[name] = File(size, about["sha256"])
    reasons += below_files([*files, MANIFEST])
    try:
        signature = base64.b64decode(str(raw.get("signature", "")), validate=True)
    except (binascii.Error, ValueError):
        reasons.append(f"{MANIFEST}: the signature is not base64")
        signature = b""
    if reasons:
        return None, reasons
    label = Label(str(texts["purpose"]), str(texts["round"]), str(texts["terms"]), str(texts["sender"]))
    return Manifest(label, files, signature), []


def wrong_path(name: object) -> str:
    """Why `name` may not be a file of an artefact; empty if it may."""
    if not isinstance(name, str) or _PATH.fullmatch(name) is None or ".." in name or name == MANIFEST:
        return f"the file name {shown(name)} is not allowed"
    if name.lower().endswith(_UNSAFE):
        return f"{shown(name)} could hold code; artefacts are safetensors, JSON and text"
    return ""


def is_hash(text: object) -> bool:
    """A SHA-256 in hexadecimal."""
    return isinstance(text, str) and _HEX.fullmatch(text) is not None


def below_files(names: Iterable[str]) -> list[str]:
    """Names that make a folder of another file, as `a/b` does of `a`: no disk can hold both."""
    files = set(names)
    folders = {name: [name[:at] for at, letter in enumerate(name) if letter == "/"] for name in files}
    return [f"{shown(name)} lies below a file" for name in sorted(files) if not files.isdisjoint(folders[name])]


def _wrong_label(manifest: Manifest, expected: Expected) -> Iterator[str]:
    have, want = manifest.label, expected.label
    if have.purpose != want.purpose:
        yield f"it is {_article(shown(have.purpose))}, not {_article(want.purpose)}"
    if have.round != want.round:
        yield f"it belongs to round {shown(have.round)}, this is round {want.round}"
    elif have.terms != want.terms:
        yield f"it was made under other terms ({shown(have.terms, 16)}) than those of this round ({want.terms[:13]}...)"
    if have.sender != want.sender:
        yield f"it is from {shown(have.sender)!r}, not from {want.sender!r}"
    if not expected.key.signed(manifest.message(), manifest.signature):
        yield f"it is not signed with the key of {want.sender!r} ({expected.key.fingerprint[:16]}...)"


def _article(word: str) -> str:
    return f"an {word}" if word[:1] in "aeiou" else f"a {word}"


def _wrong_names(manifest: Manifest, expected: Expected) -> Iterator[str]:
    folders = {name: 0 for name in expected.files if name.endswith("/")}
    for name, file in manifest.files.items():
        folder = next((folder for folder in folders if name.startswith(folder)), None)
        if folder is not None:
            folders[folder] += file.size
        elif name not in expected.files:
            yield f"{shown(name)} does not belong in it"
        elif file.size > expected.files[name]:
            yield f"{name} has {file.size:,} bytes, at most {expected.files[name]:,} were agreed"
    for folder, size in folders.items():
        if size > expected.files[folder]:
            yield f"{folder} has {size:,} bytes, at most {expected.files[folder]:,} were agreed"
    for name in expected.files:
        if not name.endswith("/") and name not in manifest.files and name not in expected.optional:
            yield f"{name} is missing"


def _present(folder: Path) -> tuple[set[str], list[str]]:
    """The regular files below `folder`, and complaints about everything else that lies there."""
    present: set[str] = set()
    reasons: list[str] = []
    waiting = [folder]
    while waiting:
        below = waiting.pop()
        try:
            entries = sorted(os.scandir(below), key=lambda entry: entry.name)
        except OSError as error:
            reasons.append(f"{shown(below.relative_to(folder).as_posix())} cannot be read ({error.strerror})")
            continue
        for entry in entries:
            name = Path(entry.path).relative_to(folder).as_posix()
            if entry.is_symlink():
                reasons.append(f"{shown(name)} is a link")
            elif entry.is_dir(follow_symlinks=False):
                if name.count("/") < 3:
                    waiting.append(Path(entry.path))
                else:
                    reasons.append(f"{shown(name)} lies too deep")
            elif entry.is_file(follow_symlinks=False):
                present.add(name)
            else:
                reasons.append(f"{shown(name)} is neither a file nor a folder")
            if len(present) > 2 * MOST_FILES or len(reasons) > 2 * MOST_REASONS:
                return present, [*reasons, "it has too many files"]
    return present, reasons


def _wrong_sizes(folder: Path, manifest: Manifest) -> list[str]:
    reasons = []
    for name, file in manifest.files.items():
        try:
            with open_file(folder, name) as handle:
                size = os.fstat(handle.fileno()).st_size
        except ValueError as error:
            reasons.append(str(error))
            continue
        if size != file.size:
            reasons.append(f"{name} has {size:,} bytes, the manifest says {file.size:,}")
    return reasons


def _wrong_contents(folder: Path, manifest: Manifest) -> list[str]:
    """Sizes first, then hashes of those whose size is right."""
    reasons = _wrong_sizes(folder, manifest)
    if reasons:
        return reasons
    for name, file in manifest.files.items():
        with open_file(folder, name) as handle:
            if digest_of(handle) != file.sha256:
                reasons.append(f"{name} does not have the SHA-256 that the manifest says: it was damaged or changed")
    return reasons


def digest_of(handle: BinaryIO) -> str:
    """SHA-256 of what follows in an open file, a block at a time."""
    digest = hashlib.sha256()
    while block := handle.read(BLOCK):
        digest.update(block)
    return digest.hexdigest()


def open_file(folder: Path, name: str) -> BinaryIO:
    """Open a regular file below `folder`, following no link on the way; `ValueError` with a reason otherwise."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        *parents, last = name.split("/")
        for parent in parents:
            below = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        # without O_NONBLOCK opening a pipe would wait for its other end
        handle = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    except FileNotFoundError:
        raise ValueError(f"{shown(name)} is missing") from None
    except OSError:
        raise ValueError(f"{shown(name)} is a link or cannot be read") from None
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{shown(name)} is not a regular file")
    return os.fdopen(handle, "rb")


def copy(folder: Path, out: Path, most: int) -> None:
    """Copy an artefact into a folder of our own, so that nobody changes it between the check and the use.

    Takes only what the manifest names, at most `most` bytes, and follows no links. What is wrong with it `inspect`
    says.
    """
    manifest, reasons = load_manifest(folder)
    if manifest is None:
        raise Refused("The artefact", reasons)
    if manifest.size > most:
        raise Refused("The artefact", [f"it has {manifest.size:,} bytes, at most {most:,} were agreed"])
    storage.require_space(out.parent, manifest.size)
    reasons = _present(folder)[1]
    with storage.fresh_directory(out, replace=True, mode=storage.SECRET_FOLDER) as own:
        for name in (*manifest.files, MANIFEST):
            size = manifest.files[name].size if name in manifest.files else MOST_MANIFEST
            try:
                (own / name).parent.mkdir(parents=True, exist_ok=True)
                with open_file(folder, name) as source, (own / name).open("xb") as target:
                    _copy(source, target, size)
            except ValueError as error:
                reasons.append(str(error))
            except FileExistsError:  # where small and capital letters are the same to the disk
                reasons.append(f"{shown(name)} is the same file as another here")
        present = _present(folder)[0]
        reasons += [f"{shown(name)} is not in the manifest" for name in sorted(present - {*manifest.files, MANIFEST})]
        if reasons:
            raise Refused("The artefact", reasons)
        storage.make_private(own)


def _copy(source: BinaryIO, target: BinaryIO, most: int) -> None:
    left = most + 1  # one byte more than allowed shows that there is more
    while left > 0 and (block := source.read(min(BLOCK, left))):
        target.write(block)
        left -= len(block)


# JSON -----------------------------------------------------------------------------------------------------------------


def read_json(path: Path, most: int) -> Any:
    """JSON of at most `most` bytes, without doubled names or numbers that are none; `ValueError` with a reason."""
    with open_file(path.parent, path.name) as file:
        data = file.read(most + 1)
    return parse_json(data, most)


def parse_json(data: bytes, most: int) -> Any:
    """As `read_json`, from memory."""
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_no_doubles, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON (line {error.lineno})") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def write_json(path: Path, value: Any, *, mode: int = storage.ORDINARY_MODE) -> None:
    """JSON in one spelling, whole or not at all."""
    storage.write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", mode=mode)
