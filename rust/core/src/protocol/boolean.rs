//! Logic on XOR-shared bits. Exclusive or and negation are free; a conjunction takes two random transfers.

use super::correlate::{Wiped, draw_received, draw_sent};
use super::wire::{Reader, Writer};
use super::{Bits, same_length, step_on};
use crate::error::Result;
use crate::net::Kind;
use crate::party::Party;

/// Exclusive or; local.
pub fn xor(a: &[u8], b: &[u8]) -> Bits {
    debug_assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(&a, &b)| a ^ b).collect()
}

/// Negation; local.
pub fn not(party: &Party, a: &[u8]) -> Bits {
    let flip = u8::from(party.role.is_client());
    a.iter().map(|&a| a ^ flip).collect()
}

/// Conjunction.
///
/// Cost: one round; 4 bits; 2 transfers, one in each direction.
pub fn and(party: &mut Party, a: &[u8], b: &[u8]) -> Result<Bits> {
    same_length("and", a.len(), b.len())?;
    step_on(party, "and", a.len(), |party| Ok(bit_times_pair(party, a, b, &[])?.0))
}

/// Disjunction, by De Morgan; costs as [`and`].
pub fn or(party: &mut Party, a: &[u8], b: &[u8]) -> Result<Bits> {
    let (a, b) = (not(party, a), not(party, b));
    let neither = and(party, &a, &b)?;
    Ok(not(party, &neither))
}

/// Each bit of `a` times a string of one or two bits: a AND first everywhere, and a AND second for the first
/// `second.len()` elements.
///
/// Cost: one round; 4 bits, 6 where there is a second one; 2 transfers.
pub(super) fn bit_times_pair(party: &mut Party, a: &[u8], first: &[u8], second: &[u8]) -> Result<(Bits, Bits)> {
    let (n, pairs) = (a.len(), second.len());
    debug_assert!(first.len() == n && pairs <= n);
    // Of each transfer: pad 0 and the difference of the pads, two bits each; choice and pad.
    let (mut sent, mut received) = (Wiped::with_capacity(n), Wiped::with_capacity(n));
    for client_sends in [true, false] {
        if party.role.is_client() == client_sends {
            draw_sent(party, n, |[m0, m1]| sent.push((m0 as u8 & 3) | ((m0 ^ m1) as u8 & 3) << 2))?;
        } else {
            draw_received(party, n, |choice, pad| received.push(choice | (pad as u8 & 3) << 1))?;
        }
    }

    let mut body = Writer::with_capacity(2 * n + pairs + 24);
    let flips: Vec<u8> = a.iter().zip(received.iter()).map(|(&a, &r)| (a ^ r) & 1).collect();
    body.flags(&flips);
    body.flags(&first.iter().zip(sent.iter()).map(|(&y, &s)| (y ^ s >> 2) & 1).collect::<Vec<_>>());
    body.flags(&second.iter().zip(sent.iter()).map(|(&y, &s)| (y ^ s >> 3) & 1).collect::<Vec<_>>());
    party.channel.send(Kind::BitOpening, &body.finish())?;

    let due = 2 * n.div_ceil(8) + pairs.div_ceil(8);
    let mut body = Reader::receive(&mut party.channel, Kind::BitOpening, due)?;
    let (peer_flips, u0, u1) = (body.flags(n), body.flags(n), body.flags(pairs));
    body.finish(&mut party.channel)?;

    // Mine times mine; then the transfer that I sent: m0 XOR d y; then the one I received: m_c XOR c u.
    let part = |y: &[u8], u: &[u8], bit: u32| -> Bits {
        (0..y.len())
            .map(|i| {
                let (s, r) = (sent[i], received[i]);
                (a[i] & y[i]) ^ ((s >> bit) & 1) ^ (peer_flips[i] & y[i]) ^ ((r >> (1 + bit)) & 1) ^ (r & u[i] & 1)
            })
            .collect()
    };
    Ok((part(first, &u0, 0), part(second, &u1, 1)))
}
