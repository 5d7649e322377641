//! The wrap of two shares, and the steps that need nothing else: truncation, change to a ring of 2^kappa and back.
//!
//! Let X = x + B with B = (p - 1) / 4, so that |x| < p/4 gives 0 <= X < p/2. As integers the shares add up to X + w p.
//! If w = 0 both are below p/2; if w = 1 the larger is at least p/2. So w is the OR of two bits, each known to one party:
//! w = b0 + b1 - b0 b1, one correlated transfer, and its payload may live in any group: whatever multiple of w a step
//! wants costs the same transfer.

use super::correlate::{Field, Group, Ring, client_chooses};
use super::step_on;
use crate::error::{Error, Result};
use crate::field::{self, P};
use crate::party::Party;

/// The widest ring of the protocols.
pub const MAX_KAPPA: u32 = 48;

/// Shares of x / 2^f, for |x| < p/4 (for f > 14: |x| < p/4 - 2^f) and f <= 32.
///
/// The result is floor(x / 2^f) or one more (f <= 16; above that, or one less too), never anything else: each party
/// rounds its own share to nearest, so the mean error is nearly 0. f = 0 does nothing.
///
/// Cost: one round; 42 bits; 1 transfer.
pub fn truncate(party: &mut Party, x: &[u64], f: u32) -> Result<Vec<u64>> {
    if f > 32 {
        return Err(Error::BadArgument(format!("truncation by {f} bits; at most 32")));
    }
    if f == 0 {
        return Ok(x.to_vec());
    }
    step_on(party, "truncate", x.len(), |party| rescale(party, Field, x, f))
}

/// Shares modulo 2^kappa of x / 2^drop_bits (rounded as in [`truncate`]; exact for drop_bits = 0), for |x| < p/4.
///
/// Cost: one round; 1 + kappa bits; 1 transfer.
pub fn to_ring(party: &mut Party, x: &[u64], drop_bits: u32, kappa: u32) -> Result<Vec<u64>> {
    check_kappa(kappa)?;
    if drop_bits > 32 {
        return Err(Error::BadArgument(format!("{drop_bits} bits dropped; at most 32")));
    }
    step_on(party, "to_ring", x.len(), |party| rescale(party, Ring::new(kappa), x, drop_bits))
}

/// Shares in Z_p of a ring value -2^(kappa-2) <= x < 2^(kappa-2), exact; kappa at most 41.
///
/// Cost: one round; 42 bits; 1 transfer.
pub fn from_ring(party: &mut Party, x: &[u64], kappa: u32) -> Result<Vec<u64>> {
    if !(3..=41).contains(&kappa) {
        return Err(Error::BadArgument(format!("a ring of {kappa} bits; 3 to 41 can come back into the field")));
    }
    step_on(party, "from_ring", x.len(), |party| into_field(party, x, kappa, 1 << (kappa - 2)))
}

/// Shares in Z_p of a ring value 0 <= x < 2^(kappa-1), exact; kappa 2 to 41. Where nothing is negative one bit of room
/// is enough.
///
/// Cost: one round; 42 bits; 1 transfer.
pub(super) fn from_ring_unsigned(party: &mut Party, x: &[u64], kappa: u32) -> Result<Vec<u64>> {
    if !(2..=41).contains(&kappa) {
        return Err(Error::BadArgument(format!("a ring of {kappa} bits; 2 to 41 can come back into the field")));
    }
    step_on(party, "from_ring", x.len(), |party| into_field(party, x, kappa, 0))
}

/// Shares in Z_p of ring values with 0 <= x + offset < 2^(kappa-1).
fn into_field(party: &mut Party, x: &[u64], kappa: u32, offset: u64) -> Result<Vec<u64>> {
    let client = party.role.is_client();
    let offset = if client { offset } else { 0 };
    let mask = (1u64 << kappa) - 1;
    let shifted: Vec<u64> = x.iter().map(|&v| v.wrapping_add(offset) & mask).collect();
    // The sum of the shifted shares is below 2^(kappa-1), so it wraps if and only if one top bit is set.
    let modulus = (1u64 << kappa) % P;
    let top = |v: u64| v >> (kappa - 1);
    let mine: Vec<u64> =
        shifted.iter().map(|&v| if client { top(v) } else { modulus & top(v).wrapping_neg() }).collect();
    let both = client_chooses(party, Field, &mine)?;
    Ok(shifted
        .iter()
        .zip(&both)
        .map(|(&v, &both)| {
            let wrap = field::sub(modulus & top(v).wrapping_neg(), both);
            // A share of 41 bits may be p or more.
            let reduced = field::sub(field::add(v & ((1 << 40) - 1), (v >> 40) << 40), 0);
            field::sub(field::sub(reduced, wrap), offset)
        })
        .collect())
}

fn check_kappa(kappa: u32) -> Result<()> {
    if (1..=MAX_KAPPA).contains(&kappa) {
        Ok(())
    } else {
        Err(Error::BadArgument(format!("a ring of {kappa} bits; 1 to {MAX_KAPPA} are possible")))
    }
}

/// Shares of x / 2^f in `group`, one transfer.
fn rescale<G: Group>(party: &mut Party, group: G, x: &[u64], f: u32) -> Result<Vec<u64>> {
    let client = party.role.is_client();
    // B is a multiple of 2^f (it has 14 factors 2 of its own), so taking it off again is exact.
    let offset = ((P - 1) / 4) >> f << f;
    // p / 2^f to nearest: exact but for 2^-f up to f = 16, since p = 1 modulo 2^16.
    let wrapped = (P + ((1 << f) >> 1).max(1) - 1) >> f;
    // Client: to nearest, halves up; server: to nearest, halves down. Together the error is in (-1, 1].
    let half = ((1u64 << f) >> 1).saturating_sub(u64::from(!client));
    let taken = if client { offset >> f } else { 0 };

    let shifted: Vec<u64> = if client { x.iter().map(|&v| field::add(v, offset)).collect() } else { x.to_vec() };
    let payload = reduce(group, wrapped);
    let is_high = |v: u64| ((P - 1) / 2).wrapping_sub(v) >> 63;
    let mine: Vec<u64> =
        shifted.iter().map(|&v| if client { is_high(v) } else { payload & is_high(v).wrapping_neg() }).collect();
    let both = client_chooses(party, group, &mine)?;
    Ok(shifted
        .iter()
        .zip(&both)
        .map(|(&v, &both)| {
            let wrap = group.sub(payload & is_high(v).wrapping_neg(), both);
            let rounded = reduce(group, (v + half) >> f);
            group.sub(group.sub(rounded, wrap), reduce(group, taken))
        })
        .collect())
}

/// An integer of at most 41 bits, at most p, in the group.
#[inline(always)]
fn reduce<G: Group>(group: G, v: u64) -> u64 {
    group.add(v, 0)
}
