"""What a backend brings so that `Computer` can be written once: its two kinds of value, and each step on them.

Arguments come checked, and mean what the method of `Computer` with the same name says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from cloister.crypto.fixed import FRACTION_BITS


class NumbersLike(Protocol):
    """An array of fixed-point numbers. Sums, differences and products with public integers cost nothing and are written
    as usual; both sides of a sum are at the same scale, and shapes broadcast as in NumPy."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        ...

    @property
    def fraction(self) -> int:
        """Bits after the binary point."""
        ...

    def __add__(self, other: Self) -> Self: ...

    def __sub__(self, other: Self) -> Self: ...

    def __neg__(self) -> Self: ...

    def __getitem__(self, index: Any) -> Self: ...

    def reshape(self, *shape: int) -> Self:
        """The same numbers in another shape."""
        ...

    def transpose(self, *axes: int) -> Self:
        """The same numbers with axes permuted."""
        ...

    def times(self, factor: int) -> Self:
        """Each number times a small public integer (|factor| < 2^22)."""
        ...

    def sum(self, axis: int) -> Self:
        """Sums along an axis."""
        ...


class BitsLike(Protocol):
    """An array of bits."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        ...

    def __xor__(self, other: Self) -> Self: ...

    def __getitem__(self, index: Any) -> Self: ...

    def reshape(self, *shape: int) -> Self:
        """The same bits in another shape."""
        ...

    def transpose(self, *axes: int) -> Self:
        """The same bits with axes permuted."""
        ...


N = TypeVar("N", bound=NumbersLike)
B = TypeVar("B", bound=BitsLike)


class Primitives(ABC, Generic[N, B]):
    """The steps of one backend."""

    fraction: int = FRACTION_BITS
    _numbers: ClassVar[type[Any]]
    """The class of its numbers, N."""
    _bits: ClassVar[type[Any]]
    """The class of its bits, B."""

    # ---- values in and out ----------------------------------------------------------------------------------------

    @abstractmethod
    def _scaled(self, values: Any, fraction: int) -> Any:
        """Real numbers as an array of integers at 2^fraction."""

    @abstractmethod
    def _integers(self, values: Any, bound: int, what: str) -> Any:
        """An array of integers in [-bound, bound)."""

    @abstractmethod
    def _share(self, values: Any | None, owner: str, shape: tuple[int, ...], fraction: int) -> N: ...

    @abstractmethod
    def _reveal(self, x: N, to: str) -> Any: ...

    @abstractmethod
    def _constant(self, values: Any, like: N) -> N: ...

    # ---- products -------------------------------------------------------------------------------------------------

    @abstractmethod
    def _matmul(self, x: N, weights: Any | None, outputs: int, weight_bits: int, prepared: str | None) -> N: ...

    @abstractmethod
    def _batched_matmul(
        self, x: N, weights: list[Any] | None, outputs: Sequence[int], most_bytes: int | None, prepared: str | None
    ) -> list[N]:
        """`x` is (experts, tokens, columns)."""

    @abstractmethod
    def _shared_matmul(self, x: N, y: N) -> N: ...

    @abstractmethod
    def _inner_products(self, x: N, y: N) -> N: ...

    # ---- arithmetic and functions ---------------------------------------------------------------------------------

    @abstractmethod
    def _truncate(self, x: N, bits: int) -> N: ...

    @abstractmethod
    def _multiply(self, x: N, y: N) -> N: ...

    @abstractmethod
    def _square(self, x: N) -> N: ...

    @abstractmethod
    def _select(self, bits: B, x: N) -> N: ...

    @abstractmethod
    def _relu(self, x: N) -> N: ...

    @abstractmethod
    def _silu(self, x: N) -> N: ...

    @abstractmethod
    def _gelu(self, x: N) -> N: ...

    @abstractmethod
    def _exp(self, x: N, octaves: int, fraction: int) -> N: ...

    @abstractmethod
    def _reciprocal(self, x: N, least: int, most: int, fraction: int) -> N:
        """The integers lie from 2^least to 2^most."""

    @abstractmethod
    def _rsqrt(self, x: N, least: int, most: int) -> N:
        """The integers lie from 2^least to 2^most, least even."""

    @abstractmethod
    def _softmax(self, x: N, allowed: Any | None) -> N:
        """`allowed` is an array of bytes, 0 or 1, in the shape of x."""

    @abstractmethod
    def _norm(self, x: N, epsilon: int, rms_bits: int, centred: bool) -> N:
        """`epsilon` is in units of 2^-24; every root mean square is below 2^rms_bits."""

    # ---- bits and order -------------------------------------------------------------------------------------------

    @abstractmethod
    def _less_than(self, x: N, y: N, bits: int, drop_bits: int) -> B: ...

    @abstractmethod
    def _is_negative(self, x: N, bits: int, drop_bits: int) -> B: ...

    @abstractmethod
    def _equal(self, x: N, y: N) -> B: ...

    @abstractmethod
    def _and(self, a: B, b: B) -> B: ...

    @abstractmethod
    def _or(self, a: B, b: B) -> B: ...

    @abstractmethod
    def _not(self, a: B) -> B: ...

    @abstractmethod
    def _bits_to_values(self, a: B) -> N: ...

    @abstractmethod
    def _one_hot(self, x: N, width: int) -> B: ...

    @abstractmethod
    def _maximum(self, x: N, bits: int, drop_bits: int) -> N: ...

    @abstractmethod
    def _rank(self, x: N, bits: int, drop_bits: int) -> N: ...

    @abstractmethod
    def _top_k_mask(self, x: N, k: int, bits: int, drop_bits: int) -> B: ...

    @abstractmethod
    def _dispatch(self, x: N, slots: int, bits: int, drop_bits: int) -> N: ...
