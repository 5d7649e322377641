//! A sorting network for long rows, where all pairs would be too many: Batcher's odd-even merge, pruned to the places
//! that are asked for, on keys (score, place) in one ring value, so that a comparator is one comparison and one
//! selection, keys never tie, and the place is there for nothing: it is the key's low bits.

use super::compare::price;
use super::onehot::MAX_LOOKUP_BITS;
use super::rank::Rows;
use super::wrap::{MAX_KAPPA, to_ring};
use super::{Bits, not, ring_is_negative, select_ring};
use crate::error::{Error, Result};
use crate::party::Party;

/// What a link costs, for choosing between few bytes and few rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Bytes a second, both directions together.
    pub bytes_per_second: f64,
    /// Seconds of one round.
    pub round_seconds: f64,
}

impl Link {
    /// 3 Gbit/s, 0.2 ms.
    pub const LAN: Link = Link { bytes_per_second: 375e6, round_seconds: 0.2e-3 };
    /// 400 Mbit/s, 40 ms.
    pub const WAN: Link = Link { bytes_per_second: 50e6, round_seconds: 40e-3 };
}

/// How the order of rows is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Every pair is compared; a handful of rounds.
    AllPairs,
    /// A sorting network; a handful of rounds for each of its log^2 stages.
    Network,
}

/// Most values of a row whose pairs are all compared: some eight million pairs, which take a gigabyte or two while they
/// are compared, and ranks that a table can be looked up at.
pub const MAX_ALL_PAIRS: usize = 1 << MAX_LOOKUP_BITS;
/// Most values of a row that a network sorts: some four million comparators.
pub const MAX_NETWORK: usize = 1 << 16;

/// The cheaper way on this link, by public shapes only. Up to 128 values always all pairs, so that a gate and a usual
/// dispatch take few rounds on any link; above [`MAX_ALL_PAIRS`] the network, unless its keys would be too wide.
pub fn plan(rows: Rows, count: usize, link: &Link) -> Plan {
    let n = rows.length;
    if n <= 128 || rows.kappa.saturating_add(rows.rank_bits()) > MAX_KAPPA {
        return Plan::AllPairs;
    }
    if n > MAX_ALL_PAIRS {
        return Plan::Network;
    }
    let cost = |comparisons: usize, at_once: usize, bits: u32, more_bytes: f64, more_rounds: f64| {
        let one = price(bits - 1, at_once);
        let bytes = comparisons as f64 * (one.bytes + more_bytes);
        let stages = comparisons.div_ceil(at_once.max(1)) as f64;
        bytes / link.bytes_per_second
            + comparisons as f64 * one.seconds
            + stages * (one.rounds + more_rounds) * link.round_seconds
    };
    let pairs = count * n * (n - 1) / 2;
    let stages = network(n, n);
    let comparators = count * stages.iter().map(Vec::len).sum::<usize>();
    let key_bits = rows.kappa + rows.rank_bits();
    let all = cost(pairs, pairs, rows.kappa, f64::from(rows.rank_bits() + 1) / 8.0, 2.0);
    let net = cost(comparators, comparators.div_ceil(stages.len()), key_bits, f64::from(key_bits + 1) / 4.0, 2.0);
    if all <= net { Plan::AllPairs } else { Plan::Network }
}

/// The stages of the network for `n` keys, largest first, without the comparators that places `wanted..` alone need.
/// Comparators of one stage touch different places.
fn network(n: usize, wanted: usize) -> Vec<Vec<(usize, usize)>> {
    let mut stages = Vec::new();
    let mut p = 1;
    while p < n {
        let mut k = p;
        while k >= 1 {
            let mut stage = Vec::new();
            for j in (k % p..n.saturating_sub(k)).step_by(2 * k) {
                for i in j..(j + k).min(n - k) {
                    if i / (2 * p) == (i + k) / (2 * p) {
                        stage.push((i, i + k));
                    }
                }
            }
            stages.push(stage);
            k /= 2;
        }
        p *= 2;
    }
    let mut needed: Vec<bool> = (0..n).map(|i| i < wanted).collect();
    for stage in stages.iter_mut().rev() {
        stage.retain(|&(a, b)| {
            let keep = needed[a] || needed[b];
            needed[a] |= keep;
            needed[b] |= keep;
            keep
        });
    }
    stages.retain(|stage| !stage.is_empty());
    stages
}

/// Keys (score, place) of every value: unequal, larger for the larger score, and for the earlier of equal ones.
fn keys(party: &mut Party, x: &[u64], rows: Rows) -> Result<(Vec<u64>, u32)> {
    let bits = rows.kappa + rows.rank_bits();
    if bits > MAX_KAPPA {
        return Err(Error::BadArgument(format!("a key of {bits} bits; at most {MAX_KAPPA}")));
    }
    let mut keys = to_ring(party, x, rows.drop_bits, bits)?;
    let adds = u64::from(party.role.is_client()).wrapping_neg();
    for row in keys.chunks_exact_mut(rows.length) {
        for (place, key) in row.iter_mut().enumerate() {
            let tail = (rows.length - 1 - place) as u64 & adds;
            *key = ((*key << rows.rank_bits()).wrapping_add(tail)) & ((1 << bits) - 1);
        }
    }
    Ok((keys, bits))
}

/// Brings the `wanted` largest keys of each row to its front, in order.
///
/// Cost: for each comparator one comparison of bits - 1 bits and one selection in the ring; about
/// length log^2(length) / 4 comparators a row, log (log + 1) / 2 stages.
fn sort_front(party: &mut Party, keys: &mut [u64], length: usize, bits: u32, wanted: usize) -> Result<()> {
    let mask = (1u64 << bits) - 1;
    for stage in network(length, wanted) {
        let mut gap = Vec::with_capacity(stage.len() * keys.len() / length);
        for row in keys.chunks_exact(length) {
            gap.extend(stage.iter().map(|&(a, b)| row[a].wrapping_sub(row[b]) & mask));
        }
        let swap = ring_is_negative(party, &gap, bits)?;
        let gap = select_ring(party, &swap, &gap, bits)?;
        for (row, gap) in keys.chunks_exact_mut(length).zip(gap.chunks_exact(stage.len())) {
            for (&(a, b), &gap) in stage.iter().zip(gap) {
                row[a] = row[a].wrapping_sub(gap) & mask;
                row[b] = row[b].wrapping_add(gap) & mask;
            }
        }
    }
    Ok(())
}

/// The places of the `wanted` largest values of each row, in order, shared modulo 2^rank_bits.
pub(super) fn network_places(party: &mut Party, x: &[u64], rows: Rows, wanted: usize) -> Result<Vec<u64>> {
    let (mut keys, bits) = keys(party, x, rows)?;
    sort_front(party, &mut keys, rows.length, bits, wanted)?;
    let last = (rows.length as u64 - 1) & u64::from(party.role.is_client()).wrapping_neg();
    let mask = (1u64 << rows.rank_bits()) - 1;
    Ok(keys
        .chunks_exact(rows.length)
        .flat_map(|row| row[..wanted].iter().map(|&key| last.wrapping_sub(key) & mask))
        .collect())
}

/// [value is among the k largest of its row], by comparing every key with the k-th.
pub(super) fn network_mask(party: &mut Party, x: &[u64], rows: Rows, k: usize) -> Result<Bits> {
    let (keys, bits) = keys(party, x, rows)?;
    let mut sorted = keys.clone();
    sort_front(party, &mut sorted, rows.length, bits, k)?;
    let mut gap = Vec::with_capacity(keys.len());
    for (row, sorted) in keys.chunks_exact(rows.length).zip(sorted.chunks_exact(rows.length)) {
        gap.extend(row.iter().map(|&key| key.wrapping_sub(sorted[k - 1]) & ((1 << bits) - 1)));
    }
    let below = ring_is_negative(party, &gap, bits)?;
    Ok(not(party, &below))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_network_sorts_every_pattern_and_its_pruned_form_finds_the_front() {
        for n in 1..=13usize {
            for wanted in [1, n.div_ceil(2), n] {
                let stages = network(n, wanted);
                // By the 0-1 principle zeros and ones are enough.
                for pattern in 0..1u32 << n {
                    let mut v: Vec<u32> = (0..n).map(|i| pattern >> i & 1).collect();
                    for &(a, b) in stages.iter().flatten() {
                        (v[a], v[b]) = (v[a].max(v[b]), v[a].min(v[b]));
                    }
                    let ones = pattern.count_ones() as usize;
                    assert!((0..wanted).all(|i| v[i] == u32::from(i < ones)));
                }
            }
        }
    }

    #[test]
    fn short_rows_are_compared_in_pairs_and_long_rows_by_the_network() {
        let rows = |length| Rows { length, kappa: 17, drop_bits: 0 };
        assert_eq!(plan(rows(64), 128, &Link::LAN), Plan::AllPairs);
        assert_eq!(plan(rows(128), 64, &Link::LAN), Plan::AllPairs);
        assert_eq!(plan(rows(128), 64, &Link::WAN), Plan::AllPairs);
        assert_eq!(plan(rows(1024), 64, &Link::LAN), Plan::Network);
        assert_eq!(plan(rows(4096), 64, &Link::WAN), Plan::Network);
    }
}
