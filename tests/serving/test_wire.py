"""The tensor encoding: the same bytes as torch understands, and nothing hostile gets through."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pickle
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.errors import BadTensor, TooLarge
from cloister.serving.wire import DTYPES, _archive, decode_tensor, encode_tensor, to_bfloat16

ROWS, COLUMNS = 5, 8


@pytest.fixture
def matrix() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def decode(raw: bytes | str, **overrides: object) -> np.ndarray:
    text = raw if isinstance(raw, str) else base64.b64encode(raw).decode()
    return decode_tensor(text, **{"expected_columns": COLUMNS, "max_rows": 16, **overrides})  # type: ignore[arg-type]


def torch_save(value: object) -> bytes:
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def rezip(
    raw: bytes, change: dict[str, bytes | None] | None = None, *, compress: bool = False, extra: str = ""
) -> bytes:
    """`raw` with entries replaced, removed (None) or added, written by Python's own zip writer."""
    out = io.BytesIO()
    source = zipfile.ZipFile(io.BytesIO(raw))
    contents: dict[str, bytes] = {name: source.read(name) for name in source.namelist()}
    for name, content in (change or {}).items():
        if content is None:
            del contents[name]
        else:
            contents[name] = content
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as target:
        for name, content in contents.items():
            target.writestr(name, content)
        if extra:
            target.writestr(extra, b"x")
    return out.getvalue()


# Both directions with torch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 8), (3, 300), (300, 3), (1, 70000)])
def test_torch_reads_what_we_write(dtype: str, shape: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    raw = base64.b64decode(encode_tensor(values, dtype), validate=True)
    loaded = torch.load(io.BytesIO(raw), weights_only=True)
    assert loaded.dtype == getattr(torch, dtype) and loaded.is_contiguous()
    assert torch.equal(loaded, torch.from_numpy(values).to(getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 8), (3, 300), (300, 3), (1, 70000)])
def test_we_read_what_torch_saves(dtype: str, shape: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.randn(shape).to(getattr(torch, dtype))
    read = decode(torch_save(tensor), expected_columns=shape[1], max_rows=shape[0])
    assert np.array_equal(read, tensor.float().numpy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_is_exact(matrix: np.ndarray, dtype: str) -> None:
    once = decode(encode_tensor(matrix, dtype))
    assert np.array_equal(decode(encode_tensor(once, dtype)), once)
    if dtype == "float32":
        assert np.array_equal(once, matrix)


def test_bfloat16_bits_and_rounding_agree_with_torch() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(2).standard_normal(5000).astype(np.float32).reshape(50, 100)
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(to_bfloat16(values), expected)
    assert encode_tensor(expected, "bfloat16") == encode_tensor(values, "bfloat16")


def test_equal_tensors_have_equal_text(matrix: np.ndarray) -> None:
    assert encode_tensor(matrix) == encode_tensor(matrix.copy(order="F"))


def test_safetensors_is_read(matrix: np.ndarray) -> None:
    from safetensors.numpy import save

    assert np.array_equal(decode(save({"prompt_embeds": matrix})), matrix)
    assert np.array_equal(decode(save({"prompt_embeds": matrix}, metadata={"format": "np"})), matrix)


@pytest.mark.parametrize("shape", [(4,), (2, 2, 2), (0, 4), (4, 0)])
def test_only_matrices_are_written(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadTensor):
        encode_tensor(np.zeros(shape, np.float32))


def test_integers_are_not_written() -> None:
    with pytest.raises(BadTensor, match="floating"):
        encode_tensor(np.zeros((2, 2), np.int64))


# Hostile input --------------------------------------------------------------------------------------------------------


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch cloister-was-here",)


def test_malicious_pickle_is_not_run(matrix: np.ndarray, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw = base64.b64decode(encode_tensor(matrix))
    for payload in (pickle.dumps(_Bomb(), 2), pickle.dumps(_Bomb(), 4)):
        with pytest.raises(BadTensor, match="description"):
            decode(rezip(raw, {"archive/data.pkl": payload}))
    good = zipfile.ZipFile(io.BytesIO(raw)).read("archive/data.pkl")
    for payload in (good[:-1] + pickle.dumps(_Bomb(), 2)[2:], good + pickle.dumps(_Bomb(), 2)):
        with pytest.raises(BadTensor, match="description"):
            decode(rezip(raw, {"archive/data.pkl": payload}))
    assert not list(tmp_path.iterdir())


def test_bare_pickle_is_refused() -> None:
    with pytest.raises(BadTensor):
        decode(pickle.dumps(_Bomb()))


def test_sparse_tensor_is_refused() -> None:
    torch = pytest.importorskip("torch")
    index = torch.tensor([[0, 1], [0, 1]])
    huge = torch.sparse_coo_tensor(index, torch.ones(2), (2**20, 2**20), check_invariants=False)
    with pytest.raises(BadTensor):
        decode(torch_save(huge))


def test_other_torch_objects_are_refused() -> None:
    torch = pytest.importorskip("torch")
    for value in ([torch.ones(5, 8)], {"a": torch.ones(5, 8)}, torch.nn.Parameter(torch.ones(5, 8)), "text"):
        with pytest.raises(BadTensor):
            decode(torch_save(value))


def test_wrong_columns(matrix: np.ndarray) -> None:
    with pytest.raises(BadTensor, match="8 columns, the model needs 9"):
        decode(encode_tensor(matrix), expected_columns=9)


def test_too_many_rows(matrix: np.ndarray) -> None:
    with pytest.raises(TooLarge, match="5 rows"):
        decode(encode_tensor(matrix), max_rows=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite(matrix: np.ndarray, dtype: str, value: float) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(matrix).to(getattr(torch, dtype))
    tensor[3, 3] = value
    with pytest.raises(BadTensor, match="finite"):
        decode(torch_save(tensor))


def test_truncated_anywhere(matrix: np.ndarray) -> None:
    for raw in (base64.b64decode(encode_tensor(matrix)), torch_save_or_ours(matrix)):
        for length in range(0, len(raw), 7):
            with pytest.raises(BadTensor):
                decode(raw[:length])


def torch_save_or_ours(matrix: np.ndarray) -> bytes:
    try:
        import torch
    except ImportError:
        return _archive(matrix, "float32")
    return torch_save(torch.from_numpy(matrix))


def test_any_changed_byte_is_refused_or_harmless(matrix: np.ndarray) -> None:
    raw = torch_save_or_ours(matrix)
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 0x41
        try:
            read = decode(bytes(changed))
        except (BadTensor, TooLarge):
            continue
        assert np.array_equal(read, matrix), f"byte {at} changed the numbers unnoticed"


def test_gigabyte_claims_take_no_memory(matrix: np.ndarray) -> None:
    raw = base64.b64decode(encode_tensor(matrix))
    good = zipfile.ZipFile(io.BytesIO(raw)).read("archive/data.pkl")
    huge_pickle = good.replace(b"K\x28", b"J" + struct.pack("<i", 2**31 - 1), 1).replace(
        b"K\x05", b"J\xff\xff\xff\x7f", 1
    )
    hostile = [rezip(raw, {"archive/data.pkl": huge_pickle})]
    at = raw.rindex(b"PK\x01\x02")
    for field in (20, 24, 42):  # packed size, size, offset
        changed = bytearray(raw)
        changed[at + field : at + field + 4] = struct.pack("<I", 2**31)
        hostile.append(bytes(changed))
    header = json.dumps({"prompt_embeds": {"dtype": "F32", "shape": [2**40, 8], "data_offsets": [0, 2**45]}}).encode()
    hostile.append(struct.pack("<Q", len(header)) + header)
    hostile.append(struct.pack("<Q", 2**40) + b"{}")
    tracemalloc.start()
    for item in hostile:
        with pytest.raises((BadTensor, TooLarge)):
            decode(item)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_overlong_text_is_refused_before_decoding() -> None:
    with pytest.raises(TooLarge, match="characters"):
        decode("A" * 100_000)


def test_compressed_bomb() -> None:
    raw = _archive(np.zeros((16, COLUMNS), np.float32), "float32")
    with pytest.raises(BadTensor, match="compressed"):
        decode(rezip(raw, {"archive/data/0": b"\0" * 2_000_000}, compress=True))
    with pytest.raises(TooLarge):  # even its compressed form is longer than the shape allows
        decode(rezip(raw, {"archive/data/0": b"\0" * 50_000_000}, compress=True))


def test_stored_content_larger_than_the_shape(matrix: np.ndarray) -> None:
    raw = base64.b64decode(encode_tensor(matrix))
    with pytest.raises(BadTensor, match="bytes where its shape needs"):
        decode(rezip(raw, {"archive/data/0": matrix.tobytes() + b"\0" * 4}))


def test_strides_other_than_contiguous() -> None:
    torch = pytest.importorskip("torch")
    transposed, part, step = torch.ones(8, 5).T, torch.ones(10, 8)[2:7], torch.ones(5, 16)[:, ::2]
    for tensor in (transposed, part, step, torch.ones(1, 8).expand(5, 8)):
        with pytest.raises(BadTensor):
            decode(torch_save(tensor))


def test_extra_missing_and_doubled_entries(matrix: np.ndarray) -> None:
    raw = base64.b64decode(encode_tensor(matrix))
    for extra in ("archive/data/1", "archive/code/evil.py", "other/data.pkl", "archive/../../x", "/etc/passwd"):
        with pytest.raises(BadTensor):
            decode(rezip(raw, extra=extra))
    for name in ("archive/data.pkl", "archive/data/0", "archive/version"):
        with pytest.raises(BadTensor):
            decode(rezip(raw, {name: None}))
    with pytest.warns(UserWarning, match="Duplicate"):
        doubled = rezip(raw, {"archive/byteorder": None}, extra="archive/version")
    with pytest.raises(BadTensor, match="doubled"):
        decode(doubled)


def test_big_endian_and_other_versions(matrix: np.ndarray) -> None:
    raw = base64.b64decode(encode_tensor(matrix))
    for change in ({"archive/byteorder": b"big"}, {"archive/version": b"4\n"}):
        with pytest.raises(BadTensor, match="version or byte order"):
            decode(rezip(raw, change))


@pytest.mark.parametrize("name", ["float64", "int32", "int64", "uint8", "bool", "complex64"])
def test_wrong_dtype(name: str) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(BadTensor):
        decode(torch_save(torch.ones(5, 8).to(getattr(torch, name))))


def test_dtype_that_was_not_allowed(matrix: np.ndarray) -> None:
    with pytest.raises(BadTensor, match="float16"):
        decode(encode_tensor(matrix, "float16"), dtypes=("float32",))


@pytest.mark.parametrize("text", ["", "=", "!!!!", "AAA", "ünïcode", "QUJD\n", "data:;base64,AAAA", "A" * 5])
def test_base64_junk(text: str) -> None:
    with pytest.raises(BadTensor):
        decode(text)


@pytest.mark.parametrize("value", [None, 3, ["AAAA"], {"a": 1}, b"AAAA"])
def test_not_a_string(value: object) -> None:
    with pytest.raises(BadTensor):
        decode_tensor(value, expected_columns=8, max_rows=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "about",
    [
        {"dtype": "F64", "shape": [5, 8], "data_offsets": [0, 320]},
        {"dtype": "F32", "shape": [40], "data_offsets": [0, 160]},
        {"dtype": "F32", "shape": [5, 8], "data_offsets": [0, 161]},
        {"dtype": "F32", "shape": [5, 8], "data_offsets": [4, 160]},
        {"dtype": "F32", "shape": [-5, -8], "data_offsets": [0, 160]},
        {"dtype": "F32", "shape": [5.0, 8.0], "data_offsets": [0, 160]},
        {"dtype": "F32", "shape": [True, 40], "data_offsets": [0, 160]},
        {"dtype": "F32", "shape": [[5], 8], "data_offsets": [0, 160]},
        {"shape": [5, 8]},
        [],
        None,
    ],
)
def test_hostile_safetensors_headers(matrix: np.ndarray, about: object) -> None:
    header = json.dumps({"prompt_embeds": about}).encode()
    with pytest.raises(BadTensor):
        decode(struct.pack("<Q", len(header)) + header + matrix.tobytes())


def test_safetensors_with_other_or_more_tensors(matrix: np.ndarray) -> None:
    from safetensors.numpy import save

    for tensors in ({"other": matrix}, {"prompt_embeds": matrix, "more": matrix}):
        with pytest.raises(BadTensor):
            decode(save(tensors))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=2000))
def test_fuzz_raw_bytes(raw: bytes) -> None:
    with contextlib.suppress(BadTensor, TooLarge):
        decode(raw)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5000), st.binary(min_size=1, max_size=8)), max_size=6),
    st.integers(0, 40),
    st.booleans(),
)
def test_fuzz_changed_archives(edits: list[tuple[int, bytes]], cut: int, front: bool) -> None:
    raw = bytearray(_archive(np.ones((ROWS, COLUMNS), np.float32), "float32"))
    for at, content in edits:
        at %= len(raw)
        raw[at : at + len(content)] = content
    body = bytes(raw[cut:] if front else raw[: len(raw) - cut])
    try:
        read = decode(body)
    except (BadTensor, TooLarge):
        return
    assert read.shape[1] == COLUMNS and np.isfinite(read).all()


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_fuzz_text(text: str) -> None:
    with contextlib.suppress(BadTensor, TooLarge):
        decode(text)
