"""Number formats of checkpoints without torch: bfloat16 lives in uint16 arrays and is widened by shifting bits."""

from __future__ import annotations

import numpy as np

from cloister.errors import BrokenCheckpoint

RAW: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U8": np.dtype("u1"), "BOOL": np.dtype("?"),
}  # fmt: skip
FLOATS = {"F64", "F32", "F16", "BF16"}
TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def raw_dtype(name: str) -> np.dtype:
    """The numpy dtype that holds a safetensors format bit for bit."""
    if name not in RAW:
        raise BrokenCheckpoint(
            f"Tensors in format {name} are not supported.", advice="Convert the checkpoint to bfloat16."
        )
    return RAW[name]


def widen(raw: np.ndarray, name: str) -> np.ndarray:
    """float32 numbers of a raw array."""
    if name == "BF16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.astype(np.float32, copy=False)


def narrow(values: np.ndarray, name: str) -> np.ndarray:
    """The raw array that holds `values`, rounded to nearest even."""
    if name == "BF16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return ((bits + rounding) >> np.uint32(16)).astype(np.uint16)
    return np.ascontiguousarray(values.astype(raw_dtype(name), copy=False))
