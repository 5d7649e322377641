//! The inner loop: sums of products of ciphertexts and sparse weight polynomials, evaluation by evaluation.
//!
//! A weight polynomial has only powers of X^lanes, so its evaluations are those of a small transform, each repeated
//! over a block of `lanes` evaluations of the ciphertext. The loop is: broadcast one weight, one fused multiply-add
//! for each polynomial of the ciphertext. Residues are centred, so a product is below 2^48 and 32 of them add up
//! exactly in a double; then the sum is brought back to one residue. Every version computes the same integers.

use crate::rlwe::{N, PRIMES};

/// Doubles that are treated together; a weight is broadcast over this many, or over a divisor where lanes are fewer.
pub(super) const WIDE: usize = 8;
/// Answers that share one load of the ciphertexts.
pub(super) const TOGETHER: usize = 4;
/// Doubles of one stretch of the ciphertexts: half a second-level cache of a megabyte.
const STRETCH: usize = 1 << 16;
/// Products that are added before a sum is reduced.
const EXACT: usize = 32;

/// Adding and subtracting 1.5 * 2^52 rounds to an integer without a call.
const ROUND: f64 = 6_755_399_441_055_744.0;

/// The versions of the loop, best first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Version {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Version {
    /// Every version that this processor has.
    pub(super) fn available() -> Vec<Version> {
        let mut out = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                out.push(Version::Avx512);
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                out.push(Version::Avx2);
            }
        }
        out.push(Version::Portable);
        out
    }

    /// The version to use.
    pub(super) fn best() -> Version {
        static BEST: std::sync::OnceLock<Version> = std::sync::OnceLock::new();
        *BEST.get_or_init(|| Version::available()[0])
    }
}

/// One prime as the loop needs it.
#[derive(Clone, Copy)]
pub(super) struct Modulus {
    q: f64,
    inverse: f64,
    integer: i32,
}

impl Modulus {
    pub(super) fn new(prime: usize) -> Self {
        let q = PRIMES[prime];
        Self { q: f64::from(q), inverse: 1.0 / f64::from(q), integer: q as i32 }
    }

    /// The centred double of a canonical residue.
    #[inline(always)]
    fn centre(&self, x: u32) -> f64 {
        let x = x as i32;
        f64::from(x - (self.integer & ((self.integer / 2 - x) >> 31)))
    }

    /// The canonical residue of an integer below 2^53 in size.
    #[inline(always)]
    fn canonical(&self, x: f64) -> u32 {
        // The quotient may be off by one next to a half, so the residue lies in (-q, q); the sum's low bits are its own.
        let r = (self.reduce(x) + ROUND).to_bits() as i32;
        (r + (self.integer & (r >> 31))) as u32
    }

    /// Brings an exact sum below 2^53 to a residue of absolute value at most about q / 2.
    #[inline(always)]
    fn reduce(&self, x: f64) -> f64 {
        let quotient = (x * self.inverse + ROUND) - ROUND;
        // quotient * q is below 2^53 in size and x is exact: no rounding happens here.
        x - quotient * self.q
    }
}

/// A loop that the compiler turns into vectors, compiled once for each version.
macro_rules! versions {
    ($(#[$doc:meta])* $name:ident, $plain:ident, ($($arg:ident: $type:ty),*)) => {
        $(#[$doc])*
        pub(super) fn $name(version: Version, $($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f")]
            fn avx512($($arg: $type),*) {
                $plain($($arg),*);
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2($($arg: $type),*) {
                $plain($($arg),*);
            }
            match version {
                // SAFETY: this version is only offered where AVX-512 F was detected.
                #[cfg(target_arch = "x86_64")]
                Version::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: this version is only offered where AVX2 was detected.
                #[cfg(target_arch = "x86_64")]
                Version::Avx2 => unsafe { avx2($($arg),*) },
                Version::Portable => $plain($($arg),*),
            }
        }
    };
}

versions! {
    /// Centred doubles of canonical residues.
    centre_all, centre_all_plain, (modulus: Modulus, from: &[u32], to: &mut [f64])
}

#[inline(always)]
fn centre_all_plain(modulus: Modulus, from: &[u32], to: &mut [f64]) {
    from.iter().zip(to).for_each(|(&x, to)| *to = modulus.centre(x));
}

versions! {
    /// Canonical residues of integers below 2^53 in size.
    canonical_all, canonical_all_plain, (modulus: Modulus, from: &[f64], to: &mut [u32])
}

#[inline(always)]
fn canonical_all_plain(modulus: Modulus, from: &[f64], to: &mut [u32]) {
    from.iter().zip(to).for_each(|(&x, to)| *to = modulus.canonical(x));
}

versions! {
    /// Centred doubles of one stretch of all ciphertexts, ordered as the loop reads them: WIDE evaluations of input after
    /// input, polynomial 0 and 1 of each, then the next WIDE evaluations.
    centre_columns, centre_columns_plain,
    (modulus: Modulus, ciphertexts: &[[&[u32]; 2]], start: usize, length: usize, to: &mut [f64])
}

#[inline(always)]
fn centre_columns_plain(modulus: Modulus, ciphertexts: &[[&[u32]; 2]], start: usize, length: usize, to: &mut [f64]) {
    let column = 2 * ciphertexts.len() * WIDE;
    for (stream, part) in ciphertexts.iter().flatten().enumerate() {
        for (at, from) in part[start..start + length].chunks_exact(WIDE).enumerate() {
            let to = &mut to[at * column + stream * WIDE..][..WIDE];
            for lane in 0..WIDE {
                to[lane] = modulus.centre(from[lane]);
            }
        }
    }
}

/// Weights of a group of answers against a block of inputs, as the loop reads them: for each group of evaluations that
/// share a weight, input by input, answer by answer. Where lanes are fewer than [`WIDE`] the weights of [`WIDE`]
/// evaluations are written out.
pub(super) struct WeightTile {
    values: Vec<f64>,
    inputs: usize,
    answers: usize,
    spread_out: bool,
    lanes: usize,
}

impl WeightTile {
    /// Room for `answers` (a multiple of [`TOGETHER`]) times `inputs` polynomials.
    pub(super) fn new(lanes: usize, answers: usize, inputs: usize) -> Self {
        debug_assert!(answers.is_multiple_of(TOGETHER));
        let spread_out = lanes < WIDE;
        let values = vec![0.0; Self::doubles(lanes, answers, inputs)];
        Self { values, inputs, answers, spread_out, lanes }
    }

    /// Doubles that such a tile takes.
    pub(super) fn doubles(lanes: usize, answers: usize, inputs: usize) -> usize {
        N / lanes.max(WIDE) * inputs * answers * if lanes < WIDE { WIDE } else { 1 }
    }

    /// Writes the transforms of input `input` with every answer: `transforms` holds N / lanes centred residues of each.
    pub(super) fn set(&mut self, input: usize, transforms: &[f64]) {
        let room = N / self.lanes;
        let answers = transforms.len() / room;
        let width = if self.spread_out { WIDE } else { 1 };
        let stride = self.inputs * self.answers * width;
        for (block, to) in self.values.chunks_exact_mut(stride).enumerate() {
            let to = &mut to[input * self.answers * width..][..self.answers * width];
            if self.spread_out {
                for (answer, to) in to.chunks_exact_mut(WIDE).take(answers).enumerate() {
                    for (lane, to) in to.iter_mut().enumerate() {
                        *to = transforms[answer * room + (block * WIDE + lane) / self.lanes];
                    }
                }
            } else {
                for (answer, to) in to.iter_mut().take(answers).enumerate() {
                    *to = transforms[answer * room + block];
                }
            }
        }
    }
}

/// Adds to `sums` (answer by answer, then polynomial 0 and 1, N doubles each) the products of the tile's weights and
/// the ciphertexts, whose two polynomials are given modulo one prime as canonical residues. `scratch` is reused.
pub(super) fn multiply_add(
    version: Version,
    modulus: Modulus,
    tile: &WeightTile,
    ciphertexts: &[[&[u32]; 2]],
    sums: &mut [f64],
    scratch: &mut Vec<f64>,
) {
    debug_assert_eq!(ciphertexts.len(), tile.inputs);
    let width = if tile.spread_out { WIDE } else { 1 };
    let stride = tile.inputs * tile.answers * width;
    let share = tile.lanes.max(WIDE);
    let column = 2 * tile.inputs * WIDE;
    // Evaluations that are centred at a time: long enough to be read in order, short enough for a second-level cache.
    let stretch = (STRETCH / column).clamp(1, 32).next_power_of_two() * WIDE;
    scratch.resize(stretch / WIDE * column, 0.0);
    for start in (0..N).step_by(stretch) {
        centre_columns(version, modulus, ciphertexts, start, stretch, scratch);
        for (x, at) in scratch.chunks_exact(column).zip((start..).step_by(WIDE)) {
            let weights = &tile.values[at / share * stride..][..stride];
            for first in (0..tile.answers).step_by(TOGETHER) {
                let mut acc = [[[0.0; WIDE]; 2]; TOGETHER];
                for (row, acc) in acc.iter_mut().flatten().enumerate() {
                    acc.copy_from_slice(&sums[(first * 2 + row) * N + at..][..WIDE]);
                }
                let w = &weights[first * width..];
                let step = Step { x, w, answers: tile.answers, inputs: tile.inputs, spread_out: tile.spread_out };
                run(version, modulus, &step, &mut acc);
                for (row, acc) in acc.iter().flatten().enumerate() {
                    sums[(first * 2 + row) * N + at..][..WIDE].copy_from_slice(acc);
                }
            }
        }
    }
}

type Acc = [[[f64; WIDE]; 2]; TOGETHER];

/// What one pass of the loop reads: WIDE evaluations of all inputs, TOGETHER answers.
struct Step<'a> {
    /// Input by input, polynomial 0 then 1, WIDE doubles each.
    x: &'a [f64],
    /// Input by input `answers` weights (times WIDE if spread out); the first TOGETHER of them count.
    w: &'a [f64],
    answers: usize,
    inputs: usize,
    spread_out: bool,
}

impl Step<'_> {
    /// The vector versions read without bounds checks: this is what they rely on.
    fn assert_in_bounds(&self) {
        let width = if self.spread_out { WIDE } else { 1 };
        assert!(self.inputs > 0 && self.x.len() >= 2 * self.inputs * WIDE);
        assert!(self.w.len() >= ((self.inputs - 1) * self.answers + TOGETHER) * width);
    }
}

fn run(version: Version, modulus: Modulus, step: &Step, acc: &mut Acc) {
    match version {
        #[cfg(target_arch = "x86_64")]
        Version::Avx512 => {
            step.assert_in_bounds();
            // SAFETY: this version is only offered where AVX-512 F was detected; the bounds were just checked.
            unsafe {
                if step.spread_out {
                    x86::avx512::<true>(modulus, step, acc)
                } else {
                    x86::avx512::<false>(modulus, step, acc)
                }
            }
        }
        #[cfg(target_arch = "x86_64")]
        Version::Avx2 => {
            step.assert_in_bounds();
            // SAFETY: this version is only offered where AVX2 and FMA were detected; the bounds were just checked.
            unsafe {
                if step.spread_out {
                    x86::avx2::<true>(modulus, step, acc)
                } else {
                    x86::avx2::<false>(modulus, step, acc)
                }
            }
        }
        Version::Portable => portable(modulus, step, acc),
    }
}

fn portable(modulus: Modulus, step: &Step, acc: &mut Acc) {
    let width = if step.spread_out { WIDE } else { 1 };
    for first in (0..step.inputs).step_by(EXACT) {
        for input in first..(first + EXACT).min(step.inputs) {
            for (g, acc) in acc.iter_mut().enumerate() {
                let w = &step.w[(input * step.answers + g) * width..][..width];
                for (part, acc) in acc.iter_mut().enumerate() {
                    let x = &step.x[(2 * input + part) * WIDE..][..WIDE];
                    for lane in 0..WIDE {
                        // Products and sums are integers below 2^53: no rounding, with or without fusing.
                        acc[lane] += x[lane] * w[lane % width];
                    }
                }
            }
        }
        acc.iter_mut().flatten().flatten().for_each(|a| *a = modulus.reduce(*a));
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Acc, EXACT, Modulus, Step, TOGETHER, WIDE};
    use std::arch::x86_64::*;

    /// # Safety
    /// Needs AVX-512 F, and a step within its bounds.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512<const SPREAD: bool>(modulus: Modulus, step: &Step, acc: &mut Acc) {
        let width = if SPREAD { WIDE } else { 1 };
        // SAFETY: `step` was checked: all reads lie inside its slices; the accumulators are arrays of WIDE doubles.
        unsafe {
            let (q, inverse) = (_mm512_set1_pd(modulus.q), _mm512_set1_pd(modulus.inverse));
            let mut sums = [[_mm512_setzero_pd(); 2]; TOGETHER];
            for g in 0..TOGETHER {
                for part in 0..2 {
                    sums[g][part] = _mm512_loadu_pd(acc[g][part].as_ptr());
                }
            }
            let (mut x, mut w) = (step.x.as_ptr(), step.w.as_ptr());
            let mut left = step.inputs;
            while left > 0 {
                let now = left.min(EXACT);
                for _ in 0..now {
                    let (x0, x1) = (_mm512_loadu_pd(x), _mm512_loadu_pd(x.wrapping_add(WIDE)));
                    for (g, sum) in sums.iter_mut().enumerate() {
                        let w = w.add(g * width);
                        let w = if SPREAD { _mm512_loadu_pd(w) } else { _mm512_set1_pd(*w) };
                        sum[0] = _mm512_fmadd_pd(x0, w, sum[0]);
                        sum[1] = _mm512_fmadd_pd(x1, w, sum[1]);
                    }
                    x = x.wrapping_add(2 * WIDE);
                    w = w.wrapping_add(step.answers * width);
                }
                for sum in sums.iter_mut().flatten() {
                    let quotient = _mm512_roundscale_pd::<0>(_mm512_mul_pd(*sum, inverse));
                    *sum = _mm512_fnmadd_pd(quotient, q, *sum);
                }
                left -= now;
            }
            for g in 0..TOGETHER {
                for part in 0..2 {
                    _mm512_storeu_pd(acc[g][part].as_mut_ptr(), sums[g][part]);
                }
            }
        }
    }

    /// # Safety
    /// Needs AVX2 and FMA, and a step within its bounds.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn avx2<const SPREAD: bool>(modulus: Modulus, step: &Step, acc: &mut Acc) {
        let width = if SPREAD { WIDE } else { 1 };
        // SAFETY: `step` was checked: all reads lie inside its slices; the accumulators are arrays of WIDE doubles.
        unsafe {
            let (q, inverse) = (_mm256_set1_pd(modulus.q), _mm256_set1_pd(modulus.inverse));
            for half in [0, WIDE / 2] {
                let mut sums = [[_mm256_setzero_pd(); 2]; TOGETHER];
                for g in 0..TOGETHER {
                    for part in 0..2 {
                        sums[g][part] = _mm256_loadu_pd(acc[g][part].as_ptr().add(half));
                    }
                }
                let (mut x, mut w) = (step.x.as_ptr().add(half), step.w.as_ptr());
                let mut left = step.inputs;
                while left > 0 {
                    let now = left.min(EXACT);
                    for _ in 0..now {
                        let (x0, x1) = (_mm256_loadu_pd(x), _mm256_loadu_pd(x.wrapping_add(WIDE)));
                        for (g, sum) in sums.iter_mut().enumerate() {
                            let w = w.add(g * width);
                            let w = if SPREAD { _mm256_loadu_pd(w.add(half)) } else { _mm256_set1_pd(*w) };
                            sum[0] = _mm256_fmadd_pd(x0, w, sum[0]);
                            sum[1] = _mm256_fmadd_pd(x1, w, sum[1]);
                        }
                        x = x.wrapping_add(2 * WIDE);
                        w = w.wrapping_add(step.answers * width);
                    }
                    for sum in sums.iter_mut().flatten() {
                        let quotient = _mm256_round_pd::<0>(_mm256_mul_pd(*sum, inverse));
                        *sum = _mm256_fnmadd_pd(quotient, q, *sum);
                    }
                    left -= now;
                }
                for g in 0..TOGETHER {
                    for part in 0..2 {
                        _mm256_storeu_pd(acc[g][part].as_mut_ptr().add(half), sums[g][part]);
                    }
                }
            }
        }
    }
}
