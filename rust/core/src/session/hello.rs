//! The hello on the wire: a magic word, then every field once, in one order, each with its number and length.
//!
//! There is one encoding of each hello. A field that is missing, doubled, out of order, too long or unknown is refused
//! with the name of the field that was due; so are bytes after the last one.

use super::{BaseKind, KNOWN_FEATURES, MaskKind, Network, PROTOCOL_VERSION, Terms, TransferKind};
use crate::error::{Error, Result};
use crate::party::Role;

/// The first bytes of a hello.
const MAGIC: &[u8; 8] = b"CLOISTER";
/// The longest marks of a store.
pub const MAX_MARKS: usize = 4096;
/// The longest name of a version of the core.
const MAX_VERSION: usize = 64;
/// The most primes of a modulus.
const MAX_PRIMES: usize = 16;
/// The longest hello.
pub const MAX_HELLO: usize = 8192;

/// The fields in the order of the wire; a field's number is its place, counted from 1.
pub const FIELDS: [&str; 17] = [
    "protocol version",
    "core version",
    "role",
    "parameter table",
    "p",
    "ring degree",
    "primes",
    "flood bits",
    "mask kind",
    "base transfers",
    "transfer kind",
    "fraction bits",
    "model",
    "features",
    "network",
    "nonce",
    "store marks",
];

/// What a party says of itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    /// The version of the messages.
    pub protocol_version: u16,
    /// The version of the core.
    pub core_version: String,
    /// Who is speaking.
    pub role: Role,
    /// What must be the same at both.
    pub terms: Terms,
    /// Fresh in each session.
    pub nonce: [u8; 32],
    /// What the store of correlations says of itself.
    pub marks: Vec<u8>,
}

fn disagree<T>(field: &'static str, reason: impl Into<String>) -> Result<T> {
    Err(Error::Disagreement { field, reason: reason.into() })
}

impl Hello {
    /// This build's hello.
    pub fn new(role: Role, terms: &Terms, nonce: [u8; 32], marks: &[u8]) -> Self {
        Self {
            protocol_version: PROTOCOL_VERSION,
            core_version: crate::VERSION.into(),
            role,
            terms: terms.clone(),
            nonce,
            marks: marks.to_vec(),
        }
    }

    /// The bytes on the wire.
    pub fn encode(&self) -> Vec<u8> {
        let t = &self.terms;
        let values: [Vec<u8>; FIELDS.len()] = [
            self.protocol_version.to_le_bytes().into(),
            self.core_version.clone().into_bytes(),
            vec![if self.role.is_client() { 1 } else { 2 }],
            t.parameter_table.into(),
            t.p.to_le_bytes().into(),
            t.ring_degree.to_le_bytes().into(),
            t.primes.iter().flat_map(|q| q.to_le_bytes()).collect(),
            t.flood_bits.to_le_bytes().into(),
            vec![t.mask as u8],
            vec![t.base as u8],
            vec![t.transfers as u8],
            vec![t.fraction_bits],
            t.model.into(),
            t.features.to_le_bytes().into(),
            encode_network(t.network),
            self.nonce.into(),
            self.marks.clone(),
        ];
        let mut out = MAGIC.to_vec();
        for (number, value) in (1u8..).zip(&values) {
            out.push(number);
            out.extend((value.len() as u16).to_le_bytes());
            out.extend(value);
        }
        out
    }

    /// Reads a hello; accepts exactly what [`Hello::encode`] writes.
    pub fn decode(bytes: &[u8]) -> Result<Hello> {
        if bytes.len() > MAX_HELLO {
            return Err(Error::BadArgument(format!("a hello of more than {MAX_HELLO} bytes")));
        }
        let Some(rest) = bytes.strip_prefix(MAGIC) else {
            return disagree(FIELDS[0], "the peer does not begin with a hello of this protocol");
        };
        let mut reader = Reader { rest, next: 0 };
        let protocol_version = u16::from_le_bytes(reader.exactly()?);
        if protocol_version != PROTOCOL_VERSION {
            // What follows may be laid out in another way, so it is not read.
            return disagree(FIELDS[0], format!("ours is {PROTOCOL_VERSION}, the peer's {protocol_version}"));
        }
        let core_version = reader.up_to(MAX_VERSION)?;
        let core_version = match std::str::from_utf8(core_version) {
            Ok(text) if text.bytes().all(|c| c.is_ascii_graphic()) => text.to_owned(),
            _ => return disagree(FIELDS[1], "not printable text"),
        };
        let role = match reader.exactly()? {
            [1] => Role::Client,
            [2] => Role::Server,
            [n] => return disagree(FIELDS[2], format!("{n} is unknown")),
        };
        let parameter_table = reader.exactly()?;
        let p = u64::from_le_bytes(reader.exactly()?);
        let ring_degree = u32::from_le_bytes(reader.exactly()?);
        let primes = reader.up_to(8 * MAX_PRIMES)?;
        if primes.len() % 8 != 0 {
            return disagree(FIELDS[6], "a part of a prime");
        }
        let primes = primes.chunks_exact(8).map(|q| u64::from_le_bytes(q.try_into().expect("8 bytes"))).collect();
        let flood_bits = u16::from_le_bytes(reader.exactly()?);
        let mask = match reader.exactly()? {
            [1] => MaskKind::FloodSlotsMaskCoefficients,
            [n] => return disagree(FIELDS[8], format!("{n} is unknown")),
        };
        let base = match reader.exactly()? {
            [1] => BaseKind::Ristretto,
            [2] => BaseKind::MlKem768,
            [n] => return disagree(FIELDS[9], format!("{n} is unknown")),
        };
        let transfers = match reader.exactly()? {
            [1] => TransferKind::SoftSpoken1,
            [2] => TransferKind::SoftSpoken2,
            [4] => TransferKind::SoftSpoken4,
            [8] => TransferKind::SoftSpoken8,
            [16] => TransferKind::Silent,
            [32] => TransferKind::ByLink,
            [n] => return disagree(FIELDS[10], format!("{n} is unknown")),
        };
        let [fraction_bits] = reader.exactly()?;
        let model = reader.exactly()?;
        let features = u64::from_le_bytes(reader.exactly()?);
        if features & !KNOWN_FEATURES != 0 {
            return disagree(FIELDS[13], format!("{:#x} is unknown", features & !KNOWN_FEATURES));
        }
        let network = decode_network(reader.exactly()?);
        if !network.is_sound() {
            return disagree(FIELDS[14], format!("no link is like this: {network:?}"));
        }
        let nonce = reader.exactly()?;
        let marks = reader.up_to(MAX_MARKS)?.to_vec();
        if !reader.rest.is_empty() {
            return disagree(FIELDS[16], format!("{} bytes follow the last field", reader.rest.len()));
        }
        let terms = Terms {
            parameter_table,
            p,
            ring_degree,
            primes,
            flood_bits,
            mask,
            base,
            transfers,
            fraction_bits,
            model,
            features,
            network,
        };
        Ok(Hello { protocol_version, core_version, role, terms, nonce, marks })
    }

    /// Compares the peer's hello with ours, field by field; the first that differs is the error. Not the network, which
    /// may differ, and whose change on the way the confirmation finds.
    pub fn compare(&self, peer: &Hello) -> Result<()> {
        fn same<T: PartialEq + std::fmt::Debug>(field: &'static str, ours: &T, theirs: &T) -> Result<()> {
            if ours == theirs { Ok(()) } else { disagree(field, format!("ours is {ours:?}, the peer's {theirs:?}")) }
        }
        fn same_digest(field: &'static str, ours: &[u8; 32], theirs: &[u8; 32]) -> Result<()> {
            let short = |d: &[u8; 32]| d[..8].iter().map(|b| format!("{b:02x}")).collect::<String>();
            if ours == theirs {
                return Ok(());
            }
            disagree(field, format!("ours begins with {}, the peer's with {}", short(ours), short(theirs)))
        }
        let (ours, theirs) = (&self.terms, &peer.terms);
        same(FIELDS[0], &self.protocol_version, &peer.protocol_version)?;
        same(FIELDS[1], &self.core_version, &peer.core_version)?;
        if peer.role == self.role {
            return disagree(FIELDS[2], format!("both are the {:?}", self.role));
        }
        same_digest(FIELDS[3], &ours.parameter_table, &theirs.parameter_table)?;
        same(FIELDS[4], &ours.p, &theirs.p)?;
        same(FIELDS[5], &ours.ring_degree, &theirs.ring_degree)?;
        same(FIELDS[6], &ours.primes, &theirs.primes)?;
        same(FIELDS[7], &ours.flood_bits, &theirs.flood_bits)?;
        same(FIELDS[8], &ours.mask, &theirs.mask)?;
        same(FIELDS[9], &ours.base, &theirs.base)?;
        same(FIELDS[10], &ours.transfers, &theirs.transfers)?;
        same(FIELDS[11], &ours.fraction_bits, &theirs.fraction_bits)?;
        same_digest(FIELDS[12], &ours.model, &theirs.model)?;
        same(FIELDS[13], &ours.features, &theirs.features)?;
        if self.nonce == peer.nonce {
            return disagree(FIELDS[15], "the peer repeats ours");
        }
        Ok(())
    }
}

fn encode_network(network: Network) -> Vec<u8> {
    let mut out = network.bytes_per_second.to_le_bytes().to_vec();
    out.extend(network.round_microseconds.to_le_bytes());
    out.extend(network.cores.to_le_bytes());
    out
}

fn decode_network(bytes: [u8; 14]) -> Network {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n] = bytes;
    Network {
        bytes_per_second: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        round_microseconds: u32::from_le_bytes([i, j, k, l]),
        cores: u16::from_le_bytes([m, n]),
    }
}

/// Reads the fields in their order.
struct Reader<'a> {
    rest: &'a [u8],
    next: usize,
}

impl<'a> Reader<'a> {
    fn up_to(&mut self, most: usize) -> Result<&'a [u8]> {
        let field = FIELDS[self.next];
        self.next += 1;
        let Some(([number, low, high], rest)) = self.rest.split_first_chunk() else {
            return disagree(field, "missing");
        };
        if usize::from(*number) != self.next {
            return disagree(field, format!("missing: field {number} stands in its place"));
        }
        let length = usize::from(u16::from_le_bytes([*low, *high]));
        if length > most || length > rest.len() {
            return disagree(field, format!("{length} bytes, of which {} are there and {most} allowed", rest.len()));
        }
        let (value, rest) = rest.split_at(length);
        self.rest = rest;
        Ok(value)
    }

    fn exactly<const N: usize>(&mut self) -> Result<[u8; N]> {
        let field = FIELDS[self.next];
        let value = self.up_to(N)?;
        match value.try_into() {
            Ok(value) => Ok(value),
            Err(_) => disagree(field, format!("{} bytes where {N} were due", value.len())),
        }
    }
}
