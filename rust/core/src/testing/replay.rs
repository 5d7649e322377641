//! Every protocol step against a peer whose messages were recorded in an honest run and then damaged: what a decoder
//! behind a handshake, a masked opening or a whole exchange sees. The transport is a mock: no TLS, no socket, no peer.
//!
//! Lengths and kinds of messages are public, so a recording fits any run of the same step, whatever its randomness is;
//! only the values are wrong, and nobody can tell wrong values from right ones. So a replay ends with a value or with a
//! typed error, soon, and never with a panic.

use super::Dealer;
use crate::error::{Error, Result};
use crate::field;
use crate::matmul::single::{self, CostModel, Matrix, Plan, Shape};
use crate::matmul::triples::EncryptedTriples;
use crate::matmul::{BatchedPlan, BatchedShape, Conditions, Encryption, ExpertWeights, Numbers, batched, shared};
use crate::net::frame::HEADER;
use crate::net::{Channel, Pipe, memory};
use crate::ot::{BaseKind, ExtendedOt, GroupBits, OtConfig, OtKind, OtSupply};
use crate::party::{Party, Role, TripleSupply};
use crate::protocol as step;
use crate::random::SecretRng;
use crate::rlwe::Automorphism;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, OnceLock};

/// A step as either party runs it.
pub type Step = fn(&mut Party) -> Result<()>;

/// Steps that are fast enough for thousands of runs.
pub const STEPS: [(&str, Step); 22] = [
    ("share_from", |p| {
        let mine = (p.role == Role::Client).then_some(&[1, -2, 3][..]);
        step::share_from(p, Role::Client, mine, 3).map(drop)
    }),
    ("reveal_to", |p| with(p, |p, x, _| step::reveal_to(p, Role::Server, x).map(drop))),
    ("reveal_to_both", |p| with(p, |p, x, _| step::reveal_to_both(p, x).map(drop))),
    ("truncate", |p| with(p, |p, x, _| step::truncate(p, x, 12).map(drop))),
    ("to_ring", |p| with(p, |p, x, _| step::to_ring(p, x, 0, 13).map(drop))),
    ("from_ring", |p| with(p, |p, x, _| step::from_ring(p, &low(x, 20), 20).map(drop))),
    ("and", |p| with(p, |p, _, b| step::and(p, b, b).map(drop))),
    ("select", |p| with(p, |p, x, b| step::select(p, b, x).map(drop))),
    ("select_ring", |p| with(p, |p, x, b| step::select_ring(p, b, &low(x, 13), 13).map(drop))),
    ("bits_to_field", |p| with(p, |p, _, b| step::bits_to_field(p, b).map(drop))),
    ("multiply", |p| with(p, |p, x, _| step::multiply(p, x, x).map(drop))),
    ("is_negative", |p| with(p, |p, x, _| step::is_negative(p, x, 20, 4).map(drop))),
    ("equal", |p| with(p, |p, x, _| step::equal(p, x, x).map(drop))),
    ("one_hot", |p| with(p, |p, x, _| step::one_hot(p, &low(x, 4), 4, 5).map(drop))),
    ("one_hot of long rows", |p| with(p, |p, x, _| step::one_hot(p, &low(x, 9), 9, 5).map(drop))),
    ("maximum", |p| with(p, |p, x, _| step::maximum(p, x, ROWS).map(drop))),
    ("rank_all_pairs", |p| with(p, |p, x, _| step::rank_all_pairs(p, x, ROWS).map(drop))),
    ("silu", |p| with(p, |p, x, _| step::silu(p, x, 12).map(drop))),
    ("softmax", |p| with(p, |p, x, _| step::softmax(p, x, 3, None, 12).map(drop))),
    ("transfers, Ristretto, groups of 1", |p| transfers(p, BaseKind::Ristretto, 1)),
    ("transfers, Ristretto, groups of 8", |p| transfers(p, BaseKind::Ristretto, 8)),
    ("transfers, ML-KEM, groups of 2", |p| transfers(p, BaseKind::MlKem768, 2)),
];

/// Steps over lattice encryption and silent transfers: tens of milliseconds a run.
pub const SLOW_STEPS: [(&str, Step); 7] = [
    ("silent transfers", |p| {
        let config = OtConfig { base: BaseKind::Ristretto, kind: OtKind::Silent };
        let mut ot = ExtendedOt::set_up(&mut p.channel, p.role, &[1; 32], config, &mut p.rng)?;
        both_ways(p, &mut ot)
    }),
    ("exchange of keys", |p| Encryption::exchange(p, &[0; 32], &[Automorphism::new(1, false)], 1).map(drop)),
    ("triples", |p| {
        let mut supply = match &keys()[usize::from(!p.role.is_client())] {
            Encryption::Client(keys) => EncryptedTriples::client(keys.secret.clone()),
            Encryption::Server(keys) => EncryptedTriples::server(keys.public.clone()),
        };
        supply.triples(&mut p.channel, 10)?;
        supply.squares(&mut p.channel, 10).map(drop)
    }),
    ("product with one weight", |p| {
        let shape = Shape { rows: 3, columns: 5, outputs: 4 };
        let plan = Plan::new(shape, 16, &CostModel::default())?;
        let x = field::random_vector(&mut p.rng, shape.rows * shape.columns);
        let weights = Matrix::from_i16(shape.columns, shape.outputs, &[7; 20])?;
        let weights = (!p.role.is_client()).then_some(weights);
        single::multiply(p, ours(p.role), &plan, &x, weights).map(drop)
    }),
    ("product of two shared matrices", |p| {
        let shape = Shape { rows: 3, columns: 5, outputs: 4 };
        let plan = shared::SharedPlan::new(shape, &CostModel::default())?;
        let x = field::random_vector(&mut p.rng, shape.rows * shape.columns);
        let y = field::random_vector(&mut p.rng, shape.columns * shape.outputs);
        shared::multiply(p, ours(p.role), &plan, &[shared::Pair { x: &x, y: &y }]).map(drop)
    }),
    ("batched product", |p| batched_product(p, false)),
    ("batched product made ahead", |p| batched_product(p, true)),
];

const ROWS: step::Rows = step::Rows { length: 3, kappa: 20, drop_bits: 4 };

/// Shares of nine small numbers, and nine bits, at either party: the same in every run.
fn with(p: &mut Party, run: fn(&mut Party, &[u64], &[u8]) -> Result<()>) -> Result<()> {
    let mut rng = SecretRng::from_insecure_fixed_seed(3);
    let mask = field::random_vector(&mut rng, 9);
    let x: Vec<u64> = match p.role {
        Role::Client => mask,
        Role::Server => (0..9).zip(&mask).map(|(i, &m)| field::sub(field::from_signed(i * 300 - 1000), m)).collect(),
    };
    let bits: Vec<u8> = (0..9).map(|_| (p.rng.next_u64() & 1) as u8).collect();
    run(p, &x, &bits)
}

fn low(x: &[u64], bits: u32) -> Vec<u64> {
    x.iter().map(|&v| v & ((1 << bits) - 1)).collect()
}

fn transfers(p: &mut Party, base: BaseKind, bits: usize) -> Result<()> {
    let config = OtConfig { base, kind: OtKind::SoftSpoken(GroupBits::new(bits)?) };
    let mut ot = ExtendedOt::set_up(&mut p.channel, p.role, &[1; 32], config, &mut p.rng)?;
    both_ways(p, &mut ot)
}

fn both_ways(p: &mut Party, ot: &mut ExtendedOt) -> Result<()> {
    let channel = &mut p.channel;
    if p.role.is_client() {
        ot.send(channel, 10)?;
        ot.receive16(channel, 10)?;
    } else {
        ot.receive(channel, 10)?;
        ot.send16(channel, 10)?;
    }
    channel.flush()
}

fn batched_plan() -> Result<BatchedPlan> {
    let shape = BatchedShape { experts: 2, tokens: 64, columns_in: 5, columns_out: vec![3] };
    BatchedPlan::new(shape, Conditions::LAN)
}

fn batched_product(p: &mut Party, ahead: bool) -> Result<()> {
    let plan = batched_plan()?;
    let shape = plan.shape().clone();
    let numbers = vec![3i16; shape.experts * shape.columns_in * 3];
    let weights = [ExpertWeights::new(Numbers::I16(&numbers), shape.experts, 3, shape.columns_in)?];
    let weights = (!p.role.is_client()).then_some(&weights[..]);
    let x = field::random_vector(&mut p.rng, shape.inputs());
    if ahead {
        // Products made ahead are numbered within a session, so each run is a session of its own.
        let keys = Encryption::exchange(p, &[0; 32], &plan.automorphisms(), 1)?;
        let prepared = batched::prepare(p, &keys, &plan, weights)?;
        batched::online(p, &keys, prepared, &x, weights).map(drop)
    } else {
        batched::multiply(p, ours(p.role), &plan, &x, weights).map(drop)
    }
}

/// Both parties' keys, made once a process.
fn keys() -> &'static [Encryption; 2] {
    static KEYS: OnceLock<[Encryption; 2]> = OnceLock::new();
    KEYS.get_or_init(|| {
        let automorphisms = batched_plan().expect("the plan fits").automorphisms();
        let exchange = |p: &mut Party| Encryption::exchange(p, &[0; 32], &automorphisms, 1);
        let (client, server) = super::run(exchange, exchange);
        [client.expect("the client has keys"), server.expect("the server has keys")]
    })
}

/// A party's keys, the same in the whole process.
pub fn ours(role: Role) -> &'static Encryption {
    &keys()[usize::from(!role.is_client())]
}

fn party(role: Role, pipe: Box<dyn Pipe>) -> Party {
    insecure_party(role, pipe, 4)
}

/// A party whose correlations and randomness come from this number.
pub fn insecure_party(role: Role, pipe: Box<dyn Pipe>, seed: u64) -> Party {
    Party {
        role,
        channel: Channel::new(pipe),
        ot: Box::new(Dealer::new(role, seed)),
        triples: Box::new(Dealer::new(role, seed.wrapping_add(1))),
        rng: SecretRng::from_insecure_fixed_seed(seed.wrapping_add(2 + u64::from(role.is_client()))),
    }
}

/// Runs both parties and returns what each heard: [the client, the server].
pub fn heard(run: impl Fn(Role, Box<dyn Pipe>) -> Result<()> + Sync) -> Result<[Vec<u8>; 2]> {
    let (a, b) = memory::pipes(std::time::Duration::from_secs(600));
    let heard = [(); 2].map(|()| Arc::new(Mutex::new(Vec::new())));
    std::thread::scope(|scope| {
        let run = &run;
        let ends = [(Role::Client, a, &heard[0]), (Role::Server, b, &heard[1])].map(|(role, pipe, heard)| {
            let pipe = Recorder(pipe, heard.clone());
            scope.spawn(move || run(role, Box::new(pipe)))
        });
        ends.into_iter().try_for_each(|end| end.join().expect("an honest party does not panic"))
    })?;
    Ok(heard.map(|bytes| std::mem::take(&mut *bytes.lock().expect("no holder panics"))))
}

/// A pipe that writes down what it receives.
struct Recorder(memory::MemoryPipe, Arc<Mutex<Vec<u8>>>);

impl Pipe for Recorder {
    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.0.send(bytes)
    }

    fn flush(&mut self) -> Result<()> {
        self.0.flush()
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<()> {
        self.0.receive(into)?;
        self.1.lock().expect("no holder panics").extend_from_slice(into);
        Ok(())
    }
}

/// A peer that says what it says, and then is gone.
pub struct Script {
    bytes: Vec<u8>,
    at: usize,
}

impl Script {
    /// Says these bytes, whatever it hears.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, at: 0 }
    }
}

impl Pipe for Script {
    fn send(&mut self, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<()> {
        let end = self.at + into.len();
        let Some(bytes) = self.bytes.get(self.at..end) else {
            return Err(Error::Link(ErrorKind::UnexpectedEof.into()));
        };
        into.copy_from_slice(bytes);
        self.at = end;
        Ok(())
    }
}

/// A step and what either party received in an honest run of it.
pub struct Recording {
    /// What the step is called.
    pub name: &'static str,
    step: Step,
    heard: [Vec<u8>; 2],
}

/// One change of a recording: in message `message`, at place `at` of its body, these bytes.
pub type Damage<'a> = (usize, usize, &'a [u8]);

impl Recording {
    /// Runs the step honestly.
    pub fn of((name, step): (&'static str, Step)) -> Self {
        let heard = heard(|role, pipe| step(&mut party(role, pipe)));
        let heard = heard.unwrap_or_else(|error| panic!("{name}, both honest: {error}"));
        Self { name, step, heard }
    }

    /// What a party received.
    pub fn heard(&self, role: Role) -> &[u8] {
        &self.heard[usize::from(!role.is_client())]
    }

    /// Where the bodies of the messages to a party lie in what it received.
    pub fn bodies(&self, role: Role) -> Vec<std::ops::Range<usize>> {
        let (heard, mut at, mut out) = (self.heard(role), 0, Vec::new());
        while let Some(header) = heard.get(at..at + HEADER) {
            let length = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
            out.push(at + HEADER..at + HEADER + length);
            at += HEADER + length;
        }
        out
    }

    /// Runs one party against a peer that says `script`.
    pub fn replay(&self, role: Role, script: Vec<u8>) -> Result<()> {
        (self.step)(&mut party(role, Box::new(Script::new(script))))
    }

    /// Runs one party against the honest messages with some of their bytes changed. Headers stay as they are, so that
    /// the bodies are reached.
    pub fn damaged(&self, role: Role, damage: &[Damage]) -> Result<()> {
        let bodies: Vec<_> = self.bodies(role).into_iter().filter(|body| !body.is_empty()).collect();
        let mut script = self.heard(role).to_vec();
        for &(message, at, bytes) in damage.iter().filter(|_| !bodies.is_empty()) {
            let body = &mut script[bodies[message % bodies.len()].clone()];
            let at = at % body.len();
            body[at..].iter_mut().zip(bytes).for_each(|(old, &new)| *old = new);
        }
        self.replay(role, script)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_undamaged_recording_is_accepted_by_both_parties() {
        for step in STEPS.into_iter().chain(SLOW_STEPS) {
            let recording = Recording::of(step);
            for role in [Role::Client, Role::Server] {
                let outcome = recording.damaged(role, &[]);
                assert!(outcome.is_ok(), "{} at the {role:?}: {outcome:?}", recording.name);
            }
        }
    }
}
