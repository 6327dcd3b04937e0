//! Files that are replaced as a whole.

use std::fs::{File, OpenOptions};
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
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(content)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)?;
    File::open(directory_of(path))?.sync_all()
}

/// The directory that a file is in: of a name alone the current one.
pub fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_name_alone_is_in_the_current_directory() {
        for (path, directory) in [("a", "."), ("b/a", "b"), ("/a", "/"), ("./a", ".")] {
            assert_eq!(directory_of(Path::new(path)), Path::new(directory));
        }
    }

    #[test]
    fn a_file_is_replaced_and_a_link_in_the_temporary_s_place_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("theirs"), "theirs").unwrap();
        symlink(path("theirs"), path("state.json.new")).unwrap();
        for content in ["one", "two"] {
            replace(&path("state.json"), content.as_bytes()).unwrap();
            assert_eq!(std::fs::read_to_string(path("state.json")).unwrap(), content);
        }
        assert_eq!(std::fs::read_to_string(path("theirs")).unwrap(), "theirs");
        let mode = std::fs::metadata(path("state.json")).unwrap().permissions().mode();
        assert_eq!((mode & 0o777, path("state.json.new").exists()), (0o600, false));
        assert!(replace(&path("nowhere/state.json"), b"").is_err());
    }
}
