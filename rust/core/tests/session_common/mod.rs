//! What the tests of sessions and of hostile peers share: identities, sockets, terms.
#![allow(dead_code)] // Each test binary uses a part of it.

use cloister_core::net::identity::{Generated, Identity, KeyKind, Trust, keygen};
use cloister_core::net::{Limits, SocketPipe, tcp, tls};
use cloister_core::session::{Session, Terms};
use cloister_core::{Error, Result};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

pub struct Someone {
    pub files: Generated,
    pub identity: Identity,
}

pub fn someone(kind: KeyKind) -> Someone {
    let files = keygen(kind).unwrap();
    let identity = Identity::from_pem(&files.certificate, &files.key).unwrap();
    Someone { files, identity }
}

impl Someone {
    pub fn trusted(&self) -> Trust {
        Trust::Keys(vec![self.files.fingerprint])
    }
}

/// Limits short enough for a test, long enough for a busy machine.
pub fn short() -> Limits {
    Limits {
        handshake: Duration::from_millis(1500),
        hello: Duration::from_millis(1500),
        quiet: Duration::from_millis(1500),
        ..Limits::default()
    }
}

/// A refusal may take the longest limit of a test and some scheduling on a busy machine.
pub const SOON: Duration = Duration::from_secs(6);

/// Limits so short that a message that does not come is late soon.
pub fn short_frames() -> Limits {
    let quiet = Duration::from_millis(600);
    Limits { hello: quiet, quiet, slowest: 1 << 20, handshake: Duration::from_secs(5), ..Limits::default() }
}

/// A frame by hand.
pub fn frame(kind: u16, sequence: u64, body: &[u8]) -> Vec<u8> {
    let mut out = (body.len() as u32).to_le_bytes().to_vec();
    out.extend(kind.to_le_bytes());
    out.extend([0; 2]);
    out.extend(sequence.to_le_bytes());
    out.extend(body);
    out
}

pub fn terms() -> Terms {
    Terms::new([3; 32], vec![33538049, 33292289, 33177601], 40, [9; 32])
}

/// Two connected sockets on the loopback interface: (connected, accepted).
pub fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = tcp::connect(listener.local_addr().unwrap(), &Limits::default()).unwrap();
    let server = tcp::accept(&listener, Duration::from_secs(5)).unwrap();
    (client, server)
}

pub fn plain_pair(limits: &Limits) -> (SocketPipe, SocketPipe) {
    let (a, b) = sockets();
    (tcp::insecure_plain_loopback(a, limits).unwrap(), tcp::insecure_plain_loopback(b, limits).unwrap())
}

pub fn tls_pair(limits: &Limits) -> (SocketPipe, SocketPipe) {
    let (client, server) = (someone(KeyKind::Ed25519), someone(KeyKind::P256));
    let (a, b) = sockets();
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| tls::accept(b, &server.identity, &client.trusted(), limits));
        let connected = tls::connect(a, &client.identity, &server.trusted(), limits);
        (connected.unwrap(), accepting.join().unwrap().unwrap())
    })
}

/// Runs both ends at once, each on its thread.
pub fn both<T: Send, U: Send>(a: impl FnOnce() -> T + Send, b: impl FnOnce() -> U + Send) -> (T, U) {
    std::thread::scope(|scope| {
        let other = scope.spawn(b);
        let mine = a();
        (mine, other.join().expect("the other end does not panic"))
    })
}

pub fn sessions(pipes: (SocketPipe, SocketPipe), limits: &Limits) -> (Result<Session>, Result<Session>) {
    let terms = terms();
    both(
        || Session::connect(Box::new(pipes.0), &terms, b"client store", limits),
        || Session::accept(Box::new(pipes.1), &terms, b"server store", limits),
    )
}

/// Runs our side against a hostile one and returns our error, which must come within `most`.
pub fn our_error<T>(most: Duration, ours: impl FnOnce() -> Result<T>) -> Error {
    let started = Instant::now();
    let error = match ours() {
        Ok(_) => panic!("our side accepted a hostile peer"),
        Err(error) => error,
    };
    assert!(started.elapsed() < most, "{error} only after {:?}", started.elapsed());
    error
}
