//! A disk in memory that loses what was not synced, tears sectors, fails calls and dies at a chosen moment.

use cloister_core::ot::store::{Disk, DiskFile};
use std::collections::{BTreeMap, HashSet};
use std::io::{self, Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const SECTOR: usize = 512;

/// What happens to writes that were not synced when the machine goes down.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Loss {
    /// SIGKILL: the kernel still has everything.
    Nothing,
    /// Power loss: everything unsynced is gone.
    Unsynced,
    /// Power loss in the middle of writing: any subset of 512-byte sectors and any prefix of the name changes survive.
    Torn(u64),
}

pub const LOSSES: [Loss; 3] = [Loss::Nothing, Loss::Unsynced, Loss::Torn(7)];

/// What the disk does wrong.
#[derive(Clone, Copy, Default, PartialEq)]
pub enum Fault {
    #[default]
    None,
    /// Dies instead of doing the n-th call.
    DieAt(u64),
    /// Dies at the n-th passage of a named point.
    DieAtPoint(&'static str, u64),
    /// Fails the n-th call, once.
    FailAt(u64, ErrorKind),
    /// Refuses everything that changes the disk.
    ReadOnly,
}

/// What a dying process throws.
pub struct Died;

#[derive(Clone, Default)]
struct Node {
    now: Vec<u8>,
    durable: Vec<u8>,
    mode: u32,
}

#[derive(Clone)]
enum NameChange {
    Set(PathBuf, u64),
    Gone(PathBuf),
    Renamed(PathBuf, PathBuf, u64),
}

#[derive(Clone, Default)]
struct State {
    nodes: BTreeMap<u64, Node>,
    names: BTreeMap<PathBuf, u64>,
    durable_names: BTreeMap<PathBuf, u64>,
    pending: Vec<NameChange>,
    directories: BTreeMap<PathBuf, u32>,
    locked: HashSet<u64>,
    boots: u64,
    calls: u64,
    fault: Fault,
    dead: bool,
    points: BTreeMap<&'static str, u64>,
}

/// The disk; clones share it.
#[derive(Clone, Default)]
pub struct MemoryDisk(Arc<Mutex<State>>);

impl MemoryDisk {
    /// An independent copy with everything on it, as a backup or a stolen machine would be.
    pub fn copy(&self) -> Self {
        let mut state = self.0.lock().unwrap().clone();
        state.locked.clear();
        state.boots += 1;
        Self(Arc::new(Mutex::new(state)))
    }

    /// Puts one directory back to what it is on another disk.
    pub fn restore(&self, from: &MemoryDisk, directory: &Path) {
        let from = from.0.lock().unwrap().clone();
        let mut s = self.0.lock().unwrap();
        s.names.retain(|path, _| path.parent() != Some(directory));
        for (path, id) in from.names.iter().filter(|(path, _)| path.parent() == Some(directory)) {
            let fresh = s.nodes.len() as u64 + 1_000_000;
            s.nodes.insert(fresh, from.nodes[id].clone());
            s.names.insert(path.clone(), fresh);
        }
        s.durable_names = s.names.clone();
        s.pending.clear();
    }

    /// Counts calls and points anew and plans a fault.
    pub fn plan(&self, fault: Fault) {
        let mut s = self.0.lock().unwrap();
        s.calls = 0;
        s.points.clear();
        s.fault = fault;
    }

    pub fn calls(&self) -> u64 {
        self.0.lock().unwrap().calls
    }

    pub fn died(&self) -> bool {
        self.0.lock().unwrap().dead
    }

    pub fn points(&self) -> BTreeMap<&'static str, u64> {
        self.0.lock().unwrap().points.clone()
    }

    pub fn files(&self) -> Vec<(PathBuf, usize)> {
        let s = self.0.lock().unwrap();
        s.names.iter().map(|(path, id)| (path.clone(), s.nodes[id].now.len())).collect()
    }

    pub fn bytes(&self, path: &Path) -> Vec<u8> {
        let s = self.0.lock().unwrap();
        s.nodes[&s.names[path]].now.clone()
    }

    pub fn edit(&self, path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
        let mut s = self.0.lock().unwrap();
        let id = s.names[path];
        let node = s.nodes.get_mut(&id).unwrap();
        change(&mut node.now);
        node.durable = node.now.clone();
    }

    pub fn set_mode(&self, path: &Path, mode: u32) {
        let mut s = self.0.lock().unwrap();
        match s.names.get(path).copied() {
            Some(id) => s.nodes.get_mut(&id).unwrap().mode = mode,
            None => _ = s.directories.insert(path.to_owned(), mode),
        }
    }

    /// Boots again after a death (or after an orderly end, when nothing is lost).
    pub fn boot(&self, loss: Loss) {
        let mut s = self.0.lock().unwrap();
        let s = &mut *s;
        let mut random = match loss {
            Loss::Torn(seed) => seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            _ => 1,
        };
        let mut draw = |n: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 11) % n
        };
        if loss != Loss::Nothing {
            let keep = if loss == Loss::Unsynced { 0 } else { draw(s.pending.len() as u64 + 1) as usize };
            s.names = s.durable_names.clone();
            for change in s.pending.drain(..).take(keep) {
                apply(&mut s.names, &change);
            }
            for node in s.nodes.values_mut() {
                let mut after = node.durable.clone();
                if loss != Loss::Unsynced && node.now != node.durable {
                    if draw(2) == 1 {
                        after.resize(node.now.len(), 0);
                    }
                    for at in (0..after.len().min(node.now.len())).step_by(SECTOR) {
                        let end = (at + SECTOR).min(after.len()).min(node.now.len());
                        if draw(2) == 1 {
                            after[at..end].copy_from_slice(&node.now[at..end]);
                        }
                    }
                }
                node.now = after;
            }
        }
        for node in s.nodes.values_mut() {
            node.durable = node.now.clone();
        }
        s.durable_names = s.names.clone();
        s.pending.clear();
        s.locked.clear();
        (s.dead, s.fault) = (false, Fault::None);
        s.boots += 1;
    }

    fn call<T>(&self, changes: bool, work: impl FnOnce(&mut State) -> io::Result<T>) -> io::Result<T> {
        let mut s = self.0.lock().unwrap();
        if s.dead {
            return Err(Error::other("the machine is down"));
        }
        s.calls += 1;
        match s.fault {
            Fault::DieAt(n) if n == s.calls => {
                s.dead = true;
                drop(s);
                std::panic::resume_unwind(Box::new(Died));
            }
            Fault::FailAt(n, kind) if n == s.calls => Err(kind.into()),
            Fault::ReadOnly if changes => Err(ErrorKind::ReadOnlyFilesystem.into()),
            _ => work(&mut s),
        }
    }

    fn change(&self, change: impl FnOnce(&mut State) -> io::Result<NameChange>) -> io::Result<()> {
        self.call(true, |s| {
            let change = change(s)?;
            apply(&mut s.names, &change);
            s.pending.push(change);
            Ok(())
        })
    }
}

fn apply(names: &mut BTreeMap<PathBuf, u64>, change: &NameChange) {
    match change {
        NameChange::Set(path, id) => _ = names.insert(path.clone(), *id),
        NameChange::Gone(path) => _ = names.remove(path),
        NameChange::Renamed(from, to, id) => {
            names.remove(from);
            names.insert(to.clone(), *id);
        }
    }
}

fn find(s: &State, path: &Path) -> io::Result<u64> {
    s.names.get(path).copied().ok_or_else(|| ErrorKind::NotFound.into())
}

impl Disk for MemoryDisk {
    fn make_directory(&self, path: &Path) -> io::Result<()> {
        self.call(true, |s| {
            s.directories.entry(path.to_owned()).or_insert(0o700);
            Ok(())
        })
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<String>> {
        self.call(false, |s| {
            let inside = s.names.keys().filter(|path| path.parent() == Some(directory));
            Ok(inside.map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect())
        })
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let mut made = 0;
        self.change(|s| {
            if s.names.contains_key(path) {
                return Err(ErrorKind::AlreadyExists.into());
            }
            made = s.nodes.len() as u64 + 1;
            s.nodes.insert(made, Node { mode: 0o600, ..Node::default() });
            Ok(NameChange::Set(path.to_owned(), made))
        })?;
        let boots = self.0.lock().unwrap().boots;
        Ok(Box::new(MemoryFile { disk: self.clone(), id: made, boots, locked: false }))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let (id, boots) = self.call(false, |s| Ok((find(s, path)?, s.boots)))?;
        Ok(Box::new(MemoryFile { disk: self.clone(), id, boots, locked: false }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.change(|s| Ok(NameChange::Renamed(from.to_owned(), to.to_owned(), find(s, from)?)))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.change(|s| find(s, path).map(|_| NameChange::Gone(path.to_owned())))
    }

    fn sync_directory(&self, directory: &Path) -> io::Result<()> {
        self.call(true, |s| {
            let (done, rest) = std::mem::take(&mut s.pending).into_iter().partition(|change| match change {
                NameChange::Set(path, _) | NameChange::Gone(path) | NameChange::Renamed(_, path, _) => {
                    path.parent() == Some(directory)
                }
            });
            s.pending = rest;
            let done: Vec<NameChange> = done;
            done.iter().for_each(|change| apply(&mut s.durable_names, change));
            Ok(())
        })
    }

    fn mode(&self, path: &Path) -> io::Result<u32> {
        self.call(false, |s| match s.names.get(path) {
            Some(id) => Ok(s.nodes[id].mode),
            None => s.directories.get(path).copied().ok_or_else(|| ErrorKind::NotFound.into()),
        })
    }

    fn reached(&self, point: &'static str) {
        let mut s = self.0.lock().unwrap();
        let passed = s.points.entry(point).or_default();
        *passed += 1;
        let passed = *passed;
        if s.fault == Fault::DieAtPoint(point, passed) && !s.dead {
            s.dead = true;
            drop(s);
            std::panic::resume_unwind(Box::new(Died));
        }
    }
}

struct MemoryFile {
    disk: MemoryDisk,
    id: u64,
    boots: u64,
    locked: bool,
}

impl MemoryFile {
    fn call<T>(&self, changes: bool, work: impl FnOnce(&mut State, u64) -> io::Result<T>) -> io::Result<T> {
        self.disk.call(changes, |s| {
            assert_eq!(s.boots, self.boots, "a handle outlived its machine");
            work(s, self.id)
        })
    }
}

impl DiskFile for MemoryFile {
    fn length(&self) -> io::Result<u64> {
        self.call(false, |s, id| Ok(s.nodes[&id].now.len() as u64))
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.call(false, |s, id| {
            let at = offset as usize;
            let bytes = s.nodes[&id].now.get(at..at + into.len()).ok_or(ErrorKind::UnexpectedEof)?;
            into.copy_from_slice(bytes);
            Ok(())
        })
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.call(true, |s, id| {
            let now = &mut s.nodes.get_mut(&id).unwrap().now;
            let end = offset as usize + bytes.len();
            if now.len() < end {
                now.resize(end, 0);
            }
            now[offset as usize..end].copy_from_slice(bytes);
            Ok(())
        })
    }

    fn sync(&mut self) -> io::Result<()> {
        self.call(true, |s, id| {
            let node = s.nodes.get_mut(&id).unwrap();
            node.durable = node.now.clone();
            Ok(())
        })
    }

    fn try_lock(&mut self) -> io::Result<bool> {
        self.locked = self.call(false, |s, id| Ok(s.locked.insert(id)))?;
        Ok(self.locked)
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        let mut s = self.disk.0.lock().unwrap();
        if self.locked && s.boots == self.boots {
            s.locked.remove(&self.id);
        }
    }
}
