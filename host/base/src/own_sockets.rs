//! The listening sockets of this process: a plugin that names one of them as its own would make the daemon call itself.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use tokio::net::UnixStream;

/// Paths at which this process listens or did.
static PATHS: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Remembers a path at which this process listens.
pub(crate) fn add(path: &Path) {
    let mut paths = PATHS.lock();
    paths.retain(|known| !matches!(crate::file::symlink_metadata(known), Ok(None)));
    paths.insert(path.to_owned());
}

/// Returns whether a socket, found by any path, link or mount, is one of this process: by device and inode.
pub fn contains(device: u64, inode: u64) -> bool {
    PATHS.lock().iter().any(|path| {
        // no error: what cannot be looked at there is not this socket, which was just found
        path.symlink_metadata()
            .is_ok_and(|found| found.dev() == device && found.ino() == inode)
    })
}

/// A socket of another process that was found at a path, regardless of later changes at the path.
#[derive(Debug)]
pub(crate) struct OtherSocket(OwnedFd);

#[derive(Debug, thiserror::Error)]
pub(crate) enum FindError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it is a socket of this daemon")]
    Own,
}

impl OtherSocket {
    pub(crate) fn find(path: &Path) -> Result<Self, FindError> {
        let file = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let file = file.map_err(io::Error::from)?;
        let found = rustix::fs::fstat(&file).map_err(io::Error::from)?;
        if contains(found.st_dev, found.st_ino) {
            Err(FindError::Own)
        } else {
            Ok(Self(file))
        }
    }

    pub(crate) async fn connect(&self) -> io::Result<UnixStream> {
        UnixStream::connect(format!("/proc/self/fd/{}", self.0.as_raw_fd())).await
    }
}
