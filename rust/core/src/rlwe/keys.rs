//! The client's secret key and what is derived from it.

use super::arithmetic::{self, Encoder, add_product_rows, small_rows};
use super::budget::HidingBudget;
use super::cipher::{Ciphertext, SeededCiphertext, forward_rows, inverse_rows};
use super::params::{LEVELS, N, PRIMES};
use super::{ntt, sample, vector};
use crate::random::{PublicSeed, SecretRng};
use rand_core::RngCore;
use sha2::{Digest, Sha256};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use zeroize::Zeroizing;

/// The client's key of one session: a dense ternary polynomial, and the public seed of its requests with a counter, so
/// that no stream of the seed is ever used for two of them. Wiped on drop; not printable, not copyable. Not wiped: the
/// transforms' scratch on the stack, which the next transform overwrites.
pub struct SecretKey {
    /// Evaluations of the ternary polynomial modulo every prime.
    pub(super) rows: Zeroizing<Vec<u32>>,
    seed: PublicSeed,
    next: AtomicU64,
    budget: HidingBudget,
}

impl SecretKey {
    /// A fresh key.
    pub fn generate(rng: &mut SecretRng) -> Self {
        let small = sample::ternary(rng);
        let mut rows = Zeroizing::new(small_rows(LEVELS, &small));
        forward_rows(&mut rows);
        // The seed is public, so it comes from a generator of its own.
        let seed = PublicSeed::fresh(&mut SecretRng::from_os());
        Self { rows, seed, next: AtomicU64::new(0), budget: HidingBudget::default() }
    }

    /// How much of what floods can hide the answers opened with this key have used.
    pub fn budget(&self) -> &HidingBudget {
        &self.budget
    }

    /// The seed that expands this key's requests; it travels with the public key.
    pub fn request_seed(&self) -> PublicSeed {
        self.seed
    }

    /// Takes the counter back to the start: the attack on repeated streams needs a client that does so.
    #[cfg(test)]
    pub(super) fn insecure_rewind(&self) {
        self.next.store(0, Ordering::Relaxed);
    }

    /// Encrypts a plaintext polynomial, coefficients modulo p. `rng` gives the error only.
    pub fn encrypt(&self, level: usize, plain: &[u64], rng: &mut SecretRng) -> SeededCiphertext {
        assert_eq!(plain.len(), N, "a plaintext has {N} coefficients");
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        let encoder = Encoder::new(level, plain);
        let mut stream = self.seed.stream(index);
        let mut rows = sample::UniformRows::new(|bytes: &mut [u8]| stream.fill_bytes(bytes));
        let random = |prime: usize, row: &mut [u32]| rows.next(PRIMES[prime], row);
        let c0 = self.mask(level, random, |prime, row| encoder.row(prime, row), rng);
        SeededCiphertext { level, index, c0 }
    }

    /// message + error - c1 s as evaluations, row by row: `random` gives rows of c1, in order, and `message`
    /// coefficients.
    pub(super) fn mask(
        &self,
        level: usize,
        mut random: impl FnMut(usize, &mut [u32]),
        mut message: impl FnMut(usize, &mut [u32]),
        rng: &mut SecretRng,
    ) -> Vec<u32> {
        let error = sample::error(rng);
        let mut c0 = vec![0; level * N];
        let mut c1 = vec![0u32; N];
        let mut row = Zeroizing::new(vec![0u32; N]);
        let mut small = Zeroizing::new(vec![0u32; N]);
        for (prime, out) in c0.chunks_exact_mut(N).enumerate() {
            let q = PRIMES[prime];
            message(prime, &mut row);
            vector::small_row(&mut small, &error, q);
            vector::add(&mut row, &small, q);
            ntt::forward(prime, N, &mut row);
            random(prime, &mut c1);
            vector::add_product(out, &c1, &self.rows[prime * N..][..N], q);
            vector::subtract_from(out, &row, q);
        }
        c0
    }

    /// The plaintext polynomial of a ciphertext that never left this machine's memory; answers of a peer come as
    /// [`super::Answer`]. Right if the noise is below q / 2p (1 - 2^-22).
    pub fn decrypt(&self, ciphertext: &Ciphertext) -> Vec<u64> {
        arithmetic::round_to_p(ciphertext.level, &self.phase(ciphertext))
    }

    /// c0 + c1 s, in coefficients.
    pub(super) fn phase(&self, ciphertext: &Ciphertext) -> Zeroizing<Vec<u32>> {
        let mut phase = Zeroizing::new(ciphertext.c[0].clone());
        add_product_rows(&mut phase, &ciphertext.c[1], &self.rows[..ciphertext.level * N]);
        inverse_rows(&mut phase);
        phase
    }

    /// The public key for a session with this transcript.
    pub fn public_key(&self, transcript: &[u8; 32], rng: &mut SecretRng) -> PublicKey {
        let a = transcript_polynomial(transcript);
        let b = self.mask(LEVELS, copy_rows(&a), |_, row| row.fill(0), rng);
        PublicKey { seed: self.seed, a, b, budget: Arc::default() }
    }
}

/// Gives the rows of a polynomial that is there already.
pub(super) fn copy_rows(rows: &[u32]) -> impl FnMut(usize, &mut [u32]) {
    move |prime, out| out.copy_from_slice(&rows[prime * N..][..N])
}

/// The public key's random polynomial: neither party chooses it.
pub(super) fn transcript_polynomial(transcript: &[u8; 32]) -> Vec<u32> {
    let seed: [u8; 32] =
        Sha256::new().chain_update(b"cloister public key a").chain_update(transcript).finalize().into();
    sample::uniform(&mut PublicSeed(seed).stream(0), LEVELS)
}

/// What the server needs to make encryptions of zero and to expand requests.
pub struct PublicKey {
    pub(super) seed: PublicSeed,
    pub(super) a: Vec<u32>,
    pub(super) b: Vec<u32>,
    pub(super) budget: Arc<HidingBudget>,
}

impl PublicKey {
    /// How much of what floods can hide the answers under this key have used.
    pub fn budget(&self) -> &HidingBudget {
        &self.budget
    }

    /// The seed of the client's requests.
    pub fn request_seed(&self) -> PublicSeed {
        self.seed
    }

    /// A fresh encryption of zero at a level: (b u + e0, a u + e1) with u ternary. Depends on no input, so it can be
    /// made ahead.
    pub fn encrypt_zero(&self, level: usize, rng: &mut SecretRng) -> EncryptionOfZero {
        let small = sample::ternary(rng);
        let errors = [sample::error(rng), sample::error(rng)];
        let mut zero = Ciphertext::zero(level);
        let mut u = Zeroizing::new(vec![0u32; N]);
        for (prime, &q) in PRIMES[..level].iter().enumerate() {
            let at = prime * N..(prime + 1) * N;
            vector::small_row(&mut u, &small, q);
            ntt::forward(prime, N, &mut u);
            for ((out, error), key) in zero.c.iter_mut().zip(&errors).zip([&self.b, &self.a]) {
                let out = &mut out[at.clone()];
                vector::small_row(out, error, q);
                ntt::forward(prime, N, out);
                vector::add_product(out, &u, &key[at.clone()], q);
            }
        }
        EncryptionOfZero { zero, budget: self.budget.clone() }
    }
}

/// A fresh encryption of zero, good for one answer: it cannot be copied, and adding it consumes it.
///
/// Used twice, the difference of the two answers would be a noiseless function of the weights.
pub struct EncryptionOfZero {
    pub(super) zero: Ciphertext,
    /// The book of the key it was made with: an answer in slots is counted there.
    pub(super) budget: Arc<HidingBudget>,
}

impl Ciphertext {
    /// Adds a fresh encryption of zero, which hides in c1 everything but the value.
    pub fn add_zero(&mut self, zero: EncryptionOfZero) {
        self.add(&zero.zero);
    }
}
