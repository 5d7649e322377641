//! Ciphertexts: two polynomials modulo q, kept as evaluations, and the seeded form in which a request travels.

use super::arithmetic::{self, Encoder, add_rows, reduce_plain};
use super::params::{N, PRIMES};
use super::{ntt, sample, vector};
use crate::random::PublicSeed;
use zeroize::Zeroizing;

/// c0 + c1 s = round(q m / p) + noise. The residues are evaluations, canonical, one row of N for each prime of the
/// level; the kernels of the products read and write them directly.
#[derive(Clone)]
pub struct Ciphertext {
    /// How many of the primes this ciphertext uses.
    pub level: usize,
    /// c0 and c1, `level * N` residues each.
    pub c: [Vec<u32>; 2],
}

impl Ciphertext {
    /// The ciphertext that is zero and hides nothing: where a sum begins.
    pub fn zero(level: usize) -> Self {
        Self { level, c: [vec![0; level * N], vec![0; level * N]] }
    }

    /// Adds another ciphertext of the same level.
    pub fn add(&mut self, other: &Self) {
        assert_eq!(self.level, other.level, "ciphertexts of one level are added");
        add_rows(&mut self.c[0], &other.c[0]);
        add_rows(&mut self.c[1], &other.c[1]);
    }

    /// Adds a plaintext polynomial (coefficients modulo p), encoded as an encryption encodes it: this is how the server
    /// adds its own share.
    pub fn add_plain(&mut self, plain: &[u64]) {
        assert_eq!(plain.len(), N, "a plaintext has {N} coefficients");
        let encoder = Encoder::new(self.level, plain);
        let mut share = Zeroizing::new(vec![0u32; N]);
        for (prime, row) in self.c[0].chunks_exact_mut(N).enumerate() {
            encoder.row(prime, &mut share);
            ntt::forward(prime, N, &mut share);
            vector::add(row, &share, PRIMES[prime]);
        }
    }

    /// Adds the product of `other` and a plaintext polynomial (coefficients modulo p, read as signed): the plain twin
    /// of every product kernel.
    pub fn add_product(&mut self, other: &Self, plain: &[u64]) {
        assert_eq!(self.level, other.level, "ciphertexts of one level are added");
        let factor = plain_evaluations(self.level, plain);
        for (sum, c) in self.c.iter_mut().zip(&other.c) {
            arithmetic::add_product_rows(sum, c, &factor);
        }
    }
}

/// The evaluations of round(q m / p): one row for each prime.
pub fn encode(level: usize, plain: &[u64]) -> Vec<u32> {
    assert_eq!(plain.len(), N, "a plaintext has {N} coefficients");
    let mut out = vec![0; level * N];
    arithmetic::encode(level, plain, &mut out);
    forward_rows(&mut out);
    out
}

/// The evaluations of a plaintext polynomial that multiplies a ciphertext: one row for each prime.
pub fn plain_evaluations(level: usize, plain: &[u64]) -> Vec<u32> {
    assert_eq!(plain.len(), N, "a plaintext has {N} coefficients");
    let mut out = vec![0; level * N];
    for (prime, row) in out.chunks_exact_mut(N).enumerate() {
        reduce_plain(prime, plain, row);
    }
    forward_rows(&mut out);
    out
}

/// Transforms one row for each prime.
pub(super) fn forward_rows(rows: &mut [u32]) {
    rows.chunks_exact_mut(N).enumerate().for_each(|(prime, row)| ntt::forward(prime, N, row));
}

/// The inverse of [`forward_rows`].
pub(super) fn inverse_rows(rows: &mut [u32]) {
    rows.chunks_exact_mut(N).enumerate().for_each(|(prime, row)| ntt::inverse(prime, N, row));
}

/// A symmetric encryption whose second polynomial is a stream of the client's public seed.
#[derive(Clone)]
pub struct SeededCiphertext {
    /// How many of the primes this ciphertext uses.
    pub level: usize,
    /// The number of the stream of the seed.
    pub index: u64,
    /// c0, `level * N` evaluations.
    pub c0: Vec<u32>,
}

impl SeededCiphertext {
    /// The whole ciphertext; `seed` came with the client's public key.
    pub fn expand(self, seed: &PublicSeed) -> Ciphertext {
        let c1 = sample::uniform(&mut seed.stream(self.index), self.level);
        Ciphertext { level: self.level, c: [self.c0, c1] }
    }
}

/// Every residue below its prime?
pub(super) fn canonical(rows: &[u32]) -> bool {
    rows.chunks(N).zip(&PRIMES).all(|(row, &q)| row.iter().all(|&x| x < q))
}
