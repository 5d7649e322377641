//! Scores: every token's input times every expert's vector, with the widest instructions that the processor has.
//!
//! A matrix product with as few columns as there are experts is bound by the reading of the inputs, so nothing is
//! packed: a token's input is read once for eight experts, or for all that are left.

/// Experts that share one reading of a token's input. So many sums also keep both multipliers busy.
const TOGETHER: usize = 8;

/// `rows x vectors^T`: both are of rows of `width` numbers.
pub fn scores(rows: &[f32], vectors: &[f32], width: usize) -> Vec<f32> {
    #[cfg(target_arch = "x86_64")]
    {
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has AVX-512F, checked in the line above.
            return unsafe { x86::with_avx512(rows, vectors, width) };
        }
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            // SAFETY: the processor has AVX2 and FMA, checked in the line above.
            return unsafe { x86::with_avx2(rows, vectors, width) };
        }
    }
    portable(rows, vectors, width)
}

/// The scores by a function that appends the products of a row with up to [`TOGETHER`] vectors of its width.
#[inline(always)]
fn each(rows: &[f32], vectors: &[f32], width: usize, some: impl Fn(&[f32], &[f32], &mut Vec<f32>)) -> Vec<f32> {
    let mut out = Vec::with_capacity(rows.len() / width * (vectors.len() / width));
    for row in rows.chunks_exact(width) {
        vectors.chunks(TOGETHER * width).for_each(|group| some(row, group, &mut out));
    }
    out
}

/// Eight sums a product, so that additions need not wait for each other; the compiler makes vectors of them.
fn portable(rows: &[f32], vectors: &[f32], width: usize) -> Vec<f32> {
    let one = |row: &[f32], vector: &[f32]| {
        let mut sums = [0.0f32; 8];
        for (a, b) in row.chunks(sums.len()).zip(vector.chunks(sums.len())) {
            sums.iter_mut().zip(a).zip(b).for_each(|((sum, a), b)| *sum += a * b);
        }
        sums.iter().sum::<f32>()
    };
    each(rows, vectors, width, |row, group, out| out.extend(group.chunks_exact(width).map(|vector| one(row, vector))))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::each;
    use std::arch::x86_64::*;

    /// The products of one row with `$many` vectors, `$lanes` numbers at a time; what is left over one by one.
    macro_rules! dots {
        ($row:expr, $vectors:expr, $many:expr, $lanes:expr, $zero:expr, $load:expr, $fused:expr, $sum:expr) => {{
            let (row, vectors): (&[f32], &[f32]) = ($row, $vectors);
            let (width, mut sums, mut begun) = (row.len(), [$zero; $many], 0);
            assert_eq!(vectors.len(), $many * width);
            while begun + $lanes <= width {
                // SAFETY: `$lanes` numbers are left in the row, and so in each of the vectors, which are as wide.
                let numbers = unsafe { $load(row.as_ptr().add(begun)) };
                for (n, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: as above, and there are `$many` vectors.
                    *sum = $fused(numbers, unsafe { $load(vectors.as_ptr().add(n * width + begun)) }, *sum);
                }
                begun += $lanes;
            }
            let mut found = [0.0f32; $many];
            for (n, found) in found.iter_mut().enumerate() {
                let left = row[begun..].iter().zip(&vectors[n * width + begun..]);
                *found = left.fold($sum(sums[n]), |sum, (a, b)| sum + a * b);
            }
            found
        }};
    }

    /// `dots!` for as many vectors as there are.
    macro_rules! some {
        ($row:expr, $vectors:expr, $out:expr, $($rest:expr),*) => {
            match $vectors.len() / $row.len() {
                1 => $out.extend(dots!($row, $vectors, 1, $($rest),*)),
                2 => $out.extend(dots!($row, $vectors, 2, $($rest),*)),
                3 => $out.extend(dots!($row, $vectors, 3, $($rest),*)),
                4 => $out.extend(dots!($row, $vectors, 4, $($rest),*)),
                5 => $out.extend(dots!($row, $vectors, 5, $($rest),*)),
                6 => $out.extend(dots!($row, $vectors, 6, $($rest),*)),
                7 => $out.extend(dots!($row, $vectors, 7, $($rest),*)),
                _ => $out.extend(dots!($row, $vectors, 8, $($rest),*)),
            }
        };
    }

    #[target_feature(enable = "avx512f")]
    pub fn with_avx512(rows: &[f32], vectors: &[f32], width: usize) -> Vec<f32> {
        each(rows, vectors, width, |row, group, out| {
            some!(row, group, out, 16, _mm512_setzero_ps(), _mm512_loadu_ps, _mm512_fmadd_ps, _mm512_reduce_add_ps)
        })
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn with_avx2(rows: &[f32], vectors: &[f32], width: usize) -> Vec<f32> {
        each(rows, vectors, width, |row, group, out| {
            some!(row, group, out, 8, _mm256_setzero_ps(), _mm256_loadu_ps, _mm256_fmadd_ps, added)
        })
    }

    #[target_feature(enable = "avx2,fma")]
    fn added(lanes: __m256) -> f32 {
        let half = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
        let quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
        _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps::<1>(quarter, quarter)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_variant_is_the_product(
            (width, rows, vectors) in (1usize..70, 0usize..4, 1usize..20).prop_flat_map(|(w, r, v)| (
                Just(w), prop::collection::vec(-2f32..2.0, r * w), prop::collection::vec(-2f32..2.0, v * w),
            )),
        ) {
            let expected: Vec<f64> = rows.chunks_exact(width).flat_map(|row| {
                vectors.chunks_exact(width).map(move |vector| {
                    row.iter().zip(vector).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
                })
            }).collect();
            let mut variants = vec![scores(&rows, &vectors, width), portable(&rows, &vectors, width)];
            #[cfg(target_arch = "x86_64")]
            if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
                // SAFETY: the processor has AVX2 and FMA, checked in the line above.
                variants.push(unsafe { x86::with_avx2(&rows, &vectors, width) });
            }
            for found in variants {
                prop_assert_eq!(found.len(), expected.len());
                for (a, b) in found.iter().zip(&expected) {
                    prop_assert!((f64::from(*a) - b).abs() < 1e-4, "{a} {b}");
                }
            }
        }
    }
}
