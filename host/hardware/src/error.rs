//! Errors of snapshots.

use std::io;

use thiserror::Error;

use crate::limit::{
    ARCHIVE_BYTES_MAX, DEPTH_MAX, ENTRIES_MAX, EXTENDED_HEADER_BYTES_MAX, FILE_BYTES_MAX,
    LINKS_MAX, PATH_BYTES_MAX, PATHS_BYTES_MAX, TOTAL_BYTES_MAX, TRAILING_BYTES_MAX,
};

/// Why a snapshot could not be read or written. `file` is the archive or the directory.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The archive or directory cannot be opened.
    #[error("cannot open snapshot {file}")]
    Open {
        /// Archive or directory.
        file: String,
        /// Cause.
        source: io::Error,
    },
    /// The archive ends before its end marker.
    #[error("snapshot {file} is truncated after entry {entry:?}: copy the archive again")]
    Truncated {
        /// Archive.
        file: String,
        /// Last entry that began; empty if there is none.
        entry: String,
    },
    /// The archive, or a file in the directory, cannot be read.
    #[error("cannot read snapshot {file} at entry {entry:?}")]
    Read {
        /// Archive or directory.
        file: String,
        /// Entry that was read, or the last before the damage.
        entry: String,
        /// Cause.
        source: io::Error,
    },
    /// An entry is not allowed in a snapshot.
    #[error("snapshot {file}, entry {entry:?}: {refusal}")]
    Refused {
        /// Archive or directory.
        file: String,
        /// Path of the entry, as recorded.
        entry: String,
        /// Reason.
        refusal: Refusal,
    },
    /// The archive or directory has no `sys` directory.
    #[error(
        "{file} is no snapshot: it has no directory sys, neither at the top nor in a single directory"
    )]
    NoSysfs {
        /// Archive or directory.
        file: String,
    },
    /// A file, directory or link cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// Path on this machine.
        path: String,
        /// Cause.
        source: io::Error,
    },
}

/// Why an entry is not allowed in a snapshot.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The path is absolute, has `..`, or is not UTF-8.
    #[error("the path is not relative and plain UTF-8 without `..`")]
    BadPath,
    /// The path or the target of a link is too long.
    #[error("the path or target has more than {PATH_BYTES_MAX} bytes")]
    LongPath,
    /// The path has too many segments.
    #[error("the path has more than {DEPTH_MAX} segments")]
    Deep,
    /// Another entry has the path.
    #[error("another entry has the same path")]
    Duplicate,
    /// An ancestor is a file, a link or a device node.
    #[error("{ancestor} is not a directory")]
    NotADirectory {
        /// Path of the ancestor.
        ancestor: String,
    },
    /// The entries have more than one top directory.
    #[error("the path is not below the top directory {top:?} of the entries before it")]
    SecondTop {
        /// Top directory of the earlier entries; empty if they have none.
        top: String,
    },
    /// The link's target is above the snapshot's root.
    #[error("the link's target {target:?} leaves the snapshot")]
    LinkLeaves {
        /// Target as recorded.
        target: String,
    },
    /// The link leads to itself through other links, or through too many of them.
    #[error("the link leads to itself, or through more than {LINKS_MAX} other links")]
    LinkLoop,
    /// A hard link to something other than an earlier file of the archive.
    #[error("the hard link's target {target:?} is not an earlier file of the archive")]
    BadHardLink {
        /// Target as recorded.
        target: String,
    },
    /// A fifo, a socket, a sparse file, or a device node outside of `/dev`.
    #[error(
        "a snapshot has files, directories, links, and device nodes below /dev, and this is {kind}"
    )]
    FileType {
        /// The type of the entry.
        kind: &'static str,
    },
    /// The file is too large.
    #[error("the file has {bytes} bytes, more than {FILE_BYTES_MAX}")]
    LargeFile {
        /// Its size.
        bytes: u64,
    },
    /// The file's size in an extended header differs from that in its header.
    #[error(
        "the entry has two different sizes, in its header and in the extended header before it"
    )]
    SizeMismatch,
    /// An extended header is too large.
    #[error("the extended header after this entry has more than {EXTENDED_HEADER_BYTES_MAX} bytes")]
    LargeHeader,
    /// All files together are too large.
    #[error("the files up to this one have more than {TOTAL_BYTES_MAX} bytes")]
    ManyBytes,
    /// All paths and targets of links together are too long.
    #[error("the paths and targets of links up to this one have more than {PATHS_BYTES_MAX} bytes")]
    LongPaths,
    /// The archive is too large after decompression.
    #[error(
        "the archive has more than {ARCHIVE_BYTES_MAX} bytes after decompression, or {TRAILING_BYTES_MAX} after its end marker"
    )]
    LargeArchive,
    /// There are too many entries.
    #[error("the snapshot has more than {ENTRIES_MAX} entries")]
    ManyEntries,
}
