//! Changes the directory. For the requests that wait together, it writes all temporary files, then renames and removes in the order of the
//! requests. Nothing is synced: every file is derived from a record of the checkpoint, and a start renders files again that a power loss
//! damaged.

use std::fs::{Metadata, Permissions};
use std::hash::BuildHasher;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use tempfile::{NamedTempFile, TempPath};

use super::{
    CdiError, Directory, Known, Stamp, TEMPORARY_SUFFIX, is_spec_name, make_directory, open_plain,
};
use crate::cdi::render::SpecFile;
use nodedock_base::batches::Serve;
use nodedock_base::failpoint::{self, Point};
use nodedock_base::file;

/// Files of one batch: bounds the time that the first one waits for the others.
pub(super) const BATCH_FILES_MAX: usize = 256;

/// A request: files to write, or names of files to remove.
pub(super) struct Job {
    pub(super) write: Vec<SpecFile>,
    pub(super) remove: Vec<String>,
}

/// A written temporary file, which is removed when it is dropped.
struct Staged {
    name: String,
    hash: u64,
    file: TempPath,
}

impl Serve for Directory {
    type Request = Job;
    type Outcome = Result<(), CdiError>;

    fn serve(&self, batch: Vec<Job>) -> Vec<Self::Outcome> {
        self.catalog.begin_change();
        let staged: Vec<Result<Vec<_>, _>> = batch
            .iter()
            .map(|job| {
                job.write
                    .iter()
                    .filter_map(|file| self.stage(file).transpose())
                    .collect()
            })
            .collect();
        let outcomes = batch
            .iter()
            .zip(staged)
            .map(|(job, staged)| {
                staged
                    .and_then(|files| self.move_into_place(files))
                    .and_then(|()| self.remove_all(&job.remove))
            })
            .collect();
        self.catalog.end_change();
        outcomes
    }

    fn weight(job: &Job) -> usize {
        job.write.len() + job.remove.len()
    }
}

impl Directory {
    /// Writes a temporary file. `None`: the directory has these bytes already.
    fn stage(&self, file: &SpecFile) -> Result<Option<Staged>, CdiError> {
        check_name(&file.name)?;
        if let Some(found) = self.look_at(&file.name)? {
            if self.is_current_at(file, &found) {
                return Ok(None);
            }
            self.refuse_foreign(&file.name, &found)?;
        }
        let written = match self.write_temporary(&file.bytes) {
            // The directory was removed while the daemon was running.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make_directory(&self.path)?;
                self.write_temporary(&file.bytes)
            }
            written => written,
        };
        let temporary = written.map_err(CdiError::io("write", &self.path.join(&file.name)))?;
        // Independent of the umask.
        self.access
            .apply(temporary.as_file())
            .map_err(|error| CdiError::Access(Arc::new(error)))?;
        let temporary = temporary.into_temp_path();
        failpoint::pass(Point::CdiStaged);
        let hash = self.hasher.hash_one(&file.bytes);
        Ok(Some(Staged {
            name: file.name.clone(),
            hash,
            file: temporary,
        }))
    }

    /// Those can read it that may read CDI files, or this user alone, if the file gets another group.
    pub(super) fn write_temporary(&self, bytes: &[u8]) -> io::Result<NamedTempFile> {
        let mut builder = tempfile::Builder::new();
        builder
            .prefix(&self.temporary_prefix)
            .suffix(TEMPORARY_SUFFIX)
            .permissions(Permissions::from_mode(self.access.initial_mode()));
        let mut file = builder.tempfile_in(&self.path)?;
        file.write_all(bytes)?;
        Ok(file)
    }

    /// Returns the metadata of what has a file's name. `None`: there is nothing.
    fn look_at(&self, name: &str) -> Result<Option<Metadata>, CdiError> {
        let path = self.path.join(name);
        file::symlink_metadata(&path).map_err(CdiError::io("look at", &path))
    }

    /// Refuses to change a file of another program. A known file needs no read.
    fn refuse_foreign(&self, name: &str, found: &Metadata) -> Result<(), CdiError> {
        let path = self.path.join(name);
        let stamp = Stamp::of(found);
        if self
            .catalog
            .known
            .lock()
            .get(name)
            .is_some_and(|known| known.stamp == stamp)
        {
            return Ok(());
        }
        if self
            .is_ours_or_empty(&path)
            .map_err(CdiError::io("read", &path))?
        {
            return Ok(());
        }
        Err(CdiError::Foreign(path.display().to_string()))
    }

    /// Returns whether the file begins with this daemon's mark. An empty file counts as well: a power loss may have emptied it.
    fn is_ours_or_empty(&self, path: &Path) -> io::Result<bool> {
        let Some(file) = open_plain(path)? else {
            return Ok(false);
        };
        Ok(file.metadata()?.len() == 0 || self.read_ours(path)?.is_some())
    }

    fn move_into_place(&self, files: Vec<Staged>) -> Result<(), CdiError> {
        for Staged { name, hash, file } in files {
            let path = self.path.join(&name);
            file.persist(&path)
                .map_err(|refused| CdiError::io("put into place", &path)(refused.error))?;
            failpoint::pass(Point::CdiRenamed);
            match std::fs::symlink_metadata(&path) {
                Ok(metadata) => {
                    let known = Known {
                        hash,
                        stamp: Stamp::of(&metadata),
                        settled: false,
                    };
                    self.catalog.known.lock().insert(name, known);
                }
                // Then the next check reads the file.
                Err(_) => drop(self.catalog.known.lock().remove(&name)),
            }
        }
        Ok(())
    }

    /// A file that cannot be removed does not prevent the removal of others. A file of another program is reported last.
    fn remove_all(&self, names: &[String]) -> Result<(), CdiError> {
        let mut failed: Vec<_> = names
            .iter()
            .filter_map(|name| self.remove(name).err())
            .collect();
        failed.sort_by_key(|error| matches!(error, CdiError::Foreign(_)));
        failed.into_iter().next().map_or(Ok(()), Err)
    }

    fn remove(&self, name: &str) -> Result<(), CdiError> {
        check_name(name)?;
        if let Some(found) = self.look_at(name)? {
            self.refuse_foreign(name, &found)?;
        }
        self.catalog.known.lock().remove(name);
        let path = self.path.join(name);
        let removed = std::fs::remove_file(&path);
        failpoint::pass(Point::CdiRemoved);
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(CdiError::io("remove", &path)(error))
            }
            _ => Ok(()),
        }
    }
}

/// Fails unless it is the plain name of a spec.
fn check_name(name: &str) -> Result<(), CdiError> {
    if is_spec_name(name) && !name.starts_with('.') && !name.contains(['/', '\0']) {
        return Ok(());
    }
    Err(CdiError::Name(name.to_owned()))
}
