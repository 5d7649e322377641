//! The expand-convolute code of silent transfers (Raghuraman, Rindal, Tanguy, eprint 2023/882).
//!
//! It compresses 2m noisy values into m that look independent: y = x' + B A A' x'', where x', x'' are the halves of x.
//! A and A' are convolutions (each position is added to the 24 that follow it with random public coefficients, and to
//! the 25th always, around the end), B is sparse (seven positions per output, four of them one in each quarter).
//! Everything is linear over GF(2) and public; only the values are secret, and no step looks at them.
//!
//! The matrices come from a public seed that is fresh for every batch. Cost per output: 2 x 25 masked additions, seven
//! scattered reads, one and a half AES blocks of public randomness.

use super::Block;
use super::aes::{Aes, Domain};

/// Positions that a convolution reaches by random coefficients; one more is always reached.
pub(super) const WINDOW: usize = 24;
/// Positions that each output reads.
pub(super) const WEIGHT: usize = 7;
/// Zeros that the buffers carry behind their end, for what a convolution pushes over it.
pub(super) const PAD: usize = 32;
/// Values whose public randomness is made at a time.
const CHUNK: usize = 256;

/// One code: a seed and a size.
pub(super) struct Code {
    outputs: usize,
    convolutions: [Aes; 2],
    expander: Aes,
}

impl Code {
    /// The code number `index` of a domain, for 2^log_outputs outputs.
    pub(super) fn new(domain: &Domain, index: u64, log_outputs: usize) -> Self {
        // One block has room for the seven positions of an output.
        assert!((10..=18).contains(&log_outputs));
        Self {
            outputs: 1 << log_outputs,
            convolutions: [Aes::public(domain, index, 4), Aes::public(domain, index, 5)],
            expander: Aes::public(domain, index, 6),
        }
    }

    /// The convolutions' coefficients for one chunk of positions: bit k of a word is for the position k + 1 later.
    fn coefficients(&self, pass: usize, chunk: usize, words: &mut [u32; CHUNK]) {
        let mut blocks = [0; CHUNK / 4];
        self.convolutions[pass].stream((chunk * CHUNK / 4) as u64, &mut blocks);
        for (four, block) in words.chunks_exact_mut(4).zip(blocks) {
            for (i, word) in four.iter_mut().enumerate() {
                *word = (block >> (32 * i)) as u32 & ((1 << WINDOW) - 1);
            }
        }
    }

    /// The positions in the second half that the outputs of one chunk read: one in each quarter, three anywhere.
    fn positions(&self, chunk: usize, places: &mut [[u32; WEIGHT]; CHUNK]) {
        let log = self.outputs.ilog2();
        let (all, quarter) = (self.outputs as u64 - 1, self.outputs as u64 / 4);
        let mut blocks = [0; CHUNK];
        self.expander.stream((chunk * CHUNK) as u64, &mut blocks);
        for (place, block) in places.iter_mut().zip(blocks) {
            let (low, high) = (block as u64, (block >> 64) as u64);
            for (i, p) in place.iter_mut().enumerate() {
                *p = if i < 4 {
                    (low >> (i as u32 * (log - 2)) & (quarter - 1)) + i as u64 * quarter
                } else {
                    high >> ((i as u32 - 4) * log) & all
                } as u32;
            }
        }
    }

    /// Compresses blocks. The first m of `x` become the result; `x` has 2m values and [`PAD`] zeros behind them.
    pub(super) fn compress(&self, x: &mut [Block]) {
        debug_assert_eq!(x.len(), 2 * self.outputs + PAD);
        let (first, second) = x.split_at_mut(self.outputs);
        self.convolve(second);
        let mut places = [[0; WEIGHT]; CHUNK];
        for (chunk, out) in first.chunks_exact_mut(CHUNK).enumerate() {
            self.positions(chunk, &mut places);
            for (value, place) in out.iter_mut().zip(&places) {
                *value = place.iter().fold(*value, |sum, &p| sum ^ second[p as usize]);
            }
        }
    }

    /// The same for blocks and, with the same matrices, for small values (up to four bits in a byte).
    pub(super) fn compress_both(&self, x: &mut [Block], u: &mut [u8]) {
        debug_assert_eq!(x.len(), 2 * self.outputs + PAD);
        debug_assert_eq!(u.len(), 2 * self.outputs);
        let (first, second) = x.split_at_mut(self.outputs);
        let (first_small, second_small) = u.split_at_mut(self.outputs);
        self.convolve(second);
        self.convolve_small(second_small);
        let mut places = [[0; WEIGHT]; CHUNK];
        let chunks = first.chunks_exact_mut(CHUNK).zip(first_small.chunks_exact_mut(CHUNK));
        for (chunk, (out, out_small)) in chunks.enumerate() {
            self.positions(chunk, &mut places);
            for ((value, small), place) in out.iter_mut().zip(out_small).zip(&places) {
                // Sums in registers: through the references every step would wait for the store before it.
                let (mut sum, mut sum_small) = (*value, *small);
                for &p in place {
                    sum ^= second[p as usize];
                    sum_small ^= second_small[p as usize];
                }
                (*value, *small) = (sum, sum_small);
            }
        }
    }

    /// Both convolutions on m blocks with [`PAD`] zeros behind them.
    fn convolve(&self, x: &mut [Block]) {
        let mut words = [0; CHUNK];
        for pass in 0..2 {
            for chunk in 0..self.outputs / CHUNK {
                self.coefficients(pass, chunk, &mut words);
                convolve_chunk(&mut x[chunk * CHUNK..(chunk + 1) * CHUNK + PAD], &words);
            }
            let (body, over) = x.split_at_mut(self.outputs);
            for (value, extra) in body.iter_mut().zip(over) {
                *value ^= std::mem::take(extra);
            }
        }
    }

    /// Both convolutions on m values of four bits. What is still to be added to the next 25 positions lives in one
    /// 128-bit number, four bits a position.
    fn convolve_small(&self, u: &mut [u8]) {
        const SPREAD: [u32; 256] = spread_table();
        let mut words = [0; CHUNK];
        for pass in 0..2 {
            let mut pending = 0u128;
            for (chunk, values) in u.chunks_exact_mut(CHUNK).enumerate() {
                self.coefficients(pass, chunk, &mut words);
                for (value, word) in values.iter_mut().zip(words) {
                    *value ^= (pending & 15) as u8;
                    // The table is indexed by the public coefficients.
                    let [a, b, c, _] = word.to_le_bytes().map(|byte| SPREAD[byte as usize] as u128);
                    let taps = a | b << 32 | c << 64 | 1 << 96;
                    pending = (pending >> 4) ^ (taps * *value as u128);
                }
            }
            for (i, value) in u.iter_mut().take(WINDOW + 1).enumerate() {
                *value ^= (pending >> (4 * i)) as u8 & 15;
            }
        }
    }
}

/// Bit i of a byte goes to bit 4i.
const fn spread_table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut bit = 0;
        while bit < 8 {
            table[byte] |= ((byte as u32 >> bit) & 1) << (4 * bit);
            bit += 1;
        }
        byte += 1;
    }
    table
}

fn convolve_chunk(x: &mut [Block], words: &[u32; CHUNK]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has AVX-512F, checked in the line above.
        unsafe { avx512::convolve_chunk(x, words) };
        return;
    }
    convolve_chunk_avx2(x, words);
}

/// Without AVX-512.
fn convolve_chunk_avx2(x: &mut [Block], words: &[u32; CHUNK]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, checked in the line above.
        unsafe { avx2::convolve_chunk(x, words) };
        return;
    }
    convolve_chunk_portable(x, words);
}

fn convolve_chunk_portable(x: &mut [Block], words: &[u32; CHUNK]) {
    for (i, word) in words.iter().enumerate() {
        let value = x[i];
        for k in 0..WINDOW {
            x[i + 1 + k] ^= value & ((word >> k & 1) as u128).wrapping_neg();
        }
        x[i + 1 + WINDOW] ^= value;
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{Block, CHUNK, PAD, WINDOW};
    use std::arch::x86_64::*;

    /// Registers of four blocks that the values of one register reach.
    const REACH: usize = 8;

    /// Four positions a step. The next 32 positions are in eight registers, which move up by one a step.
    #[target_feature(enable = "avx512f")]
    pub(super) fn convolve_chunk(x: &mut [Block], words: &[u32; CHUNK]) {
        assert!(x.len() >= CHUNK + PAD);
        // Bit 4j + l of the taps, counted from the step's first position, is for block l of register j.
        let bits: [__m512i; REACH] = std::array::from_fn(|j| {
            let bit = |l: usize| 1i64 << (4 * j + l);
            _mm512_setr_epi64(bit(0), bit(0), bit(1), bit(1), bit(2), bit(2), bit(3), bit(3))
        });
        let mut ahead = [_mm512_setzero_si512(); REACH];
        for (j, register) in ahead.iter_mut().enumerate().take(REACH - 1) {
            // SAFETY: CHUNK + PAD blocks are there, checked above; this reads the first 28.
            *register = unsafe { _mm512_loadu_si512(x.as_ptr().add(4 * j).cast()) };
        }
        for (step, four) in words.chunks_exact(4).enumerate() {
            let last = x[4 * step + 4 * (REACH - 1)..4 * step + 4 * REACH].as_ptr();
            // SAFETY: `last` covers four blocks, bounds checked in the line above.
            ahead[REACH - 1] = unsafe { _mm512_loadu_si512(last.cast()) };
            let tap = |r: usize| _mm512_set1_epi64(((u64::from(four[r]) | 1 << WINDOW) << (r + 1)) as i64);
            let taps = [tap(0), tap(1), tap(2), tap(3)];
            // Each of the four values is final when those before it have been added.
            let mut own = ahead[0];
            let add =
                |sum, taps, bits, value| _mm512_mask_xor_epi64(sum, _mm512_test_epi64_mask(taps, bits), sum, value);
            let v0 = _mm512_shuffle_i64x2::<0x00>(own, own);
            own = add(own, taps[0], bits[0], v0);
            let v1 = _mm512_shuffle_i64x2::<0x55>(own, own);
            own = add(own, taps[1], bits[0], v1);
            let v2 = _mm512_shuffle_i64x2::<0xaa>(own, own);
            own = add(own, taps[2], bits[0], v2);
            let v3 = _mm512_shuffle_i64x2::<0xff>(own, own);
            let place = x[4 * step..4 * step + 4].as_mut_ptr();
            // SAFETY: `place` covers four blocks, bounds checked in the line above.
            unsafe { _mm512_storeu_si512(place.cast(), own) };
            for j in 1..REACH {
                let mut sum = ahead[j];
                for (taps, value) in taps.iter().zip([v0, v1, v2, v3]) {
                    sum = add(sum, *taps, bits[j], value);
                }
                ahead[j - 1] = sum;
            }
        }
        for (j, register) in ahead.iter().enumerate().take(REACH - 1) {
            let place = x[CHUNK + 4 * j..CHUNK + 4 * j + 4].as_mut_ptr();
            // SAFETY: `place` covers four blocks, bounds checked in the line above.
            unsafe { _mm512_storeu_si512(place.cast(), *register) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{Block, CHUNK, PAD, WINDOW};
    use std::arch::x86_64::*;

    /// Two positions a step, so that every read and write covers the same aligned pair of blocks as the one before it
    /// and the processor forwards them.
    #[target_feature(enable = "avx2")]
    pub(super) fn convolve_chunk(x: &mut [Block], words: &[u32; CHUNK]) {
        assert!(x.len() >= CHUNK + PAD);
        let bits: [__m256i; WINDOW / 2] = std::array::from_fn(|pair| {
            let (a, b) = (1 << (2 * pair), 2 << (2 * pair));
            _mm256_setr_epi32(a, a, a, a, b, b, b, b)
        });
        for (step, two) in words.chunks_exact(2).enumerate() {
            let at = 2 * step;
            let first = x[at];
            x[at + 1] ^= first & ((two[0] & 1) as u128).wrapping_neg();
            let second = x[at + 1];
            // Pair j covers the positions at + 2 + 2j and the next: taps 2j + 1, 2j + 2 of the first value (counted
            // from 0; tap 24 is always set), 2j and 2j + 1 of the second.
            let from_first = _mm256_set1_epi32((two[0] >> 1 | 1 << (WINDOW - 1)) as i32);
            let from_second = _mm256_set1_epi32(two[1] as i32);
            let first = broadcast(first);
            let wide = broadcast(second);
            for (j, bit) in bits.iter().enumerate() {
                let mask = |word| _mm256_cmpeq_epi32(_mm256_and_si256(word, *bit), *bit);
                let add = _mm256_xor_si256(
                    _mm256_and_si256(mask(from_first), first),
                    _mm256_and_si256(mask(from_second), wide),
                );
                let place = x[at + 2 + 2 * j..at + 4 + 2 * j].as_mut_ptr().cast::<__m256i>();
                // SAFETY: `place` covers two blocks of the slice, bounds checked in the line above.
                unsafe { _mm256_storeu_si256(place, _mm256_xor_si256(_mm256_loadu_si256(place), add)) };
            }
            x[at + 2 + WINDOW] ^= second;
        }
    }

    #[target_feature(enable = "avx2")]
    fn broadcast(block: Block) -> __m256i {
        _mm256_broadcastsi128_si256(_mm_set_epi64x((block >> 64) as i64, block as i64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SecretRng;

    /// The obvious twin: one position after the other, one coefficient after the other.
    fn plain(code: &Code, x: &[Block]) -> Vec<Block> {
        let m = code.outputs;
        let mut second = x[m..2 * m].to_vec();
        let mut words = [0; CHUNK];
        for pass in 0..2 {
            for i in 0..m {
                if i % CHUNK == 0 {
                    code.coefficients(pass, i / CHUNK, &mut words);
                }
                for k in 0..=WINDOW {
                    if k == WINDOW || words[i % CHUNK] >> k & 1 == 1 {
                        second[(i + 1 + k) % m] ^= second[i];
                    }
                }
            }
        }
        let mut places = [[0; WEIGHT]; CHUNK];
        (0..m)
            .map(|i| {
                if i % CHUNK == 0 {
                    code.positions(i / CHUNK, &mut places);
                }
                places[i % CHUNK].iter().fold(x[i], |sum, &p| sum ^ second[p as usize])
            })
            .collect()
    }

    #[test]
    fn the_kernels_agree_with_the_plain_twin_on_blocks_and_on_small_values() {
        let mut rng = SecretRng::from_os();
        let domain = Domain::new(&[1; 32], "client", "test");
        for log in [10, 12] {
            let code = Code::new(&domain, 9, log);
            let n = 2usize << log;
            let mut small: Vec<u8> = (0..n).map(|_| (rng.next_u64() & 15) as u8).collect();
            let mut x: Vec<Block> = (0..n).map(|_| rng.next_u64() as u128 | (rng.next_u64() as u128) << 64).collect();
            let expected = plain(&code, &x);
            let expected_small = plain(&code, &small.iter().map(|&s| s as u128).collect::<Vec<_>>());
            x.resize(n + PAD, 0);
            let mut once = x.clone();
            code.compress(&mut once);
            assert_eq!(&once[..n / 2], expected);
            code.compress_both(&mut x, &mut small);
            assert_eq!(&x[..n / 2], expected);
            assert!(small.iter().zip(&expected_small).all(|(&a, &b)| a as u128 == b));

            let mut a: Vec<Block> = (0..CHUNK + PAD).map(|i| expected[i]).collect();
            let (mut b, mut c) = (a.clone(), a.clone());
            let mut words = [0; CHUNK];
            code.coefficients(0, 1, &mut words);
            convolve_chunk(&mut a, &words);
            convolve_chunk_avx2(&mut b, &words);
            convolve_chunk_portable(&mut c, &words);
            assert!(a == c && b == c);
        }
    }

    #[test]
    fn the_positions_cover_every_quarter() {
        let code = Code::new(&Domain::new(&[1; 32], "client", "test"), 0, 12);
        let mut places = [[0; WEIGHT]; CHUNK];
        code.positions(3, &mut places);
        for place in places {
            for (i, &p) in place.iter().enumerate() {
                assert!(p < 4096);
                assert!(i >= 4 || p / 1024 == i as u32);
            }
        }
    }
}
