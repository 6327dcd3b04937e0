//! The names of the drivers that are offered, kept over a restart: a line for each.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nodedock_model::DriverName;
use nodedock_model::limit::BRIDGE_DRIVERS_MAX;

/// Bytes of a file of ours: names of at most 63 bytes, and the ends of lines.
const FILE_BYTES_MAX: usize = BRIDGE_DRIVERS_MAX * 64;

#[derive(Debug, thiserror::Error)]
pub(super) enum MemoryError {
    #[error("read {path:?}, the names of the drivers that were offered")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path:?} is no list of drivers' names (line {line}): drivers are offered when they serve")]
    Content { path: PathBuf, line: usize },
    #[error("write {path:?}, the names of the drivers that are offered")]
    Write { path: PathBuf, source: io::Error },
}

/// None are remembered where there is no file.
pub(super) fn load(path: &Path) -> Result<Vec<DriverName>, MemoryError> {
    let read = |source| MemoryError::Read { path: path.to_owned(), source };
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        opened => opened.map_err(read)?,
    };
    let mut text = Vec::new();
    file.take(FILE_BYTES_MAX as u64 + 1).read_to_end(&mut text).map_err(read)?;
    let content = |line| MemoryError::Content { path: path.to_owned(), line };
    if text.len() > FILE_BYTES_MAX {
        return Err(content(BRIDGE_DRIVERS_MAX + 1));
    }
    let text = String::from_utf8(text).map_err(|_| content(1))?;
    let name = |(index, line)| DriverName::new(line).map_err(|_| content(index + 1));
    text.lines().enumerate().map(name).collect()
}

/// All of it or, after a crash, what was there before.
pub(super) fn save<'a>(
    path: &Path,
    names: impl IntoIterator<Item = &'a DriverName>,
) -> Result<(), MemoryError> {
    let write = |source| MemoryError::Write { path: path.to_owned(), source };
    let text: String = names.into_iter().take(BRIDGE_DRIVERS_MAX).map(|name| format!("{name}\n")).collect();
    replace(path, text.as_bytes()).map_err(write)
}

fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let temporary = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(text)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)?;
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(words: &[&str]) -> Vec<DriverName> {
        words.iter().map(|name| DriverName::new(name).unwrap()).collect()
    }

    #[test]
    fn names_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("offered-drivers");
        assert_eq!(load(&path).unwrap(), []);
        for expected in [names(&["a.example.com", "b"]), names(&["b"]), names(&[])] {
            save(&path, &expected).unwrap();
            assert_eq!(load(&path).unwrap(), expected);
        }
        let many: Vec<_> =
            (0..BRIDGE_DRIVERS_MAX + 5).map(|n| DriverName::new(format!("{n:0>63}")).unwrap()).collect();
        save(&path, &many).unwrap();
        assert_eq!(load(&path).unwrap(), many[..BRIDGE_DRIVERS_MAX]);
    }

    #[test]
    fn a_file_that_is_something_else_is_named_and_so_is_one_that_cannot_be_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("offered-drivers");
        for (content, line) in [("a\nNOT A NAME\n", "line 2"), ("\u{0}", "line 1"), ("a\n\nb", "line 2")] {
            std::fs::write(&path, content).unwrap();
            assert!(load(&path).unwrap_err().to_string().contains(line), "{content:?}");
        }
        std::fs::write(&path, b"\xff").unwrap();
        assert!(matches!(load(&path), Err(MemoryError::Content { .. })));
        std::fs::write(&path, "a\n".repeat(FILE_BYTES_MAX)).unwrap();
        assert!(matches!(load(&path), Err(MemoryError::Content { .. })));
        assert!(matches!(load(folder.path()), Err(MemoryError::Read { .. })));
        let nowhere = folder.path().join("no/offered-drivers");
        assert!(matches!(save(&nowhere, &[]), Err(MemoryError::Write { .. })));
    }
}
