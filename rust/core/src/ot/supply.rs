//! The supply of transfers for a session: both directions, extended in bulk, kept in a bounded stock, given out once.

use super::base::BaseKind;
use super::silent::{NOISE_TABLE, NoiseLine, Scratch, SilentChooser, SilentHolder};
use super::softspoken::{self, Chooser, GroupBits, Holder};
use super::{Block, OtSupply, ReceivedPads, ReceivedPads16, SentPads};
use crate::error::{Error, Result};
use crate::net::{Channel, Kind};
use crate::party::Role;
use crate::random::SecretRng;
use sha2::{Digest, Sha256};
use zeroize::{Zeroize, Zeroizing};

/// Most bytes that a stock made ahead may take, counted at the dearer party for all kinds together.
pub const STOCK_LIMIT: usize = 256 << 20;
/// Fewest transfers that an extension on demand makes, so that small requests share a message.
pub(super) const REFILL_LEAST: usize = 1 << 14;
/// The same for silent batches.
const REFILL_LEAST_SILENT: usize = 1 << 16;
/// Most transfers that one extension makes; larger requests are served in pieces. Bounds the working memory.
pub(super) const REFILL_MOST: usize = 1 << 20;

/// Bits of a group, nanoseconds and bytes a 1-of-2 transfer, at the slower party.
const SOFTSPOKEN_COSTS: [(usize, f64, f64); 4] =
    [(1, 115.0, 15.875), (2, 110.0, 7.875), (4, 120.0, 3.875), (8, 300.0, 1.875)];
/// The same for silent transfers.
const SILENT_COST: (f64, f64) = (120.0, 0.67);

/// How transfers are extended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OtKind {
    /// SoftSpoken with this many bits per group: 16/k bytes and 2^k/k AES calls a transfer.
    SoftSpoken(GroupBits),
    /// Silent: two thirds of a byte a transfer in batches of 2^18. Small requests still make a batch of 2^16.
    Silent,
}

impl OtKind {
    /// The fastest kind for a link of this many megabits per second, by what an extension costs on one core a party
    /// (nanoseconds and bytes a transfer, measured by the example `ot_timing`; both are needed one after the other).
    pub fn for_link(megabits_per_second: f64) -> Self {
        let cost = |nanoseconds: f64, bytes: f64| nanoseconds + bytes * 8000.0 / megabits_per_second.max(0.001);
        let (mut best, mut least) = (OtKind::Silent, cost(SILENT_COST.0, SILENT_COST.1));
        for (bits, nanoseconds, bytes) in SOFTSPOKEN_COSTS {
            let own = cost(nanoseconds, bytes);
            if own < least {
                (best, least) = (OtKind::SoftSpoken(GroupBits::new(bits).expect("a size of the table")), own);
            }
        }
        best
    }

    /// The extension under it: the transfers that silent batches start from come from SoftSpoken with k = 4.
    fn bits(self) -> GroupBits {
        match self {
            OtKind::SoftSpoken(bits) => bits,
            OtKind::Silent => GroupBits::new(4).expect("4 is a size of groups"),
        }
    }
}

/// What both parties agree on before the first transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OtConfig {
    /// The public-key operation underneath.
    pub base: BaseKind,
    /// The extension.
    pub kind: OtKind,
}

/// Numbers of transfers, as this party sees them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OtCounts {
    /// 1-of-2 transfers that this party sends.
    pub send: usize,
    /// 1-of-2 transfers that this party receives.
    pub receive: usize,
    /// 1-of-16 transfers that this party sends.
    pub send16: usize,
    /// 1-of-16 transfers that this party receives.
    pub receive16: usize,
}

impl OtCounts {
    /// The same transfers as the peer sees them.
    pub fn for_peer(self) -> Self {
        Self { send: self.receive, receive: self.send, send16: self.receive16, receive16: self.send16 }
    }

    /// Bytes of a stock of this size at the party where it is larger; the same number for both parties.
    pub fn bytes(self) -> usize {
        let pairs = self.send.saturating_add(self.receive).saturating_mul(size_of::<[Block; 2]>());
        let sixteens = self.send16.saturating_add(self.receive16).saturating_mul(size_of::<[u8; 16]>());
        pairs.saturating_add(sixteens)
    }
}

/// A queue of one-time values. What was taken is wiped; what is left is wiped on drop.
struct Stock<T: Zeroize + Copy> {
    items: Vec<T>,
    taken: usize,
}

impl<T: Zeroize + Copy> Stock<T> {
    fn new() -> Self {
        Self { items: Vec::new(), taken: 0 }
    }

    fn len(&self) -> usize {
        self.items.len() - self.taken
    }

    /// The vector to append to, with room for `n` more, so that appending does not leave copies behind.
    fn room(&mut self, n: usize) -> &mut Vec<T> {
        let mut fresh = Vec::with_capacity(self.len() + n);
        fresh.extend_from_slice(&self.items[self.taken..]);
        self.items.zeroize();
        self.items = fresh;
        self.taken = 0;
        &mut self.items
    }

    fn take(&mut self, n: usize, out: &mut Vec<T>) {
        let part = &mut self.items[self.taken..self.taken + n];
        out.extend_from_slice(part);
        part.iter_mut().for_each(Zeroize::zeroize);
        self.taken += n;
    }
}

impl<T: Zeroize + Copy> Drop for Stock<T> {
    fn drop(&mut self) {
        self.items.zeroize();
    }
}

/// The direction in which this party sends.
struct Sending {
    holder: Holder,
    /// 1-of-2 and 1-of-16 batches, if transfers are silent.
    silent: Option<[SilentHolder; 2]>,
    pairs: Stock<[Block; 2]>,
    sixteens: Stock<[u8; 16]>,
}

/// The direction in which this party receives.
struct Receiving {
    chooser: Chooser,
    /// 1-of-2 and 1-of-16 batches, if transfers are silent.
    silent: Option<[SilentChooser; 2]>,
    choices: Stock<u8>,
    pads: Stock<Block>,
    choices16: Stock<u8>,
    pads16: Stock<u8>,
}

/// Random transfers in both directions, extended from base transfers made at the start of the session.
pub struct ExtendedOt {
    role: Role,
    sending: Sending,
    receiving: Receiving,
    scratch: Scratch,
}

fn name(role: Role) -> &'static str {
    if role.is_client() { "client" } else { "server" }
}

impl ExtendedOt {
    /// Makes the base transfers in both directions. `session` is a hash of the transcript so far, the same for both
    /// parties and never the same for two sessions: every tweak and every public key of the session hangs on it.
    pub fn set_up(
        channel: &mut Channel,
        role: Role,
        session: &[u8; 32],
        config: OtConfig,
        rng: &mut SecretRng,
    ) -> Result<Self> {
        channel.step("ot setup", |channel| {
            let mark: [u8; 32] =
                Sha256::new().chain_update(session).chain_update(format!("{config:?}")).finalize().into();
            if channel.exchange(Kind::BaseOt, &mark, mark.len())? != mark {
                return Err(Error::Disagreement {
                    field: "oblivious transfer",
                    reason: "the parties chose different kinds of transfers or hold different transcripts".into(),
                });
            }
            let bits = config.kind.bits();
            let hold = |channel: &mut Channel, rng: &mut SecretRng| {
                Holder::set_up(channel, config.base, bits, session, name(role), rng)
            };
            let choose = |channel: &mut Channel, rng: &mut SecretRng| {
                Chooser::set_up(channel, config.base, bits, session, name(role.other()), rng)
            };
            let (holder, chooser) = if role.is_client() {
                let holder = hold(channel, rng)?;
                (holder, choose(channel, rng)?)
            } else {
                let chooser = choose(channel, rng)?;
                (hold(channel, rng)?, chooser)
            };
            let silent = config.kind == OtKind::Silent;
            let (mine, theirs) = (name(role), name(role.other()));
            Ok(Self {
                role,
                sending: Sending {
                    holder,
                    silent: silent
                        .then(|| [false, true].map(|sixteen| SilentHolder::new(session, mine, sixteen, rng.fork()))),
                    pairs: Stock::new(),
                    sixteens: Stock::new(),
                },
                receiving: Receiving {
                    chooser,
                    silent: silent
                        .then(|| [false, true].map(|sixteen| SilentChooser::new(session, theirs, sixteen, rng.fork()))),
                    choices: Stock::new(),
                    pads: Stock::new(),
                    choices16: Stock::new(),
                    pads16: Stock::new(),
                },
                scratch: Scratch::default(),
            })
        })
    }

    /// Leaves every hash out, to show what it is for.
    #[cfg(test)]
    pub(super) fn insecure_hash_off(&mut self) {
        self.sending.holder.hash.insecure_identity = true;
        self.receiving.chooser.hash.insecure_identity = true;
        self.sending.silent.iter_mut().flatten().for_each(SilentHolder::insecure_hash_off);
        self.receiving.silent.iter_mut().flatten().for_each(SilentChooser::insecure_hash_off);
    }

    /// What can be given out without talking to the peer.
    pub fn stock(&self) -> OtCounts {
        OtCounts {
            send: self.sending.pairs.len(),
            receive: self.receiving.pads.len(),
            send16: self.sending.sixteens.len(),
            receive16: self.receiving.pads16.len(),
        }
    }

    /// Fills the stock up to at least `counts`. The peer calls it with [`OtCounts::for_peer`] of the same counts.
    pub fn preprocess(&mut self, channel: &mut Channel, counts: OtCounts) -> Result<()> {
        if counts.bytes() > STOCK_LIMIT {
            return Err(Error::BadArgument(format!(
                "a stock of {} bytes of transfers is over the limit of {STOCK_LIMIT}",
                counts.bytes()
            )));
        }
        // One order for both parties: what the client sends comes first.
        for client_sends in [true, false] {
            if client_sends == self.role.is_client() {
                while self.sending.pairs.len() < counts.send {
                    self.sending.refill(channel, counts.send - self.sending.pairs.len(), &mut self.scratch)?;
                }
                while self.sending.sixteens.len() < counts.send16 {
                    self.sending.refill16(channel, counts.send16 - self.sending.sixteens.len(), &mut self.scratch)?;
                }
            } else {
                while self.receiving.pads.len() < counts.receive {
                    self.receiving.refill(channel, counts.receive - self.receiving.pads.len(), &mut self.scratch)?;
                }
                while self.receiving.pads16.len() < counts.receive16 {
                    self.receiving.refill16(
                        channel,
                        counts.receive16 - self.receiving.pads16.len(),
                        &mut self.scratch,
                    )?;
                }
            }
        }
        Ok(())
    }
}

/// How many transfers a SoftSpoken extension makes when `wanted` are missing. Depends on public counts alone, so both
/// parties come to the same number.
fn refill_size(wanted: usize) -> usize {
    softspoken::rounded(wanted.clamp(REFILL_LEAST, REFILL_MOST))
}

/// Most transfers of a silent batch: its working memory, 16 bytes for two values each, stays in the processor's cache.
const SILENT_MOST: usize = 1 << 18;

/// The smallest silent batch of at least 2^16 that holds `wanted` transfers, or the largest below the limit.
fn batch_line(wanted: usize) -> NoiseLine {
    let fits = |line: &&NoiseLine| (REFILL_LEAST_SILENT..=SILENT_MOST).contains(&(1 << line.log_outputs));
    let mut lines = NOISE_TABLE.iter().filter(fits);
    let first = lines.next().expect("the table has a line in the allowed range");
    *lines.fold(first, |line, next| if 1 << line.log_outputs < wanted { next } else { line })
}

impl Sending {
    /// How many transfers an extension makes when `wanted` are missing.
    fn size(&self, wanted: usize) -> usize {
        if self.silent.is_some() { 1 << batch_line(wanted).log_outputs } else { refill_size(wanted) }
    }

    fn size16(&self, wanted: usize) -> usize {
        if self.silent.is_some() { self.size(wanted) } else { refill_size(wanted.saturating_mul(4)) / 4 }
    }

    /// One extension, appended to `out`.
    fn extend(
        &mut self,
        channel: &mut Channel,
        wanted: usize,
        scratch: &mut Scratch,
        out: &mut Vec<[Block; 2]>,
    ) -> Result<()> {
        channel.step("ot extension", |channel| match &mut self.silent {
            None => self.holder.extend(channel, refill_size(wanted), out),
            Some([pairs, _]) => pairs.extend(channel, &mut self.holder, batch_line(wanted), scratch, out),
        })
    }

    fn extend16(
        &mut self,
        channel: &mut Channel,
        wanted: usize,
        scratch: &mut Scratch,
        out: &mut Vec<[u8; 16]>,
    ) -> Result<()> {
        channel.step("ot extension", |channel| match &mut self.silent {
            None => {
                let n = refill_size(wanted.saturating_mul(4));
                let mut pairs = Zeroizing::new(Vec::with_capacity(n));
                self.holder.extend(channel, n, &mut pairs)?;
                out.extend(pairs.chunks_exact(4).map(|four| sixteen_pads([four[0], four[1], four[2], four[3]])));
                Ok(())
            }
            Some([_, sixteens]) => sixteens.extend16(channel, &mut self.holder, batch_line(wanted), scratch, out),
        })
    }

    fn refill(&mut self, channel: &mut Channel, wanted: usize, scratch: &mut Scratch) -> Result<()> {
        let mut items = std::mem::take(self.pairs.room(self.size(wanted)));
        let outcome = self.extend(channel, wanted, scratch, &mut items);
        self.pairs.items = items;
        outcome
    }

    fn refill16(&mut self, channel: &mut Channel, wanted: usize, scratch: &mut Scratch) -> Result<()> {
        let mut items = std::mem::take(self.sixteens.room(self.size16(wanted)));
        let outcome = self.extend16(channel, wanted, scratch, &mut items);
        self.sixteens.items = items;
        outcome
    }
}

impl Receiving {
    fn size(&self, wanted: usize) -> usize {
        if self.silent.is_some() { 1 << batch_line(wanted).log_outputs } else { refill_size(wanted) }
    }

    fn size16(&self, wanted: usize) -> usize {
        if self.silent.is_some() { self.size(wanted) } else { refill_size(wanted.saturating_mul(4)) / 4 }
    }

    /// One extension, appended to `choices` and `pads`.
    fn extend(
        &mut self,
        channel: &mut Channel,
        wanted: usize,
        scratch: &mut Scratch,
        choices: &mut Vec<u8>,
        pads: &mut Vec<Block>,
    ) -> Result<()> {
        channel.step("ot extension", |channel| match &mut self.silent {
            None => self.chooser.extend(channel, refill_size(wanted), choices, pads),
            Some([pairs, _]) => pairs.extend(channel, &mut self.chooser, batch_line(wanted), scratch, choices, pads),
        })
    }

    fn extend16(
        &mut self,
        channel: &mut Channel,
        wanted: usize,
        scratch: &mut Scratch,
        choices: &mut Vec<u8>,
        pads: &mut Vec<u8>,
    ) -> Result<()> {
        channel.step("ot extension", |channel| match &mut self.silent {
            None => {
                let n = refill_size(wanted.saturating_mul(4));
                let mut bits = Zeroizing::new(Vec::with_capacity(n));
                let mut wide = Zeroizing::new(Vec::with_capacity(n));
                self.chooser.extend(channel, n, &mut bits, &mut wide)?;
                for (bits, wide) in bits.chunks_exact(4).zip(wide.chunks_exact(4)) {
                    let choice = bits[0] | bits[1] << 1 | bits[2] << 2 | bits[3] << 3;
                    let sum = wide.iter().fold(0, |sum, pad| sum ^ pad);
                    choices.push(choice);
                    // A shift by a secret number of bits: fixed time on the processors we know, unlike an index.
                    pads.push((sum >> (8 * u32::from(choice))) as u8);
                }
                Ok(())
            }
            Some([_, sixteens]) => {
                sixteens.extend16(channel, &mut self.chooser, batch_line(wanted), scratch, choices, pads)
            }
        })
    }

    fn refill(&mut self, channel: &mut Channel, wanted: usize, scratch: &mut Scratch) -> Result<()> {
        let n = self.size(wanted);
        let (mut choices, mut pads) = (std::mem::take(self.choices.room(n)), std::mem::take(self.pads.room(n)));
        let outcome = self.extend(channel, wanted, scratch, &mut choices, &mut pads);
        (self.choices.items, self.pads.items) = (choices, pads);
        outcome
    }

    fn refill16(&mut self, channel: &mut Channel, wanted: usize, scratch: &mut Scratch) -> Result<()> {
        let n = self.size16(wanted);
        let (mut choices, mut pads) = (std::mem::take(self.choices16.room(n)), std::mem::take(self.pads16.room(n)));
        let outcome = self.extend16(channel, wanted, scratch, &mut choices, &mut pads);
        (self.choices16.items, self.pads16.items) = (choices, pads);
        outcome
    }
}

/// Sixteen 8-bit pads from four 1-of-2 transfers of 128 bits: byte c of each 128-bit pad belongs to choice c alone, so
/// pad c = the sum over j of byte c of the pad of bit j of c. A receiver who has one pad of each transfer lacks, for
/// every other c, the bytes c of at least one transfer, and uses each byte once.
fn sixteen_pads(four: [[Block; 2]; 4]) -> [u8; 16] {
    // Byte c of the mask number j is all ones if bit j of c is set.
    const MASKS: [u128; 4] = [
        0xff00ff00_ff00ff00_ff00ff00_ff00ff00,
        0xffff0000_ffff0000_ffff0000_ffff0000,
        0xffffffff_00000000_ffffffff_00000000,
        0xffffffff_ffffffff_00000000_00000000,
    ];
    let sum = four.iter().zip(MASKS).fold(0, |sum, (pair, mask)| sum ^ (pair[0] & !mask) ^ (pair[1] & mask));
    sum.to_le_bytes()
}

impl OtSupply for ExtendedOt {
    fn send(&mut self, channel: &mut Channel, n: usize) -> Result<SentPads> {
        let mut out = Vec::with_capacity(n);
        while out.len() < n {
            let (side, left) = (&mut self.sending, n - out.len());
            if side.pairs.len() == 0 && side.size(left) <= left {
                // Straight to the caller: the stock would only be a detour.
                side.extend(channel, left, &mut self.scratch, &mut out)?;
                continue;
            }
            if side.pairs.len() == 0 {
                side.refill(channel, left, &mut self.scratch)?;
            }
            side.pairs.take(side.pairs.len().min(left), &mut out);
        }
        Ok(out)
    }

    fn receive(&mut self, channel: &mut Channel, n: usize) -> Result<ReceivedPads> {
        let mut out = ReceivedPads { choices: Vec::with_capacity(n), pads: Vec::with_capacity(n) };
        while out.pads.len() < n {
            let (side, left) = (&mut self.receiving, n - out.pads.len());
            if side.pads.len() == 0 && side.size(left) <= left {
                side.extend(channel, left, &mut self.scratch, &mut out.choices, &mut out.pads)?;
                continue;
            }
            if side.pads.len() == 0 {
                side.refill(channel, left, &mut self.scratch)?;
            }
            let count = side.pads.len().min(left);
            side.choices.take(count, &mut out.choices);
            side.pads.take(count, &mut out.pads);
        }
        Ok(out)
    }

    fn send16(&mut self, channel: &mut Channel, n: usize) -> Result<Vec<[u8; 16]>> {
        let mut out = Vec::with_capacity(n);
        while out.len() < n {
            let (side, left) = (&mut self.sending, n - out.len());
            if side.sixteens.len() == 0 && side.size16(left) <= left {
                side.extend16(channel, left, &mut self.scratch, &mut out)?;
                continue;
            }
            if side.sixteens.len() == 0 {
                side.refill16(channel, left, &mut self.scratch)?;
            }
            side.sixteens.take(side.sixteens.len().min(left), &mut out);
        }
        Ok(out)
    }

    fn receive16(&mut self, channel: &mut Channel, n: usize) -> Result<ReceivedPads16> {
        let mut out = ReceivedPads16 { choices: Vec::with_capacity(n), pads: Vec::with_capacity(n) };
        while out.pads.len() < n {
            let (side, left) = (&mut self.receiving, n - out.pads.len());
            if side.pads16.len() == 0 && side.size16(left) <= left {
                side.extend16(channel, left, &mut self.scratch, &mut out.choices, &mut out.pads)?;
                continue;
            }
            if side.pads16.len() == 0 {
                side.refill16(channel, left, &mut self.scratch)?;
            }
            let count = side.pads16.len().min(left);
            side.choices16.take(count, &mut out.choices);
            side.pads16.take(count, &mut out.pads);
        }
        Ok(out)
    }
}
