"""Functions of one number, with the engine's tables, its order and its truncations.

Every step equals the engine's but for what shares carry: each truncation of the engine may be one away from nearest,
and a border between two pieces may be taken 1/64 too late.
"""

from __future__ import annotations

import json
from functools import partial
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from cloister.crypto.plain.arithmetic import multiply, multiply_truncate
from cloister.crypto.plain.numbers import FRACTION, OutOfRange, Rounding, check, truncate
from cloister.errors import InvalidParameter

TABLES: dict[str, Any] = json.loads((files("cloister.crypto.plain") / "tables.json").read_text())

# Bits after the point of a normalised number (reciprocal) and of z (exp), and those that a comparison sees.
POINT = 17
Z_FRACTION = 16
CELL = 6
# Where exp becomes zero, in cells.
CUT = 1232


def _fraction(f: int) -> None:
    if not 10 <= f <= 13:
        raise InvalidParameter(f"{f} fraction bits; 10 to 13 are possible here.")


def _within(x: Tensor, size: int, where: str) -> Tensor:
    """Refuses what the engine's comparison would not see."""
    return check(x, where, 1 - size, size - 1)


def relu(x: Tensor, f: int = FRACTION) -> Tensor:
    """max(x, 0)."""
    _fraction(f)
    return _within(x, 1024 << f, "relu").clamp_min(0)


def fading(u: Tensor, name: str, f: int, rounding: Rounding = truncate) -> Tensor:
    """What SiLU or GELU lacks to ReLU, at u >= 0."""
    pieces = TABLES[name]
    up, more = max(TABLES["fraction"] - f, 0), max(f - TABLES["fraction"], 0)
    cells = u >> (f - CELL)
    borders = torch.tensor([p["until"] >> (TABLES["fraction"] - CELL) for p in pieces], device=u.device)
    piece = torch.bucketize(cells, borders, right=True)

    def chosen(key: str, shift: int) -> Tensor:
        values = [p[key] << shift for p in pieces]
        return torch.tensor([*values, 0], dtype=torch.int64, device=u.device)[piece]

    v = chosen("slope", up) * torch.where(piece < len(pieces), u, 0) - chosen("centre", more)
    square = rounding(multiply(v, v, f"{name}: square"), TABLES["square_shift"] + more, f"{name}: square")
    cubic = (square + chosen("a1", more)) * (v + chosen("a2", more)) + chosen("a3", 2 * more)
    return rounding(cubic, TABLES["final_shift"] + more + up, f"{name}: cubic")


def _activation(x: Tensor, name: str, f: int, rounding: Rounding) -> Tensor:
    _fraction(f)
    size = _within(x, 1024 << f, name).abs()
    return x.clamp_min(0) - fading(size, name, f, rounding)


def silu(x: Tensor, f: int = FRACTION, rounding: Rounding = truncate) -> Tensor:
    """x / (1 + e^-x); |x| < 1024. Error below 2^-9.7 for f = 12."""
    return _activation(x, "silu", f, rounding)


def gelu(x: Tensor, f: int = FRACTION, rounding: Rounding = truncate) -> Tensor:
    """x Phi(x); |x| < 1024. Error below 2^-9.8 for f = 12."""
    return _activation(x, "gelu", f, rounding)


def exp2_of_fraction(t: Tensor) -> Tensor:
    """2^(t / 2^16) for 0 <= t < 2^16, at 30 bits after the point."""
    *rest, last = TABLES["exp2"]
    total = torch.full_like(t, last)
    for c in reversed(rest):
        total = ((total * t) >> 16) + c
    return total


def exp(x: Tensor, f: int = FRACTION, octaves: int = 0, g: int = FRACTION, rounding: Rounding = truncate) -> Tensor:
    """e^x at 2^g for x at 2^f, x <= octaves ln 2 + 1.3; zero below 2^(octaves - 27).

    Error: 2^-13.9 relative and half a last place. The engine's factors depend on the shares and add a relative 2^-15
    and an absolute 2^(octaves - 18) at most, with mean 0.
    """
    _fraction(f)
    if octaves + g > 32 or not 0 <= octaves <= 12:
        raise InvalidParameter(f"e^x up to 2^{octaves} with {g} fraction bits.")
    _within(x, 1 << min(10 + f, 22), "exp")
    z = rounding(x * TABLES["log2_e"] - (octaves << (f + Z_FRACTION)), f, "exp: z")
    if z.numel() and int(z.max()) >= 2 << Z_FRACTION:
        raise OutOfRange(f"exp: an argument above the window of 2^{octaves}.")
    cells = CUT - octaves * 4_437 // 100
    kept = ((x + (cells << (f - CELL))) >> (f - CELL)) >= 0
    # At 34 bits, as the engine's product is; floors may follow one another without harm.
    whole = z >> Z_FRACTION
    power = (exp2_of_fraction(z & 0xFFFF) << 4 + whole.clamp_min(0)) >> (-whole).clamp(0, 62)
    return torch.where(kept, rounding(power, 34 - g - octaves, "exp"), 0)


class Octaves:
    """The octaves (or pairs of them) from 2^least to 2^most, and how to bring a number into the last one."""

    def __init__(self, least: int, most: int, width: int) -> None:
        self.least, self.width, self.count = least, width, -(-(most - least) // width)
        if self.count <= 0 or most > 37 or least + self.count * width > 38 or self.count > 21:
            raise InvalidParameter(f"Numbers from 2^{least} to 2^{most} are too many octaves.")
        self.top = least + (self.count - 1) * width

    def place(self, x: Tensor) -> Tensor:
        """Which octave each number lies in, at the engine's resolution."""
        drop = max(self.least + self.width - 8, 0)
        borders = [(1 << (self.least + i * self.width)) >> drop for i in range(1, self.count)]
        return torch.bucketize(x >> drop, torch.tensor(borders, device=x.device, dtype=torch.int64), right=True)

    def normalise(self, x: Tensor, power: Tensor, rounding: Rounding) -> Tensor:
        """x times its power, at POINT bits."""
        if self.top >= POINT:
            return multiply_truncate(x, power, self.top - POINT, "normalise", rounding)
        return multiply(x << (POINT - self.top), power, "normalise")

    def back(self, top: int, total: int) -> int:
        """How far the last product is shifted."""
        shift = POINT + top - total
        if not 0 <= shift <= 32:
            raise InvalidParameter(f"A result at 2^{total} for numbers from 2^{self.least}.")
        return shift


def reciprocal(x: Tensor, least: int, most: int, total: int, rounding: Rounding = truncate) -> Tensor:
    """2^total / x for integers 2^least <= x < 2^most. Error: relative 2^-14 and one last place."""
    octaves = Octaves(least, most, 1)
    shift = octaves.back(octaves.top, total)
    power = torch.ones_like(x) << (octaves.count - 1 - octaves.place(x))
    product = partial(multiply_truncate, f=POINT, where="reciprocal", rounding=rounding)
    m = octaves.normalise(x, power, rounding)
    start, slope = TABLES["reciprocal_start"]
    y = rounding(m * slope + (start << POINT), POINT, "reciprocal")
    e = (1 << POINT) - product(m, y)
    first = y + product(y, e)
    y = first + product(first, product(e, e))
    return product(y, power, f=shift)


def rsqrt(
    x: Tensor, least: int, most: int, total: int, numerator: int = 1 << 16, rounding: Rounding = truncate
) -> Tensor:
    """(numerator / 2^16) 2^total / sqrt(x) for integers 2^least <= x < 2^most, least even.

    Error: relative 2^-13.5 and one last place.
    """
    if least % 2 or not 1 << 16 <= numerator < 1 << 17:
        raise InvalidParameter(f"A root from 2^{least} with numerator {numerator}.")
    octaves = Octaves(least, most, 2)
    shift = octaves.back(octaves.top // 2, total)
    steps = octaves.count - 1 - octaves.place(x)
    product = partial(multiply_truncate, f=POINT, where="rsqrt", rounding=rounding)
    m = octaves.normalise(x, torch.ones_like(x) << (2 * steps), rounding)
    c0, c1, c2, c3 = TABLES["rsqrt_start"]
    y = rounding(m * c3 + (c2 << POINT), POINT, "rsqrt")
    for c in (c1, c0):
        y = product(y, m) + c
    e = (1 << POINT) - product(m, product(y, y))
    y = y + product(y, 4 * e + 3 * product(e, e), f=POINT + 3)
    if numerator != 1 << 16:
        y = rounding(y * numerator, 16, "rsqrt")
    return product(y, torch.ones_like(x) << steps, f=shift)
