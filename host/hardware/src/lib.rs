//! Snapshots of the hardware of a machine: what its `/sys`, `/proc` and a few other directories contained at one time.
//!
//! The crate reads a snapshot from a tar file (plain, gzip or bzip2) or from a directory, in the layout of the test suites of hwloc and ghw:
//! `sys/` and `proc/`, optionally `dev/`, `etc/`, `usr/` and `opt/`, with or without one directory around them. It writes a snapshot below a
//! directory or as a tar file. [`Recorder`] makes a snapshot of a machine, without what identifies it. No link is ever followed.
//!
//! A snapshot is input from outside: every count and size has a bound, and an archive beyond one is refused with the name of the entry.
//!
//! ```
//! use nodedock_hardware::{Entry, Snapshot};
//!
//! let mut archive = tar::Builder::new(Vec::new());
//! let mut header = tar::Header::new_gnu();
//! header.set_size(7);
//! header.set_mode(0o444);
//! archive.append_data(&mut header, "machine/sys/class/drm/card0/device/vendor", &b"0x1002\n"[..])?;
//!
//! let snapshot = Snapshot::from_archive("machine.tar", archive.into_inner()?.as_slice())?;
//! let vendor = snapshot.get("/sys/class/drm/card0/device/vendor");
//! assert_eq!(vendor, Some(&Entry::File(b"0x1002\n".to_vec())));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(missing_docs)]

mod archive;
mod collect;
mod directory;
mod error;
pub mod identifiers;
pub mod limit;
mod links;
mod nodes;
mod path;
mod record;
mod redact;
#[cfg(test)]
mod tests;
pub mod vocabulary;
mod write;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

pub use error::{Refusal, SnapshotError};
pub use nodes::Node;
pub use record::{Recorder, Recording, Skipped, Summary};
pub use redact::Redacted;

/// Type of a device node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// Character device.
    Character,
    /// Block device.
    Block,
}

/// One entry of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Regular file with its content.
    File(Vec<u8>),
    /// Directory.
    Directory,
    /// Symbolic link with its target, as recorded. Relative to the link's directory, or absolute on the recorded machine. It does not
    /// leave the snapshot, also not through other links, and may lead to no entry.
    Link(String),
    /// Device node below `/dev`.
    Node {
        /// Type of the node.
        kind: NodeKind,
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
}

/// The recorded files of a machine, by absolute path: `/sys/class/drm`. Every entry has its parent directories.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    entries: BTreeMap<String, Entry>,
}

/// The number of entries: their contents fill many pages.
impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Snapshot of {} entries", self.entries.len())
    }
}

impl Snapshot {
    /// Reads a snapshot from a directory or an archive.
    ///
    /// # Errors
    ///
    /// [`SnapshotError`], with the file and the entry.
    pub fn open(path: &Path) -> Result<Self, SnapshotError> {
        let name = path.display().to_string();
        if path.is_dir() {
            return directory::load(path);
        }
        Self::from_archive(
            &name,
            File::open(path).map_err(|source| SnapshotError::Open {
                file: name.clone(),
                source,
            })?,
        )
    }

    /// Reads a snapshot from the bytes of an archive. Its first bytes show how it is compressed. Errors have `name`.
    ///
    /// # Errors
    ///
    /// [`SnapshotError`], with `name` and the entry.
    pub fn from_archive(name: &str, archive: impl Read) -> Result<Self, SnapshotError> {
        archive::load(name, archive)
    }

    /// Returns the entry at an absolute path. Links are not followed.
    pub fn get(&self, path: &str) -> Option<&Entry> {
        self.entries.get(path)
    }

    /// Returns the entries in the order of their paths, each directory before its content.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries
            .iter()
            .map(|(path, entry)| (path.as_str(), entry))
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether the snapshot has no entry.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Writes directories, files and links below a directory, which is created if it is missing. Device nodes are left out: they need
    /// privileges. A link with an absolute target becomes a relative one, so that it leads into this directory. A program that creates
    /// what a link leads to can still make it lead out of the directory: a program that runs on the directory resolves links within it,
    /// as openat2(2) does with `RESOLVE_IN_ROOT`.
    ///
    /// # Errors
    ///
    /// [`SnapshotError::Write`], with the path; also if a file or link exists there already. What is written before it remains.
    pub fn write_to(&self, directory: &Path) -> Result<(), SnapshotError> {
        write::write(self, directory)
    }

    /// Writes the snapshot as a tar file that [`from_archive`](Self::from_archive) reads, below a directory `machine`. The same snapshot
    /// gives the same bytes.
    ///
    /// ```
    /// # use nodedock_hardware::Snapshot;
    /// # let mut archive = tar::Builder::new(Vec::new());
    /// # let mut header = tar::Header::new_gnu();
    /// # header.set_size(2);
    /// # archive.append_data(&mut header, "sys/class/leds/a/brightness", &b"1\n"[..])?;
    /// # let archive = archive.into_inner()?;
    /// let snapshot = Snapshot::from_archive("machine.tar", archive.as_slice())?;
    /// let mut copy = Vec::new();
    /// snapshot.write_archive(&mut copy)?;
    /// assert_eq!(Snapshot::from_archive("copy.tar", copy.as_slice())?, snapshot);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of `out`.
    pub fn write_archive(&self, out: impl Write) -> io::Result<()> {
        write::archive(self, out)
    }

    /// Returns the snapshot with placeholders for what identifies the machine, as [`identifiers`] lists it, for texts of `/sys` that are not
    /// of the [`vocabulary`], and for `known` texts, such as the machine's name.
    pub fn redacted(self, known: &[String]) -> (Self, Redacted) {
        redact::redact(self, known)
    }
}
