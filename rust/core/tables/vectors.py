"""Writes `vectors.txt`: what the plain backend makes of a few arguments, for the core's tests.

Run by hand (`PYTHONPATH=src python rust/core/tables/vectors.py`) after `fit.py`. The core must come within each step's
last places of these numbers; a test holds the file to what the plain backend says today.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from cloister.crypto import plain

FILE = Path(__file__).parent / "vectors.txt"


def answer(name: str, numbers: list[int], x: Tensor) -> Tensor:
    """The plain backend's result for one line."""
    match name, numbers:
        case (("relu" | "silu" | "gelu"), [f]):
            return {"relu": plain.relu, "silu": plain.silu, "gelu": plain.gelu}[name](x, f)
        case "exp", [f, octaves, g]:
            return plain.exp(x, f, octaves, g)
        case "reciprocal", [least, most, total]:
            return plain.reciprocal(x, least, most, total)
        case "rsqrt", [least, most, numerator, total]:
            return plain.rsqrt(x, least, most, total, numerator)
        case "softmax", [columns, f]:
            return plain.softmax(x.reshape(-1, columns), f=f).flatten()
        case (("rms_norm" | "layer_norm"), [columns, f, rms_bits, epsilon]):
            plan = plain.NormPlan(columns, rms_bits, epsilon, f)
            norm = plain.rms_norm if name == "rms_norm" else plain.layer_norm
            return norm(x.reshape(-1, columns), plan).flatten()
    raise ValueError(f"no step {name} with {numbers}")


def arguments() -> Iterator[tuple[str, list[int], Tensor]]:
    """Every line: the step, its public numbers, its arguments."""
    draw = torch.Generator().manual_seed(2026)

    def normal(n: int, scale: float) -> Tensor:
        return (torch.randn(n, generator=draw) * scale).round().to(torch.int64)

    def magnitude(n: int, least: int, most: int) -> Tensor:
        return torch.exp2(torch.rand(n, generator=draw, dtype=torch.float64) * (most - least) + least).to(torch.int64)

    for f in (10, 12, 13):
        # Not where a comparison may fall either way: within a cell above a border.
        x = torch.cat([normal(150, 4 << f), normal(10, 200 << f)])
        near = [0, *(sign * e for e in (2.28125, 4.9375, 9.75, 1.59375, 3.75) for sign in (1, -1))]
        for border in near:
            x = x[(x - border * 2**f).abs() > 2**f / 32]
        for name in ("relu", "silu", "gelu"):
            yield name, [f], x
        yield "exp", [f, 0, 20], -normal(100, 6 << f).abs()
        yield "exp", [f, 6, 12], (math.log(64) * 2**f - normal(100, 6 << f).abs()).to(torch.int64)
        yield "softmax", [32, f], normal(4 * 32, 3 << f)
        for name in ("rms_norm", "layer_norm"):
            yield name, [96, f, 2, 168], normal(2 * 96, 1 << f)
    for least, most, total in ((16, 24, 36), (0, 12, 24), (20, 34, 37)):
        yield "reciprocal", [least, most, total], magnitude(60, least, most)
    for least, most, numerator, total in ((0, 20, 65536, 20), (12, 36, 92682, 32)):
        yield "rsqrt", [least, most, numerator, total], magnitude(60, least, most)


def line(name: str, numbers: list[int], x: Tensor, y: Tensor) -> str:
    """`name numbers | arguments | results`."""
    return f"{name} {' '.join(map(str, numbers))}|{' '.join(map(str, x.tolist()))}|{' '.join(map(str, y.tolist()))}\n"


if __name__ == "__main__":
    FILE.write_text("".join(line(name, numbers, x, answer(name, numbers, x)) for name, numbers, x in arguments()))
