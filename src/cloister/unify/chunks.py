"""Folders of any size in chunks of 8 MB: hashed, resumable, in any order, repeated or not.

    sender = Sender(folder)                          # index: sizes and hashes of all files and of all chunks
    receiver = Receiver(inbox, sender.index, most)   # refuses what is larger than agreed, and a disk that is too full
    for place in receiver.missing():
        receiver.put(place, sender.get(place))       # a chunk that was damaged on its way raises `BadChunk`: ask again
    receiver.finish(out)                             # the whole folder, every file hashed once more

Either side may be killed at any moment: which chunks are there is written down after they are on the disk, and what
is written down is not trusted in the end but hashed. Neither side holds more than one chunk in memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloister import storage
from cloister.errors import BrokenManifest, DataError, UsageError

from .artefacts import (
    MANIFEST,
    MOST_FILES,
    MOST_SIZE,
    Refused,
    below_files,
    digest_of,
    is_hash,
    open_file,
    parse_json,
    read_json,
    shown,
    write_json,
    wrong_path,
)

SIZE = 8_000_000
SCHEMA = "cloister.unify.chunks/1"
MOST_INDEX = 64_000_000  # enough for 6 TB
_INDEX, _HAVE, _FILES = "index.json", "have", "files"


class BadChunk(DataError):
    """A chunk that is not the one that was announced. Asking for it again is all that it takes."""


@dataclass(frozen=True, order=True)
class Place:
    """Which chunk: the `number`-th of a file."""

    name: str
    number: int


@dataclass(frozen=True)
class Listed:
    """One file of an index."""

    size: int
    sha256: str
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class Index:
    """The files of a folder and the hashes of their chunks."""

    files: dict[str, Listed]

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files.values())

    @property
    def count(self) -> int:
        """Chunks of all files together."""
        return sum(len(file.chunks) for file in self.files.values())

    def places(self) -> Iterator[Place]:
        """Every chunk, in order."""
        for name, file in self.files.items():
            yield from (Place(name, number) for number in range(len(file.chunks)))

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        files = {
            name: {"size": file.size, "sha256": file.sha256, "chunks": list(file.chunks)}
            for name, file in self.files.items()
        }
        return {"schema": SCHEMA, "chunk": SIZE, "files": files}

    @classmethod
    def parse(cls, raw: Any) -> Index:
        """From what another party sent; `Refused` with every reason."""
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA or raw.get("chunk") != SIZE:
            raise Refused("The list of chunks", [f"it does not have schema {SCHEMA} and chunks of {SIZE:,} bytes"])
        listed = raw.get("files") if set(raw) == {"schema", "chunk", "files"} else None
        if not isinstance(listed, dict) or not 1 <= len(listed) <= MOST_FILES + 1:
            raise Refused("The list of chunks", [f"it is not a list of one to {MOST_FILES} files"])
        files, reasons = {}, []
        for name, about in sorted(listed.items()):
            reason = "" if name == MANIFEST else wrong_path(name)
            if reason:
                reasons.append(reason)
            elif (file := _listed(about)) is None:
                reasons.append(f"{name} has no size, hash and list of chunks that agree")
            else:
                files[name] = file
        reasons += below_files(files)
        if reasons:
            raise Refused("The list of chunks", reasons)
        return cls(files)


def _listed(about: Any) -> Listed | None:
    if not isinstance(about, dict) or set(about) != {"size", "sha256", "chunks"}:
        return None
    size, chunks = about["size"], about["chunks"]
    if type(size) is not int or not 0 <= size < MOST_SIZE:
        return None
    if not isinstance(chunks, list) or len(chunks) != -(-size // SIZE):
        return None
    if not all(is_hash(text) for text in (*chunks, about["sha256"])):
        return None
    return Listed(size, about["sha256"], tuple(chunks))


class Sender:
    """The chunks of a folder that lies still."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        self.index = Index({name: self._measured(name) for name in names})

    def _measured(self, name: str) -> Listed:
        whole, chunks, size = hashlib.sha256(), [], 0
        with open_file(self.folder, name) as file:
            while chunk := file.read(SIZE):
                whole.update(chunk)
                chunks.append(hashlib.sha256(chunk).hexdigest())
                size += len(chunk)
        return Listed(size, whole.hexdigest(), tuple(chunks))

    def get(self, place: Place) -> bytes:
        """One chunk. The other side names it, so the name is looked up, not opened."""
        return read_chunk(self.folder, self.index, place)


def read_chunk(folder: Path, index: Index, place: Place) -> bytes:
    """One chunk of a folder whose index is known; `UsageError` if there is no such chunk."""
    listed = index.files.get(place.name)
    if listed is None or not 0 <= place.number < len(listed.chunks):
        raise UsageError(f"There is no chunk {place.number} of {shown(place.name)}.")
    with open_file(folder, place.name) as file:
        file.seek(place.number * SIZE)
        return file.read(SIZE)


class Receiver:
    """Collects the chunks of one folder in `inbox`, today or over many days."""

    def __init__(self, inbox: Path, index: Index, most: int) -> None:
        if index.size > most:
            raise Refused("The folder", [f"it has {index.size:,} bytes, at most {most:,} were agreed"])
        self.inbox, self.index = inbox, index
        self._start = {}
        at = 0
        for name, file in index.files.items():
            self._start[name] = at
            at += len(file.chunks)
        self._have = bytearray(at)
        storage.private_directory(inbox)
        self._begin()

    @classmethod
    def resume(cls, inbox: Path, most: int) -> Receiver | None:
        """The receiver that an earlier run began in `inbox`, if it did."""
        try:
            return cls(inbox, Index.parse(read_json(inbox / _INDEX, MOST_INDEX)), most)
        except (ValueError, OSError, Refused):
            return None

    def _begin(self) -> None:
        try:
            same = read_json(self.inbox / _INDEX, MOST_INDEX) == self.index.plain()
        except (ValueError, OSError):
            same = False
        if same:
            with suppress(OSError):
                have = (self.inbox / _HAVE).read_bytes()
                self._have[:] = have if len(have) == len(self._have) else bytes(len(self._have))
            for name in self.index.files:  # what is written down must at least be there
                if not (self.inbox / _FILES / name).is_file():
                    self._forget(name)
        else:
            storage.remove(self.inbox / _FILES)
            storage.remove(self.inbox / _HAVE)
            write_json(self.inbox / _INDEX, self.index.plain())
        storage.require_space(self.inbox, self.index.size - self.received_bytes)

    def _forget(self, name: str) -> None:
        start = self._start[name]
        for number in range(len(self.index.files[name].chunks)):
            self._have[start + number] = 0

    @property
    def received(self) -> int:
        """Chunks that are here."""
        return sum(self._have)

    @property
    def received_bytes(self) -> int:
        """Bytes that are here."""
        return sum(self._length(place) for place in self.index.places() if self._have[self._number(place)])

    def missing(self) -> Iterator[Place]:
        """What to ask for. Ask again for what did not come; nothing is wrong with getting a chunk twice."""
        return (place for place in self.index.places() if not self._have[self._number(place)])

    def _number(self, place: Place) -> int:
        listed = self.index.files.get(place.name)
        if listed is None or not 0 <= place.number < len(listed.chunks):
            raise BadChunk(f"There is no chunk {place.number} of {shown(place.name)}.", advice="Ask for another.")
        return self._start[place.name] + place.number

    def _length(self, place: Place) -> int:
        return min(SIZE, self.index.files[place.name].size - place.number * SIZE)

    def put(self, place: Place, chunk: bytes) -> bool:
        """Keep a chunk; false if it was here already. `BadChunk` if it is not the one that was announced."""
        number = self._number(place)
        right = self.index.files[place.name].chunks[place.number]
        if len(chunk) != self._length(place) or hashlib.sha256(chunk).hexdigest() != right:
            raise BadChunk(
                f"Chunk {place.number} of {place.name} was damaged on its way.", advice="Ask for this chunk again."
            )
        if self._have[number]:
            return False
        path = self.inbox / _FILES / place.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with storage.disk_errors(path, advice="Free some space and go on: chunks that are here stay."):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.seek(place.number * SIZE)
                file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            self._have[number] = 1
            storage.write_bytes(self.inbox / _HAVE, bytes(self._have))
        return True

    def finish(self, out: Path) -> None:
        """Make `out` of the chunks. A file that is not what was announced is forgotten, to be asked for again."""
        if self.received != self.index.count:
            raise UsageError(f"{self.index.count - self.received} chunks are missing.", advice="Go on receiving.")
        files = self.inbox / _FILES
        for name, listed in self.index.files.items():
            path = files / name
            if not listed.chunks:  # an empty file has no chunk that would make it
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            with open_file(files, name) as file:
                right = os.fstat(file.fileno()).st_size == listed.size and digest_of(file) == listed.sha256
            if not right:
                self._forget(name)
                path.unlink()
                storage.write_bytes(self.inbox / _HAVE, bytes(self._have))
                raise BadChunk(f"{name} is not what was announced.", advice="Ask for its chunks again.")
        storage.make_private(files)
        storage.sync_tree(files)
        storage.remove(out)
        storage.private_directory(out.parent)
        files.replace(out)
        storage.remove(self.inbox)


def most_index(most: int) -> int:
    """How long the list of a folder of at most `most` bytes can be. A long list takes many times its own memory."""
    return (1 << 20) + 80 * (most // SIZE + MOST_FILES)


def load_index(data: bytes, most: int = MOST_INDEX) -> Index:
    """An index as it came over a connection, of at most `most` bytes."""
    try:
        return Index.parse(parse_json(data, most))
    except ValueError as error:
        raise BrokenManifest(f"The list of chunks cannot be read: {error}.", advice="Ask for it again.") from None
