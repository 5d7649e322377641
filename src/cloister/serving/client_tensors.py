"""`client.safetensors` without torch: memory-mapped, rows read when they are needed, bfloat16 as its bits.

A client directory may come from somebody else, so the header is checked against the file before anything is mapped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.errors import BrokenManifest
from cloister.serving.wire import from_bfloat16

_MAX_HEADER = 1 << 20
# bfloat16 has no numpy type: its bits are uint16, and no other tensor of a client file has that type
_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "I64": "<i8"}


class ClientTensors:
    """The tensors of one client directory, by name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(_MAX_HEADER, size - 8):
                    raise ValueError("the header has an impossible size")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            self._tensors = {name: _place(about, 8 + length, size) for name, about in header.items()}
        except FileNotFoundError:
            raise BrokenManifest(f"{path.parent} has no {path.name}.", advice="Copy the directory again.") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BrokenManifest(f"{path} is damaged: {error}.", advice="Copy the directory again.") from None

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return self._about(name)[1]

    def mapped(self, name: str) -> NDArray[Any]:
        """The tensor as it lies on the disk; bfloat16 as uint16 bits."""
        kind, shape, offset = self._about(name)
        return np.memmap(self._path, dtype=_TYPES[kind], mode="r", offset=offset, shape=shape)

    def floats(self, name: str) -> NDArray[np.float32]:
        """The whole tensor as float32."""
        raw = self.mapped(name)
        return from_bfloat16(raw) if raw.dtype == np.uint16 else raw.astype(np.float32)

    def order(self, name: str, size: int) -> NDArray[np.int64]:
        """A tensor that must be a permutation of 0 .. size-1."""
        order = self.mapped(name).astype(np.int64)
        if order.shape != (size,) or not np.array_equal(np.sort(order), np.arange(size)):
            raise BrokenManifest(
                f"{name} in {self._path} is not an order of {size} entries.", advice="Copy the directory again."
            )
        return order

    def _about(self, name: str) -> tuple[str, tuple[int, ...], int]:
        if name not in self._tensors:
            raise BrokenManifest(f"{self._path} has no tensor {name}.", advice="Copy the client directory again.")
        return self._tensors[name]


def _place(about: dict[str, Any], base: int, size: int) -> tuple[str, tuple[int, ...], int]:
    kind, shape, (begin, end) = about["dtype"], tuple(about["shape"]), about["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError("a shape or an offset is not a whole number")
    count = 1
    for dimension in shape:
        count *= dimension
    if base + end > size or end - begin != count * np.dtype(_TYPES[kind]).itemsize:
        raise ValueError("a tensor does not lie where the header says")
    return kind, shape, base + begin
