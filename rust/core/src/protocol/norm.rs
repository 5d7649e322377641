//! RMSNorm and LayerNorm over rows, without weights: those belong into the next product.

use super::piecewise::check_fraction;
use super::reciprocal::rsqrt;
use super::{inner_products, multiply, step_on, truncate};
use crate::error::{Error, Result};
use crate::field;
use crate::party::Party;

/// What is public about the rows of a norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormPlan {
    /// Entries of a row, 2 to 8192.
    pub columns: usize,
    /// Fraction bits, 10 to 13.
    pub f: u32,
    /// Every row's root mean square is below 2^rms_bits; 0 to 7.
    pub rms_bits: u32,
    /// Added to the mean square, in units of 2^-24: a model's 1e-5 is 168, its 1e-6 is 17.
    pub epsilon: u32,
}

/// The integers of a plan.
struct Integers {
    /// Bits that entries lose before they are squared.
    shift: u32,
    /// Added to the sum of squares.
    epsilon: u64,
    /// The sum is at least 2^least and below 2^most.
    least: u32,
    most: u32,
    /// sqrt(columns) = numerator / 2^16 * 2^exponent; the root is numerator * 2^total / sqrt(sum).
    numerator: u32,
    total: u32,
    /// Bits after the point of 1 / rms.
    inverse: u32,
}

impl NormPlan {
    /// Bits that a mean has more than the entries: as many as the last product can spare.
    fn mean_bits(&self) -> u32 {
        3 - self.rms_bits / 2
    }

    /// The integers of rows at 2^(f + extra).
    fn integers(&self, extra: u32) -> Result<Integers> {
        check_fraction(self.f)?;
        let columns = self.columns;
        if !(2..=8192).contains(&columns) || self.rms_bits > 7 || !(1..=1 << 16).contains(&self.epsilon) {
            return Err(Error::BadArgument(format!("a norm of {columns} columns, rms below 2^{}", self.rms_bits)));
        }
        let (f, log) = (self.f + extra, columns.next_power_of_two().ilog2());
        // columns * (2^rms_bits * 2^(f - shift))^2 <= 2^36.
        let shift = (self.rms_bits + f).saturating_sub((36 - log) / 2);
        let scale = 2 * (f - shift);
        let epsilon = ((columns as u64 * u64::from(self.epsilon)) << scale >> 24).max(1);
        let least = epsilon.ilog2() & !1;
        let most = log + 2 * self.rms_bits + scale + 1;
        let root = (columns as u64 * (1 << 32)).isqrt();
        let exponent = root.ilog2() - 16;
        // 1 / rms = sqrt(columns) 2^(f - shift) / sqrt(sum), with as many bits as the last product and the root allow.
        let whole = exponent + f - shift;
        let top = least + 2 * ((most - least).div_ceil(2) - 1);
        let inverse = ((77 - 2 * f - log) / 2).min(17 + top / 2 - whole);
        Ok(Integers {
            shift,
            epsilon,
            least,
            most,
            numerator: (root >> exponent) as u32,
            total: whole + inverse,
            inverse,
        })
    }
}

/// x / sqrt(mean(x^2) + epsilon) for every row.
///
/// Entries are squared at 2^(f - shift), where shift = rms_bits + f - floor((36 - log2 columns) / 2) if that is
/// positive, so that no sum of squares can leave the range of values.
///
/// Error: relative 2^-13 and one last place from the arithmetic; the squares' rounding adds a relative error of at most
/// 2^(shift - f) / (2 rms), and in practice, because roundings average out, 2^(2 (shift - f)) / (6 rms^2).
///
/// Cost: 26 rounds (64 columns, few rows); an entry 412 bits (42 fewer without shift), 2 triples; a reciprocal root a row.
pub fn rms_norm(party: &mut Party, x: &[u64], plan: &NormPlan) -> Result<Vec<u64>> {
    check_rows(x, plan)?;
    step_on(party, "rms_norm", x.len(), |party| normalise(party, x, plan, 0))
}

/// (x - mean(x)) / sqrt(variance(x) + epsilon) for every row. `rms_bits` bounds the deviation's root mean square and
/// the mean.
///
/// Error and cost: as [`rms_norm`], and a last place of x (an eighth of one for rms_bits up to 1) and a truncation a
/// row for the mean; 28 rounds.
pub fn layer_norm(party: &mut Party, x: &[u64], plan: &NormPlan) -> Result<Vec<u64>> {
    check_rows(x, plan)?;
    step_on(party, "layer_norm", x.len(), |party| {
        // The sum times 2^k / columns, with k as large as the range of values allows.
        let extra = plan.mean_bits();
        let k = 38 - plan.f - plan.rms_bits;
        let inverse = ((1u64 << k) + plan.columns as u64 / 2) / plan.columns as u64;
        let sums: Vec<u64> = x
            .chunks_exact(plan.columns)
            .map(|row| field::mul(row.iter().fold(0, |sum, &v| field::add(sum, v)), inverse))
            .collect();
        let means = truncate(party, &sums, k - extra)?;
        let more = |v: u64| field::mul(v, 1 << extra);
        let centred: Vec<u64> =
            x.iter().enumerate().map(|(i, &v)| field::sub(more(v), means[i / plan.columns])).collect();
        normalise(party, &centred, plan, extra)
    })
}

fn check_rows(x: &[u64], plan: &NormPlan) -> Result<()> {
    plan.integers(0)?;
    if plan.columns == 0 || !x.len().is_multiple_of(plan.columns) {
        return Err(Error::BadArgument(format!("{} entries in rows of {}", x.len(), plan.columns)));
    }
    Ok(())
}

/// Rows at 2^(f + extra), normalised, at 2^f.
fn normalise(party: &mut Party, x: &[u64], plan: &NormPlan, extra: u32) -> Result<Vec<u64>> {
    let i = plan.integers(extra)?;
    let small = truncate(party, x, i.shift)?;
    let mut squares = inner_products(party, &small, &small, plan.columns)?;
    if party.role.is_client() {
        squares.iter_mut().for_each(|s| *s = field::add(*s, i.epsilon));
    }
    let inverse = rsqrt(party, &squares, i.least, i.most, i.numerator, i.total)?;
    let inverse: Vec<u64> = (0..x.len()).map(|at| inverse[at / plan.columns]).collect();
    let product = multiply(party, x, &inverse)?;
    truncate(party, &product, i.inverse + extra)
}
