//! What a store reads, from its peer and from its disk, as functions of bytes alone, for tests and fuzzers. Each gives
//! back the bytes that the accepted value would be written as.
//!
//! The records on disk carry a MAC that nobody can make by chance. Here it is made for whatever comes: the cipher is a
//! mock, so that the decoders behind it are reached.

use super::codec;
use super::format::{
    EPOCH_SLOT, Identity, MARK_SLOT, SEGMENT_HEAD, SegmentHead, State, StoreKey, decode_epoch, decode_epoch_head,
    encode_epoch, encode_epoch_head,
};
use super::marks::{Marks, WhenBehind, reconcile};
use super::{BLOCK_ITEMS, Lane};
use crate::ot::{ReceivedPads, ReceivedPads16};
use crate::party::{Role, Triples};
use crate::random::SecretRng;
use zeroize::Zeroizing;

const STORE: [u8; 16] = [5; 16];
const MAC: usize = 32;
/// Items of a block.
const N: usize = BLOCK_ITEMS as usize;

fn key() -> StoreKey {
    StoreKey::fresh(&mut SecretRng::from_insecure_fixed_seed(1))
}

fn identity(role: Role) -> Identity {
    let (own, peer) = if role.is_client() { (1, 2) } else { (2, 1) };
    Identity { role, own: [own; 32], peer: [peer; 32], parameters: [9; 32] }
}

fn state() -> State {
    let mut state = State { generation: 7, session: [3; 16], ..State::default() };
    for lane in [Lane::PadsFromClient, Lane::Triples, Lane::Records(3)] {
        let s = state.lanes.entry(lane).or_default();
        (s.used, s.confirmed, s.filled, s.last_count) = (2 * BLOCK_ITEMS, BLOCK_ITEMS, 4 * BLOCK_ITEMS, BLOCK_ITEMS);
        (s.chain, s.chain_before) = ([8; 16], [7; 16]);
    }
    state
}

/// Puts the right MAC at the end, or answers nothing for bytes of another length, which the disk never gives.
fn closed(domain: &str, bytes: &[u8], length: usize) -> Option<Vec<u8>> {
    let mut record = (bytes.len() == length).then(|| bytes.to_vec())?;
    key().close(domain, &mut record);
    Some(record)
}

/// What a record would be written as, but for the MAC, which the mock made.
fn reopened(mut record: Vec<u8>, bytes: &[u8]) -> Option<Vec<u8>> {
    let at = record.len() - MAC;
    record[at..].copy_from_slice(&bytes[at..]);
    Some(record)
}

/// The server's marks as they stand in its hello.
pub fn good_marks() -> Vec<Vec<u8>> {
    let other = State { peer_store: Some([4; 16]), earlier: Some([3; 16]), session: [6; 16], ..state() };
    [State { session: [3; 16], ..State::default() }, state(), other]
        .iter()
        .map(|state| {
            let mut marks = Marks::new(&identity(Role::Server), STORE, state, 64, [2; 16]);
            marks.policy.when_behind = WhenBehind::StartOver;
            marks.encode()
        })
        .collect()
}

/// The marks of the peer's store in its hello, compared with ours by both parties: they agree, or both refuse.
pub fn marks(bytes: &[u8]) -> Option<Vec<u8>> {
    let theirs = Marks::decode(bytes).ok()?;
    for when_behind in [WhenBehind::Refuse, WhenBehind::StartOver] {
        let mut mine = Marks::new(&identity(Role::Client), [4; 16], &state(), 64, [1; 16]);
        mine.policy.when_behind = when_behind;
        match (reconcile(&mine, &theirs), reconcile(&theirs, &mine)) {
            (Ok(a), Ok(b)) => {
                assert_eq!((a.session, a.reserve_blocks, a.policy), (b.session, b.reserve_blocks, b.policy));
                assert_eq!(a.start_over, b.start_over);
                // Those who start over keep the name of the other's last session.
                assert!(a.common == b.common || a.start_over.is_some());
                assert_eq!(a.lanes.len(), b.lanes.len());
                for ((lane, &(used, filled, drop_a)), (other, &(their_used, their_filled, drop_b))) in
                    a.lanes.iter().zip(&b.lanes)
                {
                    assert_eq!((lane, used, filled), (other, their_used, their_filled));
                    assert!(used <= filled && !(drop_a && drop_b));
                }
            }
            (Err(_), Err(_)) => {}
            _ => panic!("one party agrees and the other refuses"),
        }
    }
    Some(theirs.encode())
}

/// A slot of the mark file.
pub fn good_mark_slots() -> Vec<Vec<u8>> {
    let more = State { peer_store: Some([4; 16]), earlier: Some([2; 16]), ..state() };
    [state(), more].iter().map(|state| state.encode(&key(), &STORE, &identity(Role::Client)).0).collect()
}

/// Reads one.
pub fn mark_slot(bytes: &[u8]) -> Option<Vec<u8>> {
    let (key, identity) = (key(), identity(Role::Client));
    let slot = closed("mark", bytes, MARK_SLOT)?;
    let (state, _) = State::decode(&slot, &key, &STORE, &identity).ok()??;
    reopened(state.encode(&key, &STORE, &identity).0, bytes)
}

/// A slot of the mark file as it lies on the disk, where the MAC is what it is.
pub fn sealed_mark_slot(bytes: &[u8]) -> Option<Vec<u8>> {
    let (key, identity) = (key(), identity(Role::Client));
    let slot = (bytes.len() == MARK_SLOT).then_some(bytes)?;
    let (state, _) = State::decode(slot, &key, &STORE, &identity).ok()??;
    Some(state.encode(&key, &STORE, &identity).0)
}

/// The head of the epoch file, which brings its own key.
pub fn good_epoch_head() -> Vec<u8> {
    encode_epoch_head(&key(), &STORE).to_vec()
}

/// Reads one.
pub fn epoch_head(bytes: &[u8]) -> Option<Vec<u8>> {
    let head = (bytes.len() == EPOCH_SLOT).then_some(bytes)?;
    let (key, store) = decode_epoch_head(head).ok()?;
    Some(encode_epoch_head(&key, &store).to_vec())
}

/// A slot of the epoch file.
pub fn good_epoch() -> Vec<u8> {
    encode_epoch(&key(), 77, &[6; 32])
}

/// Reads one.
pub fn epoch(bytes: &[u8]) -> Option<Vec<u8>> {
    let key = key();
    let (generation, mark) = decode_epoch(&key, &closed("epoch", bytes, EPOCH_SLOT)?)?;
    reopened(encode_epoch(&key, generation, &mark), bytes)
}

/// Heads of segments.
pub fn good_segment_heads() -> Vec<Vec<u8>> {
    [(Lane::PadsFromServer, 4 * BLOCK_ITEMS, 0), (Lane::Records(9), 3, 0xcc)]
        .map(|(lane, count, digest)| {
            SegmentHead {
                lane,
                first: 2 * count,
                count,
                block_bytes: 700,
                digest: [digest; 32],
                chain_before: [1; 16],
                chain: [2; 16],
                salt: [3; 32],
            }
            .encode(&key(), &STORE)
        })
        .into()
}

/// Reads one.
pub fn segment_head(bytes: &[u8]) -> Option<Vec<u8>> {
    let key = key();
    let head = SegmentHead::decode(&closed("segment", bytes, SEGMENT_HEAD)?, &key, &STORE).ok()?;
    // What is computed from a head that was accepted.
    assert!(head.end() > head.first && !head.file_name().is_empty());
    assert!(head.blocks().checked_mul(head.sealed_bytes() as u64).is_some());
    reopened(head.encode(&key, &STORE), bytes)
}

/// A sealed block of a segment.
pub fn good_sealed_block() -> Vec<u8> {
    key().cipher(&[0; 64]).seal(3, &[0xab; 200]).expect("a block can be sealed")
}

/// Opens one.
pub fn sealed_block(bytes: &[u8]) -> Option<Vec<u8>> {
    let cipher = key().cipher(&[0; 64]);
    let open = cipher.open(3, Zeroizing::new(bytes.to_vec())).ok()?;
    Some(cipher.seal(3, &open).expect("a block can be sealed"))
}

/// An opened block of a lane whose items are not plain bytes.
pub fn good_block(lane: Lane, role: Role) -> Vec<u8> {
    vec![1; lane.block_bytes(role).expect("not a lane of records")]
}

/// Reads one.
pub fn block(lane: Lane, role: Role, bytes: &[u8]) -> Option<Vec<u8>> {
    if lane.block_bytes(role) != Some(bytes.len()) {
        return None;
    }
    let items = codec::expand(lane, role, Zeroizing::new(bytes.to_vec())).ok()?;
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
    let again = match items.len() / N {
        17 => {
            let mut all = ReceivedPads { choices: vec![], pads: vec![] };
            for item in items.chunks_exact(17) {
                all.choices.push(item[0]);
                all.pads.push(u128::from_le_bytes(item[1..].try_into().expect("16 bytes")));
            }
            codec::received(&all, 0)
        }
        2 => {
            let (choices, pads) = items.chunks_exact(2).map(|two| (two[0], two[1])).unzip();
            codec::received16(&ReceivedPads16 { choices, pads }, 0)
        }
        24 => {
            let mut all = Triples { a: vec![], b: vec![], c: vec![] };
            for item in items.chunks_exact(24) {
                all.a.push(number(&item[..8]));
                all.b.push(number(&item[8..16]));
                all.c.push(number(&item[16..]));
            }
            codec::triples(&all, 0)
        }
        _ => items,
    };
    Some(again.to_vec())
}
