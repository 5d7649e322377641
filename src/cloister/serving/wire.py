"""Tensors on the wire: written without torch, read without unpickling.

A tensor travels as base64 of the zip archive that `torch.save` writes for one contiguous dense matrix, because that is
what vLLM reads (`--enable-prompt-embeds`). Such an archive has a pickle in it, and loading pickles from a stranger is
running the stranger's program. So none is loaded here: the one shape of pickle that `torch.save` produces for a dense
float16, bfloat16 or float32 matrix is known byte for byte, the two numbers in it are read by position, and the whole is
compared with the pickle that we would write ourselves. Anything else is refused. A safetensors file that holds the one
tensor `prompt_embeds` is read too.

    text = encode_tensor(rows)                                         # numpy [n, hidden] -> base64
    rows = decode_tensor(text, expected_columns=4096, max_rows=2048)   # -> float32 [n, hidden]

Every size is checked before memory is taken for it, and only `BadTensor` and `TooLarge` are raised. numpy only.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from cloister.errors import BadTensor, TooLarge

DTYPES = ("float32", "bfloat16", "float16")
_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORAGE = {"float32": b"FloatStorage", "bfloat16": b"BFloat16Storage", "float16": b"HalfStorage"}
_SAFETENSORS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SAFETENSORS_NAME = "prompt_embeds"

_MAX_OVERHEAD = 16 * 1024  # archive or header bytes beside the numbers; torch needs about 1.5 KB
_MAX_SMALL_ENTRY = 512
_MAX_SAFETENSORS_HEADER = 4096
_ENTRIES = {
    "data.pkl",
    "data/0",
    "version",
    "byteorder",
    ".format_version",
    ".storage_alignment",
    ".data/serialization_id",
}
_ALIGNMENT = 64
_ADVICE = "Send one dense, contiguous float16, bfloat16 or float32 matrix; see docs/serving.md, 'Tensors'."


def _bad(reason: str) -> NoReturn:
    raise BadTensor(f"The tensor is refused: {reason}.", advice=_ADVICE)


# Writing --------------------------------------------------------------------------------------------------------------


def to_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """The bits of `values` as bfloat16, rounded to nearest, ties to even. Values must be finite."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded: NDArray[np.uint32] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 bits as float32; exact."""
    return (bits.astype("<u4") << 16).view("<f4")


def encode_tensor(values: NDArray[Any], dtype: str | None = None) -> str:
    """Base64 of a `torch.save` archive of the matrix `values`.

    `dtype` is one of `DTYPES`; without it float16 stays and everything else becomes float32. bfloat16, which numpy
    lacks, is given as uint16 bits with `dtype="bfloat16"`, or as floats that are then rounded.
    """
    if values.ndim != 2 or 0 in values.shape:
        _bad(f"it has shape {list(values.shape)}, not [rows, columns]")
    dtype = dtype or ("float16" if values.dtype == np.float16 else "float32")
    if dtype not in DTYPES:
        _bad(f"{dtype!r} is not one of {', '.join(DTYPES)}")
    if dtype == "bfloat16":
        data = values.astype("<u2", copy=False) if values.dtype == np.uint16 else to_bfloat16(values)
    elif values.dtype.kind != "f":
        _bad(f"values of type {values.dtype} are not floating point")
    else:
        data = values.astype("<f2" if dtype == "float16" else "<f4", copy=False)
    return base64.b64encode(_archive(np.ascontiguousarray(data), dtype)).decode("ascii")


def _archive(data: NDArray[Any], dtype: str) -> bytes:
    rows, columns = data.shape
    payload = data.tobytes()
    entries = [
        ("data.pkl", _pickle(dtype, rows, columns)),
        ("byteorder", b"little"),
        ("data/0", payload),
        ("version", b"3\n"),
        # torch derives an id from the contents and never checks it; equal tensors shall not be told apart by it
        (".data/serialization_id", b"0" * 40),
    ]
    body, directory = bytearray(), bytearray()
    for name, content in entries:
        path = f"archive/{name}".encode()
        offset = len(body)
        padding = -(offset + 30 + len(path) + 4) % _ALIGNMENT  # torch maps storages at multiples of 64
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
        sizes = struct.pack("<III", zlib.crc32(content), len(content), len(content))
        common = struct.pack("<HHHHH", 0, 0x800, 0, 0, 0x21) + sizes
        body += b"PK\x03\x04" + common + struct.pack("<HH", len(path), len(extra)) + path + extra + content
        directory += b"PK\x01\x02" + struct.pack("<H", 0) + common
        directory += struct.pack("<HHHHHII", len(path), 0, 0, 0, 0, 0, offset) + path
    end = struct.pack("<HHHHIIH", 0, 0, len(entries), len(entries), len(directory), len(body), 0)
    return bytes(body + directory + b"PK\x05\x06" + end)


def _number(value: int) -> bytes:
    """An integer as pickle protocol 2 writes it: BININT1, BININT2 or BININT."""
    if value < 1 << 8:
        return b"K" + struct.pack("<B", value)
    if value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    return b"J" + struct.pack("<i", value)


def _pickle(dtype: str, rows: int, columns: int) -> bytes:
    """data.pkl of a contiguous matrix: `_rebuild_tensor_v2(storage, 0, (rows, columns), (columns, 1), False, {})`."""
    size, stride = _number(rows) + _number(columns), _number(columns) + _number(1)
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00((X\x07\x00\x00\x00storageq\x01ctorch\n"
        + _STORAGE[dtype]
        + b"\nq\x02X\x01\x00\x00\x000q\x03X\x03\x00\x00\x00cpuq\x04"
        + _number(rows * columns)
        + b"tq\x05QK\x00"
        + size
        + b"\x86q\x06"
        + stride
        + b"\x86q\x07\x89ccollections\nOrderedDict\nq\x08)Rq\ttq\nRq\x0b."
    )


# Reading --------------------------------------------------------------------------------------------------------------

_INT = rb"(?:K.|M..|J....)"
_PICKLE = re.compile(
    rb"\x80\x02ctorch\._utils\n_rebuild_tensor_v2\nq\x00\(\(X\x07\x00\x00\x00storageq\x01ctorch\n"
    rb"(FloatStorage|BFloat16Storage|HalfStorage)\nq\x02X\x01\x00\x00\x000q\x03X\x03\x00\x00\x00cpuq\x04"
    + _INT
    + rb"tq\x05QK\x00("
    + _INT
    + rb")("
    + _INT
    + rb")\x86q\x06"
    + _INT
    + _INT
    + rb"\x86q\x07\x89ccollections\nOrderedDict\nq\x08\)Rq\ttq\nRq\x0b\.",
    re.DOTALL,
)


@dataclass(frozen=True)
class _Limits:
    expected_columns: int
    max_rows: int
    dtypes: Collection[str]

    def check(self, dtype: str, rows: int, columns: int, size: int) -> None:
        """Refuse before a single number is looked at."""
        if dtype not in self.dtypes:
            _bad(f"its type is {dtype}, taken are {', '.join(self.dtypes)}")
        if columns != self.expected_columns:
            _bad(f"it has {columns} columns, the model needs {self.expected_columns}")
        if rows > self.max_rows:
            raise TooLarge(f"The tensor has {rows} rows, the limit is {self.max_rows}.", advice="Send a shorter input.")
        if rows < 1:
            _bad("it has no rows")
        if size != rows * columns * _WIDTH[dtype]:
            _bad(f"it holds {size} bytes where its shape needs {rows * columns * _WIDTH[dtype]}")


def decode_tensor(
    text: str, *, expected_columns: int, max_rows: int, dtypes: Collection[str] = DTYPES
) -> NDArray[np.float32]:
    """The matrix in `text` as float32 [rows, expected_columns]; the conversion from the 16-bit types is exact."""
    if not isinstance(text, str):
        _bad("it is not a base64 string")
    limits = _Limits(expected_columns, max_rows, dtypes)
    longest = (max_rows * expected_columns * 4 + _MAX_OVERHEAD) * 4 // 3 + 4
    if len(text) > longest:
        raise TooLarge(
            f"The tensor takes {len(text)} characters, the limit is {longest}.", advice="Send a shorter input."
        )
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        _bad("it is not base64")
    if raw[:4] == b"PK\x03\x04":
        dtype, rows, data = _read_archive(raw, limits)
    else:
        dtype, rows, data = _read_safetensors(raw, limits)
    if dtype == "bfloat16":
        values = from_bfloat16(np.frombuffer(data, dtype="<u2"))
    else:
        values = np.frombuffer(data, dtype="<f2" if dtype == "float16" else "<f4").astype("<f4", copy=False)
    if not np.isfinite(values).all():
        _bad("it has values that are not finite")
    return values.reshape(rows, expected_columns)


def _read_archive(raw: bytes, limits: _Limits) -> tuple[str, int, memoryview]:
    entries = _entries(memoryview(raw))
    prefixes = {name.split("/", 1)[0] for name in entries}
    if len(prefixes) != 1:
        _bad("the archive has more than one folder")
    parts = {name.split("/", 1)[1]: data for name, data in entries.items()}
    if not parts.keys() <= _ENTRIES or not {"data.pkl", "data/0", "version"} <= parts.keys():
        _bad("the archive does not have exactly the entries of one tensor")
    for name, data in parts.items():
        if name != "data/0" and len(data) > _MAX_SMALL_ENTRY:
            _bad(f"the entry {name} is too long")
    if bytes(parts["version"]) != b"3\n" or bytes(parts.get("byteorder", b"little")) != b"little":
        _bad("the archive has another version or byte order")
    pickled = bytes(parts["data.pkl"])
    found = _PICKLE.fullmatch(pickled)
    if found is None:
        _bad("its description is not that of one dense matrix")
    dtype = next(name for name, storage in _STORAGE.items() if storage == found[1])
    rows, columns = (int.from_bytes(group[1:], "little", signed=group[:1] == b"J") for group in found.group(2, 3))
    limits.check(dtype, rows, columns, len(parts["data/0"]))
    # The expression above let any strides and any spelling of the numbers through; this comparison does not.
    if pickled != _pickle(dtype, rows, columns):
        _bad("it is not contiguous, or is part of a larger tensor")
    return dtype, rows, parts["data/0"]


def _entries(raw: memoryview) -> dict[str, memoryview]:
    """The entries of a zip archive that holds only stored (uncompressed), plain, non-overlapping files."""
    if len(raw) < 22 or bytes(raw[-22:-18]) != b"PK\x05\x06":
        _bad("the archive is truncated")
    disk, start_disk, here, total, size, start, comment = struct.unpack("<HHHHIIH", raw[-18:])
    if disk or start_disk or comment or here != total or not 1 <= total <= len(_ENTRIES):
        _bad("the archive has an unusual directory")
    rest = bytes(raw[start + size : -22]) if start + size <= len(raw) - 22 else b"?"
    if rest not in (b"", _zip64_end(total, size, start)):
        _bad("the archive has an unusual directory")
    entries: dict[str, memoryview] = {}
    at, free = start, 0
    for _ in range(total):
        head = raw[at : at + 46]
        if len(head) < 46 or bytes(head[:4]) != b"PK\x01\x02":
            _bad("the archive's directory is damaged")
        _, _, flags, method, _, _, crc, packed, length = struct.unpack("<HHHHHHIII", head[4:28])
        name_size, extra_size, comment_size, on_disk, _, _, offset = struct.unpack("<HHHHHII", head[28:])
        if method != 0 or packed != length:
            _bad("the archive is compressed")
        if flags & ~0x808 or extra_size or comment_size or on_disk or name_size > 128:
            _bad("an entry of the archive is unusual")
        name = bytes(raw[at + 46 : at + 46 + name_size])
        at += 46 + name_size
        local = raw[offset : offset + 30]
        if offset < free or len(local) < 30 or bytes(local[:4]) != b"PK\x03\x04":
            _bad("the archive's entries overlap or are missing")
        local_method = struct.unpack("<H", local[8:10])[0]
        local_name_size, local_extra = struct.unpack("<HH", local[26:30])
        begin = offset + 30 + local_name_size + local_extra
        free = begin + length
        if free > start or local_method != 0 or bytes(raw[offset + 30 : offset + 30 + local_name_size]) != name:
            _bad("the archive's entries do not agree with its directory")
        text = name.decode("ascii", "replace")
        if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}/[a-z0-9_./]{1,32}", text) is None or text in entries:
            _bad("the archive has doubled or unusual names")
        data = raw[begin:free]
        if zlib.crc32(data) != crc:
            _bad("a checksum is wrong")
        entries[text] = data
    if at != start + size:
        _bad("the archive's directory is damaged")
    return entries


def _zip64_end(total: int, size: int, start: int) -> bytes:
    """The additional end records that torch writes at all sizes."""
    record = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 0x031E, 45, 0, 0, total, total, size, start)
    return record + b"PK\x06\x07" + struct.pack("<IQI", 0, start + size, 1)


def _read_safetensors(raw: bytes, limits: _Limits) -> tuple[str, int, memoryview]:
    header_size = int.from_bytes(raw[:8], "little") if len(raw) >= 8 else 0
    if not 2 <= header_size <= min(_MAX_SAFETENSORS_HEADER, len(raw) - 8):
        _bad("it is neither a torch.save archive nor a safetensors file")
    try:
        header = json.loads(raw[8 : 8 + header_size])
        header.pop("__metadata__", None)
        (name,) = header
        about = header[name]
        dtype = _SAFETENSORS[about["dtype"]]
        rows, columns = about["shape"]
        begin, end = about["data_offsets"]
        numbers = (rows, columns, begin, end)
        whole = all(type(number) is int and number >= 0 for number in numbers)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        _bad("its safetensors header does not describe one float matrix")
    data = memoryview(raw)[8 + header_size :]
    if name != _SAFETENSORS_NAME or not whole or begin != 0 or end != len(data):
        _bad(f"a safetensors file must hold the one tensor {_SAFETENSORS_NAME!r} and nothing else")
    limits.check(dtype, rows, columns, len(data))
    return dtype, rows, data
