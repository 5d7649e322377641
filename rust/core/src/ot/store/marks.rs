//! What the two parties tell each other about their stores in the hello, and what follows from it.
//!
//! [`reconcile`] is one pure function that both parties compute on the same two messages, so they come to the same
//! answer or both refuse. Two separate ideas protect a correlation:
//! * *Safety.* A range is durable in both marks before either party uses it, so the larger of the two `used` counters
//!   covers everything that was ever used, whatever happened to one of the stores.
//! * *Detection.* Sessions form a chain and `confirmed` counters only rise, so a store that was copied or restored from
//!   a backup is behind what its peer has proof of, and both sides refuse.

use super::format::{FORMAT, Identity, LaneState, Reader, State, Writer};
use super::lane::Lane;
use super::supply::WhenEmpty;
use crate::error::{Error, Result};
use crate::party::Role;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};

/// The longest marks that the hello carries.
pub const MAX_MARKS: usize = 4096;

/// Beyond any number of items that were ever made. A peer's claim moves our counters when both start over, and they
/// must not come near the end of what the files can hold.
const FARTHEST: u64 = 1 << 48;

/// SHA-256 over length-prefixed parts.
pub(super) fn hash(domain: &str, parts: &[&[u8]]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    for part in std::iter::once(domain.as_bytes()).chain(parts.iter().copied()) {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize().into()
}

pub(super) fn short(digest: [u8; 32]) -> [u8; 16] {
    digest[..16].try_into().expect("16 of 32 bytes")
}

/// The public part of a lane's counters.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct LaneMark {
    used: u64,
    confirmed: u64,
    filled: u64,
    last_count: u64,
    chain: [u8; 8],
    chain_before: [u8; 8],
}

/// One party's marks.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Marks {
    role: Role,
    /// Hash of both fingerprints and the parameters.
    pair: [u8; 32],
    pub store: [u8; 16],
    peer_store: Option<[u8; 16]>,
    session: [u8; 16],
    earlier: Option<[u8; 16]>,
    reserve_blocks: u32,
    /// What this party would have done, see [`Policy`].
    pub policy: Policy,
    /// Fresh for each message, so that no two sessions have the same name.
    nonce: [u8; 16],
    lanes: BTreeMap<Lane, LaneMark>,
}

/// What a party wants of a store in trouble. The stricter wish of the two parties holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Policy {
    /// When the store has too little for a step.
    pub when_empty: WhenEmpty,
    /// When one of the stores is behind the other.
    pub when_behind: WhenBehind,
}

/// What happens when one store lags behind what the other knows: it was restored, copied, or made anew.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WhenBehind {
    /// Both parties refuse the session.
    Refuse,
    /// Both throw away everything that is stored and go on behind the gap with new correlations. Nothing that any copy
    /// of the store holds is used again.
    StartOver,
}

impl Default for Policy {
    /// Make more when the store is empty; never go on with a store that is behind.
    fn default() -> Self {
        Self { when_empty: WhenEmpty::Extend, when_behind: WhenBehind::Refuse }
    }
}

impl Policy {
    fn encode(self) -> u8 {
        u8::from(self.when_empty == WhenEmpty::Extend) | u8::from(self.when_behind == WhenBehind::StartOver) << 1
    }

    fn decode(byte: u8) -> Option<Self> {
        let when_empty = if byte & 1 == 1 { WhenEmpty::Extend } else { WhenEmpty::Refuse };
        let when_behind = if byte & 2 == 2 { WhenBehind::StartOver } else { WhenBehind::Refuse };
        (byte < 4).then_some(Self { when_empty, when_behind })
    }

    /// Both must allow what is not the strictest.
    fn stricter(self, other: Self) -> Self {
        Self::decode(self.encode() & other.encode()).expect("two bits of two bits")
    }
}

fn pair(identity: &Identity) -> [u8; 32] {
    let (client, server) =
        if identity.role.is_client() { (&identity.own, &identity.peer) } else { (&identity.peer, &identity.own) };
    hash("store pair", &[client, server, &identity.parameters])
}

impl Marks {
    pub fn new(identity: &Identity, store: [u8; 16], state: &State, reserve_blocks: u32, nonce: [u8; 16]) -> Self {
        let first = |chain: &[u8; 16]| chain[..8].try_into().expect("8 of 16 bytes");
        let lane = |s: &LaneState| LaneMark {
            used: s.used,
            confirmed: s.confirmed,
            filled: s.filled,
            last_count: s.last_count,
            chain: first(&s.chain),
            chain_before: first(&s.chain_before),
        };
        Self {
            role: identity.role,
            pair: pair(identity),
            store,
            peer_store: state.peer_store,
            session: state.session,
            earlier: state.earlier,
            reserve_blocks,
            policy: Policy::default(),
            nonce,
            lanes: state.lanes.iter().map(|(&l, s)| (l, lane(s))).collect(),
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer(Vec::new());
        w.put(b"CLSH").put(&FORMAT.to_le_bytes()).put(&[u8::from(self.role.is_client())]).put(&self.pair);
        w.put(&self.store).optional(self.peer_store).put(&self.session).optional(self.earlier);
        w.put(&self.reserve_blocks.to_le_bytes()).put(&self.nonce).put(&[self.lanes.len() as u8]);
        for (lane, m) in &self.lanes {
            w.put(&lane.encode()).number(m.used).number(m.confirmed).number(m.filled).number(m.last_count);
            w.put(&m.chain).put(&m.chain_before);
        }
        w.put(&[self.policy.encode()]);
        w.0
    }

    /// Whether this party has more of a lane than the other.
    pub fn ahead_of(&self, other: &Marks, lane: Lane) -> bool {
        let filled = |m: &Marks| m.lanes.get(&lane).map_or(0, |l| l.filled);
        filled(self) > filled(other)
    }

    /// Strict: anything that [`Marks::encode`] would not have written is refused.
    pub fn decode(bytes: &[u8]) -> Result<Marks> {
        let wrong = |reason: &str| Error::BadMessage { step: "store marks".into(), reason: reason.into() };
        if bytes.len() > MAX_MARKS {
            return Err(wrong("more than 4096 bytes"));
        }
        let parse = || -> Result<Marks> {
            let mut r = Reader(bytes);
            if r.take()? != *b"CLSH" || r.take()? != FORMAT.to_le_bytes() {
                return Err(wrong("another format version"));
            }
            let role = match r.take()? {
                [0] => Role::Server,
                [1] => Role::Client,
                _ => return Err(wrong("an unknown role")),
            };
            let mut marks = Marks {
                role,
                pair: r.take()?,
                store: r.take()?,
                peer_store: r.optional()?,
                session: r.take()?,
                earlier: r.optional()?,
                reserve_blocks: u32::from_le_bytes(r.take()?),
                policy: Policy::default(),
                nonce: r.take()?,
                lanes: r.lanes(|r| {
                    Ok(LaneMark {
                        used: r.number()?,
                        confirmed: r.number()?,
                        filled: r.number()?,
                        last_count: r.number()?,
                        chain: r.take()?,
                        chain_before: r.take()?,
                    })
                })?,
            };
            marks.policy = Policy::decode(r.take::<1>()?[0]).ok_or_else(|| wrong("an unknown policy"))?;
            if !r.0.is_empty() {
                return Err(wrong("bytes after the end"));
            }
            Ok(marks)
        };
        let marks = parse().map_err(|e| wrong(&e.to_string()))?;
        for (lane, m) in &marks.lanes {
            let whole = [m.used, m.confirmed, m.filled, m.last_count].iter().all(|n| n % lane.block_items() == 0);
            // Counters near 2^64 would only serve to overflow something.
            let ordered = m.confirmed <= m.used && m.used <= m.filled && m.last_count <= m.filled;
            if !whole || !ordered || m.filled >= 1 << 60 {
                return Err(wrong("counters that no store can have"));
            }
        }
        if marks.reserve_blocks == 0 {
            return Err(wrong("reservations of nothing"));
        }
        Ok(marks)
    }
}

/// What both parties do after comparing marks.
#[derive(Debug, PartialEq)]
pub(super) struct Outcome {
    /// Name of the new session.
    pub session: [u8; 16],
    /// The last session that both had written down.
    pub common: [u8; 16],
    pub reserve_blocks: u32,
    pub policy: Policy,
    /// Everything stored goes: why.
    pub start_over: Option<&'static str>,
    /// For each lane: used and filled up to, and whether our newest batch goes because the peer lost its half.
    pub lanes: BTreeMap<Lane, (u64, u64, bool)>,
}

/// Compares both marks. The answer is the same at both parties, but for who drops a batch.
pub(super) fn reconcile(mine: &Marks, theirs: &Marks) -> Result<Outcome> {
    if mine.role == theirs.role {
        return Err(Error::StoreMismatch("both parties' stores were made for the same role".into()));
    }
    if mine.pair != theirs.pair {
        return Err(Error::StoreMismatch(
            "the peer's store was made for another pair of parties or other parameters".into(),
        ));
    }
    let all: BTreeSet<Lane> = mine.lanes.keys().chain(theirs.lanes.keys()).copied().collect();
    if all.len() > super::lane::MAX_LANES {
        return Err(Error::Store("the stores have too many lanes together".into()));
    }
    let (m, t) = (mine.encode(), theirs.encode());
    let (client, server) = if mine.role.is_client() { (&m, &t) } else { (&t, &m) };
    let session = short(hash("store session", &[client, server]));
    let reserve_blocks = mine.reserve_blocks.min(theirs.reserve_blocks);
    let policy = mine.policy.stricter(theirs.policy);
    match compare(mine, theirs, &all) {
        Ok((common, lanes)) => Ok(Outcome { session, common, reserve_blocks, policy, start_over: None, lanes }),
        Err(reason) if policy.when_behind == WhenBehind::StartOver => {
            let filled = |marks: &Marks, lane: &Lane| marks.lanes.get(lane).map_or(0, |l| l.filled);
            let end = |lane: &Lane| filled(mine, lane).max(filled(theirs, lane));
            if all.iter().any(|lane| end(lane) >= FARTHEST) {
                return Err(Error::Store("the peer's store claims more items than any store can have had".into()));
            }
            let kept = all.into_iter().filter(|lane| end(lane) > 0 || mine.lanes.contains_key(lane));
            let lanes = kept.map(|lane| (lane, (end(&lane), end(&lane), false))).collect();
            let start_over = Some(reason);
            Ok(Outcome { session, common: theirs.session, reserve_blocks, policy, start_over, lanes })
        }
        Err(reason) => Err(Error::Store(reason.into())),
    }
}

type Lanes = BTreeMap<Lane, (u64, u64, bool)>;

/// The last session that both know and what both still have, or why they cannot go on with it.
fn compare(mine: &Marks, theirs: &Marks, all: &BTreeSet<Lane>) -> std::result::Result<([u8; 16], Lanes), &'static str> {
    let knows = |known: &Option<[u8; 16]>, is: &[u8; 16]| known.is_none_or(|id| id == *is);
    if !knows(&mine.peer_store, &theirs.store) || !knows(&theirs.peer_store, &mine.store) {
        return Err("one party's store is not the one that the other met before");
    }
    let common = if mine.session == theirs.session || theirs.earlier == Some(mine.session) {
        mine.session
    } else if mine.earlier == Some(theirs.session) {
        theirs.session
    } else if let (Some(a), Some(b)) = (mine.earlier, theirs.earlier)
        && a == b
    {
        a
    } else {
        return Err("one store was copied or restored: the other had sessions that it does not know");
    };
    let nothing = LaneMark::default();
    let mut lanes = BTreeMap::new();
    for lane in all {
        let a = mine.lanes.get(lane).unwrap_or(&nothing);
        let b = theirs.lanes.get(lane).unwrap_or(&nothing);
        let one_behind = |ahead: &LaneMark, behind: &LaneMark| {
            ahead.last_count > 0
                && ahead.filled - ahead.last_count == behind.filled
                && ahead.chain_before == behind.chain
        };
        let drop_mine = if a.filled == b.filled && a.chain == b.chain {
            false
        } else if a.filled > b.filled && one_behind(a, b) {
            true
        } else if b.filled > a.filled && one_behind(b, a) {
            false
        } else {
            return Err("the stores hold different batches: one was copied or restored");
        };
        if a.filled.max(b.filled) == 0 && !mine.lanes.contains_key(lane) {
            // A lane that the peer has opened and never filled takes none of our places.
            continue;
        }
        let filled = a.filled.min(b.filled);
        // What the peer has proof of must be in our mark, and the other way round.
        if a.used < b.confirmed || b.used < a.confirmed {
            return Err("one store was restored: its mark is behind what the other has proof of");
        }
        // A range inside a dropped batch was reserved by one party only, hence never used: the batch itself goes.
        let used = a.used.max(b.used).min(filled);
        lanes.insert(*lane, (used, filled, drop_mine));
    }
    Ok((common, lanes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks(role: Role, lanes: &[(Lane, u64)]) -> Marks {
        let lane = |filled: u64| LaneMark { filled, ..LaneMark::default() };
        Marks {
            role,
            pair: [1; 32],
            store: [2 + u8::from(role.is_client()); 16],
            // Each met another store before, so neither can go on.
            peer_store: Some([9; 16]),
            session: [0; 16],
            earlier: None,
            reserve_blocks: 1,
            policy: Policy { when_behind: WhenBehind::StartOver, ..Policy::default() },
            nonce: [0; 16],
            lanes: lanes.iter().map(|&(l, filled)| (l, lane(filled))).collect(),
        }
    }

    #[test]
    fn a_peer_that_starts_over_cannot_move_our_counters_to_the_end_or_take_our_lanes() {
        let (ours, other) = (Lane::Records(1), Lane::Records(2));
        let mine = marks(Role::Client, &[(ours, 1024)]);
        let honest = reconcile(&mine, &marks(Role::Server, &[(ours, 2048)])).unwrap();
        assert_eq!(honest.lanes[&ours], (2048, 2048, false));
        assert!(honest.start_over.is_some());
        let liar = marks(Role::Server, &[(ours, FARTHEST)]);
        assert!(matches!(reconcile(&mine, &liar), Err(Error::Store(_))));
        let crowding = reconcile(&mine, &marks(Role::Server, &[(ours, 2048), (other, 0)])).unwrap();
        assert!(!crowding.lanes.contains_key(&other));
    }
}
