//! How fast the inner loop of the products is, and how fast this processor could be at all: the figures beside which the
//! engine's own times stand.
//!
//! The engine multiplies residues of 25 bits as doubles, one fused multiply-add each. A modulus of the same 150 bits
//! could also be three primes of 50 bits with the integer instructions of AVX-512 IFMA, four instructions a prime and
//! slot (both halves of the product, the quotient's, its reduction), so twelve either way; [`Throughput::ifma_peak`]
//! says what a processor that has them would do, as instructions times lanes a second.

use crate::matmul::multiply_add_rate;

/// One core of this machine, in operations on single numbers a second.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Throughput {
    /// Multiply-adds of the batched product's inner loop, on the variant that it chooses here.
    pub inner_loop: f64,
    /// Fused multiply-adds on doubles, nothing else, from registers: the peak that the inner loop is measured against.
    pub fused_peak: f64,
    /// 52-bit integer multiply-adds from registers; `None` if this processor has no AVX-512 IFMA.
    pub ifma_peak: Option<f64>,
}

impl Throughput {
    /// Measures for about a tenth of a second each: the best of some short runs.
    pub fn measure() -> Self {
        Self { inner_loop: multiply_add_rate(), fused_peak: fused_peak(), ifma_peak: ifma_peak() }
    }
}

/// Steps of one short run; 12 independent chains hide the latency of four or five cycles on two units.
const STEPS: usize = 200_000;
const CHAINS: usize = 12;

/// The best of some runs of `STEPS * CHAINS` vectors of `lanes` numbers.
fn best(lanes: usize, mut run: impl FnMut()) -> f64 {
    let timed = |_| {
        let begun = std::time::Instant::now();
        run();
        (STEPS * CHAINS * lanes) as f64 / begun.elapsed().as_secs_f64()
    };
    (0..20).map(timed).fold(0.0, f64::max)
}

fn fused_peak() -> f64 {
    #[cfg(target_arch = "x86_64")]
    {
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has AVX-512F, checked in the line above.
            return best(8, || unsafe { x86::fused_512() });
        }
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            // SAFETY: the processor has AVX2 and FMA, checked in the line above.
            return best(4, || unsafe { x86::fused_256() });
        }
    }
    best(1, portable)
}

fn ifma_peak() -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("avx512ifma") {
        // SAFETY: the processor has AVX-512 IFMA, checked in the line above.
        return Some(best(8, || unsafe { x86::ifma_512() }));
    }
    None
}

/// A multiplication and an addition, since a fused one without an instruction for it is a call.
fn portable() {
    let mut sums = [1.0f64; CHAINS];
    let (factor, term) = std::hint::black_box((1.000_000_1, 1e-9));
    for _ in 0..STEPS {
        sums.iter_mut().for_each(|sum| *sum = *sum * factor + term);
    }
    std::hint::black_box(sums);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{CHAINS, STEPS};
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// `STEPS` fused multiply-adds in each of `CHAINS` registers of eight doubles.
    #[target_feature(enable = "avx512f")]
    pub fn fused_512() {
        let (factor, term) = (_mm512_set1_pd(black_box(1.000_000_1)), _mm512_set1_pd(black_box(1e-9)));
        let mut sums = [_mm512_set1_pd(1.0); CHAINS];
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = _mm512_fmadd_pd(*sum, factor, term);
            }
        }
        black_box(sums);
    }

    /// The same in registers of four.
    #[target_feature(enable = "avx2,fma")]
    pub fn fused_256() {
        let (factor, term) = (_mm256_set1_pd(black_box(1.000_000_1)), _mm256_set1_pd(black_box(1e-9)));
        let mut sums = [_mm256_set1_pd(1.0); CHAINS];
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = _mm256_fmadd_pd(*sum, factor, term);
            }
        }
        black_box(sums);
    }

    /// 52-bit multiply-adds, low and high halves in turn.
    #[target_feature(enable = "avx512f,avx512ifma")]
    pub fn ifma_512() {
        let (a, b) =
            (_mm512_set1_epi64(black_box(0x000f_1234_5678_9abc)), _mm512_set1_epi64(black_box(0x0003_1111_7777)));
        let mut sums = [a; CHAINS];
        for _ in 0..STEPS / 2 {
            for sum in &mut sums {
                *sum = _mm512_madd52lo_epu64(*sum, a, b);
            }
            for sum in &mut sums {
                *sum = _mm512_madd52hi_epu64(*sum, a, b);
            }
        }
        black_box(sums);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inner_loop_is_not_faster_than_the_machine() {
        let seen = Throughput::measure();
        println!("{seen:?}");
        assert!(seen.inner_loop > 1e7 && seen.inner_loop < 1.25 * seen.fused_peak, "{seen:?}");
        assert!(seen.ifma_peak.is_none_or(|peak| peak > 1e8));
    }
}
