"""What one party holds: its shares of numbers and of bits. Alone they are uniformly random and mean nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.errors import InvalidParameter

PRIME = 2_199_023_190_017
VALUE_BOUND = PRIME // 4
FRACTION_BITS = 12

Words = NDArray[np.uint64]


@dataclass(frozen=True, repr=False)
class Shares:
    """This party's additive shares of an array of fixed-point numbers: the value is (share + peer's share) mod p, over
    2^`fraction`. Sums, differences and products with public integers need no message and are written as usual."""

    data: Words
    fraction: int = FRACTION_BITS

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.data.shape

    def __repr__(self) -> str:
        return f"Shares(shape={self.shape}, fraction={self.fraction})"

    def __add__(self, other: Shares) -> Shares:
        self._same_scale(other)
        return Shares((self.data + other.data) % PRIME, self.fraction)

    def __sub__(self, other: Shares) -> Shares:
        self._same_scale(other)
        return Shares((self.data + (PRIME - other.data)) % PRIME, self.fraction)

    def __neg__(self) -> Shares:
        return Shares((PRIME - self.data) % PRIME, self.fraction)

    def __getitem__(self, index: Any) -> Shares:
        return Shares(np.ascontiguousarray(self.data[index]), self.fraction)

    def reshape(self, *shape: int) -> Shares:
        """The same shares in another shape."""
        return Shares(self.data.reshape(*shape), self.fraction)

    def transpose(self, *axes: int) -> Shares:
        """The same shares with axes permuted."""
        return Shares(np.ascontiguousarray(self.data.transpose(*axes)), self.fraction)

    def times(self, factor: int) -> Shares:
        """Each value times a small public integer (|factor| < 2^22)."""
        if abs(factor) >= 1 << 22:
            raise InvalidParameter(f"A public factor of {factor} is too large for shares; 4,194,303 is the most.")
        if factor < 0:
            return -self.times(-factor)
        return Shares((self.data * np.uint64(factor)) % PRIME, self.fraction)

    def sum(self, axis: int) -> Shares:
        """Sums along an axis."""
        return Shares(self.data.sum(axis=axis, dtype=np.uint64) % PRIME, self.fraction)

    def _same_scale(self, other: Shares) -> None:
        if self.fraction != other.fraction:
            raise InvalidParameter(
                f"Shares with {self.fraction} and {other.fraction} fraction bits cannot be added.",
                advice="Truncate the one with more bits first.",
            )


@dataclass(frozen=True, repr=False)
class Bits:
    """This party's XOR shares of an array of bits."""

    data: NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.data.shape

    def __repr__(self) -> str:
        return f"Bits(shape={self.shape})"

    def __xor__(self, other: Bits) -> Bits:
        return Bits(self.data ^ other.data)

    def reshape(self, *shape: int) -> Bits:
        """The same bits in another shape."""
        return Bits(self.data.reshape(*shape))

    def __getitem__(self, index: Any) -> Bits:
        return Bits(np.ascontiguousarray(self.data[index]))


def encode(values: NDArray[np.float64], fraction: int = FRACTION_BITS) -> Words:
    """Real numbers as field elements; refuses what does not fit."""
    scaled = np.rint(np.asarray(values, dtype=np.float64) * (1 << fraction))
    if not np.isfinite(scaled).all():
        raise InvalidParameter("Infinite numbers and NaN cannot be shared.")
    if scaled.size and np.abs(scaled).max() >= VALUE_BOUND:
        raise InvalidParameter(
            f"A number does not fit into a share: with {fraction} fraction bits the limit is "
            f"{VALUE_BOUND / (1 << fraction):.6g}.",
            advice="Scale the values down or use fewer fraction bits.",
        )
    return (scaled.astype(np.int64) % PRIME).astype(np.uint64)


def decode(words: Words, fraction: int = FRACTION_BITS) -> NDArray[np.float64]:
    """Field elements as real numbers."""
    signed = words.astype(np.int64)
    signed = np.where(signed > PRIME // 2, signed - PRIME, signed)
    return signed / float(1 << fraction)
