//! Records the machine below a root: walks its `/sys`, `/dev` and `/proc` as [`selection`] allows, and never writes, follows a link,
//! opens a device or crosses a mount.
//!
//! A file that cannot be read is counted and left out. Everything that is recorded goes through the checks of the reader, so that the
//! reader accepts it.

mod reader;
mod selection;
/// Returns whether a directory of `/dev` has a device node, or a link that is kept, at any depth. The names of others are those of volumes.
fn has_node(directory: &Path, depth: usize) -> bool {
    // no error: a recording leaves out what cannot be read
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => depth > 0 && has_node(&entry.path(), depth - 1),
        Ok(kind) if kind.is_symlink() => directory.ends_with("by-path"),
        Ok(kind) => kind.is_char_device() || kind.is_block_device(),
        Err(_) => false,
    })
}

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::collect::Collector;
use crate::directory::device_number;
use crate::limit::ENTRIES_MAX;
use crate::{Entry, NodeKind, Redacted, Refusal, Snapshot, SnapshotError};
use reader::Reader;
use selection::{Choice, TREES};

/// Texts that name the machine. They are read to find them in other files, and not recorded.
const NAMES: &[&str] = &[
    "etc/hostname",
    "etc/machine-id",
    "proc/sys/kernel/hostname",
    "proc/sys/kernel/random/boot_id",
];
/// Bytes of a text that names the machine.
const NAME_BYTES_MAX: usize = 4096;
/// Entries between two reports of progress.
const PROGRESS_ENTRIES: usize = 1000;
/// Directories of `/dev` in one another.
const DEV_DEPTH_MAX: usize = 8;

/// Makes a snapshot of a machine.
///
/// ```
/// use nodedock_hardware::{Entry, Recorder};
///
/// let machine = tempfile::tempdir()?;
/// let nic = machine.path().join("sys/devices/pci0000:00/0000:00:03.0/net/eth0");
/// std::fs::create_dir_all(&nic)?;
/// std::fs::write(nic.join("address"), "3c:fd:fe:a1:b2:c3\n")?;
///
/// let recording = Recorder::new(machine.path()).record(&mut |_, _| ())?;
/// let address = recording.snapshot.get("/sys/devices/pci0000:00/0000:00:03.0/net/eth0/address");
/// assert_eq!(address, Some(&Entry::File(b"02:00:00:00:00:01\n".to_vec())));
/// assert_eq!(recording.summary.redacted.unwrap().values, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Recorder {
    root: PathBuf,
    includes_identifiers: bool,
}

/// A snapshot, and how it was made.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The machine.
    pub snapshot: Snapshot,
    /// Numbers of recorded, skipped and replaced entries.
    pub summary: Summary,
}

/// The contents of a recording.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// Files with their content.
    pub files: usize,
    /// Bytes of all files.
    pub bytes: u64,
    /// Links.
    pub links: usize,
    /// Device nodes.
    pub nodes: usize,
    /// Number of the files, directories and links that are left out, and the first of them, by reason.
    pub skipped: BTreeMap<Skipped, (usize, String)>,
    /// Replaced values; `None` if identifiers are included.
    pub redacted: Option<Redacted>,
}

/// Why something is left out of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Skipped {
    /// A rule of the recorder leaves it out.
    ByRule(&'static str),
    /// This user may not read it.
    Denied,
    /// It cannot be read: many files of `/sys` exist without a value.
    Unreadable,
    /// It was not read within the deadline.
    Slow,
    /// It is larger than a file of its kind should be.
    Large,
    /// It is no file, directory, link or device node, or has a name or a target that no snapshot may have.
    Unsuitable,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Skipped::ByRule(reason) => reason,
            Skipped::Denied => "not readable by this user",
            Skipped::Unreadable => "no value",
            Skipped::Slow => "not read within 2 s",
            Skipped::Large => "too large",
            Skipped::Unsuitable => "not allowed in a snapshot",
        })
    }
}

impl Recorder {
    /// Prepares to record the machine below `root`: `/`, or where its root is mounted.
    pub fn new(root: &Path) -> Self {
        Recorder {
            root: root.to_owned(),
            includes_identifiers: false,
        }
    }

    /// Keeps what identifies the machine, as [`identifiers`](crate::identifiers) lists it.
    #[must_use]
    pub fn with_identifiers(mut self) -> Self {
        self.includes_identifiers = true;
        self
    }

    /// Records the machine. Calls `progress` now and then, with the number of entries and the present path.
    ///
    /// # Errors
    ///
    /// [`SnapshotError`] if the machine has no `/sys`, exceeds a bound of a snapshot, or has many files that block.
    pub fn record(
        &self,
        progress: &mut dyn FnMut(usize, &str),
    ) -> Result<Recording, SnapshotError> {
        let mut walk = Walk {
            root: &self.root,
            reader: Reader::new(),
            collector: Collector::default(),
            summary: Summary::default(),
            progress,
        };
        for tree in TREES {
            walk.tree(tree)?;
        }
        let Walk {
            collector,
            mut summary,
            ..
        } = walk;
        let mut snapshot = collector.finish(&self.root.display().to_string())?;
        if !self.includes_identifiers {
            let (redacted, counts) = snapshot.redacted(&names(&self.root));
            snapshot = redacted;
            summary.redacted = Some(counts);
        }
        Ok(Recording { snapshot, summary })
    }
}

/// Returns the names of the machine: also the host's part of a full name.
fn names(root: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for path in NAMES {
        if let Ok(text) = reader::read(&root.join(path), NAME_BYTES_MAX) {
            let name = String::from_utf8_lossy(&text).trim().to_owned();
            names.extend(name.split_once('.').map(|(host, _)| host.to_owned()));
            names.push(name);
        }
    }
    names
}

struct Walk<'a> {
    root: &'a Path,
    reader: Reader,
    collector: Collector,
    summary: Summary,
    progress: &'a mut dyn FnMut(usize, &str),
}

impl Walk<'_> {
    /// Walks a directory, or takes a file. What is missing on this machine is no error.
    fn tree(&mut self, tree: &str) -> Result<(), SnapshotError> {
        let Ok(metadata) = fs::symlink_metadata(self.root.join(&tree[1..])) else {
            return Ok(());
        };
        let mut pending = vec![tree.to_owned()];
        while let Some(path) = pending.pop() {
            pending.extend(self.take(&path, metadata.dev())?);
            if self.collector.len() + pending.len() > ENTRIES_MAX {
                return Err(self.refused(&path, Refusal::ManyEntries));
            }
        }
        Ok(())
    }

    /// Takes one entry, and returns the paths in it. `device` is that of the tree, to notice mounts.
    fn take(&mut self, path: &str, device: u64) -> Result<Vec<String>, SnapshotError> {
        let here = self.root.join(&path[1..]);
        let metadata = match fs::symlink_metadata(&here) {
            Ok(metadata) => metadata,
            Err(error) => return self.skip(path, reason(&error)),
        };
        if metadata.dev() != device {
            return self.skip(path, Skipped::ByRule("another file system"));
        }
        let entry = match self.entry(path, &here, &metadata)? {
            Ok(entry) => entry,
            Err(reason) => return self.skip(path, reason),
        };
        let is_directory = entry == Entry::Directory;
        self.add(path, entry)?;
        if !is_directory {
            return Ok(Vec::new());
        }
        match names_in(&here) {
            Ok(names) => Ok(names
                .into_iter()
                .map(|name| format!("{path}/{name}"))
                .collect()),
            Err(error) => self.skip(path, reason(&error)),
        }
    }

    /// Returns the entry, or why it is skipped.
    fn entry(
        &mut self,
        path: &str,
        here: &Path,
        metadata: &Metadata,
    ) -> Result<Result<Entry, Skipped>, SnapshotError> {
        let kind = metadata.file_type();
        if let Some(reason) = selection::left_out(path) {
            return Ok(Err(Skipped::ByRule(reason)));
        }
        if kind.is_dir() {
            let is_kept = !path.starts_with("/dev/") || has_node(here, DEV_DEPTH_MAX);
            return Ok(is_kept
                .then_some(Entry::Directory)
                .ok_or(Skipped::ByRule("directories without nodes")));
        }
        if kind.is_symlink() {
            return Ok(match (selection::keeps_link(path), fs::read_link(here)) {
                (Err(reason), _) => Err(Skipped::ByRule(reason)),
                (Ok(()), Ok(target)) => match target.into_os_string().into_string() {
                    Ok(target) => Ok(Entry::Link(target)),
                    Err(_) => Err(Skipped::Unsuitable),
                },
                (Ok(()), Err(error)) => Err(reason(&error)),
            });
        }
        if kind.is_file() {
            return self.file(path, here, metadata.mode());
        }
        if path.starts_with("/dev/") && (kind.is_char_device() || kind.is_block_device()) {
            let kind = if kind.is_char_device() {
                NodeKind::Character
            } else {
                NodeKind::Block
            };
            let (major, minor) = device_number(metadata.rdev());
            return Ok(Ok(Entry::Node { kind, major, minor }));
        }
        Ok(Err(Skipped::Unsuitable))
    }

    fn file(
        &mut self,
        path: &str,
        here: &Path,
        mode: u32,
    ) -> Result<Result<Entry, Skipped>, SnapshotError> {
        let (bytes, is_whole) = match selection::content(path, mode) {
            Choice::Whole(bytes) => (bytes, true),
            Choice::Head(bytes) => (bytes, false),
            Choice::None(reason) => return Ok(Err(Skipped::ByRule(reason))),
        };
        // One byte more shows whether there is more.
        let read = self
            .reader
            .read(here, bytes + usize::from(is_whole))
            .map_err(|source| SnapshotError::Read {
                file: self.root.display().to_string(),
                entry: path[1..].to_owned(),
                source,
            })?;
        Ok(match read {
            Ok(content) if is_whole && content.len() > bytes => Err(Skipped::Large),
            Ok(content) => Ok(Entry::File(content)),
            Err(error) => Err(reason(&error)),
        })
    }

    /// Adds an entry. One that no snapshot may have is skipped; a bound of the whole snapshot ends the recording.
    fn add(&mut self, path: &str, entry: Entry) -> Result<(), SnapshotError> {
        let (files, links, nodes, bytes) = match &entry {
            Entry::File(content) => (1, 0, 0, content.len() as u64),
            Entry::Link(_) => (0, 1, 0, 0),
            Entry::Node { .. } => (0, 0, 1, 0),
            Entry::Directory => (0, 0, 0, 0),
        };
        let segments: Vec<_> = path.split('/').skip(1).collect();
        match self.collector.add(&segments, entry) {
            Ok(()) => {}
            Err(refusal @ (Refusal::ManyEntries | Refusal::ManyBytes | Refusal::LongPaths)) => {
                return Err(self.refused(path, refusal));
            }
            Err(_) => return self.skip(path, Skipped::Unsuitable).map(drop),
        }
        self.summary.files += files;
        self.summary.links += links;
        self.summary.nodes += nodes;
        self.summary.bytes += bytes;
        if self.collector.len().is_multiple_of(PROGRESS_ENTRIES) {
            (self.progress)(self.collector.len(), path);
        }
        Ok(())
    }

    fn skip(&mut self, path: &str, reason: Skipped) -> Result<Vec<String>, SnapshotError> {
        let (count, _) = self
            .summary
            .skipped
            .entry(reason)
            .or_insert_with(|| (0, path.to_owned()));
        *count += 1;
        Ok(Vec::new())
    }

    fn refused(&self, path: &str, refusal: Refusal) -> SnapshotError {
        SnapshotError::Refused {
            file: self.root.display().to_string(),
            entry: path[1..].to_owned(),
            refusal,
        }
    }
}

/// Returns the names in a directory in their order, without those that are not UTF-8.
fn names_in(directory: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)?.take(ENTRIES_MAX + 1) {
        names.extend(entry?.file_name().into_string());
    }
    // The last is taken first.
    names.sort_by(|a, b| b.cmp(a));
    Ok(names)
}

fn reason(error: &io::Error) -> Skipped {
    match error.kind() {
        io::ErrorKind::PermissionDenied => Skipped::Denied,
        io::ErrorKind::TimedOut => Skipped::Slow,
        _ => Skipped::Unreadable,
    }
}
