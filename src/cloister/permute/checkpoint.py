"""Reading and writing sharded safetensors checkpoints one tensor at a time.

The library's own reader maps whole files and its writer wants whole shards in memory; here memory is bounded by the
tensor at hand, so that a
70B checkpoint can be rewritten on a laptop. The format is plain: 8 bytes of header length, a JSON header, raw bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.poly1305 import Poly1305

from cloister.errors import BrokenCheckpoint
from cloister.permute.numbers import raw_dtype
from cloister.storage import ORDINARY_MODE, fresh_file

MAX_HEADER = 100_000_000
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Checkpoint:
    """A Hugging Face directory: configuration and an index of all its tensors, checked for truncation."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.config: dict[str, Any] = self._json("config.json", required=True)
        self.tensors: dict[str, Stored] = {}
        self.shards: list[tuple[str, list[str]]] = []  # file name -> tensor names in file order
        for name in self._files():
            stored = read_header(self.directory / name)
            repeated = stored.keys() & self.tensors.keys()
            if repeated:
                raise BrokenCheckpoint(f"{self.directory}: tensors occur twice: {_few(repeated)}.")
            self.tensors.update(stored)
            self.shards.append((name, list(stored)))
        self._check_index()

    def _files(self) -> list[str]:
        if (self.directory / INDEX).exists():
            index = self._json(INDEX, required=True)
            weight_map = index.get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise BrokenCheckpoint(f"{self.directory / INDEX} has no weight_map.")
            names = sorted(set(weight_map.values()))
            if any(not isinstance(name, str) or Path(name).name != name for name in names):
                raise BrokenCheckpoint(f"{self.directory / INDEX} points outside its directory.")
            missing = [name for name in names if not (self.directory / name).exists()]
            if missing:
                raise BrokenCheckpoint(
                    f"{self.directory}: {len(missing)} of {len(names)} weight files are missing: {_few(missing)}.",
                    advice="Download the checkpoint again.",
                )
            self._promised = set(weight_map)
            return names
        self._promised = set()
        if (self.directory / SINGLE).exists():
            return [SINGLE]
        pickled = sorted(path.name for path in self.directory.glob("*.bin"))
        raise BrokenCheckpoint(
            f"{self.directory} has no {SINGLE}" + (f"; it has {_few(pickled)}, which are pickles." if pickled else "."),
            advice="Save the model with `save_pretrained`, which writes safetensors."
            if pickled
            else "Is this a checkpoint?",
        )

    def _check_index(self) -> None:
        lost = self._promised - self.tensors.keys()
        if lost:
            raise BrokenCheckpoint(
                f"{self.directory}: the index promises {len(lost)} tensors that no file has: {_few(lost)}.",
                advice="Download the checkpoint again.",
            )

    def _json(self, name: str, *, required: bool) -> dict[str, Any]:
        path = self.directory / name
        try:
            value = json.loads(path.read_text())
        except FileNotFoundError:
            if not required:
                return {}
            raise BrokenCheckpoint(f"{self.directory} has no {name}.", advice="Is this a checkpoint?") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise BrokenCheckpoint(f"{path} is not valid JSON: {error}.", advice="Download it again.") from None
        if not isinstance(value, dict):
            raise BrokenCheckpoint(f"{path} does not hold a JSON object.")
        return value

    def optional_json(self, name: str) -> dict[str, Any]:
        """A JSON file that may be absent."""
        return self._json(name, required=False)

    def read(self, name: str) -> np.ndarray:
        """The raw array of one tensor (bfloat16 as uint16)."""
        stored = self.tensors[name]
        array = np.empty(stored.shape, dtype=raw_dtype(stored.dtype))
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.offset)
            view = array.reshape(-1).view(np.uint8).data
            done = 0
            while done < stored.nbytes:
                count = file.readinto(view[done : done + (1 << 26)])
                if not count:
                    raise BrokenCheckpoint(f"{stored.file} ended in the middle of {name}.", advice="Download it again.")
                done += count
        return array

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` of one tensor."""
        stored = self.tensors[name]
        dtype = raw_dtype(stored.dtype)
        row = int(np.prod(stored.shape[1:], dtype=np.int64))
        with stored.file.open("rb") as file:
            file.seek(stored.offset + start * row * dtype.itemsize)
            flat = np.fromfile(file, dtype=dtype, count=(stop - start) * row)
        return flat.reshape((stop - start, *stored.shape[1:]))

    def fingerprint(self) -> str:
        """A quick identity of the source: names, shapes, sizes and modification times."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, stored in sorted(self.tensors.items()):
            digest.update(f"{name} {stored.dtype} {stored.shape} {stored.file.stat().st_mtime_ns}\n".encode())
        return digest.hexdigest()


def read_header(path: Path) -> dict[str, Stored]:
    """All tensors of one safetensors file, in file order; a truncated or damaged file is refused."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise BrokenCheckpoint(f"{path} is truncated or not a safetensors file.", advice="Download it again.")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            stored = {
                name: Stored(
                    path, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]),
                    8 + length + int(entry["data_offsets"][0]), int(entry["data_offsets"][1]) -
                    int(entry["data_offsets"][0]),
                )
                for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0])
            }  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise BrokenCheckpoint(f"{path} has a damaged header.", advice="Download it again.") from None
    end = 8 + length
    for name, entry in stored.items():
        expected = int(np.prod(entry.shape, dtype=np.int64)) * raw_dtype(entry.dtype).itemsize
        if entry.nbytes != expected or entry.offset != end or min(entry.shape, default=0) < 0:
            raise BrokenCheckpoint(f"{path}: tensor {name} does not fit its place.", advice="Download it again.")
        end += entry.nbytes
    if end > size:
        raise BrokenCheckpoint(
            f"{path} is truncated: {size} bytes of {end}.", advice="Download it again; the copy was cut short."
        )
    return stored


@dataclass(frozen=True)
class Planned:
    """One tensor of a file to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.width

    @property
    def width(self) -> int:
        """Bytes of one number."""
        return int(raw_dtype(self.dtype).itemsize)


def write_shard(
    path: Path, plan: list[Planned], pieces: Iterator[np.ndarray], *, tag_key: bytes, mode: int = ORDINARY_MODE
) -> str:
    """Write a safetensors file from `pieces` (raw arrays, in the order of `plan`, cut anywhere); returns its tag.

    The tag is Poly1305 under `tag_key` (32 bytes, one per file): whoever has the key can check the file later, and it
    costs a tenth of a cryptographic hash, which would take longer than the disk. Tagging and writing run in threads of
    their own, so that the next piece is computed meanwhile; two pieces are in flight at most.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in plan:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    tagger = Poly1305(tag_key)
    with fresh_file(path, mode=mode) as file:
        sink = _Sink(file, tagger.update)
        try:
            sink.put(np.frombuffer(len(encoded).to_bytes(8, "little") + encoded, dtype=np.uint8))
            for piece in pieces:
                sink.put(np.ascontiguousarray(piece))
        finally:
            written = sink.close()
        if written != 8 + len(encoded) + offset:
            raise BrokenCheckpoint(
                f"{path.name}: {written} bytes were made where {8 + len(encoded) + offset} were planned."
            )
    return tagger.finalize().hex()


class _Sink:
    """Writes and tags arrays, each in a thread of its own; an error surfaces at the next `put` or at `close`."""

    def __init__(self, file: Any, tag: Callable[[memoryview], object]) -> None:
        self._file = file
        self._error: BaseException | None = None
        self._written = self._unsynced = 0
        self._queues: list[queue.Queue[np.ndarray | None]] = [queue.Queue(maxsize=1), queue.Queue(maxsize=1)]
        self._threads = [
            threading.Thread(target=self._run, args=(waiting, work), daemon=True)
            for waiting, work in zip(self._queues, (tag, self._write), strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, array: np.ndarray) -> None:
        if self._error is not None:
            raise self._error
        for waiting in self._queues:
            waiting.put(array)

    def close(self) -> int:
        for waiting in self._queues:
            waiting.put(None)
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return self._written

    def _run(self, waiting: queue.Queue[np.ndarray | None], work: Callable[[memoryview], object]) -> None:
        while (array := waiting.get()) is not None:
            if self._error is not None:
                continue  # drain, so that `put` never blocks
            try:
                work(array.reshape(-1).view(np.uint8).data)
            except BaseException as error:
                self._error = error

    def _write(self, data: memoryview) -> None:
        self._file.write(data)
        self._written += len(data)
        self._unsynced += len(data)
        if self._unsynced > 1 << 28:  # let the disk work while the next tensors are computed, not all at the end
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._unsynced = 0


def write_index(directory: Path, placed: Mapping[str, str], total: int) -> None:
    """The index of a sharded checkpoint: tensor name -> file name."""
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2))


def _few(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
