//! Slots: the 8192 values modulo p that one plaintext polynomial holds, and the automorphisms that move them.
//!
//! Slot (s, i), sign s in {0, 1} and i in [0, N/2), is the evaluation at zeta^(+5^i) for s = 0 and zeta^(-5^i) for
//! s = 1. As a vector, slots are in the order s * N/2 + i. The map X -> X^(5^r) moves slot (s, i + r) to (s, i), and X
//! -> X^-1 swaps the two signs. On evaluations both are permutations, the same for every modulus.

use super::ntt;
use super::params::N;
use crate::error::{Error, Result};
use std::sync::OnceLock;

/// Slots of one sign.
pub const ROW: usize = N / 2;

/// The map X -> X^k of the ring, k odd.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Automorphism(u16);

impl Automorphism {
    /// Moves the value in slot (s, i + r) to slot (s, i), i + r taken modulo N/2; r may be negative. With `swap` the
    /// signs change places too.
    pub fn new(r: isize, swap: bool) -> Self {
        let mut k = 1usize;
        for _ in 0..r.rem_euclid(ROW as isize) {
            k = k * 5 % (2 * N);
        }
        Self(if swap { 2 * N - k } else { k } as u16)
    }

    /// X -> X^k; k must be odd and below 2N.
    pub fn from_exponent(k: u16) -> Result<Self> {
        if k % 2 == 1 && usize::from(k) < 2 * N {
            Ok(Self(k))
        } else {
            Err(Error::BadArgument(format!("X to the power {k} is no automorphism")))
        }
    }

    /// k of X -> X^k.
    pub fn exponent(self) -> u16 {
        self.0
    }

    /// Where each evaluation comes from: after the map, index i holds what index `permutation()[i]` held before.
    pub fn permutation(self) -> Vec<u32> {
        let bits = N.trailing_zeros();
        (0..N)
            .map(|i| {
                let exponent = (2 * ntt::bit_reverse(i, bits) + 1) * usize::from(self.0) % (2 * N);
                ntt::bit_reverse((exponent - 1) / 2, bits) as u32
            })
            .collect()
    }
}

/// The evaluation index of each slot: `index()[s * N/2 + i]` for slot (s, i).
pub fn index() -> &'static [u32] {
    static INDEX: OnceLock<Vec<u32>> = OnceLock::new();
    INDEX.get_or_init(|| {
        let bits = N.trailing_zeros();
        let mut out = vec![0u32; N];
        let mut k = 1usize;
        for i in 0..ROW {
            out[i] = ntt::bit_reverse((k - 1) / 2, bits) as u32;
            out[ROW + i] = ntt::bit_reverse((2 * N - k - 1) / 2, bits) as u32;
            k = k * 5 % (2 * N);
        }
        out
    })
}

/// The polynomial modulo p with these slots.
pub fn encode(slots: &[u64]) -> Vec<u64> {
    assert_eq!(slots.len(), N, "a polynomial has {N} slots");
    let mut out = vec![0; N];
    for (&at, &v) in index().iter().zip(slots) {
        out[at as usize] = v;
    }
    ntt::inverse_p(N, &mut out);
    out
}

/// The slots of a polynomial modulo p.
pub fn decode(coefficients: &[u64]) -> Vec<u64> {
    assert_eq!(coefficients.len(), N, "a polynomial has {N} coefficients");
    let mut values = coefficients.to_vec();
    ntt::forward_p(N, &mut values);
    index().iter().map(|&at| values[at as usize]).collect()
}
