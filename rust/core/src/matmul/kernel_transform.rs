//! From the slots of eight weight polynomials to their evaluations modulo every prime, eight polynomials side by side.
//!
//! The slots go through an inverse transform mod p, once; the coefficients, centred, are reduced modulo each prime and go
//! through a forward transform. Both are in doubles: mod p a product has 82 bits and takes a fused pair, modulo a prime
//! of 25 bits a product is exact and a butterfly is five instructions.

use super::kernel::{Modulus, reduce};
#[cfg(target_arch = "x86_64")]
use super::kernel_vector::{Avx2, Avx512};
use super::kernel_vector::{Isa, Plain, ROUNDER, Vector};
use super::layout::reverse_bits;
use crate::field::{self, P};
use crate::rlwe::{LEVELS, N, PRIMES, ntt};

/// Polynomials side by side.
pub(super) const SIDE: usize = 8;

/// A constant multiplier: its centred value and that value divided by the modulus.
#[derive(Clone, Copy)]
struct Twiddle {
    value: f64,
    quotient: f64,
}

impl Twiddle {
    fn new(value: u64, modulus: u64) -> Self {
        let centred = if value > modulus / 2 { value as i64 - modulus as i64 } else { value as i64 } as f64;
        Self { value: centred, quotient: centred / modulus as f64 }
    }
}

/// The forward transform of one prime.
struct Forward {
    modulus: Modulus,
    twiddles: Vec<Twiddle>,
}

/// The tables for weight polynomials of one size.
pub(super) struct Transforms {
    size: usize,
    inverse: Vec<Twiddle>,
    scale: Twiddle,
    forward: Vec<Forward>,
}

/// Where the evaluations of a group go: prime k, point a at `prime * k + point * a + 0..8`.
#[derive(Clone, Copy)]
pub(super) struct Strides {
    pub prime: usize,
    pub point: usize,
}

impl Transforms {
    /// The tables for polynomials of `size` coefficients, a power of two from 2 to N.
    pub fn new(size: usize) -> Self {
        assert!(size.is_power_of_two() && (2..=N).contains(&size));
        let bits = size.trailing_zeros();
        let powers = |root: u64, modulus: u64| {
            let mut all = vec![1u64];
            (1..2 * size)
                .for_each(|k| all.push((u128::from(all[k - 1]) * u128::from(root) % u128::from(modulus)) as u64));
            all
        };
        // The transform of X begins with the root itself.
        let mut x = vec![0u64; size];
        x[1] = 1;
        ntt::forward_p(size, &mut x);
        let all = powers(x[0], P);
        let inverse = (0..size).map(|k| Twiddle::new(all[(2 * size - reverse_bits(k, bits)) % (2 * size)], P));
        let scale = (0..bits).fold(1, |s, _| field::mul(s, P.div_ceil(2)));
        let forward = (0..LEVELS).map(|prime| {
            let q = u64::from(PRIMES[prime]);
            let mut x = vec![0u32; size];
            x[1] = 1;
            ntt::forward(prime, size, &mut x);
            let all = powers(u64::from(x[0]), q);
            let twiddles = (0..size).map(|k| Twiddle::new(all[reverse_bits(k, bits)], q)).collect();
            Forward { modulus: Modulus::new(PRIMES[prime]), twiddles }
        });
        Self { size, inverse: inverse.collect(), scale: Twiddle::new(scale, P), forward: forward.collect() }
    }

    /// Transforms several groups of eight polynomials. `slots` holds `[group][place][polynomial]`, places in bit-reversed
    /// order, integers below 2^31 in size; it is overwritten with the coefficients. `work` is as long as one group. The evaluations
    /// of group k go to `out` from k x 8 on, centred residues (off by at most 2 from the centre's bound).
    pub fn run(&self, isa: Isa, slots: &mut [f64], work: &mut [f64], out: &mut [i32], strides: Strides) {
        let groups = slots.len() / (self.size * SIDE);
        assert!(slots.len() == groups * self.size * SIDE && work.len() == self.size * SIDE);
        assert!(strides.prime * (LEVELS - 1) + strides.point * (self.size - 1) + groups * SIDE <= out.len());
        // SAFETY: `Isa` values other than `Portable` are only made where the instructions exist, and the lengths are checked.
        unsafe {
            match isa {
                Isa::Portable => self.run_as::<Plain>(slots, work, out, strides),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => self.run_avx2(slots, work, out, strides),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => self.run_avx512(slots, work, out, strides),
                #[cfg(not(target_arch = "x86_64"))]
                _ => self.run_as::<Plain>(slots, work, out, strides),
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn run_avx2(&self, slots: &mut [f64], work: &mut [f64], out: &mut [i32], strides: Strides) {
        // SAFETY: the feature is enabled and the caller checked the lengths.
        unsafe { self.run_as::<Avx2>(slots, work, out, strides) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    unsafe fn run_avx512(&self, slots: &mut [f64], work: &mut [f64], out: &mut [i32], strides: Strides) {
        // SAFETY: the feature is enabled and the caller checked the lengths.
        unsafe { self.run_as::<Avx512>(slots, work, out, strides) }
    }

    /// Prime by prime, so that what one prime writes stays in the cache.
    ///
    /// # Safety
    /// The instructions of `V` are enabled; slices have the lengths that [`Transforms::run`] checks.
    #[inline(always)]
    unsafe fn run_as<V: Vector>(&self, slots: &mut [f64], work: &mut [f64], out: &mut [i32], strides: Strides) {
        let length = self.size * SIDE;
        let groups = slots.len() / length;
        // SAFETY: passes stay inside the vectors of a group; the output was checked against the strides.
        unsafe {
            for k in 0..groups {
                self.to_coefficients::<V>(slots.as_mut_ptr().add(k * length));
            }
            for (prime, forward) in self.forward.iter().enumerate() {
                for k in 0..groups {
                    let out = out.as_mut_ptr().add(prime * strides.prime + k * SIDE);
                    let from = slots.as_ptr().add(k * length);
                    self.evaluate::<V>(forward, from, work.as_mut_ptr(), out, strides.point);
                }
            }
        }
    }

    /// Slots to centred coefficients modulo p, in place. Sums of a pass are reduced, so values stay below 2^42; the inputs are integers below
    /// 2^31.
    ///
    /// # Safety
    /// The instructions of `V` are enabled; `x` holds `size` vectors.
    #[inline(always)]
    unsafe fn to_coefficients<V: Vector>(&self, x: *mut f64) {
        // SAFETY: indices are below `size`, by the structure of the transform.
        unsafe {
            let at = |k: usize| x.wrapping_add(k * SIDE);
            let (p, inverse_p) = (V::splat(P as f64), V::splat(1.0 / P as f64));
            let mut groups = self.size / 2;
            let mut span = 1;
            if self.size.trailing_zeros() % 2 == 1 {
                for g in 0..groups {
                    let (u, v) = (V::load(at(2 * g)), V::load(at(2 * g + 1)));
                    u.add(v).store(at(2 * g));
                    times_p(u.sub(v), self.inverse[groups + g], p).store(at(2 * g + 1));
                }
                (groups, span) = (groups / 2, 2);
            }
            while groups >= 2 {
                for g in 0..groups / 2 {
                    let (left, right) = (self.inverse[groups + 2 * g], self.inverse[groups + 2 * g + 1]);
                    let both = self.inverse[groups / 2 + g];
                    for k in 4 * g * span..(4 * g + 1) * span {
                        let (a, b) = (V::load(at(k)), V::load(at(k + span)));
                        let (c, d) = (V::load(at(k + 2 * span)), V::load(at(k + 3 * span)));
                        let (s, t) = (a.add(b), c.add(d));
                        let (u, v) = (times_p(a.sub(b), left, p), times_p(c.sub(d), right, p));
                        reduce(s.add(t), p, inverse_p).store(at(k));
                        u.add(v).store(at(k + span));
                        times_p(s.sub(t), both, p).store(at(k + 2 * span));
                        times_p(u.sub(v), both, p).store(at(k + 3 * span));
                    }
                }
                (groups, span) = (groups / 4, span * 4);
            }
            let bound = V::splat((P / 2) as f64);
            for k in 0..self.size {
                times_p(V::load(at(k)), self.scale, p).wrap_once(bound, p).store(at(k));
            }
        }
    }

    /// Centred coefficients modulo p to evaluations modulo one prime. Every level adds at most 2^24 + 2 to a value, so values stay below
    /// 2^28, products below 2^52 and everything is exact.
    ///
    /// # Safety
    /// The instructions of `V` are enabled; `from` and `x` hold `size` vectors, `out` the strided evaluations.
    #[inline(always)]
    unsafe fn evaluate<V: Vector>(
        &self,
        forward: &Forward,
        from: *const f64,
        x: *mut f64,
        out: *mut i32,
        stride: usize,
    ) {
        // SAFETY: indices are below `size`, by the structure of the transform.
        unsafe {
            let at = |k: usize| x.wrapping_add(k * SIDE);
            let source = |k: usize| from.wrapping_add(k * SIDE);
            let (q, inverse) = (V::splat(forward.modulus.q), V::splat(forward.modulus.inverse));
            let twiddles = forward.twiddles.as_ptr();
            let (mut groups, mut span) = if self.size.trailing_zeros() % 2 == 1 {
                let (w, span) = (*twiddles.add(1), self.size / 2);
                for k in 0..span {
                    let u = reduce(V::load(source(k)), q, inverse);
                    let v = reduce(V::load(source(k + span)), q, inverse);
                    let (a, b) = butterfly(u, v, w, q);
                    if self.size == 2 {
                        reduce(a, q, inverse).store_i32(out);
                        reduce(b, q, inverse).store_i32(out.add(stride));
                    } else {
                        a.store(at(k));
                        b.store(at(k + span));
                    }
                }
                (2, span / 2)
            } else {
                // The first two levels read the coefficients, which are still modulo p.
                let quarter = self.size / 4;
                let (both, left, right) = (*twiddles.add(1), *twiddles.add(2), *twiddles.add(3));
                for k in 0..quarter {
                    let a = reduce(V::load(source(k)), q, inverse);
                    let b = reduce(V::load(source(k + quarter)), q, inverse);
                    let c = reduce(V::load(source(k + 2 * quarter)), q, inverse);
                    let d = reduce(V::load(source(k + 3 * quarter)), q, inverse);
                    let (a, b, c, d) = two_levels(a, b, c, d, [both, left, right], q);
                    a.store(at(k));
                    b.store(at(k + quarter));
                    c.store(at(k + 2 * quarter));
                    d.store(at(k + 3 * quarter));
                }
                (4, self.size / 8)
            };
            while groups < self.size / 4 {
                let quarter = span / 2;
                for g in 0..groups {
                    let both = *twiddles.add(groups + g);
                    let (left, right) = (*twiddles.add(2 * (groups + g)), *twiddles.add(2 * (groups + g) + 1));
                    for k in 4 * g * quarter..(4 * g + 1) * quarter {
                        let (a, b) = (V::load(at(k)), V::load(at(k + quarter)));
                        let (c, d) = (V::load(at(k + 2 * quarter)), V::load(at(k + 3 * quarter)));
                        let (a, b, c, d) = two_levels(a, b, c, d, [both, left, right], q);
                        a.store(at(k));
                        b.store(at(k + quarter));
                        c.store(at(k + 2 * quarter));
                        d.store(at(k + 3 * quarter));
                    }
                }
                (groups, span) = (groups * 4, span / 4);
            }
            if self.size == 4 {
                for k in 0..4 {
                    reduce(V::load(at(k)), q, inverse).store_i32(out.add(k * stride));
                }
            }
            if groups == self.size / 4 && self.size > 4 {
                // The last two levels reduce and write.
                for g in 0..groups {
                    let both = *twiddles.add(groups + g);
                    let (left, right) = (*twiddles.add(2 * (groups + g)), *twiddles.add(2 * (groups + g) + 1));
                    let k = 4 * g;
                    let (a, b, c, d) = (V::load(at(k)), V::load(at(k + 1)), V::load(at(k + 2)), V::load(at(k + 3)));
                    let (a, b, c, d) = two_levels(a, b, c, d, [both, left, right], q);
                    reduce(a, q, inverse).store_i32(out.add(k * stride));
                    reduce(b, q, inverse).store_i32(out.add((k + 1) * stride));
                    reduce(c, q, inverse).store_i32(out.add((k + 2) * stride));
                    reduce(d, q, inverse).store_i32(out.add((k + 3) * stride));
                }
            }
        }
    }
}

/// Two levels of a forward transform on four values a quarter apart.
///
/// # Safety
/// The instructions of `V` are enabled.
#[inline(always)]
unsafe fn two_levels<V: Vector>(a: V, b: V, c: V, d: V, w: [Twiddle; 3], q: V) -> (V, V, V, V) {
    // SAFETY: the caller's promise.
    unsafe {
        let (a, c) = butterfly(a, c, w[0], q);
        let (b, d) = butterfly(b, d, w[0], q);
        let (a, b) = butterfly(a, b, w[1], q);
        let (c, d) = butterfly(c, d, w[2], q);
        (a, b, c, d)
    }
}

/// x * w mod p, at most p / 2 + 2^-9 p in size, for |x| < 2^44.
///
/// The product is split into its rounded value and the exact rest; the quotient is right to within one, so what is left
/// after subtracting it is a whole number of 42 bits and every step is exact.
///
/// # Safety
/// The instructions of `V` are enabled.
#[inline(always)]
unsafe fn times_p<V: Vector>(x: V, w: Twiddle, p: V) -> V {
    // SAFETY: the caller's promise.
    unsafe {
        let (value, rounder) = (V::splat(w.value), V::splat(ROUNDER));
        let quotient = x.mul_add(V::splat(w.quotient), rounder).sub(rounder);
        let high = x.mul(value);
        let low = x.fused_mul_sub(value, high);
        quotient.fused_sub_from(p, high).add(low)
    }
}

/// (a + b w, a - b w) modulo q, the product reduced and the sum not.
///
/// # Safety
/// The instructions of `V` are enabled.
#[inline(always)]
unsafe fn butterfly<V: Vector>(a: V, b: V, w: Twiddle, q: V) -> (V, V) {
    // SAFETY: the caller's promise.
    unsafe {
        let rounder = V::splat(ROUNDER);
        let quotient = b.mul_add(V::splat(w.quotient), rounder).sub(rounder);
        let sum = quotient.mul_sub_from(q, b.mul_add(V::splat(w.value), a));
        (sum, a.twice_less(sum))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SecretRng;

    #[test]
    fn every_variant_agrees_with_the_plain_transforms() {
        let mut rng = SecretRng::from_insecure_fixed_seed(3);
        const GROUPS: usize = 2;
        for size in [2usize, 4, 8, 32, 64, 128, 256, 1024, 8192] {
            let transforms = Transforms::new(size);
            let slots: Vec<f64> = (0..GROUPS * size * SIDE)
                .map(|k| if k % 3 == 0 { f64::from(i32::MIN + 1) } else { f64::from(rng.next_u64() as i32) })
                .collect();
            let strides = Strides { prime: size * 24, point: 24 };
            let mut want = vec![vec![0u32; size]; LEVELS * SIDE * GROUPS];
            for side in 0..SIDE * GROUPS {
                let slot = |k: usize| slots[(side / SIDE * size + k) * SIDE + side % SIDE];
                let mut plain: Vec<u64> = (0..size).map(|k| field::from_signed(slot(k) as i64)).collect();
                ntt::inverse_p(size, &mut plain);
                for prime in 0..LEVELS {
                    let row = &mut want[prime * SIDE * GROUPS + side];
                    crate::rlwe::reduce_plain(prime, &plain, row);
                    ntt::forward(prime, size, row);
                }
            }
            for isa in Isa::available() {
                let (mut work, mut out) = (vec![0.0; size * SIDE], vec![0i32; LEVELS * size * 24]);
                transforms.run(isa, &mut slots.clone(), &mut work, &mut out, strides);
                for prime in 0..LEVELS {
                    let q = i64::from(PRIMES[prime]);
                    for a in 0..size {
                        for side in 0..SIDE * GROUPS {
                            let got = out[prime * strides.prime + a * strides.point + side];
                            assert!(i64::from(got).abs() <= q / 2 + 2);
                            let got = i64::from(got).rem_euclid(q) as u32;
                            assert_eq!(got, want[prime * SIDE * GROUPS + side][a], "{isa:?} size {size} prime {prime}");
                        }
                    }
                }
            }
        }
    }
}
