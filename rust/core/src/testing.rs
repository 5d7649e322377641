//! Two parties in one process for unit tests: memory channels and a dealer that hands out correlations.
//!
//! The dealer knows everything, so this module exists only in tests (`cfg(test)`) and behind the feature
//! `insecure-test-dealer`, which no shipped build turns on.

pub mod decoders;
pub mod replay;

use crate::error::Result;
use crate::field;
use crate::net::{Channel, memory};
use crate::ot::{Block, OtSupply, ReceivedPads, ReceivedPads16, SentPads};
use crate::party::{Party, Role, TripleSupply, Triples};
use crate::random::{PublicSeed, SecretRng};
use rand_chacha::ChaCha12Rng;
use rand_core::RngCore;

/// Both parties' twin of an [`OtSupply`] and a [`TripleSupply`], expanded from one seed that both know.
pub struct Dealer {
    role: Role,
    /// Streams of the pads in which the client / the server is the sender; then their 1-of-16 twins; then triples.
    streams: [ChaCha12Rng; 5],
}

impl Dealer {
    /// The supply of one party; its peer must be made from the same seed.
    pub fn new(role: Role, seed: u64) -> Self {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        let seed = PublicSeed(bytes);
        Self { role, streams: std::array::from_fn(|i| seed.stream(i as u64)) }
    }

    fn stream(&mut self, sender: Role, offset: usize) -> &mut ChaCha12Rng {
        &mut self.streams[offset + usize::from(sender == Role::Server)]
    }
}

fn block(rng: &mut ChaCha12Rng) -> Block {
    Block::from(rng.next_u64()) | Block::from(rng.next_u64()) << 64
}

impl OtSupply for Dealer {
    fn send(&mut self, _: &mut Channel, n: usize) -> Result<SentPads> {
        let role = self.role;
        let rng = self.stream(role, 0);
        Ok((0..n)
            .map(|_| {
                let pads = [block(rng), block(rng)];
                rng.next_u64();
                pads
            })
            .collect())
    }

    fn receive(&mut self, _: &mut Channel, n: usize) -> Result<ReceivedPads> {
        let rng = self.stream(self.role.other(), 0);
        let (mut choices, mut pads) = (Vec::with_capacity(n), Vec::with_capacity(n));
        for _ in 0..n {
            let both = [block(rng), block(rng)];
            let choice = (rng.next_u64() & 1) as u8;
            choices.push(choice);
            pads.push(both[choice as usize]);
        }
        Ok(ReceivedPads { choices, pads })
    }

    fn send16(&mut self, _: &mut Channel, n: usize) -> Result<Vec<[u8; 16]>> {
        let role = self.role;
        let rng = self.stream(role, 2);
        Ok((0..n)
            .map(|_| {
                let pads = block(rng).to_le_bytes();
                rng.next_u64();
                pads
            })
            .collect())
    }

    fn receive16(&mut self, _: &mut Channel, n: usize) -> Result<ReceivedPads16> {
        let rng = self.stream(self.role.other(), 2);
        let (mut choices, mut pads) = (Vec::with_capacity(n), Vec::with_capacity(n));
        for _ in 0..n {
            let all = block(rng).to_le_bytes();
            let choice = (rng.next_u64() & 15) as u8;
            choices.push(choice);
            pads.push(all[choice as usize]);
        }
        Ok(ReceivedPads16 { choices, pads })
    }
}

impl TripleSupply for Dealer {
    fn triples(&mut self, _: &mut Channel, n: usize) -> Result<Triples> {
        let client = self.role.is_client();
        let rng = &mut self.streams[4];
        let mut uniform = || {
            loop {
                let x = rng.next_u64() & ((1 << field::P_BITS) - 1);
                if x < field::P {
                    return x;
                }
            }
        };
        let mut out = Triples { a: Vec::new(), b: Vec::new(), c: Vec::new() };
        for _ in 0..n {
            let [a0, a1, b0, b1, c0] = std::array::from_fn(|_| uniform());
            let c = field::mul(field::add(a0, a1), field::add(b0, b1));
            out.a.push(if client { a0 } else { a1 });
            out.b.push(if client { b0 } else { b1 });
            out.c.push(if client { c0 } else { field::sub(c, c0) });
        }
        Ok(out)
    }
}

/// Two parties over a memory channel with a dealer's correlations.
pub fn parties() -> (Party, Party) {
    let (client, server) = memory::channels();
    let seed = SecretRng::from_os().next_u64();
    let party = |role, channel| Party {
        role,
        channel,
        ot: Box::new(Dealer::new(role, seed)),
        triples: Box::new(Dealer::new(role, seed ^ 1)),
        rng: SecretRng::from_os(),
    };
    (party(Role::Client, client), party(Role::Server, server))
}

/// Runs the same protocol as both parties, each on a thread, and returns (client's result, server's result).
pub fn run<T: Send, U: Send>(
    client: impl FnOnce(&mut Party) -> Result<T> + Send,
    server: impl FnOnce(&mut Party) -> Result<U> + Send,
) -> (Result<T>, Result<U>) {
    let (mut c, mut s) = parties();
    std::thread::scope(|scope| {
        let other = scope.spawn(move || server(&mut s));
        let mine = client(&mut c);
        drop(c);
        (mine, other.join().expect("the server's thread ends"))
    })
}

/// Splits values into two random shares.
pub fn share(values: &[i64]) -> (Vec<u64>, Vec<u64>) {
    let mut rng = SecretRng::from_os();
    let mask = field::random_vector(&mut rng, values.len());
    let rest = values.iter().zip(&mask).map(|(&v, &m)| field::sub(field::from_signed(v), m)).collect();
    (mask, rest)
}

/// The signed values of two shares.
pub fn open(client: &[u64], server: &[u64]) -> Vec<i64> {
    assert_eq!(client.len(), server.len());
    client.iter().zip(server).map(|(&a, &b)| field::to_signed(field::add(a, b))).collect()
}
