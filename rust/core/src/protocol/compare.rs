//! Comparison: a millionaires' tree with leaves of four bits.
//!
//! The server's number a and the client's number b are cut into digits of four bits. A leaf is one 1-of-16 transfer: the
//! client's digit chooses among the server's sixteen answers ([a > v], [a = v]), two bits each under the pads. Leaves are
//! joined in pairs, most significant digits first: (gt, eq) = (gt_hi XOR eq_hi gt_lo, eq_hi eq_lo), a bit times a string
//! of two bits; the lowest node of a level carries no eq.

use super::boolean::bit_times_pair;
use super::correlate::Wiped;
use super::wire::{Reader, Writer, gather};
use super::wrap::{MAX_KAPPA, to_ring};
use super::{Bits, same_length, step_on};
use crate::error::{Error, Result};
use crate::field::{self, P};
use crate::net::Kind;
use crate::party::Party;

/// Random 1-of-16 transfers fetched at once.
const BATCH: usize = 1 << 20;

/// [x < y]. What decides is the sign of x - y, for which everything holds that [`is_negative`] says of its x. kappa = 41
/// covers every value.
///
/// Cost: see [`is_negative`].
pub fn less_than(party: &mut Party, x: &[u64], y: &[u64], kappa: u32, drop_bits: u32) -> Result<Bits> {
    same_length("less_than", x.len(), y.len())?;
    let difference: Vec<u64> = x.iter().zip(y).map(|(&x, &y)| field::sub(x, y)).collect();
    is_negative(party, &difference, kappa, drop_bits)
}

/// [x < 0] for |x| < p/4 and
///
/// * with drop_bits = 0: |x| <= 2^(kappa - 1) - 1; the answer is exact;
/// * otherwise: |x| < 2^drop_bits (2^(kappa - 1) - 1), because what is left of x is rounded down or up and must not wrap;
///   the answer may be 0 where -2^drop_bits <= x < 0, and with drop_bits > 16 it may be 1 where 0 <= x < 2^16.
///
/// A larger |x| gives a meaningless answer. From kappa + drop_bits = 40 on, the shares are compared as they are, with 40 - drop_bits bits; below that, they go
/// to Z_2^kappa first ([`to_ring`]) and kappa - 1 bits are compared.
///
/// Cost of comparing b bits, q = ceil(b / 4) leaves: one round there and back for the leaves, ceil(log2 q) for the tree;
/// 19 + 34 (q - 1) + 6 (q - 1) - 2 ceil(log2 q) bits for b a multiple of 4; q transfers 1-of-16 and 2 (q - 1) transfers.
/// All 41 bits: 5 rounds, 371 bits, 10 + 18 transfers. Memory while it runs: about 12 bytes a leaf.
pub fn is_negative(party: &mut Party, x: &[u64], kappa: u32, drop_bits: u32) -> Result<Bits> {
    check_bits(kappa, drop_bits)?;
    step_on(party, "compare", x.len(), |party| {
        if kappa + drop_bits < 40 {
            let ring = to_ring(party, x, drop_bits, kappa)?;
            return ring_sign(party, &ring, kappa);
        }
        // With H = (p + 1) / 2, high = [z >= H] and z = high * (H - 1) + r for each share, 0 <= r < H: x is negative exactly if
        // high_0 XOR high_1 XOR [r_0 + r_1 >= H]. Where the highs differ the threshold is sharp (it is p for the sum
        // of the shares); where they agree it lies in the gap that |x| < p/4 leaves.
        const H: u64 = P.div_ceil(2);
        let client = party.role.is_client();
        let (mut highs, mut low) = (Vec::with_capacity(x.len()), Vec::with_capacity(x.len()));
        for &z in x {
            let high = (H - 1).wrapping_sub(z) >> 63;
            let r = z - ((H - 1) & high.wrapping_neg());
            // Carry, at the server H - r > r', would be 0: the answer is the negation of the comparison.
            highs.push(high as u8 ^ u8::from(client));
            low.push(if client { r } else { H - r } >> drop_bits);
        }
        let greater = millionaires(party, &low, 40 - drop_bits)?;
        Ok(greater.iter().zip(&highs).map(|(&g, &h)| g ^ h).collect())
    })
}

/// Refuses bits that values do not have.
pub(super) fn check_bits(kappa: u32, drop_bits: u32) -> Result<()> {
    if (2..=41).contains(&kappa) && drop_bits <= 32 && kappa + drop_bits <= 41 {
        Ok(())
    } else {
        Err(Error::BadArgument(format!("a comparison of {kappa} bits above {drop_bits} dropped ones")))
    }
}

/// [x < 0] for a ring value read as signed, -2^(kappa-1) <= x < 2^(kappa-1). Exact.
///
/// Cost: as [`is_negative`] with b = kappa - 1.
pub fn ring_is_negative(party: &mut Party, x: &[u64], kappa: u32) -> Result<Bits> {
    if !(2..=MAX_KAPPA).contains(&kappa) {
        return Err(Error::BadArgument(format!("a ring of {kappa} bits; 2 to {MAX_KAPPA} have a sign")));
    }
    step_on(party, "compare", x.len(), |party| ring_sign(party, x, kappa))
}

/// The top bit of a sum: both top bits and the carry into them.
fn ring_sign(party: &mut Party, x: &[u64], kappa: u32) -> Result<Bits> {
    let client = party.role.is_client();
    let mask = (1u64 << (kappa - 1)) - 1;
    // low_s + low_c >= 2^(kappa-1) if and only if low_s > mask - low_c.
    let low: Vec<u64> = x.iter().map(|&v| if client { mask - (v & mask) } else { v & mask }).collect();
    let carry = millionaires(party, &low, kappa - 1)?;
    Ok(carry.iter().zip(x).map(|(&c, &v)| c ^ ((v >> (kappa - 1)) & 1) as u8).collect())
}

/// [x = y], for all of Z_p.
///
/// Cost: one round there and back, 4 more; 230 bits; 10 transfers 1-of-16 and 20 transfers.
pub fn equal(party: &mut Party, x: &[u64], y: &[u64]) -> Result<Bits> {
    same_length("equal", x.len(), y.len())?;
    step_on(party, "equal", x.len(), |party| {
        let client = party.role.is_client();
        let mine: Vec<u64> =
            x.iter().zip(y).map(|(&x, &y)| if client { field::sub(y, x) } else { field::sub(x, y) }).collect();
        let leaves: Vec<Leaf> = (0..10).map(|l| Leaf { shift: 4 * l, width: 4, greater: false, equal: true }).collect();
        let mut bits: Vec<Bits> = run_leaves(party, &mine, &leaves)?.into_iter().map(|(_, eq)| eq).collect();
        // The 41st bit needs no transfer: equal is the negation of the exclusive or.
        bits.push(mine.iter().map(|&v| (v >> 40) as u8 ^ u8::from(client)).collect());
        while bits.len() > 1 {
            let pairs = bits.len() / 2;
            let left = bits[..pairs].concat();
            let right = bits[pairs..2 * pairs].concat();
            let joined = bit_times_pair(party, &left, &right, &[])?.0;
            let rest = bits.split_off(2 * pairs);
            bits = joined.chunks(x.len()).map(<[u8]>::to_vec).collect();
            bits.extend(rest);
        }
        Ok(bits.pop().unwrap_or_default())
    })
}

/// [server's number > client's number], numbers of `bits` bits, each party's own in `mine`.
fn millionaires(party: &mut Party, mine: &[u64], bits: u32) -> Result<Bits> {
    let n = mine.len();
    let count = bits.div_ceil(4);
    let leaves: Vec<Leaf> =
        (0..count).map(|l| Leaf { shift: 4 * l, width: (bits - 4 * l).min(4), greater: true, equal: l > 0 }).collect();
    let mut level = run_leaves(party, mine, &leaves)?;
    while level.len() > 1 {
        // The lowest node comes last: its strings have one bit.
        let nodes = level.len() / 2;
        let order: Vec<usize> = (1..nodes).chain([0]).collect();
        let (mut a, mut gt, mut eq) = (Vec::with_capacity(nodes * n), Vec::with_capacity(nodes * n), Vec::new());
        for &node in &order {
            a.extend_from_slice(&level[2 * node + 1].1);
            gt.extend_from_slice(&level[2 * node].0);
            if node > 0 {
                eq.extend_from_slice(&level[2 * node].1);
            }
        }
        let (gt, eq) = bit_times_pair(party, &a, &gt, &eq)?;
        let mut next: Vec<(Bits, Bits)> = vec![Default::default(); nodes];
        for (at, &node) in order.iter().enumerate() {
            let range = at * n..(at + 1) * n;
            next[node].0 = super::xor(&level[2 * node + 1].0, &gt[range.clone()]);
            if node > 0 {
                next[node].1 = eq[range].to_vec();
            }
        }
        if level.len() % 2 == 1 {
            next.extend(level.pop());
        }
        level = next;
    }
    Ok(level.pop().map(|(gt, _)| gt).unwrap_or_default())
}

/// One digit of every number, and what is asked about it.
struct Leaf {
    shift: u32,
    width: u32,
    greater: bool,
    equal: bool,
}

impl Leaf {
    /// Answers sent for one element: none for digit 0, whose answer is the sender's own share.
    fn answers(&self) -> u32 {
        (1 << self.width) - 1
    }

    fn bits(&self) -> u32 {
        self.answers() * (u32::from(self.greater) + u32::from(self.equal))
    }

    fn digit(&self, v: u64) -> u32 {
        (v >> self.shift) as u32 & ((1 << self.width) - 1)
    }
}

/// Shares of [server's digit > client's digit] and [server's digit = client's digit] for every leaf; an answer that the
/// leaf does not ask for is empty.
fn run_leaves(party: &mut Party, mine: &[u64], leaves: &[Leaf]) -> Result<Vec<(Bits, Bits)>> {
    let n = mine.len();
    let choice_bytes = (n * leaves.len()).div_ceil(2);
    let answer_bytes = leaves.iter().map(|l| n * l.bits() as usize).sum::<usize>().div_ceil(8);
    if party.role.is_client() {
        receive_leaves(party, mine, leaves, answer_bytes)
    } else {
        send_leaves(party, mine, leaves, choice_bytes)
    }
}

fn send_leaves(party: &mut Party, mine: &[u64], leaves: &[Leaf], choice_bytes: usize) -> Result<Vec<(Bits, Bits)>> {
    let (n, total) = (mine.len(), mine.len() * leaves.len());
    // Of the sixteen pads of a transfer, two bits each: bits 0 in the low half of a word, bits 1 in the high half.
    let mut pads: Wiped<u32> = Wiped::with_capacity(total);
    for start in (0..total).step_by(BATCH) {
        let wanted = BATCH.min(total - start);
        let batch = Wiped::from(party.ot.send16(&mut party.channel, wanted)?);
        same_length("a supply of transfers", wanted, batch.len())?;
        pads.extend(batch.iter().map(pad_planes));
    }
    let mut body = Reader::receive(&mut party.channel, Kind::Choices, choice_bytes)?;
    let answer_bits: usize = leaves.iter().map(|l| n * l.bits() as usize).sum();
    let mut out = Writer::with_capacity(answer_bits);
    let mut shares = Vec::with_capacity(leaves.len());
    for (leaf, pads) in leaves.iter().zip(pads.chunks(n)) {
        let mut share = (vec![0; if leaf.greater { n } else { 0 }], vec![0; if leaf.equal { n } else { 0 }]);
        let answers = leaf.answers();
        let (mask, bits) = ((1u32 << answers) - 1, leaf.bits());
        for (i, (&v, &pads)) in mine.iter().zip(pads).enumerate() {
            let digit = leaf.digit(v);
            // Bit v: [digit > v]; bit 16 + v: [digit = v].
            let truth = ((1u32 << digit) - 1) | 0x1_0000 << digit;
            let covered = truth ^ permuted(pads, body.take(4) as u32);
            // What digit 0 would see is the sender's share; every answer is relative to it.
            let (gt, eq) = (covered & 1, (covered >> 16) & 1);
            let relative = covered ^ (gt * 0xffff) ^ (eq * 0xffff_0000);
            let (low, high) = ((relative >> 1) & mask, (relative >> 17) & mask);
            let answer = match (leaf.greater, leaf.equal) {
                (true, true) => u64::from(low) | u64::from(high) << answers,
                (true, false) => u64::from(low),
                _ => u64::from(high),
            };
            if leaf.greater {
                share.0[i] = gt as u8;
            }
            if leaf.equal {
                share.1[i] = eq as u8;
            }
            out.put(answer, bits);
        }
        shares.push(share);
    }
    body.finish(&mut party.channel)?;
    party.channel.send(Kind::Transfers, &out.finish())?;
    // The peer waits for this; the next step may be long.
    party.channel.flush()?;
    Ok(shares)
}

fn receive_leaves(party: &mut Party, mine: &[u64], leaves: &[Leaf], answer_bytes: usize) -> Result<Vec<(Bits, Bits)>> {
    let (n, total) = (mine.len(), mine.len() * leaves.len());
    // The random choice in the low four bits, two bits of the pad above.
    let mut random: Wiped<u8> = Wiped::with_capacity(total);
    for start in (0..total).step_by(BATCH) {
        let wanted = BATCH.min(total - start);
        let batch = party.ot.receive16(&mut party.channel, wanted)?;
        let (choices, pads) = (Wiped::from(batch.choices), Wiped::from(batch.pads));
        same_length("a supply of transfers", wanted, choices.len().min(pads.len()))?;
        random.extend(choices.iter().zip(pads.iter()).map(|(&c, &p)| (c & 15) | (p & 3) << 4));
    }
    let mut out = Writer::with_capacity(4 * total);
    for (leaf, random) in leaves.iter().zip(random.chunks(n)) {
        for (&v, &r) in mine.iter().zip(random) {
            out.put(u64::from(leaf.digit(v) ^ u32::from(r & 15)), 4);
        }
    }
    party.channel.send(Kind::Choices, &out.finish())?;
    let mut body = Reader::receive(&mut party.channel, Kind::Transfers, answer_bytes)?;
    let mut shares = Vec::with_capacity(leaves.len());
    for (leaf, random) in leaves.iter().zip(random.chunks(n)) {
        let mut share = (vec![0; if leaf.greater { n } else { 0 }], vec![0; if leaf.equal { n } else { 0 }]);
        let (answers, bits) = (leaf.answers(), leaf.bits());
        for (i, (&v, &r)) in mine.iter().zip(random).enumerate() {
            let digit = leaf.digit(v);
            let answer = body.take(bits);
            // Answer 0 is not sent: a zero is put in its place.
            let first = (((answer & ((1 << answers) - 1)) << 1 >> digit) & 1) as u8;
            if leaf.greater {
                share.0[i] = first ^ ((r >> 4) & 1);
            }
            if leaf.equal {
                let second = if leaf.greater { ((answer >> answers << 1 >> digit) & 1) as u8 } else { first };
                share.1[i] = second ^ ((r >> 5) & 1);
            }
        }
        shares.push(share);
    }
    body.finish(&mut party.channel)?;
    Ok(shares)
}

/// Bit 0 of each of sixteen bytes in the low half, bit 1 in the high half.
#[inline(always)]
fn pad_planes(pads: &[u8; 16]) -> u32 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let all = u128::from_le_bytes(*pads);
    let (a, b) = (all as u64, (all >> 64) as u64);
    let plane = |shift: u32| u32::from(gather((a >> shift) & ONES)) | u32::from(gather((b >> shift) & ONES)) << 8;
    plane(0) | plane(1) << 16
}

/// Both halves with bit j moved to j XOR e. e has been on the wire.
#[inline(always)]
fn permuted(planes: u32, e: u32) -> u32 {
    let mut w = planes;
    for (step, low) in [(1, 0x5555_5555u32), (2, 0x3333_3333), (4, 0x0f0f_0f0f), (8, 0x00ff_00ff)] {
        let swapped = ((w >> step) & low) | (w & low) << step;
        let mask = (u32::from(e & step != 0)).wrapping_neg();
        w ^= mask & (w ^ swapped);
    }
    w
}
