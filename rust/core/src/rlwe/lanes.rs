//! A handful of doubles worked on at once: what the transforms need of AVX-512 and of AVX2, behind one trait.
//!
//! Every number is an integer held exactly in a double, so the order of operations cannot change a result.

use std::arch::x86_64::*;

/// A register of doubles.
///
/// # Safety
/// Every function may be called only where the processor has the register's instructions, and pointers must be
/// good for a register's worth of elements.
pub(super) trait Lanes: Copy {
    /// Doubles in a register.
    const WIDTH: usize;
    /// The register of one value.
    unsafe fn splat(x: f64) -> Self;
    /// Reads doubles.
    unsafe fn load(from: *const f64) -> Self;
    /// Writes doubles.
    unsafe fn store(self, to: *mut f64);
    /// Reads residues below 2^31.
    unsafe fn load_u32(from: *const u32) -> Self;
    /// Writes non-negative integers below 2^31.
    unsafe fn store_u32(self, to: *mut u32);
    /// Reads residues below 2^52.
    unsafe fn load_u64(from: *const u64) -> Self;
    /// Writes non-negative integers below 2^52.
    unsafe fn store_u64(self, to: *mut u64);
    /// self + b.
    unsafe fn add(self, b: Self) -> Self;
    /// self - b.
    unsafe fn sub(self, b: Self) -> Self;
    /// self * b, rounded.
    unsafe fn mul(self, b: Self) -> Self;
    /// self * b + c, rounded once.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// self * b - c, rounded once.
    unsafe fn mul_sub(self, b: Self, c: Self) -> Self;
    /// c - self * b, rounded once.
    unsafe fn negative_mul_add(self, b: Self, c: Self) -> Self;
    /// 2 self - b, rounded once.
    #[inline(always)]
    unsafe fn twice_less(self, b: Self) -> Self {
        // SAFETY: as for the caller.
        unsafe { self.mul_sub(Self::splat(2.0), b) }
    }
    /// self + b where self is negative.
    unsafe fn wrap(self, b: Self) -> Self;
    /// The last forward stages, whose groups lie within a register, on two neighbouring registers. `table` and `node`
    /// find the twiddles.
    unsafe fn finish<B: Butterfly<Self>>(pair: [Self; 2], table: *const f64, node: usize, b: B) -> [Self; 2];
    /// The first inverse stages.
    unsafe fn begin<B: Butterfly<Self>>(pair: [Self; 2], table: *const f64, node: usize, b: B) -> [Self; 2];
}

/// The arithmetic of one modulus on registers. A trait and not closures: only functions that are always inlined end up
/// inside the kernels, where the instructions are allowed.
///
/// # Safety
/// As for [`Lanes`].
pub(super) trait Butterfly<V>: Copy {
    /// (x + y w, x - y w).
    unsafe fn forward(self, x: V, y: V, w: V) -> (V, V);
    /// (x + y, (x - y) w).
    unsafe fn inverse(self, x: V, y: V, w: V) -> (V, V);
    /// x, reduced.
    unsafe fn reduce(self, x: V) -> V;
}

/// 2^52: added to a small non-negative integer it shows the integer in the low bits.
const HIGH: f64 = 4503599627370496.0;

// SAFETY of every block below: the trait's contract, which the callers of the kernels establish once by detection.
macro_rules! contract {
    ($e:expr) => {{
        // SAFETY: the caller keeps the trait's contract: the instructions exist, the pointers are good.
        unsafe { $e }
    }};
}

impl Lanes for __m512d {
    const WIDTH: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f64) -> Self {
        contract!(_mm512_set1_pd(x))
    }
    #[inline(always)]
    unsafe fn load(from: *const f64) -> Self {
        contract!(_mm512_loadu_pd(from))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f64) {
        contract!(_mm512_storeu_pd(to, self))
    }
    #[inline(always)]
    unsafe fn load_u32(from: *const u32) -> Self {
        contract!(_mm512_cvtepi32_pd(_mm256_loadu_si256(from.cast())))
    }
    #[inline(always)]
    unsafe fn store_u32(self, to: *mut u32) {
        contract!(_mm256_storeu_si256(to.cast(), _mm512_cvtpd_epi32(self)))
    }
    #[inline(always)]
    unsafe fn load_u64(from: *const u64) -> Self {
        let high = contract!(_mm512_set1_pd(HIGH));
        contract!(_mm512_sub_pd(
            _mm512_castsi512_pd(_mm512_or_si512(_mm512_loadu_si512(from.cast()), _mm512_castpd_si512(high))),
            high
        ))
    }
    #[inline(always)]
    unsafe fn store_u64(self, to: *mut u64) {
        let high = contract!(_mm512_set1_pd(HIGH));
        contract!(_mm512_storeu_si512(
            to.cast(),
            _mm512_xor_si512(_mm512_castpd_si512(_mm512_add_pd(self, high)), _mm512_castpd_si512(high))
        ))
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        contract!(_mm512_add_pd(self, b))
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        contract!(_mm512_sub_pd(self, b))
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        contract!(_mm512_mul_pd(self, b))
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        contract!(_mm512_fmadd_pd(self, b, c))
    }
    #[inline(always)]
    unsafe fn mul_sub(self, b: Self, c: Self) -> Self {
        contract!(_mm512_fmsub_pd(self, b, c))
    }
    #[inline(always)]
    unsafe fn negative_mul_add(self, b: Self, c: Self) -> Self {
        contract!(_mm512_fnmadd_pd(self, b, c))
    }
    #[inline(always)]
    unsafe fn wrap(self, b: Self) -> Self {
        contract!(_mm512_mask_add_pd(self, _mm512_cmp_pd_mask::<_CMP_LT_OQ>(self, _mm512_setzero_pd()), self, b))
    }

    // Elements of the two registers are named 0 to f; a register is written as its four pairs.
    #[inline(always)]
    unsafe fn finish<B: Butterfly<Self>>([a, b]: [Self; 2], table: *const f64, node: usize, m: B) -> [Self; 2] {
        // Groups of 8: 01 23 89 ab against 45 67 cd ef.
        let (x, y) = contract!((_mm512_shuffle_f64x2::<0x44>(a, b), _mm512_shuffle_f64x2::<0xee>(a, b)));
        let (x, y) = contract!(m.forward(x, y, twiddles_2(table.add(node))));
        // Groups of 4: 01 89 45 cd against 23 ab 67 ef.
        let (x, y) = contract!((_mm512_shuffle_f64x2::<0x88>(x, y), _mm512_shuffle_f64x2::<0xdd>(x, y)));
        let (x, y) = contract!(m.forward(x, y, twiddles_4(table.add(2 * node))));
        // Pairs: 02 8a 46 ce against 13 9b 57 df.
        let (x, y) = contract!((_mm512_unpacklo_pd(x, y), _mm512_unpackhi_pd(x, y)));
        let (x, y) = contract!(m.forward(x, y, twiddles_8(table.add(4 * node))));
        let (x, y) = contract!((_mm512_unpacklo_pd(x, y), _mm512_unpackhi_pd(x, y)));
        contract!([
            _mm512_permutex2var_pd(x, _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), y),
            _mm512_permutex2var_pd(x, _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15), y),
        ])
    }

    #[inline(always)]
    unsafe fn begin<B: Butterfly<Self>>([a, b]: [Self; 2], table: *const f64, node: usize, m: B) -> [Self; 2] {
        let x = contract!(_mm512_permutex2var_pd(a, _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), b));
        let y = contract!(_mm512_permutex2var_pd(a, _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15), b));
        let (x, y) = contract!((_mm512_unpacklo_pd(x, y), _mm512_unpackhi_pd(x, y)));
        let (x, y) = contract!(m.inverse(x, y, twiddles_8(table.add(4 * node))));
        let (x, y) = contract!((_mm512_unpacklo_pd(x, y), _mm512_unpackhi_pd(x, y)));
        let (x, y) = contract!(m.inverse(x, y, twiddles_4(table.add(2 * node))));
        let x2 = contract!(_mm512_permutex2var_pd(x, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), y));
        let y2 = contract!(_mm512_permutex2var_pd(x, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), y));
        let (x, y) = contract!(m.inverse(x2, y2, twiddles_2(table.add(node))));
        let x = contract!(m.reduce(x));
        contract!([_mm512_shuffle_f64x2::<0x44>(x, y), _mm512_shuffle_f64x2::<0xee>(x, y)])
    }
}

/// Two twiddles, four times each.
#[inline(always)]
unsafe fn twiddles_2(from: *const f64) -> __m512d {
    contract!(_mm512_permutexvar_pd(
        _mm512_setr_epi64(0, 0, 0, 0, 1, 1, 1, 1),
        _mm512_castpd128_pd512(_mm_loadu_pd(from))
    ))
}

/// Four twiddles, twice each, in the order 0 2 1 3.
#[inline(always)]
unsafe fn twiddles_4(from: *const f64) -> __m512d {
    contract!(_mm512_permutexvar_pd(
        _mm512_setr_epi64(0, 0, 2, 2, 1, 1, 3, 3),
        _mm512_castpd256_pd512(_mm256_loadu_pd(from))
    ))
}

/// Eight twiddles, in the order 0 1 4 5 2 3 6 7.
#[inline(always)]
unsafe fn twiddles_8(from: *const f64) -> __m512d {
    let w = contract!(_mm512_loadu_pd(from));
    contract!(_mm512_shuffle_f64x2::<0xd8>(w, w))
}

impl Lanes for __m256d {
    const WIDTH: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f64) -> Self {
        contract!(_mm256_set1_pd(x))
    }
    #[inline(always)]
    unsafe fn load(from: *const f64) -> Self {
        contract!(_mm256_loadu_pd(from))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f64) {
        contract!(_mm256_storeu_pd(to, self))
    }
    #[inline(always)]
    unsafe fn load_u32(from: *const u32) -> Self {
        contract!(_mm256_cvtepi32_pd(_mm_loadu_si128(from.cast())))
    }
    #[inline(always)]
    unsafe fn store_u32(self, to: *mut u32) {
        contract!(_mm_storeu_si128(to.cast(), _mm256_cvtpd_epi32(self)))
    }
    #[inline(always)]
    unsafe fn load_u64(from: *const u64) -> Self {
        let high = contract!(_mm256_set1_pd(HIGH));
        contract!(_mm256_sub_pd(_mm256_or_pd(_mm256_loadu_pd(from.cast()), high), high))
    }
    #[inline(always)]
    unsafe fn store_u64(self, to: *mut u64) {
        let high = contract!(_mm256_set1_pd(HIGH));
        contract!(_mm256_storeu_pd(to.cast(), _mm256_xor_pd(_mm256_add_pd(self, high), high)))
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        contract!(_mm256_add_pd(self, b))
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        contract!(_mm256_sub_pd(self, b))
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        contract!(_mm256_mul_pd(self, b))
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        contract!(_mm256_fmadd_pd(self, b, c))
    }
    #[inline(always)]
    unsafe fn mul_sub(self, b: Self, c: Self) -> Self {
        contract!(_mm256_fmsub_pd(self, b, c))
    }
    #[inline(always)]
    unsafe fn negative_mul_add(self, b: Self, c: Self) -> Self {
        contract!(_mm256_fnmadd_pd(self, b, c))
    }
    #[inline(always)]
    unsafe fn wrap(self, b: Self) -> Self {
        contract!(_mm256_add_pd(self, _mm256_and_pd(_mm256_cmp_pd::<_CMP_LT_OQ>(self, _mm256_setzero_pd()), b)))
    }

    #[inline(always)]
    unsafe fn finish<B: Butterfly<Self>>([a, b]: [Self; 2], table: *const f64, node: usize, m: B) -> [Self; 2] {
        let (x, y) = contract!((_mm256_permute2f128_pd::<0x20>(a, b), _mm256_permute2f128_pd::<0x31>(a, b)));
        let (x, y) = contract!(m.forward(x, y, twiddles_2_narrow(table.add(node))));
        let (x, y) = contract!((_mm256_unpacklo_pd(x, y), _mm256_unpackhi_pd(x, y)));
        let (x, y) = contract!(m.forward(x, y, _mm256_loadu_pd(table.add(2 * node))));
        let (x, y) = contract!((_mm256_unpacklo_pd(x, y), _mm256_unpackhi_pd(x, y)));
        contract!([_mm256_permute2f128_pd::<0x20>(x, y), _mm256_permute2f128_pd::<0x31>(x, y)])
    }

    #[inline(always)]
    unsafe fn begin<B: Butterfly<Self>>([a, b]: [Self; 2], table: *const f64, node: usize, m: B) -> [Self; 2] {
        let (x, y) = contract!((_mm256_permute2f128_pd::<0x20>(a, b), _mm256_permute2f128_pd::<0x31>(a, b)));
        let (x, y) = contract!((_mm256_unpacklo_pd(x, y), _mm256_unpackhi_pd(x, y)));
        let (x, y) = contract!(m.inverse(x, y, _mm256_loadu_pd(table.add(2 * node))));
        let (x, y) = contract!((_mm256_unpacklo_pd(x, y), _mm256_unpackhi_pd(x, y)));
        let (x, y) = contract!(m.inverse(x, y, twiddles_2_narrow(table.add(node))));
        let x = contract!(m.reduce(x));
        contract!([_mm256_permute2f128_pd::<0x20>(x, y), _mm256_permute2f128_pd::<0x31>(x, y)])
    }
}

/// Two twiddles, twice each.
#[inline(always)]
unsafe fn twiddles_2_narrow(from: *const f64) -> __m256d {
    contract!(_mm256_permute4x64_pd::<0x50>(_mm256_castpd128_pd256(_mm_loadu_pd(from))))
}
