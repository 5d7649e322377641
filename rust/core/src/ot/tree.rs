//! Punctured seed trees: one party knows all leaves, the other all but one, at a place only it knows.
//!
//! A tree in the manner of Goldreich, Goldwasser and Micali, whose nodes' two children add up to the node
//! ([`Doubler`], the half-tree of eprint 2022/1431): one hash makes both, and every level has the same sum as the first.
//! For each level the grower sends the sum of all left and the sum of all right children, each masked by one pad of a
//! random transfer; with the sum of the side that the punctured path does not take, the other party completes the
//! level. The choice bits of the transfers are the (complemented) path, so nothing needs to be corrected. The first
//! level is the two pads themselves, of which the other party has one: their sum, which is the sum of all leaves, is as
//! good as a fresh random number to it, and so is every node of the path (circular correlation robustness of the hash).
//!
//! Cost for a tree of depth d: d transfers, 32 (d - 1) bytes. Nothing here branches on or indexes by the path.

use super::Block;
use super::aes::Doubler;
use std::hint::black_box;
use zeroize::Zeroize;

/// Bytes of the message of one tree.
pub(super) const fn message_len(depth: usize) -> usize {
    32 * (depth - 1)
}

/// All ones if equal, else zero, without a branch.
#[inline(always)]
pub(super) fn equal_mask(a: usize, b: usize) -> Block {
    let x = (a ^ b) as u64;
    // A compiler that knows that this is 0 or 1 may branch on it where the mask is used.
    let different = black_box((x | x.wrapping_neg()) >> 63);
    (different as u128).wrapping_sub(1)
}

/// Zero or all ones from a bit.
#[inline(always)]
pub(super) fn bit_mask(bit: u8) -> Block {
    (black_box(u64::from(bit & 1)) as u128).wrapping_neg()
}

/// Grows one tree from the transfers' pads (one pair a level) into `leaves`; appends its message. Returns the sum of
/// all leaves.
pub(super) fn grow(step: &Doubler, pads: &[[Block; 2]], leaves: &mut [Block], message: &mut Vec<u8>) -> Block {
    debug_assert_eq!(leaves.len(), 1 << pads.len());
    leaves[..2].copy_from_slice(&pads[0]);
    let mut total = pads[0][0] ^ pads[0][1];
    for (level, pad) in pads.iter().enumerate().skip(1) {
        let sums = step.double(&mut leaves[..2 << level]);
        for side in 0..2 {
            message.extend_from_slice(&(sums[side] ^ pad[side]).to_le_bytes());
        }
        total = sums[0] ^ sums[1];
    }
    total
}

/// Regrows a tree from the pads that were received and its message. `leaves[path]` is zero; returns the path and the
/// sum of all other leaves. The message has [`message_len`] bytes, which the caller has checked.
pub(super) fn regrow(
    step: &Doubler,
    choices: &[u8],
    pads: &[Block],
    message: &[u8],
    leaves: &mut [Block],
) -> (usize, Block) {
    debug_assert_eq!(leaves.len(), 1 << pads.len());
    debug_assert_eq!(message.len(), message_len(pads.len()));
    // The place on the path is kept at zero. It has the known children of zero, taken out of every sum again.
    let hollow = step.children(0);
    let keep = bit_mask(choices[0]);
    leaves[0] = pads[0] & !keep;
    leaves[1] = pads[0] & keep;
    let mut path = usize::from(choices[0] ^ 1);
    let mut total = pads[0];
    for level in 1..pads.len() {
        let nodes = &mut leaves[..2 << level];
        let sums = step.double(nodes);
        let sent = &message[32 * (level - 1)..32 * level];
        let sent: [Block; 2] =
            [0, 1].map(|i| u128::from_le_bytes(sent[16 * i..16 * i + 16].try_into().expect("16 bytes")));
        // The sum over side c of all true nodes, minus what we have, is the child beside the path.
        let right = bit_mask(choices[level]);
        let pick = |pair: [Block; 2]| (pair[0] & !right) | (pair[1] & right);
        let mut missing = pick(sent) ^ pads[level] ^ pick(sums) ^ pick(hollow);
        let mut fix = [hollow[0] ^ (missing & !right), hollow[1] ^ (missing & right)];
        add_to_pair(nodes, path, fix);
        path = 2 * path + usize::from(choices[level] ^ 1);
        total = sums[0] ^ sums[1] ^ fix[0] ^ fix[1];
        missing.zeroize();
        fix.zeroize();
    }
    (path, total)
}

/// Adds `values` to the pair number `place`. Reads and writes every pair alike.
fn add_to_pair(nodes: &mut [Block], place: usize, values: [Block; 2]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, checked in the line above.
        unsafe { avx2::add_to_pair(nodes, place, values) };
        return;
    }
    add_to_pair_portable(nodes, place, values);
}

fn add_to_pair_portable(nodes: &mut [Block], place: usize, values: [Block; 2]) {
    for (at, pair) in nodes.chunks_exact_mut(2).enumerate() {
        let here = equal_mask(at, place);
        pair[0] ^= here & values[0];
        pair[1] ^= here & values[1];
    }
}

/// Adds `value` to the node number `place`, in the same manner.
pub(super) fn add_to_node(nodes: &mut [Block], place: usize, value: Block) {
    let right = bit_mask(place as u8);
    add_to_pair(nodes, place / 2, [value & !right, value & right]);
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::Block;
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2")]
    pub(super) fn add_to_pair(nodes: &mut [Block], place: usize, values: [Block; 2]) {
        let halves = |x: Block| [x as i64, (x >> 64) as i64];
        let ([a, b], [c, d]) = (halves(values[0]), halves(values[1]));
        let values = _mm256_setr_epi64x(a, b, c, d);
        let (place, one) = (_mm256_set1_epi64x(place as i64), _mm256_set1_epi64x(1));
        let mut at = _mm256_setzero_si256();
        for pair in nodes.chunks_exact_mut(2) {
            let here = _mm256_and_si256(_mm256_cmpeq_epi64(at, place), values);
            let pair = pair.as_mut_ptr().cast::<__m256i>();
            // SAFETY: the pair is two blocks, 32 bytes.
            unsafe { _mm256_storeu_si256(pair, _mm256_xor_si256(_mm256_loadu_si256(pair), here)) };
            at = _mm256_add_epi64(at, one);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ot::aes::Domain;
    use crate::random::SecretRng;

    #[test]
    fn all_leaves_but_the_punctured_one_agree() {
        let mut rng = SecretRng::from_os();
        let mut block = || rng.next_u64() as u128 | (rng.next_u64() as u128) << 64;
        for depth in 1..9 {
            let step = Doubler::new(&Domain::new(&[0; 32], "client", "test"), depth as u64);
            for wanted in [0, 1, (1 << depth) - 1, block() as usize % (1 << depth)] {
                let pads: Vec<[Block; 2]> = (0..depth).map(|_| [block(), block()]).collect();
                let choices: Vec<u8> = (0..depth).map(|l| 1 ^ (wanted >> (depth - 1 - l) & 1) as u8).collect();
                let got: Vec<Block> = pads.iter().zip(&choices).map(|(p, &c)| p[c as usize]).collect();
                let (mut all, mut some, mut message) = (vec![0; 1 << depth], vec![0; 1 << depth], Vec::new());
                let total = grow(&step, &pads, &mut all, &mut message);
                assert_eq!(message.len(), message_len(depth));
                let (path, rest) = regrow(&step, &choices, &got, &message, &mut some);
                assert_eq!(path, wanted);
                assert_eq!(all.iter().fold(0, |a, b| a ^ b), total);
                assert_eq!(rest ^ all[path], total);
                for i in 0..1 << depth {
                    assert_eq!(some[i] == all[i], i != path);
                }
                assert_eq!(some[path], 0);
            }
        }
    }

    #[test]
    fn masks_are_exact() {
        for a in 0..64usize {
            for b in 0..64usize {
                assert_eq!(equal_mask(a, b), if a == b { Block::MAX } else { 0 });
            }
        }
        assert_eq!((bit_mask(0), bit_mask(1)), (0, Block::MAX));
    }

    #[test]
    fn a_value_is_added_to_one_node_only() {
        let mut rng = SecretRng::from_os();
        let mut block = || rng.next_u64() as u128 | (rng.next_u64() as u128) << 64;
        for n in [2usize, 4, 64] {
            for place in 0..n {
                let before: Vec<Block> = (0..n).map(|_| block()).collect();
                let (value, pair) = (block(), [block(), block()]);
                let (mut fast, mut slow) = (before.clone(), before.clone());
                add_to_pair(&mut fast, place / 2, pair);
                add_to_pair_portable(&mut slow, place / 2, pair);
                assert_eq!(fast, slow);
                let mut one = before.clone();
                add_to_node(&mut one, place, value);
                assert!((0..n).all(|i| one[i] ^ before[i] == if i == place { value } else { 0 }));
            }
        }
    }
}
