//! Collects entries into a snapshot and checks each.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;

use crate::limit::{ENTRIES_MAX, FILE_BYTES_MAX, TOTAL_BYTES_MAX};
use crate::{Entry, Refusal, Snapshot, path};

/// The checked entries so far.
#[derive(Default)]
pub(crate) struct Collector {
    entries: BTreeMap<String, Entry>,
    /// Bytes of all files.
    bytes: u64,
}

impl Collector {
    /// Checks the size of a file before it is read.
    pub(crate) fn admit_file(&self, bytes: u64) -> Result<(), Refusal> {
        if bytes > FILE_BYTES_MAX {
            return Err(Refusal::LargeFile { bytes });
        }
        if self.bytes + bytes > TOTAL_BYTES_MAX { Err(Refusal::ManyBytes) } else { Ok(()) }
    }

    /// Adds an entry below its parent directories. A directory may occur several times, as in an archive that was appended to.
    pub(crate) fn add(&mut self, segments: &[&str], entry: Entry) -> Result<(), Refusal> {
        let mut ancestor = String::new();
        for segment in &segments[..segments.len().saturating_sub(1)] {
            ancestor = format!("{ancestor}/{segment}");
            self.directory(&ancestor)?;
        }
        let Some(name) = segments.last() else { return Ok(()) };
        let path = format!("{ancestor}/{name}");
        self.check(&path, &entry)?;
        if entry == Entry::Directory && self.entries.get(&path) == Some(&Entry::Directory) {
            return Ok(());
        }
        let bytes = if let Entry::File(content) = &entry { content.len() as u64 } else { 0 };
        self.insert(path, entry)?;
        self.bytes += bytes;
        Ok(())
    }

    /// Returns an earlier entry.
    pub(crate) fn get(&self, segments: &[&str]) -> Option<&Entry> {
        self.entries.get(&format!("/{}", segments.join("/")))
    }

    /// Returns the snapshot; `None` if it has no `/sys`.
    pub(crate) fn finish(self) -> Option<Snapshot> {
        let has_sysfs = self.entries.get("/sys") == Some(&Entry::Directory);
        has_sysfs.then_some(Snapshot { entries: self.entries })
    }

    fn check(&self, path: &str, entry: &Entry) -> Result<(), Refusal> {
        match entry {
            Entry::File(content) => self.admit_file(content.len() as u64),
            Entry::Directory => Ok(()),
            Entry::Link(target) => path::target(path, target).map(drop),
            Entry::Node { .. } if path.starts_with("/dev/") => Ok(()),
            Entry::Node { .. } => Err(Refusal::FileType { kind: "a device node elsewhere" }),
        }
    }

    fn directory(&mut self, path: &str) -> Result<(), Refusal> {
        match self.entries.get(path) {
            Some(Entry::Directory) => Ok(()),
            Some(_) => Err(Refusal::NotADirectory { ancestor: path.to_owned() }),
            None => self.insert(path.to_owned(), Entry::Directory),
        }
    }

    fn insert(&mut self, path: String, entry: Entry) -> Result<(), Refusal> {
        if self.entries.len() >= ENTRIES_MAX {
            return Err(Refusal::ManyEntries);
        }
        match self.entries.entry(path) {
            Slot::Occupied(_) => Err(Refusal::Duplicate),
            Slot::Vacant(slot) => {
                slot.insert(entry);
                Ok(())
            }
        }
    }
}
