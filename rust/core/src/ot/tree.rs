//! Punctured seed trees: one party knows all leaves, the other all but one, at a place only it knows.
//!
//! The classic construction (Goldreich, Goldwasser, Micali): a node's two children are two one-way functions of it.
//! For each level the grower sends the sum of all left and the sum of all right children, each masked by one pad of a
//! random transfer; with the sum of the side that the punctured path does not take, the other party completes the
//! level. The choice bits of the transfers are the (complemented) path, so nothing needs to be corrected. The first
//! level is the two pads themselves.
//!
//! Cost for a tree of depth d: d transfers, 32 (d - 1) bytes. Nothing here branches on or indexes by the path.

use super::Block;
use super::aes::Doubler;
use zeroize::Zeroize;

/// Bytes of the message of one tree.
pub(super) const fn message_len(depth: usize) -> usize {
    32 * (depth - 1)
}

/// All ones if equal, else zero, without a branch.
#[inline(always)]
pub(super) fn equal_mask(a: usize, b: usize) -> Block {
    let x = (a ^ b) as u64;
    let different = (x | x.wrapping_neg()) >> 63;
    (different as u128).wrapping_sub(1)
}

/// Zero or all ones from a bit.
#[inline(always)]
pub(super) fn bit_mask(bit: u8) -> Block {
    ((bit & 1) as u128).wrapping_neg()
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
        for (place, pair) in nodes.chunks_exact_mut(2).enumerate() {
            let here = equal_mask(place, path);
            pair[0] ^= here & fix[0];
            pair[1] ^= here & fix[1];
        }
        path = 2 * path + usize::from(choices[level] ^ 1);
        total = sums[0] ^ sums[1] ^ fix[0] ^ fix[1];
        missing.zeroize();
        fix.zeroize();
    }
    (path, total)
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
}
