//! A table of sixteen at a sum of two digits, by 1-of-16 transfers.

use super::wire::{Reader, Writer};
use super::{same_length, step_on};
use crate::error::Result;
use crate::net::Kind;
use crate::party::Party;

/// Elements whose transfers are fetched at once.
const BATCH: usize = 1 << 17;

/// Shares modulo 2^kappa (kappa a multiple of 8, at most 48) of `entry(i, d0 + d1 mod 16)`, where the digits d0 and d1
/// (0 to 15) are the server's and the client's and only the server's `entry` is asked.
///
/// Message 0 is not sent: the server's share is that message under its pad.
///
/// Cost: one round there and back; (kappa / 8) (4 + 15 * 8) bits; kappa / 8 transfers 1-of-16.
pub(super) fn lookup16(
    party: &mut Party,
    digits: &[u8],
    kappa: u32,
    entry: impl Fn(usize, u32) -> u64,
) -> Result<Vec<u64>> {
    debug_assert!(kappa.is_multiple_of(8) && kappa <= 48);
    step_on(party, "lookup", digits.len(), |party| {
        if party.role.is_client() { choose(party, digits, kappa) } else { offer(party, digits, kappa, entry) }
    })
}

fn choose(party: &mut Party, digits: &[u8], kappa: u32) -> Result<Vec<u64>> {
    let (n, bytes) = (digits.len(), (kappa / 8) as usize);
    let mask = (1u64 << kappa) - 1;
    let (mut pads, mut body) = (vec![0u64; n], Writer::with_capacity(4 * n * bytes));
    for (part, pads) in digits.chunks(BATCH).zip(pads.chunks_mut(BATCH)) {
        let random = party.ot.receive16(&mut party.channel, part.len() * bytes)?;
        same_length("1-of-16 transfers", random.choices.len(), part.len() * bytes)?;
        for (i, (&digit, pad)) in part.iter().zip(pads).enumerate() {
            for b in 0..bytes {
                body.put(u64::from((digit ^ random.choices[i * bytes + b]) & 15), 4);
                *pad |= u64::from(random.pads[i * bytes + b]) << (8 * b);
            }
        }
    }
    party.channel.send(Kind::Choices, &body.finish())?;
    let mut body = Reader::receive(&mut party.channel, Kind::Transfers, n * 15 * bytes)?;
    let mut shares = Vec::with_capacity(n);
    for (&digit, &pad) in digits.iter().zip(&pads) {
        let mut message = 0;
        for j in 1..16u8 {
            // Every message is read; the mask is all ones for the chosen one.
            let chosen = u64::from(((digit & 15) ^ j).wrapping_sub(1) >> 7).wrapping_neg();
            message |= body.take(kappa) & chosen;
        }
        shares.push(message.wrapping_sub(pad) & mask);
    }
    body.finish(&mut party.channel)?;
    Ok(shares)
}

fn offer(party: &mut Party, digits: &[u8], kappa: u32, entry: impl Fn(usize, u32) -> u64) -> Result<Vec<u64>> {
    let (n, bytes) = (digits.len(), (kappa / 8) as usize);
    let mask = (1u64 << kappa) - 1;
    let mut all: Vec<[u8; 16]> = Vec::with_capacity(n * bytes);
    for part in digits.chunks(BATCH) {
        all.extend(party.ot.send16(&mut party.channel, part.len() * bytes)?);
    }
    same_length("1-of-16 transfers", all.len(), n * bytes)?;
    let mut body = Reader::receive(&mut party.channel, Kind::Choices, (n * bytes).div_ceil(2))?;
    let mut out = Writer::with_capacity(n * 15 * bytes * 8);
    let mut shares = Vec::with_capacity(n);
    for (i, (&digit, pads)) in digits.iter().zip(all.chunks_exact(bytes)).enumerate() {
        let mut masks = [0u64; 16];
        for (b, pad) in pads.iter().enumerate() {
            // The correction has been on the wire, so it may be an index.
            let correction = body.take(4) as usize;
            for (j, m) in masks.iter_mut().enumerate() {
                *m |= u64::from(pad[j ^ correction]) << (8 * b);
            }
        }
        let share = entry(i, u32::from(digit & 15)).wrapping_add(masks[0]) & mask;
        for (j, m) in masks.iter().enumerate().skip(1) {
            let value = entry(i, (u32::from(digit) + j as u32) & 15);
            out.put(value.wrapping_add(*m).wrapping_sub(share) & mask, kappa);
        }
        shares.push(share);
    }
    body.finish(&mut party.channel)?;
    party.channel.send(Kind::Transfers, &out.finish())?;
    party.channel.flush()?;
    Ok(shares)
}
