//! Order among the values of a row: ranks by all pairs (one comparison deep), the mask of the k largest, and the
//! dispatch matrix of a balanced expert. Exactly k are chosen, always: equal values are ordered by their place, the earlier
//! one first. With dropped bits this is said of what is left of the values, and the rounding may leave equal scores one
//! apart: such ties, like scores less than 2^(drop_bits + 1) apart, come in either order.

use super::compare::check_bits;
use super::onehot::{BitTable, lookup_bits, one_hot};
use super::select::{bits_to_field, bits_to_ring};
use super::sort::{self, Link, MAX_ALL_PAIRS, MAX_NETWORK, Plan};
use super::wrap::{MAX_KAPPA, from_ring_unsigned, to_ring};
use super::{Bits, is_negative, less_than, ring_is_negative, select, step_on};
use crate::error::{Error, Result};
use crate::field;
use crate::party::Party;

/// Rows of scores, all of one length, and how precisely they are compared.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Values in a row.
    pub length: usize,
    /// Bits compared, 2 to 41, with those dropped at most 41. Any two values of a row must differ by less than
    /// 2^(kappa-1), or with dropped bits by less than 2^drop_bits (2^(kappa-1) - 2), since the rounding of both adds up to
    /// less than two. Differences outside this range give an order without meaning.
    pub kappa: u32,
    /// Low bits dropped from every value before it is compared, rounding it down or up (see
    /// [`truncate`](super::truncate)). The order of what is left is total and exact: scores of one row that are at
    /// least 2^(drop_bits + 1) apart are always in order, nearer ones need not be, and equal ones may differ by one.
    pub drop_bits: u32,
}

impl Rows {
    /// How many rows there are in `values` values.
    pub(super) fn count(&self, values: usize) -> Result<usize> {
        if self.length == 0 || !values.is_multiple_of(self.length) {
            return Err(Error::BadArgument(format!("{values} values do not make rows of {}", self.length)));
        }
        Ok(values / self.length)
    }

    /// [`Rows::count`], after everything that can be wrong with rows of any kind.
    fn check(&self, values: usize) -> Result<usize> {
        check_bits(self.kappa, self.drop_bits)?;
        let count = self.count(values)?;
        if self.length > MAX_NETWORK {
            let length = self.length;
            return Err(Error::Unsupported(format!(
                "the order of {length} values in a row; {MAX_NETWORK} is the most"
            )));
        }
        Ok(count)
    }

    /// [`Rows::check`] and the limit of comparing all pairs.
    fn check_pairs(&self, values: usize) -> Result<()> {
        self.check(values)?;
        if self.length > MAX_ALL_PAIRS {
            return Err(Error::Unsupported(format!(
                "all pairs of {} values in a row; {MAX_ALL_PAIRS} is the most, and a sorting network for more needs kappa \
                 <= {}",
                self.length,
                MAX_KAPPA - self.rank_bits(),
            )));
        }
        Ok(())
    }

    /// How the order of these rows is found, if it can be.
    fn plan(&self, values: usize, link: &Link) -> Result<Plan> {
        let plan = sort::plan(*self, self.check(values)?, link);
        if plan == Plan::AllPairs {
            self.check_pairs(values)?;
        }
        Ok(plan)
    }

    /// Bits of a rank or a place.
    pub fn rank_bits(&self) -> u32 {
        self.length.next_power_of_two().trailing_zeros().max(1)
    }
}

/// The largest of each row, by a tournament. With dropped bits, one that is below it by at most
/// 2^drop_bits for each of the ceil(log2 length) matches.
///
/// Cost: ceil(log2 length) times that of [`is_negative`] and [`select`]; length - 1 of each a row.
pub fn maximum(party: &mut Party, x: &[u64], rows: Rows) -> Result<Vec<u64>> {
    let count = rows.count(x.len())?;
    check_bits(rows.kappa, rows.drop_bits)?;
    step_on(party, "maximum", x.len(), |party| {
        let (mut values, mut length) = (x.to_vec(), rows.length);
        while length > 1 {
            let (half, left) = (length / 2, length.div_ceil(2));
            let part = |from: usize| -> Vec<u64> {
                values.chunks_exact(length).flat_map(|row| row[from..from + half].iter().copied()).collect()
            };
            let (a, b) = (part(0), part(left));
            let lower = less_than(party, &a, &b, rows.kappa, rows.drop_bits)?;
            let gain: Vec<u64> = b.iter().zip(&a).map(|(&b, &a)| field::sub(b, a)).collect();
            let gain = select(party, &lower, &gain)?;
            let mut next = Vec::with_capacity(count * left);
            for (row, gain) in values.chunks_exact(length).zip(gain.chunks_exact(half)) {
                next.extend(row.iter().zip(gain).map(|(&v, &g)| field::add(v, g)));
                // Of an odd number, the middle one has no opponent.
                next.extend_from_slice(&row[half..left]);
            }
            (values, length) = (next, left);
        }
        Ok(values)
    })
}

/// The rank of each value in its row, shared modulo 2^[`Rows::rank_bits`]; 0 is the largest. Rows of at most
/// [`MAX_ALL_PAIRS`] values.
///
/// Cost for each pair of a row: one comparison of kappa - 1 bits ([`ring_is_negative`]) and 1 + rank bits, 1 transfer;
/// for each value 1 + kappa bits, 1 transfer. Rounds: two more than the comparison.
pub fn rank_all_pairs(party: &mut Party, x: &[u64], rows: Rows) -> Result<Vec<u64>> {
    rows.check_pairs(x.len())?;
    step_on(party, "rank", x.len(), |party| ranks_in_ring(party, x, rows, rows.rank_bits()))
}

/// [`rank_all_pairs`] in Z_p, scale 1. Exact.
///
/// Cost: that of [`rank_all_pairs`] with one bit more a pair, and for each value one round, 42 bits, 1 transfer. The bit
/// is what a change of the ring needs to be exact; bits in Z_p for each pair would be 42.
pub fn rank(party: &mut Party, x: &[u64], rows: Rows) -> Result<Vec<u64>> {
    rows.check_pairs(x.len())?;
    step_on(party, "rank", x.len(), |party| {
        let bits = rows.rank_bits() + 1;
        let ranks = ranks_in_ring(party, x, rows, bits)?;
        from_ring_unsigned(party, &ranks, bits)
    })
}

/// The ranks, shared modulo 2^bits.
fn ranks_in_ring(party: &mut Party, x: &[u64], rows: Rows, bits: u32) -> Result<Vec<u64>> {
    let n = rows.length;
    let compared = if rows.kappa >= 40 && rows.drop_bits == 0 {
        Compared::Field
    } else {
        Compared::Ring(to_ring(party, x, rows.drop_bits, rows.kappa)?)
    };
    // Whole rows at a time, as many as memory allows.
    let window = (MOST_PAIRS / (n * (n - 1) / 2).max(1)).max(1) * n;
    let mut ranks = Vec::with_capacity(x.len());
    for start in (0..x.len()).step_by(window) {
        let range = start..(start + window).min(x.len());
        let count = range.len() / n;
        // [a < b] for a before b.
        let below = match &compared {
            Compared::Field => is_negative(party, &differences(&x[range], n, field::sub), rows.kappa, 0)?,
            Compared::Ring(ring) => {
                let mask = (1 << rows.kappa) - 1;
                let gaps = differences(&ring[range], n, |a, b| a.wrapping_sub(b) & mask);
                ring_is_negative(party, &gaps, rows.kappa)?
            }
        };
        let below = bits_to_ring(party, &below, bits)?;
        ranks.extend(below_to_ranks(&below, n, count, u64::from(party.role.is_client())));
    }
    ranks.iter_mut().for_each(|rank| *rank &= (1 << bits) - 1);
    Ok(ranks)
}

/// Pairs compared in one batch; beyond that, a batch more with its rounds.
const MOST_PAIRS: usize = 1 << 21;

/// What the comparisons of a rank are made on.
enum Compared {
    Field,
    Ring(Vec<u64>),
}

/// All differences a - b, a before b, row by row.
fn differences(values: &[u64], n: usize, sub: impl Fn(u64, u64) -> u64) -> Vec<u64> {
    let mut out = Vec::with_capacity(values.len() * (n - 1) / 2);
    for row in values.chunks_exact(n) {
        for (i, &a) in row.iter().enumerate() {
            out.extend(row[i + 1..].iter().map(|&b| sub(a, b)));
        }
    }
    out
}

/// Ranks in rows of n, not reduced, from [a < b] for all pairs: if it holds, a has one more above it, else b has. `one` is
/// 1 at one party.
fn below_to_ranks(below: &[u64], n: usize, count: usize, one: u64) -> Vec<u64> {
    let mut ranks = vec![0u64; count * n];
    let mut rest = below;
    for row in ranks.chunks_exact_mut(n) {
        for i in 0..n {
            let (mine, tail) = rest.split_at(n - 1 - i);
            rest = tail;
            row[i] = mine.iter().fold(row[i], |sum, &bit| sum.wrapping_add(bit));
            row[i + 1..].iter_mut().zip(mine).for_each(|(r, &bit)| *r = r.wrapping_add(one.wrapping_sub(bit)));
        }
    }
    ranks
}

/// [value is among the k largest of its row], exactly k of each row.
///
/// Rows of at most [`MAX_NETWORK`] values; of at most [`MAX_ALL_PAIRS`] where kappa and the rank bits together are more
/// than [`MAX_KAPPA`], as a network's keys have both. Longer ones are refused.
///
/// Cost by all pairs: [`rank_all_pairs`] and one [`lookup_bits`] of one bit a value. By network: its comparisons, and one
/// more a value.
pub fn top_k_mask(party: &mut Party, x: &[u64], rows: Rows, k: usize, link: &Link) -> Result<Bits> {
    let plan = rows.plan(x.len(), link)?;
    if k == 0 || k >= rows.length {
        let all = u8::from(k > 0 && party.role.is_client());
        return Ok(vec![all; x.len()]);
    }
    step_on(party, "top_k", x.len(), |party| match plan {
        Plan::AllPairs => {
            let ranks = rank_all_pairs(party, x, rows)?;
            let table = BitTable::new(rows.rank_bits(), 1, |rank, _| rank < k)?;
            lookup_bits(party, &ranks, &table)
        }
        Plan::Network => sort::network_mask(party, x, rows, k),
    })
}

/// XOR shares of the dispatch matrices: for each row (an expert) `slots` x `length` bits, [value j has rank s] at (s, j).
/// Rows as for [`top_k_mask`].
///
/// Cost by all pairs: [`rank_all_pairs`] and one [`one_hot`] of `slots` bits a value. By network: its comparisons, and one
/// [`one_hot`] of `length` bits a slot.
pub fn dispatch_bits(party: &mut Party, x: &[u64], rows: Rows, slots: usize, link: &Link) -> Result<Bits> {
    let plan = rows.plan(x.len(), link)?;
    if slots == 0 || slots > rows.length {
        return Err(Error::BadArgument(format!("{slots} slots for {} values", rows.length)));
    }
    step_on(party, "dispatch", x.len(), |party| match plan {
        Plan::AllPairs => {
            let ranks = rank_all_pairs(party, x, rows)?;
            let hot = one_hot(party, &ranks, rows.rank_bits(), slots)?;
            let mut out = vec![0; hot.len()];
            let matrix = slots * rows.length;
            for (hot, out) in hot.chunks_exact(matrix).zip(out.chunks_exact_mut(matrix)) {
                for (j, column) in hot.chunks_exact(slots).enumerate() {
                    column.iter().enumerate().for_each(|(s, &bit)| out[s * rows.length + j] = bit);
                }
            }
            Ok(out)
        }
        Plan::Network => {
            let places = sort::network_places(party, x, rows, slots)?;
            one_hot(party, &places, rows.rank_bits(), rows.length)
        }
    })
}

/// [`dispatch_bits`] in Z_p, scale 1, ready for a product with the tokens' rows.
///
/// Cost: that of [`dispatch_bits`], and one round, 42 bits, 1 transfer a bit.
pub fn dispatch_ranks(party: &mut Party, x: &[u64], rows: Rows, slots: usize, link: &Link) -> Result<Vec<u64>> {
    let bits = dispatch_bits(party, x, rows, slots, link)?;
    bits_to_field(party, &bits)
}
