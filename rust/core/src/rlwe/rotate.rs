//! Automorphisms of ciphertexts. The map is a permutation of evaluations; the key it leaves behind is switched back with one
//! digit for each prime and no special modulus.
//!
//! Noise of one switch: the sum over primes of (centred residue) * (error), standard deviation
//! sqrt(L N / 12) * 2^25 * 3.24, about 2^33 at level 6; a product is far above it.

use super::arithmetic::{self, add_product_rows};
use super::cipher::Ciphertext;
use super::keys::SecretKey;
use super::params::{LEVELS, N, PRIMES};
use super::slots::Automorphism;
use super::{ntt, sample};
use crate::error::{Error, Result};
use crate::random::{PublicSeed, SecretRng};
use std::collections::BTreeMap;
use zeroize::Zeroizing;

/// Keys for a set of automorphisms: for each, one encryption for each prime of the permuted secret times the number that is 1 modulo
/// that prime and 0 modulo the others. Good at every level.
pub struct RotationKeys {
    pub(super) seed: PublicSeed,
    pub(super) keys: BTreeMap<Automorphism, Key>,
}

/// One automorphism's key: `b` and the expanded `a`, each a block of `LEVELS * N` evaluations for each digit.
pub(super) struct Key {
    pub(super) b: Vec<u32>,
    pub(super) a: Vec<u32>,
    pub(super) permutation: Vec<u32>,
}

/// The random polynomials of one automorphism's key; the exponent keeps the streams of different keys apart.
pub(super) fn random_part(seed: &PublicSeed, automorphism: Automorphism) -> Vec<u32> {
    let stream = |digit: usize| u64::from(automorphism.exponent()) << 8 | digit as u64;
    (0..LEVELS).flat_map(|digit| sample::uniform(&mut seed.stream(stream(digit)), LEVELS)).collect()
}

impl SecretKey {
    /// Keys for these automorphisms.
    pub fn rotation_keys(&self, automorphisms: &[Automorphism], rng: &mut SecretRng) -> RotationKeys {
        let seed = PublicSeed::fresh(&mut SecretRng::from_os());
        let keys = automorphisms.iter().map(|&automorphism| {
            let a = random_part(&seed, automorphism);
            let permutation = automorphism.permutation();
            let mut b = Vec::with_capacity(a.len());
            for (digit, a) in a.chunks_exact(LEVELS * N).enumerate() {
                let mut part = self.mask(a, Zeroizing::new(vec![0; LEVELS * N]), rng);
                let (row, secret) = (digit * N..(digit + 1) * N, &self.rows[digit * N..(digit + 1) * N]);
                for (x, &from) in part[row].iter_mut().zip(&permutation) {
                    *x = arithmetic::add(*x, secret[from as usize], PRIMES[digit]);
                }
                b.extend(part);
            }
            (automorphism, Key { b, a, permutation })
        });
        RotationKeys { seed, keys: keys.collect() }
    }
}

impl RotationKeys {
    /// The automorphisms that these keys can do.
    pub fn automorphisms(&self) -> Vec<Automorphism> {
        self.keys.keys().copied().collect()
    }

    /// The ciphertext of the permuted plaintext.
    pub fn apply(&self, ciphertext: &Ciphertext, automorphism: Automorphism) -> Result<Ciphertext> {
        let Some(key) = self.keys.get(&automorphism) else {
            return Err(Error::BadArgument("there is no key for this automorphism".into()));
        };
        let level = ciphertext.level;
        let mut out = Ciphertext::zero(level);
        let mut turned = vec![0u32; level * N];
        for (part, into) in [(&ciphertext.c[0], &mut out.c[0]), (&ciphertext.c[1], &mut turned)] {
            for (from, into) in part.chunks_exact(N).zip(into.chunks_exact_mut(N)) {
                into.iter_mut().zip(&key.permutation).for_each(|(x, &k)| *x = from[k as usize]);
            }
        }
        let mut digit = vec![0u32; N];
        let mut rows = vec![0u32; level * N];
        for i in 0..level {
            digit.copy_from_slice(&turned[i * N..(i + 1) * N]);
            ntt::inverse(i, N, &mut digit);
            for (prime, row) in rows.chunks_exact_mut(N).enumerate() {
                if prime == i {
                    row.copy_from_slice(&turned[i * N..(i + 1) * N]);
                    continue;
                }
                recentre(&digit, PRIMES[i], row, PRIMES[prime]);
                ntt::forward(prime, N, row);
            }
            let block = i * LEVELS * N;
            add_product_rows(&mut out.c[0], &rows, &key.b[block..block + level * N]);
            add_product_rows(&mut out.c[1], &rows, &key.a[block..block + level * N]);
        }
        Ok(out)
    }
}

/// The residues modulo `to` of residues modulo `from` read as numbers around zero. The primes differ by less than an eighth, so
/// half of one is below the other.
fn recentre(residues: &[u32], from: u32, out: &mut [u32], to: u32) {
    for (y, &x) in out.iter_mut().zip(residues) {
        let negative = (from / 2).wrapping_sub(x) >> 31;
        *y = x.wrapping_add(to.wrapping_sub(from) & negative.wrapping_neg());
    }
}
