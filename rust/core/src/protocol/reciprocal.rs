//! Reciprocal and reciprocal square root of positive numbers of unknown size.
//!
//! The octave of x is found by comparing it with powers of two, all in one batch; multiplied by the power that the bits
//! select, x becomes m at 17 bits in [1, 2) (or [1, 4)), exactly. A minimax start, one correction of high order, and
//! the same power back. These run once a row, so rounds were spared and bytes were not.

use super::tables::{RECIPROCAL_START, RSQRT_START};
use super::{bits_to_field, is_negative, multiply_truncate, not, step_on, truncate};
use crate::error::{Error, Result};
use crate::field;
use crate::party::Party;

/// Bits after the point of m and of everything made from it.
const POINT: u32 = 17;

/// 2^total / x for integers 2^least <= x < 2^most, with most <= 37 and most - least <= 21.
///
/// Error: relative 2^-14 and two last places. The result must stay below p/4.
///
/// Cost: 1,278 bits and 6 triples, and for each octave but the first a comparison of most - max(least - 7, 0) + 1 bits
/// and a bit to the field.
pub fn reciprocal(party: &mut Party, x: &[u64], least: u32, most: u32, total: u32) -> Result<Vec<u64>> {
    let octaves = Octaves::new(least, most, 1)?;
    let shift = octaves.shift_back(octaves.top(), total)?;
    step_on(party, "reciprocal", x.len(), |party| {
        let found = octaves.find(party, x)?;
        let back = found.power(party, |octave| 1 << (octaves.count - 1 - octave));
        let m = found.normalise(party, x, &back)?;
        let n = m.len();

        let mut y: Vec<u64> = m.iter().map(|&m| field::mul(m, field::from_signed(RECIPROCAL_START[1]))).collect();
        add_constant(party, &mut y, RECIPROCAL_START[0] << POINT);
        let y = truncate(party, &y, POINT)?;
        // 1 / (m y) = (1 + e)(1 + e^2) / (1 - e^4) with e = 1 - m y, |e| < 1/16.
        let product = multiply_truncate(party, &m, &y, POINT)?;
        let e = one_minus(party, &product);
        let both = multiply_truncate(party, &[y.clone(), e.clone()].concat(), &[e.clone(), e].concat(), POINT)?;
        let first = added(&y, &both[..n]);
        let second = multiply_truncate(party, &first, &both[n..], POINT)?;
        let y = added(&first, &second);
        octaves.denormalise(party, &y, &back, shift)
    })
}

/// numerator * 2^total / sqrt(x) for integers 2^least <= x < 2^most; least even, most <= 37, most - least <= 40.
/// `numerator` is in [1, 2) at 16 fraction bits.
///
/// Error: relative 2^-13.5 and two last places. The result must stay below p/4.
///
/// Cost: 1,690 bits and 8 triples, 42 bits more with a numerator, and for each pair of octaves but the first a
/// comparison of most - max(least - 6, 0) + 1 bits and a bit to the field.
pub fn rsqrt(party: &mut Party, x: &[u64], least: u32, most: u32, numerator: u32, total: u32) -> Result<Vec<u64>> {
    if !least.is_multiple_of(2) || !(1 << 16..1 << 17).contains(&numerator) {
        return Err(Error::BadArgument(format!("a root from 2^{least} with numerator {numerator}")));
    }
    let octaves = Octaves::new(least, most, 2)?;
    let shift = octaves.shift_back(octaves.top() / 2, total)?;
    step_on(party, "rsqrt", x.len(), |party| {
        let found = octaves.find(party, x)?;
        let forth = found.power(party, |octave| 1 << (2 * (octaves.count - 1 - octave)));
        let back = found.power(party, |octave| 1 << (octaves.count - 1 - octave));
        let m = found.normalise(party, x, &forth)?;

        let [c0, c1, c2, c3] = RSQRT_START;
        let mut y: Vec<u64> = m.iter().map(|&m| field::mul(m, field::from_signed(c3))).collect();
        add_constant(party, &mut y, c2 << POINT);
        let mut y = truncate(party, &y, POINT)?;
        for c in [c1, c0] {
            y = multiply_truncate(party, &y, &m, POINT)?;
            add_constant(party, &mut y, c);
        }
        // 1 / sqrt(1 - e) = 1 + e/2 + 3 e^2/8 + 5 e^3/16 ... with e = 1 - m y^2, |e| < 1/64.
        let square = multiply_truncate(party, &y, &y, POINT)?;
        let product = multiply_truncate(party, &m, &square, POINT)?;
        let e = one_minus(party, &product);
        let e2 = multiply_truncate(party, &e, &e, POINT)?;
        let part: Vec<u64> =
            e.iter().zip(&e2).map(|(&e, &e2)| field::add(field::mul(4, e), field::mul(3, e2))).collect();
        let more = multiply_truncate(party, &y, &part, POINT + 3)?;
        let mut y = added(&y, &more);
        if numerator != 1 << 16 {
            y.iter_mut().for_each(|y| *y = field::mul(*y, u64::from(numerator)));
            y = truncate(party, &y, 16)?;
        }
        octaves.denormalise(party, &y, &back, shift)
    })
}

/// The octaves (or pairs of them) in which x may lie.
#[derive(Clone, Copy)]
struct Octaves {
    least: u32,
    most: u32,
    width: u32,
    count: u32,
}

/// The bits [x >= 2^(least + i width)] for i from 1, in the field, one after the other.
struct Found {
    at_least: Vec<u64>,
    octaves: Octaves,
    n: usize,
}

impl Octaves {
    fn new(least: u32, most: u32, width: u32) -> Result<Self> {
        let count = most.saturating_sub(least).div_ceil(width);
        // The normalised number must fit below p/4, and so must the power that undoes it times 2^18.
        if count == 0 || most > 37 || least + count * width > 38 || count > 21 {
            return Err(Error::BadArgument(format!("numbers from 2^{least} to 2^{most} are too many octaves")));
        }
        Ok(Self { least, most, width, count })
    }

    /// The exponent of the last octave's first number.
    fn top(self) -> u32 {
        self.least + (self.count - 1) * self.width
    }

    /// How far the last product must be shifted right so that it is at 2^total.
    fn shift_back(self, top: u32, total: u32) -> Result<u32> {
        (POINT + top)
            .checked_sub(total)
            .filter(|&shift| shift <= 32)
            .ok_or_else(|| Error::BadArgument(format!("a result at 2^{total} for numbers up to 2^{}", self.most)))
    }

    fn find(self, party: &mut Party, x: &[u64]) -> Result<Found> {
        let client = party.role.is_client();
        let mut distance = Vec::with_capacity((self.count as usize - 1) * x.len());
        for octave in 1..self.count {
            let border = if client { 1u64 << (self.least + octave * self.width) } else { 0 };
            distance.extend(x.iter().map(|&v| field::sub(v, border)));
        }
        // A border may be off by 2^-7 of itself: the start is good for that.
        let drop = (self.least + self.width).saturating_sub(8);
        let less = is_negative(party, &distance, self.most + 2 - drop, drop)?;
        let at_least = not(party, &less);
        Ok(Found { at_least: bits_to_field(party, &at_least)?, octaves: self, n: x.len() })
    }

    /// y times the selected power, shifted.
    fn denormalise(self, party: &mut Party, y: &[u64], back: &[u64], shift: u32) -> Result<Vec<u64>> {
        multiply_truncate(party, y, back, shift)
    }
}

impl Found {
    /// The value of `of` at x's octave: a public table at a shared place.
    fn power(&self, party: &Party, of: impl Fn(u32) -> u64) -> Vec<u64> {
        let first = if party.role.is_client() { of(0) } else { 0 };
        let mut out = vec![first; self.n];
        for (octave, bits) in (1..self.octaves.count).zip(self.at_least.chunks(self.n.max(1))) {
            let change = field::sub(of(octave), of(octave - 1));
            out.iter_mut().zip(bits).for_each(|(o, &b)| *o = field::add(*o, field::mul(change, b)));
        }
        out
    }

    /// x times the power that brings it into the last octave, at POINT bits.
    fn normalise(&self, party: &mut Party, x: &[u64], power: &[u64]) -> Result<Vec<u64>> {
        let top = self.octaves.top();
        if top >= POINT {
            return multiply_truncate(party, x, power, top - POINT);
        }
        let scaled: Vec<u64> = x.iter().map(|&v| field::mul(v, 1 << (POINT - top))).collect();
        multiply_truncate(party, &scaled, power, 0)
    }
}

fn add_constant(party: &Party, x: &mut [u64], constant: i64) {
    if party.role.is_client() {
        let constant = field::from_signed(constant);
        x.iter_mut().for_each(|x| *x = field::add(*x, constant));
    }
}

fn one_minus(party: &Party, x: &[u64]) -> Vec<u64> {
    let mut out: Vec<u64> = x.iter().map(|&x| field::neg(x)).collect();
    add_constant(party, &mut out, 1 << POINT);
    out
}

fn added(a: &[u64], b: &[u64]) -> Vec<u64> {
    a.iter().zip(b).map(|(&a, &b)| field::add(a, b)).collect()
}
