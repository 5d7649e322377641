//! A channel: frames over a pipe, with the cost of each named step.

use super::cost::StepCost;
use super::frame::{self, Due, HEADER};
use super::{Kind, Pipe};
use crate::error::{Error, Result};
use crate::field;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Framed messages over a pipe.
pub struct Channel {
    pipe: Box<dyn Pipe>,
    sent: u64,
    received: u64,
    sent_since_wait: bool,
    steps: Vec<StepCost>,
    path: Vec<usize>,
    since: Instant,
    over: bool,
}

/// A step that was begun and must be ended; see [`Channel::step`], which does both.
#[must_use]
pub struct Begun {
    depth: usize,
    moved: u64,
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
            over: false,
        }
    }

    /// Runs `body` with every byte, round and second counted under `name`, inside the step that is running. However
    /// `body` ends, the books are left in order; if it fails after a byte moved, the session is over.
    pub fn step<T>(&mut self, name: &str, body: impl FnOnce(&mut Channel) -> Result<T>) -> Result<T> {
        let begun = self.begin(name);
        let outcome = body(self);
        self.end(begun, &outcome);
        outcome
    }

    /// Begins a step by hand, for callers that hold the channel inside something else. Prefer [`Channel::step`].
    pub fn begin(&mut self, name: &str) -> Begun {
        let begun = Begun { depth: self.path.len(), moved: self.sent + self.received };
        self.enter(name);
        begun
    }

    /// Ends a step begun with [`Channel::begin`], and every inner step that an early return left open.
    pub fn end<T>(&mut self, begun: Begun, outcome: &Result<T>) {
        self.settle();
        self.path.truncate(begun.depth.max(1));
        if let Err(error) = outcome {
            // A caller's mistake that was found before anything moved leaves both parties where they were.
            let harmless = matches!(error, Error::BadArgument(_) | Error::Unsupported(_));
            if !harmless || self.sent + self.received != begun.moved {
                self.over = true;
            }
        }
    }

    /// Counts what follows under `name`, inside the step that is running, until [`Channel::leave`].
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
        let header = frame::encode(kind, length, self.sent);
        self.sent += 1;
        let started = Instant::now();
        // An empty body is not sent at all: the peer may be gone, in order, as soon as it has the header.
        let body_too = |pipe: &mut Box<dyn Pipe>| if body.is_empty() { Ok(()) } else { pipe.send(body) };
        let outcome = self.pipe.send(&header).and_then(|()| body_too(&mut self.pipe));
        self.note(started, outcome)?;
        let index = self.current();
        self.steps[index].bytes_sent += (HEADER + body.len()) as u64;
        self.steps[index].messages_sent += 1;
        self.sent_since_wait = true;
        Ok(())
    }

    /// Puts everything queued on its way.
    pub fn flush(&mut self) -> Result<()> {
        self.check()?;
        let started = Instant::now();
        let outcome = self.pipe.flush();
        self.note(started, outcome)
    }

    /// Fails if the peer is known to be gone, without waiting: for a party that computes for long between two messages.
    pub fn check_peer(&mut self) -> Result<()> {
        self.check()?;
        let outcome = self.pipe.check();
        self.note(Instant::now(), outcome)
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
        let started = Instant::now();
        let mut header = [0u8; HEADER];
        let outcome = self.pipe.receive(&mut header);
        self.note(started, outcome)?;
        let decoded = frame::decode(&header, &Due { kind, sequence: self.received, least, most });
        let decoded = self.decoded(decoded);
        let length = self.note(started, decoded)?;
        self.received += 1;
        let started = Instant::now();
        let outcome = self.pipe.receive_vec(length);
        let body = self.note(started, outcome)?;
        self.steps[index].bytes_received += (HEADER + length) as u64;
        Ok(body)
    }

    /// Receives `n` packed field elements.
    pub fn receive_values(&mut self, kind: Kind, n: usize) -> Result<Vec<u64>> {
        let body = self.receive(kind, field::packed_len(n, field::P_BITS))?;
        self.decoded(field::unpack(&body, n))
    }

    /// Sends and receives one message each; one round.
    pub fn exchange(&mut self, kind: Kind, body: &[u8], length: usize) -> Result<Vec<u8>> {
        self.send(kind, body)?;
        self.receive(kind, length)
    }

    /// Says goodbye, waits for the peer's, and ends the session in order. Nothing can be sent afterwards.
    pub fn goodbye(&mut self) -> Result<()> {
        self.exchange(Kind::Goodbye, &[], 0)?;
        self.over = true;
        Ok(())
    }

    /// The error for a message whose body turned out to be wrong. Ends the session.
    pub fn refuse(&mut self, reason: impl Into<String>) -> Error {
        self.over = true;
        Error::BadMessage { step: self.steps[self.current()].step.clone(), reason: reason.into() }
    }

    /// Passes on what a decoder made of the peer's bytes. A decoder's `BadArgument` becomes `BadMessage`, because the
    /// mistake is the peer's and not the caller's; any error ends the session.
    pub fn decoded<T>(&mut self, outcome: Result<T>) -> Result<T> {
        outcome.map_err(|error| {
            self.over = true;
            match error {
                Error::BadArgument(reason) => self.refuse(reason),
                other => other,
            }
        })
    }

    /// Ends the session: whatever is tried on this channel afterwards fails with `SessionOver`.
    pub fn give_up(&mut self) {
        self.over = true;
    }

    /// True once an error or a goodbye ended the session.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// How long the peer may be silent while a message is due. A step that makes the peer work for long raises it.
    pub fn set_quiet_limit(&mut self, limit: Duration) {
        self.pipe.set_quiet_limit(limit);
    }

    /// A handle whose shutdown ends every wait on this channel; see [`Pipe::stopper`].
    pub fn stopper(&self) -> Option<TcpStream> {
        self.pipe.stopper()
    }

    /// What ties this session to the connection under it: the TLS exporter, or nothing over a plain pipe.
    pub fn binding(&self) -> Option<[u8; 32]> {
        self.pipe.binding()
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
        if self.over { Err(Error::SessionOver) } else { Ok(()) }
    }

    /// Names the running step in a failure of the pipe, and ends the session with it.
    fn note<T>(&mut self, started: Instant, outcome: Result<T>) -> Result<T> {
        outcome.map_err(|error| {
            self.over = true;
            let step = self.steps[self.current()].step.clone();
            match error {
                Error::Link(e) if e.kind() == ErrorKind::UnexpectedEof => Error::PeerGone { step },
                Error::Link(e) if matches!(e.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => {
                    Error::TimedOut { step, seconds: started.elapsed().as_secs_f64().round() as u64 }
                }
                other => other,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{cost, memory};
    use super::*;

    fn run<T: Send, U: Send>(
        a: impl FnOnce(&mut Channel) -> T + Send,
        b: impl FnOnce(&mut Channel) -> U + Send,
    ) -> (T, U, Vec<StepCost>, Vec<StepCost>) {
        let (mut left, mut right) = memory::channels();
        std::thread::scope(|scope| {
            let other = scope.spawn(move || {
                let u = b(&mut right);
                (u, right.costs())
            });
            let t = a(&mut left);
            let ours = left.costs();
            drop(left);
            let (u, theirs) = other.join().unwrap();
            (t, u, ours, theirs)
        })
    }

    #[test]
    fn both_books_agree_to_the_byte_and_rounds_are_waits() {
        let protocol = |ch: &mut Channel, first: bool| -> Result<()> {
            for _ in 0..3 {
                ch.step("outer", |ch| {
                    ch.exchange(Kind::Opening, &[7; 100], 100)?;
                    ch.step("inner", |ch| ch.exchange(Kind::Choices, &[1; 10], 10).map(drop))
                })?;
            }
            ch.step("ask", |ch| {
                if first {
                    ch.send(Kind::Request, &[0; 1000])?;
                    ch.receive(Kind::Answer, 500).map(drop)
                } else {
                    ch.receive(Kind::Request, 1000)?;
                    ch.send(Kind::Answer, &[0; 500])?;
                    ch.flush()
                }
            })
        };
        let (a, b, ours, theirs) = run(|ch| protocol(ch, true), |ch| protocol(ch, false));
        a.unwrap();
        b.unwrap();
        assert_eq!(cost::difference(&ours, &theirs), None);
        let find = |costs: &[StepCost], name: &str| costs.iter().find(|c| c.step == name).unwrap().clone();
        for (step, rounds, bytes) in [("outer", 3, 348), ("outer/inner", 3, 78)] {
            for costs in [&ours, &theirs] {
                let cost = find(costs, step);
                assert_eq!((cost.rounds, cost.bytes_sent, cost.bytes_received), (rounds, bytes, bytes), "{step}");
            }
        }
        assert_eq!((find(&ours, "ask").rounds, find(&theirs, "ask").rounds), (1, 0));
        assert_eq!(find(&theirs, "ask").bytes_received, 1016);
        let mut wrong = theirs.clone();
        wrong[1].bytes_received += 1;
        assert!(cost::difference(&ours, &wrong).is_some());
        assert!(cost::difference(&ours, &theirs[..2]).is_some());
        assert!(cost::difference(&ours[..2], &theirs).is_some());
        assert!(cost::to_json(&ours).starts_with("[{\"step\":\"session\","));
    }

    #[test]
    fn an_error_inside_a_step_leaves_the_books_in_order_and_ends_the_session() {
        let (mut a, mut b) = memory::channels();
        let outcome = a.step("outer", |ch| {
            ch.enter("left open");
            ch.step("inner", |ch| {
                ch.send(Kind::Opening, &[1])?;
                Err::<(), _>(Error::BadArgument("too long".into()))
            })
        });
        assert!(matches!(outcome, Err(Error::BadArgument(_))));
        assert_eq!(a.path, [0]);
        assert!(a.is_over());
        assert!(matches!(a.send(Kind::Opening, &[]), Err(Error::SessionOver)));
        assert!(matches!(a.receive(Kind::Opening, 0), Err(Error::SessionOver)));
        // Nothing moved: the caller may correct the mistake.
        let outcome = b.step("checks", |_| Err::<(), _>(Error::BadArgument("wrong shape".into())));
        assert!(outcome.is_err() && !b.is_over());
        assert!(b.step("dies", |_| Err::<(), _>(Error::Exhausted("none left".into()))).is_err() && b.is_over());
    }

    #[test]
    fn a_decoders_error_is_the_peers_fault() {
        let (mut a, mut b) = memory::channels();
        a.send(Kind::Opening, &[0xff; 6]).unwrap();
        let error = b.step("open", |ch| ch.receive_values(Kind::Opening, 1)).unwrap_err();
        assert!(matches!(&error, Error::BadMessage { step, .. } if step == "open"), "{error}");
        assert!(b.is_over());
    }

    #[test]
    fn a_goodbye_in_the_middle_is_a_peer_that_left() {
        let (a, b, ..) = run(|ch| ch.goodbye(), |ch| ch.step("work", |ch| ch.receive(Kind::Opening, 5)));
        assert!(a.is_err());
        assert!(matches!(&b, Err(Error::PeerGone { step }) if step == "work"));
        let (a, b, ..) = run(|ch| (ch.goodbye(), ch.goodbye()), |ch| ch.goodbye());
        assert!(a.0.is_ok() && b.is_ok());
        assert!(matches!(a.1, Err(Error::SessionOver)));
    }

    #[test]
    fn silence_is_a_time_out_with_the_name_of_the_step() {
        let (a, _b) = memory::pipes(Duration::from_millis(20));
        let error = Channel::new(Box::new(a)).step("wait", |ch| ch.receive(Kind::Opening, 5)).unwrap_err();
        assert!(matches!(&error, Error::TimedOut { step, .. } if step == "wait"), "{error}");
    }
}
