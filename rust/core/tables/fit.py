"""Computes every constant of the non-linear steps and writes it down twice: for the Rust core and for its plain twin.

Run by hand (`python rust/core/tables/fit.py`, needs scipy) when a polynomial changes. The two files it writes are
committed; a test holds them equal. Everything is an integer, so no floating point runs in either implementation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from scipy.optimize import linprog
from scipy.special import erfc

ROOT = Path(__file__).resolve().parents[3]
RUST = ROOT / "rust/core/src/protocol/tables.rs"
JSON = ROOT / "src/cloister/crypto/plain/tables.json"

FRACTION = 12
# A comparison may err by so much; every piece is good so much beyond its ends.
OVERLAP = 1 / 32
SQUARE_SHIFT = 19
FINAL_SHIFT = 25


def fit(function: Callable, low: float, high: float, degree: int, top: float | None = None, relative: bool = False):
    """Minimax polynomial on [low, high] (coefficients of 1, u, u^2, ...) and its error; `top` fixes the last."""
    nodes = np.cos(np.linspace(0, np.pi, 1500))
    middle, half = (low + high) / 2, (high - low) / 2
    u = middle + half * nodes
    values, powers = function(u), np.vander(nodes, degree + 1, increasing=True)
    weight = 1 / np.abs(values) if relative else np.ones_like(values)
    if top is not None:
        values, powers = values - top * u**degree, powers[:, :degree]
    powers, values = powers * weight[:, None], values * weight
    ones = np.ones((len(u), 1))
    found = linprog(
        [0] * powers.shape[1] + [1],
        np.block([[powers, -ones], [-powers, -ones]]),
        np.r_[values, -values],
        bounds=[(None, None)] * powers.shape[1] + [(0, None)],
    ).x
    total, base, power = np.poly1d([0.0]), np.poly1d([1 / half, -middle / half]), np.poly1d([1.0])
    for coefficient in found[:-1]:
        total, power = total + coefficient * power, power * base
    coefficients = np.zeros(degree + 1)
    coefficients[: total.order + 1] = total.coeffs[::-1]
    if top is not None:
        coefficients[degree] += top
    return coefficients, float(found[-1])


def piece(function: Callable, low: float, high: float, slope: int) -> tuple[dict[str, int], float]:
    """One cubic (q + a1)(v + a2) + a3 with v = slope * u - centre and q = v^2 >> SQUARE_SHIFT, in integers."""
    top = slope**3 * 2.0 ** (3 * FRACTION - SQUARE_SHIFT - FINAL_SHIFT - FRACTION)
    real, error = fit(function, low - OVERLAP, high + OVERLAP, 3, top)
    centre = round(slope * (low + high) / 2 * 2**FRACTION)
    # P(u) * 2^(FRACTION + FINAL_SHIFT) in powers of v, where u = (v + centre) / (slope 2^FRACTION); exactly.
    scale = Fraction(1, slope * 2**FRACTION)
    inner = [Fraction(0)] * 4
    for k, coefficient in enumerate(real):
        for j in range(k + 1):
            inner[j] += Fraction(float(coefficient)) * math.comb(k, j) * Fraction(centre) ** (k - j) * scale**k
    inner = [c * 2 ** (FRACTION + FINAL_SHIFT) for c in inner]
    a2 = round(inner[2] * 2**SQUARE_SHIFT)
    a1 = round(inner[1])
    a3 = round(inner[0] - Fraction(a1) * a2)
    return {"until": round(high * 2**FRACTION), "slope": slope, "centre": centre, "a1": a1, "a2": a2, "a3": a3}, error


def piecewise(function: Callable, ends: Sequence[float], slopes: Sequence[int]) -> tuple[list[dict[str, int]], float]:
    """All pieces of a fading function on [0, ends[-1]], and the largest error, the cut tail included."""
    pieces, worst = [], float(function(np.array(ends[-1] - OVERLAP)))
    for low, high, slope in zip([0.0, *ends], ends, slopes, strict=False):
        one, error = piece(function, low, high, slope)
        pieces.append(one)
        worst = max(worst, error)
    return pieces, worst


def main() -> None:
    """Fits everything, prints the errors, writes both files."""
    silu, silu_error = piecewise(lambda u: u / (1 + np.exp(u)), [2.28125, 4.9375, 9.75], [36, 8, -8])
    gelu, gelu_error = piecewise(lambda u: u * erfc(u / np.sqrt(2)) / 2, [1.59375, 3.75], [49, -23])
    exp2, exp2_error = fit(np.exp2, 0, 1, 5)
    inverse, inverse_error = fit(lambda m: 1 / m, 1, 2, 1, relative=True)
    root, root_error = fit(lambda m: 1 / np.sqrt(m), 1, 4, 3, relative=True)
    tables = {
        "fraction": FRACTION,
        "square_shift": SQUARE_SHIFT,
        "final_shift": FINAL_SHIFT,
        "silu": silu,
        "gelu": gelu,
        "log2_e": round(math.log2(math.e) * 2**16),
        "exp2": [round(c * 2**30) for c in exp2],
        "reciprocal_start": [round(c * 2**17) for c in inverse],
        "rsqrt_start": [round(c * 2**17) for c in root],
    }
    for name, error in {
        "silu": silu_error,
        "gelu": gelu_error,
        "exp2": exp2_error,
        "reciprocal start": inverse_error,
        "rsqrt start": root_error,
    }.items():
        print(f"{name:17} 2^{math.log2(error):.2f}")
    JSON.write_text(json.dumps(tables, indent=1) + "\n")
    RUST.write_text(rust(tables))


def rust(tables: dict) -> str:
    """The same constants as Rust."""

    def group(n: int) -> str:
        return f"{n:_}"

    def pieces(name: str) -> str:
        rows = "".join(
            "    Piece { " + ", ".join(f"{k}: {group(v)}" for k, v in one.items()) + " },\n" for one in tables[name]
        )
        return f"pub const {name.upper()}: [Piece; {len(tables[name])}] = [\n{rows}];\n"

    def row(name: str) -> str:
        values = ", ".join(group(v) for v in tables[name])
        return f"pub const {name.upper()}: [i64; {len(tables[name])}] = [{values}];\n"

    return f"""//! The constants of the non-linear steps. Written by `rust/core/tables/fit.py`; the plain backend reads
//! the same numbers from its `tables.json`, and a test holds the two files equal.

/// One cubic of a piecewise function; see [`super::piecewise`].
#[derive(Clone, Copy)]
pub struct Piece {{
    /// The piece ends here, at {FRACTION} fraction bits.
    pub until: i64,
    /// v = slope * u - centre.
    pub slope: i64,
    /// See `slope`.
    pub centre: i64,
    /// The cubic is (q + a1)(v + a2) + a3 with q = v^2 / 2^SQUARE_SHIFT.
    pub a1: i64,
    /// See `a1`.
    pub a2: i64,
    /// See `a1`.
    pub a3: i64,
}}

/// Fraction bits for which the pieces are written down.
pub const FRACTION: u32 = {FRACTION};
/// Bits that leave the square.
pub const SQUARE_SHIFT: u32 = {SQUARE_SHIFT};
/// Bits that leave the cubic.
pub const FINAL_SHIFT: u32 = {FINAL_SHIFT};
/// u / (1 + e^u) for u >= 0: what SiLU lacks to ReLU.
{pieces("silu")}/// u (1 - Phi(u)) for u >= 0: what GELU lacks to ReLU.
{pieces("gelu")}/// log2(e) at 16 fraction bits.
pub const LOG2_E: i64 = {group(tables["log2_e"])};
/// 2^t on [0, 1): powers of t, 30 fraction bits.
{row("exp2")}/// 1 / m on [1, 2], 17 fraction bits.
{row("reciprocal_start")}/// 1 / sqrt(m) on [1, 4], 17 fraction bits.
{row("rsqrt_start")}"""


if __name__ == "__main__":
    main()
