//! Compiled drivers on disk. They run as native code in this process: the directory belongs to the daemon alone, and each file's seal
//! is verified before it is mapped. The seal needs a key from outside the directory, so that access to the directory alone makes no code.
//!
//! Several processes may share a directory: each opens the cache and writes a file with the directory locked.
//!
//! Nothing is synced: the seal finds what a crash left half written, and the driver is compiled again.

mod key_file;

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{FlockOperation, Mode, OFlags};
use wasmtime::Engine;
use wasmtime::component::Component;

use crate::HostError;
use crate::engine;
use crate::load::artifact::{Artifact, ArtifactError, Key, Report, SealKey, settings};
use nodedock_base::error::chain;
use nodedock_model::limit::DRIVER_FILES_MAX;

/// Compiled drivers: those of a full directory of drivers and of their previous versions. Fifty of Python fit.
const FILES_MAX: usize = 2 * DRIVER_FILES_MAX;
const BYTES_MAX: u64 = 2 << 30;

const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
/// Permission to write for others than the owner.
const OTHERS_WRITE: u32 = 0o022;
/// Hex digits of the source's digest, with which all our names begin.
const NAME_DIGITS: usize = 64;
/// Endings of our files.
const ENDINGS: &[&str] = &[".cwasm", ".cwasm.new"];

/// Paths of compiled drivers.
#[derive(Debug, Clone)]
pub struct CachePaths {
    pub directory: PathBuf,
    /// The key that seals the files of the directory: 32 bytes, mode 0600. It is made if there is none.
    pub key: PathBuf,
}

impl CachePaths {
    /// A cache with its key, in a directory that only the caller's user can enter.
    pub fn inside(directory: &Path) -> Self {
        Self {
            directory: directory.join("cache"),
            key: directory.join("cache.key"),
        }
    }

    /// Opens the cache as a host does at its start, to find out whether that is possible.
    pub fn open(&self) -> Result<(), HostError> {
        let engine = engine::for_compiling(false)
            .map_err(|error| HostError::Engine(format!("{error:#}")))?;
        let opened = Cache::open(self, &engine);
        opened.map(drop).map_err(|source| HostError::Cache {
            path: self.directory.clone(),
            source,
        })
    }
}

#[derive(Clone)]
pub(crate) struct Cache {
    path: PathBuf,
    seal_key: SealKey,
    /// End of the names of files that this daemon can use.
    suffix: String,
}

impl Cache {
    /// Creates the directory, or checks that only this user can write to it. Removes files that no daemon of this version can use, and
    /// all files if the key is missing or unusable.
    pub(crate) fn open(paths: &CachePaths, engine: &Engine) -> io::Result<Self> {
        let suffix = format!("-{:016x}.cwasm", settings(engine));
        let directory = Directory::open(&paths.directory)?;
        directory.lock()?;
        let found = key_file::read(&paths.key).unwrap_or_else(|error| {
            let (path, error) = (paths.key.display(), chain(&error));
            tracing::error!(%path, error, "the key of the cache of compiled drivers is unusable: it is replaced, and the cache is emptied");
            None
        });
        let is_new = found.is_none();
        let seal_key = found.map_or_else(|| key_file::renew(&paths.key), Ok)?;
        let cache = Self {
            path: paths.directory.clone(),
            seal_key,
            suffix,
        };
        directory.remove_all(|name| is_new || !name.ends_with(&cache.suffix))?;
        directory.trim(FILES_MAX, BYTES_MAX);
        Ok(cache)
    }

    /// Maps a compiled driver, if there is one that is whole. A damaged one is removed.
    pub(crate) fn take(&self, key: &Key, engine: &Engine) -> Option<(Component, Report)> {
        // The path leads through the open directory, which has to stay open until the file is.
        let (directory, name) = (self.directory_or_warn()?, self.name(key));
        let taken = open(&directory.path(&name), key, &self.seal_key).and_then(|artifact| {
            let Some(artifact) = artifact else {
                return Ok(None);
            };
            let mapped = artifact
                .map(engine)
                .map_err(|error| ArtifactError::Engine(format!("{error:#}")));
            mapped.map(|component| Some((component, artifact.report)))
        });
        taken.unwrap_or_else(|error| {
            let (path, error) = (self.path.display(), chain(&error));
            tracing::warn!(directory = %path, name, error, "compiled driver is damaged and compiled again");
            directory.remove(&name);
            None
        })
    }

    /// Stores a compiled driver and returns it in its stored file; if it cannot be stored, as it was.
    pub(crate) fn put(&self, key: &Key, artifact: Artifact) -> Artifact {
        let Some(directory) = self.directory_or_warn() else {
            return artifact;
        };
        let written = directory.lock().and_then(|()| {
            directory.write(&self.name(key), |file| {
                artifact.seal_to(file, key, &self.seal_key)
            })
        });
        match written {
            Ok(file) => {
                directory.trim(FILES_MAX, BYTES_MAX);
                artifact.in_file(file)
            }
            Err(error) => {
                let directory = self.path.display();
                tracing::warn!(%directory, %error, "compiled driver cannot be stored, and will be compiled again");
                artifact
            }
        }
    }

    fn directory_or_warn(&self) -> Option<Directory> {
        let (path, opened) = (self.path.display(), Directory::open(&self.path));
        opened
            .inspect_err(
                |error| tracing::warn!(directory = %path, %error, "no cache of compiled drivers"),
            )
            .ok()
    }

    /// Named by the source, the engine's settings and our version.
    fn name(&self, key: &Key) -> String {
        format!("{}{}", hex::encode(key.source), self.suffix)
    }
}

/// None: there is no such file.
fn open(path: &Path, key: &Key, seal_key: &SealKey) -> Result<Option<Artifact>, ArtifactError> {
    // Neither follows a link nor waits for a pipe.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = match File::options().read(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let found = file.metadata()?;
    let is_ours = found.is_file() && found.uid() == rustix::process::geteuid().as_raw();
    if !is_ours || found.mode() & OTHERS_WRITE != 0 || found.nlink() != 1 {
        return Err(ArtifactError::NotPrivate);
    }
    // The least recently used file is removed first. A disk that takes no writes keeps the time that it has.
    let _ = file.set_modified(SystemTime::now());
    let artifact = Artifact::verify(file, key, seal_key)?;
    if artifact.report.refusal.is_some() {
        Err(ArtifactError::NoCode)
    } else {
        Ok(Some(artifact))
    }
}

/// The open directory, so that nothing else that is put at its path is written to.
struct Directory(OwnedFd);

impl Directory {
    /// Opens the directory, which may have been removed meanwhile. One that others can read is closed to them; if they could write to
    /// it, its files are removed.
    fn open(path: &Path) -> io::Result<Self> {
        DirBuilder::new()
            .mode(DIRECTORY_MODE)
            .recursive(true)
            .create(path)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = Self(rustix::fs::open(path, flags, Mode::empty())?);
        let (found, us) = (
            fs::metadata(directory.path("."))?,
            rustix::process::geteuid().as_raw(),
        );
        if found.uid() != us {
            let why = format!(
                "it belongs to user {}, not to this daemon's ({us}): remove it, or chown it",
                found.uid()
            );
            return Err(io::Error::other(why));
        }
        let mode = found.mode() & 0o7777;
        if mode != DIRECTORY_MODE {
            fs::set_permissions(directory.path("."), Permissions::from_mode(DIRECTORY_MODE))?;
        }
        if mode & OTHERS_WRITE != 0 {
            let (path, mode) = (path.display(), format!("{mode:o}"));
            tracing::warn!(directory = %path, mode, "others could write to the cache of compiled drivers: it is closed and emptied");
            directory.remove_all(|_| true)?;
        }
        Ok(directory)
    }

    /// Keeps other processes from opening the cache and from writing to it, until the directory is closed.
    fn lock(&self) -> io::Result<()> {
        Ok(rustix::fs::flock(&self.0, FlockOperation::LockExclusive)?)
    }

    fn path(&self, name: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{name}", self.0.as_raw_fd()).into()
    }

    /// Writes to a temporary name, then renames: whole or not at all.
    fn write(
        &self,
        name: &str,
        write_to: impl FnOnce(&File) -> io::Result<()>,
    ) -> io::Result<File> {
        let temporary = self.path(&format!("{name}.new"));
        let _ = fs::remove_file(&temporary);
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(FILE_MODE)
            .open(&temporary)?;
        let written = write_to(&file).and_then(|()| fs::rename(&temporary, self.path(name)));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written.map(|()| file)
    }

    /// Names that a daemon gave.
    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.path("."))? {
            names.extend(
                entry?
                    .file_name()
                    .into_string()
                    .ok()
                    .filter(|name| is_ours(name)),
            );
        }
        Ok(names)
    }

    fn remove_all(&self, which: impl Fn(&str) -> bool) -> io::Result<()> {
        self.names()?
            .iter()
            .filter(|name| which(name))
            .for_each(|name| self.remove(name));
        Ok(())
    }

    /// Removes the least recently used files until the rest is within the bounds. Code that is mapped stays mapped.
    fn trim(&self, files_max: usize, bytes_max: u64) {
        let names = match self.names() {
            Ok(names) => names,
            Err(error) => {
                tracing::warn!(%error, "the cache of compiled drivers cannot be listed, and stays as large as it is");
                return;
            }
        };
        let entries = names.into_iter().filter_map(|name| {
            // no error: it was removed just now, or stays until it can be looked at
            let found = fs::symlink_metadata(self.path(&name)).ok()?;
            Some((found.modified().ok()?, found.len(), name))
        });
        let mut entries: Vec<_> = entries.collect();
        entries.sort();
        let (mut files, mut bytes) = (
            entries.len(),
            entries.iter().map(|(_, bytes, _)| bytes).sum::<u64>(),
        );
        for (_, size, name) in entries {
            if files <= files_max && bytes <= bytes_max {
                return;
            }
            self.remove(&name);
            files -= 1;
            bytes -= size;
        }
    }

    fn remove(&self, name: &str) {
        let path = self.path(name);
        let removed =
            fs::remove_file(&path).or_else(|error| fs::remove_dir(&path).map_err(|_| error));
        if let Err(error) = removed
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(name, %error, "file stays in the cache of compiled drivers");
        }
    }
}

fn is_ours(name: &str) -> bool {
    let digest = name
        .get(..NAME_DIGITS)
        .is_some_and(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
    digest && ENDINGS.iter().any(|ending| name.ends_with(ending))
}

#[cfg(test)]
mod tests;
