//! Writes a snapshot below a directory or as an archive.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::Path;

use tar::{Builder, EntryType, Header};

use crate::{Entry, NodeKind, Snapshot, SnapshotError, path};

/// The directory around the snapshot in an archive. It does not name the machine.
const TOP: &str = "machine";
/// Bytes of a path or a target in a header of tar.
const NAME_BYTES: usize = 100;

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

/// Writes an archive that depends on the entries only.
pub(crate) fn archive(snapshot: &Snapshot, out: impl Write) -> io::Result<()> {
    let mut builder = Builder::new(out);
    append(&mut builder, &format!("{TOP}/"), &Entry::Directory)?;
    for (path, entry) in snapshot.entries() {
        let slash = if *entry == Entry::Directory { "/" } else { "" };
        append(&mut builder, &format!("{TOP}{path}{slash}"), entry)?;
    }
    builder.into_inner()?.flush()
}

/// The tar crate's own functions change paths and targets, such as `./a`.
fn append(builder: &mut Builder<impl Write>, path: &str, entry: &Entry) -> io::Result<()> {
    let (kind, mode, content, target) = match entry {
        Entry::File(content) => (EntryType::Regular, 0o444, content.as_slice(), ""),
        Entry::Directory => (EntryType::Directory, 0o755, &[][..], ""),
        Entry::Link(target) => (EntryType::Symlink, 0o777, &[][..], target.as_str()),
        Entry::Node {
            kind: NodeKind::Character,
            ..
        } => (EntryType::Char, 0o600, &[][..], ""),
        Entry::Node {
            kind: NodeKind::Block,
            ..
        } => (EntryType::Block, 0o600, &[][..], ""),
    };
    let mut header = header(kind, mode, content.len());
    set_name(builder, &mut header, path, EntryType::GNULongName, 0)?;
    set_name(builder, &mut header, target, EntryType::GNULongLink, 157)?;
    if let Entry::Node { major, minor, .. } = entry {
        header.set_device_major(*major)?;
        header.set_device_minor(*minor)?;
    }
    header.set_cksum();
    builder.append(&header, content)
}

fn header(kind: EntryType, mode: u32, size: usize) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size as u64);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

/// Sets a path or target at its offset in the header; a longer one is in an extended header before it.
fn set_name(
    builder: &mut Builder<impl Write>,
    of: &mut Header,
    name: &str,
    extended: EntryType,
    offset: usize,
) -> io::Result<()> {
    let field = &name.as_bytes()[..name.len().min(NAME_BYTES)];
    of.as_mut_bytes()[offset..offset + field.len()].copy_from_slice(field);
    if name.len() <= NAME_BYTES {
        return Ok(());
    }
    let content = [name.as_bytes(), &[0]].concat();
    let mut header = header(extended, 0o644, content.len());
    header.as_mut_bytes()[..13].copy_from_slice(b"././@LongLink");
    header.set_cksum();
    builder.append(&header, content.as_slice())
}

fn at(path: &Path, result: io::Result<()>) -> Result<(), SnapshotError> {
    result.map_err(|source| SnapshotError::Write {
        path: path.display().to_string(),
        source,
    })
}

fn create_directory(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error)
            if error.kind() == io::ErrorKind::AlreadyExists
                && fs::symlink_metadata(path)?.is_dir() =>
        {
            Ok(())
        }
        created => created,
    }
}

fn create_file(path: &Path, content: &[u8]) -> io::Result<()> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)?
        .write_all(content)
}

/// Converts an absolute target to one that is relative to the link's directory.
fn relative(link: &str, target: &str) -> String {
    if !target.starts_with('/') {
        return target.to_owned();
    }
    let up = "../".repeat(link.matches('/').count() - 1);
    let down = path::target(link, target).unwrap_or_default().join("/");
    if up.is_empty() && down.is_empty() {
        ".".to_owned()
    } else {
        format!("{up}{down}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absolute_targets_become_relative() {
        assert_eq!(
            relative("/sys/class/drm/card0", "/sys/devices/x"),
            "../../../sys/devices/x"
        );
        assert_eq!(relative("/lib", "/usr/lib"), "usr/lib");
        assert_eq!(relative("/here", "/"), ".");
        assert_eq!(relative("/sys/a", "../b"), "../b");
    }
}
