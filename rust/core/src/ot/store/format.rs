//! The store's bytes: strict, versioned, little endian, each record with a MAC over all of it. Whatever does not decode
//! to exactly what this build would have written is refused.
//!
//! Two places. The *directory* holds `mark` (two slots of counters, written in turn and in place, so that a torn write
//! leaves the other slot) and the segments. The second place holds `epoch`: the 32-byte key from the operating system
//! and two slots with the generation of the last mark. The key makes the directory alone worthless: segments are sealed
//! with AES-256-GCM and records with HMAC-SHA-256, so a bit flip, a block moved between files or stores and a copied
//! directory are found. It does not protect against someone who reads both places.

use super::lane::{Lane, MAX_LANES};
use crate::error::{Error, Result};
use crate::party::Role;
use crate::random::SecretRng;
use aws_lc_rs::{aead, hmac};
use std::collections::BTreeMap;
use zeroize::Zeroizing;

/// Version of every file of the store.
pub(super) const FORMAT: u32 = 1;
/// Bytes of one slot of the mark; a multiple of the page, so that a torn write stays inside its slot.
pub(super) const MARK_SLOT: usize = 8192;
/// Bytes of one slot of the epoch file, and of its head.
pub(super) const EPOCH_SLOT: usize = 4096;
/// Bytes of a segment's head.
pub(super) const SEGMENT_HEAD: usize = 512;
/// Bytes that sealing adds to a block.
pub(super) const TAG: usize = 16;
const MAC: usize = 32;

pub(super) fn damaged(what: impl Into<String>) -> Error {
    Error::Store(what.into())
}

/// The key of one store, from the operating system, kept in the epoch file only.
pub(super) struct StoreKey(Zeroizing<[u8; 32]>);

impl StoreKey {
    pub fn fresh(rng: &mut SecretRng) -> Self {
        let mut key = Zeroizing::new([0; 32]);
        rng.fill(&mut key[..]);
        Self(key)
    }

    fn mac(&self, domain: &str, bytes: &[u8]) -> [u8; MAC] {
        let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, &self.0[..]));
        context.update(&[domain.len() as u8]);
        context.update(domain.as_bytes());
        context.update(bytes);
        let mut out = [0; MAC];
        out.copy_from_slice(context.sign().as_ref());
        out
    }

    /// Fills the last 32 bytes with the MAC of the rest and returns it.
    pub fn close(&self, domain: &str, record: &mut [u8]) -> [u8; MAC] {
        let at = record.len() - MAC;
        let mac = self.mac(domain, &record[..at]);
        record[at..].copy_from_slice(&mac);
        mac
    }

    fn closed(&self, domain: &str, record: &[u8]) -> bool {
        use subtle::ConstantTimeEq;
        let at = record.len() - MAC;
        self.mac(domain, &record[..at]).ct_eq(&record[at..]).into()
    }

    /// The cipher of one segment: its key depends on the whole head, which holds a fresh salt, so block numbers can be
    /// the nonces.
    pub fn cipher(&self, head: &[u8]) -> Cipher {
        let key = Zeroizing::new(self.mac("segment key", head));
        let key = aead::UnboundKey::new(&aead::AES_256_GCM, &key[..]).expect("the key has 32 bytes");
        Cipher(aead::LessSafeKey::new(key))
    }
}

/// Seals and opens the blocks of one segment.
pub(super) struct Cipher(aead::LessSafeKey);

impl Cipher {
    fn nonce(block: u64) -> aead::Nonce {
        let mut nonce = [0; 12];
        nonce[..8].copy_from_slice(&block.to_le_bytes());
        aead::Nonce::assume_unique_for_key(nonce)
    }

    pub fn seal(&self, block: u64, bytes: &[u8]) -> Result<Vec<u8>> {
        let mut sealed = Vec::with_capacity(bytes.len() + TAG);
        sealed.extend_from_slice(bytes);
        self.0
            .seal_in_place_append_tag(Self::nonce(block), aead::Aad::empty(), &mut sealed)
            .map_err(|_| damaged("a block could not be sealed"))?;
        Ok(sealed)
    }

    pub fn open(&self, block: u64, mut sealed: Zeroizing<Vec<u8>>) -> Result<Zeroizing<Vec<u8>>> {
        let length = self
            .0
            .open_in_place(Self::nonce(block), aead::Aad::empty(), &mut sealed)
            .map_err(|_| damaged("a block is damaged: its tag does not match"))?
            .len();
        sealed.truncate(length);
        Ok(sealed)
    }
}

/// The counters of one lane. All are indices of items; everything below `used` is gone.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct LaneState {
    /// Reserved up to here; nothing below is ever read again after this session.
    pub used: u64,
    /// The peer has proven that its own mark reached this.
    pub confirmed: u64,
    /// Overwritten on disk, synced, up to here.
    pub wiped: u64,
    /// Made and confirmed by both up to here.
    pub filled: u64,
    /// Items of the newest batch, which the peer may have lost; 0 if it cannot be dropped.
    pub last_count: u64,
    /// Running hash over the tags of all batches, and its value before the newest one.
    pub chain: [u8; 16],
    /// See `chain`.
    pub chain_before: [u8; 16],
}

/// Everything that the mark file says.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct State {
    pub generation: u64,
    /// The MAC of the generation before, so that a mark can be tied to the epoch file.
    pub before: [u8; 32],
    /// The peer's store, fixed at the first meeting.
    pub peer_store: Option<[u8; 16]>,
    /// The last session that both parties agreed on, as far as we know.
    pub session: [u8; 16],
    /// The session before, until the peer has proven that it wrote this one down.
    pub earlier: Option<[u8; 16]>,
    pub lanes: BTreeMap<Lane, LaneState>,
}

/// Who the two parties are and what they compute with; both stores hold the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// Our role in every session with this store.
    pub role: Role,
    /// Our fingerprint, as the peer sees it.
    pub own: [u8; 32],
    /// The peer's fingerprint.
    pub peer: [u8; 32],
    /// Digest of all parameters on which stored items depend.
    pub parameters: [u8; 32],
}

/// Fixed-width fields, one after the other.
pub(super) struct Writer(pub Vec<u8>);

impl Writer {
    pub fn put(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub fn number(&mut self, n: u64) -> &mut Self {
        self.put(&n.to_le_bytes())
    }

    pub fn optional(&mut self, id: Option<[u8; 16]>) -> &mut Self {
        self.put(&[u8::from(id.is_some())]).put(&id.unwrap_or_default())
    }
}

pub(super) struct Reader<'a>(pub &'a [u8]);

impl Reader<'_> {
    pub fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or_else(|| damaged("a record ends early"))?;
        self.0 = rest;
        Ok(*head)
    }

    pub fn number(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    pub fn optional(&mut self) -> Result<Option<[u8; 16]>> {
        match (self.take::<1>()?[0], self.take::<16>()?) {
            (0, id) if id == [0; 16] => Ok(None),
            (1, id) => Ok(Some(id)),
            _ => Err(damaged("an optional field is not canonical")),
        }
    }

    /// Whether nothing but zeros lies between here and the MAC at the end.
    pub fn only_padding(&self) -> bool {
        self.0.len() >= MAC && self.0[..self.0.len() - MAC].iter().all(|&b| b == 0)
    }

    pub fn lane(&mut self) -> Result<Lane> {
        Lane::decode(self.take()?).ok_or_else(|| damaged("an unknown kind of correlation"))
    }

    /// The lanes of a table that must be sorted and without repetition.
    pub fn lanes<T>(&mut self, mut each: impl FnMut(&mut Self) -> Result<T>) -> Result<BTreeMap<Lane, T>> {
        let count = usize::from(self.take::<1>()?[0]);
        if count > MAX_LANES {
            return Err(damaged("too many lanes"));
        }
        let mut out = BTreeMap::new();
        for _ in 0..count {
            let lane = self.lane()?;
            if out.last_key_value().is_some_and(|(&last, _)| last >= lane) {
                return Err(damaged("lanes are not in order"));
            }
            let value = each(self)?;
            out.insert(lane, value);
        }
        Ok(out)
    }
}

impl State {
    /// One slot of the mark file, and its MAC, which is the generation's name in the epoch file.
    pub fn encode(&self, key: &StoreKey, store: &[u8; 16], identity: &Identity) -> (Vec<u8>, [u8; 32]) {
        let mut w = Writer(Vec::with_capacity(MARK_SLOT));
        w.put(b"CLSMARK1").put(&FORMAT.to_le_bytes()).put(store).put(&[u8::from(identity.role.is_client())]);
        w.put(&identity.own).put(&identity.peer).put(&identity.parameters);
        w.number(self.generation).put(&self.before).optional(self.peer_store);
        w.put(&self.session).optional(self.earlier).put(&[self.lanes.len() as u8]);
        for (lane, s) in &self.lanes {
            w.put(&lane.encode()).number(s.used).number(s.confirmed).number(s.wiped).number(s.filled);
            w.number(s.last_count).put(&s.chain).put(&s.chain_before);
        }
        let mut slot = w.0;
        slot.resize(MARK_SLOT, 0);
        let mac = key.close("mark", &mut slot);
        (slot, mac)
    }

    /// The inverse; `Ok(None)` for a slot without a valid MAC, which is a torn or a never written one.
    pub fn decode(
        slot: &[u8],
        key: &StoreKey,
        store: &[u8; 16],
        identity: &Identity,
    ) -> Result<Option<(State, [u8; 32])>> {
        if !key.closed("mark", slot) {
            return Ok(None);
        }
        let mut r = Reader(&slot[..slot.len() - MAC]);
        if r.take()? != *b"CLSMARK1" || r.take()? != FORMAT.to_le_bytes() {
            return Err(damaged("the mark has another format version"));
        }
        if r.take()? != *store {
            return Err(damaged("the mark belongs to another store"));
        }
        if r.take()? != [u8::from(identity.role.is_client())] {
            return Err(Error::StoreMismatch("it was made for the other role".into()));
        }
        if r.take()? != identity.own || r.take()? != identity.peer {
            return Err(Error::StoreMismatch("it was made for another pair of parties".into()));
        }
        if r.take()? != identity.parameters {
            let why = "it was made with other parameters: another model, or another kind of transfers";
            return Err(Error::StoreMismatch(why.into()));
        }
        let mut state = State {
            generation: r.number()?,
            before: r.take()?,
            peer_store: r.optional()?,
            session: r.take()?,
            earlier: r.optional()?,
            lanes: BTreeMap::new(),
        };
        state.lanes = r.lanes(|r| {
            Ok(LaneState {
                used: r.number()?,
                confirmed: r.number()?,
                wiped: r.number()?,
                filled: r.number()?,
                last_count: r.number()?,
                chain: r.take()?,
                chain_before: r.take()?,
            })
        })?;
        if r.0.iter().any(|&b| b != 0) {
            return Err(damaged("the mark has bytes after its end"));
        }
        let mac = slot[slot.len() - MAC..].try_into().expect("a MAC has 32 bytes");
        Ok(Some((state, mac)))
    }
}

/// The head of the epoch file: the store's name and key, written once.
pub(super) fn encode_epoch_head(key: &StoreKey, store: &[u8; 16]) -> Zeroizing<Vec<u8>> {
    let mut w = Writer(Vec::with_capacity(EPOCH_SLOT));
    w.put(b"CLSEPOC1").put(&FORMAT.to_le_bytes()).put(store).put(&key.0[..]);
    let mut head = Zeroizing::new(w.0);
    head.resize(EPOCH_SLOT, 0);
    key.close("epoch head", &mut head);
    head
}

/// The inverse of [`encode_epoch_head`].
pub(super) fn decode_epoch_head(head: &[u8]) -> Result<(StoreKey, [u8; 16])> {
    let mut r = Reader(head);
    if r.take()? != *b"CLSEPOC1" || r.take()? != FORMAT.to_le_bytes() {
        return Err(damaged("the epoch file has another format version, or is none"));
    }
    let store = r.take()?;
    let key = StoreKey(Zeroizing::new(r.take()?));
    if !key.closed("epoch head", head) || !r.only_padding() {
        return Err(damaged("the epoch file is damaged"));
    }
    Ok((key, store))
}

/// One slot of the epoch file: the newest generation of the mark and its MAC.
pub(super) fn encode_epoch(key: &StoreKey, generation: u64, mark: &[u8; 32]) -> Vec<u8> {
    let mut w = Writer(Vec::with_capacity(EPOCH_SLOT));
    w.number(generation).put(mark);
    let mut slot = w.0;
    slot.resize(EPOCH_SLOT, 0);
    key.close("epoch", &mut slot);
    slot
}

/// The inverse of [`encode_epoch`]; `None` for a torn or never written slot.
pub(super) fn decode_epoch(key: &StoreKey, slot: &[u8]) -> Option<(u64, [u8; 32])> {
    let mut r = Reader(slot);
    let read = (r.number().ok()?, r.take().ok()?);
    (key.closed("epoch", slot) && r.only_padding()).then_some(read)
}

/// The head of a segment, which is one batch of one lane on disk.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct SegmentHead {
    pub lane: Lane,
    pub first: u64,
    pub count: u64,
    pub block_bytes: u32,
    /// Public digest of what a record is for; zero in other lanes.
    pub digest: [u8; 32],
    pub chain_before: [u8; 16],
    pub chain: [u8; 16],
    /// Fresh for each file, so that no two segments share a key.
    pub salt: [u8; 32],
}

impl SegmentHead {
    pub fn encode(&self, key: &StoreKey, store: &[u8; 16]) -> Vec<u8> {
        let mut w = Writer(Vec::with_capacity(SEGMENT_HEAD));
        w.put(b"CLSSEGM1").put(&FORMAT.to_le_bytes()).put(store).put(&self.lane.encode());
        w.number(self.first).number(self.count).put(&self.block_bytes.to_le_bytes());
        w.put(&self.digest).put(&self.chain_before).put(&self.chain).put(&self.salt);
        let mut head = w.0;
        head.resize(SEGMENT_HEAD, 0);
        key.close("segment", &mut head);
        head
    }

    pub fn decode(head: &[u8], key: &StoreKey, store: &[u8; 16]) -> Result<SegmentHead> {
        if !key.closed("segment", head) {
            return Err(damaged("the head of a segment is damaged or belongs to another store"));
        }
        let mut r = Reader(head);
        if r.take()? != *b"CLSSEGM1" || r.take()? != FORMAT.to_le_bytes() || r.take()? != *store {
            return Err(damaged("a segment has another format version or store"));
        }
        let head = SegmentHead {
            lane: r.lane()?,
            first: r.number()?,
            count: r.number()?,
            block_bytes: u32::from_le_bytes(r.take()?),
            digest: r.take()?,
            chain_before: r.take()?,
            chain: r.take()?,
            salt: r.take()?,
        };
        let whole = [head.first, head.count].iter().all(|n| n % head.lane.block_items() == 0);
        // Counters near 2^64 would only serve to overflow something.
        let small = head.first < 1 << 60
            && (1..1 << 60).contains(&head.count)
            && head.block_bytes < 1 << 31
            && head.blocks() < 1 << 32;
        if !whole || !small || !r.only_padding() {
            return Err(damaged("the head of a segment says what no segment has"));
        }
        Ok(head)
    }

    pub fn end(&self) -> u64 {
        self.first + self.count
    }

    pub fn blocks(&self) -> u64 {
        self.count / self.lane.block_items()
    }

    /// Bytes of one sealed block.
    pub fn sealed_bytes(&self) -> usize {
        self.block_bytes as usize + TAG
    }

    pub fn file_name(&self) -> String {
        format!("{}.{:016x}.segment", self.lane.name(), self.first)
    }
}
