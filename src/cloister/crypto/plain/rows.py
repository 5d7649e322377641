"""Softmax and the norms, along the last axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cloister.crypto.plain.arithmetic import inner_products, maximum, multiply, root_parts
from cloister.crypto.plain.functions import exp, reciprocal, rsqrt
from cloister.crypto.plain.numbers import FRACTION, OutOfRange, Rounding, check, truncate
from cloister.errors import InvalidParameter

EXPONENTIAL = 20
INVERSE = 17
MASKED = -511


def softmax(x: Tensor, allowed: Tensor | None = None, f: int = FRACTION, rounding: Rounding = truncate) -> Tensor:
    """Softmax at 2^f; |x| < 511. `allowed` (of a shape that broadcasts) leaves entries out; a row without any gives
    zeros.

    Error: relative 2^-13 and half a last place.
    """
    columns = x.shape[-1]
    if not 1 <= columns <= 8192:
        raise InvalidParameter(f"Softmax of rows of {columns} entries; 1 to 8192 are possible.")
    kept = torch.ones_like(x, dtype=torch.bool) if allowed is None else allowed.expand_as(x)
    x = torch.where(kept, check(torch.where(kept, x, 0), "softmax", (MASKED << f) + 1, (-MASKED << f) - 1), MASKED << f)
    powers = torch.where(kept, exp(x - maximum(x).unsqueeze(-1), f, 0, EXPONENTIAL, rounding), 0)
    sums = powers.sum(-1)
    sums = torch.where(kept.any(-1), sums, 1 << EXPONENTIAL)
    most = EXPONENTIAL + (columns - 1).bit_length() + 1
    inverse = reciprocal(sums, EXPONENTIAL, most, EXPONENTIAL + INVERSE, rounding)
    shares = rounding(multiply(powers, inverse.unsqueeze(-1), "softmax"), EXPONENTIAL + INVERSE - f, "softmax")
    return torch.where(kept, shares, 0)


@dataclass(frozen=True)
class NormPlan:
    """What is public about the rows of a norm; the fields are the engine's."""

    columns: int
    rms_bits: int = 2
    epsilon: int = 168
    """In units of 2^-24: a model's 1e-5 is 168."""
    f: int = FRACTION

    def mean_bits(self) -> int:
        """Bits that a mean has more than the entries: as many as the last product can spare."""
        return 3 - self.rms_bits // 2

    def integers(self, extra: int) -> NormIntegers:
        """The integers of rows at 2^(f + extra)."""
        if not (2 <= self.columns <= 8192 and 0 <= self.rms_bits <= 7 and 1 <= self.epsilon <= 1 << 16):
            raise InvalidParameter(f"A norm of {self.columns} columns, rms below 2^{self.rms_bits}.")
        if not 10 <= self.f <= 13:
            raise InvalidParameter(f"{self.f} fraction bits; 10 to 13 are possible here.")
        f, log = self.f + extra, (self.columns - 1).bit_length()
        shift = max(self.rms_bits + f - (36 - log) // 2, 0)
        scale = 2 * (f - shift)
        epsilon = max((self.columns * self.epsilon << scale) >> 24, 1)
        least = (epsilon.bit_length() - 1) & ~1
        most = log + 2 * self.rms_bits + scale + 1
        numerator, exponent = root_parts(self.columns)
        # 1 / rms = sqrt(columns) 2^(f - shift) / sqrt(squares), as many bits as the last product and the root allow.
        whole = exponent + f - shift
        top = least + 2 * (-(-(most - least) // 2) - 1)
        inverse = min((77 - 2 * f - log) // 2, 17 + top // 2 - whole)
        return NormIntegers(shift, epsilon, least, most, numerator, whole + inverse, inverse)


@dataclass(frozen=True)
class NormIntegers:
    """What a plan comes to."""

    shift: int
    """Bits that entries lose before they are squared."""
    epsilon: int
    """Added to the sum of squares, which is at least 2^least and below 2^most."""
    least: int
    most: int
    numerator: int
    """sqrt(columns) = numerator / 2^16 * 2^exponent."""
    total: int
    """The root is numerator * 2^total / sqrt(squares)."""
    inverse: int
    """Bits after the point of 1 / rms."""


def rms_norm(x: Tensor, plan: NormPlan, rounding: Rounding = truncate) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon), without weights: those belong into the next product."""
    return _normalise(x, plan, 0, rounding)


def layer_norm(x: Tensor, plan: NormPlan, rounding: Rounding = truncate) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon), without weights and bias."""
    if x.shape[-1] != plan.columns:
        raise InvalidParameter(f"Rows of {x.shape[-1]} entries for a plan of {plan.columns}.")
    extra = plan.mean_bits()
    k = 38 - plan.f - plan.rms_bits
    inverse = ((1 << k) + plan.columns // 2) // plan.columns
    sums = x.sum(-1)
    scaled = multiply(sums, torch.full_like(sums, inverse), "layer_norm: mean")
    mean = rounding(scaled, k - extra, "layer_norm: mean")
    return _normalise((x << extra) - mean.unsqueeze(-1), plan, extra, rounding)


def _normalise(x: Tensor, plan: NormPlan, extra: int, rounding: Rounding) -> Tensor:
    """Rows at 2^(f + extra), normalised, at 2^f."""
    if x.shape[-1] != plan.columns:
        raise InvalidParameter(f"Rows of {x.shape[-1]} entries for a plan of {plan.columns}.")
    i = plan.integers(extra)
    small = rounding(x, i.shift, "norm")
    squares = check(inner_products(small, small) + i.epsilon, "norm: squares")
    if squares.numel() and int(squares.max()) >= 1 << i.most:
        raise OutOfRange(f"norm: a row's root mean square is above 2^{plan.rms_bits}.")
    inverse = rsqrt(squares, i.least, i.most, i.total, i.numerator, rounding)
    return rounding(multiply(x, inverse.unsqueeze(-1), "norm"), i.inverse + extra, "norm")
