//! The one place where the store touches a file system, so that tests can lose writes, tear sectors and fail calls.
//!
//! Durability is explicit: a write counts after [`DiskFile::sync`] of its file, a new or renamed name after
//! [`Disk::sync_directory`]. A sync that failed is never tried again: the kernel may have dropped the dirty pages, and
//! the second call would then report success for bytes that are lost.

use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// A file system, as far as the store needs one.
pub trait Disk: Send + Sync {
    /// Makes a directory that only its owner can enter (0700). Nothing happens if it exists.
    fn make_directory(&self, path: &Path) -> io::Result<()>;
    /// The names in a directory.
    fn list(&self, directory: &Path) -> io::Result<Vec<String>>;
    /// Makes a new file that only its owner can read (0600); refuses one that exists.
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Opens a file for reading and writing.
    fn open(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Renames a file over another in one step.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Makes names created, renamed and removed in a directory durable.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;
    /// The permission bits of a file or directory.
    fn mode(&self, path: &Path) -> io::Result<u32>;
    /// The user who owns a file or directory. A disk without users has one for all.
    fn owner(&self, _path: &Path) -> io::Result<u32> {
        Ok(0)
    }
    /// Called as the store passes a named point of its work. Tests crash here; a real disk does nothing.
    fn reached(&self, _point: &'static str) {}
}

/// An open file.
pub trait DiskFile: Send {
    /// Bytes in the file.
    fn length(&self) -> io::Result<u64>;
    /// Fills a buffer from a place; a file that ends early is an error.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;
    /// Writes all bytes at a place.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Makes everything written durable.
    fn sync(&mut self) -> io::Result<()>;
    /// Takes the exclusive lock that ends with this handle or its process; false if another holds it.
    fn try_lock(&mut self) -> io::Result<bool>;
}

/// The operating system's file system.
pub struct RealDisk;

impl Disk for RealDisk {
    fn make_directory(&self, path: &Path) -> io::Result<()> {
        match fs::DirBuilder::new().mode(0o700).create(path) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
            other => other,
        }
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<String>> {
        fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        // The creation mode is subject to the umask, which can only narrow it; a file system may widen it.
        file.set_permissions(Permissions::from_mode(0o600))?;
        Ok(Box::new(RealFile(file)))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(RealFile(OpenOptions::new().read(true).write(true).open(path)?)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn mode(&self, path: &Path) -> io::Result<u32> {
        Ok(fs::symlink_metadata(path)?.permissions().mode())
    }

    fn owner(&self, path: &Path) -> io::Result<u32> {
        Ok(fs::symlink_metadata(path)?.uid())
    }
}

struct RealFile(File);

impl DiskFile for RealFile {
    fn length(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(into, offset)
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.0.sync_all()
    }

    fn try_lock(&mut self) -> io::Result<bool> {
        match self.0.try_lock() {
            Ok(()) => Ok(true),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(e)) => Err(e),
        }
    }
}
