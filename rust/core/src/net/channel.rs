//! A channel: frames over a pipe, with the cost of each named step.

use super::Kind;
use crate::error::{Error, Result};
use std::time::Instant;

/// Bytes of a frame header.
pub const HEADER: usize = 16;

/// A duplex pipe of bytes. `send` never blocks for ever because the peer is sending too: a pipe over a socket reads
/// on a thread of its own. Time-outs and TLS live behind this trait; so do mock ciphers in fuzzers.
pub trait Pipe: Send {
    /// Queues bytes.
    fn send(&mut self, bytes: &[u8]) -> Result<()>;
    /// Makes sure that everything queued is on its way.
    fn flush(&mut self) -> Result<()>;
    /// Fills the buffer from the peer's bytes. `Error::Link` with `UnexpectedEof` if the peer is gone, with
    /// `TimedOut` if it is silent too long.
    fn receive(&mut self, into: &mut [u8]) -> Result<()>;
}

/// What one step cost this party.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepCost {
    /// The path of the step, outer names first: `silu/compare`.
    pub step: String,
    /// Bytes sent, headers included.
    pub bytes_sent: u64,
    /// Bytes received, headers included.
    pub bytes_received: u64,
    /// Messages sent.
    pub messages_sent: u64,
    /// Times that this party had to wait for the peer after sending something (a round as the receiver sees it).
    pub rounds: u64,
    /// Wall-clock seconds inside the step, inner steps excluded.
    pub seconds: f64,
}

/// Framed messages over a pipe.
pub struct Channel {
    pipe: Box<dyn Pipe>,
    sent: u64,
    received: u64,
    sent_since_wait: bool,
    steps: Vec<StepCost>,
    path: Vec<usize>,
    since: Instant,
    broken: bool,
}

impl Channel {
    /// A channel over a pipe whose other end is a [`Channel`] too.
    pub fn new(pipe: Box<dyn Pipe>) -> Self {
        let root = StepCost { step: "session".into(), ..StepCost::default() };
        Self {
            pipe,
            sent: 0,
            received: 0,
            sent_since_wait: false,
            steps: vec![root],
            path: vec![0],
            since: Instant::now(),
            broken: false,
        }
    }

    /// Runs `body` with every byte, round and second counted under `name`, inside the step that is running.
    pub fn enter(&mut self, name: &str) {
        self.settle();
        let parent = &self.steps[self.current()].step;
        let step = if self.path.len() == 1 { name.to_owned() } else { format!("{parent}/{name}") };
        let index = self.steps.iter().position(|s| s.step == step).unwrap_or_else(|| {
            self.steps.push(StepCost { step, ..StepCost::default() });
            self.steps.len() - 1
        });
        self.path.push(index);
    }

    /// Leaves the step entered last.
    pub fn leave(&mut self) {
        self.settle();
        if self.path.len() > 1 {
            self.path.pop();
        }
    }

    /// Sends one message. Queued; it travels at the next [`Channel::flush`] or receive.
    pub fn send(&mut self, kind: Kind, body: &[u8]) -> Result<()> {
        self.check()?;
        let length = u32::try_from(body.len())
            .map_err(|_| Error::BadArgument("a message of 4 GiB or more must be sent in parts".into()))?;
        let mut header = [0u8; HEADER];
        header[..4].copy_from_slice(&length.to_le_bytes());
        header[4..6].copy_from_slice(&(kind as u16).to_le_bytes());
        header[8..].copy_from_slice(&self.sent.to_le_bytes());
        self.sent += 1;
        let outcome = self.pipe.send(&header).and_then(|()| self.pipe.send(body));
        self.note(outcome)?;
        let index = self.current();
        self.steps[index].bytes_sent += (HEADER + body.len()) as u64;
        self.steps[index].messages_sent += 1;
        self.sent_since_wait = true;
        Ok(())
    }

    /// Puts everything queued on its way.
    pub fn flush(&mut self) -> Result<()> {
        self.check()?;
        let outcome = self.pipe.flush();
        self.note(outcome)
    }

    /// Receives the next message, which must have this kind and exactly this length.
    pub fn receive(&mut self, kind: Kind, length: usize) -> Result<Vec<u8>> {
        self.receive_between(kind, length, length)
    }

    /// Receives the next message, which must have this kind and a length in `least..=most`. Only the hello and the
    /// commands have lengths that are not known to both sides beforehand.
    pub fn receive_between(&mut self, kind: Kind, least: usize, most: usize) -> Result<Vec<u8>> {
        self.flush()?;
        let index = self.current();
        if std::mem::take(&mut self.sent_since_wait) {
            self.steps[index].rounds += 1;
        }
        let mut header = [0u8; HEADER];
        let outcome = self.pipe.receive(&mut header);
        self.note(outcome)?;
        let length = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let number = u16::from_le_bytes([header[4], header[5]]);
        let reserved = u16::from_le_bytes([header[6], header[7]]);
        let sequence = u64::from_le_bytes(header[8..].try_into().expect("8 bytes"));
        let reason = if Kind::from_number(number) != Some(kind) {
            Some(format!("kind {number} where {kind:?} was due"))
        } else if reserved != 0 {
            Some("a reserved field is not zero".into())
        } else if sequence != self.received {
            Some(format!("message number {sequence} where {} was due", self.received))
        } else if length < least || length > most {
            Some(format!("{length} bytes where {least} to {most} were due"))
        } else {
            None
        };
        if let Some(reason) = reason {
            return Err(self.refuse(reason));
        }
        self.received += 1;
        let mut body = vec![0u8; length];
        let outcome = self.pipe.receive(&mut body);
        self.note(outcome)?;
        self.steps[index].bytes_received += (HEADER + length) as u64;
        Ok(body)
    }

    /// Sends and receives one message each; one round.
    pub fn exchange(&mut self, kind: Kind, body: &[u8], length: usize) -> Result<Vec<u8>> {
        self.send(kind, body)?;
        self.receive(kind, length)
    }

    /// The error for a message whose body turned out to be wrong. Ends the session.
    pub fn refuse(&mut self, reason: impl Into<String>) -> Error {
        self.broken = true;
        Error::BadMessage { step: self.steps[self.current()].step.clone(), reason: reason.into() }
    }

    /// What every step cost so far, in the order in which steps were first entered.
    pub fn costs(&mut self) -> Vec<StepCost> {
        self.settle();
        self.steps.clone()
    }

    /// Forgets the costs counted so far, so that a measurement can begin. Only outside all steps.
    pub fn reset_costs(&mut self) {
        self.settle();
        self.steps.truncate(1);
        self.path.truncate(1);
        self.steps[0] = StepCost { step: "session".into(), ..StepCost::default() };
    }

    fn current(&self) -> usize {
        self.path.last().copied().unwrap_or(0)
    }

    fn settle(&mut self) {
        let now = Instant::now();
        let index = self.current();
        self.steps[index].seconds += (now - self.since).as_secs_f64();
        self.since = now;
    }

    fn check(&self) -> Result<()> {
        if self.broken { Err(Error::SessionOver) } else { Ok(()) }
    }

    fn note<T>(&mut self, outcome: Result<T>) -> Result<T> {
        outcome.map_err(|error| {
            self.broken = true;
            let step = self.steps[self.current()].step.clone();
            match error {
                Error::Link(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => Error::PeerGone { step },
                other => other,
            }
        })
    }
}
