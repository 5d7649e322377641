//! Two ends of a pipe in one process: the stand-in for a socket in unit tests and fuzzers. Bytes travel when they are
//! sent ([`pipes`]) or, for tests that look for a missing flush, not before a flush ([`withholding_pipes`]).

use super::{Channel, Pipe};
use crate::error::{Error, Result};
use std::io::ErrorKind;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// One end of an in-process pipe.
pub struct MemoryPipe {
    out: Sender<Vec<u8>>,
    incoming: Receiver<Vec<u8>>,
    rest: Vec<u8>,
    at: usize,
    timeout: Duration,
    /// Bytes that wait for a flush; `None` if none ever does.
    withheld: Option<Vec<u8>>,
}

/// Two connected pipes; a silent peer is given up after `timeout`.
pub fn pipes(timeout: Duration) -> (MemoryPipe, MemoryPipe) {
    let ((a, from_a), (b, from_b)) = (channel(), channel());
    let end = |out, incoming| MemoryPipe { out, incoming, rest: Vec::new(), at: 0, timeout, withheld: None };
    (end(a, from_b), end(b, from_a))
}

/// Like [`pipes`], but what is sent travels only at the next flush, and what was never flushed is lost: as a pipe may
/// behave that gathers small writes.
pub fn withholding_pipes(timeout: Duration) -> (MemoryPipe, MemoryPipe) {
    let (mut a, mut b) = pipes(timeout);
    (a.withheld, b.withheld) = (Some(Vec::new()), Some(Vec::new()));
    (a, b)
}

/// Two connected channels with a time-out of a minute.
pub fn channels() -> (Channel, Channel) {
    let (a, b) = pipes(Duration::from_secs(60));
    (Channel::new(Box::new(a)), Channel::new(Box::new(b)))
}

impl MemoryPipe {
    fn pass(&self, bytes: Vec<u8>) -> Result<()> {
        self.out.send(bytes).map_err(|_| Error::Link(ErrorKind::UnexpectedEof.into()))
    }
}

impl Pipe for MemoryPipe {
    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.withheld {
            Some(withheld) => {
                withheld.extend_from_slice(bytes);
                Ok(())
            }
            None => self.pass(bytes.to_vec()),
        }
    }

    fn flush(&mut self) -> Result<()> {
        match &mut self.withheld {
            Some(withheld) if !withheld.is_empty() => {
                let bytes = std::mem::take(withheld);
                self.pass(bytes)
            }
            _ => Ok(()),
        }
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<()> {
        let deadline = Instant::now() + self.timeout;
        let mut done = 0;
        while done < into.len() {
            if self.at == self.rest.len() {
                self.rest = self.incoming.recv_timeout(deadline.saturating_duration_since(Instant::now())).map_err(
                    |e| match e {
                        RecvTimeoutError::Timeout => Error::Link(ErrorKind::TimedOut.into()),
                        RecvTimeoutError::Disconnected => Error::Link(ErrorKind::UnexpectedEof.into()),
                    },
                )?;
                self.at = 0;
            }
            let n = (into.len() - done).min(self.rest.len() - self.at);
            into[done..done + n].copy_from_slice(&self.rest[self.at..self.at + n]);
            self.at += n;
            done += n;
        }
        Ok(())
    }

    fn set_quiet_limit(&mut self, limit: Duration) {
        self.timeout = limit;
    }
}
