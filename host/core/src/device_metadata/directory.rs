//! The directory of metadata files, with one directory for each driver. No other program writes there, so every file with a name of theirs
//! is this daemon's.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, DirEntry, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::OFlags;

use super::{FileName, MetadataFile};
use crate::cdi::FileAccess;
use nodedock_model::DriverName;

/// Handle to the directory. Calls block for as long as the file system takes: the directory of CDI files is in memory by default.
#[derive(Debug, Clone)]
pub struct MetadataDir {
    path: PathBuf,
    access: FileAccess,
    /// Drivers whose directories have the right mode and group, as of the last list of all files.
    accessible: Arc<Mutex<BTreeSet<DriverName>>>,
}

impl MetadataDir {
    /// The directories are created with their first files. Those enter them that may read CDI files: container runtimes, which mount the
    /// files.
    pub fn new(path: &Path, access: FileAccess) -> Self {
        Self {
            path: path.to_owned(),
            access,
            accessible: Arc::default(),
        }
    }

    fn path_of(&self, name: &FileName) -> PathBuf {
        self.path.join(name.below())
    }

    /// Returns whether the file exists with these bytes.
    pub(crate) fn is_current(&self, file: &MetadataFile) -> bool {
        // no error: a file that cannot be read is written again, which reports it
        has_bytes(&self.path_of(&file.name), &file.bytes).unwrap_or(false)
    }

    /// Writes a file in place, and not by a rename: containers have mounted the file itself, and read the new content there. Nothing is
    /// synced, since the file is derived from a record of the checkpoint.
    pub(crate) fn write(&self, file: &MetadataFile) -> io::Result<()> {
        let path = self.path_of(&file.name);
        let created = match create(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.accessible.lock().remove(&file.name.driver);
                let directory = self.path.join(file.name.driver.as_str());
                DirBuilder::new().recursive(true).create(directory)?;
                create(&path)
            }
            created => created,
        };
        let (written, is_new) = match created {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                remove_what_is_no_file(&path)?;
                (
                    open(&path, OpenOptions::new().write(true).create(true))?,
                    false,
                )
            }
            created => (created?, true),
        };
        self.give_access(&file.name.driver)?;
        // Independent of the umask: in containers, programs of any user read the files.
        written.set_permissions(Permissions::from_mode(0o644))?;
        written.write_all_at(&file.bytes, 0)?;
        if is_new {
            return Ok(());
        }
        written.set_len(file.bytes.len() as u64)
    }

    /// Gives the directories of a driver's files their mode and group, unless they were found to have them.
    fn give_access(&self, driver: &DriverName) -> io::Result<()> {
        if self.accessible.lock().contains(driver) {
            return Ok(());
        }
        self.access.apply_to_directory(&File::open(&self.path)?)?;
        let directory = self.path.join(driver.as_str());
        std::fs::set_permissions(directory, Permissions::from_mode(0o755))?;
        self.accessible.lock().insert(driver.clone());
        Ok(())
    }

    /// Removes a file; a missing one is no error.
    pub(crate) fn remove(&self, name: &FileName) -> io::Result<()> {
        let path = self.path_of(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
                std::fs::remove_dir_all(&path)
            }
            removed => removed,
        }
    }

    /// Returns the names of all files.
    pub(crate) fn list(&self) -> io::Result<Vec<FileName>> {
        // What others have changed since is found with the next file.
        self.accessible.lock().clear();
        let mut files = Vec::new();
        for entry in entries(&self.path)? {
            let name = entry.file_name();
            let driver = name.to_str().and_then(|name| DriverName::new(name).ok());
            let Some(driver) = driver else { continue };
            if !is_directory(&entry)? {
                continue;
            }
            let names = entries(&entry.path())?.into_iter();
            files.extend(
                names.filter_map(|entry| {
                    FileName::parse(driver.clone(), entry.file_name().to_str()?)
                }),
            );
        }
        Ok(files)
    }
}

/// The entries of a directory; none if it does not exist.
fn entries(path: &Path) -> io::Result<Vec<DirEntry>> {
    match std::fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        entries => entries?.collect(),
    }
}

fn is_directory(entry: &DirEntry) -> io::Result<bool> {
    match entry.file_type() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        kind => Ok(kind?.is_dir()),
    }
}

fn has_bytes(path: &Path, bytes: &[u8]) -> io::Result<bool> {
    let file = open(path, OpenOptions::new().read(true))?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() != bytes.len() as u64 {
        return Ok(false);
    }
    let mut found = vec![0; bytes.len()];
    file.read_exact_at(&mut found, 0)?;
    Ok(found == bytes)
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

/// Creates a file. What is there already is an error.
fn create(path: &Path) -> io::Result<File> {
    open(path, OpenOptions::new().write(true).create_new(true))
}

/// Does not follow a link, and does not wait at a pipe.
fn open(path: &Path, options: &OpenOptions) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).unwrap_or_default();
    let mut options = options.clone();
    options.mode(0o644).custom_flags(flags).open(path)
}
