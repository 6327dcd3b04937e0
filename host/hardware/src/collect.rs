//! Collects entries into a snapshot and checks each.

use std::collections::BTreeMap;

use crate::limit::{ENTRIES_MAX, FILE_BYTES_MAX, PATHS_BYTES_MAX, TOTAL_BYTES_MAX};
use crate::links::Links;
use crate::{Entry, Refusal, Snapshot, SnapshotError, path};

/// The checked entries so far.
#[derive(Default)]
pub(crate) struct Collector {
    entries: BTreeMap<String, Entry>,
    /// Bytes of all files.
    bytes: u64,
    /// Bytes of all paths and of the targets of all links.
    path_bytes: u64,
}

impl Collector {
    /// Checks the size of a file before it is read.
    pub(crate) fn admit_file(&self, bytes: u64) -> Result<(), Refusal> {
        if bytes > FILE_BYTES_MAX {
            return Err(Refusal::LargeFile { bytes });
        }
        if self.bytes + bytes > TOTAL_BYTES_MAX {
            Err(Refusal::ManyBytes)
        } else {
            Ok(())
        }
    }

    /// Adds an entry below its parent directories. A directory may occur several times, as in an archive that was appended to.
    pub(crate) fn add(&mut self, segments: &[&str], entry: Entry) -> Result<(), Refusal> {
        let Some((_, ancestors)) = segments.split_last() else {
            return Ok(());
        };
        let path = format!("/{}", segments.join("/"));
        self.directories(&path, ancestors)?;
        self.check(&path, &entry)?;
        if entry == Entry::Directory && self.entries.get(&path) == Some(&Entry::Directory) {
            return Ok(());
        }
        self.insert(path, entry)
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
        Snapshot {
            entries: self.entries,
        }
    }

    /// Returns the snapshot of the archive or directory `file`. Fails if it has no `/sys`, or a link that cannot be resolved within it.
    pub(crate) fn finish(self, file: &str) -> Result<Snapshot, SnapshotError> {
        if self.entries.get("/sys") != Some(&Entry::Directory) {
            return Err(SnapshotError::NoSysfs {
                file: file.to_owned(),
            });
        }
        Links::check(&self.entries).map_err(|(link, refusal)| SnapshotError::Refused {
            file: file.to_owned(),
            entry: link.trim_start_matches('/').to_owned(),
            refusal,
        })?;
        Ok(Snapshot {
            entries: self.entries,
        })
    }

    fn check(&self, path: &str, entry: &Entry) -> Result<(), Refusal> {
        match entry {
            Entry::File(content) => self.admit_file(content.len() as u64),
            Entry::Directory => Ok(()),
            Entry::Link(target) => path::target(path, target).map(drop),
            Entry::Node { .. } if path.starts_with("/dev/") => Ok(()),
            Entry::Node { .. } => Err(Refusal::FileType {
                kind: "a device node elsewhere",
            }),
        }
    }

    /// Adds the ancestors of a path that are not there yet.
    fn directories(&mut self, path: &str, ancestors: &[&str]) -> Result<(), Refusal> {
        let parent = path.rfind('/').unwrap_or_default();
        // Every directory has its own ancestors.
        if matches!(self.entries.get(&path[..parent]), Some(Entry::Directory)) {
            return Ok(());
        }
        let mut end = 0;
        for segment in ancestors {
            end += 1 + segment.len();
            let ancestor = &path[..end];
            match self.entries.get(ancestor) {
                Some(Entry::Directory) => {}
                Some(_) => {
                    return Err(Refusal::NotADirectory {
                        ancestor: ancestor.to_owned(),
                    });
                }
                None => self.insert(ancestor.to_owned(), Entry::Directory)?,
            }
        }
        Ok(())
    }

    /// The only place where entries are added, and counted.
    fn insert(&mut self, path: String, entry: Entry) -> Result<(), Refusal> {
        if self.entries.contains_key(&path) {
            return Err(Refusal::Duplicate);
        }
        if self.entries.len() >= ENTRIES_MAX {
            return Err(Refusal::ManyEntries);
        }
        let (bytes, target) = match &entry {
            Entry::File(content) => (content.len(), 0),
            Entry::Link(target) => (0, target.len()),
            Entry::Directory | Entry::Node { .. } => (0, 0),
        };
        let path_bytes = self.path_bytes + (path.len() + target) as u64;
        if path_bytes > PATHS_BYTES_MAX {
            return Err(Refusal::LongPaths);
        }
        self.path_bytes = path_bytes;
        self.bytes += bytes as u64;
        self.entries.insert(path, entry);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_a_bound_together() {
        let mut full = Collector {
            bytes: TOTAL_BYTES_MAX,
            ..Collector::default()
        };
        assert_eq!(
            full.add(&["sys", "a"], Entry::File(vec![0])),
            Err(Refusal::ManyBytes)
        );
        assert_eq!(full.add(&["sys", "a"], Entry::Link("b".into())), Ok(()));
        assert_eq!(full.add(&["sys", "b"], Entry::Directory), Ok(()));
    }

    #[test]
    fn paths_and_targets_share_one_bound() {
        let full = |left| Collector {
            path_bytes: PATHS_BYTES_MAX - left,
            ..Collector::default()
        };
        let link = || Entry::Link("12345".into());
        assert_eq!(full(4 + 6 + 5).add(&["sys", "a"], link()), Ok(()));
        assert_eq!(
            full(4 + 6 + 4).add(&["sys", "a"], link()),
            Err(Refusal::LongPaths)
        );
        assert_eq!(full(4 + 6).add(&["sys", "a"], Entry::Directory), Ok(()));
        assert_eq!(
            full(3).add(&["sys", "a"], Entry::Directory),
            Err(Refusal::LongPaths),
            "an ancestor counts"
        );
        let mut twice = full(4);
        assert_eq!(twice.add(&["sys"], Entry::Directory), Ok(()));
        assert_eq!(
            twice.add(&["sys"], Entry::Directory),
            Ok(()),
            "it is there already"
        );
    }
}
