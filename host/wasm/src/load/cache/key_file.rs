//! The key that seals the cache's files, in a file that only the daemon's user can read.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use crate::load::artifact::{SEAL_KEY_BYTES, SealKey};
use nodedock_base::file;

/// Permissions of others than the owner.
const OTHERS: u32 = 0o077;

/// Why a key is not used, and a new one is made.
#[derive(Debug, thiserror::Error)]
pub(super) enum KeyError {
    #[error("it cannot be read")]
    Read(#[from] io::Error),
    #[error(
        "it is not a regular file of user {us} under one name (owner {owner}, mode {mode:o}, {links} links)"
    )]
    NotOurs {
        us: u32,
        owner: u32,
        mode: u32,
        links: u64,
    },
    #[error("its mode {0:o} lets other users read or write it")]
    NotPrivate(u32),
    #[error("it has not {SEAL_KEY_BYTES} bytes")]
    Length,
}

/// Reads the key. None: there is no such file.
pub(super) fn read(path: &Path) -> Result<Option<SealKey>, KeyError> {
    // Neither follows a link nor waits for a pipe.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = match File::options().read(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let (found, us) = (file.metadata()?, rustix::process::geteuid().as_raw());
    if !found.is_file() || found.uid() != us || found.nlink() != 1 {
        return Err(KeyError::NotOurs {
            us,
            owner: found.uid(),
            mode: found.mode(),
            links: found.nlink(),
        });
    }
    if found.mode() & OTHERS != 0 {
        return Err(KeyError::NotPrivate(found.mode() & 0o7777));
    }
    let mut bytes = Vec::with_capacity(SEAL_KEY_BYTES);
    file.take(SEAL_KEY_BYTES as u64 + 1)
        .read_to_end(&mut bytes)?;
    SealKey::from_bytes(&bytes)
        .map(Some)
        .ok_or(KeyError::Length)
}

/// Makes a key and writes it, in place of a file that is there.
pub(super) fn renew(path: &Path) -> io::Result<SealKey> {
    let key = SealKey::random()?;
    match file::replace(path, key.as_bytes()) {
        // Files that it seals are compiled again at the next start.
        Err(error) => {
            let path = path.display();
            tracing::warn!(%path, %error, "the key of the cache of compiled drivers cannot be stored");
        }
        Ok(()) => {
            tracing::info!(path = %path.display(), "the cache of compiled drivers has a new key")
        }
    }
    Ok(key)
}
