//! Randomness, in two types that cannot be confused: secret streams, seeded by the operating system and wiped on
//! drop, and public streams, expanded from a seed that the peer also knows.

use rand_chacha::ChaCha12Rng;
use rand_core::{RngCore, SeedableRng};
use zeroize::Zeroize;

/// A generator for secrets: keys, errors, masks, choices. Seeded by the operating system; no `Clone`, no `Debug`.
pub struct SecretRng(ChaCha12Rng);

impl SecretRng {
    /// A fresh generator seeded by the operating system.
    pub fn from_os() -> Self {
        let mut seed = [0u8; 32];
        getrandom::fill(&mut seed).expect("the operating system gives no randomness; nothing private can be done");
        let rng = ChaCha12Rng::from_seed(seed);
        seed.zeroize();
        Self(rng)
    }

    /// A repeatable generator, for tests and for comparing kernels. Whoever knows the seed knows every secret.
    pub fn from_insecure_fixed_seed(seed: u64) -> Self {
        Self(ChaCha12Rng::seed_from_u64(seed))
    }

    /// A generator of its own for a thread or a part, seeded from this one.
    pub fn fork(&mut self) -> Self {
        let mut seed = [0u8; 32];
        self.0.fill_bytes(&mut seed);
        let rng = ChaCha12Rng::from_seed(seed);
        seed.zeroize();
        Self(rng)
    }

    /// 64 uniform bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Fills a buffer with uniform bytes.
    pub fn fill(&mut self, out: &mut [u8]) {
        self.0.fill_bytes(out);
    }
}

impl Drop for SecretRng {
    fn drop(&mut self) {
        // rand_chacha does not wipe its state; overwriting it with a public one does.
        self.0 = ChaCha12Rng::from_seed([0; 32]);
        std::hint::black_box(&self.0);
    }
}

/// A seed that travels in the clear and stands for a uniform polynomial or a public matrix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PublicSeed(pub [u8; 32]);

impl PublicSeed {
    /// A fresh public seed.
    pub fn fresh(rng: &mut SecretRng) -> Self {
        let mut seed = [0; 32];
        rng.fill(&mut seed);
        Self(seed)
    }

    /// The stream number `index` of this seed. Different indices are independent streams.
    pub fn stream(&self, index: u64) -> ChaCha12Rng {
        let mut rng = ChaCha12Rng::from_seed(self.0);
        rng.set_stream(index);
        rng
    }
}
