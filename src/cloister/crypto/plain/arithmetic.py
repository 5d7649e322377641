"""Products, comparisons and order: what the engine does exactly, done exactly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cloister.crypto.plain.numbers import BOUND, FRACTION, OutOfRange, Rounding, check, truncate


def multiply(x: Tensor, y: Tensor, where: str = "multiply") -> Tensor:
    """x * y, elementwise, not truncated."""
    product = x * y
    # int64 wraps beyond 2^63; a factor below 2^23 cannot bring a value that far.
    if _bits(x) + _bits(y) >= 63:
        rough = x.to(torch.float64) * y.to(torch.float64)
        product = torch.where(rough.abs() < 2.0 * BOUND, product, torch.full_like(product, BOUND))
    return check(product, where)


def multiply_truncate(
    x: Tensor, y: Tensor, f: int = FRACTION, where: str = "multiply", rounding: Rounding = truncate
) -> Tensor:
    """x * y / 2^f."""
    return rounding(multiply(x, y, where), f, where)


def square(x: Tensor) -> Tensor:
    """x * x, not truncated."""
    return multiply(x, x, "square")


def inner_products(x: Tensor, y: Tensor) -> Tensor:
    """Sums of x * y over the last axis, not truncated."""
    return check(multiply(x, y, "inner_products").sum(-1), "inner_products")


def matmul(x: Tensor, y: Tensor, where: str = "matmul") -> Tensor:
    """The matrix product (batched as in torch), exact and not truncated.

    Runs on the floating-point units: both sides are cut into digits so narrow that every sum is exact in a double.
    """
    inner = x.shape[-1]
    bits_x, bits_y = _bits(x), _bits(y)
    room = 52 - max(inner - 1, 1).bit_length()
    pieces_x, pieces_y = min(
        ((a, b) for a in range(1, 42) for b in range(1, 42) if -(-bits_x // a) + -(-bits_y // b) <= room),
        key=lambda pair: pair[0] * pair[1],
    )
    width_x, width_y = -(-bits_x // pieces_x), -(-bits_y // pieces_y)
    digits_y = [d.to(torch.float64) for d in _digits(y, pieces_y, width_y)]
    exact: Tensor | None = None
    rough: Tensor | None = None
    for i, digit_x in enumerate(_digits(x, pieces_x, width_x)):
        left = digit_x.to(torch.float64)
        for j, right in enumerate(digits_y):
            part = torch.matmul(left, right)
            shift = i * width_x + j * width_y
            # Modulo 2^64 the sum is exact; the rough one tells whether it stayed in range.
            term = part.to(torch.int64) << shift if shift < 64 else torch.zeros_like(part, dtype=torch.int64)
            exact = term if exact is None else exact + term
            rough = part * 2.0**shift if rough is None else rough + part * 2.0**shift
    assert exact is not None and rough is not None
    if rough.numel() and float(rough.abs().max()) >= BOUND:
        worst = int(rough.abs().argmax())
        raise OutOfRange(
            f"{where}: element {worst} of {tuple(rough.shape)} is about {float(rough.flatten()[worst]):.4g}, "
            f"outside +-{BOUND}.",
            advice="Lower the scale or the plan's bounds of this step.",
        )
    return check(exact, where)


def _digits(x: Tensor, pieces: int, width: int) -> list[Tensor]:
    """x in base 2^width, lowest first; the highest digit is signed."""
    low = [(x >> (i * width)) & ((1 << width) - 1) for i in range(pieces - 1)]
    return [*low, x >> ((pieces - 1) * width)]


def _bits(x: Tensor) -> int:
    """Bits of the largest size in x."""
    return max(int(x.abs().max()).bit_length(), 1) if x.numel() else 1


def less_than(x: Tensor, y: Tensor) -> Tensor:
    """[x < y] as 0 or 1. Where the engine drops d bits, it may say 0 while 0 < y - x <= 2^d."""
    return (check(x - y, "less_than") < 0).to(torch.int64)


def equal(x: Tensor, y: Tensor) -> Tensor:
    """[x = y] as 0 or 1."""
    return (x == y).to(torch.int64)


def select(bits: Tensor, x: Tensor) -> Tensor:
    """x where the bit is 1, else 0."""
    return bits * check(x, "select")


def maximum(x: Tensor) -> Tensor:
    """The largest of the last axis."""
    return x.amax(-1)


def rank(x: Tensor) -> Tensor:
    """The rank of each value along the last axis; 0 is the largest, and of equal values the first ranks first."""
    order = torch.argsort(x, dim=-1, descending=True, stable=True)
    places = torch.arange(x.shape[-1], device=x.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def top_k_mask(x: Tensor, k: int) -> Tensor:
    """1 for exactly the k largest along the last axis."""
    return (rank(x) < k).to(torch.int64)


def one_hot(index: Tensor, width: int) -> Tensor:
    """([index = 0], ..., [index = width - 1]) along a new last axis; an index beyond gives zeros."""
    return (index.unsqueeze(-1) == torch.arange(width, device=index.device)).to(torch.int64)


def dispatch(x: Tensor, slots: int) -> Tensor:
    """Along the last axis of scores: the slots x length matrices with [value j has rank s] at (s, j)."""
    return one_hot(rank(x), slots).transpose(-1, -2)


def root_parts(n: int) -> tuple[int, int]:
    """sqrt(n) as numerator / 2^16 * 2^exponent with the numerator in [2^16, 2^17)."""
    root = math.isqrt(n << 32)
    exponent = root.bit_length() - 17
    return root >> exponent, exponent
