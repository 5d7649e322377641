//! Transfers by SoftSpokenOT (eprint 2022/192, semi-honest), from 128 base transfers to any number.
//!
//! The 128 base transfers are bundled in groups of k into trees of 2^k seeds, of which the *holder* of the secret
//! offset D misses one per group, the one numbered by k bits of D. With r_x the stream of seed x, the *chooser* takes
//! u = sum r_x and v = sum x r_x; the holder, who numbers the seeds by x + D, gets w = v + D u and never needs the
//! missing one. One correction per group makes all groups have the same u, which becomes the choice bits: row j of the
//! transposed matrix is q_j = t_j + u_j D, and hashing q_j, q_j + D (or t_j) gives the pads. With k = 1 this is IKNP.
//!
//! Cost of n transfers: one message of (128/k - 1) n / 8 bytes (15.9, 7.9, 3.9, 1.9 bytes each for k = 1, 2, 4, 8), no
//! answer; 2^k / k AES blocks each. The offset is used only through masks, never as an index or in a branch, but for
//! the numbering of the seeds at the start, which reads all of them for each.

use super::Block;
use super::aes::{Aes, Domain, Doubler, LANES, TweakedHash};
use super::base::{self, BaseKind};
use super::transpose::transpose;
use super::tree;
use crate::error::{Error, Result};
use crate::net::{Channel, Kind};
use crate::random::SecretRng;
use zeroize::{Zeroize, Zeroizing};

/// Transfers that one step of the kernels makes: 8 blocks of each of the 128 columns.
pub(super) const STEP: usize = LANES * 128;
/// Transfers per message: bounds the working memory (2 MiB) whatever is asked for.
const MESSAGE: usize = 128 * STEP;

/// Bits of the offset per group; 1 is IKNP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupBits(usize);

impl GroupBits {
    /// 1, 2, 4 or 8.
    pub fn new(bits: usize) -> Result<Self> {
        match bits {
            1 | 2 | 4 | 8 => Ok(Self(bits)),
            _ => Err(Error::BadArgument(format!("SoftSpoken groups have 1, 2, 4 or 8 bits, not {bits}"))),
        }
    }

    pub(super) fn get(self) -> usize {
        self.0
    }

    fn groups(self) -> usize {
        128 / self.0
    }

    fn tree_bytes(self) -> usize {
        if self.0 == 1 { 0 } else { self.groups() * tree::message_len(self.0) }
    }
}

/// Number of transfers that a request is rounded up to.
pub(super) fn rounded(n: usize) -> usize {
    n.div_ceil(STEP) * STEP
}

/// The side that knows both pads (it holds the offset).
pub(super) struct Holder {
    bits: GroupBits,
    offset: Zeroizing<u128>,
    /// 2^k - 1 streams a group, numbered from 1 by their distance to the missing one.
    streams: Vec<Aes>,
    position: u64,
    pub(super) hash: TweakedHash,
}

/// The side that knows one pad and the choice.
pub(super) struct Chooser {
    bits: GroupBits,
    /// 2^k streams a group.
    streams: Vec<Aes>,
    position: u64,
    pub(super) hash: TweakedHash,
}

/// One of the 128 columns of a step.
type Column = [Block; LANES];

impl Holder {
    /// Runs the base transfers (as their receiver) and takes the trees. `sender` names the party that will send.
    pub(super) fn set_up(
        channel: &mut Channel,
        base_kind: BaseKind,
        bits: GroupBits,
        session: &[u8; 32],
        sender: &str,
        rng: &mut SecretRng,
    ) -> Result<Self> {
        let k = bits.get();
        let mut choices = Zeroizing::new([0u8; 128]);
        rng.fill(&mut choices[..]);
        choices.iter_mut().for_each(|c| *c &= 1);
        let pads = base::receive(channel, base_kind, &Domain::new(session, sender, "base"), &choices[..], rng)?;
        let message = match bits.tree_bytes() {
            0 => Vec::new(),
            bytes => channel.receive(Kind::OtExtension, bytes)?,
        };
        let step = Doubler::new(&Domain::new(session, sender, "softspoken trees"), 0);
        let mut offset = Zeroizing::new(0u128);
        let mut streams = Vec::with_capacity(bits.groups() << k);
        let mut seeds = Zeroizing::new(vec![0; 1 << k]);
        for group in 0..bits.groups() {
            let part = group * k..(group + 1) * k;
            let own = if k == 1 { 0..0 } else { group * tree::message_len(k)..(group + 1) * tree::message_len(k) };
            let (missing, _) = tree::regrow(&step, &choices[part.clone()], &pads[part], &message[own], &mut seeds);
            *offset |= (missing as u128) << (group * k);
            for distance in 1..1usize << k {
                let mut seed = Zeroizing::new(0);
                for (x, s) in seeds.iter().enumerate() {
                    *seed |= s & tree::equal_mask(x ^ distance, missing);
                }
                streams.push(Aes::new(*seed));
            }
        }
        let hash = TweakedHash::new(&Domain::new(session, sender, "softspoken pads"));
        Ok(Self { bits, offset, streams, position: 0, hash })
    }

    /// Both pads of `n` transfers, a multiple of [`STEP`], appended to `out`.
    pub(super) fn extend(&mut self, channel: &mut Channel, n: usize, out: &mut Vec<[Block; 2]>) -> Result<()> {
        debug_assert!(n.is_multiple_of(STEP));
        let (k, groups) = (self.bits.get(), self.bits.groups());
        let mut columns: Zeroizing<Vec<Column>> = Zeroizing::new(vec![[0; LANES]; 128]);
        for first in (0..n).step_by(MESSAGE) {
            let count = (n - first).min(MESSAGE);
            let correction_bytes = (groups - 1) * STEP / 8;
            let message = channel.receive(Kind::OtExtension, count / STEP * correction_bytes)?;
            for correction in message.chunks_exact(correction_bytes) {
                let mut unused = [0; LANES];
                let streams = 1 << k;
                for group in 0..groups {
                    let own = &self.streams[group * (streams - 1)..(group + 1) * (streams - 1)];
                    let columns = &mut columns[group * k..(group + 1) * k];
                    fold(own, 1, self.position, columns, &mut unused);
                    if group > 0 {
                        let part = &correction[(group - 1) * STEP / 8..group * STEP / 8];
                        for (bit, column) in columns.iter_mut().enumerate() {
                            let mask = tree::bit_mask((*self.offset >> (group * k + bit)) as u8);
                            for (x, bytes) in column.iter_mut().zip(part.chunks_exact(16)) {
                                *x ^= mask & u128::from_le_bytes(bytes.try_into().expect("16 bytes"));
                            }
                        }
                    }
                }
                unused.zeroize();
                self.position += LANES as u64;
                for lane in 0..LANES {
                    let mut rows: Zeroizing<[Block; 128]> = Zeroizing::new(std::array::from_fn(|c| columns[c][lane]));
                    transpose(&mut rows);
                    let mut pads = [[0; 2]; 128];
                    for (pair, &q) in pads.iter_mut().zip(rows.iter()) {
                        *pair = [q, q ^ *self.offset];
                    }
                    self.hash.hash::<2>(pads.as_flattened_mut());
                    out.extend_from_slice(&pads);
                    pads.zeroize();
                }
            }
        }
        Ok(())
    }
}

impl Chooser {
    /// Runs the base transfers (as their sender) and grows the trees. `sender` names the party that will send.
    pub(super) fn set_up(
        channel: &mut Channel,
        base_kind: BaseKind,
        bits: GroupBits,
        session: &[u8; 32],
        sender: &str,
        rng: &mut SecretRng,
    ) -> Result<Self> {
        let k = bits.get();
        let pads = base::send(channel, base_kind, &Domain::new(session, sender, "base"), 128, rng)?;
        let step = Doubler::new(&Domain::new(session, sender, "softspoken trees"), 0);
        let mut message = Vec::with_capacity(bits.tree_bytes());
        let mut seeds = Zeroizing::new(vec![0; 1 << k]);
        let mut streams = Vec::with_capacity(bits.groups() << k);
        for group in pads.chunks_exact(k) {
            tree::grow(&step, group, &mut seeds, &mut message);
            streams.extend(seeds.iter().map(|&seed| Aes::new(seed)));
        }
        if k > 1 {
            channel.send(Kind::OtExtension, &message)?;
            channel.flush()?;
        }
        let hash = TweakedHash::new(&Domain::new(session, sender, "softspoken pads"));
        Ok(Self { bits, streams, position: 0, hash })
    }

    /// The choices and pads of `n` transfers, a multiple of [`STEP`], appended to `choices` and `pads`.
    pub(super) fn extend(
        &mut self,
        channel: &mut Channel,
        n: usize,
        choices: &mut Vec<u8>,
        pads: &mut Vec<Block>,
    ) -> Result<()> {
        debug_assert!(n.is_multiple_of(STEP));
        let (k, groups) = (self.bits.get(), self.bits.groups());
        let mut columns: Zeroizing<Vec<Column>> = Zeroizing::new(vec![[0; LANES]; 128]);
        for first in (0..n).step_by(MESSAGE) {
            let count = (n - first).min(MESSAGE);
            let mut message = Vec::with_capacity(count / 8 * (groups - 1));
            for _ in 0..count / STEP {
                let mut common = Zeroizing::new([0; LANES]);
                for group in 0..groups {
                    let own = &self.streams[group << k..(group + 1) << k];
                    let mut sum = Zeroizing::new([0; LANES]);
                    fold(own, 0, self.position, &mut columns[group * k..(group + 1) * k], &mut sum);
                    if group == 0 {
                        *common = *sum;
                    } else {
                        for (x, y) in sum.iter().zip(common.iter()) {
                            message.extend_from_slice(&(x ^ y).to_le_bytes());
                        }
                    }
                }
                self.position += LANES as u64;
                for lane in 0..LANES {
                    let mut rows: Zeroizing<[Block; 128]> = Zeroizing::new(std::array::from_fn(|c| columns[c][lane]));
                    transpose(&mut rows);
                    self.hash.hash::<1>(&mut rows[..]);
                    pads.extend_from_slice(&rows[..]);
                    for byte in common[lane].to_le_bytes() {
                        choices.extend_from_slice(&std::array::from_fn::<u8, 8, _>(|bit| byte >> bit & 1));
                    }
                }
            }
            channel.send(Kind::OtExtension, &message)?;
            channel.flush()?;
        }
        Ok(())
    }
}

/// [`fold_any`] with the widest additions that the processor has.
fn fold(streams: &[Aes], base: usize, position: u64, columns: &mut [Column], sum: &mut Column) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, checked in the line above.
        unsafe { fold_avx2(streams, base, position, columns, sum) };
        return;
    }
    fold_any(streams, base, position, columns, sum);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn fold_avx2(streams: &[Aes], base: usize, position: u64, columns: &mut [Column], sum: &mut Column) {
    fold_any(streams, base, position, columns, sum);
}

/// Sums over the streams of one group. The stream at place i of `streams` has the number x = i + `base`; column j gets
/// the sum of all streams whose number has bit j, `sum` gets the sum of all. Adding up like a carry chain visits each
/// stream once and costs about two additions a stream.
#[inline(always)]
fn fold_any(streams: &[Aes], base: usize, position: u64, columns: &mut [Column], sum: &mut Column) {
    let bits = columns.len();
    columns.fill([0; LANES]);
    // partial[l] is the sum of an even-numbered run of 2^l streams that waits for its odd neighbour.
    let mut partial = [[0; LANES]; 8];
    let mut run = [0; LANES];
    for x in 0..1usize << bits {
        if x < base {
            run = [0; LANES];
        } else {
            streams[x - base].stream(position, &mut run);
        }
        let mut level = 0;
        while x >> level & 1 == 1 {
            for lane in 0..LANES {
                columns[level][lane] ^= run[lane];
                run[lane] ^= partial[level][lane];
            }
            level += 1;
        }
        if level < bits {
            partial[level] = run;
        }
    }
    *sum = run;
    partial.zeroize();
    run.zeroize();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_carry_chain_sums_what_the_definition_says() {
        for bits in [1usize, 2, 4, 8] {
            for base in [0, 1] {
                let streams: Vec<Aes> = (base..1 << bits).map(|x| Aes::new(x as u128 * 3 + 1)).collect();
                let (mut columns, mut sum) = (vec![[7; LANES]; bits], [7; LANES]);
                fold(&streams, base, 40, &mut columns, &mut sum);
                let (mut plain, mut total) = (vec![[0; LANES]; bits], [0; LANES]);
                for (i, stream) in streams.iter().enumerate() {
                    let mut run = [0; LANES];
                    stream.stream(40, &mut run);
                    for (lane, value) in run.into_iter().enumerate() {
                        total[lane] ^= value;
                        for (bit, column) in plain.iter_mut().enumerate() {
                            column[lane] ^= if (i + base) >> bit & 1 == 1 { value } else { 0 };
                        }
                    }
                }
                assert_eq!((columns, sum), (plain, total));
            }
        }
    }
}
