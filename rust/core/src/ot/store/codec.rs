//! Correlations to blocks and back. On disk choices are packed into bits; a loaded block has one fixed width an item.

use super::Lane;
use super::lane::BLOCK_ITEMS;
use crate::error::Result;
use crate::field;
use crate::ot::{Block, ReceivedPads, ReceivedPads16};
use crate::party::{Role, Triples};
use zeroize::Zeroizing;

type Bytes = Zeroizing<Vec<u8>>;

const N: usize = BLOCK_ITEMS as usize;

/// Bytes of one item of a loaded block.
pub(super) fn item_bytes(lane: Lane, role: Role) -> usize {
    let sends = lane == Lane::pads(role) || lane == Lane::pads16(role);
    match lane {
        Lane::PadsFromClient | Lane::PadsFromServer if sends => 32,
        Lane::PadsFromClient | Lane::PadsFromServer => 17,
        Lane::Pads16FromClient | Lane::Pads16FromServer if sends => 16,
        Lane::Pads16FromClient | Lane::Pads16FromServer => 2,
        Lane::Triples => 24,
        Lane::Records(_) => 0,
    }
}

/// One block of the sender's pads.
pub(crate) fn sent(pads: &[[Block; 2]]) -> Bytes {
    let mut out = Zeroizing::new(Vec::with_capacity(32 * N));
    for [a, b] in pads {
        out.extend_from_slice(&a.to_le_bytes());
        out.extend_from_slice(&b.to_le_bytes());
    }
    out
}

/// Block `i` of the receiver's pads.
pub(crate) fn received(all: &ReceivedPads, i: usize) -> Bytes {
    let mut out = Zeroizing::new(Vec::with_capacity(N / 8 + 16 * N));
    for eight in all.choices[i * N..(i + 1) * N].chunks(8) {
        out.push(eight.iter().enumerate().fold(0, |byte, (k, &bit)| byte | (bit & 1) << k));
    }
    for pad in &all.pads[i * N..(i + 1) * N] {
        out.extend_from_slice(&pad.to_le_bytes());
    }
    out
}

/// One block of the sender's 1-of-16 pads.
pub(crate) fn sent16(pads: &[[u8; 16]]) -> Bytes {
    Zeroizing::new(pads.concat())
}

/// Block `i` of the receiver's 1-of-16 pads.
pub(crate) fn received16(all: &ReceivedPads16, i: usize) -> Bytes {
    let mut out = Zeroizing::new(Vec::with_capacity(N / 2 + N));
    for two in all.choices[i * N..(i + 1) * N].chunks(2) {
        out.push(two[0] & 15 | two[1] << 4);
    }
    out.extend_from_slice(&all.pads[i * N..(i + 1) * N]);
    out
}

/// Block `i` of some triples.
pub(crate) fn triples(all: &Triples, i: usize) -> Bytes {
    let mut out = Zeroizing::new(Vec::with_capacity(3 * field::packed_len(N, field::P_BITS)));
    for part in [&all.a, &all.b, &all.c] {
        out.extend_from_slice(&Zeroizing::new(field::pack(&part[i * N..(i + 1) * N])));
    }
    out
}

/// A block as it came from the disk, with one fixed width an item.
pub(super) fn expand(lane: Lane, role: Role, block: Bytes) -> Result<Bytes> {
    let width = item_bytes(lane, role);
    let mut out = Zeroizing::new(Vec::with_capacity(width * N));
    match width {
        17 => {
            let (bits, pads) = block.split_at(N / 8);
            for (i, pad) in pads.chunks_exact(16).enumerate() {
                out.push(bits[i / 8] >> (i % 8) & 1);
                out.extend_from_slice(pad);
            }
        }
        2 => {
            let (choices, pads) = block.split_at(N / 2);
            for (i, &pad) in pads.iter().enumerate() {
                out.push(choices[i / 2] >> (4 * (i % 2)) & 15);
                out.push(pad);
            }
        }
        24 => {
            let part = field::packed_len(N, field::P_BITS);
            let parts = [&block[..part], &block[part..2 * part], &block[2 * part..]];
            let mut numbers = Vec::with_capacity(3);
            for bytes in parts {
                numbers.push(Zeroizing::new(field::unpack(bytes, N)?));
            }
            for i in 0..N {
                for part in &numbers {
                    out.extend_from_slice(&part[i].to_le_bytes());
                }
            }
        }
        _ => return Ok(block),
    }
    Ok(out)
}
