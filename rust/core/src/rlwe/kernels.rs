//! The transforms on vector registers: residues as exact integers in doubles, products reduced by a fused multiply-add.
//!
//! A product modulo a 25-bit prime is exact in a double (at most 53 bits), so h = a w, c = round(h / q), h - c q is
//! the centred residue, exactly. With w / q at hand a whole butterfly is five instructions. Modulo p (41 bits) the low
//! part of the product, a w - h, is added after.
//! Forward, a value grows by half the modulus in each of at most 13 stages and needs no reduction until it is stored:
//! 2^27.9 times a twiddle of 2^24 stays below 2^53. Inverse, the sum path doubles in each stage, so a pass reduces it.
//!
//! Two stages make one pass (four values meet three twiddles), the last ones work within registers, and blocks of
//! 16 KiB are finished one by one, so a large transform goes through the first-level cache.

use super::lanes::{Butterfly, Lanes};
use super::params::N;
use std::arch::x86_64::{__m256d, __m512d};
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Blocks of this many doubles stay in the first-level cache.
const BLOCK: usize = 2048;

/// 1.5 * 2^52: added and subtracted, it rounds to the nearest integer, negative ones too.
const ROUND: f64 = 6755399441055744.0;

/// Where the passes of one transform keep their doubles: whole lines of the cache, or every access would touch two.
#[repr(align(64))]
struct Room(#[expect(dead_code, reason = "only its size and place matter")] [f64; N]);

/// A modulus and its twiddles, centred, as doubles.
pub(super) struct Tables {
    /// The modulus.
    pub(super) modulus: f64,
    /// psi^brv(i), and the same divided by the modulus.
    pub(super) forward: [Vec<f64>; 2],
    /// psi^-brv(i), likewise.
    pub(super) inverse: [Vec<f64>; 2],
    /// 1 / 2^k modulo the modulus.
    pub(super) halves: Vec<f64>,
}

/// How residues lie in memory.
pub(super) trait Residue: Copy {
    /// True where a product does not fit a double.
    const WIDE: bool;
    /// Reads a register.
    unsafe fn load<V: Lanes>(from: *const Self) -> V;
    /// Writes a register of canonical residues.
    unsafe fn store<V: Lanes>(v: V, to: *mut Self);
}

impl Residue for u32 {
    const WIDE: bool = false;
    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const Self) -> V {
        // SAFETY: as for the caller.
        unsafe { V::load_u32(from) }
    }
    #[inline(always)]
    unsafe fn store<V: Lanes>(v: V, to: *mut Self) {
        // SAFETY: as for the caller.
        unsafe { v.store_u32(to) }
    }
}

impl Residue for u64 {
    const WIDE: bool = true;
    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const Self) -> V {
        // SAFETY: as for the caller.
        unsafe { V::load_u64(from) }
    }
    #[inline(always)]
    unsafe fn store<V: Lanes>(v: V, to: *mut Self) {
        // SAFETY: as for the caller.
        unsafe { v.store_u64(to) }
    }
}

/// One twiddle in all lanes, and the same divided by the modulus.
#[derive(Clone, Copy)]
struct Twiddle<V> {
    value: V,
    quotient: V,
}

/// Twiddle `node` of a table.
#[inline(always)]
unsafe fn twiddle<V: Lanes>(table: &[Vec<f64>; 2], node: usize) -> Twiddle<V> {
    // SAFETY: as for the caller.
    unsafe { Twiddle { value: V::splat(table[0][node]), quotient: V::splat(table[1][node]) } }
}

/// The modulus in registers.
#[derive(Clone, Copy)]
struct Modulus<V, T> {
    q: V,
    /// (q - 1) / 2.
    half: V,
    reciprocal: V,
    round: V,
    residue: PhantomData<T>,
}

impl<V: Lanes, T: Residue> Modulus<V, T> {
    #[inline(always)]
    unsafe fn new(q: f64) -> Self {
        // SAFETY: as for the caller.
        unsafe {
            Self {
                q: V::splat(q),
                half: V::splat((q - 1.0) / 2.0),
                reciprocal: V::splat(1.0 / q),
                round: V::splat(ROUND),
                residue: PhantomData,
            }
        }
    }

    /// The canonical residue of an integer of at most 8 q: less (q - 1) / 2, its quotient is at least 1 / 2q away from a
    /// half, so rounding finds the floor.
    #[inline(always)]
    unsafe fn canonical(self, a: V) -> V {
        // SAFETY: as for the caller.
        unsafe { a.sub(self.half).mul_add(self.reciprocal, self.round).sub(self.round).negative_mul_add(self.q, a) }
    }

    /// (x + y w, x - y w) for a twiddle whose quotient is known; x is below 2^28 modulo a prime.
    #[inline(always)]
    unsafe fn forward_by(self, x: V, y: V, w: Twiddle<V>) -> (V, V) {
        // SAFETY: as for the caller.
        unsafe {
            let quotient = y.mul_add(w.quotient, self.round).sub(self.round);
            if T::WIDE {
                let high = y.mul(w.value);
                let t = quotient.negative_mul_add(self.q, high).add(y.mul_sub(w.value, high));
                return (x.add(t), x.sub(t));
            }
            let sum = quotient.negative_mul_add(self.q, y.mul_add(w.value, x));
            (sum, x.twice_less(sum))
        }
    }

    /// (x + y, (x - y) w) for a twiddle whose quotient is known.
    #[inline(always)]
    unsafe fn inverse_by(self, x: V, y: V, w: Twiddle<V>) -> (V, V) {
        // SAFETY: as for the caller.
        unsafe {
            let d = x.sub(y);
            let quotient = d.mul_add(w.quotient, self.round).sub(self.round);
            let high = d.mul(w.value);
            let rest = quotient.negative_mul_add(self.q, high);
            (x.add(y), if T::WIDE { rest.add(d.mul_sub(w.value, high)) } else { rest })
        }
    }

    /// a w modulo q, at most q (1/2 + 2^-7) in size.
    #[inline(always)]
    unsafe fn mul(self, a: V, w: V) -> V {
        // SAFETY: as for the caller.
        unsafe {
            let high = a.mul(w);
            let quotient = high.mul_add(self.reciprocal, self.round).sub(self.round);
            let rest = quotient.negative_mul_add(self.q, high);
            if T::WIDE { rest.add(a.mul_sub(w, high)) } else { rest }
        }
    }
}

impl<V: Lanes, T: Residue> Butterfly<V> for Modulus<V, T> {
    #[inline(always)]
    unsafe fn forward(self, x: V, y: V, w: V) -> (V, V) {
        // SAFETY: as for the caller.
        unsafe {
            let t = self.mul(y, w);
            (x.add(t), x.sub(t))
        }
    }

    #[inline(always)]
    unsafe fn inverse(self, x: V, y: V, w: V) -> (V, V) {
        // SAFETY: as for the caller.
        unsafe { (x.add(y), self.mul(x.sub(y), w)) }
    }

    /// At most q / 2 (and a rounding) in size.
    #[inline(always)]
    unsafe fn reduce(self, a: V) -> V {
        // SAFETY: as for the caller.
        unsafe { a.mul_add(self.reciprocal, self.round).sub(self.round).negative_mul_add(self.q, a) }
    }
}

/// Where a pass reads: the residues themselves in the first, the scratch after.
trait Source<V: Lanes>: Copy {
    unsafe fn get(self, at: usize) -> V;
}

/// Where a pass writes: the scratch, and the residues, scaled, in the last inverse one.
trait Sink<V: Lanes>: Copy {
    unsafe fn put(self, v: V, at: usize);
}

#[derive(Clone, Copy)]
struct Scratch(*mut f64);
#[derive(Clone, Copy)]
struct Residues<T>(*const T);
#[derive(Clone, Copy)]
struct Scaled<V, T> {
    m: Modulus<V, T>,
    scale: V,
    to: *mut T,
}

impl<V: Lanes> Sink<V> for Scratch {
    #[inline(always)]
    unsafe fn put(self, v: V, at: usize) {
        // SAFETY: as for the caller.
        unsafe { v.store(self.0.add(at)) }
    }
}

impl<V: Lanes, T: Residue> Sink<V> for Scaled<V, T> {
    #[inline(always)]
    unsafe fn put(self, v: V, at: usize) {
        // SAFETY: as for the caller.
        unsafe { T::store(self.m.mul(v, self.scale).wrap(self.m.q), self.to.add(at)) }
    }
}

impl<V: Lanes> Source<V> for Scratch {
    #[inline(always)]
    unsafe fn get(self, at: usize) -> V {
        // SAFETY: as for the caller.
        unsafe { V::load(self.0.add(at)) }
    }
}

impl<V: Lanes, T: Residue> Source<V> for Residues<T> {
    #[inline(always)]
    unsafe fn get(self, at: usize) -> V {
        // SAFETY: as for the caller.
        unsafe { T::load(self.0.add(at)) }
    }
}

#[inline(always)]
unsafe fn forward_2<V: Lanes, T: Residue>(
    m: Modulus<V, T>,
    table: &[Vec<f64>; 2],
    from: impl Source<V>,
    to: *mut f64,
    n: usize,
) {
    // SAFETY: as for the caller; n is a multiple of twice the width.
    unsafe {
        let (half, w) = (n / 2, twiddle(table, 1));
        for k in (0..half).step_by(V::WIDTH) {
            let (x, y) = m.forward_by(from.get(k), from.get(k + half), w);
            x.store(to.add(k));
            y.store(to.add(k + half));
        }
    }
}

#[inline(always)]
unsafe fn forward_4<V: Lanes, T: Residue>(
    m: Modulus<V, T>,
    table: &[Vec<f64>; 2],
    node: usize,
    from: impl Source<V>,
    to: *mut f64,
    n: usize,
) {
    // SAFETY: as for the caller; n is a multiple of four times the width.
    unsafe {
        let quarter = n / 4;
        let (w, u, v) = (twiddle(table, node), twiddle(table, 2 * node), twiddle(table, 2 * node + 1));
        for k in (0..quarter).step_by(V::WIDTH) {
            let (a, c) = m.forward_by(from.get(k), from.get(k + 2 * quarter), w);
            let (b, d) = m.forward_by(from.get(k + quarter), from.get(k + 3 * quarter), w);
            let (a, b) = m.forward_by(a, b, u);
            let (c, d) = m.forward_by(c, d, v);
            a.store(to.add(k));
            b.store(to.add(k + quarter));
            c.store(to.add(k + 2 * quarter));
            d.store(to.add(k + 3 * quarter));
        }
    }
}

/// All stages below `node` on `n` doubles, to canonical residues; n is at most a block.
#[inline(always)]
unsafe fn forward_block<V: Lanes, T: Residue>(
    m: Modulus<V, T>,
    table: &[Vec<f64>; 2],
    mut groups: usize,
    node: usize,
    scratch: *mut f64,
    out: *mut T,
    n: usize,
) {
    // SAFETY: as for the caller.
    unsafe {
        while n / groups > V::WIDTH {
            let length = n / groups;
            for g in 0..groups {
                let at = scratch.add(g * length);
                forward_4::<V, T>(m, table, node * groups + g, Scratch(at), at, length);
            }
            groups *= 4;
        }
        for g in (0..groups).step_by(2) {
            let at = g * V::WIDTH;
            let pair = [V::load(scratch.add(at)), V::load(scratch.add(at + V::WIDTH))];
            let pair = V::finish(pair, table[0].as_ptr(), node * groups + g, m);
            T::store(m.canonical(pair[0]), out.add(at));
            T::store(m.canonical(pair[1]), out.add(at + V::WIDTH));
        }
    }
}

/// All stages below `node`, whose `n` doubles may be too many for one block. Two levels are enough: N / 2 / 4 is.
#[inline(always)]
unsafe fn forward_blocks<V: Lanes, T: Residue>(
    m: Modulus<V, T>,
    table: &[Vec<f64>; 2],
    node: usize,
    scratch: *mut f64,
    out: *mut T,
    n: usize,
) {
    const { assert!(N / 2 / 4 <= BLOCK) };
    // SAFETY: as for the caller.
    unsafe {
        if n <= BLOCK {
            return forward_block::<V, T>(m, table, 1, node, scratch, out, n);
        }
        forward_4::<V, T>(m, table, node, Scratch(scratch), scratch, n);
        for k in 0..4 {
            let at = k * (n / 4);
            forward_block::<V, T>(m, table, 1, 4 * node + k, scratch.add(at), out.add(at), n / 4);
        }
    }
}

#[inline(always)]
unsafe fn forward<V: Lanes, T: Residue>(tables: &Tables, from: *const T, values: *mut T, n: usize) {
    let mut scratch = MaybeUninit::<Room>::uninit();
    let scratch = scratch.as_mut_ptr().cast::<f64>();
    let table = &tables.forward;
    // SAFETY: `from` and `values` have n elements, n a power of two from twice the width to N; the first pass reads all of
    // `from`, and every pass writes the scratch before one reads it.
    unsafe {
        let m = Modulus::<V, T>::new(tables.modulus);
        let first = if (n / V::WIDTH).trailing_zeros() % 2 == 1 {
            forward_2::<V, T>(m, table, Residues(from), scratch, n);
            2
        } else {
            forward_4::<V, T>(m, table, 1, Residues(from), scratch, n);
            4
        };
        if n <= BLOCK {
            return forward_block::<V, T>(m, table, first, 1, scratch, values, n);
        }
        for k in 0..first {
            let at = k * (n / first);
            forward_blocks::<V, T>(m, table, first + k, scratch.add(at), values.add(at), n / first);
        }
    }
}

#[inline(always)]
unsafe fn inverse_4<V: Lanes, T: Residue>(
    m: Modulus<V, T>,
    table: &[Vec<f64>; 2],
    node: usize,
    from: Scratch,
    n: usize,
    to: impl Sink<V>,
) {
    // SAFETY: as for the caller; n is a multiple of four times the width.
    unsafe {
        let quarter = n / 4;
        let (w, u, v) = (twiddle(table, node), twiddle(table, 2 * node), twiddle(table, 2 * node + 1));
        for k in (0..quarter).step_by(V::WIDTH) {
            let (a, b) = m.inverse_by(from.get(k), from.get(k + quarter), u);
            let (c, d) = m.inverse_by(from.get(k + 2 * quarter), from.get(k + 3 * quarter), v);
            let (a, c) = m.inverse_by(a, c, w);
            let (b, d) = m.inverse_by(b, d, w);
            to.put(m.reduce(a), k);
            to.put(b, k + quarter);
            to.put(c, k + 2 * quarter);
            to.put(d, k + 3 * quarter);
        }
    }
}

/// All stages below `node` and their own, from canonical residues, until `groups` groups are left.
#[inline(always)]
unsafe fn inverse_block<V: Lanes, T: Residue>(
    m: Modulus<V, T>,
    table: &[Vec<f64>; 2],
    left: usize,
    node: usize,
    scratch: *mut f64,
    values: *const T,
    n: usize,
) {
    // SAFETY: as for the caller.
    unsafe {
        let mut groups = n / V::WIDTH;
        for g in (0..groups).step_by(2) {
            let at = g * V::WIDTH;
            let pair = [T::load(values.add(at)), T::load(values.add(at + V::WIDTH))];
            let pair = V::begin(pair, table[0].as_ptr(), node * groups + g, m);
            pair[0].store(scratch.add(at));
            pair[1].store(scratch.add(at + V::WIDTH));
        }
        while groups > left {
            groups /= 4;
            let length = n / groups;
            for g in 0..groups {
                let at = scratch.add(g * length);
                inverse_4::<V, T>(m, table, node * groups + g, Scratch(at), length, Scratch(at));
            }
        }
    }
}

/// The inverse of `forward_blocks`.
#[inline(always)]
unsafe fn inverse_blocks<V: Lanes, T: Residue>(
    m: Modulus<V, T>,
    table: &[Vec<f64>; 2],
    node: usize,
    scratch: *mut f64,
    values: *const T,
    n: usize,
) {
    // SAFETY: as for the caller.
    unsafe {
        if n <= BLOCK {
            return inverse_block::<V, T>(m, table, 1, node, scratch, values, n);
        }
        for k in 0..4 {
            let at = k * (n / 4);
            inverse_block::<V, T>(m, table, 1, 4 * node + k, scratch.add(at), values.add(at), n / 4);
        }
        inverse_4::<V, T>(m, table, node, Scratch(scratch), n, Scratch(scratch));
    }
}

#[inline(always)]
unsafe fn inverse<V: Lanes, T: Residue>(tables: &Tables, values: *mut T, n: usize) {
    let mut scratch = MaybeUninit::<Room>::uninit();
    let scratch = scratch.as_mut_ptr().cast::<f64>();
    let table = &tables.inverse;
    // SAFETY: as in `forward`.
    unsafe {
        let m = Modulus::<V, T>::new(tables.modulus);
        let last = if (n / V::WIDTH).trailing_zeros() % 2 == 1 { 2 } else { 4 };
        if n <= BLOCK {
            inverse_block::<V, T>(m, table, last, 1, scratch, values, n);
        } else {
            for k in 0..last {
                let at = k * (n / last);
                inverse_blocks::<V, T>(m, table, last + k, scratch.add(at), values.add(at), n / last);
            }
        }
        let scale = V::splat(tables.halves[n.trailing_zeros() as usize]);
        let to = Scaled { m, scale, to: values };
        if last == 4 {
            return inverse_4::<V, T>(m, table, 1, Scratch(scratch), n, to);
        }
        let (half, w) = (n / 2, twiddle(table, 1));
        for k in (0..half).step_by(V::WIDTH) {
            let (x, y) = m.inverse_by(Scratch(scratch).get(k), Scratch(scratch).get(k + half), w);
            to.put(x, k);
            to.put(y, k + half);
        }
    }
}

/// Transforms whole polynomials of `size` coefficients, size at least 16.
///
/// # Safety
/// The processor must have AVX-512 F and DQ.
#[target_feature(enable = "avx512f,avx512dq,fma")]
pub(super) unsafe fn avx512<T: Residue>(tables: &Tables, forwards: bool, size: usize, values: &mut [T]) {
    debug_assert!(size >= 16);
    for a in values.chunks_exact_mut(size) {
        // SAFETY: the caller saw the instructions; the chunk has `size` elements.
        unsafe {
            if forwards {
                forward::<__m512d, T>(tables, a.as_ptr(), a.as_mut_ptr(), size)
            } else {
                inverse::<__m512d, T>(tables, a.as_mut_ptr(), size)
            }
        }
    }
}

/// Transforms whole polynomials of `size` coefficients, size at least 8.
///
/// # Safety
/// The processor must have AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn avx2<T: Residue>(tables: &Tables, forwards: bool, size: usize, values: &mut [T]) {
    debug_assert!(size >= 8);
    for a in values.chunks_exact_mut(size) {
        // SAFETY: the caller saw the instructions; the chunk has `size` elements.
        unsafe {
            if forwards {
                forward::<__m256d, T>(tables, a.as_ptr(), a.as_mut_ptr(), size)
            } else {
                inverse::<__m256d, T>(tables, a.as_mut_ptr(), size)
            }
        }
    }
}

/// Transforms one polynomial of N small signed coefficients, out of place.
///
/// # Safety
/// The processor must have AVX-512 F and DQ.
#[target_feature(enable = "avx512f,avx512dq,fma")]
pub(super) unsafe fn avx512_signed(tables: &Tables, from: &[i32; N], to: &mut [u32; N]) {
    // SAFETY: the caller saw the instructions. Residues are read as signed numbers, so these may be negative.
    unsafe { forward::<__m512d, u32>(tables, from.as_ptr().cast(), to.as_mut_ptr(), N) }
}

/// Transforms one polynomial of N small signed coefficients, out of place.
///
/// # Safety
/// The processor must have AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn avx2_signed(tables: &Tables, from: &[i32; N], to: &mut [u32; N]) {
    // SAFETY: as above.
    unsafe { forward::<__m256d, u32>(tables, from.as_ptr().cast(), to.as_mut_ptr(), N) }
}
