//! A link of a chosen bandwidth and delay, in the process, for measurements on one machine.
//!
//! Both ends are wrapped. The sender computes when each piece would have left a link of this bandwidth and when it would
//! arrive, and writes that time in front of it; the receiver sleeps until then. So bandwidth and delay hold in both
//! directions at once, nobody spins, and a stream is seen piece by piece as it would arrive. Not modelled: the packets'
//! own headers, loss, and TCP's slow start. Costs are counted above this layer and stay what they are without it.

use super::Pipe;
use crate::error::{Error, Result};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Bytes of the stamp: arrival (8, nanoseconds since the epoch), length (4).
const STAMP: usize = 12;
/// A long message arrives in pieces of this size.
const PIECE: usize = 64 << 10;
/// A sleep ends this much too late on Linux (the default timer slack), so it is asked for that much earlier.
const SLACK: Duration = Duration::from_micros(50);
/// A piece cannot honestly be due later than this; it bounds what a wrong stamp can cost.
const HORIZON: Duration = Duration::from_secs(3600);

/// Bandwidth and delay of a link, the same in both directions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Bits a second, each direction on its own.
    pub bits_per_second: f64,
    /// From one end to the other.
    pub one_way: Duration,
}

impl Link {
    /// 3 Gbit/s, 0.2 ms.
    pub const LAN: Link = Link { bits_per_second: 3e9, one_way: Duration::from_micros(200) };
    /// 400 Mbit/s, 40 ms.
    pub const WAN: Link = Link { bits_per_second: 4e8, one_way: Duration::from_millis(40) };

    /// How long `n` bytes occupy the link.
    pub fn occupied(&self, n: usize) -> Duration {
        Duration::from_secs_f64(n as f64 * 8.0 / self.bits_per_second)
    }
}

/// One end of a shaped link. The other end must be shaped too, by a process on the same machine.
pub struct ShapedPipe {
    inner: Box<dyn Pipe>,
    link: Link,
    staged: Vec<u8>,
    /// When the last piece sent has left the link.
    free: Duration,
    /// Bytes of the current piece still to be delivered.
    arrived: usize,
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn sleep_until(when: Duration) {
    let left = when.saturating_sub(now()).min(HORIZON);
    if left > SLACK {
        std::thread::sleep(left - SLACK);
    }
}

impl ShapedPipe {
    /// Shapes one end of a pipe.
    pub fn new(inner: Box<dyn Pipe>, link: Link) -> Self {
        Self { inner, link, staged: Vec::new(), free: Duration::ZERO, arrived: 0 }
    }

    fn ship(&mut self) -> Result<()> {
        if self.staged.is_empty() {
            return Ok(());
        }
        self.free = self.free.max(now()) + self.link.occupied(self.staged.len());
        let due = (self.free + self.link.one_way).as_nanos() as u64;
        self.inner.send(&due.to_le_bytes())?;
        self.inner.send(&(self.staged.len() as u32).to_le_bytes())?;
        self.inner.send(&self.staged)?;
        self.staged.clear();
        Ok(())
    }
}

impl Pipe for ShapedPipe {
    fn send(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let n = bytes.len().min(PIECE - self.staged.len());
            self.staged.extend_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
            if self.staged.len() == PIECE {
                self.ship()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.ship()?;
        self.inner.flush()
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < into.len() {
            if self.arrived == 0 {
                let mut stamp = [0u8; STAMP];
                self.inner.receive(&mut stamp)?;
                let (due, length) = stamp.split_at(8);
                sleep_until(Duration::from_nanos(u64::from_le_bytes(due.try_into().expect("8 bytes"))));
                self.arrived = u32::from_le_bytes(length.try_into().expect("4 bytes")) as usize;
                if self.arrived == 0 || self.arrived > PIECE {
                    return Err(Error::BadArgument("the other end of a shaped link is not shaped".into()));
                }
            }
            let n = (into.len() - done).min(self.arrived);
            self.inner.receive(&mut into[done..done + n])?;
            self.arrived -= n;
            done += n;
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        self.inner.check()
    }

    fn set_quiet_limit(&mut self, limit: Duration) {
        self.inner.set_quiet_limit(limit);
    }

    fn stopper(&self) -> Option<std::net::TcpStream> {
        self.inner.stopper()
    }

    fn binding(&self) -> Option<[u8; 32]> {
        self.inner.binding()
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory;
    use super::*;
    use std::time::Instant;

    fn ends(link: Link) -> (ShapedPipe, ShapedPipe) {
        let (a, b) = memory::pipes(Duration::from_secs(20));
        (ShapedPipe::new(Box::new(a), link), ShapedPipe::new(Box::new(b), link))
    }

    #[test]
    fn ten_round_trips_take_twenty_delays() {
        let link = Link { bits_per_second: 1e9, one_way: Duration::from_millis(10) };
        let (mut a, mut b) = ends(link);
        let started = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut byte = [0];
                for _ in 0..10 {
                    b.receive(&mut byte).unwrap();
                    b.send(&byte).unwrap();
                    b.flush().unwrap();
                }
            });
            let mut byte = [5];
            for _ in 0..10 {
                a.send(&byte).unwrap();
                a.flush().unwrap();
                a.receive(&mut byte).unwrap();
            }
        });
        let took = started.elapsed().as_secs_f64();
        // The machine may be busy, which can only add.
        assert!((0.198..0.6).contains(&took), "{took}");
    }

    #[test]
    fn both_directions_have_the_whole_bandwidth_at_once() {
        let link = Link { bits_per_second: 80e6, one_way: Duration::from_millis(5) };
        let (mut a, mut b) = ends(link);
        let body = vec![7u8; 2_000_000];
        let started = Instant::now();
        let both = |pipe: &mut ShapedPipe| {
            pipe.send(&body).unwrap();
            pipe.flush().unwrap();
            assert_eq!(pipe.receive_vec(body.len()).unwrap(), body);
        };
        std::thread::scope(|scope| {
            scope.spawn(|| both(&mut b));
            both(&mut a);
        });
        let took = started.elapsed().as_secs_f64();
        assert!((0.2..0.5).contains(&took), "2 MB each way at 10 MB/s took {took}");
    }
}
