//! What base transfers read from the peer, as functions of bytes alone, for tests and fuzzers. Each gives back the
//! bytes that the accepted value would be written as.

use super::aes::Domain;
use super::{BaseKind, base, base_mlkem};
use crate::error::Result;
use crate::net::{Channel, memory};
use crate::random::SecretRng;
use curve25519_dalek::ristretto::RistrettoPoint;

/// A point of a Ristretto base transfer.
pub fn point(bytes: &[u8]) -> Option<Vec<u8>> {
    let (mut channel, _) = memory::channels();
    Some(base::decode(&mut channel, bytes).ok()?.compress().to_bytes().to_vec())
}

/// The vector of an ML-KEM key.
pub fn key_vector(bytes: &[u8]) -> Option<Vec<u8>> {
    Some(base_mlkem::pack(&base_mlkem::unpack(bytes)?).to_vec())
}

/// A point as a peer sends it, from 64 bytes.
pub fn good_point(bytes: &[u8; 64]) -> Vec<u8> {
    RistrettoPoint::from_uniform_bytes(bytes).compress().to_bytes().to_vec()
}

/// The sender's end of `n` base transfers, for measurements.
pub fn send(channel: &mut Channel, kind: BaseKind, n: usize, rng: &mut SecretRng) -> Result<()> {
    base::send(channel, kind, &Domain::new(&[1; 32], "client", "base"), n, rng).map(drop)
}

/// The receiver's end with these choices, for measurements.
pub fn receive(channel: &mut Channel, kind: BaseKind, choices: &[u8], rng: &mut SecretRng) -> Result<()> {
    base::receive(channel, kind, &Domain::new(&[1; 32], "client", "base"), choices, rng).map(drop)
}
