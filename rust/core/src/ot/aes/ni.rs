//! The kernels on AES-NI, eight blocks in flight.

use super::{Block, LANES};
use std::arch::x86_64::*;

type Schedule = [__m128i; 11];

fn vectors<const N: usize>(blocks: [u128; N]) -> [__m128i; N] {
    // SAFETY: both are N times 16 bytes without padding, and every bit pattern is valid in both.
    unsafe { std::mem::transmute_copy(&blocks) }
}

fn numbers<const N: usize>(vectors: [__m128i; N]) -> [u128; N] {
    // SAFETY: both are N times 16 bytes without padding, and every bit pattern is valid in both.
    unsafe { std::mem::transmute_copy(&vectors) }
}

/// Eleven round keys (FIPS 197, section 5.2).
#[target_feature(enable = "aes")]
pub(super) fn schedule(key: Block) -> [u128; 11] {
    let [mut last] = vectors([key]);
    let mut keys = [last; 11];
    macro_rules! round {
        ($i:literal, $constant:literal) => {{
            let word = _mm_shuffle_epi32::<0xff>(_mm_aeskeygenassist_si128::<$constant>(last));
            last = _mm_xor_si128(last, _mm_slli_si128::<4>(last));
            last = _mm_xor_si128(last, _mm_slli_si128::<8>(last));
            last = _mm_xor_si128(last, word);
            keys[$i] = last;
        }};
    }
    round!(1, 0x01);
    round!(2, 0x02);
    round!(3, 0x04);
    round!(4, 0x08);
    round!(5, 0x10);
    round!(6, 0x20);
    round!(7, 0x40);
    round!(8, 0x80);
    round!(9, 0x1b);
    round!(10, 0x36);
    numbers(keys)
}

/// Encrypts N blocks in place, one round of all before the next, so that the pipeline stays full.
macro_rules! encrypt {
    ($keys:expr, $state:expr) => {{
        for x in $state.iter_mut() {
            *x = _mm_xor_si128(*x, $keys[0]);
        }
        for key in &$keys[1..10] {
            for x in $state.iter_mut() {
                *x = _mm_aesenc_si128(*x, *key);
            }
        }
        for x in $state.iter_mut() {
            *x = _mm_aesenclast_si128(*x, $keys[10]);
        }
    }};
}

#[target_feature(enable = "aes")]
pub(super) fn stream(keys: &[u128; 11], start: u64, out: &mut [Block]) {
    let keys: Schedule = vectors(*keys);
    for (step, chunk) in out.chunks_mut(LANES).enumerate() {
        let first = start + (step * LANES) as u64;
        let mut state: [__m128i; LANES] = std::array::from_fn(|i| _mm_set_epi64x(0, (first + i as u64) as i64));
        encrypt!(keys, state);
        let blocks = numbers(state);
        chunk.copy_from_slice(&blocks[..chunk.len()]);
    }
}

/// The doubling step on eight nodes: their left and right children.
#[inline]
#[target_feature(enable = "aes")]
fn children(keys: &Schedule, parents: [u128; LANES]) -> [[__m128i; LANES]; 2] {
    let parents = vectors(parents);
    let high = _mm_set_epi64x(-1, 0);
    let mut mixed = parents;
    for x in &mut mixed {
        *x = _mm_xor_si128(_mm_shuffle_epi32::<0b0100_1110>(*x), _mm_and_si128(*x, high));
    }
    let mut left = mixed;
    encrypt!(keys, left);
    for (x, mixed) in left.iter_mut().zip(mixed) {
        *x = _mm_xor_si128(*x, mixed);
    }
    let mut right = left;
    for (x, parent) in right.iter_mut().zip(parents) {
        *x = _mm_xor_si128(*x, parent);
    }
    [left, right]
}

#[target_feature(enable = "aes")]
pub(super) fn double(keys: &[u128; 11], level: &mut [Block], parents: usize) -> [Block; 2] {
    let keys: Schedule = vectors(*keys);
    let zero = _mm_setzero_si128();
    let mut sums = [zero; 2];
    // From the back, so that no parent is overwritten before it is read.
    let mut end = parents;
    while end > 0 {
        let count = (end - 1) % LANES + 1;
        let begin = end - count;
        let mut nodes = [0u128; LANES];
        if count == LANES {
            nodes.copy_from_slice(&level[begin..begin + LANES]);
        } else {
            nodes[..count].copy_from_slice(&level[begin..end]);
        }
        let [left, right] = children(&keys, nodes);
        let mut both = [zero; 2 * LANES];
        for i in 0..LANES {
            (both[2 * i], both[2 * i + 1]) = (left[i], right[i]);
        }
        for (left, right) in left.iter().zip(&right).take(count) {
            sums = [_mm_xor_si128(sums[0], *left), _mm_xor_si128(sums[1], *right)];
        }
        let both = numbers(both);
        if count == LANES {
            level[2 * begin..2 * begin + 2 * LANES].copy_from_slice(&both);
        } else {
            level[2 * begin..2 * end].copy_from_slice(&both[..2 * count]);
        }
        end = begin;
    }
    numbers(sums)
}

#[target_feature(enable = "aes")]
pub(super) fn hash(keys: &[u128; 11], blocks: &mut [Block]) {
    let keys: Schedule = vectors(*keys);
    let step = |chunk: &mut [Block; LANES]| {
        let plain = vectors(*chunk);
        let mut state = plain;
        encrypt!(keys, state);
        for (x, y) in state.iter_mut().zip(plain) {
            *x = _mm_xor_si128(*x, y);
        }
        *chunk = numbers(state);
    };
    let mut chunks = blocks.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        step(chunk.try_into().expect("a chunk of exactly this length"));
    }
    let rest = chunks.into_remainder();
    if !rest.is_empty() {
        let mut padded = [0; LANES];
        padded[..rest.len()].copy_from_slice(rest);
        step(&mut padded);
        rest.copy_from_slice(&padded[..rest.len()]);
    }
}

#[target_feature(enable = "aes")]
pub(super) fn sixteen(keys: &[u128; 11], values: &[Block], offsets: &[Block; 16], out: &mut [[u8; 16]]) {
    let keys: Schedule = vectors(*keys);
    let offsets = vectors(*offsets);
    for (out, &value) in out.iter_mut().zip(values) {
        let [value] = vectors([value]);
        let [low, high] = [lowest_bytes(&keys, value, &offsets[..8]), lowest_bytes(&keys, value, &offsets[8..])];
        let [both] = numbers([_mm_unpacklo_epi64(low, high)]);
        *out = both.to_le_bytes();
    }
}

/// The lowest bytes of the hashes of a value plus each of eight offsets.
#[inline]
#[target_feature(enable = "aes")]
fn lowest_bytes(keys: &Schedule, value: __m128i, offsets: &[__m128i]) -> __m128i {
    let mut plain = [value; LANES];
    for (x, offset) in plain.iter_mut().zip(offsets) {
        *x = _mm_xor_si128(*x, *offset);
    }
    let mut state = plain;
    encrypt!(keys, state);
    for (x, y) in state.iter_mut().zip(plain) {
        *x = _mm_xor_si128(*x, y);
    }
    // By interleaving: bytes of two vectors, of four, of eight.
    let [a, b, c, d, e, f, g, h] = state;
    let two = [_mm_unpacklo_epi8(a, b), _mm_unpacklo_epi8(c, d), _mm_unpacklo_epi8(e, f), _mm_unpacklo_epi8(g, h)];
    _mm_unpacklo_epi32(_mm_unpacklo_epi16(two[0], two[1]), _mm_unpacklo_epi16(two[2], two[3]))
}

#[target_feature(enable = "aes")]
pub(super) fn tweaked_hash<const PER: usize>(keys: &[u128; 11], high: u128, first: u64, blocks: &mut [Block]) {
    let keys: Schedule = vectors(*keys);
    let high = (high >> 64) as i64;
    let mut chunks = blocks.chunks_exact_mut(LANES);
    let step = |chunk: &mut [Block; LANES], at: usize| {
        let mut once = vectors(*chunk);
        encrypt!(keys, once);
        let mut twice = once;
        for (i, x) in twice.iter_mut().enumerate() {
            *x = _mm_xor_si128(*x, _mm_set_epi64x(high, (first + ((at + i) / PER) as u64) as i64));
        }
        encrypt!(keys, twice);
        for (x, y) in twice.iter_mut().zip(&once) {
            *x = _mm_xor_si128(*x, *y);
        }
        *chunk = numbers(twice);
    };
    let mut at = 0;
    for chunk in &mut chunks {
        step(chunk.try_into().expect("a chunk of exactly this length"), at);
        at += LANES;
    }
    let rest = chunks.into_remainder();
    if !rest.is_empty() {
        let mut padded = [0; LANES];
        padded[..rest.len()].copy_from_slice(rest);
        step(&mut padded, at);
        rest.copy_from_slice(&padded[..rest.len()]);
    }
}
