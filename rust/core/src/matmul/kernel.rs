//! The inner loop of the products: a small matrix of weights times a small matrix of residues, in doubles.
//!
//! Residues are centred, at most 2^24 in size, so a product has 48 bits and [`EXACT_TERMS`] of them add up exactly; then
//! the sums are brought back to residues. That is one fused multiply-add per weight, lane and prime and about a tenth more.
//! A *panel* is eight rows of weights, a *tile* the sums of one panel over sixteen lanes: sixteen AVX-512 registers.

#[cfg(target_arch = "x86_64")]
use super::kernel_vector::{Avx2, Avx512};
use super::kernel_vector::{Isa, Lines, Plain, ROUNDER, Vector};

/// Rows of weights in a panel.
pub(super) const ROWS: usize = 8;
/// Lanes of a tile.
pub(super) const LANES: usize = 16;
/// Sums in a tile.
pub(super) const TILE: usize = ROWS * LANES;
/// Products of two centred residues that a double can add up exactly, beside one residue.
pub(super) const EXACT_TERMS: usize = 32;

/// A prime below 2^25 as the kernels want it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Modulus {
    /// The prime.
    pub q: f64,
    /// Its inverse, rounded.
    pub inverse: f64,
}

impl Modulus {
    /// The kernels' form of a prime of at most 2^25 - 2^14 + 1: that bound is what makes [`EXACT_TERMS`] products fit.
    pub fn new(q: u32) -> Self {
        let half = u64::from(q / 2) + 2;
        assert!(
            EXACT_TERMS as u64 * half * half + half < 1 << 53,
            "the kernels add 32 products exactly only below 2^25"
        );
        Self { q: f64::from(q), inverse: 1.0 / f64::from(q) }
    }
}

/// Terms that the inner loop takes without a jump.
const TERMS_UNROLLED: usize = 8;

/// Terms of one panel that lie together in memory for each point.
pub(super) const TERMS_TOGETHER: usize = 16;

/// The sizes of one call: `panels` x 8 rows, `terms` columns, `lane_blocks` x 16 lanes; weights of `points` points.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub panels: usize,
    pub terms: usize,
    pub lane_blocks: usize,
    pub points: usize,
    /// From the values of one point to those of the next, a hint.
    pub next_values: usize,
}

impl Block {
    /// Weights of all points of one prime: `[panel][16 terms][point][term][row]`, so that the transforms write and the kernel
    /// reads whole lines of few pages.
    pub fn weights(&self) -> usize {
        self.panels * self.terms.next_multiple_of(TERMS_TOGETHER) * self.points * ROWS
    }
    /// Where the weights of a panel, term and point begin.
    pub fn weight(&self, panel: usize, term: usize, point: usize) -> usize {
        let groups = self.terms.div_ceil(TERMS_TOGETHER);
        let group = (panel * groups + term / TERMS_TOGETHER) * self.points + point;
        (group * TERMS_TOGETHER + term % TERMS_TOGETHER) * ROWS
    }
    /// Values: `[term][lane]`.
    pub fn values(&self) -> usize {
        self.terms * self.lane_blocks * LANES
    }
    /// Sums: `[panel][lane block][row][lane]`.
    pub fn sums(&self) -> usize {
        self.panels * self.lane_blocks * TILE
    }
}

/// Room for the kernels' doubles, kept from call to call.
#[derive(Default)]
pub(super) struct Scratch {
    weights: Lines<f64>,
    values: Lines<f64>,
}

/// Adds the weights of one point times values to the sums, all centred residues mod `m` (off by at most 2 from the centre's
/// bound).
#[allow(clippy::too_many_arguments)] // Three matrices and their sizes.
pub(super) fn accumulate(
    isa: Isa,
    block: Block,
    point: usize,
    weights: &[i32],
    values: &[i32],
    sums: &mut [i32],
    m: Modulus,
    scratch: &mut Scratch,
) {
    assert!(weights.len() == block.weights() && values.len() == block.values() && sums.len() == block.sums());
    assert!(point < block.points);
    scratch.weights.size(block.panels * block.terms * ROWS);
    scratch.values.size(block.terms * LANES);
    // SAFETY: `Isa` values other than `Portable` are only made where the instructions exist, and the lengths are checked.
    unsafe {
        match isa {
            Isa::Portable => accumulate_as::<Plain, 4, 1>(block, point, weights, values, sums, m, scratch),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => accumulate_avx2(block, point, weights, values, sums, m, scratch),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => accumulate_avx512(block, point, weights, values, sums, m, scratch),
            #[cfg(not(target_arch = "x86_64"))]
            _ => accumulate_as::<Plain, 4, 1>(block, point, weights, values, sums, m, scratch),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
#[allow(clippy::too_many_arguments)]
unsafe fn accumulate_avx2(
    b: Block,
    point: usize,
    w: &[i32],
    x: &[i32],
    sums: &mut [i32],
    m: Modulus,
    scratch: &mut Scratch,
) {
    // SAFETY: the feature is enabled and the caller checked the lengths.
    unsafe { accumulate_as::<Avx2, 4, 1>(b, point, w, x, sums, m, scratch) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[allow(clippy::too_many_arguments)]
unsafe fn accumulate_avx512(
    b: Block,
    point: usize,
    w: &[i32],
    x: &[i32],
    sums: &mut [i32],
    m: Modulus,
    scratch: &mut Scratch,
) {
    // SAFETY: the feature is enabled and the caller checked the lengths.
    unsafe { accumulate_as::<Avx512, 8, 2>(b, point, w, x, sums, m, scratch) }
}

/// # Safety
/// The instructions of `V` are enabled; slices and scratch have the lengths of the block.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn accumulate_as<V: Vector, const R: usize, const L: usize>(
    block: Block,
    point: usize,
    weights: &[i32],
    values: &[i32],
    sums: &mut [i32],
    m: Modulus,
    scratch: &mut Scratch,
) {
    // SAFETY: every pointer stays inside the slice that it came from, whose lengths the caller checked.
    unsafe {
        let mut to = scratch.weights.as_mut_ptr();
        for panel in 0..block.panels {
            for first in (0..block.terms).step_by(TERMS_TOGETHER) {
                let from = weights.as_ptr().add(block.weight(panel, first, point));
                for k in 0..TERMS_TOGETHER.min(block.terms - first) {
                    V::load_i32(from.add(k * ROWS)).store(to);
                    to = to.add(ROWS);
                }
            }
        }
        let tiles = block.panels * block.lane_blocks;
        let chunks = block.panels * block.terms.div_ceil(TERMS_TOGETHER);
        let ahead = Ahead {
            weights: weights.as_ptr().wrapping_add(block.weight(0, 0, point + 1)),
            chunk: block.points * TERMS_TOGETHER * ROWS,
            chunks_each: chunks.div_ceil(tiles),
            values: values.as_ptr().wrapping_add(block.next_values),
            value_lines_each: (block.values() / LINE).div_ceil(tiles),
            sums: sums.as_ptr().wrapping_add(block.sums()),
        };
        let stride = block.lane_blocks * LANES;
        for lanes in 0..block.lane_blocks {
            for j in 0..block.terms {
                let from = values.as_ptr().add(j * stride + lanes * LANES);
                let to = scratch.values.as_mut_ptr().add(j * LANES);
                V::load_i32(from).store(to);
                V::load_i32(from.add(8)).store(to.add(8));
            }
            for panel in 0..block.panels {
                ahead.some::<V>(lanes * block.panels + panel);
                let sums = sums.as_mut_ptr().add((panel * block.lane_blocks + lanes) * TILE);
                let w = scratch.weights.as_ptr().add(panel * block.terms * ROWS);
                tile_product::<V, i32, R, L>(block.terms, w, scratch.values.as_ptr(), sums, Some(m));
            }
        }
    }
}

/// How sums are kept between calls.
trait Kept: Copy {
    /// # Safety
    /// As in [`Vector`].
    unsafe fn load<V: Vector>(from: *const Self) -> V;
    /// # Safety
    /// As in [`Vector`].
    unsafe fn store<V: Vector>(x: V, to: *mut Self);
}

impl Kept for i32 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_i32(from) }
    }
    #[inline(always)]
    unsafe fn store<V: Vector>(x: V, to: *mut Self) {
        // SAFETY: the caller's promise.
        unsafe { x.store_i32(to) }
    }
}

impl Kept for f64 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(from) }
    }
    #[inline(always)]
    unsafe fn store<V: Vector>(x: V, to: *mut Self) {
        // SAFETY: the caller's promise.
        unsafe { x.store(to) }
    }
}

/// What the next point will read, fetched bit by bit while this one computes. Only addresses: what is not there is not read.
struct Ahead {
    weights: *const i32,
    /// From the weights of one panel and sixteen terms to the next.
    chunk: usize,
    chunks_each: usize,
    values: *const i32,
    value_lines_each: usize,
    sums: *const i32,
}

/// 32-bit numbers in a line of the cache.
const LINE: usize = 16;

impl Ahead {
    /// Fetches the share of one tile.
    #[inline(always)]
    fn some<V: Vector>(&self, tile: usize) {
        for k in tile * self.chunks_each..(tile + 1) * self.chunks_each {
            for line in 0..TERMS_TOGETHER * ROWS / LINE {
                V::prefetch_far(self.weights.wrapping_add(k * self.chunk + line * LINE));
            }
        }
        for k in tile * self.value_lines_each..(tile + 1) * self.value_lines_each {
            V::prefetch_far(self.values.wrapping_add(k * LINE));
        }
        for line in 0..TILE / LINE {
            V::prefetch_far(self.sums.wrapping_add(tile * TILE + line * LINE));
        }
    }
}

/// One tile: `sums[row][lane] += w[term][row] * x[term][lane]`, in blocks of R rows and L vectors held in registers,
/// reduced mod `m` every [`EXACT_TERMS`] terms and at the end; without `m` the caller answers for exactness.
///
/// # Safety
/// The instructions of `V` are enabled, `w` holds `terms` x 8 and `x` `terms` x 16 doubles, `sums`
/// a tile.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // Loops with constant ends unroll, and the sums stay in registers.
unsafe fn tile_product<V: Vector, S: Kept, const R: usize, const L: usize>(
    terms: usize,
    w: *const f64,
    x: *const f64,
    sums: *mut S,
    m: Option<Modulus>,
) {
    // SAFETY: all offsets are below terms * 8, terms * 16 and TILE.
    unsafe {
        for row in (0..ROWS).step_by(R) {
            for lane in (0..LANES).step_by(8 * L) {
                let at = |r: usize, l: usize| (row + r) * LANES + lane + 8 * l;
                let mut acc = [[V::splat(0.0); L]; R];
                for r in 0..R {
                    for l in 0..L {
                        acc[r][l] = S::load(sums.add(at(r, l)));
                    }
                }
                let step = if m.is_some() { EXACT_TERMS } else { terms };
                let (mut w, mut x) = (w.wrapping_add(row), x.wrapping_add(lane));
                let mut left = terms;
                while left > 0 {
                    let now = left.min(step);
                    left -= now;
                    // Few jumps: where they stand decides how fast some processors read the loop.
                    for _ in 0..now / TERMS_UNROLLED {
                        for k in 0..TERMS_UNROLLED {
                            one_term::<V, R, L>(&mut acc, w.add(k * ROWS), x.add(k * LANES));
                        }
                        (w, x) = (w.wrapping_add(TERMS_UNROLLED * ROWS), x.wrapping_add(TERMS_UNROLLED * LANES));
                    }
                    for _ in 0..now % TERMS_UNROLLED {
                        one_term::<V, R, L>(&mut acc, w, x);
                        (w, x) = (w.wrapping_add(ROWS), x.wrapping_add(LANES));
                    }
                    if let Some(m) = m {
                        let (q, inverse) = (V::splat(m.q), V::splat(m.inverse));
                        for r in 0..R {
                            for l in 0..L {
                                acc[r][l] = reduce(acc[r][l], q, inverse);
                            }
                        }
                    }
                }
                for r in 0..R {
                    for l in 0..L {
                        S::store(acc[r][l], sums.add(at(r, l)));
                    }
                }
            }
        }
    }
}

/// Adds R weights times L vectors of values.
///
/// # Safety
/// The instructions of `V` are enabled; `w` holds R weights, `x` 8 L values.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn one_term<V: Vector, const R: usize, const L: usize>(acc: &mut [[V; L]; R], w: *const f64, x: *const f64) {
    // SAFETY: the caller's promise; a prefetch may name any address.
    unsafe {
        V::prefetch(w.wrapping_add(16 * ROWS));
        let mut v = [V::splat(0.0); L];
        for l in 0..L {
            v[l] = V::load(x.add(8 * l));
        }
        for r in 0..R {
            let weight = V::splat(*w.add(r));
            for l in 0..L {
                acc[r][l] = weight.mul_add(v[l], acc[r][l]);
            }
        }
    }
}

/// x less the nearest multiple of q: at most q / 2 + 2 in size for |x| < 2^53.
///
/// # Safety
/// The instructions of `V` are enabled.
#[inline(always)]
pub(super) unsafe fn reduce<V: Vector>(x: V, q: V, inverse: V) -> V {
    // SAFETY: the caller's promise.
    unsafe {
        let rounder = V::splat(ROUNDER);
        let quotient = x.mul_add(inverse, rounder).sub(rounder);
        quotient.mul_sub_from(q, x)
    }
}

/// Adds weights times values to sums of doubles, without reduction: the caller sees to it that no sum reaches 2^53.
/// Weights are `[panel][term][row]`, values `[lane block][term][lane]`, sums those of [`accumulate`].
pub(super) fn accumulate_exact(isa: Isa, block: Block, weights: &[f64], values: &[f64], sums: &mut [f64]) {
    let count = block.panels * block.terms * ROWS;
    assert!(weights.len() == count && values.len() == block.values() && sums.len() == block.sums());
    // SAFETY: `Isa` values other than `Portable` are only made where the instructions exist, and the lengths are checked.
    unsafe {
        match isa {
            Isa::Portable => exact_as::<Plain, 4, 1>(block, weights, values, sums),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => exact_avx2(block, weights, values, sums),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => exact_avx512(block, weights, values, sums),
            #[cfg(not(target_arch = "x86_64"))]
            _ => exact_as::<Plain, 4, 1>(block, weights, values, sums),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn exact_avx2(block: Block, weights: &[f64], values: &[f64], sums: &mut [f64]) {
    // SAFETY: the feature is enabled and the caller checked the lengths.
    unsafe { exact_as::<Avx2, 4, 1>(block, weights, values, sums) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn exact_avx512(block: Block, weights: &[f64], values: &[f64], sums: &mut [f64]) {
    // SAFETY: the feature is enabled and the caller checked the lengths.
    unsafe { exact_as::<Avx512, 8, 2>(block, weights, values, sums) }
}

/// # Safety
/// The instructions of `V` are enabled; the slices have the lengths of the block.
#[inline(always)]
unsafe fn exact_as<V: Vector, const R: usize, const L: usize>(
    block: Block,
    weights: &[f64],
    values: &[f64],
    sums: &mut [f64],
) {
    // SAFETY: every pointer stays inside the slice that it came from, whose lengths the caller checked.
    unsafe {
        for lanes in 0..block.lane_blocks {
            let x = values.as_ptr().add(lanes * block.terms * LANES);
            for panel in 0..block.panels {
                let w = weights.as_ptr().add(panel * block.terms * ROWS);
                let tile = sums.as_mut_ptr().add((panel * block.lane_blocks + lanes) * TILE);
                tile_product::<V, f64, R, L>(block.terms, w, x, tile, None);
            }
        }
    }
}

/// Multiply-adds a second of one core in the inner loop alone, from the first-level cache: the best of some short runs. It is
/// within a tenth of what the machine's two vector units can do, and what the whole kernel is compared with.
pub fn multiply_add_rate() -> f64 {
    let block = Block { panels: 1, terms: 96, lane_blocks: 1, points: 1, next_values: 0 };
    let weights = Lines::zeros(block.panels * block.terms * ROWS);
    let (values, mut sums) = (Lines::zeros(block.values()), Lines::zeros(block.sums()));
    let isa = Isa::best();
    let run = |_| {
        const TIMES: usize = 2000;
        let begun = std::time::Instant::now();
        (0..TIMES).for_each(|_| accumulate_exact(isa, block, &weights, &values, &mut sums));
        (TIMES * block.terms * TILE) as f64 / begun.elapsed().as_secs_f64()
    };
    (0..20).map(run).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SecretRng;

    const Q: u32 = 33_538_049;
    const POINT: usize = 1;

    fn residues(rng: &mut SecretRng, n: usize) -> Vec<i32> {
        (0..n).map(|_| (rng.next_u64() % u64::from(Q)) as i32 - (Q / 2) as i32).collect()
    }

    fn twin(block: Block, w: &[i32], x: &[i32], sums: &mut [i64]) {
        let stride = block.lane_blocks * LANES;
        for panel in 0..block.panels {
            for row in 0..ROWS {
                for lane in 0..stride {
                    let at = ((panel * block.lane_blocks + lane / LANES) * ROWS + row) * LANES + lane % LANES;
                    for j in 0..block.terms {
                        let w = i64::from(w[block.weight(panel, j, POINT) + row]);
                        sums[at] = (sums[at] + w * i64::from(x[j * stride + lane])).rem_euclid(i64::from(Q));
                    }
                }
            }
        }
    }

    #[test]
    fn every_variant_computes_the_same_residues() {
        let mut rng = SecretRng::from_insecure_fixed_seed(1);
        for (panels, terms, lane_blocks) in [(1, 1, 1), (2, 31, 3), (1, 32, 2), (3, 33, 1), (1, 200, 4)] {
            let block = Block { panels, terms, lane_blocks, points: 3, next_values: 0 };
            let (w, x) = (residues(&mut rng, block.weights()), residues(&mut rng, block.values()));
            let start = residues(&mut rng, block.sums());
            let mut want: Vec<i64> = start.iter().map(|&v| i64::from(v)).collect();
            twin(block, &w, &x, &mut want);
            for isa in Isa::available() {
                let mut got = start.clone();
                accumulate(isa, block, POINT, &w, &x, &mut got, Modulus::new(Q), &mut Scratch::default());
                assert!(got.iter().all(|v| v.unsigned_abs() <= Q / 2 + 2), "{isa:?} leaves the centred range");
                let got: Vec<i64> = got.iter().map(|&v| i64::from(v).rem_euclid(i64::from(Q))).collect();
                assert_eq!(got, want, "{isa:?} {block:?}");
            }
        }
    }

    #[test]
    fn the_largest_residues_of_one_sign_still_add_up_exactly() {
        let block = Block { panels: 1, terms: 96, lane_blocks: 1, points: 2, next_values: 0 };
        let top = (Q / 2) as i32 + 2;
        for (a, b) in [(top, top), (-top, top)] {
            let (w, x) = (vec![a; block.weights()], vec![b; block.values()]);
            let mut want = vec![i64::from(b); block.sums()];
            twin(block, &w, &x, &mut want);
            for isa in Isa::available() {
                let mut got = vec![b; block.sums()];
                accumulate(isa, block, POINT, &w, &x, &mut got, Modulus::new(Q), &mut Scratch::default());
                let got: Vec<i64> = got.iter().map(|&v| i64::from(v).rem_euclid(i64::from(Q))).collect();
                assert_eq!(got, want, "{isa:?}");
            }
        }
    }

    #[test]
    fn the_unreduced_form_is_the_integer_product() {
        let mut rng = SecretRng::from_insecure_fixed_seed(2);
        let block = Block { panels: 2, terms: 70, lane_blocks: 2, points: 1, next_values: 0 };
        let small = |rng: &mut SecretRng, n| -> Vec<f64> {
            (0..n).map(|_| (rng.next_u64() % (1 << 20)) as f64 - f64::from(1 << 19)).collect()
        };
        let (w, x) = (small(&mut rng, block.panels * block.terms * ROWS), small(&mut rng, block.values()));
        for isa in Isa::available() {
            let mut sums = vec![0.0; block.sums()];
            accumulate_exact(isa, block, &w, &x, &mut sums);
            for (at, &sum) in sums.iter().enumerate() {
                let (tile, row, lane) = (at / TILE, at / LANES % ROWS, at % LANES);
                let (panel, lanes) = (tile / block.lane_blocks, tile % block.lane_blocks);
                let want: i64 = (0..block.terms)
                    .map(|j| {
                        w[(panel * block.terms + j) * ROWS + row] as i64
                            * x[(lanes * block.terms + j) * LANES + lane] as i64
                    })
                    .sum();
                assert_eq!(sum as i64, want, "{isa:?}");
            }
        }
    }
}
