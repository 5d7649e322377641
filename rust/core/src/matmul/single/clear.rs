//! Matrix products modulo p of values that this party knows: exact integers in doubles, so that the compiler's vectors do
//! the work. An element is split at bit 21 and every partial sum stays below 2^53.

use super::weights::Matrix;
use crate::field;
use rayon::prelude::*;

/// Where an element is split.
const LOW_BITS: u32 = 21;
/// Outputs that are computed together.
const PANEL: usize = 256;

/// x (rows x m.rows(), field elements) times m, modulo p.
pub(crate) fn product(x: &[u64], rows: usize, m: &Matrix) -> Vec<u64> {
    let (columns, outputs) = (m.rows(), m.columns());
    assert_eq!(x.len(), rows * columns, "the matrices of a product fit");
    // Right entries of up to 24 bits are one limb; others two. A product of limbs has at most 21 + 24 bits, so
    // 2^(53 - 45) of them may be added.
    let limbs = if m.bits() <= 24 { 1 } else { 2 };
    let depth = 256.min(columns.max(1));
    let panels: Vec<Vec<u64>> = (0..outputs.div_ceil(PANEL))
        .into_par_iter()
        .map(|panel| {
            let from = panel * PANEL;
            let width = PANEL.min(outputs - from);
            let mut out = vec![0u64; rows * width];
            let mut right = vec![vec![0f64; depth * width]; limbs];
            let mut entries = vec![0i64; width];
            let mut sums = vec![0f64; 2 * limbs * width];
            for first in (0..columns).step_by(depth) {
                let here = depth.min(columns - first);
                for k in 0..here {
                    m.read(first + k, from, &mut entries);
                    split_right(limbs, &entries, &mut right, k * width);
                }
                for row in 0..rows {
                    sums.fill(0.0);
                    let x = &x[row * columns + first..][..here];
                    for (limb, right) in right.iter().enumerate() {
                        let (low, high) = sums[2 * limb * width..][..2 * width].split_at_mut(width);
                        accumulate(x, right, low, high);
                    }
                    let out = &mut out[row * width..][..width];
                    for (limb, sums) in sums.chunks_exact(2 * width).enumerate() {
                        let (low, high) = sums.split_at(width);
                        // 2^(21 limb) and 2^(21 (limb + 1)): the places of the two sums.
                        let place = 1u64 << (LOW_BITS * limb as u32);
                        let above = field::mul(place, 1 << LOW_BITS);
                        for ((out, &low), &high) in out.iter_mut().zip(low).zip(high) {
                            let sum = field::add(
                                field::mul(reduce(low as i64), place),
                                field::mul(reduce(high as i64), above),
                            );
                            *out = field::add(*out, sum);
                        }
                    }
                }
            }
            out
        })
        .collect();
    let mut out = vec![0; rows * outputs];
    for (panel, values) in panels.iter().enumerate() {
        let from = panel * PANEL;
        let width = PANEL.min(outputs - from);
        for (row, values) in values.chunks_exact(width).enumerate() {
            out[row * outputs + from..][..width].copy_from_slice(values);
        }
    }
    out
}

/// The field element of a sum below 2^53 in size, without a division.
fn reduce(sum: i64) -> u64 {
    // 4096 p is just under 2^53, so 4097 p makes every such sum positive; it is below 2^55.
    let positive = (sum + 4097 * field::P as i64) as u64;
    field::mul(positive, 1)
}

/// Splits signed entries into limbs: all of it, or its low 21 bits and the rest, rounded down.
fn split_right(limbs: usize, entries: &[i64], right: &mut [Vec<f64>], at: usize) {
    for (j, &e) in entries.iter().enumerate() {
        if limbs == 1 {
            right[0][at + j] = e as f64;
        } else {
            right[0][at + j] = (e & ((1 << LOW_BITS) - 1)) as f64;
            right[1][at + j] = (e >> LOW_BITS) as f64;
        }
    }
}

/// Adds x[k] * right[k][j] to the sums, the low bits of x to one and the others to the other.
fn accumulate(x: &[u64], right: &[f64], low: &mut [f64], high: &mut [f64]) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: AVX-512 F was just detected.
            return unsafe { accumulate_avx512(x, right, low, high) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: AVX2 was just detected.
            return unsafe { accumulate_avx2(x, right, low, high) };
        }
    }
    accumulate_portable(x, right, low, high);
}

/// The same loop, compiled for AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn accumulate_avx512(x: &[u64], right: &[f64], low: &mut [f64], high: &mut [f64]) {
    accumulate_portable(x, right, low, high);
}

/// The same loop, compiled for AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn accumulate_avx2(x: &[u64], right: &[f64], low: &mut [f64], high: &mut [f64]) {
    accumulate_portable(x, right, low, high);
}

#[inline(always)]
fn accumulate_portable(x: &[u64], right: &[f64], low: &mut [f64], high: &mut [f64]) {
    let width = low.len();
    // Sixteen outputs at a time, whose sums stay in registers over all of x.
    const TOGETHER: usize = 16;
    let whole = width / TOGETHER * TOGETHER;
    for j in (0..whole).step_by(TOGETHER) {
        let (mut a, mut b) = ([0f64; TOGETHER], [0f64; TOGETHER]);
        for (k, &x) in x.iter().enumerate() {
            let (x0, x1) = parts(x);
            let right = &right[k * width + j..][..TOGETHER];
            for i in 0..TOGETHER {
                a[i] += x0 * right[i];
                b[i] += x1 * right[i];
            }
        }
        for i in 0..TOGETHER {
            low[j + i] += a[i];
            high[j + i] += b[i];
        }
    }
    for j in whole..width {
        for (k, &x) in x.iter().enumerate() {
            let (x0, x1) = parts(x);
            low[j] += x0 * right[k * width + j];
            high[j] += x1 * right[k * width + j];
        }
    }
}

#[inline(always)]
fn parts(x: u64) -> (f64, f64) {
    ((x & ((1 << LOW_BITS) - 1)) as u32 as f64, (x >> LOW_BITS) as u32 as f64)
}

/// The slow, obvious twin of [`product`].
#[cfg(test)]
pub(crate) fn product_plain(x: &[u64], rows: usize, m: &Matrix) -> Vec<u64> {
    let mut out = vec![0u64; rows * m.columns()];
    let mut entries = vec![0i64; m.columns()];
    for k in 0..m.rows() {
        m.read(k, 0, &mut entries);
        for row in 0..rows {
            for (j, &e) in entries.iter().enumerate() {
                let at = &mut out[row * m.columns() + j];
                let term = i128::from(x[row * m.rows() + k]) * i128::from(e);
                *at = (i128::from(*at) + term).rem_euclid(i128::from(field::P)) as u64;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SecretRng;

    #[test]
    fn products_in_the_clear_are_those_of_integers() {
        let mut rng = SecretRng::from_os();
        for (rows, columns, outputs) in [(1, 1, 1), (3, 700, 5), (2, 513, 300), (5, 16, 257)] {
            let mut x = field::random_vector(&mut rng, rows * columns);
            x[0] = field::P - 1;
            for extreme in [false, true] {
                let n = columns * outputs;
                let draw = |rng: &mut SecretRng, bits: u32| -> i32 {
                    if extreme { -(1 << (bits - 1)) } else { rng.next_u64() as i32 >> (32 - bits) }
                };
                let small: Vec<i16> = (0..n).map(|_| draw(&mut rng, 16) as i16).collect();
                let large: Vec<i32> = (0..n).map(|_| draw(&mut rng, 24)).collect();
                let full = if extreme { vec![field::P / 2; n] } else { field::random_vector(&mut rng, n) };
                let all = if extreme { vec![field::P - 1; rows * columns] } else { x.clone() };
                for m in [
                    Matrix::from_i16(columns, outputs, &small).unwrap(),
                    Matrix::from_i32(columns, outputs, 24, &large).unwrap(),
                    Matrix::from_field(columns, outputs, &full).unwrap(),
                ] {
                    assert_eq!(product(&all, rows, &m), product_plain(&all, rows, &m));
                }
            }
        }
    }
}
