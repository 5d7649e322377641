//! Where the time of a batched product goes: seconds of work, added up over threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A kind of work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Client: slots to polynomials, encryption, packing.
    Encrypt,
    /// Server: unpacking, expansion, its own share, the order of the kernel.
    Expand,
    /// Server: weights to evaluations.
    Weights,
    /// Server: the multiply-adds.
    Kernel,
    /// Server: shifting sums to where they belong.
    Rotate,
    /// Server: the encryption of zero, the flood, the mask and the switch of the modulus.
    Hide,
    /// Client: unpacking, decryption, slots.
    Decrypt,
}

impl Phase {
    /// Every phase in the order of a product.
    pub const ALL: [Phase; 7] =
        [Phase::Encrypt, Phase::Expand, Phase::Weights, Phase::Kernel, Phase::Rotate, Phase::Hide, Phase::Decrypt];
}

/// Nanoseconds of each phase.
#[derive(Default)]
pub struct Work([AtomicU64; Phase::ALL.len()]);

impl Work {
    /// Seconds of a phase, all threads together.
    pub fn seconds(&self, phase: Phase) -> f64 {
        self.0[phase as usize].load(Ordering::Relaxed) as f64 * 1e-9
    }

    /// Runs `body` and counts its time.
    pub(super) fn time<T>(&self, phase: Phase, body: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let out = body();
        self.0[phase as usize].fetch_add(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
        out
    }
}
