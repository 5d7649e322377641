//! The exponential, by one table of sixteen and one product.
//!
//! z = x log2(e) goes to a ring of 5 bits before the point and 16 behind it. Halved, it is n + t with 4 bits for n, so
//! that e^x = 4^(n0 + n1) 4^t0 4^t1 holds for the shares as they are: no carry is needed. Each party computes the power
//! of its own t. The server folds 4^(n0 + j) 4^t0 into the sixteen messages of one transfer, the client takes number
//! n1, and one product with the client's 4^t1 remains. The window of 28 octaves is cut below by a comparison.

use super::lookup::lookup16;
use super::piecewise::{CELL, KAPPA, check_fraction};
use super::tables::{EXP2, LOG2_E};
use super::{from_ring, is_negative, multiply, not, select, step_on, to_ring, truncate};
use crate::error::{Error, Result};
use crate::field;
use crate::party::Party;

/// Bits of the fraction of z.
const FRACTION: u32 = 16;
/// Bits after the point of the table's values, which are below 4.
const TABLE: u32 = 20;
/// Bits after the point of the client's factor, which is below 4.
const FACTOR: u32 = 14;
/// Shares of the table's values live modulo 2^24.
const TABLE_RING: u32 = 24;
/// What is below e^-19.25 of the ceiling becomes zero; in cells of 1/64.
const CUT: i64 = 1232;

/// 2^(t / 2^16) for 0 <= t < 2^16, at 30 bits after the point. The same integers as the plain backend; no table, so no
/// address depends on a share.
#[inline(always)]
pub(super) fn exp2_of_fraction(t: u64) -> u64 {
    let t = t as i64;
    EXP2[..5].iter().rev().fold(EXP2[5], |sum, &c| ((sum * t) >> 16) + c) as u64
}

/// 4^(t / 2^17) for the low 17 bits of a share, at 30 bits after the point.
#[inline(always)]
fn exp4_of_fraction(t: u64) -> u64 {
    exp2_of_fraction(t & 0xffff) << ((t >> 16) & 1)
}

/// e^x at 2^g for x at 2^f, x <= octaves * ln 2 + 1.3 and |x| < 1024 (512 for f = 13); f = 10 to 13, octaves + g <= 32.
///
/// `octaves` moves the window: below 2^(octaves - 27) the result is zero, and x above the stated bound gives a
/// meaningless number. For softmax octaves = 0.
///
/// Error: relative 2^-14.5 + |x| 2^-17.6, absolute 2^(octaves - 18), and one last place (two where g + octaves < 18).
///
/// Cost: few elements 11 rounds, 879 bits, 7 transfers 1-of-16 and 12 transfers; many 13 rounds, 839 bits (105 bytes), 8
/// and 6; 1 triple.
pub fn exponential(party: &mut Party, x: &[u64], f: u32, octaves: u32, g: u32) -> Result<Vec<u64>> {
    check_fraction(f)?;
    if octaves + g > 32 || octaves > 12 {
        return Err(Error::BadArgument(format!("e^x up to 2^{octaves} with {g} fraction bits")));
    }
    step_on(party, "exp", x.len(), |party| {
        let client = party.role.is_client();
        let log2_e = field::from_signed(LOG2_E);
        // The offset is exact in z, and rounded up to a cell where only the cut depends on it.
        let (shift, cut) = if client { (window(f, octaves), cut(f, octaves)) } else { (0, 0) };
        let z: Vec<u64> = x.iter().map(|&x| field::sub(field::mul(x, log2_e), shift)).collect();
        let z = to_ring(party, &z, f, 5 + FRACTION)?;
        let above: Vec<u64> = x.iter().map(|&x| field::add(x, cut)).collect();
        let cut = is_negative(party, &above, KAPPA, f - CELL)?;

        let power: Vec<u64> = z.iter().map(|&z| exp4_of_fraction(z)).collect();
        let digits: Vec<u8> = z.iter().map(|&z| (z >> (FRACTION + 1)) as u8).collect();
        let table = lookup16(party, &digits, TABLE_RING, |i, sum| {
            // sum = n0 + n1 modulo 16 stands for sum - 16, and 0 for 0; rounded to nearest.
            let below = 30 - TABLE + 2 * ((16 - sum) & 15);
            (power[i] + (1 << (below - 1))) >> below
        })?;
        let table = from_ring(party, &table, TABLE_RING)?;
        let factor: Vec<u64> = if client {
            power.iter().map(|&p| (p + (1 << (29 - FACTOR))) >> (30 - FACTOR)).collect()
        } else {
            vec![0; x.len()]
        };
        let product = multiply(party, &table, &factor)?;
        let result = truncate(party, &product, TABLE + FACTOR - g - octaves)?;
        let kept = not(party, &cut);
        select(party, &kept, &result)
    })
}

/// z at 2^(f + 16) of the ceiling.
fn window(f: u32, octaves: u32) -> u64 {
    u64::from(octaves) << (f + FRACTION)
}

/// What is added to x so that the sign says whether the result is cut.
fn cut(f: u32, octaves: u32) -> u64 {
    // ln 2 in cells of 1/64 is 44.36; rounding it down keeps the window on the safe side.
    let cells = CUT - (i64::from(octaves) * 4_437).div_euclid(100);
    field::from_signed(cells << (f - CELL))
}
