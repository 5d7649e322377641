//! From a product to the bytes that travel back: the encryption of zero, the flood or the mask, the switch to a small modulus,
//! and the client's side of it.
//!
//! An answer is the pair (round(2^k0 c0 / q), round(2^k1 c1 / q)): the widths come from the plan, whose inequality says that the client's
//! rounding still finds the right residue. Rounding comes after everything that hides, so it reveals nothing more.

use super::arithmetic::{self, add_rows};
use super::cipher::{Ciphertext, inverse_rows};
use super::keys::{EncryptionOfZero, SecretKey};
use super::params::{AnswerPlan, N, PRIMES};
use super::{ntt, sample};
use crate::error::{Error, Result};
use crate::field::{self, P};
use crate::random::SecretRng;
use zeroize::Zeroizing;

/// A switched answer: all of c1, and the coefficients of c0 that are wanted.
#[derive(Clone, PartialEq, Eq)]
pub struct Answer {
    /// Coefficients modulo 2^c0_bits.
    pub(super) c0: Vec<u64>,
    /// N coefficients modulo 2^c1_bits.
    pub(super) c1: Vec<u64>,
}

/// The server's end of a product in slots: returns the answer and the server's share, a uniform polynomial modulo p (coefficients; its
/// [`super::slots::decode`] is the share of every slot). The two shares add up to the product exactly.
pub fn finish_slots(
    mut product: Ciphertext,
    zero: EncryptionOfZero,
    plan: &AnswerPlan,
    rng: &mut SecretRng,
) -> Result<(Answer, Vec<u64>)> {
    let flood_log2 = plan.flood_log2.ok_or_else(|| Error::BadArgument("this plan is for coefficients".into()))?;
    check_plan(&product, plan)?;
    product.add_zero(zero);
    let [mut c0, mut c1] = product.c;
    inverse_rows(&mut c0);
    inverse_rows(&mut c1);
    flood(&mut c0, flood_log2, rng);
    let share = field::random_vector(rng, N);
    let negative: Zeroizing<Vec<u64>> = Zeroizing::new(share.iter().map(|&x| field::neg(x)).collect());
    let mut mask = Zeroizing::new(vec![0; plan.level * N]);
    arithmetic::encode(plan.level, &negative, &mut mask);
    add_rows(&mut c0, &mask);
    let answer = Answer {
        c0: arithmetic::round_to_bits(plan.level, &c0, plan.c0_bits),
        c1: arithmetic::round_to_bits(plan.level, &c1, plan.c1_bits),
    };
    Ok((answer, share))
}

/// The server's end of a product in coefficients: only those in `wanted` (indices below N) travel. Returns the answer and the
/// server's share of each wanted coefficient. The two shares add up to the product or that plus or minus one.
pub fn finish_coefficients(
    mut product: Ciphertext,
    zero: EncryptionOfZero,
    plan: &AnswerPlan,
    wanted: &[u32],
    rng: &mut SecretRng,
) -> Result<(Answer, Vec<u64>)> {
    if plan.flood_log2.is_some() {
        return Err(Error::BadArgument("this plan is for slots".into()));
    }
    check_plan(&product, plan)?;
    if wanted.iter().any(|&k| k as usize >= N) {
        return Err(Error::BadArgument(format!("a polynomial has {N} coefficients")));
    }
    product.add_zero(zero);
    let [mut c0, mut c1] = product.c;
    inverse_rows(&mut c0);
    inverse_rows(&mut c1);
    let mask = sample::secret_uniform(rng, plan.level);
    for ((c, m), &q) in c0.chunks_exact_mut(N).zip(mask.chunks_exact(N)).zip(&PRIMES) {
        c.iter_mut().zip(m).for_each(|(x, &m)| *x = arithmetic::sub(*x, m, q));
    }
    let pick = |rows: &[u32]| -> Zeroizing<Vec<u32>> {
        Zeroizing::new(rows.chunks_exact(N).flat_map(|row| wanted.iter().map(|&k| row[k as usize])).collect())
    };
    let answer = Answer {
        c0: arithmetic::round_to_bits(plan.level, &pick(&c0), plan.c0_bits),
        c1: arithmetic::round_to_bits(plan.level, &c1, plan.c1_bits),
    };
    Ok((answer, arithmetic::round_to_p(plan.level, &pick(&mask))))
}

fn check_plan(product: &Ciphertext, plan: &AnswerPlan) -> Result<()> {
    if product.level == plan.level {
        Ok(())
    } else {
        Err(Error::BadArgument(format!("a plan for level {} and a product of level {}", plan.level, product.level)))
    }
}

/// Adds to each coefficient the sum of four uniform numbers below 2^width, minus 2^(width + 1).
fn flood(c0: &mut [u32], width: u32, rng: &mut SecretRng) {
    debug_assert!(width <= 120);
    let shift = 128 - width;
    let sums: Zeroizing<Vec<u128>> = Zeroizing::new(
        (0..N)
            .map(|_| {
                let mut draw = || (u128::from(rng.next_u64()) << 64 | u128::from(rng.next_u64())) >> shift;
                draw() + draw() + draw() + draw()
            })
            .collect(),
    );
    const LIMB: u32 = 26;
    for (row, &q) in c0.chunks_exact_mut(N).zip(&PRIMES) {
        let modulus = u64::from(q);
        let one = arithmetic::Factor::new(1, modulus);
        let weights: [u64; 5] = std::array::from_fn(|i| arithmetic::power(2, u64::from(LIMB) * i as u64, modulus));
        let centre = modulus - arithmetic::power(2, u64::from(width) + 1, modulus);
        for (x, &sum) in row.iter_mut().zip(sums.iter()) {
            // Five products of 26 and 25 bits: below 2^54.
            let limb = |i: u32| ((sum >> (LIMB * i)) as u64) & ((1 << LIMB) - 1);
            let wide = (0..5).map(|i| limb(i) * weights[i as usize]).sum::<u64>();
            *x = one.times(wide + centre + u64::from(*x)) as u32;
        }
    }
}

impl SecretKey {
    /// The client's share of an answer in slots: a polynomial modulo p.
    pub fn open_slots(&self, answer: &Answer, plan: &AnswerPlan) -> Result<Vec<u64>> {
        self.open(answer, plan, None)
    }

    /// The client's share of the wanted coefficients.
    pub fn open_coefficients(&self, answer: &Answer, plan: &AnswerPlan, wanted: &[u32]) -> Result<Vec<u64>> {
        self.open(answer, plan, Some(wanted))
    }

    fn open(&self, answer: &Answer, plan: &AnswerPlan, wanted: Option<&[u32]>) -> Result<Vec<u64>> {
        let listed = wanted.map_or(N, <[u32]>::len);
        if answer.c1.len() != N || answer.c0.len() != listed || wanted.is_some() == plan.flood_log2.is_some() {
            return Err(Error::BadArgument("this answer does not belong to this plan".into()));
        }
        let product = self.times_secret(&answer.c1, plan.c1_bits);
        let lift = plan.c1_bits - plan.c0_bits;
        let open = |(i, &c0): (usize, &u64)| {
            let at = wanted.map_or(i, |w| w[i] as usize);
            let phase = (c0 << lift).wrapping_add(product[at]) & ((1 << plan.c1_bits) - 1);
            // round(p phase / 2^k) is at most p.
            let rounded = (u128::from(phase) * u128::from(P) + (1 << (plan.c1_bits - 1))) >> plan.c1_bits;
            field::add(rounded as u64, 0)
        };
        Ok(answer.c0.iter().enumerate().map(open).collect())
    }

    /// c1 s modulo 2^64, exactly: c1 is centred, |c1 s| < N 2^56, and three primes hold twice that.
    fn times_secret(&self, c1: &[u64], bits: usize) -> Zeroizing<Vec<u64>> {
        const ENOUGH: usize = 3;
        let half = 1i64 << (bits - 1);
        let mut rows = Zeroizing::new(vec![0u32; ENOUGH * N]);
        for ((prime, row), secret) in rows.chunks_exact_mut(N).enumerate().zip(self.rows.chunks_exact(N)) {
            let q = PRIMES[prime];
            let one = arithmetic::Factor::new(1, u64::from(q));
            // A multiple of q above 2^(bits - 1).
            let offset = u64::from(q) << 33;
            for (x, &c) in row.iter_mut().zip(c1) {
                let centred = (c as i64).wrapping_sub((half << 1) & -i64::from(c as i64 >= half));
                *x = one.times(offset.wrapping_add(centred as u64)) as u32;
            }
            ntt::forward(prime, N, row);
            let reciprocal = 1.0 / f64::from(q);
            row.iter_mut().zip(secret).for_each(|(x, &s)| *x = arithmetic::mul(*x, s, q, reciprocal));
            ntt::inverse(prime, N, row);
        }
        arithmetic::lift_signed(ENOUGH, &rows)
    }
}
