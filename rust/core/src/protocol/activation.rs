//! ReLU, SiLU, GELU.
//!
//! SiLU(x) = ReLU(x) - r(|x|) with r(u) = u / (1 + e^u), GELU(x) = ReLU(x) - r(|x|) with r(u) = u (1 - Phi(u)): one
//! sign serves ReLU and |x|, and the remainder is smooth and fades. Both identities hold for either sign of x as long as
//! r is continued below 0, so a sign that is wrong within a comparison's cell of 1/64 costs nothing.

use super::piecewise::{CELL, KAPPA, check_fraction, fading};
use super::tables::{GELU, Piece, SILU};
use super::{is_negative, not, select, step_on};
use crate::error::Result;
use crate::field;
use crate::party::Party;

/// Elements that run through a step together; bounds memory to a few hundred megabytes.
const PART: usize = 1 << 20;

/// max(x, 0) at 2^f, exact but for -1/64 <= x < 0, which may pass unchanged; |x| < 1024 - 1/64.
///
/// Cost: few elements 6 rounds, 237 bits, 4 transfers 1-of-16 and 9 transfers; many 8 rounds, 197 bits, 5 and 3.
pub fn relu(party: &mut Party, x: &[u64], f: u32) -> Result<Vec<u64>> {
    check_fraction(f)?;
    step_on(party, "relu", x.len(), |party| {
        let negative = is_negative(party, x, KAPPA, f - CELL)?;
        let positive = not(party, &negative);
        select(party, &positive, x)
    })
}

/// x / (1 + e^-x) at 2^f; |x| < 1024 - 1/64.
///
/// Error: at most 2^-10.6 from the cubics and two last places: below 2^-9.7 for f = 12. For |x| > 9.8 it is
/// ReLU but for one last place.
///
/// Cost: few elements 17 rounds, 1,450 bits, 16 transfers 1-of-16 and 39 transfers; many 21 rounds, 1,290 bits (161
/// bytes), 20 and 15; 2 triples.
pub fn silu(party: &mut Party, x: &[u64], f: u32) -> Result<Vec<u64>> {
    check_fraction(f)?;
    step_on(party, "silu", x.len(), |party| parts(party, x, |party, x| less_remainder(party, x, &SILU, f)))
}

/// x Phi(x), the exact GELU, at 2^f; |x| < 1024 - 1/64.
///
/// Error: at most 2^-10.7 from the cubics and two last places: below 2^-9.8 for f = 12. For |x| > 3.8 it is
/// ReLU but for one last place.
///
/// Cost: few elements 17 rounds, 1,189 bits, 12 transfers 1-of-16 and 30 transfers; many 21 rounds, 1,069 bits (134
/// bytes), 15 and 12; 2 triples.
pub fn gelu(party: &mut Party, x: &[u64], f: u32) -> Result<Vec<u64>> {
    check_fraction(f)?;
    step_on(party, "gelu", x.len(), |party| parts(party, x, |party, x| less_remainder(party, x, &GELU, f)))
}

fn less_remainder(party: &mut Party, x: &[u64], pieces: &[Piece], f: u32) -> Result<Vec<u64>> {
    let positive = relu(party, x, f)?;
    let size: Vec<u64> = positive.iter().zip(x).map(|(&r, &x)| field::sub(field::add(r, r), x)).collect();
    let remainder = fading(party, &size, pieces, f)?;
    Ok(positive.iter().zip(&remainder).map(|(&r, &t)| field::sub(r, t)).collect())
}

/// Runs an elementwise step on parts of bounded size.
fn parts(
    party: &mut Party,
    x: &[u64],
    mut body: impl FnMut(&mut Party, &[u64]) -> Result<Vec<u64>>,
) -> Result<Vec<u64>> {
    let mut out = Vec::with_capacity(x.len());
    for part in x.chunks(PART) {
        out.extend(body(party, part)?);
    }
    Ok(out)
}
