//! Correlated transfers: shares of choice * payload in any group, from random transfers.
//!
//! One random transfer gives the sender pads m0, m1 and the receiver a random bit c and m_c: shares of c * delta with
//! delta = m1 - m0. The receiver opens d = choice XOR c, the sender opens u = payload - delta, *both at once*, and then
//!
//! choice * payload = d * payload + (1 - 2d) * (c * delta + c * u)
//!
//! is linear in what each of them holds. d is masked by c, u by the pad that the receiver does not have.

use super::same_length;
use super::wire::{Reader, Writer, below_p};
use crate::error::Result;
use crate::field;
use crate::net::Kind;
use crate::party::Party;
use std::ops::{Deref, DerefMut};

/// Random transfers fetched at once; each batch is reduced to what a step needs of it before the next is fetched, so
/// memory stays bounded while no round is added.
const BATCH: usize = 1 << 18;

/// A vector of pads or choices, overwritten when it is dropped.
pub(super) struct Wiped<T: Copy + Default>(Vec<T>);

impl<T: Copy + Default> Wiped<T> {
    /// An empty vector that does not move while it grows to `n`.
    pub fn with_capacity(n: usize) -> Self {
        Self(Vec::with_capacity(n))
    }
}

impl<T: Copy + Default> From<Vec<T>> for Wiped<T> {
    fn from(values: Vec<T>) -> Self {
        Self(values)
    }
}

impl<T: Copy + Default> Deref for Wiped<T> {
    type Target = Vec<T>;

    fn deref(&self) -> &Vec<T> {
        &self.0
    }
}

impl<T: Copy + Default> DerefMut for Wiped<T> {
    fn deref_mut(&mut self) -> &mut Vec<T> {
        &mut self.0
    }
}

impl<T: Copy + Default> Drop for Wiped<T> {
    fn drop(&mut self) {
        // Whole vectors at memory speed; the barrier keeps the compiler from seeing that nobody reads them again.
        self.0.fill(T::default());
        std::hint::black_box(&self.0);
    }
}

/// A group in which a payload lives.
pub(super) trait Group: Copy {
    /// Bits of one element on the wire.
    fn bits(self) -> u32;
    /// A uniform element from a uniform pad.
    fn reduce_pad(self, pad: u128) -> u64;
    /// a + b.
    fn add(self, a: u64, b: u64) -> u64;
    /// a - b.
    fn sub(self, a: u64, b: u64) -> u64;
    /// Whether a received element must be compared with p.
    const IS_FIELD: bool;

    /// -a if `flag` is 1, a if it is 0.
    #[inline(always)]
    fn negate_if(self, flag: u8, a: u64) -> u64 {
        let mask = u64::from(flag).wrapping_neg();
        (self.sub(0, a) & mask) | (a & !mask)
    }
}

/// Z_p.
#[derive(Clone, Copy)]
pub(super) struct Field;

impl Group for Field {
    fn bits(self) -> u32 {
        field::P_BITS as u32
    }

    /// The low 123 bits modulo p: 2^-82 from uniform. Uses 2^41 = 2^16 - 1 modulo p.
    #[inline(always)]
    fn reduce_pad(self, pad: u128) -> u64 {
        const MASK: u64 = (1 << 41) - 1;
        const FOLD: u64 = (1 << 41) - field::P;
        let limbs = [pad as u64 & MASK, (pad >> 41) as u64 & MASK, (pad >> 82) as u64 & MASK];
        // Below 2^57 + 2^41, then below 2^41 + 2^33.
        let high = limbs[2] * FOLD + limbs[1];
        let high = (high & MASK) + (high >> 41) * FOLD;
        let all = high * FOLD + limbs[0];
        let all = (all & MASK) + (all >> 41) * FOLD;
        field::reduce_once(all)
    }

    #[inline(always)]
    fn add(self, a: u64, b: u64) -> u64 {
        field::add(a, b)
    }

    #[inline(always)]
    fn sub(self, a: u64, b: u64) -> u64 {
        field::sub(a, b)
    }

    const IS_FIELD: bool = true;
}

/// Z_2^kappa, kappa at most 48.
#[derive(Clone, Copy)]
pub(super) struct Ring {
    bits: u32,
    mask: u64,
}

impl Ring {
    /// The integers modulo 2^kappa.
    pub fn new(kappa: u32) -> Self {
        debug_assert!((1..=48).contains(&kappa));
        Self { bits: kappa, mask: (1 << kappa) - 1 }
    }
}

impl Group for Ring {
    fn bits(self) -> u32 {
        self.bits
    }

    #[inline(always)]
    fn reduce_pad(self, pad: u128) -> u64 {
        pad as u64 & self.mask
    }

    #[inline(always)]
    fn add(self, a: u64, b: u64) -> u64 {
        a.wrapping_add(b) & self.mask
    }

    #[inline(always)]
    fn sub(self, a: u64, b: u64) -> u64 {
        a.wrapping_sub(b) & self.mask
    }

    const IS_FIELD: bool = false;
}

/// Fetches `n` random transfers of which this party is the sender; `keep` sees both pads of each.
pub(super) fn draw_sent(party: &mut Party, n: usize, mut keep: impl FnMut([u128; 2])) -> Result<()> {
    for start in (0..n).step_by(BATCH) {
        let wanted = BATCH.min(n - start);
        let batch = Wiped::from(party.ot.send(&mut party.channel, wanted)?);
        same_length("a supply of transfers", wanted, batch.len())?;
        batch.iter().for_each(|&pair| keep(pair));
    }
    Ok(())
}

/// Fetches `n` random transfers of which this party is the receiver; `keep` sees choice and pad of each.
pub(super) fn draw_received(party: &mut Party, n: usize, mut keep: impl FnMut(u8, u128)) -> Result<()> {
    for start in (0..n).step_by(BATCH) {
        let wanted = BATCH.min(n - start);
        let batch = party.ot.receive(&mut party.channel, wanted)?;
        let (choices, pads) = (Wiped::from(batch.choices), Wiped::from(batch.pads));
        same_length("a supply of transfers", wanted, choices.len().min(pads.len()))?;
        choices.iter().zip(pads.iter()).for_each(|(&choice, &pad)| keep(choice & 1, pad));
    }
    Ok(())
}

/// Shares of (client's choice) * (server's payload): the client gives its choice bits, the server its payloads, each
/// in `mine`.
///
/// Cost: one round; 1 + group bits; 1 transfer.
pub(super) fn client_chooses<G: Group>(party: &mut Party, group: G, mine: &[u64]) -> Result<Vec<u64>> {
    if party.role.is_client() {
        let choices: Vec<u8> = mine.iter().map(|&m| m as u8).collect();
        run(party, group, None, Some(&choices))
    } else {
        run(party, group, Some(mine), None)
    }
}

/// Shares of (my choice) * (peer's payload) + (peer's choice) * (my payload).
///
/// Cost: one round; 2 (1 + group bits); 2 transfers, one in each direction.
pub(super) fn both_choose<G: Group>(party: &mut Party, group: G, payload: &[u64], choices: &[u8]) -> Result<Vec<u64>> {
    run(party, group, Some(payload), Some(choices))
}

fn run<G: Group>(party: &mut Party, group: G, payload: Option<&[u64]>, choices: Option<&[u8]>) -> Result<Vec<u64>> {
    let n = payload.map_or_else(|| choices.map_or(0, <[u8]>::len), <[u64]>::len);
    let (sends, receives) = (payload.map_or(0, <[u64]>::len), choices.map_or(0, <[u8]>::len));
    let (mut first, mut delta) = (Wiped::with_capacity(sends), Wiped::with_capacity(sends));
    let (mut random, mut got) = (Wiped::with_capacity(receives), Wiped::with_capacity(receives));
    // Both parties fetch in the same order: first the transfers in which the client sends.
    for client_sends in [true, false] {
        let sending = party.role.is_client() == client_sends;
        if sending && payload.is_some() {
            draw_sent(party, n, |[m0, m1]| {
                let m0 = group.reduce_pad(m0);
                first.push(m0);
                delta.push(group.sub(group.reduce_pad(m1), m0));
            })?;
        } else if !sending && choices.is_some() {
            draw_received(party, n, |choice, pad| {
                random.push(choice);
                got.push(group.reduce_pad(pad));
            })?;
        }
    }

    let bits = group.bits() as usize;
    let mut body = Writer::with_capacity(n * (bits + 1));
    let mut flips = Vec::new();
    if let Some(choices) = choices {
        flips = choices.iter().zip(random.iter()).map(|(&a, &b)| a ^ b).collect();
        body.flags(&flips);
    }
    if let Some(payload) = payload {
        for (&y, &d) in payload.iter().zip(delta.iter()) {
            body.put(group.sub(y, d), group.bits());
        }
    }
    party.channel.send(Kind::Transfers, &body.finish())?;

    let due = payload.map_or(0, |_| n.div_ceil(8)) + choices.map_or(0, |_| field::packed_len(n, bits));
    let mut body = Reader::receive(&mut party.channel, Kind::Transfers, due)?;
    let mut share = vec![0; n];
    if let Some(payload) = payload {
        let peer_flips = body.flags(n);
        for (((s, &y), &m0), &d) in share.iter_mut().zip(payload).zip(first.iter()).zip(&peer_flips) {
            *s = group.sub(y & u64::from(d).wrapping_neg(), group.negate_if(d, m0));
        }
    }
    if choices.is_some() {
        let opened: Vec<u64> = (0..n).map(|_| body.take(group.bits())).collect();
        if G::IS_FIELD {
            below_p(&mut party.channel, &opened)?;
        }
        for ((((s, &m), &c), &u), &d) in share.iter_mut().zip(got.iter()).zip(random.iter()).zip(&opened).zip(&flips) {
            let product = group.add(m, u & u64::from(c).wrapping_neg());
            *s = group.add(*s, group.negate_if(d, product));
        }
    }
    body.finish(&mut party.channel)?;
    Ok(share)
}
