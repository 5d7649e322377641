//! Where random polynomials come from. Secret ones take time that does not depend on what comes out.

use super::params::{ERROR_COINS, N, PRIMES, RESIDUE_BITS};
use super::vector;
use crate::random::SecretRng;
use rand_chacha::ChaCha12Rng;
use rand_core::RngCore;
use zeroize::Zeroizing;

/// Small secret coefficients, wiped when dropped.
pub(super) type Small = Zeroizing<Vec<i8>>;

/// A polynomial with coefficients uniform on {-1, 0, 1}: pairs of bits, of which 3 is thrown away. Which pairs are
/// thrown away shows in the time, and is independent of the values that are kept.
pub(super) fn ternary(rng: &mut SecretRng) -> Small {
    let mut out = Zeroizing::new(vec![0i8; N + 32]);
    let mut at = 0;
    while at < N {
        let mut word = rng.next_u64();
        for _ in 0..32 {
            let pair = (word & 3) as i8;
            out[at.min(N + 31)] = pair - 1;
            at += usize::from(pair != 3);
            word >>= 2;
        }
    }
    out.truncate(N);
    out
}

/// A polynomial of errors: the sum of 21 coins minus the sum of 21 others, by counting bits.
pub(super) fn error(rng: &mut SecretRng) -> Small {
    const { assert!(ERROR_COINS == 42) };
    let mut words = Zeroizing::new([0u64; 512]);
    let mut out = Zeroizing::new(vec![0i8; N]);
    for part in out.chunks_mut(words.len()) {
        words.iter_mut().for_each(|w| *w = rng.next_u64());
        vector::coins(part, &words[..]);
    }
    out
}

/// Uniform residues, one row of N for each prime in turn, by rejection on 25 bits of each 32-bit word of a stream. The
/// time shows how many words were thrown away, which says nothing of those kept.
pub(super) struct UniformRows<F> {
    fill: F,
    block: Zeroizing<[u8; 4096]>,
    at: usize,
}

impl<F: FnMut(&mut [u8])> UniformRows<F> {
    pub(super) fn new(fill: F) -> Self {
        Self { fill, block: Zeroizing::new([0; 4096]), at: 4096 }
    }

    /// The next row, residues modulo q.
    pub(super) fn next(&mut self, q: u32, row: &mut [u32]) {
        let mut have = 0;
        while have < row.len() {
            if self.at == self.block.len() {
                (self.fill)(&mut self.block[..]);
                self.at = 0;
            }
            for word in self.block[self.at..].chunks_exact(4) {
                let residue = u32::from_le_bytes([word[0], word[1], word[2], word[3]]) & ((1 << RESIDUE_BITS) - 1);
                row[have] = residue;
                have += usize::from(residue < q);
                self.at += 4;
                if have == row.len() {
                    break;
                }
            }
        }
    }

    fn rows(mut self, level: usize) -> Vec<u32> {
        let mut out = vec![0u32; level * N];
        for (row, &q) in out.chunks_exact_mut(N).zip(&PRIMES) {
            self.next(q, row);
        }
        out
    }
}

/// Uniform rows for the first `level` primes from a public stream. A higher level extends a lower one.
pub(super) fn uniform(stream: &mut ChaCha12Rng, level: usize) -> Vec<u32> {
    UniformRows::new(|bytes: &mut [u8]| stream.fill_bytes(bytes)).rows(level)
}

/// The same from a secret stream.
pub(super) fn secret_uniform(rng: &mut SecretRng, level: usize) -> Zeroizing<Vec<u32>> {
    Zeroizing::new(UniformRows::new(|bytes: &mut [u8]| rng.fill(bytes)).rows(level))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::PublicSeed;

    #[test]
    fn ternary_coefficients_are_uniform() {
        let mut rng = SecretRng::from_os();
        let mut counts = [0f64; 3];
        for _ in 0..50 {
            ternary(&mut rng).iter().for_each(|&x| counts[(x + 1) as usize] += 1.0);
        }
        let expected = 50.0 * N as f64 / 3.0;
        let chi: f64 = counts.iter().map(|c| (c - expected) * (c - expected) / expected).sum();
        assert!(chi < 30.0, "chi square {chi} with two degrees of freedom");
    }

    #[test]
    fn errors_have_the_binomial_distribution() {
        let mut rng = SecretRng::from_os();
        let mut counts = vec![0f64; 43];
        for _ in 0..50 {
            error(&mut rng).iter().for_each(|&x| counts[(x + 21) as usize] += 1.0);
        }
        let (mut binomial, mut chi, mut bins) = (1.0, 0.0, 0);
        for (k, c) in counts.iter().enumerate() {
            let expected = 50.0 * N as f64 * binomial / 42f64.exp2();
            if expected > 10.0 {
                chi += (c - expected) * (c - expected) / expected;
                bins += 1;
            }
            binomial = binomial * (42 - k) as f64 / (k + 1) as f64;
        }
        assert!(bins > 20 && chi < f64::from(bins) + 12.0 * f64::from(bins).sqrt(), "chi square {chi} of {bins} bins");
    }

    #[test]
    fn expansion_is_uniform_repeatable_and_a_prefix_of_higher_levels() {
        let seed = PublicSeed([7; 32]);
        let six = uniform(&mut seed.stream(3), 6);
        assert_eq!(uniform(&mut seed.stream(3), 2), six[..2 * N]);
        assert_ne!(uniform(&mut seed.stream(4), 6), six);
        for (row, &q) in six.chunks_exact(N).zip(&PRIMES) {
            assert!(row.iter().all(|&x| x < q));
            let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / N as f64 / f64::from(q);
            assert!((mean - 0.5).abs() < 0.03);
        }
    }
}
