//! Where values enter and leave. Every `reveal` OPENS A VALUE: whoever receives it learns it.

use super::step_on;
use super::wire::{receive_field, send_field};
use crate::error::{Error, Result};
use crate::field::{self, VALUE_BOUND};
use crate::net::Kind;
use crate::party::{Party, Role};

/// Shares of one party's values. `values` is `Some` exactly at `owner`.
///
/// Cost: half a round (the owner speaks); 41 bits.
pub fn share_from(party: &mut Party, owner: Role, values: Option<&[i64]>, n: usize) -> Result<Vec<u64>> {
    let values = values.unwrap_or_default();
    if party.role == owner {
        if values.len() != n {
            return Err(Error::BadArgument(format!("the owner of an input must give its {n} values")));
        }
        if values.iter().any(|v| !in_range(*v)) {
            return Err(Error::BadArgument("an input is outside the range of the fixed-point numbers".into()));
        }
    }
    step_on(party, "share", n, |party| {
        if party.role != owner {
            return receive_field(&mut party.channel, Kind::Shares, n);
        }
        let mine = field::random_vector(&mut party.rng, n);
        let theirs: Vec<u64> = values.iter().zip(&mine).map(|(&v, &m)| field::sub(field::from_signed(v), m)).collect();
        send_field(&mut party.channel, Kind::Shares, &theirs)?;
        // The peer waits for this; what comes next here may be long.
        party.channel.flush()?;
        Ok(mine)
    })
}

/// OPENS the values to one party, which gets `Some`; the other gets `None` and learns nothing.
///
/// Cost: half a round (the other party speaks); 41 bits.
pub fn reveal_to(party: &mut Party, to: Role, x: &[u64]) -> Result<Option<Vec<i64>>> {
    if x.is_empty() {
        return Ok((party.role == to).then(Vec::new));
    }
    step_on(party, "reveal", x.len(), |party| {
        if party.role != to {
            send_field(&mut party.channel, Kind::Shares, x)?;
            party.channel.flush()?;
            return Ok(None);
        }
        let peer = receive_field(&mut party.channel, Kind::Shares, x.len())?;
        joined(party, x, &peer).map(Some)
    })
}

/// OPENS the values to both parties.
///
/// Cost: one round; 82 bits.
pub fn reveal_to_both(party: &mut Party, x: &[u64]) -> Result<Vec<i64>> {
    step_on(party, "reveal", x.len(), |party| {
        send_field(&mut party.channel, Kind::Shares, x)?;
        let peer = receive_field(&mut party.channel, Kind::Shares, x.len())?;
        joined(party, x, &peer)
    })
}

fn in_range(v: i64) -> bool {
    -VALUE_BOUND < v && v < VALUE_BOUND
}

fn joined(party: &mut Party, mine: &[u64], peer: &[u64]) -> Result<Vec<i64>> {
    let values: Vec<i64> = mine.iter().zip(peer).map(|(&a, &b)| field::to_signed(field::add(a, b))).collect();
    if values.iter().any(|&v| !in_range(v)) {
        return Err(party.channel.refuse("an opened value is outside the range of the fixed-point numbers"));
    }
    Ok(values)
}
