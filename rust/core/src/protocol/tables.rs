//! The constants of the non-linear steps. Written by `rust/core/tables/fit.py`; the plain backend reads
//! the same numbers from its `tables.json`, and a test holds the two files equal.

/// One cubic of a piecewise function; see [`super::piecewise`].
#[derive(Clone, Copy)]
pub struct Piece {
    /// The piece ends here, at 12 fraction bits.
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
}

/// Fraction bits for which the pieces are written down.
pub const FRACTION: u32 = 12;
/// Bits that leave the square.
pub const SQUARE_SHIFT: u32 = 19;
/// Bits that leave the cubic.
pub const FINAL_SHIFT: u32 = 25;
/// u / (1 + e^u) for u >= 0: what SiLU lacks to ReLU.
pub const SILU: [Piece; 3] = [
    Piece { until: 9_344, slope: 36, centre: 168_192, a1: 32_653, a2: -434_918, a3: 52_197_829_601 },
    Piece { until: 20_224, slope: 8, centre: 118_272, a1: -281_666, a2: 1_064_661, a3: 313_029_799_323 },
    Piece { until: 39_936, slope: -8, centre: -240_640, a1: 17_476, a2: 158_875, a3: -2_204_314_419 },
];
/// u (1 - Phi(u)) for u >= 0: what GELU lacks to ReLU.
pub const GELU: [Piece; 2] = [
    Piece { until: 6_528, slope: 49, centre: 159_936, a1: -10_599, a2: -352_467, a3: 19_551_316_564 },
    Piece { until: 15_360, slope: -23, centre: -251_712, a1: 40_260, a2: 238_270, a3: -8_192_262_531 },
];
/// log2(e) at 16 fraction bits.
pub const LOG2_E: i64 = 94_548;
/// 2^t on [0, 1): powers of t, 30 fraction bits.
pub const EXP2: [i64; 6] = [1_073_741_742, 744_267_617, 257_859_499, 59_955_763, 9_635_010, 2_023_935];
/// 1 / m on [1, 2], 17 fraction bits.
pub const RECIPROCAL_START: [i64; 2] = [185_043, -61_681];
/// 1 / sqrt(m) on [1, 4], 17 fraction bits.
pub const RSQRT_START: [i64; 4] = [203_973, -96_844, 25_518, -2_497];
