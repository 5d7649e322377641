//! Base transfers: the few random transfers, made with public-key operations, from which all others grow.
//!
//! Two kinds. [`BaseKind::Ristretto`] is "the simplest protocol" of Chou and Orlandi (eprint 2015/267) on Ristretto:
//! 32 bytes one way, 32 a transfer back, safe under the gap Diffie-Hellman assumption. [`BaseKind::MlKem768`] (see
//! the module `base_mlkem`) rests on lattices, for traffic that must stay secret when quantum computers exist.

use super::Block;
use super::aes::Domain;
use super::base_mlkem;
use crate::error::Result;
use crate::net::{Channel, Kind};
use crate::random::SecretRng;
use curve25519_dalek::constants::{RISTRETTO_BASEPOINT_POINT, RISTRETTO_BASEPOINT_TABLE};
use curve25519_dalek::ristretto::{CompressedRistretto, RistrettoPoint};
use curve25519_dalek::scalar::Scalar;
use curve25519_dalek::traits::{Identity, IsIdentity};
use subtle::{Choice, ConditionallySelectable};
use zeroize::{Zeroize, Zeroizing};

/// The public-key operation of the base transfers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BaseKind {
    /// Elliptic curves: 4 kB and about 10 ms a direction.
    Ristretto,
    /// ML-KEM-768, safe against quantum computers: 570 kB and about 20 ms a direction.
    MlKem768,
}

/// Both pads of `n` base transfers.
pub(super) fn send(
    channel: &mut Channel,
    kind: BaseKind,
    domain: &Domain,
    n: usize,
    rng: &mut SecretRng,
) -> Result<Zeroizing<Vec<[Block; 2]>>> {
    match kind {
        BaseKind::Ristretto => send_ristretto(channel, domain, n, rng),
        BaseKind::MlKem768 => base_mlkem::send(channel, domain, n),
    }
}

/// One pad each, for the given choice bits.
pub(super) fn receive(
    channel: &mut Channel,
    kind: BaseKind,
    domain: &Domain,
    choices: &[u8],
    rng: &mut SecretRng,
) -> Result<Zeroizing<Vec<Block>>> {
    match kind {
        BaseKind::Ristretto => receive_ristretto(channel, domain, choices, rng),
        BaseKind::MlKem768 => base_mlkem::receive(channel, domain, choices, rng),
    }
}

fn random_scalar(rng: &mut SecretRng) -> Zeroizing<Scalar> {
    let mut wide = Zeroizing::new([0; 64]);
    rng.fill(&mut wide[..]);
    Zeroizing::new(Scalar::from_bytes_mod_order_wide(&wide))
}

/// A point as the peer must send it: 32 bytes, canonical, not the identity.
pub(super) fn decode(channel: &mut Channel, bytes: &[u8]) -> Result<RistrettoPoint> {
    CompressedRistretto::from_slice(bytes)
        .ok()
        .and_then(|c| c.decompress())
        .filter(|p| !p.is_identity())
        .ok_or_else(|| channel.refuse("a point of a base transfer is not a valid group element"))
}

fn pad(domain: &Domain, index: usize, first: &[u8], second: &[u8], shared: &RistrettoPoint) -> Block {
    let mut shared = Zeroizing::new(shared.compress().to_bytes());
    let block = domain.extract(index as u64, 0, &[first, second, &shared[..]]);
    shared.zeroize();
    block
}

fn send_ristretto(
    channel: &mut Channel,
    domain: &Domain,
    n: usize,
    rng: &mut SecretRng,
) -> Result<Zeroizing<Vec<[Block; 2]>>> {
    let secret = random_scalar(rng);
    let public = &*secret * RISTRETTO_BASEPOINT_TABLE;
    let first = public.compress().to_bytes();
    channel.send(Kind::BaseOt, &first)?;
    let answer = channel.receive(Kind::BaseOt, 32 * n)?;
    // a (B - A) = a B - a A.
    let mut own = *secret * public;
    let mut pads = Zeroizing::new(Vec::with_capacity(n));
    for (i, second) in answer.chunks_exact(32).enumerate() {
        let mut shared = *secret * decode(channel, second)?;
        let mut other = shared - own;
        pads.push([pad(domain, i, &first, second, &shared), pad(domain, i, &first, second, &other)]);
        shared.zeroize();
        other.zeroize();
    }
    own.zeroize();
    Ok(pads)
}

fn receive_ristretto(
    channel: &mut Channel,
    domain: &Domain,
    choices: &[u8],
    rng: &mut SecretRng,
) -> Result<Zeroizing<Vec<Block>>> {
    let first = channel.receive(Kind::BaseOt, 32)?;
    let public = decode(channel, &first)?;
    let mut message = Vec::with_capacity(32 * choices.len());
    let mut pads = Zeroizing::new(Vec::with_capacity(choices.len()));
    for (i, &choice) in choices.iter().enumerate() {
        let secret = random_scalar(rng);
        let mut shift =
            RistrettoPoint::conditional_select(&RistrettoPoint::identity(), &public, Choice::from(choice & 1));
        let second = (RISTRETTO_BASEPOINT_POINT * *secret + shift).compress().to_bytes();
        let mut shared = public * *secret;
        pads.push(pad(domain, i, &first, &second, &shared));
        message.extend_from_slice(&second);
        shared.zeroize();
        shift.zeroize();
    }
    channel.send(Kind::BaseOt, &message)?;
    channel.flush()?;
    Ok(pads)
}
