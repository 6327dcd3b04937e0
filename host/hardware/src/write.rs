//! Writes a snapshot below a directory.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::{Entry, Snapshot, SnapshotError, path};

/// Writes links after everything else, so that no path leads through one.
pub(crate) fn write(snapshot: &Snapshot, directory: &Path) -> Result<(), SnapshotError> {
    at(directory, fs::create_dir_all(directory))?;
    for (path, entry) in snapshot.entries() {
        let here = directory.join(path.trim_start_matches('/'));
        match entry {
            Entry::Directory => at(&here, create_directory(&here))?,
            Entry::File(content) => at(&here, create_file(&here, content))?,
            Entry::Link(_) | Entry::Node { .. } => {}
        }
    }
    for (path, entry) in snapshot.entries() {
        if let Entry::Link(target) = entry {
            let here = directory.join(path.trim_start_matches('/'));
            at(&here, symlink(relative(path, target), &here))?;
        }
    }
    Ok(())
}

fn at(path: &Path, result: io::Result<()>) -> Result<(), SnapshotError> {
    result.map_err(|source| SnapshotError::Write { path: path.display().to_string(), source })
}

fn create_directory(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error)
            if error.kind() == io::ErrorKind::AlreadyExists && fs::symlink_metadata(path)?.is_dir() =>
        {
            Ok(())
        }
        created => created,
    }
}

fn create_file(path: &Path, content: &[u8]) -> io::Result<()> {
    OpenOptions::new().write(true).create_new(true).open(path)?.write_all(content)
}

/// Converts an absolute target to one that is relative to the link's directory.
fn relative(link: &str, target: &str) -> String {
    if !target.starts_with('/') {
        return target.to_owned();
    }
    let up = "../".repeat(link.matches('/').count() - 1);
    let down = path::target(link, target).unwrap_or_default().join("/");
    if up.is_empty() && down.is_empty() { ".".to_owned() } else { format!("{up}{down}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absolute_targets_become_relative() {
        assert_eq!(relative("/sys/class/drm/card0", "/sys/devices/x"), "../../../sys/devices/x");
        assert_eq!(relative("/lib", "/usr/lib"), "usr/lib");
        assert_eq!(relative("/here", "/"), ".");
        assert_eq!(relative("/sys/a", "../b"), "../b");
    }
}
