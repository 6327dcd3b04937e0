//! Files that are replaced as a whole, and what is at a path: nothing, something, or an error.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Replaces a file as a whole, with mode 0600: after a crash or a power loss it has the content before or this one. A file or link of the
/// temporary name, `NAME.new`, is removed and not followed.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let temporary = path.with_added_extension("new");
    match std::fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)?;
    file.write_all(content)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)?;
    File::open(directory_of(path))?.sync_all()
}

/// Returns the metadata of the file that a path leads to; `None` if nothing exists there. Unlike `Path::is_file`, a lookup that fails is an
/// error.
pub fn metadata(path: &Path) -> io::Result<Option<Metadata>> {
    found(std::fs::metadata(path))
}

/// Returns the metadata of the file at a path, without following a link; `None` if nothing exists there.
pub fn symlink_metadata(path: &Path) -> io::Result<Option<Metadata>> {
    found(std::fs::symlink_metadata(path))
}

/// Returns the metadata as `metadata` does; `None` also for a circular link, and for a path that this process may not search.
pub fn reachable(path: &Path) -> io::Result<Option<Metadata>> {
    match metadata(path) {
        Err(error)
            if error.kind() == io::ErrorKind::PermissionDenied
                || error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) =>
        {
            Ok(None)
        }
        found => found,
    }
}

/// Returns whether a path leads to a regular file.
pub fn is_file(path: &Path) -> io::Result<bool> {
    Ok(metadata(path)?.is_some_and(|found| found.is_file()))
}

fn found(found: io::Result<Metadata>) -> io::Result<Option<Metadata>> {
    match found {
        Ok(found) => Ok(Some(found)),
        // No file has a name that is too long.
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound
            | io::ErrorKind::NotADirectory
            | io::ErrorKind::InvalidFilename => Ok(None),
            _ => Err(error),
        },
    }
}

/// The directory that a file is in: of a name alone the current one.
pub fn directory_of(path: &Path) -> &Path {
    path.parent()
        .filter(|parent| *parent != Path::new(""))
        .unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn missing_path_differs_from_failed_lookup() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("file"), "").unwrap();
        symlink("loop", path("loop")).unwrap();
        symlink("nowhere", path("dangling")).unwrap();
        assert!(is_file(&path("file")).unwrap() && !is_file(directory.path()).unwrap());
        for nothing in ["none", "none/below", "file/below", "dangling"] {
            assert!(metadata(&path(nothing)).unwrap().is_none(), "{nothing}");
            assert!(!is_file(&path(nothing)).unwrap(), "{nothing}");
        }
        assert!(symlink_metadata(&path("dangling")).unwrap().is_some());
        let (failed, unreachable) = (metadata(&path("loop")), reachable(&path("loop")));
        assert!(
            failed.is_err() && is_file(&path("loop")).is_err(),
            "{failed:?}"
        );
        assert!(unreachable.unwrap().is_none());
    }

    #[test]
    fn bare_name_is_in_current_directory() {
        for (path, directory) in [("a", "."), ("b/a", "b"), ("/a", "/"), ("./a", ".")] {
            assert_eq!(directory_of(Path::new(path)), Path::new(directory));
        }
    }

    #[test]
    fn replaced_file_follows_no_temporary_link() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("theirs"), "theirs").unwrap();
        symlink(path("theirs"), path("state.json.new")).unwrap();
        for content in ["one", "two"] {
            replace(&path("state.json"), content.as_bytes()).unwrap();
            assert_eq!(
                std::fs::read_to_string(path("state.json")).unwrap(),
                content
            );
        }
        assert_eq!(std::fs::read_to_string(path("theirs")).unwrap(), "theirs");
        let mode = std::fs::metadata(path("state.json"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(
            (mode & 0o777, path("state.json.new").exists()),
            (0o600, false)
        );
        assert!(replace(&path("nowhere/state.json"), b"").is_err());
    }
}
