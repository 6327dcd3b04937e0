//! Reads a file that may be anything: once, whole, and only if it is a regular file.
//!
//! Blocking functions, not for async threads. A file is opened once: the bytes that were read are the bytes that are used.

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use nodedock_base::beneath;
use nodedock_core::sysfs::blocking::LOOK_WALL;

/// Why a file is not read.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it is a link that leads out of its directory; links are followed inside it only")]
    LeadsOut,
    #[error("it is not a regular file")]
    NotRegular,
    #[error("it is larger than {0} bytes")]
    TooLarge(u64),
    #[error("it changed while it was read")]
    Changed,
}

/// A file's content, and facts about the file.
#[derive(Debug)]
pub struct Opened {
    pub bytes: Vec<u8>,
    /// Its path, without links.
    pub path: PathBuf,
    pub uid: u32,
    /// The bits of access.
    pub mode: u32,
}

/// Reads a file wherever it is; links are followed.
pub fn open(path: &Path, max: u64) -> Result<Opened, OpenError> {
    let file = rustix::fs::openat(CWD, path, flags(), Mode::empty()).map_err(io::Error::from)?;
    read(file, max)
}

/// Reads a file of a directory. Links are followed as long as they stay in the directory: a mounted ConfigMap or Secret consists of them.
pub fn open_in(directory: &Path, name: &OsStr, max: u64) -> Result<Opened, OpenError> {
    let at = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(directory, at, Mode::empty()).map_err(io::Error::from)?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let file = beneath::open(
        &directory,
        name,
        flags(),
        resolve,
        Instant::now() + LOOK_WALL,
    );
    let file = file.map_err(|errno| match errno {
        Errno::XDEV | Errno::LOOP => OpenError::LeadsOut,
        errno => OpenError::Io(errno.into()),
    })?;
    read(file, max)
}

/// A FIFO without a writer, or a terminal, must not block the thread.
fn flags() -> OFlags {
    OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC
}

fn read(file: OwnedFd, max: u64) -> Result<Opened, OpenError> {
    let mut file = File::from(file);
    let before = file.metadata()?;
    if !before.is_file() {
        return Err(OpenError::NotRegular);
    }
    if before.size() > max {
        return Err(OpenError::TooLarge(max));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(before.size()).unwrap_or_default());
    (&mut file).take(max + 1).read_to_end(&mut bytes)?;
    let after = file.metadata()?;
    if stamp(&before) != stamp(&after) || bytes.len() as u64 != after.size() {
        return Err(OpenError::Changed);
    }
    let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    Ok(Opened {
        bytes,
        path,
        uid: after.uid(),
        mode: after.mode() & 0o7777,
    })
}

/// Returns the metadata that change when the content does.
fn stamp(found: &Metadata) -> (u64, i64, i64) {
    (found.size(), found.mtime(), found.mtime_nsec())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_outside_directory_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("outside"), "secret").unwrap();
        let drivers = at("drivers");
        // As the kubelet mounts a ConfigMap.
        std::fs::create_dir_all(drivers.join("..2026_01")).unwrap();
        std::fs::write(drivers.join("..2026_01/a.wasm"), "content").unwrap();
        symlink("..2026_01", drivers.join("..data")).unwrap();
        symlink("..data/a.wasm", drivers.join("a.wasm")).unwrap();
        let opened = open_in(&drivers, OsStr::new("a.wasm"), 64).unwrap();
        assert_eq!(opened.bytes, b"content");
        assert!(
            opened.path.ends_with("drivers/..2026_01/a.wasm"),
            "{opened:?}"
        );

        symlink("../outside", drivers.join("relative.wasm")).unwrap();
        symlink(at("outside"), drivers.join("absolute.wasm")).unwrap();
        symlink("loop.wasm", drivers.join("loop.wasm")).unwrap();
        for name in ["relative.wasm", "absolute.wasm", "loop.wasm", "../outside"] {
            let refused = open_in(&drivers, OsStr::new(name), 64).unwrap_err();
            assert!(
                matches!(refused, OpenError::LeadsOut),
                "{name}: {refused:?}"
            );
        }
        assert_eq!(
            open(&drivers.join("absolute.wasm"), 64).unwrap().bytes,
            b"secret"
        );
    }

    #[test]
    fn only_bounded_regular_files_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        rustix::fs::mknodat(CWD, at("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        std::fs::create_dir(at("directory")).unwrap();
        for name in ["pipe", "directory"] {
            let refused = open_in(directory.path(), OsStr::new(name), 64).unwrap_err();
            assert!(
                matches!(refused, OpenError::NotRegular),
                "{name}: {refused:?}"
            );
        }
        std::fs::write(at("full"), [0; 64]).unwrap();
        assert_eq!(open(&at("full"), 64).unwrap().bytes.len(), 64);
        assert!(matches!(
            open(&at("full"), 63),
            Err(OpenError::TooLarge(63))
        ));
        // It says that it is empty, and is not: as a file that grows meanwhile.
        assert!(matches!(
            open(Path::new("/proc/self/stat"), 4096),
            Err(OpenError::Changed)
        ));
        let refused = open_in(directory.path(), OsStr::new("none"), 64).unwrap_err();
        assert!(
            matches!(refused, OpenError::Io(ref error) if error.kind() == io::ErrorKind::NotFound)
        );
    }
}
