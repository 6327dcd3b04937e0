//! Compiled drivers on disk. What is in this folder is run as native code in this process: it is ours alone, each file is held
//! against its own seal before it is mapped, and only the daemon writes here.
//!
//! Nothing is synced: what a crash leaves half written is found by its seal and made anew.

mod upkeep;

use std::collections::HashMap;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::SystemTime;

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use wasmtime::Engine;

use super::artifact::{Artifact, Flaw, Key, settings};
use nodedock_base::error::chain;

/// What only its owner enters, and files that only he reads.
const FOLDER_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
/// Rights to write for others than the owner.
const OTHERS_WRITE: u32 = 0o022;

#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    #[error("create the cache {path}")]
    Create { path: PathBuf, source: io::Error },
    #[error("look at the cache {path}")]
    Look { path: PathBuf, source: io::Error },
    #[error(
        "the cache {path} belongs to user {owner}, and only this daemon's user ({us}) may write what it runs: remove it, or chown it"
    )]
    Foreign { path: PathBuf, owner: u32, us: u32 },
    #[error("the cache {path} is open to others, and cannot be closed: chmod 0700")]
    Close { path: PathBuf, source: io::Error },
    #[error("the cache {0} is not a folder")]
    NotAFolder(PathBuf),
}

/// Keeps a file in the cache while the driver is loaded.
pub(super) type Kept = Arc<()>;

pub(super) struct Cache {
    path: PathBuf,
    /// End of the names of files that this daemon can use.
    suffix: String,
    in_use: Mutex<HashMap<String, Weak<()>>>,
}

impl Cache {
    /// Creates the folder, or checks that nobody else can write to it. Removes what no daemon of this version can use.
    pub(super) fn open(path: &Path, engine: &Engine) -> Result<Self, CacheError> {
        let suffix = format!("-{}.cwasm", &hex::encode(settings(engine))[..16]);
        let cache = Self { path: path.to_owned(), suffix, in_use: Mutex::default() };
        let folder = cache.folder()?;
        cache.sweep(&folder);
        cache.trim(&folder);
        Ok(cache)
    }

    /// A compiled driver, if there is one that is whole. A damaged one is removed.
    pub(super) fn take(&self, key: &Key) -> Option<(Artifact, Kept)> {
        let folder = self.folder_or_warn()?;
        let name = self.name(key);
        match open_whole(&folder, &name, key) {
            Ok(found) => found.map(|artifact| (artifact, self.keep(name))),
            Err(flaw) => {
                self.discard(key, &flaw);
                None
            }
        }
    }

    /// Puts a compiled driver where it is found again, and gives it back as it lies there; if that cannot be, as it was.
    pub(super) fn put(&self, key: &Key, artifact: Artifact) -> (Artifact, Option<Kept>) {
        let Some(folder) = self.folder_or_warn() else { return (artifact, None) };
        let name = self.name(key);
        match write(&folder, &name, &artifact) {
            Ok(file) => {
                let kept = self.keep(name);
                self.trim(&folder);
                (artifact.in_file(file), Some(kept))
            }
            Err(error) => {
                let folder = self.path.display();
                tracing::warn!(%folder, name, %error, "compiled driver cannot be kept, and will be compiled again");
                (artifact, None)
            }
        }
    }

    /// Removes what turned out to be of no use.
    pub(super) fn discard(&self, key: &Key, flaw: &Flaw) {
        let (folder, name, why) = (self.path.display(), self.name(key), chain(flaw));
        tracing::warn!(%folder, name, why, "compiled driver is damaged and made anew");
        if let Some(folder) = self.folder_or_warn() {
            self.remove(&folder, &name);
        }
    }

    /// Opens the folder itself, so that whatever is put at its path meanwhile is not written to. One that is ours and open to
    /// others is closed; if they could write to it, nothing in it is trusted.
    fn folder(&self) -> Result<OwnedFd, CacheError> {
        let path = || self.path.clone();
        let look = |error: Errno| match error {
            Errno::LOOP | Errno::NOTDIR => CacheError::NotAFolder(path()),
            error => CacheError::Look { path: path(), source: error.into() },
        };
        // One that is there is for `open` to judge.
        let created = DirBuilder::new().mode(FOLDER_MODE).recursive(true).create(&self.path);
        if let Err(source) = created
            && source.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(CacheError::Create { path: path(), source });
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::open(&self.path, flags, Mode::empty()).map_err(look)?;
        let found = rustix::fs::fstat(&folder).map_err(look)?;
        let us = rustix::process::geteuid().as_raw();
        if found.st_uid != us {
            return Err(CacheError::Foreign { path: path(), owner: found.st_uid, us });
        }
        if found.st_mode & 0o7777 != FOLDER_MODE {
            self.close(&folder, found.st_mode & 0o7777)?;
        }
        Ok(folder)
    }

    fn close(&self, folder: &OwnedFd, mode: u32) -> Result<(), CacheError> {
        let close = |error: Errno| CacheError::Close { path: self.path.clone(), source: error.into() };
        rustix::fs::fchmod(folder, Mode::from_raw_mode(FOLDER_MODE)).map_err(close)?;
        if mode & OTHERS_WRITE != 0 {
            let (folder_path, mode) = (self.path.display(), format!("{mode:o}"));
            tracing::warn!(folder = %folder_path, mode, "others could write to the cache of compiled drivers: it is closed and emptied");
            self.empty(folder);
        }
        Ok(())
    }

    fn folder_or_warn(&self) -> Option<OwnedFd> {
        let warn = |error: &CacheError| tracing::warn!(error = chain(error), "no cache of compiled drivers");
        self.folder().inspect_err(warn).ok()
    }

    fn keep(&self, name: String) -> Kept {
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        in_use.retain(|_, used| used.strong_count() > 0);
        if let Some(kept) = in_use.get(&name).and_then(Weak::upgrade) {
            return kept;
        }
        let kept = Kept::default();
        in_use.insert(name, Arc::downgrade(&kept));
        kept
    }

    fn is_in_use(&self, name: &str) -> bool {
        let in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        in_use.get(name).is_some_and(|used| used.strong_count() > 0)
    }

    /// Named by the source, the engine's settings and our version: another of any is another file.
    fn name(&self, key: &Key) -> String {
        format!("{}{}", hex::encode(key.source), self.suffix)
    }
}

/// None: there is no such file.
fn open_whole(folder: &OwnedFd, name: &str, key: &Key) -> Result<Option<Artifact>, Flaw> {
    // A pipe must not be waited for, nor a link be followed.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file: File = match rustix::fs::openat(folder, name, flags, Mode::empty()) {
        Ok(file) => file.into(),
        Err(Errno::NOENT) => return Ok(None),
        Err(Errno::LOOP) => return Err(Flaw::NotAFile),
        Err(error) => return Err(Flaw::Read(error.into())),
    };
    let found = file.metadata()?;
    let us = rustix::process::geteuid().as_raw();
    if !found.is_file() {
        return Err(Flaw::NotAFile);
    }
    if found.uid() != us {
        return Err(Flaw::Foreign { owner: found.uid(), us });
    }
    if found.mode() & OTHERS_WRITE != 0 || found.nlink() != 1 {
        return Err(Flaw::Open(found.mode() & 0o7777));
    }
    // Tells which was used last. A disk that takes no writes keeps what it has.
    let _ = file.set_modified(SystemTime::now());
    let artifact = Artifact::check(file, key)?;
    if artifact.report.refusal.is_some() {
        return Err(Flaw::NoCode);
    }
    Ok(Some(artifact))
}

/// Writes beside, then renames: whole or not at all under its name.
fn write(folder: &OwnedFd, name: &str, artifact: &Artifact) -> io::Result<File> {
    let temporary = format!("{name}.new");
    let _ = rustix::fs::unlinkat(folder, &temporary, AtFlags::empty());
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file: File = rustix::fs::openat(folder, &temporary, flags, Mode::from_raw_mode(FILE_MODE))?.into();
    let written =
        artifact.copy_to(&file).and_then(|()| Ok(rustix::fs::renameat(folder, &temporary, folder, name)?));
    if written.is_err() {
        let _ = rustix::fs::unlinkat(folder, &temporary, AtFlags::empty());
    }
    written.map(|()| file)
}

#[cfg(test)]
mod tests;
