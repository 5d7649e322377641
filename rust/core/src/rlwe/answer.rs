//! From a product to the bytes that travel back: the encryption of zero, the flood or the mask, the switch to a small
//! modulus, and the client's side of it.
//!
//! An answer is the pair (round(2^k0 c0 / q), round(2^k1 c1 / q)): the widths come from the plan, whose inequality says
//! that the client's rounding still finds the right residue. Rounding comes after everything that hides, so it reveals
//! nothing more.

use super::arithmetic::{self, Encoder};
use super::cipher::{Ciphertext, inverse_rows};
use super::keys::{EncryptionOfZero, SecretKey};
use super::params::{AnswerPlan, MAX_C1_BITS, N, PRIMES};
use super::{ntt, sample, vector};
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

/// The server's end of a product in slots: returns the answer and the server's share, a uniform polynomial modulo p
/// (coefficients; its [`super::slots::decode`] is the share of every slot). The two shares add up to the product
/// exactly. Counted in the budget of the key that made the zero; refused when that is spent. What is left of the product is
/// only room for the next.
pub fn finish_slots(
    product: &mut Ciphertext,
    zero: EncryptionOfZero,
    plan: &AnswerPlan,
    rng: &mut SecretRng,
) -> Result<(Answer, Vec<u64>)> {
    let flood_log2 = plan.flood_log2.ok_or_else(|| Error::BadArgument("this plan is for coefficients".into()))?;
    check_plan(product, plan)?;
    zero.budget.spend(plan)?;
    product.add_zero(zero);
    let [c0, c1] = &mut product.c;
    inverse_rows(c0);
    inverse_rows(c1);
    flood(c0, flood_log2, rng);
    let share = field::random_vector(rng, N);
    let negative: Zeroizing<Vec<u64>> = Zeroizing::new(share.iter().map(|&x| field::neg(x)).collect());
    let encoder = Encoder::new(plan.level, &negative);
    let mut mask = Zeroizing::new(vec![0u32; N]);
    for (prime, row) in c0.chunks_exact_mut(N).enumerate() {
        encoder.row(prime, &mut mask);
        vector::add(row, &mask, PRIMES[prime]);
    }
    let answer = Answer {
        c0: arithmetic::round_to_bits(plan.level, c0, plan.c0_bits),
        c1: arithmetic::round_to_bits(plan.level, c1, plan.c1_bits),
    };
    Ok((answer, share))
}

/// The server's end of a product in coefficients: only those in `wanted` (indices below N) travel. Returns the answer
/// and the server's share of each wanted coefficient. The two shares add up to the product or that plus or minus one.
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
    let mut difference = mask.clone();
    arithmetic::subtract_from_rows(&mut difference, &c0);
    drop(c0);
    let pick = |rows: &[u32]| -> Zeroizing<Vec<u32>> {
        Zeroizing::new(rows.chunks_exact(N).flat_map(|row| wanted.iter().map(|&k| row[k as usize])).collect())
    };
    let answer = Answer {
        c0: arithmetic::round_to_bits(plan.level, &pick(&difference), plan.c0_bits),
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

/// Adds to each coefficient a number of width 2^`width`: 2^k times the sum of four uniform 64-bit numbers, and a
/// uniform number below 2^k, k = width - 64, minus the middle, 2^(width + 1).
pub(super) fn flood(c0: &mut [u32], width: u32, rng: &mut SecretRng) {
    debug_assert!((64..=120).contains(&width));
    let low_bits = width - 64;
    const LIMB: u32 = 26;
    const PART: usize = 512;
    let mut limbs = Zeroizing::new(vec![0f64; 5 * PART]);
    for begin in (0..N).step_by(PART) {
        for k in 0..PART {
            let high: u128 = (0..4).map(|_| u128::from(rng.next_u64())).sum();
            let sum = high << low_bits | u128::from(rng.next_u64()) & ((1 << low_bits) - 1);
            for (i, row) in limbs.chunks_exact_mut(PART).enumerate() {
                row[k] = f64::from(((sum >> (LIMB * i as u32)) as i32) & ((1 << LIMB) - 1));
            }
        }
        for (row, &q) in c0.chunks_exact_mut(N).zip(&PRIMES) {
            let two = |bits: u64| arithmetic::centre(arithmetic::power(2, bits, u64::from(q)), u64::from(q));
            let weights = std::array::from_fn(|i| two(u64::from(LIMB) * i as u64));
            let middle = two(u64::from(width) + 1);
            vector::add_limbs(&mut row[begin..begin + PART], &limbs, weights, -middle, q);
        }
    }
}

impl SecretKey {
    /// The client's share of an answer in slots: a polynomial modulo p. Counted in this key's budget.
    pub fn open_slots(&self, answer: &Answer, plan: &AnswerPlan) -> Result<Vec<u64>> {
        let share = self.open(answer, plan, None)?;
        self.budget().spend(plan)?;
        Ok(share)
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

    /// c1 s modulo 2^64, exactly: c1 is centred, so a double holds it times a prime's inverse without rounding it away;
    /// |c1 s| < N 2^52, and three primes hold twice that.
    fn times_secret(&self, c1: &[u64], bits: usize) -> Zeroizing<Vec<u64>> {
        const ENOUGH: usize = 3;
        assert!(bits <= MAX_C1_BITS, "a plan keeps to the bits that can be opened");
        let half = 1i64 << (bits - 1);
        let mut rows = Zeroizing::new(vec![0u32; ENOUGH * N]);
        let centred: Vec<f64> =
            c1.iter().map(|&c| (c as i64 - ((half << 1) & -i64::from(c as i64 >= half))) as f64).collect();
        let mut factor = vec![0u32; N];
        for ((prime, row), secret) in rows.chunks_exact_mut(N).enumerate().zip(self.rows.chunks_exact(N)) {
            vector::scale_row(&mut factor, &centred, 1.0, PRIMES[prime]);
            ntt::forward(prime, N, &mut factor);
            vector::add_product(row, &factor, secret, PRIMES[prime]);
            ntt::inverse(prime, N, row);
        }
        arithmetic::lift_signed(ENOUGH, &rows)
    }
}
