//! The store as a supply: the protocols ask for transfers and triples and do not see where they come from.

use super::lane::{BLOCK_ITEMS, Lane};
use super::{Agreement, Store, codec};
use crate::error::{Error, Result};
use crate::net::Channel;
use crate::ot::{Block, OtSupply, ReceivedPads, ReceivedPads16, SentPads};
use crate::party::{TripleSupply, Triples};
use std::sync::{Arc, Mutex, MutexGuard};
use zeroize::Zeroizing;

/// A store that a party's two supplies share.
#[derive(Clone)]
pub struct SharedStore(Arc<Mutex<Store>>);

impl SharedStore {
    /// Shares a store.
    pub fn new(store: Store) -> Self {
        Self(Arc::new(Mutex::new(store)))
    }

    /// The store itself. Refused if a thread panicked while it worked on it.
    pub fn lock(&self) -> Result<MutexGuard<'_, Store>> {
        self.0.lock().map_err(|_| Error::Store("a thread that used it died; open it anew".into()))
    }

    /// See [`Store::meet`].
    pub fn meet(&self, channel: &mut Channel) -> Result<Agreement> {
        self.lock()?.meet(channel)
    }

    /// Closes the store if this is the last handle to it; otherwise hands the handle back.
    pub fn close(self) -> std::result::Result<Result<()>, SharedStore> {
        match Arc::try_unwrap(self.0) {
            Ok(mutex) => Ok(mutex
                .into_inner()
                .map_err(|_| Error::Store("a thread that used it died; open it anew".into()))
                .and_then(Store::close)),
            Err(shared) => Err(SharedStore(shared)),
        }
    }
}

/// What a supply does when the store has fewer items than a step wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WhenEmpty {
    /// The step fails with [`Error::Exhausted`] before anything is used.
    Refuse,
    /// The rest comes from the inner supply, which makes it now.
    Extend,
}

/// The name of the step under which is counted what the store lacked and a step had to wait for.
pub const MADE_NOW: &str = "made now";

/// Transfers and triples out of a store. Both parties must be set to the same [`WhenEmpty`].
///
/// Memory: the items of one call and at most one block of each lane. A block that a call uses in part is kept for the
/// next call of the same session and forgotten (not reused) at its end.
pub struct StoredOt {
    store: SharedStore,
    when_empty: WhenEmpty,
    transfers: Option<Box<dyn OtSupply>>,
    triples: Option<Box<dyn TripleSupply>>,
}

/// The unused end of a block, already wiped from the disk. It lives in the store and ends with the session.
pub(super) struct Rest {
    items: Zeroizing<Vec<u8>>,
    at: usize,
}

impl StoredOt {
    /// A supply that refuses when the store is empty.
    pub fn new(store: SharedStore) -> Self {
        Self { store, when_empty: WhenEmpty::Refuse, transfers: None, triples: None }
    }

    /// Falls back to this supply of transfers when the store is empty.
    pub fn or_transfers(mut self, inner: Box<dyn OtSupply>) -> Self {
        (self.when_empty, self.transfers) = (WhenEmpty::Extend, Some(inner));
        self
    }

    /// Falls back to this supply of triples when the store is empty.
    pub fn or_triples(mut self, inner: Box<dyn TripleSupply>) -> Self {
        (self.when_empty, self.triples) = (WhenEmpty::Extend, Some(inner));
        self
    }

    /// The store behind this supply.
    pub fn store(&self) -> &SharedStore {
        &self.store
    }

    /// What happens when the store is empty.
    pub fn when_empty(&self) -> WhenEmpty {
        self.when_empty
    }

    /// Items that calls can still get without the inner supply.
    pub fn remaining(&self, lane: Lane) -> Result<u64> {
        let store = self.store.lock()?;
        let width = codec::item_bytes(lane, store.role()).max(1);
        Ok(store.remaining(lane) + store.rest.get(&lane).map_or(0, |r| ((r.items.len() - r.at) / width) as u64))
    }

    /// Burns at once what the next calls will take of some lanes, as far as it is stored, so that they need not stop for it. One
    /// round and two syncs for all together.
    pub fn reserve(&self, channel: &mut Channel, wanted: &[(Lane, u64)]) -> Result<()> {
        let mut store = self.store.lock()?;
        let mut blocks = Vec::new();
        for &(lane, items) in wanted {
            let width = codec::item_bytes(lane, store.role()).max(1);
            let here = store.rest.get(&lane).map_or(0, |r| (r.items.len() - r.at) / width) as u64;
            let reserved = store.reserved_blocks(lane);
            let unreserved = store.remaining(lane) / lane.block_items() - reserved;
            let missing = items.saturating_sub(here).div_ceil(lane.block_items()).saturating_sub(reserved);
            if missing.min(unreserved) > 0 {
                blocks.push((lane, missing.min(unreserved)));
            }
        }
        if blocks.is_empty() {
            return Ok(());
        }
        channel.step("store", |channel| store.reserve(channel, &blocks))
    }

    /// Hands up to `n` stored items to `each` and says how many are missing.
    fn take(
        &self,
        channel: &mut Channel,
        lane: Lane,
        n: usize,
        has_inner: bool,
        mut each: impl FnMut(&[u8]),
    ) -> Result<usize> {
        let mut store = self.store.lock()?;
        let width = codec::item_bytes(lane, store.role());
        let here = store.rest.get(&lane).map_or(0, |r| (r.items.len() - r.at) / width);
        let stock = here.saturating_add(usize::try_from(store.remaining(lane)).unwrap_or(usize::MAX));
        if stock < n && !has_inner {
            return Err(Error::Exhausted(format!("{n} of {} wanted, {stock} stored", lane.name())));
        }
        let mut due = n.min(stock);
        let missing = n - due;
        while due > 0 {
            if store.rest.get(&lane).is_none_or(|r| r.at == r.items.len()) {
                let block = next(&mut store, channel, lane, due)?;
                let items = codec::expand(lane, store.role(), block)?;
                store.rest.insert(lane, Rest { items, at: 0 });
            }
            let rest = store.rest.get_mut(&lane).expect("it was filled above");
            let take = due.min((rest.items.len() - rest.at) / width);
            for item in rest.items[rest.at..rest.at + take * width].chunks_exact(width) {
                each(item);
            }
            rest.at += take * width;
            due -= take;
        }
        Ok(missing)
    }
}

/// The next block, after a reservation if none is left: as much as the call still wants or the agreed read-ahead, the
/// same at both parties.
fn next(store: &mut Store, channel: &mut Channel, lane: Lane, due: usize) -> Result<Zeroizing<Vec<u8>>> {
    if store.reserved_blocks(lane) == 0 {
        let stored = store.remaining(lane) / BLOCK_ITEMS;
        let wanted = (due as u64).div_ceil(BLOCK_ITEMS).max(u64::from(store.read_ahead())).min(stored);
        channel.step("store", |channel| store.reserve(channel, &[(lane, wanted)]))?;
    }
    store.next_block(lane)
}

fn pad(bytes: &[u8]) -> Block {
    Block::from_le_bytes(bytes.try_into().expect("a pad has 16 bytes"))
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("a field element is stored in 8 bytes"))
}

impl OtSupply for StoredOt {
    fn send(&mut self, channel: &mut Channel, n: usize) -> Result<SentPads> {
        let lane = Lane::pads(self.store.lock()?.role());
        let mut out = Vec::with_capacity(n);
        let inner = self.transfers.is_some();
        let missing = self.take(channel, lane, n, inner, |item| out.push([pad(&item[..16]), pad(&item[16..])]))?;
        if let (1.., Some(inner)) = (missing, &mut self.transfers) {
            out.extend(channel.step(MADE_NOW, |channel| inner.send(channel, missing))?);
        }
        Ok(out)
    }

    fn receive(&mut self, channel: &mut Channel, n: usize) -> Result<ReceivedPads> {
        let lane = Lane::pads(self.store.lock()?.role().other());
        let mut out = ReceivedPads { choices: Vec::with_capacity(n), pads: Vec::with_capacity(n) };
        let inner = self.transfers.is_some();
        let missing = self.take(channel, lane, n, inner, |item| {
            out.choices.push(item[0]);
            out.pads.push(pad(&item[1..]));
        })?;
        if let (1.., Some(inner)) = (missing, &mut self.transfers) {
            let mut more = channel.step(MADE_NOW, |channel| inner.receive(channel, missing))?;
            out.choices.append(&mut more.choices);
            out.pads.append(&mut more.pads);
        }
        Ok(out)
    }

    fn send16(&mut self, channel: &mut Channel, n: usize) -> Result<Vec<[u8; 16]>> {
        let lane = Lane::pads16(self.store.lock()?.role());
        let mut out: Vec<[u8; 16]> = Vec::with_capacity(n);
        let inner = self.transfers.is_some();
        let missing =
            self.take(channel, lane, n, inner, |item| out.push(item.try_into().expect("an item has 16 bytes")))?;
        if let (1.., Some(inner)) = (missing, &mut self.transfers) {
            out.extend(channel.step(MADE_NOW, |channel| inner.send16(channel, missing))?);
        }
        Ok(out)
    }

    fn receive16(&mut self, channel: &mut Channel, n: usize) -> Result<ReceivedPads16> {
        let lane = Lane::pads16(self.store.lock()?.role().other());
        let mut out = ReceivedPads16 { choices: Vec::with_capacity(n), pads: Vec::with_capacity(n) };
        let inner = self.transfers.is_some();
        let missing = self.take(channel, lane, n, inner, |item| {
            out.choices.push(item[0]);
            out.pads.push(item[1]);
        })?;
        if let (1.., Some(inner)) = (missing, &mut self.transfers) {
            let mut more = channel.step(MADE_NOW, |channel| inner.receive16(channel, missing))?;
            out.choices.append(&mut more.choices);
            out.pads.append(&mut more.pads);
        }
        Ok(out)
    }
}

impl TripleSupply for StoredOt {
    fn triples(&mut self, channel: &mut Channel, n: usize) -> Result<Triples> {
        let mut out = Triples { a: Vec::with_capacity(n), b: Vec::with_capacity(n), c: Vec::with_capacity(n) };
        let inner = self.triples.is_some();
        let missing = self.take(channel, Lane::Triples, n, inner, |item| {
            out.a.push(word(&item[..8]));
            out.b.push(word(&item[8..16]));
            out.c.push(word(&item[16..]));
        })?;
        if let (1.., Some(inner)) = (missing, &mut self.triples) {
            let mut more = channel.step(MADE_NOW, |channel| inner.triples(channel, missing))?;
            out.a.append(&mut more.a);
            out.b.append(&mut more.b);
            out.c.append(&mut more.c);
        }
        Ok(out)
    }
}
