//! The file: creates it, opens it, and sets aside a file that cannot be read. Two daemons that start concurrently exclude each other by
//! a lock on the directory, so that neither sets aside a file that the other has just created.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use redb::{Builder, Database, DatabaseError, StorageError};
use rustix::fs::{Advice, FlockOperation, RenameFlags};

use super::buffered::BufferedFile;
use super::format::{self, Dump, FORMAT_VERSION, LoadError};
use super::upgrade::{UPGRADES, Upgrades};
use super::writer::{self, Opener};
use super::{OpenError, SetAside};

/// Memory for pages. The daemon reads the whole file only at start; afterwards only the pages on the way to a record, which
/// the kernel caches as well.
const CACHE_BYTES: usize = 4 << 20;
/// Attempts to name a file that is set aside: more than one only within the same second.
const NAMES_MAX: u32 = 1000;

impl LoadError {
    /// Returns the reason to set the file aside: another program wrote it, or it is damaged.
    fn damage(&self) -> Option<String> {
        match self {
            Self::Foreign(reason) => Some(reason.clone()),
            Self::Storage(redb::Error::Io(error)) => is_damage(error).then(|| error.to_string()),
            Self::Storage(redb::Error::DatabaseAlreadyOpen) | Self::Newer { .. } | Self::Older { .. } => None,
            Self::Storage(error) => Some(error.to_string()),
        }
    }

    fn into_open_error(self, path: &Path) -> OpenError {
        let (path, known) = (path.to_owned(), FORMAT_VERSION);
        match self {
            Self::Newer { found, written_by } => OpenError::Newer { path, found, known, written_by },
            Self::Older { found, written_by } => OpenError::Older { path, found, known, written_by },
            Self::Storage(redb::Error::DatabaseAlreadyOpen) => OpenError::InUse(path),
            Self::Storage(redb::Error::Io(source)) if !is_damage(&source) => {
                OpenError::Io { path, doing: "open", source }
            }
            Self::Storage(source) => OpenError::Storage { path, source },
            Self::Foreign(reason) => OpenError::Storage { path, source: redb::Error::Corrupted(reason) },
        }
    }
}

/// Returns whether a read error is permanent: the bytes are missing or the medium fails.
fn is_damage(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof)
        || error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error())
}

/// Opens the file, creates it if it does not exist, or sets a damaged one aside and creates a new one.
pub(super) fn open(
    path: &Path,
    upgrades: &Upgrades,
) -> Result<(Database, Dump, Option<SetAside>), OpenError> {
    let io = |doing| move |source| OpenError::Io { path: path.to_owned(), doing, source };
    let directory = directory_of(path);
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(directory)
        .map_err(io("make the directory of"))?;
    let directory = File::open(directory).map_err(io("open the directory of"))?;
    rustix::fs::flock(&directory, FlockOperation::LockExclusive)
        .map_err(|error| io("lock the directory of")(error.into()))?;
    if !path.try_exists().map_err(io("look for"))? {
        make(path, &directory)?;
    }
    let open = || {
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(io("open"))?;
        Ok::<_, OpenError>(open_existing(file, upgrades))
    };
    let (opened, set_aside) = match open()? {
        Err(error) => match error.damage() {
            Some(reason) => {
                let set_aside = set_aside(path, &directory, reason)?;
                make(path, &directory)?;
                (open()?, Some(set_aside))
            }
            None => (Err(error), None),
        },
        opened => (opened, None),
    };
    let (database, dump) = opened.map_err(|error| error.into_open_error(path))?;
    Ok((database, dump, set_aside))
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Opens an existing file. A panic of the storage engine over its bytes counts as damage. A refused file is unchanged.
fn open_existing(file: File, upgrades: &Upgrades) -> Result<(Database, Dump), LoadError> {
    catch_unwind(AssertUnwindSafe(|| {
        let (database, dump) = open_file(file, Some(upgrades))?;
        let lost = || LoadError::Foreign("it lost the tables that were just made".to_owned());
        Ok((database, dump.ok_or_else(lost)?))
    }))
    .unwrap_or_else(|panic| Err(LoadError::Foreign(writer::panic_text(&*panic))))
}

/// Opens a file, upgrades it, and reads it; writes to it only if all of that succeeded.
fn open_file(file: File, upgrades: Option<&Upgrades>) -> Result<(Database, Option<Dump>), LoadError> {
    let buffered = BufferedFile::new(file)?;
    let database = Builder::new().set_cache_size(CACHE_BYTES).create_with_backend(buffered.clone())?;
    if let Some(upgrades) = upgrades {
        format::sign(&database, format::load_meta(&database)?.as_ref(), upgrades)?;
    }
    let dump = format::load(&database, upgrades.unwrap_or(&UPGRADES).records)?;
    buffered.release()?;
    Ok((database, dump))
}

/// Creates a file under another name and renames it when it is complete: a crash leaves no partial checkpoint.
fn make(path: &Path, directory: &File) -> Result<(), OpenError> {
    let io = |doing| move |source| OpenError::Io { path: path.to_owned(), doing, source };
    let new = sibling(path, ".new");
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io("make")(error)),
        _ => {}
    }
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).mode(0o600).open(&new).map_err(io("make"))?;
    initialise(file).map_err(|error| error.into_open_error(path))?;
    rename_to_free(&new, path).map_err(io("make"))?;
    directory.sync_all().map_err(io("make"))
}

fn initialise(file: File) -> Result<(), LoadError> {
    let database = Builder::new().set_cache_size(CACHE_BYTES).create_file(file)?;
    format::sign(&database, None, &UPGRADES)
}

fn rename_to_free(from: &Path, to: &Path) -> io::Result<()> {
    let here = rustix::fs::CWD;
    Ok(rustix::fs::renameat_with(here, from, here, to, RenameFlags::NOREPLACE)?)
}

fn sibling(path: &Path, more: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(more);
    name.into()
}

/// Renames the file to `NAME.damaged-DATE`, or `NAME.damaged-DATE-N` if that name exists.
fn set_aside(path: &Path, directory: &File, reason: String) -> Result<SetAside, OpenError> {
    let date = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string();
    let failed = |reason, source| OpenError::SetAside { path: path.to_owned(), reason, source };
    for attempt in 1..=NAMES_MAX {
        let more = if attempt == 1 { String::new() } else { format!("-{attempt}") };
        let name = sibling(path, &format!(".damaged-{date}{more}"));
        match rename_to_free(path, &name) {
            Ok(()) => {
                directory.sync_all().map_err(|source| failed(reason.clone(), source))?;
                return Ok(SetAside { path: name, reason });
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(source) => return Err(failed(reason, source)),
        }
    }
    Err(failed(reason, io::ErrorKind::AlreadyExists.into()))
}

/// Returns a function that opens the same file again after a failed commit, and refuses another file in its place.
pub(super) fn reopener(path: &Path) -> Result<Opener, OpenError> {
    let metadata = std::fs::metadata(path).map_err(|source| OpenError::Io {
        path: path.to_owned(),
        doing: "look at",
        source,
    })?;
    let (path, inode) = (path.to_owned(), (metadata.dev(), metadata.ino()));
    Ok(Box::new(move || reopen(&path, inode)))
}

fn reopen(path: &Path, inode: (u64, u64)) -> Result<Database, redb::Error> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let metadata = file.metadata()?;
    if (metadata.dev(), metadata.ino()) != inode || metadata.len() == 0 {
        return Err(io::Error::other("the file was replaced while the daemon ran: restart the daemon").into());
    }
    // After a failed sync Linux marks the lost pages as clean (lwn.net/Articles/752063): without this the repair would
    // read cached pages that the disk does not have.
    file.sync_data()?;
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).map_err(io::Error::from)?;
    match open_file(file, None) {
        Ok((database, Some(_))) => Ok(database),
        Ok((_, None)) => Err(redb::Error::Corrupted("the tables are gone".to_owned())),
        Err(LoadError::Storage(error)) => Err(error),
        Err(LoadError::Foreign(reason)) => Err(redb::Error::Corrupted(reason)),
        Err(LoadError::Newer { found, .. } | LoadError::Older { found, .. }) => {
            Err(redb::Error::Corrupted(format!("it has format {found} now")))
        }
    }
}

/// Opens bytes in memory, and writes only there.
pub(super) fn open_bytes(bytes: Vec<u8>) -> Result<Database, DatabaseError> {
    use redb::StorageBackend;
    let memory = redb::backends::InMemoryBackend::new();
    let fill = || -> io::Result<()> {
        memory.set_len(bytes.len() as u64)?;
        memory.write(0, &bytes)
    };
    fill().map_err(|error| DatabaseError::Storage(StorageError::Io(error)))?;
    drop(bytes);
    Builder::new().set_cache_size(CACHE_BYTES).create_with_backend(memory)
}
