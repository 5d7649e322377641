"""What one party holds: its shares of numbers and of bits. Alone they are uniformly random and mean nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.crypto.checks import axis_of, factor_of, kind_of, same_scale
from cloister.crypto.fixed import FRACTION_BITS, PRIME, scaled
from cloister.errors import InvalidParameter

Words = NDArray[np.uint64]


@dataclass(frozen=True, repr=False)
class Shares:
    """This party's additive shares of an array of fixed-point numbers: the value is (share + peer's share) mod p, over
    2^`fraction`. Sums, differences and products with public integers need no message and are written as usual."""

    data: Words
    fraction: int = FRACTION_BITS

    def __post_init__(self) -> None:
        # NumPy makes scalars of arrays without axes.
        object.__setattr__(self, "data", np.asarray(self.data))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.data.shape

    def __repr__(self) -> str:
        return f"Shares(shape={self.shape}, fraction={self.fraction})"

    def __add__(self, other: Any) -> Shares:
        self._fits(other)
        with _fitting(self, other):
            return Shares((self.data + other.data) % PRIME, self.fraction)

    def __sub__(self, other: Any) -> Shares:
        self._fits(other)
        with _fitting(self, other):
            return Shares((self.data + (PRIME - other.data)) % PRIME, self.fraction)

    def __neg__(self) -> Shares:
        return Shares((PRIME - self.data) % PRIME, self.fraction)

    def __getitem__(self, index: Any) -> Shares:
        return Shares(np.asarray(self.data[index], order="C"), self.fraction)

    def reshape(self, *shape: int) -> Shares:
        """The same shares in another shape."""
        with _fitting(self, shape):
            return Shares(self.data.reshape(*shape), self.fraction)

    def transpose(self, *axes: int) -> Shares:
        """The same shares with axes permuted."""
        with _fitting(self, axes):
            return Shares(np.ascontiguousarray(self.data.transpose(*axes)), self.fraction)

    def times(self, factor: int) -> Shares:
        """Each value times a small public integer (|factor| < 2^22)."""
        factor = factor_of(factor)
        if factor < 0:
            return -self.times(-factor)
        return Shares((self.data * np.uint64(factor)) % PRIME, self.fraction)

    def sum(self, axis: int) -> Shares:
        """Sums along an axis."""
        axis = axis_of(self, axis)
        return Shares(self.data.sum(axis=axis, dtype=np.uint64) % PRIME, self.fraction)

    def _fits(self, other: Any) -> None:
        if not isinstance(other, Shares):
            raise InvalidParameter(
                f"Shares cannot be added to {kind_of(other)}.", advice="Make shares of public numbers: Party.constant."
            )
        same_scale(self, other)


@dataclass(frozen=True, repr=False)
class Bits:
    """This party's XOR shares of an array of bits."""

    data: NDArray[np.uint8]

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", np.asarray(self.data))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.data.shape

    def __repr__(self) -> str:
        return f"Bits(shape={self.shape})"

    def __xor__(self, other: Any) -> Bits:
        if not isinstance(other, Bits):
            raise InvalidParameter(f"Bits cannot be combined with {kind_of(other)}.")
        with _fitting(self, other):
            return Bits(self.data ^ other.data)

    def reshape(self, *shape: int) -> Bits:
        """The same bits in another shape."""
        with _fitting(self, shape):
            return Bits(self.data.reshape(*shape))

    def transpose(self, *axes: int) -> Bits:
        """The same bits with axes permuted."""
        with _fitting(self, axes):
            return Bits(np.ascontiguousarray(self.data.transpose(*axes)))

    def __getitem__(self, index: Any) -> Bits:
        return Bits(np.asarray(self.data[index], order="C"))


@contextmanager
def _fitting(x: Shares | Bits, other: Any) -> Iterator[None]:
    """What NumPy cannot fit together is an error of ours."""
    try:
        yield
    except (ValueError, TypeError):
        wanted = other.shape if isinstance(other, Shares | Bits) else other
        raise InvalidParameter(f"{x!r} cannot be brought together with {wanted}.") from None


def encode(values: Any, fraction: int = FRACTION_BITS) -> Words:
    """Real numbers as field elements; refuses what does not fit."""
    return (scaled(values, fraction) % PRIME).astype(np.uint64)


def decode(words: Words, fraction: int = FRACTION_BITS) -> NDArray[np.float64]:
    """Field elements as real numbers."""
    signed = words.astype(np.int64)
    signed = np.where(signed > PRIME // 2, signed - PRIME, signed)
    return signed / float(1 << fraction)
