//! The directory of metadata files. No other program writes there, so every file in it is this daemon's.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::{MetadataFile, directory_of};
use crate::cdi::FileAccess;
use nodedock_model::{DriverName, Uid};

/// Handle to the directory. Calls block for as long as the file system takes: the directory of CDI files is in memory by default.
#[derive(Debug, Clone)]
pub struct MetadataDir {
    path: PathBuf,
    access: FileAccess,
}

impl MetadataDir {
    /// The directory is created with its first file. Those enter it that may read CDI files: container runtimes, which mount its files.
    pub fn new(path: &Path, access: FileAccess) -> Self {
        Self {
            path: path.to_owned(),
            access,
        }
    }

    /// Returns whether the file exists with these bytes.
    pub(crate) fn is_current(&self, file: &MetadataFile) -> bool {
        let path = self.path.join(&file.directory).join(&file.name);
        // no error: a file that cannot be read is written again, which reports it
        path.symlink_metadata()
            .is_ok_and(|found| found.is_file() && found.len() == file.bytes.len() as u64)
            && std::fs::read(&path).is_ok_and(|bytes| bytes == file.bytes)
    }

    /// Writes a file in place, and not by a rename: containers have mounted the file itself, and read the new content there. Nothing is
    /// synced, since the file is derived from a record of the checkpoint.
    pub(crate) fn write(&self, file: &MetadataFile) -> io::Result<()> {
        let directory = self.path.join(&file.directory);
        let path = directory.join(&file.name);
        remove_what_is_no_file(&path)?;
        let in_place = match open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                DirBuilder::new().recursive(true).create(&directory)?;
                open(&path)?
            }
            opened => opened?,
        };
        // Independent of the umask: in containers, programs of any user read the files.
        self.access.apply_to_directory(&File::open(&self.path)?)?;
        std::fs::set_permissions(&directory, Permissions::from_mode(0o755))?;
        in_place.set_permissions(Permissions::from_mode(0o644))?;
        in_place.write_all_at(&file.bytes, 0)?;
        in_place.set_len(file.bytes.len() as u64)
    }

    /// Removes the files of one driver for a claim; missing ones are no error.
    pub(crate) fn remove(&self, name: &str) -> io::Result<()> {
        match std::fs::remove_dir_all(self.path.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Returns the claims and drivers that have files.
    pub(crate) fn list(&self) -> io::Result<Vec<(DriverName, Uid)>> {
        let entries = match std::fs::read_dir(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let names = entries
            .map(|entry| Ok(entry?.file_name()))
            .collect::<io::Result<Vec<_>>>()?;
        Ok(names
            .iter()
            .filter_map(|name| directory_of(name.to_str()?))
            .collect())
    }
}

/// Removes what an operator or another program has put in the place of a file: a link, a pipe, a directory.
fn remove_what_is_no_file(path: &Path) -> io::Result<()> {
    match path.symlink_metadata() {
        Ok(found) if found.is_dir() => std::fs::remove_dir_all(path),
        Ok(found) if !found.is_file() => std::fs::remove_file(path),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Does not follow a link, and does not wait at a pipe.
fn open(path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).unwrap_or_default();
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o644)
        .custom_flags(flags)
        .open(path)
}
