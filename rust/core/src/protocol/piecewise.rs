//! A function that fades to zero, as cubics between public borders: what SiLU and GELU lack to ReLU.
//!
//! All borders are compared in one batch. A piece is v = slope * u - centre and (v^2 + a1)(v + a2) + a3, whose
//! constants are public numbers times shared bits, so one cubic with selected constants is evaluated: two
//! products, however many pieces. Beyond the last border every constant is zero, and so is the result.

use super::tables::{FINAL_SHIFT, FRACTION, Piece, SQUARE_SHIFT};
use super::{bits_to_field, multiply, ring_is_negative, select, step, to_ring, truncate};
use crate::error::{Error, Result};
use crate::field;
use crate::party::Party;

/// Bits of a comparison of an activation, its sign included; the other sixteen fill four leaves.
pub(super) const KAPPA: u32 = 17;
/// Fraction bits that a comparison sees: cells of 1/64. Pieces are good 1/32 beyond their ends.
pub(super) const CELL: u32 = 6;

/// Refuses a number of fraction bits for which the cubics would leave the range of values.
pub(super) fn check_fraction(f: u32) -> Result<()> {
    if (10..=13).contains(&f) {
        Ok(())
    } else {
        Err(Error::BadArgument(format!("{f} fraction bits; 10 to 13 are possible here")))
    }
}

/// The faded function of `pieces` at u, for -1/64 <= u < 1024, both at 2^f (f = 10 to 13).
///
/// Against the cubics the error is at most two last places; the cubics' own error is stated where they are used.
///
/// Cost with k pieces: 18 bits for the ring, 135 (few elements) or 95 (many) for each comparison, 42 for its bit in the
/// field, 84 for its selection; 2 * (164 + 42) bits and 2 triples for the cubic.
pub(super) fn fading(party: &mut Party, u: &[u64], pieces: &[Piece], f: u32) -> Result<Vec<u64>> {
    check_fraction(f)?;
    let (n, k) = (u.len(), pieces.len());
    let client = party.role.is_client();
    let ring = to_ring(party, u, f - CELL, KAPPA)?;
    let mask = (1u64 << KAPPA) - 1;
    let mut distance = Vec::with_capacity(k * n);
    for piece in pieces {
        let border = if client { (piece.until >> (FRACTION - CELL)) as u64 } else { 0 };
        distance.extend(ring.iter().map(|&v| v.wrapping_sub(border) & mask));
    }
    // [u < border] of every piece; a piece holds where its border is the first above u.
    let mut inside = ring_is_negative(party, &distance, KAPPA)?;
    for at in (n..k * n).rev() {
        inside[at] ^= inside[at - n];
    }
    let weights = bits_to_field(party, &inside)?;
    let parts = select(party, &inside, &u.repeat(k))?;

    // At f below FRACTION the argument gains the missing bits here and loses them at the end.
    let (up, more) = (FRACTION.saturating_sub(f), f.saturating_sub(FRACTION));
    let sum = |of: &dyn Fn(&Piece) -> (i64, i64)| -> Vec<u64> {
        let mut out = vec![0; n];
        for (j, piece) in pieces.iter().enumerate() {
            let (part, weight) = of(piece);
            let (part, weight) = (field::from_signed(part), field::from_signed(weight));
            for ((o, &x), &w) in out.iter_mut().zip(&parts[j * n..]).zip(&weights[j * n..]) {
                *o = field::add(*o, field::add(field::mul(part, x), field::mul(weight, w)));
            }
        }
        out
    };
    let v = sum(&|p| (p.slope << up, -p.centre << more));
    let v_a2 = sum(&|p| (p.slope << up, (p.a2 - p.centre) << more));
    let a1 = sum(&|p| (0, p.a1 << more));
    let a3 = sum(&|p| (0, p.a3 << (2 * more)));

    let square = multiply(party, &v, &v)?;
    let mut square = truncate(party, &square, SQUARE_SHIFT + more)?;
    square.iter_mut().zip(&a1).for_each(|(q, &a)| *q = field::add(*q, a));
    let mut cubic = multiply(party, &square, &v_a2)?;
    cubic.iter_mut().zip(&a3).for_each(|(z, &a)| *z = field::add(*z, a));
    step(party, "last", |party| truncate(party, &cubic, FINAL_SHIFT + more + up))
}
