"""What one party holds: its shares of numbers and of bits. Alone they are uniformly random and mean nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.crypto.engine.checks import array_of, kind_of, whole
from cloister.errors import InvalidParameter

PRIME = 2_199_023_190_017
VALUE_BOUND = PRIME // 4
FRACTION_BITS = 12

MOST_FACTOR = (1 << 22) - 1  # times a share it stays below 2^63
MOST_SUMMED = 1 << 22  # shares that a 64-bit word adds up

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

    def __add__(self, other: Any) -> Shares:
        self._same_scale(other)
        with _fitting(self, other):
            return Shares((self.data + other.data) % PRIME, self.fraction)

    def __sub__(self, other: Any) -> Shares:
        self._same_scale(other)
        with _fitting(self, other):
            return Shares((self.data + (PRIME - other.data)) % PRIME, self.fraction)

    def __neg__(self) -> Shares:
        return Shares((PRIME - self.data) % PRIME, self.fraction)

    def __getitem__(self, index: Any) -> Shares:
        return Shares(np.ascontiguousarray(self.data[index]), self.fraction)

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
        if not isinstance(factor, int | np.integer) or isinstance(factor, bool):
            raise InvalidParameter(
                f"Shares can be taken times an integer, not {kind_of(factor)}.",
                advice="Round the factor at a scale, say times(round(1.5 * 4096)), count 12 more fraction bits, and "
                "truncate; or multiply with shares of it.",
                param="factor",
            )
        if whole(factor, "factor", -MOST_FACTOR, MOST_FACTOR) < 0:
            return -self.times(-int(factor))
        return Shares((self.data * np.uint64(factor)) % PRIME, self.fraction)

    def sum(self, axis: int) -> Shares:
        """Sums along an axis."""
        axis = whole(axis, "axis", -len(self.shape))
        if axis >= len(self.shape):
            raise InvalidParameter(f"Shares of shape {self.shape} have no axis {axis}.", param="axis")
        if self.shape[axis] > MOST_SUMMED:
            raise InvalidParameter(
                f"At most {MOST_SUMMED:,} values can be summed at once.", advice="Sum parts of them."
            )
        return Shares(self.data.sum(axis=axis, dtype=np.uint64) % PRIME, self.fraction)

    def _same_scale(self, other: Any) -> None:
        if not isinstance(other, Shares):
            raise InvalidParameter(
                f"Shares cannot be added to {kind_of(other)}.", advice="Make shares of public numbers: Party.constant."
            )
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

    def __xor__(self, other: Any) -> Bits:
        if not isinstance(other, Bits):
            raise InvalidParameter(f"Bits cannot be combined with {kind_of(other)}.")
        with _fitting(self, other):
            return Bits(self.data ^ other.data)

    def reshape(self, *shape: int) -> Bits:
        """The same bits in another shape."""
        with _fitting(self, shape):
            return Bits(self.data.reshape(*shape))

    def __getitem__(self, index: Any) -> Bits:
        return Bits(np.ascontiguousarray(self.data[index]))


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
    whole(fraction, "fraction", 0, 39)
    scaled = np.rint(array_of(values, "The values", "biuf").astype(np.float64) * (1 << fraction))
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
