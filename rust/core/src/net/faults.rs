//! A hostile link between two honest parties, for tests of every protocol step.
//!
//! [`assert_survives`] runs a step once to see its messages, and then again for each message and each thing that can
//! happen to one: cut, dropped, doubled, overtaken, changed. Whatever happens, both parties must end within the time,
//! with a value or a typed error, and never with a panic. A wrong value is allowed: without TLS, which is above this
//! link, nobody can tell a changed share from a share.

use super::frame::HEADER;
use super::{Channel, Pipe, memory};
use crate::error::{Error, Result};
use crate::party::{Party, Role};
use crate::random::SecretRng;
use crate::testing::Dealer;
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What happens to one message on the way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Nothing.
    None,
    /// The link closes after this many bytes of it.
    Cut(usize),
    /// It and everything after it never arrives, though the link stays open.
    Silence,
    /// One bit changes, header included.
    Flip(usize),
    /// It is lost, what follows arrives.
    Drop,
    /// It arrives twice.
    Duplicate,
    /// The next message overtakes it.
    Overtaken,
    /// Its body is replaced by bytes from this seed.
    Random(u64),
    /// Its body is replaced by this byte.
    Fill(u8),
    /// The header says this length, the body stays.
    Length(u32),
    /// Body and header agree on a body with one byte more.
    Longer,
    /// Body and header agree on a body with one byte less.
    Shorter,
}

/// A pipe that does something to one of the messages that its owner sends.
pub struct MutatingPipe {
    inner: Option<Box<dyn Pipe>>,
    fault: Fault,
    target: usize,
    partial: Vec<u8>,
    held: Option<Vec<u8>>,
    silent: bool,
    lengths: Arc<Mutex<Vec<usize>>>,
}

impl MutatingPipe {
    /// Does `fault` to message number `target`.
    pub fn new(inner: Box<dyn Pipe>, fault: Fault, target: usize) -> Self {
        Self {
            inner: Some(inner),
            fault,
            target,
            partial: Vec::new(),
            held: None,
            silent: false,
            lengths: Arc::default(),
        }
    }

    /// The lengths of the messages seen so far, headers included.
    pub fn lengths(&self) -> Arc<Mutex<Vec<usize>>> {
        self.lengths.clone()
    }

    fn pass(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.inner {
            Some(inner) if !self.silent => inner.send(bytes),
            _ => Ok(()),
        }
    }

    fn message(&mut self, mut frame: Vec<u8>) -> Result<()> {
        let number = {
            let mut lengths = self.lengths.lock().expect("no holder panics");
            lengths.push(frame.len());
            lengths.len() - 1
        };
        let body = frame.len() - HEADER;
        if number != self.target {
            self.pass(&frame)?;
            return match self.held.take() {
                Some(held) => self.pass(&held),
                None => Ok(()),
            };
        }
        let resize = |frame: &mut Vec<u8>, length: usize| {
            frame.resize(HEADER + length, 0);
            frame[..4].copy_from_slice(&(length as u32).to_le_bytes());
        };
        match self.fault {
            Fault::None => {}
            Fault::Cut(at) => {
                self.pass(&frame[..at.min(frame.len())])?;
                self.inner = None;
                return Ok(());
            }
            Fault::Silence => {
                self.silent = true;
                return Ok(());
            }
            Fault::Flip(bit) => {
                let bit = bit % (8 * frame.len());
                frame[bit / 8] ^= 1 << (bit % 8);
            }
            Fault::Drop => return Ok(()),
            Fault::Duplicate => self.pass(&frame)?,
            Fault::Overtaken => {
                self.held = Some(frame);
                return Ok(());
            }
            Fault::Random(seed) => SecretRng::from_insecure_fixed_seed(seed).fill(&mut frame[HEADER..]),
            Fault::Fill(byte) => frame[HEADER..].fill(byte),
            Fault::Length(length) => frame[..4].copy_from_slice(&length.to_le_bytes()),
            Fault::Longer => resize(&mut frame, body + 1),
            Fault::Shorter => resize(&mut frame, body.saturating_sub(1)),
        }
        self.pass(&frame)
    }
}

impl Pipe for MutatingPipe {
    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.partial.extend_from_slice(bytes);
        while self.partial.len() >= HEADER {
            let length = u32::from_le_bytes(self.partial[..4].try_into().expect("4 bytes")) as usize;
            if self.partial.len() < HEADER + length {
                break;
            }
            let rest = self.partial.split_off(HEADER + length);
            let frame = std::mem::replace(&mut self.partial, rest);
            self.message(frame)?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.inner.as_mut().map_or(Ok(()), |inner| inner.flush())
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<()> {
        match &mut self.inner {
            Some(inner) => inner.receive(into),
            None => Err(Error::Link(ErrorKind::UnexpectedEof.into())),
        }
    }
}

/// What a trial of a step came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Survival {
    /// Runs with a fault.
    pub cases: usize,
    /// Runs in which at least one party ended with an error.
    pub refused: usize,
    /// Ends with `BadArgument`, where the peer's bytes were taken for the caller's mistake.
    pub blamed_on_caller: usize,
}

/// How a trial is made.
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    /// The most runs; messages and faults are thinned out evenly to stay below.
    pub most_cases: usize,
    /// How long a party waits for a silent peer. Silence and loss cost this much a run.
    pub patience: Duration,
    /// How long a run may take before it counts as hanging.
    pub limit: Duration,
}

impl Default for Trial {
    fn default() -> Self {
        Self { most_cases: 400, patience: Duration::from_millis(200), limit: Duration::from_secs(30) }
    }
}

/// Runs `protocol` as both parties, with a dealer's correlations, under every kind of fault; panics if it does not survive.
pub fn assert_survives<T>(protocol: impl Fn(&mut Party) -> Result<T> + Send + Sync + 'static) -> Survival {
    Trial::default().party(protocol)
}

impl Trial {
    /// [`assert_survives`] with other settings.
    pub fn party<T>(self, protocol: impl Fn(&mut Party) -> Result<T> + Send + Sync + 'static) -> Survival {
        let seed = SecretRng::from_os().next_u64();
        self.channel(move |role, channel| {
            let mut party = Party {
                role,
                channel,
                ot: Box::new(Dealer::new(role, seed)),
                triples: Box::new(Dealer::new(role, seed ^ 1)),
                rng: SecretRng::from_os(),
            };
            protocol(&mut party).map(drop)
        })
    }

    /// The same for what needs only a channel. The channel is given away, so that the peer sees when a party ends.
    pub fn channel(self, protocol: impl Fn(Role, Channel) -> Result<()> + Send + Sync + 'static) -> Survival {
        self.pipe(move |role, pipe| protocol(role, Channel::new(pipe)))
    }

    /// The same for what makes its own channel.
    pub fn pipe(self, protocol: impl Fn(Role, Box<dyn Pipe>) -> Result<()> + Send + Sync + 'static) -> Survival {
        let protocol: Arc<Protocol> = Arc::new(protocol);
        let honest = self.run(&protocol, Role::Client, 0, Fault::None);
        for (role, outcome) in [(Role::Client, &honest.client), (Role::Server, &honest.server)] {
            assert!(outcome.is_ok(), "without any fault the {role:?} ends with {outcome:?}");
        }
        let mut plan = Vec::new();
        for (role, lengths) in [(Role::Client, &honest.client_sent), (Role::Server, &honest.server_sent)] {
            for (number, &length) in lengths.iter().enumerate() {
                plan.extend(faults(length, number as u64).into_iter().map(|fault| (role, number, fault)));
            }
        }
        // An odd stride, so that thinning does not always hit the same fault.
        let stride = plan.len().div_ceil(self.most_cases) | 1;
        let mut survival = Survival::default();
        for &(role, number, fault) in plan.iter().step_by(stride) {
            let run = self.run(&protocol, role, number, fault);
            survival.cases += 1;
            survival.refused += usize::from(run.client.is_err() || run.server.is_err());
            for outcome in [&run.client, &run.server] {
                survival.blamed_on_caller += usize::from(matches!(outcome, Err(Error::BadArgument(_))));
            }
        }
        survival
    }

    fn run(&self, protocol: &Arc<Protocol>, who: Role, target: usize, fault: Fault) -> Run {
        let (client, server) =
            memory::pipes(self.patience.max(if fault == Fault::None { self.limit } else { self.patience }));
        let pipe = |role: Role, inner| {
            MutatingPipe::new(Box::new(inner), if who == role { fault } else { Fault::None }, target)
        };
        let (client, server) = (pipe(Role::Client, client), pipe(Role::Server, server));
        let (client_sent, server_sent) = (client.lengths(), server.lengths());
        let (done, ended) = channel();
        for (role, pipe) in [(Role::Client, client), (Role::Server, server)] {
            let (protocol, done) = (protocol.clone(), done.clone());
            std::thread::spawn(move || {
                let body = || protocol(role, Box::new(pipe));
                let outcome = catch_unwind(AssertUnwindSafe(body));
                // The trial may have given up on us; then nobody listens.
                let _ = done.send((role, outcome));
            });
        }
        let (mut outcomes, what) = ([None, None], format!("{fault:?} on message {target} of the {who:?}"));
        for _ in 0..2 {
            match ended.recv_timeout(self.limit) {
                Ok((role, Ok(outcome))) => outcomes[usize::from(role == Role::Server)] = Some(outcome),
                Ok((role, Err(_))) => panic!("{what}: the {role:?} panicked"),
                Err(RecvTimeoutError::Timeout) => panic!("{what}: a party hangs"),
                Err(RecvTimeoutError::Disconnected) => panic!("{what}: a party vanished"),
            }
        }
        let lengths = |sent: Arc<Mutex<Vec<usize>>>| sent.lock().expect("no holder panics").clone();
        let [client, server] = outcomes.map(|outcome| outcome.expect("both parties reported"));
        Run { client, server, client_sent: lengths(client_sent), server_sent: lengths(server_sent) }
    }
}

type Protocol = dyn Fn(Role, Box<dyn Pipe>) -> Result<()> + Send + Sync;

struct Run {
    client: Result<()>,
    server: Result<()>,
    client_sent: Vec<usize>,
    server_sent: Vec<usize>,
}

/// What is tried on a message of `length` bytes.
fn faults(length: usize, seed: u64) -> Vec<Fault> {
    let mut rng = SecretRng::from_insecure_fixed_seed(seed);
    let bits = 8 * length as u64;
    let mut all = vec![Fault::Cut(0), Fault::Cut(7), Fault::Cut(HEADER), Fault::Cut(length - 1), Fault::Silence];
    all.extend([Fault::Drop, Fault::Duplicate, Fault::Overtaken, Fault::Longer, Fault::Shorter]);
    all.extend([0, 1, u32::MAX].map(Fault::Length));
    all.extend([0, 33, 48, 64, 127].map(Fault::Flip));
    if length > HEADER {
        all.extend([Fault::Random(seed), Fault::Random(!seed), Fault::Fill(0), Fault::Fill(0xff)]);
        all.extend([8 * HEADER, 8 * length - 1].map(Fault::Flip));
        all.extend((0..8).map(|_| Fault::Flip((rng.next_u64() % bits) as usize)));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::field;
    use crate::net::Kind;

    fn honest(party: &mut Party) -> Result<Vec<u64>> {
        let values = field::random_vector(&mut party.rng, 40);
        party.step("open", |party| {
            party.channel.send(Kind::Opening, &field::pack(&values))?;
            party.channel.receive_values(Kind::Opening, 40)?;
            party.channel.exchange(Kind::Choices, &[1; 10], 10)
        })?;
        Ok(values)
    }

    #[test]
    fn an_honest_step_survives_and_every_change_of_a_header_is_refused() {
        let trial = Trial { patience: Duration::from_millis(50), ..Trial::default() };
        let survival = trial.party(honest);
        assert!(survival.cases >= 60 && survival.refused >= survival.cases / 2, "{survival:?}");
        assert_eq!(survival.blamed_on_caller, 0);
    }

    #[test]
    #[should_panic(expected = "panicked")]
    fn a_step_that_trusts_the_peers_bytes_is_found() {
        Trial { patience: Duration::from_millis(50), ..Trial::default() }.party(|party| {
            let body = party.channel.exchange(Kind::Opening, &[0; 8], 8)?;
            let table = [0u8; 4];
            Ok(table[usize::from(body[0])])
        });
    }
}
