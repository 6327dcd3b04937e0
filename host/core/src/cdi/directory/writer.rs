//! The thread that changes the directory: takes the waiting requests, writes all temporary files, then renames and removes in the order
//! of the requests, then responds.

use std::fs::{File, OpenOptions};
use std::hash::BuildHasher;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use super::{
    CdiError, Directory, Durability, Known, Stamp, TEMPORARY_SUFFIX, is_spec_name, make_directory, open_plain,
};
use crate::cdi::render::SpecFile;
use nodedock_base::failpoint::{self, Point};

/// Files of one batch: bounds the time that the first one waits for the others.
const TURN_FILES_MAX: usize = 256;

pub(super) enum Job {
    Write { files: Vec<SpecFile>, done: oneshot::Sender<Result<(), CdiError>> },
    Remove { names: Vec<String>, done: oneshot::Sender<Result<(), CdiError>> },
}

impl Job {
    fn len(&self) -> usize {
        match self {
            Self::Write { files, .. } => files.len(),
            Self::Remove { names, .. } => names.len(),
        }
    }
}

/// A job with written temporary files.
enum Staged {
    Write { files: Vec<(String, u64, PathBuf)>, done: oneshot::Sender<Result<(), CdiError>> },
    Remove { names: Vec<String>, done: oneshot::Sender<Result<(), CdiError>> },
    Failed { error: CdiError, done: oneshot::Sender<Result<(), CdiError>> },
}

/// A job that lacks only the sync of the directory.
struct Finished {
    outcome: Result<(), CdiError>,
    /// The job writes files, it does not remove them.
    wrote: bool,
    done: oneshot::Sender<Result<(), CdiError>>,
}

pub(super) struct Writer {
    directory: Arc<Directory>,
    durability: Durability,
    temporaries: u64,
}

impl Writer {
    pub(super) fn new(directory: Arc<Directory>, durability: Durability) -> Self {
        Self { directory, durability, temporaries: 0 }
    }

    /// Runs until every handle is dropped.
    pub(super) fn run(mut self, mut jobs: mpsc::Receiver<Job>) {
        while let Some(first) = jobs.blocking_recv() {
            let mut files = first.len();
            let mut turn = vec![first];
            while files < TURN_FILES_MAX {
                let Ok(next) = jobs.try_recv() else { break };
                files += next.len();
                turn.push(next);
            }
            self.serve(turn);
        }
    }

    fn serve(&mut self, turn: Vec<Job>) {
        self.directory.catalog.begin_turn();
        let staged: Vec<_> = turn.into_iter().map(|job| self.stage(job)).collect();
        let finished: Vec<_> = staged.into_iter().map(|staged| self.finish(staged)).collect();
        let synced = self.sync_directory();
        // If the directory was removed, every file is gone.
        let emptied = if synced.as_ref().is_err_and(CdiError::is_gone) { Ok(()) } else { synced.clone() };
        failpoint::pass(Point::CdiSynced);
        self.directory.with_ours(|ours| self.directory.catalog.end_turn(ours));
        for Finished { outcome, wrote, done } in finished {
            let durable = if wrote { &synced } else { &emptied };
            // A cancelled caller gets no response; its files stay.
            done.send(outcome.and_then(|()| durable.clone())).ok();
        }
    }

    fn stage(&mut self, job: Job) -> Staged {
        match job {
            Job::Remove { names, done } => Staged::Remove { names, done },
            Job::Write { files, done } => {
                let mut staged = Vec::with_capacity(files.len());
                for file in &files {
                    match self.stage_file(file) {
                        Ok(entry) => staged.extend(entry),
                        Err(error) => {
                            discard(staged);
                            return Staged::Failed { error, done };
                        }
                    }
                }
                Staged::Write { files: staged, done }
            }
        }
    }

    /// Writes a temporary file. `None`: the directory has these bytes already.
    fn stage_file(&mut self, file: &SpecFile) -> Result<Option<(String, u64, PathBuf)>, CdiError> {
        check_name(&file.name)?;
        if self.directory.is_current(file) {
            return Ok(None);
        }
        self.refuse_foreign(&file.name)?;
        self.temporaries += 1;
        let pid = std::process::id();
        let name = format!("{}{pid}-{}{TEMPORARY_SUFFIX}", self.directory.temporary_prefix, self.temporaries);
        let path = self.directory.path.join(name);
        let written = match write_file(&path, &file.bytes, self.durability) {
            // The directory was removed while the daemon was running.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make_directory(&self.directory.path)?;
                write_file(&path, &file.bytes, self.durability)
            }
            written => written,
        };
        if let Err(error) = written {
            std::fs::remove_file(&path).ok();
            return Err(CdiError::io("write", &path)(error));
        }
        failpoint::pass(Point::CdiStaged);
        Ok(Some((file.name.clone(), self.directory.hasher.hash_one(&file.bytes), path)))
    }

    /// Refuses to change a file of another program. A known file needs no read.
    fn refuse_foreign(&self, name: &str) -> Result<(), CdiError> {
        let path = self.directory.path.join(name);
        let metadata = match std::fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            metadata => metadata.map_err(CdiError::io("look at", &path))?,
        };
        let stamp = Stamp::of(&metadata);
        if self.directory.known().get(name).is_some_and(|known| known.stamp == stamp) {
            return Ok(());
        }
        if self.is_ours_or_empty(&path).map_err(CdiError::io("read", &path))? {
            return Ok(());
        }
        Err(CdiError::Foreign(path.display().to_string()))
    }

    /// Returns whether the file begins with this daemon's mark. An empty file counts as well: a power loss may have emptied it.
    fn is_ours_or_empty(&self, path: &Path) -> io::Result<bool> {
        let Some(file) = open_plain(path)? else { return Ok(false) };
        Ok(file.metadata()?.len() == 0 || self.directory.read_ours(path)?.is_some())
    }

    fn finish(&mut self, staged: Staged) -> Finished {
        let (outcome, wrote, done) = match staged {
            Staged::Failed { error, done } => (Err(error), true, done),
            Staged::Write { files, done } => (self.move_into_place(files), true, done),
            Staged::Remove { names, done } => (self.remove_all(&names), false, done),
        };
        Finished { outcome, wrote, done }
    }

    fn move_into_place(&self, files: Vec<(String, u64, PathBuf)>) -> Result<(), CdiError> {
        let mut files = files.into_iter();
        while let Some((name, hash, temporary)) = files.next() {
            let path = self.directory.path.join(&name);
            if let Err(error) = std::fs::rename(&temporary, &path) {
                discard(std::iter::once((name, hash, temporary)).chain(files));
                return Err(CdiError::io("put into place", &path)(error));
            }
            failpoint::pass(Point::CdiRenamed);
            match std::fs::symlink_metadata(&path) {
                Ok(metadata) => {
                    self.directory
                        .known()
                        .insert(name, Known { hash, stamp: Stamp::of(&metadata), settled: false });
                }
                // Then the next check reads the file.
                Err(_) => drop(self.directory.known().remove(&name)),
            }
        }
        Ok(())
    }

    /// A file that cannot be removed does not prevent the removal of others. A file of another program is reported last.
    fn remove_all(&self, names: &[String]) -> Result<(), CdiError> {
        let mut failed: Vec<_> = names.iter().filter_map(|name| self.remove(name).err()).collect();
        failed.sort_by_key(|error| matches!(error, CdiError::Foreign(_)));
        failed.into_iter().next().map_or(Ok(()), Err)
    }

    fn remove(&self, name: &str) -> Result<(), CdiError> {
        check_name(name)?;
        self.refuse_foreign(name)?;
        self.directory.known().remove(name);
        let path = self.directory.path.join(name);
        let removed = std::fs::remove_file(&path);
        failpoint::pass(Point::CdiRemoved);
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(CdiError::io("remove", &path)(error))
            }
            _ => Ok(()),
        }
    }

    fn sync_directory(&self) -> Result<(), CdiError> {
        if self.durability == Durability::Rendered {
            return Ok(());
        }
        let path = &self.directory.path;
        File::open(path).and_then(|directory| directory.sync_all()).map_err(CdiError::io("sync", path))
    }
}

/// Removes temporary files of failed jobs.
fn discard(files: impl IntoIterator<Item = (String, u64, PathBuf)>) {
    for (_, _, path) in files {
        // The next start removes the rest.
        std::fs::remove_file(path).ok();
    }
}

fn write_file(path: &Path, bytes: &[u8], durability: Durability) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(path)?;
    file.write_all(bytes)?;
    if durability == Durability::Synced { file.sync_data() } else { Ok(()) }
}

/// Returns the plain name of a spec in the directory.
fn check_name(name: &str) -> Result<(), CdiError> {
    if is_spec_name(name) && !name.starts_with('.') && !name.contains(['/', '\0']) {
        return Ok(());
    }
    Err(CdiError::Name(name.to_owned()))
}
