//! Two ends of a pipe in one process: the stand-in for a socket in unit tests and fuzzers.

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
}

/// Two connected pipes; a silent peer is given up after `timeout`.
pub fn pipes(timeout: Duration) -> (MemoryPipe, MemoryPipe) {
    let ((a, from_a), (b, from_b)) = (channel(), channel());
    let end = |out, incoming| MemoryPipe { out, incoming, rest: Vec::new(), at: 0, timeout };
    (end(a, from_b), end(b, from_a))
}

/// Two connected channels with a time-out of a minute.
pub fn channels() -> (Channel, Channel) {
    let (a, b) = pipes(Duration::from_secs(60));
    (Channel::new(Box::new(a)), Channel::new(Box::new(b)))
}

impl Pipe for MemoryPipe {
    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.send(bytes.to_vec()).map_err(|_| Error::Link(ErrorKind::UnexpectedEof.into()))
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
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
