//! Batches on disk: written as a stream under a temporary name, counted only after both parties confirmed, read block by
//! block, overwritten as they are read.

use super::disk::{Disk, DiskFile};
use super::format::{Cipher, SEGMENT_HEAD, SegmentHead, StoreKey, damaged};
use super::lifecycle::failed;
use super::marks::{hash, short};
use super::{Lane, MAX_LANES, Store, commit_points};
use crate::error::{Error, Result};
use crate::net::{Channel, Kind};
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// One batch on disk.
pub(super) struct Segment {
    pub head: SegmentHead,
    path: PathBuf,
    cipher: Cipher,
    file: Option<Box<dyn DiskFile>>,
    dirty: bool,
}

impl Segment {
    /// Reads and checks the head and the length of the file.
    pub fn open(disk: &dyn Disk, path: &Path, key: &StoreKey, store: &[u8; 16]) -> Result<Segment> {
        let file = disk.open(path).map_err(failed("opening a segment"))?;
        let mut bytes = vec![0; SEGMENT_HEAD];
        file.read_at(0, &mut bytes).map_err(failed("reading the head of a segment"))?;
        let head = SegmentHead::decode(&bytes, key, store)?;
        let length = file.length().map_err(failed("measuring a segment"))?;
        if length != SEGMENT_HEAD as u64 + head.blocks() * head.sealed_bytes() as u64 {
            return Err(damaged("a segment has another length than its head says"));
        }
        Ok(Segment { cipher: key.cipher(&bytes), head, path: path.to_owned(), file: None, dirty: false })
    }

    fn file(&mut self, disk: &dyn Disk) -> Result<&mut Box<dyn DiskFile>> {
        if self.file.is_none() {
            self.file = Some(disk.open(&self.path).map_err(failed("opening a segment"))?);
        }
        Ok(self.file.as_mut().expect("it was opened above"))
    }

    fn offset(&self, block: u64) -> u64 {
        SEGMENT_HEAD as u64 + block * self.head.sealed_bytes() as u64
    }

    fn block_of(&self, index: u64) -> u64 {
        (index - self.head.first) / self.head.lane.block_items()
    }

    fn read(&mut self, disk: &dyn Disk, index: u64) -> Result<Zeroizing<Vec<u8>>> {
        let block = self.block_of(index);
        let offset = self.offset(block);
        let mut sealed = Zeroizing::new(vec![0; self.head.sealed_bytes()]);
        self.file(disk)?.read_at(offset, &mut sealed).map_err(failed("reading a block"))?;
        self.cipher.open(block, sealed)
    }

    /// Overwrites the blocks of `from..to`, which must lie on block borders.
    fn wipe(&mut self, disk: &dyn Disk, from: u64, to: u64) -> Result<()> {
        let zeros = vec![0; self.head.sealed_bytes()];
        for block in self.block_of(from)..self.block_of(to) {
            let offset = self.offset(block);
            self.dirty = true;
            self.file(disk)?.write_at(offset, &zeros).map_err(failed("wiping a block"))?;
        }
        Ok(())
    }
}

/// A batch that both parties are about to make, named by both.
pub struct Offer {
    lane: Lane,
    count: u64,
    digest: [u8; 32],
    tag: [u8; 32],
}

/// A batch being written. Dropped without [`Store::keep`] it counts for nothing.
pub struct Batch {
    offer: Offer,
    head: SegmentHead,
    cipher: Cipher,
    file: Box<dyn DiskFile>,
    temporary: PathBuf,
    written: u64,
}

impl Store {
    /// Both parties name the next batch of a lane: `count` items, a multiple of the block. One round.
    pub fn offer(&mut self, channel: &mut Channel, lane: Lane, count: u64, digest: [u8; 32]) -> Result<Offer> {
        self.in_session()?;
        if count == 0 || !count.is_multiple_of(lane.block_items()) {
            return Err(Error::BadArgument(format!("a batch holds a multiple of {} items", lane.block_items())));
        }
        if !self.state.lanes.contains_key(&lane) && self.state.lanes.len() == MAX_LANES {
            return Err(Error::BadArgument("the store has its 64 lanes already".into()));
        }
        self.disk.reached("fill.begin");
        let mut nonce = [0; 16];
        self.rng.fill(&mut nonce);
        let first = self.filled(lane);
        let name = [&lane.encode()[..], &first.to_le_bytes(), &count.to_le_bytes(), &digest].concat();
        let name = hash("batch", &[&self.state.session, &name]);
        let body = [&nonce[..], &name].concat();
        self.agreed = false;
        let theirs = channel.exchange(Kind::StoreMarks, &body, body.len())?;
        if theirs[16..] != name {
            channel.refuse("another batch");
            return Err(Error::Disagreement { field: "store", reason: "the parties make different batches".into() });
        }
        self.disk.reached("fill.offered");
        self.settle()?;
        self.agreed = true;
        let (client, server) =
            if self.role().is_client() { (&nonce[..], &theirs[..16]) } else { (&theirs[..16], &nonce[..]) };
        Ok(Offer { lane, count, digest, tag: hash("batch tag", &[&name, client, server]) })
    }

    /// Starts to write a batch whose blocks have `block_bytes` bytes each.
    pub fn write(&mut self, offer: Offer, block_bytes: usize) -> Result<Batch> {
        self.in_session()?;
        if offer.lane.block_bytes(self.role()).is_some_and(|due| due != block_bytes) || block_bytes >= 1 << 31 {
            return Err(Error::BadArgument(format!("a block of {block_bytes} bytes in {}", offer.lane.name())));
        }
        let outcome = self.start(offer, block_bytes);
        self.note(outcome)
    }

    fn start(&mut self, offer: Offer, block_bytes: usize) -> Result<Batch> {
        let s = self.state.lanes.get(&offer.lane).cloned().unwrap_or_default();
        let mut salt = [0; 32];
        self.rng.fill(&mut salt);
        let head = SegmentHead {
            lane: offer.lane,
            first: s.filled,
            count: offer.count,
            block_bytes: block_bytes as u32,
            digest: offer.digest,
            chain_before: s.chain,
            chain: short(hash("batch chain", &[&s.chain, &offer.tag])),
            salt,
        };
        let temporary = self.place.directory.join(format!("{}.new", head.file_name()));
        let mut file = match self.disk.create(&temporary) {
            // A batch that failed earlier in this process.
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                self.disk.remove(&temporary).map_err(failed("removing a half-made batch"))?;
                self.disk.create(&temporary)
            }
            other => other,
        }
        .map_err(failed("making a segment"))?;
        let bytes = head.encode(&self.key, &self.id);
        file.write_at(0, &bytes).map_err(failed("writing a segment"))?;
        self.disk.reached("fill.head-written");
        Ok(Batch { offer, cipher: self.key.cipher(&bytes), head, file, temporary, written: 0 })
    }

    /// Writes the next block of a batch.
    pub fn push(&mut self, batch: &mut Batch, block: &[u8]) -> Result<()> {
        self.live()?;
        if block.len() != batch.head.block_bytes as usize || batch.written == batch.head.blocks() {
            return Err(Error::BadArgument("a block that does not belong into this batch".into()));
        }
        let sealed = batch.cipher.seal(batch.written, block)?;
        let offset = SEGMENT_HEAD as u64 + batch.written * sealed.len() as u64;
        let outcome = batch.file.write_at(offset, &sealed).map_err(failed("writing a block"));
        self.note(outcome)?;
        batch.written += 1;
        self.disk.reached("fill.block-written");
        Ok(())
    }

    /// Makes a complete batch durable, hears that the peer did the same, and counts it. One round.
    pub fn keep(&mut self, channel: &mut Channel, batch: Batch) -> Result<()> {
        self.in_session()?;
        if batch.written != batch.head.blocks() {
            return Err(Error::BadArgument("the batch is not complete".into()));
        }
        let outcome = self.name_batch(batch);
        let (offer, segment) = self.note(outcome)?;
        self.agreed = false;
        let theirs = channel.exchange(Kind::StoreMarks, &offer.tag, offer.tag.len())?;
        self.disk.reached("fill.confirmed");
        if theirs != offer.tag {
            return Err(channel.refuse("confirms another batch"));
        }
        let s = self.state.lanes.entry(offer.lane).or_default();
        s.filled += offer.count;
        s.last_count = offer.count;
        s.chain_before = s.chain;
        s.chain = segment.head.chain;
        self.segments.entry(offer.lane).or_default().push_back(segment);
        self.commit(commit_points!("fill"))?;
        self.agreed = true;
        Ok(())
    }

    fn name_batch(&mut self, batch: Batch) -> Result<(Offer, Segment)> {
        let Batch { offer, head, cipher, mut file, temporary, .. } = batch;
        self.disk.reached("fill.written");
        file.sync().map_err(failed("syncing a segment"))?;
        drop(file);
        self.disk.reached("fill.before-rename");
        let path = self.place.directory.join(head.file_name());
        self.disk.rename(&temporary, &path).map_err(failed("naming a segment"))?;
        self.disk.reached("fill.renamed");
        self.disk.sync_directory(&self.place.directory).map_err(failed("syncing the directory"))?;
        self.disk.reached("fill.directory-fsynced");
        Ok((offer, Segment { head, path, cipher, file: None, dirty: false }))
    }

    pub(super) fn read_and_wipe(&mut self, lane: Lane, at: u64) -> Result<Zeroizing<Vec<u8>>> {
        let queue = self.segments.get_mut(&lane).into_iter().flatten();
        let segment = queue
            .into_iter()
            .find(|s| s.head.first <= at && at < s.head.end())
            .ok_or_else(|| damaged("a segment is missing"))?;
        let block = segment.read(&*self.disk, at)?;
        self.disk.reached("use.block-read");
        segment.wipe(&*self.disk, at, at + lane.block_items())?;
        self.disk.reached("wipe.written");
        Ok(block)
    }

    /// Burns what is reserved and unread.
    pub(super) fn forget_reserved(&mut self) -> Result<()> {
        let ranges: Vec<_> = self.state.lanes.iter().map(|(&lane, s)| (lane, self.read_at(lane), s.used)).collect();
        self.wipe_ranges(ranges)
    }

    /// After opening: overwrites everything used that was not yet overwritten for certain.
    pub(super) fn wipe_used(&mut self) -> Result<()> {
        let ranges: Vec<_> = self.state.lanes.iter().map(|(&lane, s)| (lane, s.wiped, s.used)).collect();
        self.wipe_ranges(ranges)
    }

    fn wipe_ranges(&mut self, ranges: Vec<(Lane, u64, u64)>) -> Result<()> {
        for (lane, from, to) in ranges {
            for segment in self.segments.get_mut(&lane).into_iter().flatten() {
                let (from, to) = (from.max(segment.head.first), to.min(segment.head.end()));
                if from < to {
                    self.disk.reached("wipe.begin");
                    let outcome = segment.wipe(&*self.disk, from, to);
                    self.dead |= outcome.is_err();
                    outcome?;
                }
            }
            self.read.insert(lane, to.max(self.read_at(lane)));
        }
        Ok(())
    }

    /// Makes the overwriting durable, file by file, and closes what was read to its end.
    pub(super) fn sync_wiped(&mut self) -> Result<()> {
        let outcome = self.try_sync_wiped();
        self.note(outcome)
    }

    fn try_sync_wiped(&mut self) -> Result<()> {
        for segment in self.segments.values_mut().flatten() {
            if let Some(file) = segment.file.as_mut()
                && std::mem::take(&mut segment.dirty)
            {
                self.disk.reached("wipe.before-fsync");
                file.sync().map_err(failed("syncing a wiped segment"))?;
                self.disk.reached("wipe.fsynced");
            }
            segment.file = None;
        }
        for (lane, s) in &mut self.state.lanes {
            s.wiped = self.read.get(lane).copied().unwrap_or(0).min(s.filled);
        }
        Ok(())
    }

    /// Removes segments that are wiped to their end, and those of a batch that was dropped.
    pub(super) fn compact(&mut self) -> Result<()> {
        let outcome = self.try_compact();
        self.note(outcome)
    }

    fn try_compact(&mut self) -> Result<()> {
        let mut gone = Vec::new();
        for (lane, queue) in &mut self.segments {
            let s = self.state.lanes.get(lane).cloned().unwrap_or_default();
            while queue.front().is_some_and(|f| f.head.end() <= s.wiped) {
                gone.extend(queue.pop_front());
            }
            while queue.back().is_some_and(|b| b.head.end() > s.filled) {
                gone.extend(queue.pop_back());
            }
        }
        if gone.is_empty() {
            return Ok(());
        }
        self.disk.reached("compact.begin");
        for segment in gone {
            self.disk.remove(&segment.path).map_err(failed("removing a used segment"))?;
            self.disk.reached("compact.removed");
        }
        self.disk.sync_directory(&self.place.directory).map_err(failed("syncing the directory"))?;
        self.disk.reached("compact.fsynced");
        Ok(())
    }
}
