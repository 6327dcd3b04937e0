//! Collects entries into a snapshot and checks each.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;

use crate::limit::{ENTRIES_MAX, FILE_BYTES_MAX, TOTAL_BYTES_MAX};
use crate::links::Links;
use crate::{Entry, Refusal, Snapshot, SnapshotError, path};

/// The checked entries so far.
#[derive(Default)]
pub(crate) struct Collector {
    entries: BTreeMap<String, Entry>,
    /// Bytes of all files and of the targets of all links.
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
        let bytes = match &entry {
            Entry::File(content) => content.len(),
            Entry::Link(target) => target.len(),
            Entry::Directory | Entry::Node { .. } => 0,
        };
        self.insert(path, entry)?;
        self.bytes += bytes as u64;
        Ok(())
    }

    /// Returns an earlier entry.
    pub(crate) fn get(&self, segments: &[&str]) -> Option<&Entry> {
        self.entries.get(&format!("/{}", segments.join("/")))
    }

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the entries as they are, for those that were checked before.
    pub(crate) fn into_snapshot(self) -> Snapshot {
        Snapshot { entries: self.entries }
    }

    /// Returns the snapshot of the archive or directory `file`. Fails if it has no `/sys`, or a link that cannot be resolved within it.
    pub(crate) fn finish(self, file: &str) -> Result<Snapshot, SnapshotError> {
        if self.entries.get("/sys") != Some(&Entry::Directory) {
            return Err(SnapshotError::NoSysfs { file: file.to_owned() });
        }
        Links::check(&self.entries).map_err(|(link, refusal)| SnapshotError::Refused {
            file: file.to_owned(),
            entry: link.trim_start_matches('/').to_owned(),
            refusal,
        })?;
        Ok(Snapshot { entries: self.entries })
    }

    fn check(&self, path: &str, entry: &Entry) -> Result<(), Refusal> {
        match entry {
            Entry::File(content) => self.admit_file(content.len() as u64),
            Entry::Directory => Ok(()),
            Entry::Link(target) => {
                path::target(path, target)?;
                self.admit_file(target.len() as u64)
            }
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
        if self.entries.len() >= ENTRIES_MAX && !self.entries.contains_key(&path) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_links_have_a_bound_together() {
        let full = || Collector { bytes: TOTAL_BYTES_MAX, ..Collector::default() };
        let long = Collector { bytes: TOTAL_BYTES_MAX - 5, ..Collector::default() };
        assert_eq!(full().add(&["sys", "a"], Entry::File(vec![0])), Err(Refusal::ManyBytes));
        assert_eq!(full().add(&["sys", "a"], Entry::Link("b".into())), Err(Refusal::ManyBytes));
        assert_eq!({ long }.add(&["sys", "a"], Entry::Link("12345".into())), Ok(()));
        assert_eq!(full().add(&["sys", "a"], Entry::Directory), Ok(()));
    }
}
