//! A pipe over a TCP connection, plain or under TLS: two threads keep both directions moving whatever the party does.
//!
//! Why nothing can stand still for ever, and why memory stays bounded:
//! * The reader puts what arrives into the inbox and stops reading when `unread` bytes wait there. So a peer that
//!   floods meets a full socket, not our memory.
//! * The writer takes what was sent from the outbox. `send` waits while more than `unsent` bytes are queued, unless the
//!   inbox is full too: then both parties are sending, and a party that waited would wait for ever. It queues instead;
//!   what it queues then is its own plan's bytes, which no peer can inflate. If our inbox is not full, our reader
//!   reads everything the peer sends, so the peer can always come to the point where it receives from us.
//! * A message that is due must be complete after the quiet limit and the time that its length takes at the slowest
//!   rate allowed; the same holds for a write. A peer that trickles is found by that, not only one that is silent.

use super::{Limits, Pipe};
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::io::{BufRead, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes handed from the party to the writer, and from the reader to the party, at a time.
const PIECE: usize = 128 << 10;
/// The least that a queued piece has room for.
const SMALL: usize = 1 << 10;
/// A drained piece is kept for the next use, up to this many.
const SPARES: usize = 4;
/// How long a pipe that is dropped waits for its last bytes to leave.
const LINGER: Duration = Duration::from_secs(2);
/// How long a failed write waits for the reader to find out why: a refusal by the peer arrives as an alert.
const REASON: Duration = Duration::from_millis(250);

/// A pipe over a connected socket.
pub struct SocketPipe {
    shared: Arc<Shared>,
    staged: Vec<u8>,
    front: Vec<u8>,
    taken: usize,
    limits: Limits,
    binding: Option<[u8; 32]>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    stream: TcpStream,
    tls: Option<Mutex<rustls::Connection>>,
    limits: Limits,
    state: Mutex<State>,
    /// The party waits here for bytes, for room, or for an end.
    party: Condvar,
    reader: Condvar,
    writer: Condvar,
}

#[derive(Default)]
struct State {
    inbox: VecDeque<Vec<u8>>,
    unread: usize,
    read_end: Option<End>,
    outbox: VecDeque<Vec<u8>>,
    unsent: usize,
    write_end: Option<End>,
    closing: bool,
    spares: Vec<Vec<u8>>,
}

/// Why a direction ended. Kept instead of an [`Error`] because every later call must see it too.
#[derive(Clone)]
enum End {
    Link(ErrorKind),
    Refused(String),
}

impl End {
    fn error(&self) -> Error {
        match self {
            End::Link(kind) => Error::Link((*kind).into()),
            End::Refused(why) => Error::NotAuthenticated(why.clone()),
        }
    }
}

impl Shared {
    /// The lock cannot be poisoned by a peer: nothing panics while it is held.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl SocketPipe {
    /// Starts the two threads of a connected socket. `tls` has finished its handshake, and `early` is what came with it.
    pub(super) fn start(
        stream: TcpStream,
        tls: Option<rustls::Connection>,
        early: Vec<u8>,
        binding: Option<[u8; 32]>,
        limits: &Limits,
    ) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(Some(limits.quiet))?;
        let mut state = State::default();
        if !early.is_empty() {
            state.unread = early.len();
            state.inbox.push_back(early);
        }
        let shared = Arc::new(Shared {
            stream,
            tls: tls.map(Mutex::new),
            limits: *limits,
            state: Mutex::new(state),
            party: Condvar::new(),
            reader: Condvar::new(),
            writer: Condvar::new(),
        });
        let mut pipe = Self {
            shared: shared.clone(),
            staged: Vec::new(),
            front: Vec::new(),
            taken: 0,
            limits: *limits,
            binding,
            threads: Vec::new(),
        };
        let thread = |name: &str| std::thread::Builder::new().name(name.into());
        let reading = shared.clone();
        pipe.threads.push(thread("cloister-read").spawn(move || read_all(&reading))?);
        pipe.threads.push(thread("cloister-write").spawn(move || write_all(&shared))?);
        Ok(pipe)
    }

    /// Hands what is staged to the writer.
    fn hand_over(&mut self) -> Result<()> {
        let shared = &self.shared;
        let mut state = shared.lock();
        loop {
            if let Some(end) = state.write_end.clone() {
                let (state, _) = shared
                    .party
                    .wait_timeout_while(state, REASON, |s| s.read_end.is_none())
                    .unwrap_or_else(|poisoned| poisoned.into_inner());
                return Err(state.read_end.clone().unwrap_or(end).error());
            }
            if let Some(end @ End::Refused(_)) = &state.read_end {
                return Err(end.error());
            }
            let room = state.unsent + self.staged.len() <= shared.limits.unsent || state.unsent == 0;
            if room || state.unread >= shared.limits.unread {
                break;
            }
            state = shared.party.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        let fresh = state.spares.pop().unwrap_or_default();
        let full = std::mem::replace(&mut self.staged, fresh);
        state.unsent += full.len();
        state.outbox.push_back(full);
        drop(state);
        shared.writer.notify_one();
        Ok(())
    }

    /// The unread rest of the front piece, waiting for the next piece if it is used up.
    fn refill(&mut self, deadline: Instant) -> Result<()> {
        if self.taken < self.front.len() {
            return Ok(());
        }
        let shared = &self.shared;
        let mut state = shared.lock();
        loop {
            if let Some(piece) = state.inbox.pop_front() {
                let was_full = state.unread >= shared.limits.unread;
                state.unread -= piece.len();
                let mut old = std::mem::replace(&mut self.front, piece);
                self.taken = 0;
                if state.spares.len() < SPARES && old.capacity() <= 2 * PIECE {
                    old.clear();
                    state.spares.push(old);
                }
                if was_full && state.unread < shared.limits.unread {
                    shared.reader.notify_one();
                }
                return Ok(());
            }
            if let Some(end) = &state.read_end {
                return Err(end.error());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Link(ErrorKind::TimedOut.into()));
            }
            state = shared.party.wait_timeout(state, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }
}

impl Pipe for SocketPipe {
    fn send(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let n = bytes.len().min(PIECE - self.staged.len());
            self.staged.extend_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
            if self.staged.len() == PIECE {
                self.hand_over()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if self.staged.is_empty() { Ok(()) } else { self.hand_over() }
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<()> {
        let deadline = Instant::now() + self.limits.for_bytes(into.len());
        let mut done = 0;
        while done < into.len() {
            self.refill(deadline)?;
            let n = (into.len() - done).min(self.front.len() - self.taken);
            into[done..done + n].copy_from_slice(&self.front[self.taken..self.taken + n]);
            self.taken += n;
            done += n;
        }
        Ok(())
    }

    fn receive_vec(&mut self, length: usize) -> Result<Vec<u8>> {
        let deadline = Instant::now() + self.limits.for_bytes(length);
        let mut body = Vec::new();
        while body.len() < length {
            self.refill(deadline)?;
            let n = (length - body.len()).min(self.front.len() - self.taken);
            if body.capacity() - body.len() < n {
                // Twice what has been taken, whatever length was announced: with the inbox, whose pieces are at least
                // three quarters full, that is at most twice what has arrived.
                body.reserve_exact(length.min(2 * (body.len() + n)) - body.len());
            }
            body.extend_from_slice(&self.front[self.taken..self.taken + n]);
            self.taken += n;
        }
        Ok(body)
    }

    fn check(&self) -> Result<()> {
        let state = self.shared.lock();
        match state.read_end.as_ref().or(state.write_end.as_ref()) {
            Some(end) => Err(end.error()),
            None => Ok(()),
        }
    }

    fn set_quiet_limit(&mut self, limit: Duration) {
        self.limits.quiet = limit;
    }

    fn stopper(&self) -> Option<TcpStream> {
        self.shared.stream.try_clone().ok()
    }

    fn binding(&self) -> Option<[u8; 32]> {
        self.binding
    }
}

impl Drop for SocketPipe {
    fn drop(&mut self) {
        // What was flushed leaves, if the peer takes it within the linger time; then both threads end.
        let mut state = self.shared.lock();
        state.closing = true;
        self.shared.writer.notify_one();
        self.shared.reader.notify_one();
        let (state, _) = self
            .shared
            .party
            .wait_timeout_while(state, LINGER, |s| s.write_end.is_none())
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        drop(state);
        // An error here means that the socket is closed already.
        let _ = self.shared.stream.shutdown(Shutdown::Both);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// The reader's life: socket to inbox, until the peer ends or the pipe is dropped.
fn read_all(shared: &Shared) {
    let end = match &shared.tls {
        None => read_plain(shared),
        Some(tls) => read_tls(shared, tls),
    };
    shared.lock().read_end = Some(end);
    shared.party.notify_one();
}

/// Waits for room; `None` when the pipe is being dropped.
fn room(shared: &Shared) -> Option<Vec<u8>> {
    let mut state = shared.lock();
    while state.unread >= shared.limits.unread && !state.closing {
        state = shared.reader.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
    }
    if state.closing { None } else { Some(state.spares.pop().unwrap_or_default()) }
}

/// Puts a piece into the inbox. A peer that sends a few bytes at a time must not make us hold a large buffer, or an
/// allocation, for each: what fits goes to the end of the last piece, and a buffer that is mostly empty is not queued.
fn deliver(shared: &Shared, mut piece: Vec<u8>) {
    if piece.is_empty() {
        return;
    }
    let mut state = shared.lock();
    state.unread += piece.len();
    let fits = |last: &&mut Vec<u8>| last.capacity() - last.len() >= piece.len();
    if let Some(last) = state.inbox.back_mut().filter(fits) {
        last.extend_from_slice(&piece);
    } else if 4 * piece.len() >= 3 * piece.capacity() {
        state.inbox.push_back(std::mem::take(&mut piece));
    } else {
        // Room for a few small arrivals, so that they do not become an allocation each.
        let mut small = Vec::with_capacity(piece.len().max(SMALL));
        small.extend_from_slice(&piece);
        state.inbox.push_back(small);
    }
    if piece.capacity() > 0 && state.spares.len() < SPARES {
        piece.clear();
        state.spares.push(piece);
    }
    drop(state);
    shared.party.notify_one();
}

fn read_some(mut stream: &TcpStream, into: &mut [u8]) -> std::result::Result<usize, End> {
    loop {
        match stream.read(into) {
            Ok(0) => return Err(End::Link(ErrorKind::UnexpectedEof)),
            Ok(n) => return Ok(n),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(End::Link(e.kind())),
        }
    }
}

fn read_plain(shared: &Shared) -> End {
    let mut raw = vec![0u8; PIECE];
    while let Some(mut piece) = room(shared) {
        match read_some(&shared.stream, &mut raw) {
            Ok(n) => piece.extend_from_slice(&raw[..n]),
            Err(end) => return end,
        }
        deliver(shared, piece);
    }
    End::Link(ErrorKind::UnexpectedEof)
}

fn read_tls(shared: &Shared, tls: &Mutex<rustls::Connection>) -> End {
    let mut raw = vec![0u8; PIECE];
    while let Some(mut piece) = room(shared) {
        let n = match read_some(&shared.stream, &mut raw) {
            Ok(n) => n,
            Err(end) => return end,
        };
        let mut tls = tls.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let outcome = decrypt(&mut tls, &raw[..n], &mut piece);
        drop(tls);
        deliver(shared, piece);
        match outcome {
            Ok(false) => {}
            Ok(true) => return End::Link(ErrorKind::UnexpectedEof),
            Err(end) => return end,
        }
    }
    End::Link(ErrorKind::UnexpectedEof)
}

/// Feeds bytes of the wire to TLS and appends what they say; true when the peer closed in order.
fn decrypt(tls: &mut rustls::Connection, mut raw: &[u8], plain: &mut Vec<u8>) -> std::result::Result<bool, End> {
    while !raw.is_empty() {
        match tls.read_tls(&mut raw) {
            Ok(0) => return Ok(true),
            Ok(_) => {}
            Err(e) => return Err(End::Link(e.kind())),
        }
        let news = tls.process_new_packets().map_err(|e| End::Refused(super::tls::explain(&e)))?;
        let mut waiting = news.plaintext_bytes_to_read();
        while waiting > 0 {
            let mut reader = tls.reader();
            let some = reader.fill_buf().map_err(|e| End::Link(e.kind()))?;
            plain.extend_from_slice(some);
            let n = some.len();
            reader.consume(n);
            // Nothing where something was announced would be a fault of the library; it must not spin here.
            waiting = if n == 0 { 0 } else { waiting.saturating_sub(n) };
        }
        if news.peer_has_closed() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The writer's life: outbox to socket, until a write fails or the pipe is dropped and everything has left.
fn write_all(shared: &Shared) {
    let mut wire = Vec::new();
    let end = loop {
        let mut state = shared.lock();
        while state.outbox.is_empty() && !state.closing {
            state = shared.writer.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        let Some(mut piece) = state.outbox.pop_front() else {
            drop(state);
            break farewell(shared, &mut wire);
        };
        drop(state);
        let length = piece.len();
        let outcome = match &shared.tls {
            None => push(shared, &piece),
            Some(tls) => encrypt(tls, &piece, &mut wire).and_then(|()| push(shared, &wire)),
        };
        if let Err(end) = outcome {
            break end;
        }
        piece.clear();
        let mut state = shared.lock();
        state.unsent -= length;
        if state.spares.len() < SPARES {
            state.spares.push(piece);
        }
        drop(state);
        shared.party.notify_one();
    };
    shared.lock().write_end = Some(end);
    shared.party.notify_one();
}

fn encrypt(tls: &Mutex<rustls::Connection>, plain: &[u8], wire: &mut Vec<u8>) -> std::result::Result<(), End> {
    wire.clear();
    let mut tls = tls.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let ended = |e: std::io::Error| End::Link(e.kind());
    tls.writer().write_all(plain).map_err(ended)?;
    while tls.wants_write() {
        tls.write_tls(wire).map_err(ended)?;
    }
    Ok(())
}

/// Writes all of it, within the time that its length allows.
fn push(shared: &Shared, mut bytes: &[u8]) -> std::result::Result<(), End> {
    let deadline = Instant::now() + shared.limits.for_bytes(bytes.len());
    while !bytes.is_empty() {
        match (&shared.stream).write(bytes) {
            Ok(0) => return Err(End::Link(ErrorKind::WriteZero)),
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Err(End::Link(ErrorKind::TimedOut)),
            Err(e) => return Err(End::Link(e.kind())),
        }
        if !bytes.is_empty() && Instant::now() >= deadline {
            return Err(End::Link(ErrorKind::TimedOut));
        }
    }
    Ok(())
}

/// The orderly end: TLS says that nothing follows, and the socket says so too.
fn farewell(shared: &Shared, wire: &mut Vec<u8>) -> End {
    if let Some(tls) = &shared.tls {
        wire.clear();
        let mut tls = tls.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        tls.send_close_notify();
        while tls.wants_write() && tls.write_tls(wire).is_ok() {}
        drop(tls);
        let _ = push(shared, wire);
    }
    let _ = shared.stream.shutdown(Shutdown::Write);
    End::Link(ErrorKind::UnexpectedEof)
}
