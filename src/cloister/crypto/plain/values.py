"""What the plain party computes on: numbers and bits in the open, with the operators of the engine's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cloister.crypto.checks import axis_of, factor_of, kind_of, same_scale
from cloister.crypto.fixed import FRACTION_BITS
from cloister.crypto.plain.numbers import check
from cloister.errors import InvalidParameter


@dataclass(frozen=True, repr=False, eq=False)
class Values:
    """An array of fixed-point numbers as the integers they are, int64 on any device: the number is data /
    2^`fraction`. A result that shares could not hold raises `OutOfRange`."""

    data: Tensor
    fraction: int = FRACTION_BITS

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self.data.shape)

    def __repr__(self) -> str:
        return f"Values(shape={self.shape}, fraction={self.fraction})"

    def __add__(self, other: Any) -> Values:
        self._fits(other)
        with _fitting(self, other):
            return Values(check(self.data + other.data, "addition"), self.fraction)

    def __sub__(self, other: Any) -> Values:
        self._fits(other)
        with _fitting(self, other):
            return Values(check(self.data - other.data, "subtraction"), self.fraction)

    def __neg__(self) -> Values:
        return Values(-self.data, self.fraction)

    def __getitem__(self, index: Any) -> Values:
        return Values(_taken(self.data, index), self.fraction)

    def reshape(self, *shape: int) -> Values:
        """The same numbers in another shape."""
        with _fitting(self, shape):
            return Values(self.data.reshape(*shape), self.fraction)

    def transpose(self, *axes: int) -> Values:
        """The same numbers with axes permuted."""
        with _fitting(self, axes):
            return Values(_permuted(self.data, axes), self.fraction)

    def times(self, factor: int) -> Values:
        """Each number times a small public integer (|factor| < 2^22)."""
        return Values(check(self.data * factor_of(factor), "times"), self.fraction)

    def sum(self, axis: int) -> Values:
        """Sums along an axis."""
        return Values(check(self.data.sum(axis_of(self, axis)), "sum"), self.fraction)

    def _fits(self, other: Any) -> None:
        if not isinstance(other, Values):
            raise InvalidParameter(
                f"Values cannot be added to {kind_of(other)}.", advice="Make values of public numbers: Party.constant."
            )
        same_scale(self, other)


@dataclass(frozen=True, repr=False, eq=False)
class Bits:
    """An array of bits, 0 or 1 as int64."""

    data: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self.data.shape)

    def __repr__(self) -> str:
        return f"Bits(shape={self.shape})"

    def __xor__(self, other: Any) -> Bits:
        if not isinstance(other, Bits):
            raise InvalidParameter(f"Bits cannot be combined with {kind_of(other)}.")
        with _fitting(self, other):
            return Bits(self.data ^ other.data)

    def __getitem__(self, index: Any) -> Bits:
        return Bits(_taken(self.data, index))

    def reshape(self, *shape: int) -> Bits:
        """The same bits in another shape."""
        with _fitting(self, shape):
            return Bits(self.data.reshape(*shape))

    def transpose(self, *axes: int) -> Bits:
        """The same bits with axes permuted."""
        with _fitting(self, axes):
            return Bits(_permuted(self.data, axes))


def _taken(data: Tensor, index: Any) -> Tensor:
    """What NumPy would take: torch has no backward slices, and orders the axes of lists otherwise."""
    parts = index if isinstance(index, tuple) else (index,)
    if all(_is_basic(part) for part in parts):
        return data[index]
    places = np.arange(data.numel()).reshape(data.shape)[index]
    return data.flatten()[torch.from_numpy(np.array(places)).to(data.device)]


def _is_basic(part: Any) -> bool:
    """Whether NumPy and torch take the same with it."""
    if isinstance(part, slice):
        return (part.step or 1) > 0
    return part is None or part is Ellipsis or (isinstance(part, int) and not isinstance(part, bool))


def _permuted(data: Tensor, axes: tuple[Any, ...]) -> Tensor:
    return data.permute(*(axes or range(data.ndim - 1, -1, -1)))


@contextmanager
def _fitting(x: Values | Bits, other: Any) -> Iterator[None]:
    """What torch cannot fit together is an error of ours."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError):
        wanted = other.shape if isinstance(other, Values | Bits) else other
        raise InvalidParameter(f"{x!r} cannot be brought together with {wanted}.") from None
