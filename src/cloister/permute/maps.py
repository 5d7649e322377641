"""Changes of coordinates, y = T x, and how weights follow them.

A weight that writes vectors of a space is multiplied by T, one that reads them by the inverse: in terms of the reading
axis that is the *contragredient* T^-T. For permutations and rotations the two are the same.

    rows(a, start, stop)   rows start..stop of T a            (the axis is the first one)
    columns(a)             a with T applied to its last axis  (each row is a vector)
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

Array = np.ndarray


class Map(ABC):
    """A change of coordinates of a space of `size` dimensions."""

    size: int
    exact = False  # moves numbers without computing: every format keeps its bits

    @abstractmethod
    def rows(self, a: Array, start: int, stop: int) -> Array:
        """Rows `start` to `stop` of T a."""

    @abstractmethod
    def columns(self, a: Array) -> Array:
        """T applied to each row of `a`."""

    def columns_into(self, a: Array, result: Array) -> None:
        """`columns`, written into `result`."""
        result[...] = self.columns(a)

    @abstractmethod
    def contragredient(self) -> Map:
        """T^-T."""

    def granularity(self) -> int:
        """Row ranges must begin and end at multiples of this."""
        return 1

    def __repr__(self) -> str:  # never print the secret
        return f"{type(self).__name__}(size={self.size})"


class Identity(Map):
    """Nothing changes."""

    exact = True

    def __init__(self, size: int) -> None:
        self.size = size

    def rows(self, a: Array, start: int, stop: int) -> Array:
        return a[start:stop]

    def columns(self, a: Array) -> Array:
        return a

    def contragredient(self) -> Map:
        return self


class Permutation(Map):
    """y[i] = x[index[i]]."""

    exact = True

    def __init__(self, index: Array) -> None:
        self.index = np.ascontiguousarray(index, dtype=np.int64)
        self.size = len(index)

    def rows(self, a: Array, start: int, stop: int) -> Array:
        return a[self.index[start:stop]]

    def columns(self, a: Array) -> Array:
        return np.take(a, self.index, axis=-1)

    def columns_into(self, a: Array, result: Array) -> None:
        np.take(a, self.index, axis=-1, out=result, mode="clip")  # "clip" spares a second, buffered check of the index

    def contragredient(self) -> Map:
        return self

    def inverse_index(self) -> Array:
        """x[j] = y[inverse_index[j]]."""
        inverse = np.empty_like(self.index)
        inverse[self.index] = np.arange(self.size)
        return inverse


class ScaledPermutation(Map):
    """y[i] = scale[i] x[index[i]]."""

    def __init__(self, index: Array, scale: Array) -> None:
        self.index, self.scale, self.size = np.asarray(index, dtype=np.int64), scale.astype(np.float32), len(index)

    def rows(self, a: Array, start: int, stop: int) -> Array:
        shape = (-1,) + (1,) * (a.ndim - 1)
        return a[self.index[start:stop]] * self.scale[start:stop].reshape(shape)

    def columns(self, a: Array) -> Array:
        return np.take(a, self.index, axis=-1) * self.scale

    def contragredient(self) -> Map:
        return ScaledPermutation(self.index, 1.0 / self.scale)


class Dense(Map):
    """y = Q x for an orthogonal Q."""

    def __init__(self, matrix: Array) -> None:
        self.matrix, self.size = matrix.astype(np.float32), len(matrix)

    def rows(self, a: Array, start: int, stop: int) -> Array:
        return self.matrix[start:stop] @ a

    def columns(self, a: Array) -> Array:
        return a @ self.matrix.T

    def contragredient(self) -> Map:
        return self


class Blocks(Map):
    """Heads in a new order, each with a matrix of its own: block i of y is matrices[i] times block order[i] of x."""

    def __init__(self, order: Array, matrices: Array, inverse_transposed: Array | None = None) -> None:
        self.order = np.asarray(order, dtype=np.int64)
        self.matrices = matrices.astype(np.float32)
        self._contra = np.linalg.inv(matrices).transpose(0, 2, 1) if inverse_transposed is None else inverse_transposed
        self._exact_matrices = matrices
        self.block = matrices.shape[-1]
        self.size = len(order) * self.block

    def rows(self, a: Array, start: int, stop: int) -> Array:
        first, last = start // self.block, stop // self.block
        blocks = a.reshape(len(self.order), self.block, -1)[self.order[first:last]]
        return np.matmul(self.matrices[first:last], blocks).reshape((stop - start, *a.shape[1:]))

    def columns(self, a: Array) -> Array:
        blocks = a.reshape(-1, len(self.order), self.block)[:, self.order]
        return np.einsum("rbi,bji->rbj", blocks, self.matrices, optimize=True).reshape(a.shape)

    def contragredient(self) -> Map:
        return Blocks(self.order, self._contra, self._exact_matrices)

    def granularity(self) -> int:
        return self.block


class Chain(Map):
    """Several spaces side by side along one axis."""

    def __init__(self, parts: list[Map]) -> None:
        self.parts, self.size = parts, sum(part.size for part in parts)
        self.exact = all(part.exact for part in parts)

    def rows(self, a: Array, start: int, stop: int) -> Array:
        pieces, offset = [], 0
        for part in self.parts:
            low, high = max(start, offset), min(stop, offset + part.size)
            if low < high:
                pieces.append(part.rows(a[offset : offset + part.size], low - offset, high - offset))
            offset += part.size
        return np.concatenate(pieces) if len(pieces) != 1 else pieces[0]

    def columns(self, a: Array) -> Array:
        pieces, offset = [], 0
        for part in self.parts:
            pieces.append(part.columns(a[..., offset : offset + part.size]))
            offset += part.size
        return np.concatenate(pieces, axis=-1)

    def contragredient(self) -> Map:
        return Chain([part.contragredient() for part in self.parts])

    def granularity(self) -> int:
        return self.size  # borders inside blocks of different sizes: take the axis as a whole


def side_by_side(parts: list[Map]) -> Map:
    """One map for an axis made of `parts`."""
    return parts[0] if len(parts) == 1 else Chain(parts)
