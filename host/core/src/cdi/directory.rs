//! The directory that container runtimes read. Requests to change it are carried out one batch at a time; callers read it themselves.
//! Changes only files that begin with this daemon's line.

use std::fs::{DirEntry, Metadata};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::access::FileAccess;
use super::catalog::{Catalog, Collision, Given, Moment, Touched};
use super::identity::{Identity, OPENING};
use super::render::{SpecFile, mark_of};
use super::stamp::{Known, Stamp, is_spec_name, open_plain};
use nodedock_base::batches::Batches;
use nodedock_base::directories;

mod writer;

use writer::{BATCH_FILES_MAX, Job};

/// Bytes of a file that are read: more than the bounds on edits allow for a claim.
const FILE_BYTES_MAX: u64 = 64 << 20;
const TEMPORARY_PREFIX: &str = ".nodedock-";
/// Suffix of temporary files: runtimes read only `*.json` and `*.yaml`.
const TEMPORARY_SUFFIX: &str = ".tmp";

/// Why files were not written or removed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CdiError {
    #[error("{doing} {path}")]
    Io {
        doing: &'static str,
        path: String,
        source: Arc<io::Error>,
    },
    #[error("{0:?} is not the name of a CDI file of this daemon")]
    Name(String),
    #[error(
        "{0} is in the way: it does not begin with this daemon's line, so it belongs to another program"
    )]
    Foreign(String),
    #[error(
        "the daemon cannot give CDI files the configured mode and group (cdiFiles of the config): it needs to be a member of the group, by SupplementaryGroups= of its unit or supplementalGroups of its pod, or the capability CHOWN"
    )]
    Access(#[source] Arc<io::Error>),
    #[error("the writer of the CDI directory has ended")]
    Closed,
}

impl CdiError {
    fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.display().to_string();
        move |source| Self::Io {
            doing,
            path,
            source: Arc::new(source),
        }
    }
}

/// A file of this daemon in the directory.
#[derive(Debug, Clone, PartialEq)]
pub struct OurFile {
    pub name: String,
    /// `None`: the first line is this daemon's and is not readable by this release.
    pub identity: Option<Identity>,
    /// The rest after the first line.
    pub spec: String,
}

/// Handle to the directory. Clones write to the same directory.
#[derive(Clone)]
pub struct CdiDir {
    directory: Batches<Directory>,
}

/// State that the handles share.
struct Directory {
    path: PathBuf,
    /// Prefix of its temporary files.
    temporary_prefix: String,
    hasher: RandomState,
    catalog: Catalog,
    access: FileAccess,
}

impl CdiDir {
    /// Opens the directory; creates it (mode 0755) if it does not exist, and removes temporary files of a crash.
    /// `directories`: those that runtimes read, by priority, as in the runtimes' configs. `daemon` identifies this daemon across
    /// restarts among others that write to the same directory.
    pub fn open(path: &Path, directories: &[PathBuf], daemon: &str) -> Result<Self, CdiError> {
        Self::open_with(path, directories, daemon, FileAccess::default())
    }

    /// Opens the directory as `open` does. Its files, those that are there too, get this mode and group.
    pub fn open_with(
        path: &Path,
        directories: &[PathBuf],
        daemon: &str,
        access: FileAccess,
    ) -> Result<Self, CdiError> {
        make_directory(path)?;
        let temporary_prefix = format!("{TEMPORARY_PREFIX}{}-", tag(daemon));
        sweep(path, &temporary_prefix)?;
        let directory = Directory {
            path: path.to_owned(),
            temporary_prefix,
            hasher: RandomState::new(),
            catalog: Catalog::new(path, directories, mark_of(daemon)),
            access,
        };
        directory.apply_access()?;
        Ok(Self {
            directory: Batches::new(directory, BATCH_FILES_MAX),
        })
    }

    fn directory(&self) -> &Directory {
        self.directory.server()
    }

    /// Writes the files, each atomically for readers, and without a sync. An existing file with the same bytes stays unchanged. After an
    /// error some of them may have been written. Dropping the future does not undo the writes.
    pub async fn write(&self, files: Vec<SpecFile>) -> Result<(), CdiError> {
        if files.is_empty() {
            return Ok(());
        }
        let files = files
            .iter()
            .map(|file| self.directory().marked(file))
            .collect();
        self.request(files, Vec::new()).await
    }

    /// Removes files of this daemon by name; a missing one is no error.
    pub async fn remove(&self, names: Vec<String>) -> Result<(), CdiError> {
        if names.is_empty() {
            return Ok(());
        }
        self.request(Vec::new(), names).await
    }

    async fn request(&self, write: Vec<SpecFile>, remove: Vec<String>) -> Result<(), CdiError> {
        self.directory
            .request(Job { write, remove })
            .await
            .unwrap_or(Err(CdiError::Closed))
    }

    /// Returns whether the file exists with these bytes. Costs one `stat` if it is unchanged since the last check, a read
    /// otherwise and shortly after its write.
    pub fn is_current(&self, file: &SpecFile) -> bool {
        self.directory().is_current(&self.directory().marked(file))
    }

    /// Returns the files of this daemon, by name. Blocks: reads all of them.
    pub fn list_ours(&self) -> Result<Vec<OurFile>, CdiError> {
        let mut ours = Vec::new();
        for entry in entries(&self.directory().path)? {
            let Some(name) = entry
                .file_name()
                .into_string()
                .ok()
                .filter(|name| is_spec_name(name))
            else {
                continue;
            };
            match self.directory().read_ours(&entry.path()) {
                Ok(text) => ours.extend(text.map(|text| OurFile::new(name, &text))),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(CdiError::io("read", &entry.path())(error)),
            }
        }
        ours.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(ours)
    }

    /// Returns whether the file is as this daemon wrote or removed it. Costs one `stat` if it is unchanged since a check of some time after
    /// the last change, a read otherwise.
    pub fn is_as_left(&self, name: &str) -> bool {
        let path = self.directory().path.join(name);
        let known = self.directory().catalog.known.lock().get(name).copied();
        match (std::fs::symlink_metadata(&path), known) {
            (Ok(metadata), Some(known)) => {
                let checked = self.directory().checked(name, &metadata, known);
                if let (Some(checked), Some(entry)) =
                    (checked, self.directory().catalog.known.lock().get_mut(name))
                {
                    *entry = checked;
                }
                checked.is_some()
            }
            (Err(error), None) if error.kind() == io::ErrorKind::NotFound => {
                !self.directory().catalog.has(name)
            }
            _ => false,
        }
    }

    /// Updates the devices of other programs' files, which `collisions` and `missing` use. Costs a `stat` of each directory, and
    /// reads only new and changed files.
    pub async fn survey(&self) -> Result<(), CdiError> {
        if self.directory().catalog.is_fresh() {
            return Ok(());
        }
        let (dir, requested) = (self.clone(), self.directory().catalog.now());
        tokio::task::spawn_blocking(move || dir.look(requested, false))
            .await
            .unwrap_or(Err(CdiError::Closed))
    }

    /// The same, with a `stat` of each file of other programs. Blocks.
    pub fn survey_all(&self) -> Result<(), CdiError> {
        self.look(self.directory().catalog.now(), true)
    }

    fn look(&self, requested: Moment, all: bool) -> Result<(), CdiError> {
        let read = self.directory().catalog.refresh(requested, all);
        read.map_err(|(directory, error)| CdiError::io("read the directory", &directory)(error))
    }

    /// Returns other programs' files with a device of the same qualified name: runtimes refuse a device of two files in one directory,
    /// and use the one of a later directory. By the last `survey`, the first file of each device.
    pub fn collisions(&self, qualified: &[String]) -> Vec<Collision> {
        self.directory().catalog.collisions(qualified)
    }

    /// Returns the names that are in no file of other programs, by the last `survey`.
    pub fn missing(&self, qualified: &[String]) -> Vec<String> {
        self.directory().catalog.missing(qualified)
    }

    /// Returns what a CDI device of other programs gives to a container, by the last `survey`.
    pub fn given(&self, qualified: &str) -> Vec<Given> {
        self.directory().catalog.given(qualified)
    }

    /// Reads changed files again.
    pub async fn touched(&self, names: Vec<String>) -> Touched {
        let dir = self.clone();
        // no error: the daemon ends
        tokio::task::spawn_blocking(move || dir.directory().catalog.touched(&names))
            .await
            .unwrap_or_default()
    }

    /// Returns the names of this daemon's files that this process neither wrote nor compared: copies, or files of an earlier
    /// run. By the last `survey`.
    pub fn strays(&self) -> Vec<String> {
        let (ours, known) = (
            self.directory().catalog.ours(),
            self.directory().catalog.known.lock(),
        );
        ours.into_iter()
            .filter(|name| !known.contains_key(name))
            .collect()
    }

    /// Returns a file of this daemon by name. `None`: it does not exist, or belongs to another program.
    pub async fn read(&self, name: &str) -> Result<Option<OurFile>, CdiError> {
        let (dir, name) = (self.clone(), name.to_owned());
        let read = tokio::task::spawn_blocking(move || {
            let directory = dir.directory();
            let path = directory.path.join(&name);
            match directory.read_ours(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(CdiError::io("read", &path)(error)),
                Ok(text) => Ok(text.map(|text| OurFile::new(name, &text))),
            }
        });
        read.await.unwrap_or(Err(CdiError::Closed))
    }
}

impl OurFile {
    fn new(name: String, text: &str) -> Self {
        let (first, rest) = text.split_once('\n').unwrap_or((text, ""));
        Self {
            name,
            identity: Identity::parse(first),
            spec: rest.to_owned(),
        }
    }
}

impl Directory {
    /// Returns the file with this daemon's mark instead of the general one.
    fn marked(&self, file: &SpecFile) -> SpecFile {
        let rest = file
            .bytes
            .strip_prefix(OPENING.as_bytes())
            .unwrap_or(&file.bytes);
        SpecFile {
            name: file.name.clone(),
            bytes: [self.catalog.mark.as_bytes(), rest].concat(),
        }
    }

    /// Reads a file of this daemon. `None`: it belongs to another program, or is not a plain file.
    fn read_ours(&self, path: &Path) -> io::Result<Option<String>> {
        let Some(file) = open_plain(path)? else {
            return Ok(None);
        };
        let mut file = file.take(FILE_BYTES_MAX);
        let mut bytes = Vec::new();
        // Another program's file may be large, and its beginning suffices.
        file.by_ref()
            .take(self.catalog.mark.len() as u64)
            .read_to_end(&mut bytes)?;
        if !self.catalog.is_ours(&bytes) {
            return Ok(None);
        }
        file.read_to_end(&mut bytes)?;
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
    }

    fn is_current(&self, file: &SpecFile) -> bool {
        // no error: a file that cannot be looked at is written again, which reports it
        let Ok(metadata) = std::fs::symlink_metadata(self.path.join(&file.name)) else {
            return false;
        };
        self.is_current_at(file, &metadata)
    }

    /// The same with the metadata of what has the file's name.
    fn is_current_at(&self, file: &SpecFile, metadata: &Metadata) -> bool {
        let hash = self.hasher.hash_one(&file.bytes);
        let known = self.catalog.known.lock().get(&file.name).copied();
        match known {
            Some(known) if known.settled && known.stamp == Stamp::of(metadata) => {
                known.hash == hash
            }
            _ if metadata.size() != file.bytes.len() as u64 => false,
            _ => {
                let known = Known {
                    hash,
                    stamp: Stamp::of(metadata),
                    settled: false,
                };
                let checked = self.checked(&file.name, metadata, known);
                checked.is_some_and(|checked| {
                    self.catalog.known.lock().insert(file.name.clone(), checked);
                    true
                })
            }
        }
    }

    /// Returns what is known if the file is still that: by its metadata, or by its content if a change may not show in them.
    fn checked(&self, name: &str, metadata: &Metadata, known: Known) -> Option<Known> {
        if known.settled || known.stamp != Stamp::of(metadata) {
            return (known.stamp == Stamp::of(metadata)).then_some(known);
        }
        let settled = known.stamp.is_settled();
        // no error: a file that cannot be read is written again, which reports it
        let bytes = std::fs::read(self.path.join(name))
            .ok()
            .filter(|_| metadata.is_file())?;
        (self.hasher.hash_one(&bytes) == known.hash).then_some(Known { settled, ..known })
    }
}

impl Directory {
    /// Gives this daemon's files the configured mode and group, and a temporary one, so that a group that the daemon cannot give is an error
    /// at the start.
    fn apply_access(&self) -> Result<(), CdiError> {
        let probe = self
            .write_temporary(b"")
            .map_err(CdiError::io("write to", &self.path))?;
        self.access.apply(probe.as_file()).map_err(access_refused)?;
        for entry in entries(&self.path)? {
            let path = entry.path();
            if !entry.file_name().to_str().is_some_and(is_spec_name) {
                continue;
            }
            match self
                .read_ours(&path)
                .and_then(|ours| ours.map_or(Ok(None), |_| open_plain(&path)))
            {
                Ok(file) => file
                    .map_or(Ok(()), |file| self.access.apply(&file))
                    .map_err(access_refused)?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(CdiError::io("read", &path)(error)),
            }
        }
        Ok(())
    }
}

fn access_refused(error: io::Error) -> CdiError {
    CdiError::Access(Arc::new(error))
}

/// Returns the part of file names that distinguishes this daemon from others that write to the same directory.
pub fn tag(daemon: &str) -> String {
    hex::encode(&Sha256::digest(daemon)[..4])
}

fn make_directory(path: &Path) -> Result<(), CdiError> {
    directories::make(path, 0o755).map_err(CdiError::io("make the directory", path))
}

fn sweep(path: &Path, prefix: &str) -> Result<(), CdiError> {
    for entry in entries(path)? {
        let name = entry.file_name();
        let name = name.as_encoded_bytes();
        if name.starts_with(prefix.as_bytes()) && name.ends_with(TEMPORARY_SUFFIX.as_bytes()) {
            // It does no harm.
            std::fs::remove_file(entry.path()).ok();
        }
    }
    Ok(())
}

fn entries(path: &Path) -> Result<Vec<DirEntry>, CdiError> {
    let entries = std::fs::read_dir(path).and_then(Iterator::collect);
    entries.map_err(CdiError::io("read the directory", path))
}
