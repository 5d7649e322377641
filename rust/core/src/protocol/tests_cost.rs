//! The costs that the steps state, against what the channel and the supplies counted.

use super::*;
use crate::net::Channel;
use crate::ot::{OtSupply, ReceivedPads, ReceivedPads16, SentPads};
use crate::party::{TripleSupply, Triples};
use crate::testing::{parties, share};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// What one party used.
#[derive(Default)]
struct Used {
    transfers: AtomicUsize,
    transfers16: AtomicUsize,
    triples: AtomicUsize,
}

struct Counting<S: ?Sized>(Box<S>, Arc<Used>);

impl OtSupply for Counting<dyn OtSupply> {
    fn send(&mut self, channel: &mut Channel, n: usize) -> Result<SentPads> {
        self.1.transfers.fetch_add(n, Relaxed);
        self.0.send(channel, n)
    }

    fn receive(&mut self, channel: &mut Channel, n: usize) -> Result<ReceivedPads> {
        self.1.transfers.fetch_add(n, Relaxed);
        self.0.receive(channel, n)
    }

    fn send16(&mut self, channel: &mut Channel, n: usize) -> Result<Vec<[u8; 16]>> {
        self.1.transfers16.fetch_add(n, Relaxed);
        self.0.send16(channel, n)
    }

    fn receive16(&mut self, channel: &mut Channel, n: usize) -> Result<ReceivedPads16> {
        self.1.transfers16.fetch_add(n, Relaxed);
        self.0.receive16(channel, n)
    }
}

impl TripleSupply for Counting<dyn TripleSupply> {
    fn triples(&mut self, channel: &mut Channel, n: usize) -> Result<Triples> {
        self.1.triples.fetch_add(n, Relaxed);
        self.0.triples(channel, n)
    }
}

/// What a step used: everything but the rounds in total over all elements.
#[derive(Debug, PartialEq)]
pub(super) struct Cost {
    /// The larger of both parties' counts.
    pub rounds: u64,
    /// Both directions, without headers.
    pub bytes: u64,
    pub transfers: usize,
    pub transfers16: usize,
    pub triples: usize,
}

/// Runs a step as both parties on their shares and returns what it used.
pub(super) fn cost<T: Sync + ?Sized, U: Send>(
    client: &T,
    server: &T,
    step: impl Fn(&mut Party, &T) -> Result<U> + Sync,
) -> Cost {
    let (mut c, mut s) = parties();
    let used = Arc::new(Used::default());
    fn counted(party: Party, used: &Arc<Used>) -> Party {
        Party {
            ot: Box::new(Counting(party.ot, used.clone())),
            triples: Box::new(Counting(party.triples, used.clone())),
            ..party
        }
    }
    c = counted(c, &used);
    s = counted(s, &Arc::default());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| step(&mut s, server).unwrap());
        step(&mut c, client).unwrap();
        other.join().unwrap();
    });
    let sum = |party: &mut Party, f: fn(&crate::net::StepCost) -> u64| party.channel.costs().iter().map(f).sum::<u64>();
    let headers = 16 * (sum(&mut c, |s| s.messages_sent) + sum(&mut s, |s| s.messages_sent));
    assert_eq!(sum(&mut c, |s| s.bytes_sent), sum(&mut s, |s| s.bytes_received));
    Cost {
        rounds: sum(&mut c, |s| s.rounds).max(sum(&mut s, |s| s.rounds)),
        bytes: sum(&mut c, |s| s.bytes_sent + s.bytes_received) - headers,
        transfers: used.transfers.load(Relaxed),
        transfers16: used.transfers16.load(Relaxed),
        triples: used.triples.load(Relaxed),
    }
}

/// Elements of a step under test; a multiple of 8, so that no flag is padded.
const N: usize = 512;

/// [rounds, bits, transfers, transfers 1-of-16, triples], all but the rounds for each element.
fn each(expected: [usize; 5], step: impl Fn(&mut Party, &[u64]) -> Result<()> + Sync) {
    let (a, b) = share(&super::tests::values(N, 1 << 14));
    let got = cost(&a[..], &b[..], step);
    let [rounds, bits, transfers, transfers16, triples] = expected;
    let expected = Cost {
        rounds: rounds as u64,
        bytes: (N * bits / 8) as u64,
        transfers: N * transfers,
        transfers16: N * transfers16,
        triples: N * triples,
    };
    assert_eq!(got, expected);
}

fn bits(x: &[u64]) -> Bits {
    x.iter().map(|v| (v & 1) as u8).collect()
}

fn ring(x: &[u64], kappa: u32) -> Vec<u64> {
    x.iter().map(|v| v & ((1 << kappa) - 1)).collect()
}

#[test]
fn every_step_costs_what_it_says() {
    each([1, 42, 1, 0, 0], |p, x| truncate(p, x, 12).map(drop));
    each([0, 0, 0, 0, 0], |p, x| truncate(p, x, 0).map(drop));
    each([1, 18, 1, 0, 0], |p, x| to_ring(p, x, 3, 17).map(drop));
    each([1, 42, 1, 0, 0], |p, x| from_ring(p, &ring(x, 20), 20).map(drop));
    each([1, 4, 2, 0, 0], |p, x| and(p, &bits(x), &bits(x)).map(drop));
    each([1, 4, 2, 0, 0], |p, x| or(p, &bits(x), &bits(x)).map(drop));
    each([1, 42, 1, 0, 0], |p, x| bits_to_field(p, &bits(x)).map(drop));
    each([1, 8, 1, 0, 0], |p, x| bits_to_ring(p, &bits(x), 7).map(drop));
    each([1, 84, 2, 0, 0], |p, x| select(p, &bits(x), x).map(drop));
    each([1, 42, 2, 0, 0], |p, x| select_ring(p, &bits(x), &ring(x, 20), 20).map(drop));
    each([1, 164, 0, 0, 1], |p, x| multiply(p, x, x).map(drop));
    each([2, 206, 1, 0, 1], |p, x| multiply_truncate(p, x, x, 12).map(drop));
    each([1, 82, 0, 0, 0], |p, x| reveal_to_both(p, x).map(drop));
    // Four strands of three digits, three nodes of which two are lowest, in two levels.
    each([6, 19 * 3 + 34 * 9 + 14, 6, 12, 0], |p, x| is_negative(p, x, 41, 0).map(drop));
    each([7, 19 * 12 + 16, 8, 12, 0], |p, x| equal(p, x, x).map(drop));
    // 18 bits for the ring, four strands of one digit, two levels.
    each([5, 18 + 135, 7, 4, 0], |p, x| is_negative(p, x, 17, 0).map(drop));
    each([4, 135, 6, 4, 0], |p, x| ring_is_negative(p, &ring(x, 17), 17).map(drop));
}

#[test]
fn many_comparisons_cost_what_they_say() {
    let n = 1 << 18;
    let (a, b) = share(&super::tests::values(n, 1 << 14));
    let of = |rounds, bits, transfers, transfers16| Cost {
        rounds,
        bytes: (n / 8 * bits) as u64,
        transfers: n * transfers,
        transfers16: n * transfers16,
        triples: 0,
    };
    // One strand, no node.
    assert_eq!(cost(&a[..], &b[..], |p, x| is_negative(p, x, 41, 0)), of(14, 13 * 19, 0, 13));
    assert_eq!(cost(&a[..], &b[..], |p, x| equal(p, x, x)), of(15, 13 * 19 + 4, 2, 13));
    assert_eq!(cost(&a[..], &b[..], |p, x| is_negative(p, x, 17, 0)), of(7, 18 + 5 * 19, 1, 5));
}

#[test]
fn vectors_at_a_shared_place_cost_what_they_say() {
    let table = BitTable::new(6, 1, |place, _| place < 6).unwrap();
    each([1, 6 + 63, 6, 0, 0], |p, x| lookup_bits(p, &ring(x, 6), &table).map(drop));
    each([1, 7 + 127 * 24, 7, 0, 0], |p, x| one_hot(p, &ring(x, 7), 7, 24).map(drop));
    each([9, 9 * 513, 9, 0, 0], |p, x| one_hot(p, &ring(x, 9), 9, 512).map(drop));
    each([2, 1 + 7 + 7 + 127 * 100, 8, 0, 0], |p, x| one_hot_values(p, x, 100).map(drop));
}

#[test]
fn a_rank_in_the_field_costs_a_bit_more_a_pair_and_a_change_of_ring() {
    let (a, b) = share(&super::tests::values(8 * 64, 1 << 14));
    let rows = Rows { length: 64, kappa: 17, drop_bits: 0 };
    let ring = cost(&a[..], &b[..], |p, x| rank_all_pairs(p, x, rows));
    let field = cost(&a[..], &b[..], |p, x| rank(p, x, rows));
    let (pairs, values) = (8 * 2016, 8 * 64);
    assert_eq!(field.bytes - ring.bytes, (pairs + values * 42) as u64 / 8);
    assert_eq!((field.rounds, field.transfers), (ring.rounds + 1, ring.transfers + values));
}

#[test]
fn the_gate_and_the_dispatch_stay_inside_their_bars() {
    let (a, b) = share(&super::tests::values(128 * 64, 1 << 15));
    let gate = Rows { length: 64, kappa: 17, drop_bits: 0 };
    let top = cost(&a[..], &b[..], |p, x| top_k_mask(p, x, gate, 6, &Link::LAN));
    let (pairs, values) = (128 * 2016, 128 * 64);
    assert_eq!(top.transfers, pairs + values * (1 + 6));
    assert_eq!(top.transfers16, pairs * 5);
    assert_eq!(top.bytes, (pairs * (95 + 7) + values * (18 + 69)) as u64 / 8);
    assert_eq!(top.rounds, 9);

    let tokens = Rows { length: 128, kappa: 17, drop_bits: 0 };
    let dispatch = cost(&a[..], &b[..], |p, x| dispatch_ranks(p, x, tokens, 24, &Link::LAN));
    let (pairs, slots) = (64 * 8128, 64 * 24 * 128);
    assert_eq!(dispatch.transfers, pairs + values * (1 + 7) + slots);
    assert_eq!(dispatch.transfers16, pairs * 5);
    assert_eq!(dispatch.bytes, (pairs * (95 + 8) + values * (18 + 7 + 127 * 24) + slots * 42) as u64 / 8);
    assert_eq!(dispatch.rounds, 10);
    assert!(dispatch.bytes < 11_000_000);
}

#[test]
fn rounds_grow_only_to_those_of_one_strand() {
    // The last is more than one batch of transfers of either kind.
    let rounds: Vec<u64> = [1, 1 << 10, 1 << 13, 1 << 16, (1 << 19) + 8]
        .map(|n| {
            let (a, b) = share(&super::tests::values(n, 1 << 14));
            cost(&a[..], &b[..], |p, x| is_negative(p, x, 17, 0)).rounds
        })
        .into();
    assert!(rounds.is_sorted() && rounds[0] == 5 && rounds[4] == 7, "{rounds:?}");
}

#[test]
fn transcripts_do_not_depend_on_values() {
    let rows = Rows { length: 32, kappa: 16, drop_bits: 0 };
    let all = |p: &mut Party, x: &[u64]| {
        let negative = is_negative(p, x, 41, 0)?;
        select(p, &negative, x)?;
        equal(p, x, x)?;
        dispatch_ranks(p, x, rows, 4, &Link::LAN)?;
        maximum(p, x, rows)?;
        truncate(p, x, 12)
    };
    let costs: Vec<Cost> = [vec![0; 64], vec![(1 << 14) - 1; 64], super::tests::values(64, 1 << 14)]
        .iter()
        .map(|x| {
            let (a, b) = share(x);
            cost(&a[..], &b[..], all)
        })
        .collect();
    assert!(costs.windows(2).all(|pair| pair[0] == pair[1]));
    // Shares that are all zero at one party: not random, still the same lengths.
    let zero = [0u64; 64];
    assert_eq!(cost(&zero[..], &zero[..], all), costs[0]);
}
