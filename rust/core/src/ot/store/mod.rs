//! The store of one-time correlations: made ahead, kept on disk, each used at most once, whatever happens in between.
//!
//! **Order.** Reserve a range, write it to our mark and our epoch file and sync both, tell the peer and hear the same
//! from it, only then read; what was read is overwritten on disk before it is handed out. A crash at any place loses at
//! most the reserved range, never gives an item a second time. After a crash, a reconnect or a lost message the parties
//! compare marks ([`Store::marks`], [`Store::agree`]) and go on behind the larger of both.
//!
//! **A store that was copied or restored** from a backup is refused twice: by the epoch file in its second place (which
//! must not be part of the same backup), because the mark is not the newest generation; and by the peer, which has
//! proof of later use. If both parties restore both places to about the same moment (up to one reservation
//! apart), nobody can know; don't back them up.
//! Where both parties' [`Policy`] says so they do not refuse but start over: everything stored is burnt at both, however
//! old, and new batches follow, so nothing that any copy holds is used again.
//!
//! **A failed sync** means that the bytes are lost. It is never tried again: the handle is dead, the store is opened
//! anew, and what was reserved stays burnt.
//!
//! **What a disk does not promise.** Consumed blocks are overwritten in place and their files removed at the end. A
//! solid-state drive, a copy-on-write or a journalling file system may keep the old bytes elsewhere; they are sealed
//! under the key in the epoch file, so keep that place on a medium that you can erase.
//!
//! Files of both places are 0600 in directories of 0700 and refused if wider, and so is the folder around them. One process at a time: both places are
//! locked. Cost: two syncs and one round for each reservation ([`DEFAULT_RESERVE_BLOCKS`] blocks of [`BLOCK_ITEMS`]
//! items unless asked for more), two rounds and five syncs for each batch made.

pub(crate) mod codec;
mod disk;
#[cfg(any(test, feature = "insecure-test-dealer"))]
pub mod foreign;
mod format;
mod lane;
mod lifecycle;
mod marks;
mod segment;
mod supply;

pub use disk::{Disk, DiskFile, RealDisk};
pub use format::Identity;
pub use lane::{BLOCK_ITEMS, Lane, MAX_LANES};
pub use marks::{MAX_MARKS, Policy, WhenBehind};
pub use segment::{Batch, Offer};
pub use supply::{MADE_NOW, SharedStore, StoredOt, WhenEmpty};

use crate::error::{Error, Result};
use crate::net::{Channel, Kind};
use crate::random::SecretRng;
use format::{State, StoreKey, Writer};
use marks::Outcome;
use segment::Segment;
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use zeroize::Zeroizing;

/// Blocks that one reservation burns when a step asks for less.
pub const DEFAULT_RESERVE_BLOCKS: u32 = 64;

/// Where a store lives.
#[derive(Clone, Debug)]
pub struct Place {
    /// The mark and the sealed correlations.
    pub directory: PathBuf,
    /// The key and the epoch: a directory on another medium or at least outside every backup of the first.
    pub beside: PathBuf,
}

/// What the two parties found when they compared marks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Agreement {
    /// Name of the session, the same at both parties.
    pub session: [u8; 16],
    /// Items left in each lane, the same at both parties.
    pub remaining: BTreeMap<Lane, u64>,
    /// Lanes whose newest batch was dropped because one party had lost its half.
    pub dropped: Vec<Lane>,
    /// What both parties do when a store is empty or behind: the stricter of their wishes.
    pub policy: Policy,
    /// Everything that was stored is gone, for this reason; see [`WhenBehind::StartOver`].
    pub started_over: Option<&'static str>,
}

/// One party's open store.
pub struct Store {
    disk: Arc<dyn Disk>,
    place: Place,
    identity: Identity,
    id: [u8; 16],
    key: StoreKey,
    rng: SecretRng,
    mark: Box<dyn DiskFile>,
    epoch: Box<dyn DiskFile>,
    /// Held for its lock; the epoch file carries the other one.
    _lock: Box<dyn DiskFile>,
    state: State,
    mark_mac: [u8; 32],
    /// The next item to read; at most `used`.
    read: BTreeMap<Lane, u64>,
    segments: BTreeMap<Lane, VecDeque<Segment>>,
    rest: BTreeMap<Lane, supply::Rest>,
    reserve_blocks: u32,
    policy: Policy,
    offered: Option<marks::Marks>,
    agreed: bool,
    dead: bool,
}

/// The names of the places that one durable step passes, in order: before, mark written, mark synced, epoch written,
/// epoch synced.
type CommitPoints = [&'static str; 5];

macro_rules! commit_points {
    ($step:literal) => {
        [
            concat!($step, ".before-mark"),
            concat!($step, ".mark-written"),
            concat!($step, ".mark-fsynced"),
            concat!($step, ".epoch-written"),
            concat!($step, ".epoch-fsynced"),
        ]
    };
}
use commit_points;

impl Store {
    /// Our marks for the hello, at most [`MAX_MARKS`] bytes. Nothing in them is secret. Fresh at each call.
    pub fn marks(&mut self) -> Result<Vec<u8>> {
        self.live()?;
        let mut nonce = [0; 16];
        self.rng.fill(&mut nonce);
        self.agreed = false;
        let mut marks = marks::Marks::new(&self.identity, self.id, &self.state, self.reserve_blocks, nonce);
        marks.policy = self.policy;
        let bytes = marks.encode();
        self.offered = Some(marks);
        Ok(bytes)
    }

    /// Compares the peer's marks with the ones that we sent last. Both parties come to the same agreement or both
    /// refuse; everything that either of them had reserved before is burnt.
    pub fn agree(&mut self, theirs: &[u8]) -> Result<Agreement> {
        self.live()?;
        let mine = self.offered.take().ok_or_else(|| Error::BadArgument("agree comes after marks".into()))?;
        let theirs = marks::Marks::decode(theirs)?;
        let outcome = marks::reconcile(&mine, &theirs)?;
        self.disk.reached("agree.begin");
        let mut dropped = Vec::new();
        for (&lane, &(used, filled, drop_mine)) in &outcome.lanes {
            let s = self.state.lanes.entry(lane).or_default();
            if drop_mine {
                (s.chain, s.last_count) = (s.chain_before, 0);
            }
            if drop_mine || outcome.start_over.is_none() && theirs.ahead_of(&mine, lane) {
                dropped.push(lane);
            }
            (s.used, s.filled) = (used, filled);
            if outcome.start_over.is_some() {
                // The next batch follows on nothing that either of them has.
                s.chain = marks::short(marks::hash("store starts over", &[&outcome.session, &lane.encode()]));
                (s.chain_before, s.last_count) = (s.chain, 0);
            }
            (s.confirmed, s.wiped) = (s.confirmed.min(used), s.wiped.min(used));
        }
        self.state.peer_store = Some(theirs.store);
        self.state.session = outcome.session;
        self.state.earlier = Some(outcome.common);
        self.commit(commit_points!("agree"))?;
        self.rest.clear();
        self.forget_reserved()?;
        self.sync_wiped()?;
        self.compact()?;
        self.reserve_blocks = outcome.reserve_blocks;
        self.agreed = true;
        let remaining = self.state.lanes.keys().map(|&lane| (lane, self.remaining(lane))).collect();
        let Outcome { session, policy, start_over: started_over, .. } = outcome;
        Ok(Agreement { session, remaining, dropped, policy, started_over })
    }

    /// Sets what this party wants when a store is empty or behind, from the next marks on.
    pub fn set_policy(&mut self, policy: Policy) {
        self.policy = policy;
    }

    /// Exchanges marks over a channel, for sessions whose hello did not carry them. One round.
    pub fn meet(&mut self, channel: &mut Channel) -> Result<Agreement> {
        let mine = self.marks()?;
        channel.send(Kind::StoreMarks, &mine)?;
        let theirs = channel.receive_between(Kind::StoreMarks, 1, MAX_MARKS)?;
        self.agree(&theirs)
    }

    /// Name of the running session, the same at both parties.
    pub fn session(&self) -> [u8; 16] {
        self.state.session
    }

    /// Items that can still be given out.
    pub fn remaining(&self, lane: Lane) -> u64 {
        let filled = self.state.lanes.get(&lane).map_or(0, |s| s.filled);
        filled - self.read_at(lane)
    }

    /// Items ever made in a lane; the index of the next one.
    pub fn filled(&self, lane: Lane) -> u64 {
        self.state.lanes.get(&lane).map_or(0, |s| s.filled)
    }

    /// Our role in every session with this store.
    pub fn role(&self) -> crate::Role {
        self.identity.role
    }

    /// Blocks that a reservation burns at least. Both parties use the smaller of their two settings, from the next
    /// agreement on. More blocks mean fewer syncs and rounds, and more items lost in a crash.
    pub fn set_reserve_blocks(&mut self, blocks: u32) -> Result<()> {
        if blocks == 0 {
            return Err(Error::BadArgument("a reservation has at least one block".into()));
        }
        self.reserve_blocks = blocks;
        Ok(())
    }

    /// The read-ahead that both parties agreed on.
    pub fn read_ahead(&self) -> u32 {
        self.reserve_blocks
    }

    /// Reserves the next blocks of some lanes, durably and with the peer's consent. Both parties call it with the same
    /// arguments. One round, two syncs, and one more for each file in which something was wiped since the last time.
    pub fn reserve(&mut self, channel: &mut Channel, wanted: &[(Lane, u64)]) -> Result<()> {
        self.in_session()?;
        for &(lane, blocks) in wanted {
            let s = self.state.lanes.get(&lane).cloned().unwrap_or_default();
            if blocks > (s.filled - s.used) / lane.block_items() {
                return Err(Error::Exhausted(format!(
                    "{blocks} blocks of {} wanted, {} stored",
                    lane.name(),
                    (s.filled - s.used) / lane.block_items()
                )));
            }
        }
        self.disk.reached("reserve.begin");
        self.sync_wiped()?;
        let mut body = Writer(Vec::new());
        body.put(&self.state.session);
        for &(lane, blocks) in wanted {
            let s = self.state.lanes.entry(lane).or_default();
            body.put(&lane.encode()).number(s.used);
            s.used += blocks * lane.block_items();
            body.number(s.used);
        }
        self.commit(commit_points!("reserve"))?;
        self.compact()?;
        // Until the peer has answered, nothing of the new range may be read.
        self.agreed = false;
        self.disk.reached("exchange.before-send");
        channel.send(Kind::StoreMarks, &body.0)?;
        channel.flush()?;
        self.disk.reached("exchange.sent");
        let theirs = channel.receive(Kind::StoreMarks, body.0.len())?;
        self.disk.reached("exchange.received");
        if theirs != body.0 {
            channel.refuse("another range reserved");
            return Err(Error::Disagreement { field: "store", reason: "the parties reserved different ranges".into() });
        }
        // The peer's mark is durable up to here: it said so after its sync.
        for s in self.state.lanes.values_mut() {
            s.confirmed = s.used;
        }
        self.settle()?;
        self.agreed = true;
        Ok(())
    }

    /// The next reserved block of a lane, decrypted. It is wiped from the disk before this returns.
    pub fn next_block(&mut self, lane: Lane) -> Result<Zeroizing<Vec<u8>>> {
        self.in_session()?;
        let at = self.read_at(lane);
        if at >= self.state.lanes.get(&lane).map_or(0, |s| s.used) {
            return Err(Error::Exhausted(format!("{} have no reserved block", lane.name())));
        }
        let outcome = self.read_and_wipe(lane, at);
        let block = self.note(outcome)?;
        self.read.insert(lane, at + lane.block_items());
        self.disk.reached("use.block-given");
        Ok(block)
    }

    /// Blocks that are reserved and not yet read.
    pub fn reserved_blocks(&self, lane: Lane) -> u64 {
        (self.state.lanes.get(&lane).map_or(0, |s| s.used) - self.read_at(lane)) / lane.block_items()
    }

    /// The next record made for `digest`. Records before it are burnt: both parties call with the same public digests in
    /// the same order, so both skip the same ones. A reservation takes `ahead` records after it too, as far as there are
    /// so many: what the same request will use anyway.
    pub fn take_record(
        &mut self,
        channel: &mut Channel,
        stream: u16,
        digest: &[u8; 32],
        ahead: u64,
    ) -> Result<Zeroizing<Vec<u8>>> {
        self.in_session()?;
        let lane = Lane::Records(stream);
        let at = self.read_at(lane);
        let Some((index, _)) = self.records(stream).find(|(_, found)| *found == digest) else {
            return Err(Error::Exhausted(format!("no prepared record of this kind is left in {}", lane.name())));
        };
        let s = self.state.lanes.get(&lane).cloned().unwrap_or_default();
        if index >= s.used {
            let end = (index + 1).saturating_add(ahead).min(s.filled);
            self.reserve(channel, &[(lane, end - s.used)])?;
        }
        for _ in at..index {
            drop(self.next_block(lane)?);
        }
        self.next_block(lane)
    }

    /// The records of a stream that can still be taken, in order: where each stands, and what it was made for. The same
    /// at both parties.
    pub fn records(&self, stream: u16) -> impl DoubleEndedIterator<Item = (u64, &[u8; 32])> {
        let lane = Lane::Records(stream);
        let at = self.read_at(lane);
        let queue = self.segments.get(&lane).into_iter().flatten();
        queue.map(|s| (s.head.first, &s.head.digest)).filter(move |(first, _)| *first >= at)
    }

    /// The streams of records that this store knows, also those that are used up.
    pub fn streams(&self) -> impl Iterator<Item = u16> {
        self.state.lanes.keys().filter_map(|lane| if let Lane::Records(stream) = lane { Some(*stream) } else { None })
    }

    /// Burns what is reserved and unread, syncs the wiping, and writes down what the peer has confirmed.
    pub fn close(mut self) -> Result<()> {
        self.live()?;
        self.forget_reserved()?;
        self.sync_wiped()?;
        self.commit(commit_points!("close"))?;
        self.compact()
    }

    /// After the first message of a session proved that the peer wrote the session down, we need not keep the one
    /// before; from here on a copy from before this session is refused.
    fn settle(&mut self) -> Result<()> {
        if self.state.earlier.take().is_some() { self.commit(commit_points!("settle")) } else { Ok(()) }
    }

    fn read_at(&self, lane: Lane) -> u64 {
        self.read.get(&lane).copied().unwrap_or(0)
    }

    fn live(&self) -> Result<()> {
        if self.dead {
            // The failure itself was reported, as what it was; the store on disk is whole.
            return Err(Error::SessionOver);
        }
        Ok(())
    }

    fn in_session(&self) -> Result<()> {
        self.live()?;
        if !self.agreed {
            return Err(Error::BadArgument("the parties must compare the marks of their stores first".into()));
        }
        Ok(())
    }

    /// A failure while touching the disk ends this handle.
    fn note<T>(&mut self, outcome: Result<T>) -> Result<T> {
        self.dead |= outcome.is_err();
        outcome
    }
}
