//! Directories that have the mode that they were made with, regardless of the umask.

use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

/// Mode of the missing parents of a directory, which are not the daemon's own directories.
const PARENT_MODE: u32 = 0o755;

/// Creates a directory with a mode, and its missing parents with mode 0755. One that exists keeps its mode.
pub fn make(path: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(path) {
        Ok(()) => std::fs::set_permissions(path, Permissions::from_mode(mode)),
        // no error: what cannot be looked at is refused as what exists and is no directory
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let Some(parent) = path.parent().filter(|parent| *parent != Path::new("")) else {
                return Err(error);
            };
            make(parent, PARENT_MODE)?;
            make(path, mode)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn directory_and_parents_have_their_modes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/b/c");
        make(&path, 0o700).unwrap();
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o700, 0o755));
        make(&path, 0o777).unwrap();
        assert_eq!(mode(&path), 0o700, "it was there");
        make(&directory.path().join("open"), 0o777).unwrap();
        assert_eq!(
            mode(&directory.path().join("open")),
            0o777,
            "not less the umask"
        );
        std::fs::write(directory.path().join("file"), "").unwrap();
        for bad in ["file", "file/below"] {
            assert!(make(&directory.path().join(bad), 0o700).is_err(), "{bad}");
        }
        std::os::unix::fs::symlink("nowhere", directory.path().join("dangling")).unwrap();
        assert!(make(&directory.path().join("dangling"), 0o700).is_err());
    }
}
