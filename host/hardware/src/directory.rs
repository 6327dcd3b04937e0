//! Reads a snapshot from a directory.

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::collect::Collector;
use crate::limit::FILE_BYTES_MAX;
use crate::path::segments;
use crate::{Entry, NodeKind, Refusal, Snapshot, SnapshotError};

/// Loads the directory, or the only directory in it that has a `sys`.
pub(crate) fn load(directory: &Path) -> Result<Snapshot, SnapshotError> {
    let file = directory.display().to_string();
    let root = root(directory)
        .map_err(|source| SnapshotError::Open {
            file: file.clone(),
            source,
        })?
        .ok_or_else(|| SnapshotError::NoSysfs { file: file.clone() })?;
    let mut loading = Loading {
        file: &file,
        root: &root,
        collector: Collector::default(),
    };
    // Directories that are entries already, so that they have the bounds of entries.
    let mut pending = vec![PathBuf::new()];
    while let Some(path) = pending.pop() {
        let entries = fs::read_dir(root.join(&path));
        for entry in entries.map_err(|source| loading.unreadable(&path, source))? {
            let name = entry
                .map_err(|source| loading.unreadable(&path, source))?
                .file_name();
            let path = path.join(name);
            if loading.take(&path)? {
                pending.push(path);
            }
        }
    }
    loading.collector.finish(&file)
}

fn root(directory: &Path) -> io::Result<Option<PathBuf>> {
    if directory.join("sys").try_exists()? {
        return Ok(Some(directory.to_owned()));
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.join("sys").try_exists()? {
            found.push(path);
        }
    }
    Ok(if found.len() == 1 { found.pop() } else { None })
}

struct Loading<'a> {
    file: &'a str,
    root: &'a Path,
    collector: Collector,
}

impl Loading<'_> {
    /// Takes one entry, and returns whether it is a directory.
    fn take(&mut self, path: &Path) -> Result<bool, SnapshotError> {
        let segments =
            segments(path.as_os_str().as_bytes()).map_err(|refusal| self.refused(path, refusal))?;
        let here = self.root.join(path);
        let metadata =
            fs::symlink_metadata(&here).map_err(|source| self.unreadable(path, source))?;
        let entry = if metadata.is_dir() {
            Entry::Directory
        } else {
            self.entry(path, &here, &metadata)?
        };
        self.collector
            .add(&segments, entry)
            .map_err(|refusal| self.refused(path, refusal))?;
        Ok(metadata.is_dir())
    }

    fn entry(&self, path: &Path, here: &Path, metadata: &Metadata) -> Result<Entry, SnapshotError> {
        let kind = metadata.file_type();
        let unreadable = |source| self.unreadable(path, source);
        if kind.is_file() {
            self.collector
                .admit_file(metadata.len())
                .map_err(|refusal| self.refused(path, refusal))?;
            return read(here).map(Entry::File).map_err(unreadable);
        }
        if kind.is_symlink() {
            let target = fs::read_link(here)
                .map_err(unreadable)?
                .into_os_string()
                .into_string();
            return target
                .map(Entry::Link)
                .map_err(|_| self.refused(path, Refusal::BadPath));
        }
        if kind.is_char_device() || kind.is_block_device() {
            let kind = if kind.is_char_device() {
                NodeKind::Character
            } else {
                NodeKind::Block
            };
            let (major, minor) = device_number(metadata.rdev());
            return Ok(Entry::Node { kind, major, minor });
        }
        let kind = if kind.is_fifo() { "a fifo" } else { "a socket" };
        Err(self.refused(path, Refusal::FileType { kind }))
    }

    fn refused(&self, path: &Path, refusal: Refusal) -> SnapshotError {
        SnapshotError::Refused {
            file: self.file.to_owned(),
            entry: path.display().to_string(),
            refusal,
        }
    }

    fn unreadable(&self, path: &Path, source: io::Error) -> SnapshotError {
        SnapshotError::Read {
            file: self.file.to_owned(),
            entry: path.display().to_string(),
            source,
        }
    }
}

/// Reads one byte more than allowed at most, because a file may grow; its size is checked again when it is added.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(path)?
        .take(FILE_BYTES_MAX + 1)
        .read_to_end(&mut content)?;
    Ok(content)
}

/// Splits a `dev_t` as makedev(3) of Linux joins it.
pub(crate) fn device_number(number: u64) -> (u32, u32) {
    let major = ((number >> 8) & 0xfff) | ((number >> 32) & 0xffff_f000);
    let minor = (number & 0xff) | ((number >> 12) & 0xffff_ff00);
    (
        u32::try_from(major).unwrap_or(u32::MAX),
        u32::try_from(minor).unwrap_or(u32::MAX),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_follow_linux_encoding() {
        assert_eq!(device_number(0xe280), (226, 128));
        assert_eq!(device_number(0x10_0300), (3, 256));
    }
}
