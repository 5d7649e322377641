"""safetensors from somebody else: everything that is wrong with a file, found before memory is taken for it.

    reasons = tensors.wrong(folder, "expert.safetensors", {"layer.0.up.weight": [(64, 16)]})

The header is read by hand, because it must be compared with what was agreed before any library allocates what it says.
Values are read a block at a time. numpy only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .artefacts import BLOCK, open_file, parse_json, shown

Shape = tuple[int, ...]
WIDTH = {"F32": 4, "BF16": 2, "F16": 2}
_HEADER_EACH, _HEADER_MORE = 128, 4096


def most_bytes(shapes: Mapping[str, Sequence[Shape]]) -> int:
    """How large a file with these tensors can be."""
    return _most_header(shapes) + 8 + sum(4 * max(math.prod(shape) for shape in options) for options in shapes.values())


def _most_header(shapes: Mapping[str, Sequence[Shape]]) -> int:
    return _HEADER_MORE + sum(len(name.encode()) + _HEADER_EACH for name in shapes)


def wrong(folder: Path, name: str, shapes: Mapping[str, Sequence[Shape]]) -> list[str]:
    """Everything that keeps `folder/name` from being exactly these finite tensors, each of one of its shapes."""
    try:
        with open_file(folder, name) as file:
            places, reasons = _header(file, shapes)
            if reasons:
                return [f"{name}: {reason}" for reason in reasons]
            return [f"{name}: {reason}" for reason in _not_finite(file, places)]
    except ValueError as error:
        return [f"{name}: {error}"]


def _header(file: BinaryIO, shapes: Mapping[str, Sequence[Shape]]) -> tuple[dict[str, tuple[str, int, int]], list[str]]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise ValueError("it is truncated or not a safetensors file")
    if length > _most_header(shapes):
        raise ValueError(f"its header has {length:,} bytes, at most {_most_header(shapes):,} make sense")
    header = parse_json(file.read(length), length)
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    reasons = []
    if header.pop("__metadata__", None) not in (None, {}, {"format": "pt"}):
        reasons.append("it carries metadata, which could say more than was agreed")
    reasons += [f"the tensor {shown(name)} does not belong in it" for name in header if name not in shapes]
    reasons += [f"the tensor {name} is missing" for name in shapes if name not in header]
    places: dict[str, tuple[str, int, int]] = {}
    for name in shapes:
        if name in header:
            try:
                places[name] = _place(header[name], shapes[name])
            except ValueError as error:
                reasons.append(f"{name} {error}")
    if not reasons:
        reasons += _holes(places, size - 8 - length)
    start = 8 + length
    return {name: (kind, start + begin, start + end) for name, (kind, begin, end) in places.items()}, reasons


def _place(about: Any, options: Sequence[Shape]) -> tuple[str, int, int]:
    if not isinstance(about, dict) or set(about) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("is not described as a tensor")
    kind, shape, offsets = about["dtype"], about["shape"], about["data_offsets"]
    if not isinstance(kind, str) or kind not in WIDTH:
        raise ValueError(f"has type {shown(kind)}, taken are {', '.join(WIDTH)}")
    if not _whole(shape) or tuple(shape) not in options:
        wanted = " or ".join(str(list(option)) for option in options)
        raise ValueError(f"has shape {shown(shape)}, the seed's is {wanted}")
    if not _whole(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * WIDTH[kind]:
        raise ValueError("does not lie where its shape says")
    return kind, offsets[0], offsets[1]


def _whole(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and 0 <= number < 1 << 60 for number in numbers)


def _holes(places: Mapping[str, tuple[str, int, int]], size: int) -> Iterator[str]:
    """Tensors must cover the data without gaps: in a gap anything could travel."""
    at = 0
    for name, (_, begin, end) in sorted(places.items(), key=lambda item: (item[1][1], item[1][2])):
        if begin != at:
            yield f"{name} does not begin where the tensor before it ends"
            return
        at = end
    if at != size:
        yield f"it has {size:,} bytes of data, its tensors need {at:,}"


def _not_finite(file: BinaryIO, places: Mapping[str, tuple[str, int, int]]) -> Iterator[str]:
    for name, (kind, begin, end) in places.items():
        file.seek(begin)
        left = end - begin
        while left:
            block = file.read(min(BLOCK, left))
            if not block:
                raise ValueError("it became shorter while it was read")
            left -= len(block)
            if not _finite(block, kind):
                yield f"{name} has values that are not finite"
                break


def _finite(block: bytes, kind: str) -> bool:
    if kind == "BF16":  # all ones in the exponent: infinity or not a number
        return bool(((np.frombuffer(block, "<u2") & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(np.frombuffer(block, "<f2" if kind == "F16" else "<f4")).all())
