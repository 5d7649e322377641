//! Exact changes between integers modulo p, residues modulo the primes and powers of two, all without a division and
//! without a branch on a value: everything here may be secret.

use super::params::{LEVELS, N, PRIMES};
use super::vector;
use crate::field::{self, P};
use std::sync::OnceLock;
use zeroize::Zeroizing;

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

/// A residue as a centred double.
pub(super) fn centre(x: u64, modulus: u64) -> f64 {
    if x > modulus / 2 { x as f64 - modulus as f64 } else { x as f64 }
}

/// A secret field element as a centred double.
#[inline(always)]
fn signed(x: u64) -> f64 {
    x.wrapping_sub(P & ((P / 2).wrapping_sub(x) >> 63).wrapping_neg()) as i64 as f64
}

/// The constants of one level.
pub(super) struct Level {
    /// q modulo p.
    q_mod_p: u64,
    /// -1 / p modulo each prime, centred.
    negative_p_inverse: Vec<f64>,
    /// (q / q_i)^-1 modulo q_i, centred.
    lift: Vec<f64>,
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
            negative_p_inverse: primes.iter().map(|&q| centre(q - inverse(P % q, q), q)).collect(),
            lift: primes.iter().enumerate().map(|(i, &q)| centre(inverse(product(i, q), q), q)).collect(),
        }
    })
}

/// round(q m / p) modulo every prime of the level, coefficient by coefficient: `out` is one row for each prime.
///
/// With r the centred residue of q m modulo p, round(q m / p) = (q m - r) / p, which is -r / p modulo each q_i.
pub(super) fn encode(at: usize, plain: &[u64], out: &mut [u32]) {
    let encoder = Encoder::new(at, plain);
    out.chunks_exact_mut(plain.len()).enumerate().for_each(|(prime, row)| encoder.row(prime, row));
}

/// An encoding that is made row by row, so that no caller needs all rows at once.
pub(super) struct Encoder {
    level: usize,
    rests: Zeroizing<Vec<f64>>,
}

impl Encoder {
    pub(super) fn new(at: usize, plain: &[u64]) -> Self {
        let mut rests = Zeroizing::new(vec![0f64; plain.len()]);
        vector::scale_p(&mut rests, plain, level(at).q_mod_p);
        Self { level: at, rests }
    }

    pub(super) fn row(&self, prime: usize, out: &mut [u32]) {
        vector::scale_row(out, &self.rests, level(self.level).negative_p_inverse[prime], PRIMES[prime]);
    }
}

/// The fraction x / q of each coefficient, scaled to `modulus` and rounded, modulo `modulus` (p or a power of two): the
/// weights of the residues are modulus / q_i = whole + part.
///
/// The whole parts are exact; the sum of the parts is below 6 * 2^25 and is made of products with a relative error of
/// 2^-52, so the rounded number is off by at most 1/2 + 2^-23.
fn scale(at: usize, residues: &[u32], modulus: u64, finish: impl Fn(u64) -> u64) -> Vec<u64> {
    let n = residues.len() / at;
    let mut wholes = vec![0u64; n];
    let mut parts = Zeroizing::new(vec![0f64; n]);
    if n > 0 {
        for ((row, &lift), &q) in residues.chunks_exact(n).zip(&level(at).lift).zip(&PRIMES) {
            let whole = u32::try_from(modulus / u64::from(q)).expect("the scale is below 2^57 and q above 2^24");
            let part = (modulus % u64::from(q)) as f64 / f64::from(q);
            vector::add_scaled(&mut wholes, &mut parts, row, lift, whole, part, q);
        }
    }
    // Adding 2^52 rounds to a whole number, which is then in the low bits.
    const WHOLE: f64 = (1u64 << 52) as f64;
    for (w, &f) in wholes.iter_mut().zip(parts.iter()) {
        *w = finish(w.wrapping_add((f + WHOLE).to_bits() & ((1 << 52) - 1)));
    }
    wholes
}

/// round(p x / q) modulo p. Right whenever p x / q is further than 2^-23 from the half between two integers.
pub(super) fn round_to_p(at: usize, residues: &[u32]) -> Vec<u64> {
    // At most six terms below 2^25 * 2^17: far inside what the multiplication takes.
    scale(at, residues, P, |x| field::mul(x, 1))
}

/// round(2^bits x / q) modulo 2^bits, for bits <= 56; off by at most 1/2 + 2^-23 from the fraction.
pub(super) fn round_to_bits(at: usize, residues: &[u32], bits: usize) -> Vec<u64> {
    debug_assert!(bits <= 56);
    scale(at, residues, 1 << bits, |x| x & ((1 << bits) - 1))
}

/// The residues modulo prime number `prime` of field elements read as signed numbers: how a weight polynomial modulo p
/// enters a product.
pub fn reduce_plain(prime: usize, plain: &[u64], out: &mut [u32]) {
    let q = f64::from(PRIMES[prime]);
    let reciprocal = 1.0 / q;
    for (x, &m) in out.iter_mut().zip(plain) {
        *x = vector::canonical(vector::centred(signed(m), q, reciprocal), q);
    }
}

/// Adds b to a, rows of N residues for each of the first primes.
pub(super) fn add_rows(a: &mut [u32], b: &[u32]) {
    for ((a, b), &q) in a.chunks_exact_mut(N).zip(b.chunks_exact(N)).zip(&PRIMES) {
        vector::add(a, b, q);
    }
}

/// Puts b - a in the place of a.
pub(super) fn subtract_from_rows(a: &mut [u32], b: &[u32]) {
    for ((a, b), &q) in a.chunks_exact_mut(N).zip(b.chunks_exact(N)).zip(&PRIMES) {
        vector::subtract_from(a, b, q);
    }
}

/// Adds a * b to `sum`, point by point.
pub(super) fn add_product_rows(sum: &mut [u32], a: &[u32], b: &[u32]) {
    for (((s, a), b), &q) in sum.chunks_exact_mut(N).zip(a.chunks_exact(N)).zip(b.chunks_exact(N)).zip(&PRIMES) {
        vector::add_product(s, a, b, q);
    }
}

/// The residues of small signed numbers, one row for each prime.
pub(super) fn small_rows(at: usize, small: &[i8]) -> Vec<u32> {
    let mut out = vec![0; at * small.len()];
    for (row, &q) in out.chunks_exact_mut(small.len()).zip(&PRIMES) {
        vector::small_row(row, small, q);
    }
    out
}

/// The signed integers with these residues, modulo 2^64. They must be below q / 4 in size.
///
/// x = sum y_i q / q_i - k q, where k is the sum of y_i / q_i rounded: |x / q| < 1/4 keeps it away from a half.
pub(super) fn lift_signed(at: usize, residues: &[u32]) -> Zeroizing<Vec<u64>> {
    let n = residues.len() / at;
    let table = level(at);
    let product = |skip: usize| {
        let others = PRIMES[..at].iter().enumerate().filter(|&(j, _)| j != skip);
        others.fold(1u64, |a, (_, &q)| a.wrapping_mul(u64::from(q)))
    };
    let mut out = Zeroizing::new(vec![0u64; n]);
    let mut parts = Zeroizing::new(vec![0f64; n]);
    for (i, (row, &lift)) in residues.chunks_exact(n).zip(&table.lift).enumerate() {
        let (weight, reciprocal) = (product(i), 1.0 / f64::from(PRIMES[i]));
        let q = f64::from(PRIMES[i]);
        for ((w, f), &x) in out.iter_mut().zip(parts.iter_mut()).zip(row) {
            let y = vector::canonical(vector::centred(f64::from(x) * lift, q, reciprocal), q);
            *w = w.wrapping_add(u64::from(y).wrapping_mul(weight));
            *f += f64::from(y) * reciprocal;
        }
    }
    let whole = product(usize::MAX);
    const WHOLE: f64 = (1u64 << 52) as f64;
    for (w, &f) in out.iter_mut().zip(parts.iter()) {
        *w = w.wrapping_sub(whole.wrapping_mul((f + WHOLE).to_bits() & 0xff));
    }
    out
}

/// The signed numbers with these residues, up to 2^73 in size: what an attacker regresses on.
#[cfg(test)]
pub(super) fn lift_wide(residues: &[u32]) -> Vec<f64> {
    let q: Vec<u128> = PRIMES[..3].iter().map(|&q| u128::from(q)).collect();
    let modulus = q[0] * q[1] * q[2];
    let lift = |k: usize| {
        let term = |i: usize| {
            let others = modulus / q[i];
            let inverse = inverse((others % q[i]) as u64, q[i] as u64);
            u128::from(residues[i * N + k]) * u128::from(inverse) % q[i] * others
        };
        let x = (term(0) + term(1) + term(2)) % modulus;
        if x > modulus / 2 { -((modulus - x) as f64) } else { x as f64 }
    };
    (0..N).map(lift).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SecretRng;

    /// A non-negative integer, 32 bits a limb, least first: the slow twin.
    #[derive(Clone)]
    struct Big(Vec<u64>);

    impl Big {
        fn modulus(at: usize) -> Self {
            PRIMES[..at].iter().fold(Self(vec![1]), |b, &q| b.times_plus(u64::from(q), 0))
        }
        fn times_plus(&self, factor: u64, plus: u64) -> Self {
            let (mut carry, mut out) = (u128::from(plus), Vec::new());
            for &limb in &self.0 {
                let t = u128::from(limb) * u128::from(factor) + carry;
                out.push(t as u64 & 0xffff_ffff);
                carry = t >> 32;
            }
            while carry > 0 {
                out.push(carry as u64 & 0xffff_ffff);
                carry >>= 32;
            }
            Self(out)
        }
        fn divide(&self, by: u64) -> (Self, u64) {
            let (mut rest, mut out) = (0u128, vec![0; self.0.len()]);
            for (o, &limb) in out.iter_mut().zip(&self.0).rev() {
                let t = rest << 32 | u128::from(limb);
                (*o, rest) = ((t / u128::from(by)) as u64, t % u128::from(by));
            }
            (Self(out), rest as u64)
        }
        fn residues(&self, at: usize) -> Vec<u32> {
            PRIMES[..at].iter().map(|&q| self.divide(u64::from(q)).1 as u32).collect()
        }
        fn shift_right(&self, bits: u32) -> Self {
            (0..bits).fold(self.clone(), |b, _| b.divide(2).0)
        }
        fn plus(&self, other: &Self) -> Self {
            let (mut carry, mut out) = (0, Vec::new());
            for k in 0..self.0.len().max(other.0.len()) + 1 {
                let t = self.0.get(k).unwrap_or(&0) + other.0.get(k).unwrap_or(&0) + carry;
                out.push(t & 0xffff_ffff);
                carry = t >> 32;
            }
            Self(out)
        }
        /// self - other, which must not be larger.
        fn minus(&self, other: &Self) -> Self {
            let (mut borrow, mut out) = (0i64, Vec::new());
            for (k, &limb) in self.0.iter().enumerate() {
                let t = limb as i64 - *other.0.get(k).unwrap_or(&0) as i64 - borrow;
                out.push((t & 0xffff_ffff) as u64);
                borrow = i64::from(t < 0);
            }
            assert_eq!(borrow, 0);
            Self(out)
        }
    }

    fn extreme(rng: &mut SecretRng) -> Vec<u64> {
        let mut m = vec![0, 1, 2, P / 2 - 1, P / 2, P / 2 + 1, P - 2, P - 1];
        m.extend(field::random_vector(rng, 200));
        m
    }

    #[test]
    fn encoding_is_the_rounded_quotient_of_large_integers() {
        let m = extreme(&mut SecretRng::from_os());
        for at in 1..=LEVELS {
            let mut rows = vec![0; at * m.len()];
            encode(at, &m, &mut rows);
            for (k, &m_k) in m.iter().enumerate() {
                let expected = Big::modulus(at).times_plus(m_k, P / 2).divide(P).0.residues(at);
                assert!((0..at).all(|i| rows[i * m.len() + k] == expected[i]), "level {at}, m = {m_k}");
            }
        }
    }

    /// The fraction x / q just below and just above (2 m + 1) / 2 modulus must round to m and to m + 1.
    fn rounds_at_the_edge(at: usize, modulus: u64, round: impl Fn(&[u32]) -> Vec<u64>, m: &[u64]) {
        let q = Big::modulus(at);
        let margin = q.shift_right(64 - modulus.leading_zeros() + 22);
        for &m in m {
            let edge = q.times_plus(2 * m + 1, 0).divide(modulus).0.divide(2).0;
            let below = edge.minus(&margin).residues(at);
            assert_eq!(round(&below), [m % modulus], "level {at}, below {m}");
            // Above the last edge the value is that of 0, one modulus further.
            let above = edge.plus(&margin).plus(&Big(vec![1])).residues(at);
            assert_eq!(round(&above), [(m + 1) % modulus], "level {at}, above {m}");
        }
    }

    #[test]
    fn rounding_is_right_up_to_the_stated_margin() {
        let m = extreme(&mut SecretRng::from_os());
        for at in 3..=LEVELS {
            rounds_at_the_edge(at, P, |x| round_to_p(at, x), &m);
            // Three primes are too short to come as close to an edge of 2^56 as the margin asks.
            for bits in if at == 3 { &[44, 51][..] } else { &[44, 51, 56] } {
                let bits = *bits;
                let m: Vec<u64> = m.iter().map(|&m| m << (bits - 41)).collect();
                rounds_at_the_edge(at, 1 << bits, |x| round_to_bits(at, x, bits), &m);
            }
        }
    }

    #[test]
    fn signed_numbers_are_lifted_exactly() {
        let mut rng = SecretRng::from_os();
        for _ in 0..1000 {
            let x = rng.next_u64() as i64 >> (rng.next_u64() % 64);
            let rows: Vec<u32> = PRIMES[..3].iter().map(|&q| i128::from(x).rem_euclid(i128::from(q)) as u32).collect();
            assert_eq!(lift_signed(3, &rows)[0] as i64, x);
        }
    }
}
