//! Softmax over rows.

use super::exponential::exponential;
use super::piecewise::{CELL, KAPPA, check_fraction};
use super::reciprocal::reciprocal;
use super::{Rows, maximum, multiply, step_on, truncate};
use crate::error::{Error, Result};
use crate::field;
use crate::party::Party;

/// Bits after the point of the exponentials and of the reciprocal of their sum.
const EXPONENTIAL: u32 = 20;
const INVERSE: u32 = 17;
/// What a masked entry counts as while the maximum is sought: -511 is below every entry that is allowed.
const MASKED: i64 = -511;

/// Softmax of every row at 2^f; |x| < 511, columns <= 8192, f = 10 to 13. `allowed`, public and as long as x, leaves
/// entries out (a causal mask): they are exactly 0.
///
/// Error: relative 2^-13, one last place, and columns * 2^-19 at the very worst (its square root in practice, because
/// the roundings of a row average out): below 2^-11 for f = 12 and 64 columns.
///
/// Cost: at most 1,322 bits an entry and 2 triples, and a reciprocal a row; 66 rounds for 64 columns and
/// few rows, of which each level of the maximum takes 6.
pub fn softmax(party: &mut Party, x: &[u64], columns: usize, allowed: Option<&[bool]>, f: u32) -> Result<Vec<u64>> {
    check_fraction(f)?;
    if !(1..=8192).contains(&columns) || !x.len().is_multiple_of(columns) {
        return Err(Error::BadArgument(format!("softmax of {} entries in rows of {columns}", x.len())));
    }
    if allowed.is_some_and(|allowed| allowed.len() != x.len()) {
        return Err(Error::BadArgument("a mask as long as the entries is due".into()));
    }
    step_on(party, "softmax", x.len(), |party| {
        let masked = if party.role.is_client() { field::from_signed(MASKED << f) } else { 0 };
        let is_allowed = |i: usize| allowed.is_none_or(|a| a[i]);
        let x: Vec<u64> = x.iter().enumerate().map(|(i, &v)| if is_allowed(i) { v } else { masked }).collect();
        // Any entry near the largest will do: the window of the exponential ends 1.3 above it.
        let maximum = maximum(party, &x, Rows { length: columns, kappa: KAPPA, drop_bits: f - CELL })?;
        let below: Vec<u64> = x.iter().enumerate().map(|(i, &v)| field::sub(v, maximum[i / columns])).collect();
        let mut powers = exponential(party, &below, f, 0, EXPONENTIAL)?;
        powers.iter_mut().enumerate().filter(|(i, _)| !is_allowed(*i)).for_each(|(_, p)| *p = 0);
        let one = if party.role.is_client() { 1 << EXPONENTIAL } else { 0 };
        let sums: Vec<u64> = powers
            .chunks_exact(columns)
            .enumerate()
            // A row without entries has sum 1 instead of 0, so that the reciprocal stays in its range.
            .map(|(r, row)| {
                let empty = !(r * columns..(r + 1) * columns).any(is_allowed);
                row.iter().fold(if empty { one } else { 0 }, |sum, &v| field::add(sum, v))
            })
            .collect();
        let most = EXPONENTIAL + columns.next_power_of_two().ilog2() + 1;
        let inverse = reciprocal(party, &sums, EXPONENTIAL, most, EXPONENTIAL + INVERSE)?;
        let inverse: Vec<u64> = (0..x.len()).map(|i| inverse[i / columns]).collect();
        let product = multiply(party, &powers, &inverse)?;
        let mut shares = truncate(party, &product, EXPONENTIAL + INVERSE - f)?;
        shares.iter_mut().enumerate().filter(|(i, _)| !is_allowed(*i)).for_each(|(_, p)| *p = 0);
        Ok(shares)
    })
}
