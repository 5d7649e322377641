//! The seam: what a channel needs from whatever carries its bytes.

use crate::error::Result;
use std::net::TcpStream;
use std::time::Duration;

/// Bodies grow from this size by doubling as their bytes arrive, so that a length on the wire takes no memory.
const FIRST_PIECE: usize = 256 << 10;

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
    /// The next `length` bytes from the peer. Takes memory as bytes arrive: at most twice what has come, and 256 KiB.
    fn receive_vec(&mut self, length: usize) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        while body.len() < length {
            let have = body.len();
            let next = length.min((2 * have).max(FIRST_PIECE));
            body.reserve_exact(next - have);
            body.resize(next, 0);
            self.receive(&mut body[have..])?;
        }
        Ok(body)
    }
    /// Fails if the peer is known to be gone; never waits. A pipe that cannot know says that all is well.
    fn check(&self) -> Result<()> {
        Ok(())
    }
    /// How long the peer may be silent while something is due.
    fn set_quiet_limit(&mut self, limit: Duration) {
        let _ = limit;
    }
    /// A second handle to the socket under this pipe, if there is one: shutting it down from another thread ends every
    /// wait of this party. What was under way then fails as if the peer were gone.
    fn stopper(&self) -> Option<TcpStream> {
        None
    }
    /// A value that only the two ends of this very connection can know (the TLS exporter); `None` over a plain pipe.
    fn binding(&self) -> Option<[u8; 32]> {
        None
    }
}
