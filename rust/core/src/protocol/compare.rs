//! Comparison: strands of digits, joined by a tree.
//!
//! The bits of the server's number a and the client's number b are cut into strands ([`super::strand`]), each of which
//! finds shares of [a > b] and [a = b] on its bits. Strands are joined in pairs, the higher bits first: (gt, eq) = (gt_hi XOR
//! eq_hi gt_lo, eq_hi eq_lo), a bit times a string of two bits; the lowest node of a level carries no eq. Many
//! short strands take few rounds, one long strand takes the least work and the fewest bytes; [`best_cut`] chooses.

use super::boolean::bit_times_pair;
use super::strand::{Asks, Strand, run_strands};
use super::wrap::{MAX_KAPPA, to_ring};
use super::{Bits, same_length, step_on};
use crate::error::{Error, Result};
use crate::field::{self, P};
use crate::party::Party;

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
/// Cost of comparing b bits in q strands of at most d digits: d + 1 rounds for the strands, ceil(log2 q) for the tree; 19 bits
/// for each digit of the lowest strand, 34 for each other, 6 (q - 1) - 2 ceil(log2 q) for the tree; one transfer 1-of-16
/// a digit and 2 (q - 1) transfers. All 41 bits, few elements (q = 4): 6 rounds, 377 bits, 12 + 6 transfers; many
/// (q = 1): 14 rounds, 247 bits, 13 transfers. Memory while it runs: about 5 bytes a digit at each party.
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
/// Cost with q strands of at most d digits: d + 1 rounds for the strands, ceil(log2 (q + 1)) to join them with the 41st bit;
/// 19 bits for each digit, 4 q for the conjunctions; one transfer 1-of-16 a digit and 2 q transfers. Few elements (q = 4): 7
/// rounds, 244 bits, 12 + 8 transfers; many (q = 1): 15 rounds, 251 bits, 13 + 2 transfers.
pub fn equal(party: &mut Party, x: &[u64], y: &[u64]) -> Result<Bits> {
    same_length("equal", x.len(), y.len())?;
    step_on(party, "equal", x.len(), |party| {
        let client = party.role.is_client();
        let mine: Vec<u64> =
            x.iter().zip(y).map(|(&x, &y)| if client { field::sub(y, x) } else { field::sub(x, y) }).collect();
        let found = run_strands(party, &mine, &best_cut(false, 40, x.len()))?;
        let mut bits: Vec<Bits> = found.into_iter().map(|(_, eq)| eq).collect();
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
    let mut level = run_strands(party, mine, &best_cut(true, bits, n))?;
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

/// `bits` bits cut into `count` strands, lowest first, whose longest is as short as can be.
fn cut(greater: bool, bits: u32, count: u32) -> Vec<Strand> {
    let digits = (1..).find(|&digits| count * Strand::room(digits) >= bits).expect("some number of digits is enough");
    let room = Strand::room(digits);
    let asks = |shift| match (greater, shift) {
        (false, _) => Asks::Equal,
        (true, 0) => Asks::Greater,
        (true, _) => Asks::Both,
    };
    (0..bits).step_by(room as usize).map(|shift| Strand::new(asks(shift), shift, room.min(bits - shift))).collect()
}

/// What one comparison in a batch of `n` costs, of `bits` bits: for choosing between protocols.
pub(super) struct Price {
    /// In both directions, transfers made for it included.
    pub bytes: f64,
    /// Of work at either party while both work.
    pub seconds: f64,
    pub rounds: f64,
}

/// The price of a comparison.
pub(super) fn price(bits: u32, n: usize) -> Price {
    // Measured with SoftSpoken in groups of 4 on a Skylake server core (`cloister bench engine`, less-than on 2^18).
    const TRANSFER_SECONDS: f64 = 0.148e-6;
    const TRANSFER_BYTES: f64 = 1.4;
    let strands = best_cut(true, bits, n);
    let nodes = strands.len() - 1;
    let transfers: usize = strands.iter().map(Strand::transfers).sum();
    let bits = strands.iter().map(Strand::bits).sum::<usize>() + 6 * nodes;
    let most = strands.iter().map(Strand::transfers).max().unwrap_or(0);
    Price {
        bytes: bits as f64 / 8.0 + (transfers + 2 * nodes) as f64 * TRANSFER_BYTES,
        seconds: (transfers + 2 * nodes) as f64 * TRANSFER_SECONDS,
        rounds: (1 + most) as f64 + f64::from(strands.len().next_power_of_two().ilog2()),
    }
}

/// The cut that is fastest for `n` numbers: many strands take few rounds, few strands take little work and few bytes.
/// Depends on public numbers alone, so that both parties come to the same.
fn best_cut(greater: bool, bits: u32, n: usize) -> Vec<Strand> {
    // Nanoseconds: of a transfer at each of two parties that both work, of a bit at 1 Gbit/s, of a round on a link between
    // LAN and WAN.
    const TRANSFER16: usize = 100;
    const TRANSFER: usize = 80;
    const BIT: usize = 1;
    const ROUND: usize = 2_000_000;
    let nanoseconds = |strands: &Vec<Strand>| {
        let nodes = strands.len() - 1;
        let levels = strands.len().next_power_of_two().ilog2() as usize;
        let rounds = 1 + strands.iter().map(Strand::transfers).max().unwrap_or(0) + levels;
        let transfers: usize = strands.iter().map(Strand::transfers).sum();
        let bits = strands.iter().map(Strand::bits).sum::<usize>() + 6 * nodes;
        n * (transfers * TRANSFER16 + 2 * nodes * TRANSFER + bits * BIT) + rounds * ROUND
    };
    let cuts = (1..=bits.div_ceil(4)).map(|count| cut(greater, bits, count));
    cuts.min_by_key(nanoseconds).unwrap_or_default()
}
