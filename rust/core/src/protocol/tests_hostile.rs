//! A peer that sends the wrong thing in the middle of a step: a typed error, no panic, no wait without an end.

use super::*;
use crate::net::Kind;
use crate::party::Role;
use crate::random::SecretRng;
use crate::testing::{Dealer, parties, share};

/// One step on eight elements as this party would run it.
type Step = fn(&mut Party, &[u64]) -> Result<()>;

const STEPS: [(&str, Step); 10] = [
    ("truncate", |p, x| truncate(p, x, 12).map(drop)),
    ("to_ring", |p, x| to_ring(p, x, 0, 13).map(drop)),
    ("and", |p, x| and(p, &bits(x), &bits(x)).map(drop)),
    ("select", |p, x| select(p, &bits(x), x).map(drop)),
    ("multiply", |p, x| multiply(p, x, x).map(drop)),
    ("compare", |p, x| is_negative(p, x, 41, 0).map(drop)),
    ("equal", |p, x| equal(p, x, x).map(drop)),
    ("one_hot", |p, x| one_hot(p, x, 4, 5).map(drop)),
    ("one_hot_long", |p, x| one_hot(p, x, 9, 5).map(drop)),
    ("reveal", |p, x| reveal_to_both(p, x).map(drop)),
];

fn bits(x: &[u64]) -> Bits {
    x.iter().map(|v| (v & 1) as u8).collect()
}

/// Runs a step on nine elements against a peer that does something else. The link stays open until the step has ended
/// if the attack hands the peer back, and closes at once if not: no test waits for a time-out.
fn run_against(role: Role, step: Step, attack: impl FnOnce(Party) -> Option<Party> + Send) -> Result<()> {
    let (a, _) = share(&[1, -1, 5, 7, 1 << 20, -9, 0, 3, 2]);
    let (c, s) = parties();
    let (mut victim, peer) = if role.is_client() { (c, s) } else { (s, c) };
    std::thread::scope(|scope| {
        let peer = scope.spawn(move || attack(peer));
        let outcome = step(&mut victim, &a);
        drop(peer.join());
        outcome
    })
}

#[test]
fn wrong_lengths_kinds_and_silence_are_typed_errors() {
    for (name, step) in STEPS {
        for role in [Role::Client, Role::Server] {
            let gone = run_against(role, step, |_| None);
            assert!(matches!(gone, Err(Error::PeerGone { .. })), "{name}: {gone:?}");
            for kind in [Kind::Transfers, Kind::BitOpening, Kind::Choices, Kind::Opening, Kind::Shares, Kind::Hello] {
                for length in [0, 1, 6, 1000] {
                    let got = run_against(role, step, |mut peer| {
                        peer.channel.send(kind, &vec![0; length]).ok();
                        Some(peer)
                    });
                    assert!(matches!(got, Err(Error::BadMessage { .. })), "{name}, {kind:?} of {length}: {got:?}");
                }
            }
        }
    }
}

#[test]
fn random_bodies_of_the_right_length_end_in_an_error_or_a_result() {
    let mut rng = SecretRng::from_os();
    // The right kinds and lengths for nine elements, in order, at the client.
    let scripts: [(Step, &[(Kind, usize)]); 5] = [
        (STEPS[0].1, &[(Kind::Transfers, 47)]),
        (STEPS[2].1, &[(Kind::BitOpening, 4)]),
        (STEPS[3].1, &[(Kind::Transfers, 49)]),
        (STEPS[4].1, &[(Kind::Opening, 93)]),
        (STEPS[9].1, &[(Kind::Shares, 47)]),
    ];
    let (mut refused, mut taken) = (0, 0);
    for (step, script) in scripts {
        for round in 0..200 {
            let bodies: Vec<Vec<u8>> = script
                .iter()
                .map(|&(_, length)| {
                    let mut body = vec![0; length];
                    match round {
                        0 => {}
                        1 => body.fill(255),
                        _ => rng.fill(&mut body),
                    }
                    body
                })
                .collect();
            let got = run_against(Role::Client, step, |mut peer| {
                for (&(kind, _), body) in script.iter().zip(&bodies) {
                    peer.channel.send(kind, body).ok();
                }
                Some(peer)
            });
            match got {
                Ok(()) => taken += 1,
                Err(Error::BadMessage { .. }) => refused += 1,
                Err(other) => panic!("{other:?}"),
            }
        }
    }
    assert!(refused > 100 && taken >= 4, "{refused} refused, {taken} taken");
}

#[test]
fn the_callers_own_mistakes_are_named_before_a_byte_is_sent() {
    let (mut p, _peer) = parties();
    let x = [1u64, 2];
    let wrong: Vec<Result<()>> = vec![
        truncate(&mut p, &x, 33).map(drop),
        to_ring(&mut p, &x, 0, 0).map(drop),
        to_ring(&mut p, &x, 0, 49).map(drop),
        to_ring(&mut p, &x, 33, 20).map(drop),
        from_ring(&mut p, &x, 42).map(drop),
        and(&mut p, &[1], &[1, 0]).map(drop),
        select(&mut p, &[1], &x).map(drop),
        multiply(&mut p, &x, &x[..1]).map(drop),
        inner_products(&mut p, &x, &x, 0).map(drop),
        less_than(&mut p, &x, &x[..1], 41, 0).map(drop),
        is_negative(&mut p, &x, 42, 0).map(drop),
        is_negative(&mut p, &x, 1, 0).map(drop),
        is_negative(&mut p, &x, 41, 1).map(drop),
        one_hot(&mut p, &x, 4, 17).map(drop),
        one_hot(&mut p, &x, 0, 1).map(drop),
        one_hot_values(&mut p, &x, 0).map(drop),
        one_hot_values(&mut p, &x, (1 << 20) + 1).map(drop),
        maximum(&mut p, &x, Rows { length: 3, kappa: 17, drop_bits: 0 }).map(drop),
        dispatch_bits(&mut p, &x, Rows { length: 2, kappa: 17, drop_bits: 0 }, 3, &Link::LAN).map(drop),
        share_from(&mut p, Role::Client, Some(&[1]), 2).map(drop),
        share_from(&mut p, Role::Client, None, 2).map(drop),
        share_from(&mut p, Role::Client, Some(&[1, i64::MAX]), 2).map(drop),
        relu(&mut p, &x, 14).map(drop),
        silu(&mut p, &x, 9).map(drop),
        reciprocal(&mut p, &x, 0, 30, 30).map(drop),
        rsqrt(&mut p, &x, 1, 30, 1 << 16, 30).map(drop),
    ];
    for (i, outcome) in wrong.iter().enumerate() {
        assert!(matches!(outcome, Err(Error::BadArgument(_))), "case {i}: {outcome:?}");
    }
    assert!(!p.channel.is_over());
    assert_eq!(p.channel.costs().iter().map(|s| s.messages_sent).sum::<u64>(), 0);
}

/// What the server opens in one correlated transfer with these choices and payloads, as the client sees it.
fn opened(supplies: [u64; 2], bits: &[u8]) -> Vec<u64> {
    let (mut c, mut s) = parties();
    c.ot = Box::new(Dealer::new(Role::Client, supplies[0]));
    s.ot = Box::new(Dealer::new(Role::Server, supplies[1]));
    std::thread::scope(|scope| {
        scope.spawn(|| bits_to_field(&mut s, bits));
        let n = bits.len();
        c.channel.send(Kind::Transfers, &vec![0; n.div_ceil(8)]).unwrap();
        super::wire::receive_field(&mut c.channel, Kind::Transfers, n).unwrap()
    })
}

#[test]
fn a_transfer_used_twice_gives_the_servers_bits_away_and_a_fresh_one_does_not() {
    let mut rng = SecretRng::from_os();
    let bits: Vec<u8> = (0..400).map(|_| (rng.next_u64() & 1) as u8).collect();
    let zeros = vec![0; 400];
    // The payload is twice the bit: the difference of two openings under one pad is it.
    let guess = |first: Vec<u64>, second: Vec<u64>| -> usize {
        let right = first.iter().zip(&second).zip(&bits);
        right.filter(|&((&a, &b), &bit)| u8::from(crate::field::sub(a, b) == 2) == bit).count()
    };
    assert_eq!(guess(opened([1, 7], &bits), opened([1, 7], &zeros)), 400);
    // With fresh transfers the difference is uniform: it is never 2, and zeros are half of the bits.
    let right = guess(opened([1, 7], &bits), opened([1, 8], &zeros));
    assert!((140..260).contains(&right), "{right} of 400");
}

#[test]
fn what_the_client_reads_is_uniform_whatever_the_payload() {
    // 20,000 openings of each of two payloads; sixteen equal cells; chi-square below its 10^-6 quantile.
    for bit in [0, 1] {
        let mut cells = [0f64; 16];
        let n = 20_000;
        for v in opened([3, SecretRng::from_os().next_u64()], &vec![bit; n]) {
            cells[(v as u128 * 16 / crate::field::P as u128) as usize] += 1.0;
        }
        let due = n as f64 / 16.0;
        let chi: f64 = cells.iter().map(|c| (c - due) * (c - due) / due).sum();
        assert!(chi < 60.0, "{chi}");
    }
}
