//! Eight doubles at a time: one arithmetic written once, on AVX-512, on AVX2 with FMA, and on plain Rust.
//!
//! Everything here is integer arithmetic carried in doubles. A product of two 25-bit residues is exact, so a fused and
//! an unfused multiply-add give the same integer; only the 41-bit products of the plaintext field need the fused form.

use crate::pages;

/// Which instructions the loops use. The fastest is chosen at run time; tests ask for each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Isa {
    /// Plain Rust, on every machine.
    Portable,
    /// AVX2 and FMA: two registers of four doubles.
    Avx2,
    /// AVX-512 F: one register of eight doubles.
    Avx512,
}

impl Isa {
    /// The best that this machine has.
    pub fn best() -> Isa {
        *Isa::available().last().expect("plain Rust is always there")
    }

    /// All that this machine has, slowest first.
    pub fn available() -> Vec<Isa> {
        #[allow(unused_mut)]
        let mut all = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                all.push(Isa::Avx2);
                if is_x86_feature_detected!("avx512f") {
                    all.push(Isa::Avx512);
                }
            }
        }
        all
    }
}

/// Numbers that begin at a line of the cache, so that no register is read or written across two lines.
#[derive(Default)]
pub(super) struct Lines<T> {
    memory: Vec<T>,
    skip: usize,
    length: usize,
}

impl<T: Copy + Default> Lines<T> {
    const LINE: usize = 64;

    /// So many zeros.
    pub fn zeros(length: usize) -> Self {
        let spare = Self::LINE / size_of::<T>();
        let memory = pages::zeros::<T>(length + spare);
        // In theory an offset may be unknown; then nothing is lost but time.
        let skip = memory.as_ptr().align_offset(Self::LINE).min(spare);
        Self { memory, skip, length }
    }

    /// Makes room for so many numbers; what they are is not said.
    pub fn size(&mut self, length: usize) {
        let room = self.memory.len().saturating_sub(self.skip);
        if length <= room {
            self.length = length;
        } else {
            *self = Self::zeros(length);
        }
    }
}

impl<T> std::ops::Deref for Lines<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.memory[self.skip..self.skip + self.length]
    }
}

impl<T> std::ops::DerefMut for Lines<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.memory[self.skip..self.skip + self.length]
    }
}

/// Adding and subtracting this rounds a double of less than 2^51 to the nearest integer.
pub(super) const ROUNDER: f64 = 6_755_399_441_055_744.0;

/// Eight doubles.
///
/// # Safety
/// Every function may be called only where the instructions of the implementing type are enabled, that is, inside a
/// function with that `target_feature` that was reached through [`Isa`]. Pointers must hold eight values.
pub(super) trait Vector: Copy {
    unsafe fn load(from: *const f64) -> Self;
    unsafe fn store(self, to: *mut f64);
    /// Says that eight doubles will be read soon; any address will do.
    #[inline(always)]
    fn prefetch(_from: *const f64) {}
    /// Says that a line of integers will be read later; any address will do.
    #[inline(always)]
    fn prefetch_far(_from: *const i32) {}
    /// Eight 32-bit integers as doubles.
    unsafe fn load_i32(from: *const i32) -> Self;
    /// Doubles that hold integers of less than 2^31 as 32-bit integers.
    unsafe fn store_i32(self, to: *mut i32);
    unsafe fn splat(x: f64) -> Self;
    unsafe fn add(self, b: Self) -> Self;
    unsafe fn sub(self, b: Self) -> Self;
    unsafe fn mul(self, b: Self) -> Self;
    /// self * b + c where the product is exact or rounding does not matter; fused where that is fast.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// c - self * b, likewise.
    unsafe fn mul_sub_from(self, b: Self, c: Self) -> Self;
    /// Twice self less c, which is exact wherever the result fits.
    unsafe fn twice_less(self, c: Self) -> Self;
    /// self * b - c with one rounding.
    unsafe fn fused_mul_sub(self, b: Self, c: Self) -> Self;
    /// c - self * b with one rounding.
    unsafe fn fused_sub_from(self, b: Self, c: Self) -> Self;
    /// `self`, less `step` where `self > bound`, plus `step` where `self < -bound`.
    unsafe fn wrap_once(self, bound: Self, step: Self) -> Self;
}

/// The portable vector.
#[derive(Clone, Copy)]
pub(super) struct Plain([f64; 8]);

macro_rules! lanes {
    ($i:ident => $e:expr) => {
        Plain(std::array::from_fn(|$i| $e))
    };
}

// SAFETY (of the pointer reads and writes below): the trait asks the caller for pointers to eight values.
impl Vector for Plain {
    #[inline(always)]
    unsafe fn load(from: *const f64) -> Self {
        // SAFETY: eight readable doubles, by the trait's contract.
        lanes!(i => unsafe { *from.add(i) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f64) {
        // SAFETY: eight writable doubles, by the trait's contract.
        (0..8).for_each(|i| unsafe { *to.add(i) = self.0[i] });
    }
    #[inline(always)]
    unsafe fn load_i32(from: *const i32) -> Self {
        // SAFETY: eight readable integers, by the trait's contract.
        lanes!(i => f64::from(unsafe { *from.add(i) }))
    }
    #[inline(always)]
    unsafe fn store_i32(self, to: *mut i32) {
        // SAFETY: eight writable integers, by the trait's contract.
        (0..8).for_each(|i| unsafe { *to.add(i) = self.0[i] as i32 });
    }
    #[inline(always)]
    unsafe fn splat(x: f64) -> Self {
        Plain([x; 8])
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        lanes!(i => self.0[i] + b.0[i])
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        lanes!(i => self.0[i] - b.0[i])
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        lanes!(i => self.0[i] * b.0[i])
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        lanes!(i => self.0[i] * b.0[i] + c.0[i])
    }
    #[inline(always)]
    unsafe fn mul_sub_from(self, b: Self, c: Self) -> Self {
        lanes!(i => c.0[i] - self.0[i] * b.0[i])
    }
    #[inline(always)]
    unsafe fn twice_less(self, c: Self) -> Self {
        lanes!(i => 2.0 * self.0[i] - c.0[i])
    }
    #[inline(always)]
    unsafe fn fused_mul_sub(self, b: Self, c: Self) -> Self {
        lanes!(i => self.0[i].mul_add(b.0[i], -c.0[i]))
    }
    #[inline(always)]
    unsafe fn fused_sub_from(self, b: Self, c: Self) -> Self {
        lanes!(i => (-self.0[i]).mul_add(b.0[i], c.0[i]))
    }
    #[inline(always)]
    unsafe fn wrap_once(self, bound: Self, step: Self) -> Self {
        lanes!(i => {
            let x = self.0[i];
            let down = f64::from(u8::from(x > bound.0[i]));
            let up = f64::from(u8::from(x < -bound.0[i]));
            x + (up - down) * step.0[i]
        })
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Vector;
    use std::arch::x86_64::*;

    /// Two registers of four doubles.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2(__m256d, __m256d);

    // SAFETY (of every block below): the trait's contract says that AVX2 and FMA are enabled and pointers hold eight.
    impl Vector for Avx2 {
        #[inline(always)]
        fn prefetch(from: *const f64) {
            // SAFETY: a prefetch reads nothing and never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
        }
        #[inline(always)]
        fn prefetch_far(from: *const i32) {
            // SAFETY: a prefetch reads nothing and never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast()) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f64) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Avx2(_mm256_loadu_pd(from), _mm256_loadu_pd(from.add(4))) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f64) {
            // SAFETY: the trait's contract.
            unsafe {
                _mm256_storeu_pd(to, self.0);
                _mm256_storeu_pd(to.add(4), self.1);
            }
        }
        #[inline(always)]
        unsafe fn load_i32(from: *const i32) -> Self {
            // SAFETY: the trait's contract.
            unsafe {
                Avx2(
                    _mm256_cvtepi32_pd(_mm_loadu_si128(from.cast())),
                    _mm256_cvtepi32_pd(_mm_loadu_si128(from.add(4).cast())),
                )
            }
        }
        #[inline(always)]
        unsafe fn store_i32(self, to: *mut i32) {
            // SAFETY: the trait's contract.
            unsafe {
                _mm_storeu_si128(to.cast(), _mm256_cvtpd_epi32(self.0));
                _mm_storeu_si128(to.add(4).cast(), _mm256_cvtpd_epi32(self.1));
            }
        }
        #[inline(always)]
        unsafe fn splat(x: f64) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Avx2(_mm256_set1_pd(x), _mm256_set1_pd(x)) }
        }
        #[inline(always)]
        unsafe fn add(self, b: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Avx2(_mm256_add_pd(self.0, b.0), _mm256_add_pd(self.1, b.1)) }
        }
        #[inline(always)]
        unsafe fn sub(self, b: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Avx2(_mm256_sub_pd(self.0, b.0), _mm256_sub_pd(self.1, b.1)) }
        }
        #[inline(always)]
        unsafe fn mul(self, b: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Avx2(_mm256_mul_pd(self.0, b.0), _mm256_mul_pd(self.1, b.1)) }
        }
        #[inline(always)]
        unsafe fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Avx2(_mm256_fmadd_pd(self.0, b.0, c.0), _mm256_fmadd_pd(self.1, b.1, c.1)) }
        }
        #[inline(always)]
        unsafe fn mul_sub_from(self, b: Self, c: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Avx2(_mm256_fnmadd_pd(self.0, b.0, c.0), _mm256_fnmadd_pd(self.1, b.1, c.1)) }
        }
        #[inline(always)]
        unsafe fn twice_less(self, c: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { self.fused_mul_sub(Self::splat(2.0), c) }
        }
        #[inline(always)]
        unsafe fn fused_mul_sub(self, b: Self, c: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Avx2(_mm256_fmsub_pd(self.0, b.0, c.0), _mm256_fmsub_pd(self.1, b.1, c.1)) }
        }
        #[inline(always)]
        unsafe fn fused_sub_from(self, b: Self, c: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { self.mul_sub_from(b, c) }
        }
        #[inline(always)]
        unsafe fn wrap_once(self, bound: Self, step: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe {
                let one = |x: __m256d, bound: __m256d, step: __m256d| {
                    let down = _mm256_and_pd(_mm256_cmp_pd::<_CMP_GT_OQ>(x, bound), step);
                    let low = _mm256_sub_pd(_mm256_setzero_pd(), bound);
                    let up = _mm256_and_pd(_mm256_cmp_pd::<_CMP_LT_OQ>(x, low), step);
                    _mm256_add_pd(_mm256_sub_pd(x, down), up)
                };
                Avx2(one(self.0, bound.0, step.0), one(self.1, bound.1, step.1))
            }
        }
    }

    /// One register of eight doubles.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx512(__m512d);

    // SAFETY (of every block below): the trait's contract says that AVX-512 F is enabled and pointers hold eight.
    impl Vector for Avx512 {
        #[inline(always)]
        fn prefetch(from: *const f64) {
            // SAFETY: a prefetch reads nothing and never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
        }
        #[inline(always)]
        fn prefetch_far(from: *const i32) {
            // SAFETY: a prefetch reads nothing and never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast()) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f64) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Avx512(_mm512_loadu_pd(from)) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f64) {
            // SAFETY: the trait's contract.
            unsafe { _mm512_storeu_pd(to, self.0) }
        }
        #[inline(always)]
        unsafe fn load_i32(from: *const i32) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Avx512(_mm512_cvtepi32_pd(_mm256_loadu_si256(from.cast()))) }
        }
        #[inline(always)]
        unsafe fn store_i32(self, to: *mut i32) {
            // SAFETY: the trait's contract.
            unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtpd_epi32(self.0)) }
        }
        #[inline(always)]
        unsafe fn splat(x: f64) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Avx512(_mm512_set1_pd(x)) }
        }
        #[inline(always)]
        unsafe fn add(self, b: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Avx512(_mm512_add_pd(self.0, b.0)) }
        }
        #[inline(always)]
        unsafe fn sub(self, b: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Avx512(_mm512_sub_pd(self.0, b.0)) }
        }
        #[inline(always)]
        unsafe fn mul(self, b: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Avx512(_mm512_mul_pd(self.0, b.0)) }
        }
        #[inline(always)]
        unsafe fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Avx512(_mm512_fmadd_pd(self.0, b.0, c.0)) }
        }
        #[inline(always)]
        unsafe fn mul_sub_from(self, b: Self, c: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Avx512(_mm512_fnmadd_pd(self.0, b.0, c.0)) }
        }
        #[inline(always)]
        unsafe fn twice_less(self, c: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { self.fused_mul_sub(Self::splat(2.0), c) }
        }
        #[inline(always)]
        unsafe fn fused_mul_sub(self, b: Self, c: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Avx512(_mm512_fmsub_pd(self.0, b.0, c.0)) }
        }
        #[inline(always)]
        unsafe fn fused_sub_from(self, b: Self, c: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { self.mul_sub_from(b, c) }
        }
        #[inline(always)]
        unsafe fn wrap_once(self, bound: Self, step: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe {
                let down = _mm512_cmp_pd_mask::<_CMP_GT_OQ>(self.0, bound.0);
                let up = _mm512_cmp_pd_mask::<_CMP_LT_OQ>(self.0, _mm512_sub_pd(_mm512_setzero_pd(), bound.0));
                let x = _mm512_mask_sub_pd(self.0, down, self.0, step.0);
                Avx512(_mm512_mask_add_pd(x, up, x, step.0))
            }
        }
    }
}
