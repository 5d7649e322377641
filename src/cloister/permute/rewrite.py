"""Rewriting one tensor in new coordinates, a range of rows at a time.

    W' = T_out W diag(gamma) T_in^-1        gamma: the scale of the norm that W reads, folded away where its stream is
    rotated

Pieces are yielded in file order, so that whoever writes them needs memory for the source tensor and one piece only. A
tensor whose maps only move numbers is never converted: every format keeps its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from cloister.families.layout import Axis, Layout, TensorSpec
from cloister.permute.draw import Draws
from cloister.permute.maps import Identity, Map, side_by_side
from cloister.permute.numbers import narrow, widen

PIECE_BYTES = 16 << 20
CACHE_BYTES = 256 << 10
Reader = Callable[[str], tuple[np.ndarray, str]]  # tensor name -> raw array and its format


class Rewriter:
    """Rewrites the tensors of one checkpoint for one context."""

    def __init__(self, layout: Layout, draws: Draws, read: Reader) -> None:
        self.layout, self._draws, self._read = layout, draws, read
        self._folded = {norm for norm in layout.norm_tensors if self._is_folded(norm)}

    def _is_folded(self, norm: str) -> bool:
        weight = self.layout.norm_tensors[norm][0]
        spec = self.layout.tensors[weight]
        space = spec.axes[0].segments[0].space
        return spec.kind == "norm_weight" and space is not None and self._draws.rotates(space)

    def pieces(self, name: str, raw: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
        """The new tensor `name`, given the old one, in pieces of rows."""
        spec = self.layout.tensors[name]
        if spec.stacked:
            yield from self._stacked(spec, raw, dtype)
            return
        norm = name.rsplit(".", 1)[0]
        if spec.kind in ("norm_weight", "norm_bias") and norm in self._folded:
            yield self._folded_norm(norm, spec, raw, dtype)
            return
        if spec.kind == "vector" and name.endswith(".bias"):
            raw = self._with_norm_bias(norm, raw, dtype)
        yield from self._matrix(spec, raw, dtype)

    def _folded_norm(self, norm: str, spec: TensorSpec, raw: np.ndarray, dtype: str) -> np.ndarray:
        """Scale 1; a LayerNorm's bias becomes 0 where its readers took it over, or 1 where they have no bias (see
        `_carry`)."""
        value = 1.0 if spec.kind == "norm_weight" or self._carries(norm) else 0.0
        return narrow(np.full(raw.shape, value, dtype=np.float32), dtype)

    def _carries(self, norm: str) -> bool:
        """Whether a reader of this LayerNorm has no bias to take the norm's one over."""
        bias = self.layout.norm_tensors[norm][1]
        readers = (reader.removesuffix(".weight") for reader in self.layout.consumers(norm))
        return bias is not None and any(f"{reader}.bias" not in self.layout.tensors for reader in readers)

    def _with_norm_bias(self, linear: str, raw: np.ndarray, dtype: str) -> np.ndarray:
        """b + W beta, if this bias belongs to a linear behind a folded LayerNorm that hands its bias over."""
        spec = self.layout.tensors.get(f"{linear}.weight")
        if spec is None or spec.norm not in self._folded or self._carries(spec.norm):
            return raw
        beta = self._norm_vector(spec.norm, 1)
        if beta is None:
            return raw
        return narrow(widen(raw, dtype) + self._times(f"{linear}.weight", spec, beta), dtype)

    def _times(self, name: str, spec: TensorSpec, vector: np.ndarray) -> np.ndarray:
        raw, dtype = self._read(name)
        return _product(raw, dtype, vector, reads_rows=spec.axes[0].side == "in")

    def _norm_vector(self, norm: str, which: int) -> np.ndarray | None:
        name = self.layout.norm_tensors[norm][which]
        if name is None:
            return None
        return widen(*self._read(name))

    def _stacked(self, spec: TensorSpec, raw: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
        assert spec.stacked is not None
        space, slices = spec.stacked
        for expert in self._draws.expert_order(space):
            yield from self._matrix(slices[expert], raw[expert], dtype)

    def _matrix(self, spec: TensorSpec, raw: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
        if spec.kind == "patch":
            raise AssertionError("patch projections are made by protect")
        if raw.ndim > 2:  # a table with leading axes of size 1
            raw, spec = raw.reshape(-1, raw.shape[-1]), TensorSpec(spec.axes[-2:], spec.kind)
        vector = raw.ndim == 1
        source = raw.reshape(-1, 1) if vector else raw
        row_map = self._axis_map(spec.axes[0])
        column_map = Identity(1) if vector else self._axis_map(spec.axes[1])
        if spec.norm in self._folded:
            yield from self._folded_matrix(spec, source, dtype, row_map, column_map)
            return
        convert = not (row_map.exact and column_map.exact)
        for start, stop in _ranges(source, row_map):
            if convert:
                piece = narrow(column_map.columns(_rows(row_map, source, dtype, start, stop)), dtype)
            else:
                piece = _moved(row_map, column_map, source, start, stop)
            yield piece.reshape(-1) if vector else piece

    def _folded_matrix(
        self, spec: TensorSpec, source: np.ndarray, dtype: str, row_map: Map, column_map: Map
    ) -> Iterator[np.ndarray]:
        assert spec.norm is not None
        gamma = self._norm_vector(spec.norm, 0)
        assert gamma is not None
        reads_rows = spec.axes[0].side == "in"
        carry = self._carry(spec, source, dtype, gamma, row_map)
        for start, stop in _ranges(source, row_map):
            if reads_rows:
                values = column_map.columns(_rows(row_map, source, dtype, start, stop, scale=gamma))
            else:
                values = column_map.columns(_rows(row_map, source, dtype, start, stop) * gamma)
                if carry is not None:
                    values = values + carry[start:stop, None]
            yield narrow(values, dtype)

    def _carry(
        self, spec: TensorSpec, source: np.ndarray, dtype: str, gamma: np.ndarray, row_map: Map
    ) -> np.ndarray | None:
        """What a reader without a bias adds to all its columns so that the norm's bias is not lost.

        The norm's bias is set to the ones vector. Normed vectors n have mean zero and Q keeps the ones vector, so
        (W diag(gamma) Q^T + c 1^T)(Q n + 1) = W(gamma n) + W gamma + c d;
        c = W(beta - gamma) / d makes it W(gamma n + beta).
        """
        assert spec.norm is not None
        if not self._carries(spec.norm):
            return None
        if spec.axes[0].side == "in":
            raise AssertionError("a transposed linear without bias behind a LayerNorm occurs in no family")
        beta = self._norm_vector(spec.norm, 1)
        assert beta is not None
        constant = _product(source, dtype, beta - gamma, reads_rows=False) / len(gamma)
        return np.asarray(row_map.rows(constant.reshape(-1, 1), 0, row_map.size)).reshape(-1)

    def _axis_map(self, axis: Axis) -> Map:
        parts: list[Map] = []
        for segment in axis.segments:
            drawn = Identity(segment.size) if segment.space is None else self._draws.map(segment.space)
            parts.append(drawn.contragredient() if axis.side == "in" else drawn)
        return side_by_side(parts)


def _moved(row_map: Map, column_map: Map, source: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Rows of a tensor whose numbers only move, a few at a time so that they stay in the processor's cache."""
    piece = np.empty((stop - start, source.shape[1]), dtype=source.dtype)
    step = max(1, CACHE_BYTES // max(1, source[:1].nbytes))
    for low in range(start, stop, step):
        high = min(low + step, stop)
        column_map.columns_into(row_map.rows(source, low, high), piece[low - start : high - start])
    return piece


def _rows(
    row_map: Map, source: np.ndarray, dtype: str, start: int, stop: int, scale: np.ndarray | None = None
) -> np.ndarray:
    """Rows of T diag(scale) source in float32, without widening the whole source where T only picks rows."""
    if row_map.exact:
        values = widen(row_map.rows(source, start, stop), dtype)
        return values if scale is None else values * row_map.rows(scale, start, stop)[:, None]
    matrix = getattr(row_map, "matrix", None)
    if matrix is None:  # heads and neurons: blocks are small, widen what is needed
        wide = widen(source, dtype)
        return row_map.rows(wide if scale is None else wide * scale[:, None], start, stop)
    result = np.zeros((stop - start, source.shape[1]), dtype=np.float32)
    step = max(1, PIECE_BYTES // (4 * source.shape[1]))
    for low in range(0, len(source), step):
        wide = widen(source[low : low + step], dtype)
        if scale is not None:
            wide = wide * scale[low : low + step, None]
        result += matrix[start:stop, low : low + step] @ wide
    return result


def _ranges(source: np.ndarray, row_map: Map) -> Iterator[tuple[int, int]]:
    """Row ranges of about PIECE_BYTES that respect the borders of heads."""
    grain = row_map.granularity()
    row_bytes = max(1, source[:1].nbytes)
    step = max(grain, PIECE_BYTES // row_bytes // grain * grain)
    if getattr(row_map, "matrix", None) is not None:
        step = max(step, 1024)  # a matrix product wants rows enough to pay for widening the source again
    for start in range(0, len(source), step):
        yield start, min(start + step, len(source))


def _product(raw: np.ndarray, dtype: str, vector: np.ndarray, *, reads_rows: bool) -> np.ndarray:
    """W v for a linear stored [out, in], or [in, out] when `reads_rows`."""
    if reads_rows:
        return vector @ widen(raw, dtype)
    step = max(1, PIECE_BYTES // (4 * raw.shape[1]))
    return np.concatenate([widen(raw[low : low + step], dtype) @ vector for low in range(0, len(raw), step)])
