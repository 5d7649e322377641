//! Both parties of every kind of transfer over memory channels: correctness, cost, stock.

use super::*;
use crate::net::{Channel, memory};
use crate::party::Role;
use crate::random::SecretRng;
use std::collections::HashSet;

pub(super) fn soft(bits: usize) -> OtKind {
    OtKind::SoftSpoken(GroupBits::new(bits).unwrap())
}

pub(super) fn config(kind: OtKind) -> OtConfig {
    OtConfig { base: BaseKind::Ristretto, kind }
}

pub(super) fn every_kind() -> Vec<OtKind> {
    vec![soft(1), soft(2), soft(4), soft(8), OtKind::Silent]
}

/// A supply with the channel it talks over.
pub(super) struct End {
    pub channel: Channel,
    pub supply: ExtendedOt,
}

/// Runs one closure for each party, each on a thread.
pub(super) fn both<A: Send, B: Send, T: Send, U: Send>(
    client: A,
    server: B,
    f: impl FnOnce(A) -> T + Send,
    g: impl FnOnce(B) -> U + Send,
) -> (T, U) {
    std::thread::scope(|scope| {
        let other = scope.spawn(move || g(server));
        (f(client), other.join().expect("the server's thread ends"))
    })
}

/// Both ends of a supply, client first.
pub(super) fn ends(config: OtConfig) -> (End, End) {
    let (a, b) = memory::channels();
    let start = move |mut channel: Channel, role| {
        let supply = ExtendedOt::set_up(&mut channel, role, &[7; 32], config, &mut SecretRng::from_os()).unwrap();
        End { channel, supply }
    };
    both(a, b, |a| start(a, Role::Client), |b| start(b, Role::Server))
}

impl End {
    fn send(&mut self, n: usize) -> SentPads {
        self.supply.send(&mut self.channel, n).unwrap()
    }

    fn receive(&mut self, n: usize) -> ReceivedPads {
        self.supply.receive(&mut self.channel, n).unwrap()
    }

    fn send16(&mut self, n: usize) -> Vec<[u8; 16]> {
        self.supply.send16(&mut self.channel, n).unwrap()
    }

    fn receive16(&mut self, n: usize) -> ReceivedPads16 {
        self.supply.receive16(&mut self.channel, n).unwrap()
    }

    fn preprocess(&mut self, counts: OtCounts) {
        self.supply.preprocess(&mut self.channel, counts).unwrap();
    }

    fn bytes_sent(&mut self) -> u64 {
        self.channel.costs().iter().map(|step| step.bytes_sent).sum()
    }
}

pub(super) fn check(sent: &SentPads, got: &ReceivedPads) {
    assert_eq!(sent.len(), got.pads.len());
    assert_eq!(sent.len(), got.choices.len());
    for ((pair, &choice), &pad) in sent.iter().zip(&got.choices).zip(&got.pads) {
        assert!(choice < 2);
        assert_eq!(pair[choice as usize], pad);
        assert_ne!(pair[1 - choice as usize], pad);
    }
}

fn check16(sent: &[[u8; 16]], got: &ReceivedPads16) {
    assert_eq!(sent.len(), got.pads.len());
    assert_eq!(sent.len(), got.choices.len());
    for ((all, &choice), &pad) in sent.iter().zip(&got.choices).zip(&got.pads) {
        assert!(choice < 16);
        assert_eq!(all[choice as usize], pad);
    }
}

/// Within six standard deviations of `n` draws with probability 1 / `sides`.
pub(super) fn plausible(count: usize, n: usize, sides: usize) -> bool {
    let (mean, p) = (n as f64 / sides as f64, 1.0 / sides as f64);
    (count as f64 - mean).abs() < 6.0 * (n as f64 * p * (1.0 - p)).sqrt() + 1.0
}

#[test]
fn every_kind_gives_matching_pads_in_both_directions_and_none_twice() {
    for kind in every_kind() {
        let (mut a, mut b) = ends(config(kind));
        let (mut pads, mut total) = (HashSet::new(), 0);
        for n in [1, 0, 5, 1000, 20_000] {
            let ((sent, got), (peer_got, peer_sent)) = both(
                &mut a,
                &mut b,
                |a| ((a.send(n), a.send16(n)), (a.receive(n), a.receive16(n))),
                |b| ((b.receive(n), b.receive16(n)), (b.send(n), b.send16(n))),
            );
            check(&sent.0, &peer_got.0);
            check16(&sent.1, &peer_got.1);
            check(&peer_sent.0, &got.0);
            check16(&peer_sent.1, &got.1);
            assert_eq!(a.supply.stock(), b.supply.stock().for_peer());
            pads.extend(sent.0.iter().flatten().copied());
            pads.extend(peer_sent.0.iter().flatten().copied());
            total += 4 * n;
            if n == 20_000 {
                let ones = got.0.choices.iter().filter(|&&c| c == 1).count();
                assert!(plausible(ones, n, 2), "{ones} of {n} choices are 1");
                for value in 0..16 {
                    let count = got.1.choices.iter().filter(|&&c| c == value).count();
                    assert!(plausible(count, n, 16), "choice {value} came {count} times in {n}");
                }
                for shift in 1..16u8 {
                    let other = peer_sent.1.iter().zip(&got.1.choices).zip(&got.1.pads);
                    let equal = other.filter(|((all, c), pad)| all[(**c ^ shift) as usize] == **pad).count();
                    assert!(plausible(equal, n, 256), "{equal} of {n} unchosen 8-bit pads equal the chosen one");
                }
                // No sum over a square of choices vanishes, as it would if pads were sums of per-bit pads.
                let square = |all: &[u8; 16]| all[0] ^ all[1] ^ all[2] ^ all[3];
                let zero = sent.1.iter().filter(|all| square(all) == 0).count();
                assert!(plausible(zero, n, 256), "{zero} of {n} sums over squares are 0");
            }
        }
        assert_eq!(pads.len(), total, "a pad came twice");
    }
}

#[test]
fn ml_kem_base_transfers_give_a_working_supply() {
    let (mut a, mut b) = ends(OtConfig { base: BaseKind::MlKem768, kind: soft(4) });
    let (sent, got) = both(&mut a, &mut b, |a| a.send(100), |b| b.receive(100));
    check(&sent, &got);
    let (got, sent) = both(&mut a, &mut b, |a| a.receive(100), |b| b.send(100));
    check(&sent, &got);
}

#[test]
fn preprocessed_transfers_cost_nothing_later_and_both_stocks_stay_in_step() {
    for kind in [soft(2), OtKind::Silent] {
        let (mut a, mut b) = ends(config(kind));
        let counts = OtCounts { send: 70_000, receive: 3, send16: 1, receive16: 20_000 };
        both(&mut a, &mut b, |a| a.preprocess(counts), |b| b.preprocess(counts.for_peer()));
        let stock = a.supply.stock();
        assert!(stock.send >= 70_000 && stock.receive >= 3 && stock.send16 >= 1 && stock.receive16 >= 20_000);
        assert_eq!(stock, b.supply.stock().for_peer());
        let before = (a.bytes_sent(), b.bytes_sent());
        // Enough already: nothing is made.
        both(&mut a, &mut b, |a| a.preprocess(counts), |b| b.preprocess(counts.for_peer()));
        let (sent, got) = both(&mut a, &mut b, |a| a.send(70_000), |b| b.receive(70_000));
        check(&sent, &got);
        let (got, sent) = both(&mut a, &mut b, |a| a.receive16(20_000), |b| b.send16(20_000));
        check16(&sent, &got);
        assert_eq!(before, (a.bytes_sent(), b.bytes_sent()));
        // Across the end of the stock.
        let more = a.supply.stock().send + 10;
        let (sent, got) = both(&mut a, &mut b, |a| a.send(more), |b| b.receive(more));
        check(&sent, &got);
        assert_eq!(a.supply.stock(), b.supply.stock().for_peer());
    }
}

#[test]
fn a_request_larger_than_one_extension_is_served_in_pieces() {
    let n = supply::REFILL_MOST + 5;
    let (mut a, mut b) = ends(config(soft(2)));
    let (sent, got) = both(&mut a, &mut b, |a| a.send(n), |b| b.receive(n));
    check(&sent, &got);
    assert_eq!(a.supply.stock().send, supply::REFILL_LEAST - 5);
    assert_eq!(a.supply.stock(), b.supply.stock().for_peer());
}

#[test]
fn the_stock_is_bounded_before_anything_is_sent() {
    let (mut a, _b) = ends(config(soft(4)));
    let before = a.bytes_sent();
    for counts in [
        OtCounts { send: STOCK_LIMIT / 32 + 1, ..OtCounts::default() },
        OtCounts { receive16: usize::MAX, ..OtCounts::default() },
        OtCounts { send: usize::MAX, receive: usize::MAX, send16: usize::MAX, receive16: usize::MAX },
    ] {
        assert!(matches!(a.supply.preprocess(&mut a.channel, counts), Err(crate::Error::BadArgument(_))));
    }
    assert_eq!(a.bytes_sent(), before);
}

#[test]
fn each_kind_costs_the_bytes_and_rounds_that_it_states() {
    for k in [1, 2, 4, 8] {
        let (mut a, mut b) = ends(config(soft(k)));
        let before = (a.bytes_sent(), b.bytes_sent());
        let n = 1 << 17;
        both(&mut a, &mut b, |a| a.send(n), |b| b.receive(n));
        assert_eq!(a.bytes_sent(), before.0);
        let body = (n / 8 * (128 / k - 1)) as u64;
        assert_eq!(b.bytes_sent() - before.1, body + crate::net::frame::HEADER as u64);
    }
    let (mut a, mut b) = ends(config(OtKind::Silent));
    for (sixteen, trees, per_tree) in [(false, 512, 7 * 32 + 16), (true, 1024, 6 * 32 + 16 + 64)] {
        let before = (a.bytes_sent(), b.bytes_sent());
        let n = 1 << 16;
        if sixteen {
            both(&mut a, &mut b, |a| a.send16(n).len(), |b| b.receive16(n).pads.len());
        } else {
            both(&mut a, &mut b, |a| a.send(n).len(), |b| b.receive(n).pads.len());
        }
        let header = crate::net::frame::HEADER as u64;
        assert_eq!(a.bytes_sent() - before.0, trees * per_tree + header);
        let small = trees * if sixteen { 11 } else { 8 };
        let corrections = small / 8 * 31 + header;
        assert_eq!(b.bytes_sent() - before.1, corrections + if sixteen { trees + header } else { 0 });
    }
}

#[test]
fn the_kind_follows_the_link() {
    assert_eq!(OtKind::for_link(1.0), OtKind::Silent);
    assert!(matches!(OtKind::for_link(100_000.0), OtKind::SoftSpoken(_)));
    assert!(matches!(OtKind::for_link(f64::INFINITY), OtKind::SoftSpoken(_)));
    assert_eq!(OtKind::for_link(0.0), OtKind::Silent);
    assert_eq!(OtKind::for_link(f64::NAN), OtKind::Silent);
    for bad in [0, 3, 16, usize::MAX] {
        assert!(GroupBits::new(bad).is_err());
    }
}
