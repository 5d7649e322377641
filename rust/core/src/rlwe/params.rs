//! The parameter table and the arithmetic that decides whether a computation fits.
//!
//! Security depends on the ring degree, the modulus, the secret and the error, and on nothing that a computation does;
//! so it is a table. Whether a result can be decrypted depends on the computation's shape; so it is a function of the
//! shape, asked when a plan is made, and an answer can be made only with a plan that passed.

use super::budget::HidingBudget;
use crate::error::{Error, Result};
use crate::field;

/// Degree of the ring.
pub const N: usize = 8192;
/// The primes of the modulus; level L uses the first L. Each is 1 modulo 2N and just under 2^25.
pub const PRIMES: [u32; 6] = [33538049, 33292289, 33177601, 33128449, 32931841, 32899073];
/// The highest level.
pub const LEVELS: usize = PRIMES.len();
/// Bits of one packed residue.
pub const RESIDUE_BITS: usize = 25;
/// Fair coins in one error coefficient: the sum of 21 minus the sum of 21 others.
pub const ERROR_COINS: usize = 42;
/// Standard deviation of an error coefficient, sqrt(42) / 2.
pub const ERROR_SIGMA: f64 = 3.240_370_349_203_93;
/// No modulus above this many bits is ever used with this degree.
pub const MAX_MODULUS_BITS: f64 = 200.0;
/// Most bits of the second polynomial of an answer: beyond it the doubles of its opening would round.
pub const MAX_C1_BITS: usize = 53;
/// A bound is this many standard deviations: a sub-Gaussian variable passes it with probability below 2^-140.
pub const DEVIATIONS: f64 = 14.0;
/// Every plan's flood is wide enough for 2 to so many coefficients in one session; most are wider.
pub const FLOODED_COEFFICIENTS_LOG2: f64 = 28.0;
/// The statistical distance of all answers of one session from ones without noise is below 2 to minus this.
pub const FLOOD_SECURITY_BITS: f64 = 40.0;
/// The Fisher information of the sum of four uniforms of width one, from above.
const FLOOD_INFORMATION: f64 = 3.2;
/// Bits of distance for what the continuous bound leaves out: the uniforms are integers of 64 bits with one low part in common.
const FLOOD_SLACK: f64 = 0.01;
/// Widths of the flood that can be sampled.
const FLOOD_LOG2: std::ops::RangeInclusive<u32> = 64..=120;

/// One line of the security table: estimated cost of the best known attack on everything published under one key.
#[derive(Debug)]
pub struct SecurityEstimate {
    /// Degree of the ring.
    pub degree: usize,
    /// Primes of the modulus.
    pub primes: &'static [u32],
    /// log2 of the whole modulus.
    pub modulus_bits: f64,
    /// Distribution of the secret.
    pub secret: &'static str,
    /// Distribution of the error.
    pub error: &'static str,
    /// log2 of the classical cost.
    pub classical_bits: f64,
    /// log2 of the quantum cost with polynomial factors counted.
    pub quantum_bits: f64,
    /// log2 of the quantum cost in the most pessimistic model, 2^(0.257 b) and no factors.
    pub pessimistic_bits: f64,
    /// How it was estimated.
    pub model: &'static str,
    /// When.
    pub date: &'static str,
}

/// The security of the one modulus this build uses. Lower levels are easier for nobody: a smaller modulus with the
/// same error is harder to attack.
pub const SECURITY: SecurityEstimate = SecurityEstimate {
    degree: N,
    primes: &PRIMES,
    modulus_bits: 149.9,
    secret: "dense ternary, uniform on {-1, 0, 1}",
    error: "centred binomial, 42 coins, sigma 3.24",
    classical_bits: 189.0,
    quantum_bits: 180.0,
    pessimistic_bits: 142.0,
    model: "primal uSVP with the geometric series assumption, scaled embedding: MATZOV / 0.265 b + 16.4 + log2 8d / 0.257 b; \
            dual attacks not computed",
    date: "2026-11-20",
};

const _: () = {
    let mut i = 0;
    let mut bits = 0;
    while i < LEVELS {
        assert!(PRIMES[i] % (2 * N as u32) == 1 && PRIMES[i] < 1 << RESIDUE_BITS);
        assert!(i == 0 || PRIMES[i] < PRIMES[i - 1]);
        bits += RESIDUE_BITS;
        i += 1;
    }
    assert!(bits as f64 <= MAX_MODULUS_BITS);
    assert!(field::P % (2 * N as u64) == 1);
    assert!(SECURITY.classical_bits >= 128.0 && SECURITY.quantum_bits >= 128.0 && SECURITY.pessimistic_bits >= 128.0);
};

/// log2 of the modulus of a level.
pub fn modulus_bits(level: usize) -> f64 {
    PRIMES[..level].iter().map(|&q| f64::from(q).log2()).sum()
}

/// Refuses a level that does not exist.
pub fn check_level(level: usize) -> Result<()> {
    if (1..=LEVELS).contains(&level) {
        Ok(())
    } else {
        Err(Error::BadArgument(format!("there is no level {level}; levels are 1 to {LEVELS}")))
    }
}

/// What happens to the ciphertexts behind one answer, as far as noise is concerned.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The level of the ciphertexts.
    pub level: usize,
    /// Products of a ciphertext and a plaintext polynomial that are added up in one answer.
    pub products: usize,
    /// Coefficients of one plaintext polynomial that can differ from zero.
    pub nonzero: usize,
    /// The largest absolute value of such a coefficient: p / 2 for a weight in slots, the weight itself in
    /// coefficients.
    pub magnitude: f64,
    /// Ciphertexts that pass a key switch before they are added into the answer, each with another rotation: then one request is
    /// met by up to `rotations + 1` of the products.
    pub rotations: usize,
}

impl Shape {
    /// The root of the mean square over the coefficients of one answer's noise, for the worst weights of this magnitude.
    /// That is what hiding depends on: squared distances add up over coefficients.
    ///
    /// Products: a fresh coefficient has variance sigma^2 + 1/12 (error and rounding of the encoding), on the
    /// client's side and 1/12 on the server's; the roundings of a share, which is uniform, are taken as independent. A key
    /// switch adds one product of a centred residue and an error for each prime and coefficient; all switches of an
    /// answer may use one key, so their noise may add up in phase. The encryption of zero adds two products of a ternary
    /// polynomial with an error, and an error.
    ///
    /// Several shifts of one request meet the same error e, but for the mean square they add up as if each had one of
    /// its own, whatever the weights. The noise is sum_s (w_s e)(X^(g_s)); its value at a root z^a is
    /// sum_s w_s(z^(a g_s)) e(z^(a g_s)); coefficients of e are independent, so its values at different roots of X^N + 1
    /// are uncorrelated; shifts are different, so all roots in the sum are; and the mean square over coefficients is that
    /// over roots.
    pub fn noise_sigma(&self) -> f64 {
        let [products, switches, zero] = self.variances();
        (products + switches + zero).sqrt()
    }

    /// A bound on the absolute value of every coefficient of the noise: 14 standard deviations of the worst. A single coefficient
    /// can gather what shifts make of one error in phase (a shift leaves coefficient 0 where it is, so equal weights do it
    /// there): at most a factor of their number in the variance, by Cauchy and Schwarz.
    pub fn noise_bound(&self) -> f64 {
        let [products, switches, zero] = self.variances();
        DEVIATIONS * (products * (self.rotations + 1) as f64 + switches + zero).sqrt()
    }

    /// The mean variance of a coefficient: from products, from key switches, from the encryption of zero.
    fn variances(&self) -> [f64; 3] {
        let n = N as f64;
        let error = ERROR_SIGMA * ERROR_SIGMA;
        let products =
            self.products as f64 * self.nonzero as f64 * self.magnitude * self.magnitude * (error + 2.0 / 12.0);
        let residue = f64::from(PRIMES[0]);
        let switches = (self.rotations as f64).powi(2) * self.level as f64 * n * residue * residue / 12.0 * error;
        let zero = error * (2.0 * n * 2.0 / 3.0 + 1.0);
        [products, switches, zero]
    }
}

/// How an answer is hidden and how wide it travels. Only plans that fit can be made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AnswerPlan {
    pub(super) level: usize,
    /// log2 of the width of each of the four uniforms added to a coefficient; none where a full-range mask hides it.
    pub(super) flood_log2: Option<u32>,
    pub(super) c0_bits: usize,
    pub(super) c1_bits: usize,
    /// What one answer takes of a session's hiding, in parts of the whole.
    hiding_cost: u64,
}

impl AnswerPlan {
    /// The plan of an answer whose value is in slots, flooded.
    ///
    /// Let g be the density of the sum of four uniforms of width w. For noise e on a coefficient the squared Hellinger
    /// distance of flood and flood + e is at most I e^2 / (8 w^2), where I < 3.2 is the Fisher information of g at
    /// width one; squared distances add up over n coefficients, and the statistical distance is at most sqrt(2) times
    /// the root of the sum. With a mean e^2 of sigma^2 that is sigma / (2 w) * sqrt(3.2 n), below 2^-40 for n = 2^28. (The
    /// mean is over what an honest client draws; the root is concave, so it may stand inside.) The flood is as wide as it can be
    /// without another byte, and each answer is counted with what it really costs: see [`super::HidingBudget`].
    ///
    /// Exactness: |noise| + 2 w + q (2^-(c0 + 1) + 14 sqrt(N / 12) 2^-c1) < q / 2p, the terms for the two roundings of
    /// the switch to c0 and c1 bits (a sum of N uniform roundings times a ternary secret passes 14 deviations with
    /// probability below 2^-140), so an answer within its bounds is decrypted to the right residue.
    pub fn slots(shape: &Shape) -> Result<Self> {
        check_level(shape.level)?;
        // log2 of the distance of n coefficients at width one, less that of the root of n.
        let one = shape.noise_sigma().log2() - 1.0 + 0.5 * FLOOD_INFORMATION.log2() + FLOOD_SLACK;
        let least = (one + FLOOD_SECURITY_BITS + FLOODED_COEFFICIENTS_LOG2 / 2.0).ceil();
        let least = (least.max(f64::from(*FLOOD_LOG2.start()))) as u32;
        let plan = Self::fit(shape, Some(least))?;
        let fits =
            |&width: &u32| width == least || Self::bits(shape, Some(width)) == Some((plan.c0_bits, plan.c1_bits));
        let width = (least..=*FLOOD_LOG2.end()).take_while(fits).last().unwrap_or(least);
        // Squared, and for the N coefficients of one answer.
        let answer = 2.0 * (one - f64::from(width) + FLOOD_SECURITY_BITS) + (N as f64).log2();
        let hiding_cost = (answer + f64::from(HidingBudget::WHOLE_LOG2)).exp2().ceil() as u64;
        Ok(Self { flood_log2: Some(width), hiding_cost, ..plan })
    }

    /// The plan of an answer whose value is in coefficients, hidden by a mask over the full modulus.
    ///
    /// Client and server each round their part: the sum is off by at most one if the noise and the roundings of
    /// the switch together stay below q / p. We ask for half of that, which makes an error rare as well as small.
    pub fn coefficients(shape: &Shape) -> Result<Self> {
        check_level(shape.level)?;
        Self::fit(shape, None)
    }

    fn fit(shape: &Shape, flood_log2: Option<u32>) -> Result<Self> {
        let level = shape.level;
        match Self::bits(shape, flood_log2) {
            Some((c0_bits, c1_bits)) => Ok(Self { level, flood_log2, c0_bits, c1_bits, hiding_cost: 0 }),
            None => Err(Error::Unsupported(format!(
                "a product of this shape does not fit the modulus: level {level}, {} products, {} coefficients, {} rotations",
                shape.products, shape.nonzero, shape.rotations
            ))),
        }
    }

    /// The fewest bits in which both polynomials of an answer can travel, if any do.
    fn bits(shape: &Shape, flood_log2: Option<u32>) -> Option<(usize, usize)> {
        let scale = field::P as f64 / modulus_bits(shape.level).exp2();
        let flood = flood_log2.map_or(0.0, |w| 2.0 * f64::from(w).exp2());
        let used = (shape.noise_bound() + flood) * scale;
        let p = field::P as f64;
        // Opening an answer is exact for c1 of up to 53 bits: see `times_secret`.
        (0..3).map(|extra| (field::P_BITS + 3 + extra, field::P_BITS + 10 + extra)).find(|&(c0_bits, c1_bits)| {
            let switch = p
                * (DEVIATIONS * (N as f64 / 12.0).sqrt() * (-(c1_bits as f64)).exp2()
                    + (-(c0_bits as f64) - 1.0).exp2());
            // A thousandth pays for the roundings of the floating-point numbers in between.
            used + switch < 0.4995
        })
    }

    /// What one answer in slots takes of a session's hiding, in parts of 2^-60; see [`super::HidingBudget`].
    pub fn hiding_cost(&self) -> u64 {
        self.hiding_cost
    }

    /// The level of the ciphertexts that this plan is for.
    pub fn level(&self) -> usize {
        self.level
    }

    /// Bytes of one answer of which `listed` coefficients of the first polynomial travel.
    pub fn answer_len(&self, listed: usize) -> usize {
        field::packed_len(N, self.c1_bits) + field::packed_len(listed, self.c0_bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_the_truth_about_the_primes() {
        assert!((modulus_bits(LEVELS) - SECURITY.modulus_bits).abs() < 0.1);
        assert!(modulus_bits(LEVELS) <= MAX_MODULUS_BITS);
        assert!((ERROR_SIGMA - (ERROR_COINS as f64).sqrt() / 2.0).abs() < 1e-12);
        for q in PRIMES {
            assert!((2..6000).all(|d| q % d != 0));
        }
    }

    #[test]
    fn plans_that_do_not_fit_are_refused() {
        let layer = Shape { level: 6, products: 512, nonzero: 256, magnitude: field::P as f64 / 2.0, rotations: 6 };
        let plan = AnswerPlan::slots(&layer).unwrap();
        assert!(plan.flood_log2.unwrap() >= 103 && plan.c1_bits <= MAX_C1_BITS);
        assert!(AnswerPlan::slots(&Shape { level: 5, ..layer }).is_err());
        assert!(AnswerPlan::slots(&Shape { products: 1 << 30, ..layer }).is_err());
        assert!(AnswerPlan::slots(&Shape { level: 7, ..layer }).is_err());
        let head = Shape { level: 3, products: 2048, nonzero: 8192, magnitude: 32768.0, rotations: 0 };
        assert!(AnswerPlan::coefficients(&head).is_ok());
        assert!(AnswerPlan::coefficients(&Shape { level: 2, ..head }).is_err());
        let shared = Shape { level: 4, magnitude: field::P as f64 / 2.0, ..head };
        assert!(AnswerPlan::coefficients(&shared).is_ok());
        assert!(AnswerPlan::coefficients(&Shape { level: 3, ..shared }).is_err());
    }

    #[test]
    fn the_fisher_information_of_the_flood_is_below_what_the_plan_uses() {
        let steps = 1_000_000;
        let half: f64 = (0..steps)
            .map(|i| {
                let x = (f64::from(i) + 0.5) / f64::from(steps) * 2.0;
                let (f, d) = if x < 1.0 {
                    (x.powi(3) / 6.0, x * x / 2.0)
                } else {
                    ((-3.0 * x.powi(3) + 12.0 * x * x - 12.0 * x + 4.0) / 6.0, (-9.0 * x * x + 24.0 * x - 12.0) / 6.0)
                };
                d * d / f * 2.0 / f64::from(steps)
            })
            .sum();
        assert!(2.0 * half > 3.0 && 2.0 * half < 3.2);
    }
}
