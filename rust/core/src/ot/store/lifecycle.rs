//! Making, opening and cleaning a store, and the one way in which its mark moves forward.

use super::disk::{Disk, DiskFile};
use super::format::{
    EPOCH_SLOT, Identity, MARK_SLOT, State, StoreKey, damaged, decode_epoch, decode_epoch_head, encode_epoch,
    encode_epoch_head,
};
use super::segment::Segment;
use super::{CommitPoints, DEFAULT_RESERVE_BLOCKS, Lane, Place, Policy, Store, commit_points};
use crate::error::{Error, Result};
use crate::random::SecretRng;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsStr;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::Arc;

/// Names an I/O failure without any content. Only a file that is missing or too short speaks against the store itself;
/// everything else is the disk's or its folder's trouble, after which the store can be opened again.
pub(super) fn failed(what: &'static str) -> impl Fn(io::Error) -> Error {
    move |e| match e.kind() {
        ErrorKind::NotFound | ErrorKind::UnexpectedEof | ErrorKind::InvalidData => Error::Store(format!("{what}: {e}")),
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Error::DiskFull(format!("{what}: {e}")),
        _ => Error::StoreFolder(format!("{what}: {e}")),
    }
}

/// Names a failure to make or to look into a folder, where nothing speaks against a store.
fn unusable(what: &'static str, path: &Path) -> impl Fn(io::Error) -> Error {
    move |e| match failed(what)(e) {
        Error::DiskFull(why) => Error::DiskFull(why),
        Error::Store(why) | Error::StoreFolder(why) => Error::StoreFolder(format!("{why} ({})", path.display())),
        other => other,
    }
}

fn epoch_path(place: &Place) -> std::path::PathBuf {
    place.beside.join("epoch")
}

fn mark_path(place: &Place) -> std::path::PathBuf {
    place.directory.join("mark")
}

fn check_private(disk: &dyn Disk, path: &Path) -> Result<()> {
    let mode = disk.mode(path).map_err(failed("looking at the permissions"))?;
    if mode & 0o170_000 == 0o120_000 {
        return Err(Error::StoreFolder(format!("{} is a link; name the place itself", path.display())));
    }
    if mode & 0o077 != 0 {
        return Err(Error::StoreFolder(format!(
            "others can reach {} (mode {:o}); it must be its owner's alone",
            path.display(),
            mode & 0o777
        )));
    }
    Ok(())
}

/// Everything must belong to whoever owns `ours`, a file that we made. Root alone could go on where it does not.
fn check_owner(disk: &dyn Disk, ours: &Path, paths: &[&Path]) -> Result<()> {
    let owner = |path: &Path| disk.owner(path).map_err(failed("looking at the owner"));
    let us = owner(ours)?;
    for path in paths {
        if owner(path)? != us {
            return Err(Error::StoreFolder(format!("{} belongs to another user", path.display())));
        }
    }
    Ok(())
}

/// The folder around the sealed correlations, where the place names one.
fn outer(place: &Place) -> Option<&Path> {
    place.directory.parent().filter(|path| !path.as_os_str().is_empty())
}

/// Says which store it is that belongs elsewhere.
fn in_folder(error: Error, place: &Place) -> Error {
    match error {
        Error::StoreMismatch(why) => Error::StoreMismatch(format!("{why} ({})", place.directory.display())),
        other => other,
    }
}

fn lock(file: &mut Box<dyn DiskFile>) -> Result<()> {
    if file.try_lock().map_err(failed("locking"))? {
        return Ok(());
    }
    Err(Error::StoreBusy("another process uses it".into()))
}

fn read_slot(file: &dyn DiskFile, offset: usize, length: usize) -> Result<Vec<u8>> {
    let mut slot = vec![0; length];
    file.read_at(offset as u64, &mut slot).map_err(failed("reading a slot"))?;
    Ok(slot)
}

impl Store {
    /// Opens the store at a place, or makes it in a folder of its own: one that only its owner can reach, and that holds
    /// nothing else when the store is made.
    pub fn open_or_make(disk: Arc<dyn Disk>, place: &Place, identity: &Identity) -> Result<Store> {
        if Store::exists(&*disk, place) {
            if let Some(outer) = outer(place) {
                check_private(&*disk, outer)?;
                check_owner(&*disk, &mark_path(place), &[outer])?;
            }
            return Store::open(disk, place, identity);
        }
        if let Some(outer) = outer(place) {
            disk.make_directory(outer).map_err(unusable("making the folder", outer))?;
            check_private(&*disk, outer)?;
            // A crash while the store was made may have left its two directories.
            let beside = place.beside.file_name().filter(|_| place.beside.parent() == Some(outer));
            let ours = [place.directory.file_name(), beside];
            let names = disk.list(outer).map_err(unusable("listing the folder", outer))?;
            if names.iter().any(|name| !ours.contains(&Some(OsStr::new(name)))) {
                let why = format!("{} holds other files; a store needs a folder of its own", outer.display());
                return Err(Error::StoreFolder(why));
            }
        }
        if let Some(parent) = place.beside.parent().filter(|path| !path.as_os_str().is_empty()) {
            disk.make_directory(parent).map_err(unusable("making the folder of the key", parent))?;
        }
        let store = Store::create(disk, place, identity)?;
        if let Some(outer) = outer(place) {
            check_owner(&*store.disk, &mark_path(place), &[outer])?;
        }
        Ok(store)
    }

    /// Makes an empty store. Refuses a place that has one; the remains of a creation that a crash cut short, which no
    /// key can open, are replaced.
    pub fn create(disk: Arc<dyn Disk>, place: &Place, identity: &Identity) -> Result<Store> {
        disk.make_directory(&place.directory).map_err(unusable("making the directory", &place.directory))?;
        disk.make_directory(&place.beside).map_err(unusable("making the second place", &place.beside))?;
        check_private(&*disk, &place.directory)?;
        check_private(&*disk, &place.beside)?;
        let names = disk.list(&place.beside).map_err(failed("listing the second place"))?;
        if names.iter().any(|n| n == "epoch") {
            return Err(Error::StoreFolder("there is a store already".into()));
        }
        disk.reached("create.begin");
        for leftover in disk.list(&place.directory).map_err(failed("listing the directory"))? {
            if leftover == "mark" || leftover == "lock" || leftover.contains(".segment") {
                disk.remove(&place.directory.join(leftover)).map_err(failed("removing remains"))?;
            }
        }
        let mut rng = SecretRng::from_os();
        let (key, mut id) = (StoreKey::fresh(&mut rng), [0; 16]);
        rng.fill(&mut id);
        let state = State { generation: 2, ..State::default() };
        let (slot, mac) = state.encode(&key, &id, identity);
        let mut mark = disk.create(&mark_path(place)).map_err(failed("making the mark"))?;
        check_owner(&*disk, &mark_path(place), &[&place.directory, &place.beside])?;
        mark.write_at(MARK_SLOT as u64, &vec![0; MARK_SLOT]).map_err(failed("writing the mark"))?;
        mark.write_at(0, &slot).map_err(failed("writing the mark"))?;
        mark.sync().map_err(failed("syncing the mark"))?;
        disk.reached("create.mark-fsynced");
        disk.create(&place.directory.join("lock"))
            .and_then(|mut f| f.sync())
            .map_err(failed("making the lock file"))?;
        disk.sync_directory(&place.directory).map_err(failed("syncing the directory"))?;
        let temporary = place.beside.join("epoch.new");
        if names.iter().any(|n| n == "epoch.new") {
            disk.remove(&temporary).map_err(failed("removing remains"))?;
        }
        let mut epoch = disk.create(&temporary).map_err(failed("making the epoch file"))?;
        let slots = [&encode_epoch_head(&key, &id)[..], &encode_epoch(&key, 2, &mac), &[0; EPOCH_SLOT]];
        for (i, bytes) in slots.into_iter().enumerate() {
            epoch.write_at((i * EPOCH_SLOT) as u64, bytes).map_err(failed("writing the epoch file"))?;
        }
        disk.reached("create.epoch-written");
        epoch.sync().map_err(failed("syncing the epoch file"))?;
        disk.reached("create.before-rename");
        disk.rename(&temporary, &epoch_path(place)).map_err(failed("naming the epoch file"))?;
        disk.reached("create.renamed");
        disk.sync_directory(&place.beside).map_err(failed("syncing the second place"))?;
        // A crash of the machine must not lose the directories themselves.
        for directory in [&place.directory, &place.beside] {
            if let Some(parent) = directory.parent().filter(|p| !p.as_os_str().is_empty()) {
                disk.sync_directory(parent).map_err(failed("syncing the parent directory"))?;
            }
        }
        drop((mark, epoch));
        Store::open(disk, place, identity)
    }

    /// Whether there is a store at a place; a creation that a crash cut short does not count.
    pub fn exists(disk: &dyn Disk, place: &Place) -> bool {
        disk.list(&place.beside).is_ok_and(|names| names.iter().any(|n| n == "epoch"))
    }

    /// Opens a store after whatever happened to it, or says why it cannot be trusted. Reads the heads of the segments
    /// and finishes wiping; takes well under a second.
    pub fn open(disk: Arc<dyn Disk>, place: &Place, identity: &Identity) -> Result<Store> {
        for path in [&place.directory, &place.beside, &mark_path(place), &epoch_path(place)] {
            check_private(&*disk, path)?;
        }
        let mut lock_file = disk.open(&place.directory.join("lock")).map_err(failed("opening the lock file"))?;
        lock(&mut lock_file)?;
        let mut epoch = disk.open(&epoch_path(place)).map_err(failed("opening the epoch file"))?;
        lock(&mut epoch)?;
        let head = zeroize::Zeroizing::new(read_slot(&*epoch, 0, EPOCH_SLOT)?);
        let (key, id) = decode_epoch_head(&head)?;
        let mut newest = None;
        for slot in 1..3 {
            let found = decode_epoch(&key, &read_slot(&*epoch, slot * EPOCH_SLOT, EPOCH_SLOT)?);
            newest = newest.max(found);
        }
        let (generation, mac) = newest.ok_or_else(|| damaged("the epoch file is damaged"))?;
        let mark = disk.open(&mark_path(place)).map_err(failed("opening the mark"))?;
        let mut state: Option<(State, [u8; 32])> = None;
        for slot in 0..2 {
            let found = State::decode(&read_slot(&*mark, slot * MARK_SLOT, MARK_SLOT)?, &key, &id, identity)
                .map_err(|error| in_folder(error, place))?;
            if let Some(found) = found
                && state.as_ref().is_none_or(|(s, _)| s.generation < found.0.generation)
            {
                state = Some(found);
            }
        }
        let (state, mark_mac) = state.ok_or_else(|| damaged("the mark is damaged or belongs to another store"))?;
        // The mark is written before the epoch, so it may be one generation ahead and never behind.
        let same = state.generation == generation && mark_mac == mac;
        let ahead = state.generation == generation + 1 && state.before == mac;
        if !same && !ahead {
            return Err(damaged(format!(
                "it was copied or restored: its mark has generation {} and the epoch file {generation}",
                state.generation
            )));
        }
        let mut store = Store {
            read: state.lanes.iter().map(|(&lane, s)| (lane, s.used)).collect(),
            disk,
            place: place.clone(),
            identity: identity.clone(),
            id,
            key,
            rng: SecretRng::from_os(),
            mark,
            epoch,
            _lock: lock_file,
            state,
            mark_mac,
            segments: BTreeMap::new(),
            rest: BTreeMap::new(),
            reserve_blocks: DEFAULT_RESERVE_BLOCKS,
            policy: Policy::default(),
            offered: None,
            agreed: false,
            dead: false,
        };
        store.disk.reached("open.begin");
        if ahead {
            // A crash came between the two. Catch up in the slot that this generation owns, so that the next one cannot
            // tear the only slot that is valid.
            store.write_epoch(mark_mac, "open.catching-up").map_err(failed("catching up with the mark"))?;
            store.disk.reached("open.caught-up");
        }
        store.load_segments()?;
        store.disk.reached("open.loaded");
        store.wipe_used()?;
        store.sync_wiped()?;
        // Every opening is a generation of its own: of two copies only one can be opened with this epoch file.
        store.commit(commit_points!("open"))?;
        store.compact()?;
        Ok(store)
    }

    /// Writes the state as the next generation: first the mark, then the epoch, each synced. Only after this returns
    /// may anything depend on it.
    pub(super) fn commit(&mut self, points: CommitPoints) -> Result<()> {
        let outcome = self.try_commit(points);
        self.note(outcome)
    }

    fn try_commit(&mut self, points: CommitPoints) -> Result<()> {
        self.state.generation += 1;
        self.state.before = self.mark_mac;
        let generation = self.state.generation;
        let (slot, mac) = self.state.encode(&self.key, &self.id, &self.identity);
        self.disk.reached(points[0]);
        let place = (generation % 2) * MARK_SLOT as u64;
        self.mark.write_at(place, &slot).map_err(failed("writing the mark"))?;
        self.disk.reached(points[1]);
        self.mark.sync().map_err(failed("syncing the mark"))?;
        self.disk.reached(points[2]);
        self.write_epoch(mac, points[3]).map_err(failed("writing the epoch file"))?;
        self.disk.reached(points[4]);
        self.mark_mac = mac;
        Ok(())
    }

    /// Writes and syncs the epoch of the state's generation.
    fn write_epoch(&mut self, mac: [u8; 32], written: &'static str) -> io::Result<()> {
        let generation = self.state.generation;
        let place = (1 + generation % 2) * EPOCH_SLOT as u64;
        self.epoch.write_at(place, &encode_epoch(&self.key, generation, &mac))?;
        self.disk.reached(written);
        self.epoch.sync()
    }

    /// Reads the heads of all segments, refuses a store in which one is missing or foreign, and removes what no mark
    /// counts: files half written, and batches that were never confirmed or were dropped.
    fn load_segments(&mut self) -> Result<()> {
        let names = self.disk.list(&self.place.directory).map_err(failed("listing the directory"))?;
        let mut found: BTreeMap<Lane, BTreeMap<u64, Segment>> = BTreeMap::new();
        let mut stray = Vec::new();
        for name in names {
            if !name.contains(".segment") {
                continue;
            }
            let path = self.place.directory.join(&name);
            if !name.ends_with(".segment") {
                stray.push(path);
                continue;
            }
            check_private(&*self.disk, &path)?;
            let segment = Segment::open(&*self.disk, &path, &self.key, &self.id)?;
            let (lane, first) = (segment.head.lane, segment.head.first);
            if segment.head.file_name() != name {
                return Err(damaged("a segment was renamed"));
            }
            // A half-made batch lies beyond the mark, and so does one that was dropped. One that is used up and wiped
            // was about to be removed, or its removal was lost.
            let s = self.state.lanes.get(&lane).cloned().unwrap_or_default();
            if segment.head.end() > s.filled || segment.head.end() <= s.wiped {
                stray.push(path);
            } else {
                found.entry(lane).or_default().insert(first, segment);
            }
        }
        for (&lane, s) in &self.state.lanes {
            let queue: VecDeque<Segment> = found.remove(&lane).unwrap_or_default().into_values().collect();
            let mut at = queue.front().map_or(s.filled, |first| first.head.first);
            let mut chain = queue.front().map_or(s.chain, |first| first.head.chain_before);
            let complete = at <= s.used
                && queue.iter().all(|segment| {
                    let follows = segment.head.first == at && segment.head.chain_before == chain;
                    (at, chain) = (segment.head.end(), segment.head.chain);
                    follows
                });
            // Where nothing can be given out any more, what lies there only waits to be wiped.
            if s.used < s.filled && (!complete || at != s.filled || chain != s.chain) {
                return Err(damaged(format!("segments of {} are missing or of another time", lane.name())));
            }
            self.segments.insert(lane, queue);
        }
        if !found.is_empty() {
            return Err(damaged("a segment belongs to no lane"));
        }
        for path in &stray {
            self.disk.remove(path).map_err(failed("removing a half-made batch"))?;
        }
        if !stray.is_empty() {
            self.disk.sync_directory(&self.place.directory).map_err(failed("syncing the directory"))?;
        }
        Ok(())
    }
}
