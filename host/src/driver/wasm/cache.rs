//! Compiled drivers on disk. What is in this folder is run as native code in this process: it is ours alone, and each file is
//! held against its own digest before it is mapped.

use std::fs::{DirBuilder, File};
use std::hash::{Hash, Hasher};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use wasmtime::Engine;
use wasmtime::component::Component;

/// A compiled file is some times as large as its source.
const COMPILED_BYTES_MAX: u64 = 1 << 30;

#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    #[error("create the cache {path}")]
    Create { path: PathBuf, source: io::Error },
    #[error("look at the cache {path}")]
    Look { path: PathBuf, source: io::Error },
    #[error(
        "the cache {path} belongs to user {owner}, and only this daemon's user ({us}) may write what it runs"
    )]
    Foreign { path: PathBuf, owner: u32, us: u32 },
    #[error(
        "the cache {path} has mode {mode:o}, and only its owner may write what the daemon runs: chmod 0700"
    )]
    Open { path: PathBuf, mode: u32 },
    #[error("the cache {0} is not a folder")]
    NotAFolder(PathBuf),
}

pub(super) struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// Creates the folder, or checks that nobody else can write to it.
    pub(super) fn open(folder: &Path) -> Result<Self, CacheError> {
        let path = || folder.to_owned();
        DirBuilder::new()
            .mode(0o700)
            .recursive(true)
            .create(folder)
            .map_err(|source| CacheError::Create { path: path(), source })?;
        let found = folder.symlink_metadata().map_err(|source| CacheError::Look { path: path(), source })?;
        if !found.is_dir() {
            return Err(CacheError::NotAFolder(path()));
        }
        let us = rustix::process::geteuid().as_raw();
        if found.uid() != us {
            return Err(CacheError::Foreign { path: path(), owner: found.uid(), us });
        }
        if found.mode() & 0o022 != 0 {
            return Err(CacheError::Open { path: path(), mode: found.mode() & 0o7777 });
        }
        Ok(Self { folder: path() })
    }

    /// A compiled driver, if there is one that is whole. A damaged one is removed.
    pub(super) fn take(&self, engine: &Engine, digest: &str) -> Option<Component> {
        let path = self.path(engine, digest);
        if !path.exists() {
            return None;
        }
        match load(engine, &path) {
            Ok(component) => Some(component),
            Err(error) => {
                tracing::warn!(path = %path.display(), error, "compiled driver is damaged and made anew");
                self.remove(&path);
                None
            }
        }
    }

    /// Keeps a compiled driver and maps it from there: pages of a file that nobody uses cost no memory.
    pub(super) fn put(&self, engine: &Engine, digest: &str, compiled: &[u8]) -> Result<Component, String> {
        let path = self.path(engine, digest);
        write(&path, compiled).map_err(|error| format!("write {}: {error}", path.display()))?;
        load(engine, &path)
    }

    fn remove(&self, path: &Path) {
        for path in [path.to_owned(), sidecar(path)] {
            if let Err(error) = std::fs::remove_file(&path)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(path = %path.display(), %error, "damaged file stays in the cache");
            }
        }
    }

    /// Named by the source, the engine's settings and our version: another of any is another file.
    fn path(&self, engine: &Engine, digest: &str) -> PathBuf {
        let mut settings = Settings(Sha256::new());
        engine.precompile_compatibility_hash().hash(&mut settings);
        settings.0.update(env!("CARGO_PKG_VERSION"));
        let settings = hex::encode(settings.0.finalize());
        let digest = digest.trim_start_matches("sha256:");
        self.folder.join(format!("{digest}-{}.cwasm", &settings[..16]))
    }
}

/// Makes a digest of what a type hashes: the standard hasher may give other values after an update of the compiler.
struct Settings(Sha256);

impl Hasher for Settings {
    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn finish(&self) -> u64 {
        unreachable!("the digest is taken from the hasher itself")
    }
}

fn sidecar(path: &Path) -> PathBuf {
    path.with_extension("sha256")
}

fn load(engine: &Engine, path: &Path) -> Result<Component, String> {
    let wanted = std::fs::read_to_string(sidecar(path)).map_err(|error| format!("its digest: {error}"))?;
    let mut file = File::open(path).map_err(|error| error.to_string())?;
    let length = file.metadata().map_err(|error| error.to_string())?.len();
    if length > COMPILED_BYTES_MAX {
        return Err(format!("it has {length} bytes"));
    }
    let mut sha = Sha256::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        match file.read(&mut buffer).map_err(|error| error.to_string())? {
            0 => break,
            count => sha.update(&buffer[..count]),
        }
    }
    if hex::encode(sha.finalize()) != wanted.trim() {
        return Err("its digest is another".to_owned());
    }
    // SAFETY: the bytes are those that `put` wrote from this engine's own compiler: the folder is ours, nobody else can write
    // to it (checked when it was opened), files are renamed into place whole and never changed, and the digest agrees.
    // Wasmtime itself refuses a file of another version or other settings.
    let component = unsafe { Component::deserialize_file(engine, path) };
    component.map_err(|error| format!("{error:#}"))
}

fn write(path: &Path, compiled: &[u8]) -> io::Result<()> {
    let digest = hex::encode(Sha256::digest(compiled));
    // The digest goes first: a compiled file without it is not taken.
    replace(&sidecar(path), digest.as_bytes())?;
    replace(path, compiled)
}

/// Whole or not at all, also when the power goes.
pub(super) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(content)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)?;
    match path.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}
