//! Files and sockets that a driver has made, which may be anything.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io::Read;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use serde_json::Value;

/// Maximum size of a file that a driver wrote.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The containerEdits of each CDI device by its qualified name.
pub(crate) fn cdi_devices(directory: &Path) -> Result<BTreeMap<String, Value>> {
    let mut devices = BTreeMap::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let suffix = path
            .extension()
            .and_then(|suffix| suffix.to_str())
            .unwrap_or_default();
        if !matches!(suffix, "json" | "yaml") {
            continue;
        }
        let text = match read(&path) {
            // It was removed just now.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            text => text.with_context(|| format!("read {}", path.display()))?,
        };
        let spec: Value = serde_saphyr::from_str(&text)
            .map_err(|error| anyhow!("{}: {error}", path.display()))?;
        let kind = spec["kind"]
            .as_str()
            .with_context(|| format!("{} has no kind", path.display()))?
            .to_owned();
        for device in spec["devices"].as_array().into_iter().flatten() {
            let mut edits = device["containerEdits"].clone();
            edits["ofAll"] = spec["containerEdits"].clone();
            devices.insert(
                format!("{kind}={}", device["name"].as_str().unwrap_or_default()),
                edits,
            );
        }
    }
    Ok(devices)
}

/// The text of a regular file of a driver, which may be anything.
pub(crate) fn read(path: &Path) -> std::io::Result<String> {
    // Nothing waits for the other end of a pipe.
    let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::CLOEXEC;
    let file = std::fs::File::from(rustix::fs::open(path, flags, rustix::fs::Mode::empty())?);
    if !file.metadata()?.is_file() {
        return Err(std::io::Error::other("it is no regular file"));
    }
    let mut text = String::new();
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(std::io::Error::other(format!(
            "it has more than {FILE_BYTES_MAX} bytes"
        )));
    }
    Ok(text)
}

/// The sockets in a directory and below it.
pub(crate) fn sockets(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    // no error: a driver may remove its directory, and the caller looks again
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        let is_hidden = path
            .file_name()
            .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        // no error: it was removed just now
        let Ok(kind) = std::fs::symlink_metadata(&path).map(|found| found.file_type()) else {
            continue;
        };
        if kind.is_socket() && !is_hidden {
            found.push(path);
        } else if kind.is_dir() && !is_hidden {
            found.extend(sockets(&path));
        }
    }
    found
}

/// Removes what is in a directory.
pub(crate) fn empty(directory: &Path) -> Result<()> {
    for entry in
        std::fs::read_dir(directory).with_context(|| format!("read {}", directory.display()))?
    {
        let path = entry?.path();
        let removed = match std::fs::symlink_metadata(&path)?.is_dir() {
            true => std::fs::remove_dir_all(&path),
            false => std::fs::remove_file(&path),
        };
        removed.with_context(|| format!("remove {}", path.display()))?;
    }
    Ok(())
}

/// Sets by modes whether the owner may write in a directory, its files and the directories below it.
pub(crate) fn set_writable(directory: &Path, is_writable: bool) -> Result<()> {
    let mode = if is_writable { 0o700 } else { 0o500 };
    set_mode(directory, mode)?;
    for entry in
        std::fs::read_dir(directory).with_context(|| format!("read {}", directory.display()))?
    {
        let path = entry?.path();
        let kind = std::fs::symlink_metadata(&path)?.file_type();
        if kind.is_dir() {
            set_writable(&path, is_writable)?;
        } else if kind.is_file() {
            set_mode(&path, mode)?;
        }
    }
    Ok(())
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    let permissions = Permissions::from_mode(mode);
    std::fs::set_permissions(path, permissions)
        .with_context(|| format!("change the mode of {}", path.display()))
}

/// Makes a directory and its parents that only this user can write, regardless of the umask: the daemon refuses others.
pub(crate) fn make_directory(path: &Path) -> std::io::Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_set_without_following_links() {
        let [directory, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let [inner, outer] = [directory.path().join("a/b"), other.path().join("c")];
        std::fs::create_dir(directory.path().join("a")).unwrap();
        std::fs::write(&inner, "").unwrap();
        std::fs::write(&outer, "").unwrap();
        std::os::unix::fs::symlink(&outer, directory.path().join("link")).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let before = mode(&outer);
        for (is_writable, expected) in [(false, 0o500), (true, 0o700)] {
            set_writable(directory.path(), is_writable).unwrap();
            assert_eq!([directory.path(), &inner].map(mode), [expected; 2]);
            assert_eq!(mode(&outer), before);
        }
        assert!(set_writable(&directory.path().join("none"), true).is_err());
    }
}
