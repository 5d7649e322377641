//! The client's secret key and what is derived from it.

use super::arithmetic::{self, add_product_rows, add_rows, small_rows};
use super::cipher::{Ciphertext, SeededCiphertext, forward_rows, inverse_rows};
use super::params::{LEVELS, N, PRIMES};
use super::sample;
use crate::random::{PublicSeed, SecretRng};
use sha2::{Digest, Sha256};
use std::sync::atomic::{AtomicU64, Ordering};
use zeroize::Zeroizing;

/// The client's key of one session: a dense ternary polynomial, and the public seed of its requests with a counter, so
/// that no stream of the seed is ever used for two of them. Wiped on drop; not printable, not copyable.
pub struct SecretKey {
    /// Evaluations of the ternary polynomial modulo every prime.
    pub(super) rows: Zeroizing<Vec<u32>>,
    seed: PublicSeed,
    next: AtomicU64,
}

impl SecretKey {
    /// A fresh key.
    pub fn generate(rng: &mut SecretRng) -> Self {
        let small = sample::ternary(rng);
        let mut rows = Zeroizing::new(small_rows(LEVELS, &small));
        forward_rows(&mut rows);
        // The seed is public, so it comes from a generator of its own.
        let seed = PublicSeed::fresh(&mut SecretRng::from_os());
        Self { rows, seed, next: AtomicU64::new(0) }
    }

    /// The seed that expands this key's requests; it travels with the public key.
    pub fn request_seed(&self) -> PublicSeed {
        self.seed
    }

    /// Encrypts a plaintext polynomial, coefficients modulo p. `rng` gives the error only.
    pub fn encrypt(&self, level: usize, plain: &[u64], rng: &mut SecretRng) -> SeededCiphertext {
        assert_eq!(plain.len(), N, "a plaintext has {N} coefficients");
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        let mut message = Zeroizing::new(vec![0u32; level * N]);
        arithmetic::encode(level, plain, &mut message);
        let c1 = sample::uniform(&mut self.seed.stream(index), level);
        SeededCiphertext { level, index, c0: self.mask(&c1, message, rng) }
    }

    /// message + error - c1 s as evaluations, for a message given in coefficients.
    pub(super) fn mask(&self, c1: &[u32], mut message: Zeroizing<Vec<u32>>, rng: &mut SecretRng) -> Vec<u32> {
        let level = c1.len() / N;
        let error = Zeroizing::new(small_rows(level, &sample::error(rng)));
        add_rows(&mut message, &error);
        forward_rows(&mut message);
        let mut c0 = vec![0; level * N];
        add_product_rows(&mut c0, c1, &self.rows[..level * N]);
        for ((c0, m), &q) in c0.chunks_exact_mut(N).zip(message.chunks_exact(N)).zip(&PRIMES) {
            c0.iter_mut().zip(m).for_each(|(x, &m)| *x = arithmetic::sub(m, *x, q));
        }
        c0
    }

    /// The plaintext polynomial of a ciphertext that never left this machine's memory; answers of a peer come as [`super::Answer`].
    /// Right if the noise is below q / 2p (1 - 2^-22).
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
        let b = self.mask(&a, Zeroizing::new(vec![0; LEVELS * N]), rng);
        PublicKey { seed: self.seed, a, b }
    }
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
}

impl PublicKey {
    /// The seed of the client's requests.
    pub fn request_seed(&self) -> PublicSeed {
        self.seed
    }

    /// A fresh encryption of zero at a level: (b u + e0, a u + e1) with u ternary. Depends on no input, so it can be made ahead.
    pub fn encrypt_zero(&self, level: usize, rng: &mut SecretRng) -> EncryptionOfZero {
        let mut u = Zeroizing::new(small_rows(level, &sample::ternary(rng)));
        forward_rows(&mut u);
        let mut half = |key: &[u32]| {
            let mut out = small_rows(level, &sample::error(rng));
            forward_rows(&mut out);
            add_product_rows(&mut out, &key[..level * N], &u);
            out
        };
        EncryptionOfZero(Ciphertext { level, c: [half(&self.b), half(&self.a)] })
    }
}

/// A fresh encryption of zero, good for one answer: it cannot be copied, and adding it consumes it.
///
/// Used twice, the difference of the two answers would be a noiseless function of the weights.
pub struct EncryptionOfZero(pub(super) Ciphertext);

impl Ciphertext {
    /// Adds a fresh encryption of zero, which hides in c1 everything but the value.
    pub fn add_zero(&mut self, zero: EncryptionOfZero) {
        self.add(&zero.0);
    }
}
