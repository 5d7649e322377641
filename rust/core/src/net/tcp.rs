//! TCP: connecting and accepting within a time, and the limits that every connection lives under.

use super::socket::SocketPipe;
use crate::error::{Error, Result};
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// How long a peer may take, and how much it may make us hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// To connect.
    pub connect: Duration,
    /// For the whole TLS handshake, however its bytes are spread.
    pub handshake: Duration,
    /// For each message of the hello.
    pub hello: Duration,
    /// Between messages, and for a write that makes no progress.
    pub quiet: Duration,
    /// Bytes a second below which a message counts as stalled: a message of n bytes must be complete after
    /// `quiet + n / slowest`.
    pub slowest: u64,
    /// Bytes that may wait for us to read them before we stop reading.
    pub unread: usize,
    /// Bytes that may wait to be sent before `send` waits.
    pub unsent: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            handshake: Duration::from_secs(10),
            hello: Duration::from_secs(5),
            quiet: Duration::from_secs(60),
            slowest: 64 << 10,
            unread: 64 << 20,
            unsent: 64 << 20,
        }
    }
}

impl Limits {
    /// The time within which `n` bytes must be complete.
    pub fn for_bytes(&self, n: usize) -> Duration {
        self.quiet + Duration::from_millis(n as u64 * 1000 / self.slowest.max(1))
    }
}

/// Connects to `host:port`, trying each of its addresses.
pub fn connect(address: impl ToSocketAddrs, limits: &Limits) -> Result<TcpStream> {
    let deadline = Instant::now() + limits.connect;
    let mut last = std::io::Error::from(ErrorKind::AddrNotAvailable);
    for address in address.to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            last = ErrorKind::TimedOut.into();
            break;
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    if last.kind() == ErrorKind::TimedOut {
        return Err(Error::TimedOut { step: "connect".into(), seconds: limits.connect.as_secs() });
    }
    Err(Error::Link(last))
}

/// The next connection within `wait`. The listener is non-blocking from then on, and never set back: any number of
/// threads may accept on one listener, each within its own time.
pub fn accept(listener: &TcpListener, wait: Duration) -> Result<TcpStream> {
    let deadline = Instant::now() + wait;
    listener.set_nonblocking(true)?;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                // On some systems a connection inherits the listener's mode.
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                if Instant::now() >= deadline {
                    return Err(Error::TimedOut { step: "accept".into(), seconds: wait.as_secs() });
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(e) => return Err(Error::Link(e)),
        }
    }
}

/// A pipe without encryption or authentication, for tests and measurements on one machine: refused unless both ends
/// of the socket are loopback addresses.
pub fn insecure_plain_loopback(stream: TcpStream, limits: &Limits) -> Result<SocketPipe> {
    if !(stream.local_addr()?.ip().is_loopback() && stream.peer_addr()?.ip().is_loopback()) {
        return Err(Error::Unsupported("a connection without TLS is only for the loopback interface".into()));
    }
    SocketPipe::start(stream, None, Vec::new(), None, limits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, mpsc};

    #[test]
    fn two_threads_accept_on_one_listener_and_neither_waits_longer_than_it_said() {
        let listener = Arc::new(TcpListener::bind("127.0.0.1:0").unwrap());
        let address = listener.local_addr().unwrap();
        let (done, outcomes) = mpsc::channel();
        for _ in 0..2 {
            let (listener, done) = (listener.clone(), done.clone());
            std::thread::spawn(move || done.send(accept(&listener, Duration::from_millis(400))));
        }
        // One is served at once; the other must still notice that its time is over.
        let _ours = TcpStream::connect(address).unwrap();
        let next = || outcomes.recv_timeout(Duration::from_secs(10)).expect("an accept came back");
        assert!(next().is_ok());
        assert!(matches!(next(), Err(Error::TimedOut { .. })));
    }
}
