//! Automorphisms of ciphertexts. The map is a permutation of evaluations; the key it leaves behind is switched back
//! with one digit for each prime and no special modulus.
//!
//! Noise of one switch: the sum over primes of (centred residue) * (error), standard deviation
//! sqrt(L N / 12) * 2^25 * 3.24, about 2^33 at level 6; a product is far above it.

use super::cipher::Ciphertext;
use super::keys::{SecretKey, copy_rows};
use super::params::{LEVELS, N, PRIMES};
use super::slots::Automorphism;
use super::{ntt, sample, vector};
use crate::error::{Error, Result};
use crate::random::{PublicSeed, SecretRng};
use std::cell::RefCell;
use std::collections::BTreeMap;
use zeroize::Zeroizing;

/// Keys for a set of automorphisms: for each, one encryption for each prime of the permuted secret times the number
/// that is 1 modulo that prime and 0 modulo the others. Good at every level.
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
                let mut part = self.mask(LEVELS, copy_rows(a), |_, row| row.fill(0), rng);
                let (row, secret) = (digit * N..(digit + 1) * N, &self.rows[digit * N..(digit + 1) * N]);
                let turned: Zeroizing<Vec<u32>> =
                    Zeroizing::new(permutation.iter().map(|&from| secret[from as usize]).collect());
                vector::add(&mut part[row], &turned, PRIMES[digit]);
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

    /// Takes over the keys of another set from the same client. What was merged is used, not sent again.
    pub fn merge(&mut self, other: RotationKeys) {
        self.keys.extend(other.keys);
    }

    /// The ciphertext of the permuted plaintext.
    pub fn apply(&self, ciphertext: &Ciphertext, automorphism: Automorphism) -> Result<Ciphertext> {
        let mut out = Ciphertext::zero(ciphertext.level);
        self.add_turned(&mut out, ciphertext, automorphism)?;
        Ok(out)
    }

    /// Adds the ciphertext of the permuted plaintext to another of the same level.
    pub fn add_turned(&self, sum: &mut Ciphertext, ciphertext: &Ciphertext, automorphism: Automorphism) -> Result<()> {
        let Some(key) = self.keys.get(&automorphism) else {
            return Err(Error::BadArgument("there is no key for this automorphism".into()));
        };
        assert_eq!(sum.level, ciphertext.level, "ciphertexts of one level are added");
        let level = ciphertext.level;
        // Kept by the thread: fresh memory of this size would cost as much as a transform.
        thread_local!(static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default()));
        SCRATCH.with_borrow_mut(|scratch| {
            let Scratch { turned, digits, rows } = scratch;
            let [turned, rows] = [turned, rows].map(|r| {
                r.resize(LEVELS * N, 0);
                &mut r[..level * N]
            });
            digits.resize(LEVELS * N, 0);
            for ((prime, from), to) in ciphertext.c[0].chunks_exact(N).enumerate().zip(sum.c[0].chunks_exact_mut(N)) {
                vector::permute(&mut rows[..N], from, &key.permutation);
                vector::add(to, &rows[..N], PRIMES[prime]);
            }
            for ((prime, from), digit) in ciphertext.c[1].chunks_exact(N).enumerate().zip(digits.chunks_exact_mut(N)) {
                let turned = &mut turned[prime * N..][..N];
                vector::permute(turned, from, &key.permutation);
                rows[..N].copy_from_slice(turned);
                ntt::inverse(prime, N, &mut rows[..N]);
                vector::centre(digit, &rows[..N], PRIMES[prime]);
            }
            for (prime, &q) in PRIMES[..level].iter().enumerate() {
                for ((i, row), digit) in rows.chunks_exact_mut(N).enumerate().zip(digits.chunks_exact(N)) {
                    if i != prime {
                        ntt::forward_signed(prime, digit, row);
                    }
                }
                let factors: Vec<[&[u32]; 3]> = (0..level)
                    .map(|i| {
                        let at = (i * LEVELS + prime) * N;
                        let row = if i == prime { &turned[i * N..][..N] } else { &rows[i * N..][..N] };
                        [row, &key.b[at..][..N], &key.a[at..][..N]]
                    })
                    .collect();
                let [c0, c1] = &mut sum.c;
                vector::add_dots([&mut c0[prime * N..][..N], &mut c1[prime * N..][..N]], &factors, q);
            }
        });
        Ok(())
    }
}

/// Room for one key switch.
#[derive(Default)]
struct Scratch {
    /// c1, permuted.
    turned: Vec<u32>,
    /// Its centred coefficients, prime by prime.
    digits: Vec<i32>,
    /// Those modulo one prime, as evaluations.
    rows: Vec<u32>,
}
