//! Products of shared values, with triples made ahead.

use super::wire::{receive_field, send_field};
use super::wrap::truncate;
use super::{same_length, step_on};
use crate::error::{Error, Result};
use crate::field;
use crate::net::Kind;
use crate::party::Party;

/// x * y modulo p, element by element. Exact; the scale is the product of the scales, so |x y| < p/4 must hold before
/// the next step.
///
/// Cost: one round; 164 bits; 1 triple.
pub fn multiply(party: &mut Party, x: &[u64], y: &[u64]) -> Result<Vec<u64>> {
    same_length("multiply", x.len(), y.len())?;
    step_on(party, "multiply", x.len(), |party| {
        let n = x.len();
        let triples = party.triples.triples(&mut party.channel, n)?;
        let mut masked: Vec<u64> = x.iter().zip(&triples.a).map(|(&x, &a)| field::sub(x, a)).collect();
        masked.extend(y.iter().zip(&triples.b).map(|(&y, &b)| field::sub(y, b)));
        send_field(&mut party.channel, Kind::Opening, &masked)?;
        let peer = receive_field(&mut party.channel, Kind::Opening, 2 * n)?;
        for (mine, theirs) in masked.iter_mut().zip(peer) {
            *mine = field::add(*mine, theirs);
        }
        let (d, e) = masked.split_at(n);
        let one_adds = u64::from(party.role.is_client()).wrapping_neg();
        // x y = (d + a)(e + b) = c + d b + e a + d e: one product each for d (b + e) and e a.
        Ok((0..n)
            .map(|i| {
                let b = field::add(triples.b[i], e[i] & one_adds);
                field::add(triples.c[i], field::add(field::mul(d[i], b), field::mul(e[i], triples.a[i])))
            })
            .collect())
    })
}

/// x * x modulo p. Costs as [`multiply`]: a triple can become a pair (a, a^2), but only with an opening of its own.
pub fn square(party: &mut Party, x: &[u64]) -> Result<Vec<u64>> {
    multiply(party, x, x)
}

/// x * y / 2^f, rounded as in [`truncate`], for |x y| < p/4.
///
/// Cost: two rounds; 206 bits; 1 triple, 1 transfer.
pub fn multiply_truncate(party: &mut Party, x: &[u64], y: &[u64], f: u32) -> Result<Vec<u64>> {
    let product = multiply(party, x, y)?;
    truncate(party, &product, f)
}

/// The sums of `length` consecutive products x * y, not truncated.
///
/// Cost: as [`multiply`] on all elements.
pub fn inner_products(party: &mut Party, x: &[u64], y: &[u64], length: usize) -> Result<Vec<u64>> {
    if length == 0 || !x.len().is_multiple_of(length) {
        return Err(Error::BadArgument(format!("{} products do not make sums of {length}", x.len())));
    }
    let products = multiply(party, x, y)?;
    Ok(products.chunks_exact(length).map(|row| row.iter().fold(0, |sum, &v| field::add(sum, v))).collect())
}
