//! A session: two parties make sure that they will compute the same thing, or do not begin.
//!
//! Both send a hello at once. Each field of the peer's is compared with OUR table, never the other way round, and the
//! first that differs ends the session with its name. Then each confirms what it saw of the other: a hash of both
//! hellos, tied to the TLS connection when there is one, so that whatever somebody in the middle changed ends the
//! session too. The hash is the transcript from which public values of this session are derived.
//!
//! Cost: two rounds; 16 + 16 + 64 bytes of frames and confirmation, and the hello, about 320 bytes and the marks.

use crate::error::{Error, Result};
use crate::field;
use crate::net::{Channel, Kind, Limits, Pipe};
use crate::party::Role;
use crate::random::SecretRng;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

pub mod hello;

pub use hello::{Hello, MAX_HELLO, MAX_MARKS};

/// The version of the messages. Any change to what travels changes it.
pub const PROTOCOL_VERSION: u16 = 2;

/// How an answer hides the weights' noise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum MaskKind {
    /// Slot answers are flooded, coefficient answers carry a full-range mask.
    FloodSlotsMaskCoefficients = 1,
}

/// The public-key operation under the oblivious transfers, as the hello names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum BaseKind {
    /// Elliptic curves.
    Ristretto = 1,
    /// ML-KEM-768.
    MlKem768 = 2,
}

/// The extension of the oblivious transfers, as the hello names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum TransferKind {
    /// SoftSpoken with k = 1, which is IKNP.
    SoftSpoken1 = 1,
    /// SoftSpoken with k = 2.
    SoftSpoken2 = 2,
    /// SoftSpoken with k = 4.
    SoftSpoken4 = 4,
    /// SoftSpoken with k = 8.
    SoftSpoken8 = 8,
    /// Silent transfers.
    Silent = 16,
    /// Whichever is fastest on the link that both parties agreed on, see [`Network::agree`].
    ByLink = 32,
}

/// What a party says of its end of the link and of its machine. Public, and the one part of the terms that may differ:
/// both parties go by the worse of the two, so that they come to the same plans and the same transfers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Network {
    /// Bytes a second that the link carries, both directions together.
    pub bytes_per_second: u64,
    /// Microseconds of one round.
    pub round_microseconds: u32,
    /// Cores that work for this party at a time.
    pub cores: u16,
}

/// More cores than these do not change a plan.
pub const MOST_CORES: u16 = 256;

impl Network {
    /// A gigabit a second, rounds of a fifth of a millisecond, one core: slower than the local network of the figures, so that plans save bytes where
    /// that costs little.
    pub const DEFAULT: Network = Network { bytes_per_second: 125_000_000, round_microseconds: 200, cores: 1 };

    /// What both go by: the slower link, the longer round, the cores of both together. Neither counts for more than
    /// [`MOST_CORES`], or a peer could make every plan that saves bytes by our work look cheap.
    pub fn agree(self, peer: Network) -> Network {
        let cores = |party: Network| party.cores.min(MOST_CORES);
        Network {
            bytes_per_second: self.bytes_per_second.min(peer.bytes_per_second),
            round_microseconds: self.round_microseconds.max(peer.round_microseconds),
            cores: cores(self) + cores(peer),
        }
    }

    /// Whether a party can mean this: a link of a thousand bits to ten terabits a second, a round of at most a minute.
    pub(crate) fn is_sound(self) -> bool {
        (125..=1_250_000_000_000).contains(&self.bytes_per_second)
            && self.round_microseconds <= 60_000_000
            && self.cores > 0
    }
}

/// What both parties must have in common. A field that differs ends the session, but for the network.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Terms {
    /// The digest of the table of encryption parameters.
    pub parameter_table: [u8; 32],
    /// The prime of the shares.
    pub p: u64,
    /// The ring degree.
    pub ring_degree: u32,
    /// The primes of the ciphertext modulus, in the order of the table.
    pub primes: Vec<u64>,
    /// Bits of flooding above the noise bound.
    pub flood_bits: u16,
    /// How answers are masked.
    pub mask: MaskKind,
    /// What the transfers rest on.
    pub base: BaseKind,
    /// How transfers are extended.
    pub transfers: TransferKind,
    /// Fraction bits of the fixed-point numbers.
    pub fraction_bits: u8,
    /// What is computed: the digest of the model's public shape and plan.
    pub model: [u8; 32],
    /// Optional behaviour, one bit each. Both must have the same; a bit that this build does not know is refused.
    pub features: u64,
    /// This party's end of the link.
    pub network: Network,
}

/// The features that this build knows.
pub const KNOWN_FEATURES: u64 = 0;

impl Terms {
    /// This build's own values, for a model; the caller changes what a plan changes.
    pub fn new(parameter_table: [u8; 32], primes: Vec<u64>, flood_bits: u16, model: [u8; 32]) -> Self {
        Self {
            parameter_table,
            p: field::P,
            ring_degree: 8192,
            primes,
            flood_bits,
            mask: MaskKind::FloodSlotsMaskCoefficients,
            base: BaseKind::Ristretto,
            transfers: TransferKind::SoftSpoken2,
            fraction_bits: 12,
            model,
            features: 0,
            network: Network::DEFAULT,
        }
    }
}

/// A session that both parties agreed to begin.
pub struct Session {
    /// Who we are.
    pub role: Role,
    /// The link, ready for the first step.
    pub channel: Channel,
    /// The hash of both hellos and of the TLS connection, the same at both parties and in no other session.
    pub transcript: [u8; 32],
    /// What the peer's store of correlations said of itself; its own module compares it.
    pub peer_marks: Vec<u8>,
    /// What both parties go by where a choice depends on the link.
    pub network: Network,
}

impl Session {
    /// The client's side. `marks` are what our store of correlations says of itself, at most 4 KiB.
    pub fn connect(pipe: Box<dyn Pipe>, terms: &Terms, marks: &[u8], limits: &Limits) -> Result<Session> {
        Self::begin(Role::Client, pipe, terms, marks, limits)
    }

    /// The server's side.
    pub fn accept(pipe: Box<dyn Pipe>, terms: &Terms, marks: &[u8], limits: &Limits) -> Result<Session> {
        Self::begin(Role::Server, pipe, terms, marks, limits)
    }

    fn begin(role: Role, pipe: Box<dyn Pipe>, terms: &Terms, marks: &[u8], limits: &Limits) -> Result<Session> {
        if marks.len() > MAX_MARKS {
            return Err(Error::BadArgument(format!("the store's marks are longer than {MAX_MARKS} bytes")));
        }
        if !terms.network.is_sound() {
            return Err(Error::BadArgument(format!("no link is like this: {:?}", terms.network)));
        }
        let mut channel = Channel::new(pipe);
        channel.set_quiet_limit(limits.hello);
        let (transcript, theirs) = channel.step("hello", |channel| agree(channel, role, terms, marks))?;
        channel.set_quiet_limit(limits.quiet);
        let network = terms.network.agree(theirs.terms.network);
        Ok(Session { role, channel, transcript, peer_marks: theirs.marks, network })
    }

    /// Says goodbye, waits for the peer's, and ends the session.
    pub fn finish(mut self) -> Result<()> {
        self.channel.goodbye()
    }
}

fn agree(channel: &mut Channel, role: Role, terms: &Terms, marks: &[u8]) -> Result<([u8; 32], Hello)> {
    let mut nonce = [0; 32];
    SecretRng::from_os().fill(&mut nonce);
    let ours = Hello::new(role, terms, nonce, marks);
    let our_bytes = ours.encode();
    channel.send(Kind::Hello, &our_bytes)?;
    let their_bytes = channel.receive_between(Kind::Hello, 0, MAX_HELLO)?;
    let theirs = Hello::decode(&their_bytes).and_then(|theirs| ours.compare(&theirs).map(|()| theirs));
    let theirs = channel.decoded(theirs)?;

    let both = match role {
        Role::Client => [(&ours, &our_bytes), (&theirs, &their_bytes)],
        Role::Server => [(&theirs, &their_bytes), (&ours, &our_bytes)],
    };
    let transcript = transcript(channel.binding(), both.map(|(_, bytes)| bytes.as_slice()));
    let nonces = digest(b"nonces", &both.map(|(hello, _)| hello.nonce.as_slice()));
    let all_marks = digest(b"marks", &both.map(|(hello, _)| hello.marks.as_slice()));
    let confirm = |who: Role| Confirm {
        tag: digest(if who.is_client() { b"client confirms" } else { b"server confirms" }, &[&transcript]),
        nonces: nonces[..16].try_into().expect("16 of 32 bytes"),
        marks: all_marks[..16].try_into().expect("16 of 32 bytes"),
    };
    let answer = channel.exchange(Kind::Confirm, &confirm(role).encode(), Confirm::BYTES)?;
    let checked = confirm(role.other()).check(&answer);
    channel.decoded(checked)?;
    Ok((transcript, theirs))
}

/// What a party says it saw: both hellos as a whole, and apart the two fields that have no right value to compare with.
pub struct Confirm {
    /// The hash of the whole, with the role of who confirms.
    pub tag: [u8; 32],
    /// The hash of both nonces.
    pub nonces: [u8; 16],
    /// The hash of both stores' marks.
    pub marks: [u8; 16],
}

impl Confirm {
    /// The length on the wire.
    pub const BYTES: usize = 64;

    /// The bytes on the wire.
    pub fn encode(&self) -> Vec<u8> {
        [&self.tag[..], &self.nonces, &self.marks].concat()
    }

    /// Compares what the peer confirmed with what it must have seen.
    pub fn check(&self, bytes: &[u8]) -> Result<()> {
        if bytes.len() != Self::BYTES {
            return Err(Error::BadArgument("a confirmation has 64 bytes".into()));
        }
        let (tag, rest) = bytes.split_at(32);
        let (nonces, marks) = rest.split_at(16);
        let same = |a: &[u8], b: &[u8]| bool::from(a.ct_eq(b));
        let altered = |field| {
            let reason = "the peer saw another hello than was sent: something changed it on the way".into();
            Err(Error::Disagreement { field, reason })
        };
        match () {
            () if !same(nonces, &self.nonces) => altered("nonce"),
            () if !same(marks, &self.marks) => altered("store marks"),
            () if !same(tag, &self.tag) => altered("transcript"),
            () => Ok(()),
        }
    }
}

fn transcript(binding: Option<[u8; 32]>, hellos: [&[u8]; 2]) -> [u8; 32] {
    let bound = [u8::from(binding.is_some())];
    digest(b"transcript", &[&bound, &binding.unwrap_or_default(), hellos[0], hellos[1]])
}

/// A hash in which every part carries its length, so that no two lists of parts collide.
fn digest(label: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in [b"cloister session 1".as_slice(), label].iter().chain(parts) {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}
