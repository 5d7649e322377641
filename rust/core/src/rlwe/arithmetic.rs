//! Exact changes between integers modulo p, residues modulo the primes and powers of two, all without a division and
//! without a branch on a value: everything here may be secret.

use super::params::{LEVELS, N, PRIMES};
use crate::field::{self, P};
use std::sync::OnceLock;

/// A multiplier modulo one of the primes, with floor(value 2^64 / q): the product of any x < 2^64 by it costs two multiplications.
#[derive(Clone, Copy)]
pub(super) struct Factor {
    value: u64,
    quotient: u64,
    modulus: u64,
}

impl Factor {
    pub(super) fn new(value: u64, modulus: u64) -> Self {
        let value = value % modulus;
        Self { value, quotient: (((value as u128) << 64) / modulus as u128) as u64, modulus }
    }

    /// x * value modulo q, canonical, for any x.
    #[inline(always)]
    pub(super) fn times(self, x: u64) -> u64 {
        let quotient = ((x as u128 * self.quotient as u128) >> 64) as u64;
        let r = x.wrapping_mul(self.value).wrapping_sub(quotient.wrapping_mul(self.modulus));
        let t = r.wrapping_sub(self.modulus);
        t.wrapping_add(self.modulus & (t >> 63).wrapping_neg())
    }
}

/// base^exponent modulo a public modulus; for constants only.
pub(super) fn power(base: u64, mut exponent: u64, modulus: u64) -> u64 {
    let (mut out, mut square) = (1, base % modulus);
    while exponent > 0 {
        if exponent & 1 == 1 {
            out = (out as u128 * square as u128 % modulus as u128) as u64;
        }
        square = (square as u128 * square as u128 % modulus as u128) as u64;
        exponent >>= 1;
    }
    out
}

pub(super) fn inverse(a: u64, modulus: u64) -> u64 {
    power(a, modulus - 2, modulus)
}

/// The constants of one level.
pub(super) struct Level {
    /// q modulo p.
    q_mod_p: u64,
    /// 1 / p modulo each prime.
    p_inverse: Vec<Factor>,
    /// (q / q_i)^-1 modulo q_i.
    lift: Vec<Factor>,
}

/// The constants of level 1 to 6.
pub(super) fn level(level: usize) -> &'static Level {
    static TABLES: [OnceLock<Level>; LEVELS] = [const { OnceLock::new() }; LEVELS];
    TABLES[level - 1].get_or_init(|| {
        let primes: Vec<u64> = PRIMES[..level].iter().map(|&q| u64::from(q)).collect();
        let product = |skip: usize, modulus: u64| {
            let others = primes.iter().enumerate().filter(|&(j, _)| j != skip);
            others.fold(1, |a, (_, &q)| (a as u128 * q as u128 % modulus as u128) as u64)
        };
        Level {
            q_mod_p: product(usize::MAX, P),
            p_inverse: primes.iter().map(|&q| Factor::new(inverse(P % q, q), q)).collect(),
            lift: primes.iter().enumerate().map(|(i, &q)| Factor::new(inverse(product(i, q), q), q)).collect(),
        }
    })
}

/// round(q m / p) modulo every prime of the level, coefficient by coefficient: `out` is one row for each prime.
///
/// With r the centred residue of q m modulo p, round(q m / p) = (q m - r) / p, which is -r / p modulo each q_i.
pub(super) fn encode(at: usize, plain: &[u64], out: &mut [u32]) {
    let table = level(at);
    let scaled: Vec<u64> = plain.iter().map(|&m| field::mul(m, table.q_mod_p)).collect();
    for ((row, factor), &q) in out.chunks_exact_mut(plain.len()).zip(&table.p_inverse).zip(&PRIMES) {
        // q 2^17 is a multiple of q above p, so the difference is positive and below 2^43.
        let offset = u64::from(q) << 17;
        for (x, &r) in row.iter_mut().zip(&scaled) {
            let centred = r.wrapping_sub(P & ((P / 2).wrapping_sub(r) >> 63).wrapping_neg());
            *x = factor.times(offset.wrapping_sub(centred)) as u32;
        }
    }
}

/// The fraction x / q of each coefficient, scaled to `modulus` and rounded, modulo `modulus` (p or a power of two): the weights of the
/// residues are modulus / q_i = whole + part.
///
/// The whole parts are exact; the sum of the parts is below 6 * 2^25 and is made of products with a relative error of 2^-52,
/// so the rounded number is off by at most 1/2 + 2^-23.
fn scale(at: usize, residues: &[u32], modulus: u64, finish: impl Fn(u64) -> u64) -> Vec<u64> {
    let n = residues.len() / at;
    let table = level(at);
    let (mut wholes, mut parts) = (vec![0u64; n], vec![0f64; n]);
    for ((row, lift), &q) in residues.chunks_exact(n).zip(&table.lift).zip(&PRIMES) {
        let q = u64::from(q);
        let (whole, part) = (modulus / q, (modulus % q) as f64 / q as f64);
        for ((w, f), &x) in wholes.iter_mut().zip(&mut parts).zip(row) {
            let y = lift.times(u64::from(x));
            *w = w.wrapping_add(y * whole);
            *f += y as f64 * part;
        }
    }
    // Adding 2^52 rounds to a whole number, which is then in the low bits.
    const WHOLE: f64 = (1u64 << 52) as f64;
    let round = |f: f64| (f + WHOLE).to_bits() & ((1 << 52) - 1);
    wholes.into_iter().zip(parts).map(|(w, f)| finish(w.wrapping_add(round(f)))).collect()
}

/// round(p x / q) modulo p. Right whenever p x / q is further than 2^-23 from the half between two integers.
pub(super) fn round_to_p(at: usize, residues: &[u32]) -> Vec<u64> {
    // At most six terms below 2^25 * 2^17: far inside what the multiplication takes.
    scale(at, residues, P, |x| field::mul(x, 1))
}

/// round(2^bits x / q) modulo 2^bits, for bits <= 57; off by at most 1/2 + 2^-23 from the fraction.
pub(super) fn round_to_bits(at: usize, residues: &[u32], bits: usize) -> Vec<u64> {
    debug_assert!(bits <= 57);
    scale(at, residues, 1 << bits, |x| x & ((1 << bits) - 1))
}

/// The residues modulo prime number `prime` of field elements read as signed numbers: how a weight polynomial modulo p
/// enters a product.
pub fn reduce_plain(prime: usize, plain: &[u64], out: &mut [u32]) {
    let q = u64::from(PRIMES[prime]);
    let one = Factor::new(1, q);
    let offset = q << 17;
    for (x, &m) in out.iter_mut().zip(plain) {
        let centred = m.wrapping_sub(P & ((P / 2).wrapping_sub(m) >> 63).wrapping_neg());
        *x = one.times(offset.wrapping_add(centred)) as u32;
    }
}

/// a + b modulo q, both canonical.
#[inline(always)]
pub(super) fn add(a: u32, b: u32, q: u32) -> u32 {
    let t = (a + b).wrapping_sub(q);
    t.wrapping_add(q & (t >> 31).wrapping_neg())
}

/// a - b modulo q, both canonical.
#[inline(always)]
pub(super) fn sub(a: u32, b: u32, q: u32) -> u32 {
    let t = a.wrapping_sub(b);
    t.wrapping_add(q & (t >> 31).wrapping_neg())
}

/// a * b modulo q, both canonical. The product has 50 bits, so the quotient is right to within one in a double.
#[inline(always)]
pub(super) fn mul(a: u32, b: u32, q: u32, reciprocal: f64) -> u32 {
    let product = u64::from(a) * u64::from(b);
    let quotient = (f64::from(a) * f64::from(b) * reciprocal) as u64;
    let r = product.wrapping_sub(quotient * u64::from(q)) as u32;
    // r is in [-q, 2q) as a signed number.
    let r = r.wrapping_add(q & ((r as i32) >> 31) as u32);
    let t = r.wrapping_sub(q);
    t.wrapping_add(q & ((t as i32) >> 31) as u32)
}

/// Adds b to a, rows of N residues for each of the first primes.
pub(super) fn add_rows(a: &mut [u32], b: &[u32]) {
    for ((a, b), &q) in a.chunks_exact_mut(N).zip(b.chunks_exact(N)).zip(&PRIMES) {
        a.iter_mut().zip(b).for_each(|(x, &y)| *x = add(*x, y, q));
    }
}

/// Adds a * b to `sum`, point by point.
pub(super) fn add_product_rows(sum: &mut [u32], a: &[u32], b: &[u32]) {
    for (((s, a), b), &q) in sum.chunks_exact_mut(N).zip(a.chunks_exact(N)).zip(b.chunks_exact(N)).zip(&PRIMES) {
        let reciprocal = 1.0 / f64::from(q);
        for ((s, &x), &y) in s.iter_mut().zip(a).zip(b) {
            *s = add(*s, mul(x, y, q, reciprocal), q);
        }
    }
}

/// The residues of small signed numbers, one row for each prime.
pub(super) fn small_rows(at: usize, small: &[i8]) -> Vec<u32> {
    let mut out = Vec::with_capacity(at * small.len());
    for &q in &PRIMES[..at] {
        out.extend(small.iter().map(|&x| (i32::from(x) as u32).wrapping_add(q & (i32::from(x) >> 31) as u32)));
    }
    out
}

/// The signed integers with these residues, modulo 2^64. They must be below q / 4 in size.
///
/// x = sum y_i q / q_i - k q, where k is the sum of y_i / q_i rounded: |x / q| < 1/4 keeps it away from a half.
pub(super) fn lift_signed(at: usize, residues: &[u32]) -> zeroize::Zeroizing<Vec<u64>> {
    let n = residues.len() / at;
    let table = level(at);
    let product = |skip: usize| {
        let others = PRIMES[..at].iter().enumerate().filter(|&(j, _)| j != skip);
        others.fold(1u64, |a, (_, &q)| a.wrapping_mul(u64::from(q)))
    };
    let mut out = zeroize::Zeroizing::new(vec![0u64; n]);
    let mut parts = zeroize::Zeroizing::new(vec![0f64; n]);
    for (i, (row, lift)) in residues.chunks_exact(n).zip(&table.lift).enumerate() {
        let (weight, reciprocal) = (product(i), 1.0 / f64::from(PRIMES[i]));
        for ((w, f), &x) in out.iter_mut().zip(parts.iter_mut()).zip(row) {
            let y = lift.times(u64::from(x));
            *w = w.wrapping_add(y.wrapping_mul(weight));
            *f += y as f64 * reciprocal;
        }
    }
    let whole = product(usize::MAX);
    for (w, &f) in out.iter_mut().zip(parts.iter()) {
        *w = w.wrapping_sub(whole.wrapping_mul((f + 0.5) as u64));
    }
    out
}
