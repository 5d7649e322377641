//! Every step over pipes that hold back what is not flushed: the peer of a step that ended without a flush waits in vain.

use super::tests::bit_shares;
use super::*;
use crate::net::{Channel, memory};
use crate::party::Role;
use crate::testing::{parties, share};
use std::time::Duration;

type Step = fn(&mut Party, &[u64], &[u8]) -> Result<()>;

const ROWS: Rows = Rows { length: 8, kappa: 16, drop_bits: 0 };
const LONG: Rows = Rows { length: 136, kappa: 16, drop_bits: 2 };
/// A link that makes any row of more than 128 values a network's.
const SLOW: Link = Link { bytes_per_second: 1.0, round_seconds: 0.0 };

/// On 272 values of at most 10 bits that are positive, and as many bits.
const STEPS: &[(&str, Step)] = &[
    ("share_from the client", |p, x, _| share_one(p, Role::Client, x.len())),
    ("share_from the server", |p, x, _| share_one(p, Role::Server, x.len())),
    ("reveal_to the client", |p, x, _| reveal_to(p, Role::Client, x).map(drop)),
    ("reveal_to the server", |p, x, _| reveal_to(p, Role::Server, x).map(drop)),
    ("reveal_to_both", |p, x, _| reveal_to_both(p, x).map(drop)),
    ("truncate", |p, x, _| truncate(p, x, 3).map(drop)),
    ("to_ring", |p, x, _| to_ring(p, x, 0, 13).map(drop)),
    ("from_ring", |p, x, _| from_ring(p, &ring(x, 20), 20).map(drop)),
    ("and", |p, _, b| and(p, b, b).map(drop)),
    ("or", |p, _, b| or(p, b, b).map(drop)),
    ("bits_to_field", |p, _, b| bits_to_field(p, b).map(drop)),
    ("bits_to_ring", |p, _, b| bits_to_ring(p, b, 9).map(drop)),
    ("select", |p, x, b| select(p, b, x).map(drop)),
    ("select_ring", |p, x, b| select_ring(p, b, &ring(x, 20), 20).map(drop)),
    ("multiply", |p, x, _| multiply(p, x, x).map(drop)),
    ("multiply_truncate", |p, x, _| multiply_truncate(p, x, x, 12).map(drop)),
    ("is_negative", |p, x, _| is_negative(p, x, 41, 0).map(drop)),
    ("is_negative, narrow", |p, x, _| is_negative(p, x, 12, 1).map(drop)),
    ("is_negative, one leaf", |p, x, _| is_negative(p, x, 5, 8).map(drop)),
    ("ring_is_negative", |p, x, _| ring_is_negative(p, &ring(x, 17), 17).map(drop)),
    ("equal", |p, x, _| equal(p, x, x).map(drop)),
    ("lookup_bits", |p, x, _| lookup_bits(p, &ring(x, 6), &BitTable::new(6, 1, |place, _| place < 6)?).map(drop)),
    ("one_hot", |p, x, _| one_hot(p, &ring(x, 4), 4, 5).map(drop)),
    ("one_hot, long", |p, x, _| one_hot(p, &ring(x, 9), 9, 5).map(drop)),
    ("maximum", |p, x, _| maximum(p, x, ROWS).map(drop)),
    ("rank_all_pairs", |p, x, _| rank_all_pairs(p, x, ROWS).map(drop)),
    ("rank", |p, x, _| rank(p, x, ROWS).map(drop)),
    ("one_hot_values", |p, x, _| one_hot_values(p, x, 5).map(drop)),
    ("top_k_mask", |p, x, _| top_k_mask(p, x, ROWS, 3, &SLOW).map(drop)),
    ("top_k_mask, network", |p, x, _| top_k_mask(p, x, LONG, 3, &SLOW).map(drop)),
    ("dispatch_bits", |p, x, _| dispatch_bits(p, x, ROWS, 3, &SLOW).map(drop)),
    ("dispatch_bits, network", |p, x, _| dispatch_bits(p, x, LONG, 3, &SLOW).map(drop)),
    ("dispatch_ranks", |p, x, _| dispatch_ranks(p, x, ROWS, 3, &SLOW).map(drop)),
    ("relu", |p, x, _| relu(p, x, 12).map(drop)),
    ("silu", |p, x, _| silu(p, x, 12).map(drop)),
    ("gelu", |p, x, _| gelu(p, x, 12).map(drop)),
    ("exponential", |p, x, _| exponential(p, x, 12, 0, 12).map(drop)),
    ("reciprocal", |p, x, _| reciprocal(p, x, 0, 12, 24).map(drop)),
    ("rsqrt", |p, x, _| rsqrt(p, x, 0, 12, 1 << 16, 20).map(drop)),
    ("softmax", |p, x, _| softmax(p, x, 8, None, 12).map(drop)),
    ("rms_norm", |p, x, _| rms_norm(p, x, &norm()).map(drop)),
    ("layer_norm", |p, x, _| layer_norm(p, x, &norm()).map(drop)),
];

fn norm() -> NormPlan {
    NormPlan { columns: 8, f: 12, rms_bits: 2, epsilon: 168 }
}

fn ring(x: &[u64], kappa: u32) -> Vec<u64> {
    x.iter().map(|v| v & ((1 << kappa) - 1)).collect()
}

fn share_one(party: &mut Party, owner: Role, n: usize) -> Result<()> {
    let values = vec![-3; n];
    let mine = (party.role == owner).then_some(&values[..]);
    share_from(party, owner, mine, n).map(drop)
}

/// Runs a step as both parties over withholding pipes. Neither party is dropped before both have ended: nothing but a
/// flush can end the wait.
fn run_withheld(
    client: impl FnOnce(&mut Party) -> Result<()> + Send,
    server: impl FnOnce(&mut Party) -> Result<()> + Send,
) -> [Result<()>; 2] {
    let (mut c, mut s) = parties();
    let (a, b) = memory::withholding_pipes(Duration::from_millis(1500));
    (c.channel, s.channel) = (Channel::new(Box::new(a)), Channel::new(Box::new(b)));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| server(&mut s));
        [client(&mut c), other.join().expect("the server's thread ends")]
    })
}

#[test]
fn every_step_flushes_what_the_peer_waits_for() {
    let x: Vec<i64> = (0..272).map(|i| 1 + i * 37 % 1000).collect();
    let (a, b) = share(&x);
    let (f, g) = bit_shares(&(0..272).map(|i| (i % 3 == 0) as u8).collect::<Vec<_>>());
    for (name, step) in STEPS {
        for (who, outcome) in ["client", "server"].iter().zip(run_withheld(|p| step(p, &a, &f), |p| step(p, &b, &g))) {
            outcome.unwrap_or_else(|error| panic!("{name} at the {who}: {error}"));
        }
    }
    assert_eq!(plan(LONG, 2, &SLOW), Plan::Network);
}

#[test]
fn a_missing_flush_is_seen() {
    let send = |p: &mut Party| p.channel.send(crate::net::Kind::Shares, &[1]);
    let [sent, got] = run_withheld(send, |p| p.channel.receive(crate::net::Kind::Shares, 1).map(drop));
    assert!(sent.is_ok() && matches!(got, Err(Error::TimedOut { .. })), "{got:?}");
}
