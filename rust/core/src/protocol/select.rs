//! From bits to values: shares of a bit in Z_p or a ring, and a bit times a value.

use super::correlate::{Field, Group, Ring, both_choose, client_chooses};
use super::wrap::MAX_KAPPA;
use super::{same_length, step_on};
use crate::error::{Error, Result};
use crate::party::Party;

/// Shares in Z_p of bits: b = b0 + b1 - 2 b0 b1. Exact.
///
/// Cost: one round; 42 bits; 1 transfer.
pub fn bits_to_field(party: &mut Party, bits: &[u8]) -> Result<Vec<u64>> {
    step_on(party, "bits_to_field", bits.len(), |party| convert(party, Field, bits))
}

/// Shares in Z_2^kappa of bits. Exact.
///
/// Cost: one round; 1 + kappa bits; 1 transfer (kappa = 1: nothing).
pub fn bits_to_ring(party: &mut Party, bits: &[u8], kappa: u32) -> Result<Vec<u64>> {
    if !(1..=MAX_KAPPA).contains(&kappa) {
        return Err(Error::BadArgument(format!("a ring of {kappa} bits; 1 to {MAX_KAPPA} are possible")));
    }
    if kappa == 1 {
        return Ok(bits.iter().map(|&b| u64::from(b)).collect());
    }
    step_on(party, "bits_to_ring", bits.len(), |party| convert(party, Ring::new(kappa), bits))
}

/// bit * x in Z_p: x where the bit is 1, else 0. Exact, for every x.
///
/// Cost: one round; 84 bits; 2 transfers, one in each direction.
pub fn select(party: &mut Party, bits: &[u8], x: &[u64]) -> Result<Vec<u64>> {
    same_length("select", bits.len(), x.len())?;
    step_on(party, "select", x.len(), |party| bit_times(party, Field, bits, x))
}

/// bit * x in Z_2^kappa. Exact.
///
/// Cost: one round; 2 + 2 kappa bits; 2 transfers, one in each direction.
pub fn select_ring(party: &mut Party, bits: &[u8], x: &[u64], kappa: u32) -> Result<Vec<u64>> {
    same_length("select_ring", bits.len(), x.len())?;
    step_on(party, "select_ring", x.len(), |party| bit_times(party, Ring::new(kappa), bits, x))
}

fn convert<G: Group>(party: &mut Party, group: G, bits: &[u8]) -> Result<Vec<u64>> {
    let client = party.role.is_client();
    let twice = |b: u8| group.add(u64::from(b), u64::from(b));
    let mine: Vec<u64> = bits.iter().map(|&b| if client { u64::from(b) } else { twice(b) }).collect();
    let both = client_chooses(party, group, &mine)?;
    Ok(bits.iter().zip(&both).map(|(&b, &both)| group.sub(u64::from(b), both)).collect())
}

/// (b0 XOR b1) (x0 + x1): my bit times my share is local; the peer's bit adds x - 2 b x of my share.
fn bit_times<G: Group>(party: &mut Party, group: G, bits: &[u8], x: &[u64]) -> Result<Vec<u64>> {
    let payload: Vec<u64> = bits.iter().zip(x).map(|(&b, &x)| group.negate_if(b, x)).collect();
    let mut share = both_choose(party, group, &payload, bits)?;
    for ((s, &b), &x) in share.iter_mut().zip(bits).zip(x) {
        *s = group.add(*s, x & u64::from(b).wrapping_neg());
    }
    Ok(share)
}
