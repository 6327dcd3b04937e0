//! The file: creates it, opens it, and sets aside what cannot be read. Two daemons that start concurrently exclude each other by a lock on the directory, so that neither sets aside a file that the other has just created.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, RenameFlags};

use super::database::{APPLICATION_ID, Database, LOG_BYTES, LOG_HEADER};
use super::format::{self, Dump, FORMAT_VERSION, LoadError};
use super::upgrade::Upgrades;
use super::{OpenError, SetAside};

/// Attempts to name a file that is set aside: more than one only within the same second.
const NAMES_MAX: u32 = 1000;
/// First bytes of a SQLite file (sqlite.org/fileformat2.html, 1.3).
const MAGIC: &[u8; 16] = b"SQLite format 3\0";
/// Bytes of the header with what identifies a file.
const HEADER: usize = 100;

impl LoadError {
    /// Returns the reason to set the file aside: another program wrote it, or it is damaged.
    fn damage(&self) -> Option<String> {
        match self {
            Self::Foreign(reason) => Some(reason.clone()),
            Self::Store(error) if error.is_damage() => Some(nodedock_base::error::chain(error)),
            Self::Store(_) | Self::Newer { .. } | Self::Older { .. } => None,
        }
    }

    fn into_open_error(self, path: &Path) -> OpenError {
        let (path, known) = (path.to_owned(), FORMAT_VERSION);
        match self {
            Self::Newer { found, written_by } => OpenError::Newer {
                path,
                found,
                known,
                written_by,
            },
            Self::Older { found, written_by } => OpenError::Older {
                path,
                found,
                known,
                written_by,
            },
            Self::Store(source) if source.is_busy() => OpenError::InUse(path),
            Self::Store(source) => OpenError::Store {
                path,
                doing: "open",
                source,
            },
            Self::Foreign(reason) => {
                let source = io::Error::new(io::ErrorKind::InvalidData, reason);
                OpenError::Io {
                    path,
                    doing: "open",
                    source,
                }
            }
        }
    }
}

/// Opens the file, creates it if it does not exist, or sets a damaged one aside and creates a new one.
pub(super) fn open(
    path: &Path,
    upgrades: &Upgrades,
) -> Result<(Database, Dump, Option<SetAside>), OpenError> {
    let directory = directory_of(path);
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(directory)
        .map_err(failed(path, "make the directory of"))?;
    let directory = File::open(directory).map_err(failed(path, "open the directory of"))?;
    rustix::fs::flock(&directory, FlockOperation::LockExclusive)
        .map_err(|error| failed(path, "lock the directory of")(error.into()))?;
    let mut aside = None;
    if is_missing(path).map_err(failed(path, "look for"))? {
        make(path, &directory)?;
    }
    let opened = match open_existing(path, upgrades)? {
        Err(error) => match error.damage() {
            Some(reason) => {
                aside = Some(set_aside(path, &directory, reason)?);
                make(path, &directory)?;
                open_existing(path, upgrades)?
            }
            None => Err(error),
        },
        opened => opened,
    };
    let (database, dump) = opened.map_err(|error| error.into_open_error(path))?;
    Ok((database, dump, aside))
}

fn failed(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> OpenError {
    move |source| OpenError::Io {
        path: path.to_owned(),
        doing,
        source,
    }
}

fn directory_of(path: &Path) -> &Path {
    path.parent()
        .filter(|directory| !directory.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Returns whether there is no file, or an empty one, which holds nothing.
fn is_missing(path: &Path) -> io::Result<bool> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() && metadata.len() == 0 => {
            std::fs::remove_file(path)?;
            Ok(true)
        }
        Ok(_) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error),
    }
}

/// Opens an existing file, upgrades it, and reads it. A file that is refused stays unchanged.
fn open_existing(
    path: &Path,
    upgrades: &Upgrades,
) -> Result<Result<(Database, Dump), LoadError>, OpenError> {
    // The lock is held beside SQLite's own, which any close of this file by the same process would end (fcntl(2)).
    let lock = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(failed(path, "open"))?;
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Err(OpenError::InUse(path.to_owned())),
        Err(error) => return Err(failed(path, "lock")(error.into())),
    }
    if let Err(reason) = check_header(&lock).map_err(failed(path, "read"))? {
        return Ok(Err(LoadError::Foreign(reason)));
    }
    let log = log_of(path);
    let (has_log, had_file) = (
        is_log_filled(&log),
        log.try_exists().map_err(failed(path, "read"))?,
    );
    if let Err(error) = allocate(&log) {
        // Commits need less, and report it.
        tracing::debug!(%error, "the log of the checkpoint is not allocated");
    }
    let opened = open_locked(path, (lock, log.clone()), has_log, upgrades);
    if opened.is_err() && !had_file {
        std::fs::remove_file(&log).ok();
    }
    Ok(opened)
}

fn open_locked(
    path: &Path,
    (lock, log): (File, PathBuf),
    has_log: bool,
    upgrades: &Upgrades,
) -> Result<(Database, Dump), LoadError> {
    let mut database = Database::open(path, None, Some((lock, log)))?;
    if has_log {
        database.check()?.map_err(LoadError::Foreign)?;
        database.has_log();
    }
    let dump = load(&mut database, upgrades)?;
    Ok((database, dump))
}

/// Gives the log of a checkpoint its usual size, with zeros after what it has.
fn allocate(log: &Path) -> io::Result<()> {
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(log)?;
    let missing = LOG_BYTES.saturating_sub(file.metadata()?.len());
    if missing > 0 {
        io::copy(&mut io::repeat(0).take(missing), &mut &file)?;
        file.sync_all()?;
    }
    Ok(())
}

/// Reads a database, and upgrades it in the same transaction if it is older.
pub(super) fn load(database: &mut Database, upgrades: &Upgrades) -> Result<Dump, LoadError> {
    let meta = format::load_meta(database)?;
    if format::is_current(&meta) {
        return format::load(database, upgrades.records);
    }
    database.transaction(|database| {
        format::sign(database, &meta, upgrades)?;
        format::load(database, upgrades.records)
    })
}

/// Checks that a file is ours, before SQLite opens it. `Err`: the reason.
pub(super) fn check_header(file: &File) -> io::Result<Result<(), String>> {
    let mut header = [0; HEADER];
    match file.read_exact_at(&mut header, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Ok(Err("it ends within its header".to_owned()));
        }
        read => read?,
    }
    let id = u32::from_be_bytes([header[68], header[69], header[70], header[71]]);
    Ok(match &header[..MAGIC.len()] {
        magic if magic != MAGIC => Err("it is no SQLite file".to_owned()),
        _ if id != APPLICATION_ID => Err(format!(
            "another program's SQLite file, of the application {id:#x}"
        )),
        // 2: with a write-ahead log.
        _ if header[18..20] != [2, 2] => Err("it is used without a write-ahead log".to_owned()),
        _ => Ok(()),
    })
}

/// Returns whether a log may have commits: its header is not zero, or cannot be read.
pub(super) fn is_log_filled(log: &Path) -> bool {
    let mut header = [0; LOG_HEADER];
    match File::open(log).and_then(|log| log.read_exact_at(&mut header, 0)) {
        Ok(()) => header != [0; LOG_HEADER],
        Err(error) => !matches!(
            error.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof
        ),
    }
}

/// Returns the path of SQLite's write-ahead log of a file.
pub(super) fn log_of(path: &Path) -> PathBuf {
    sibling(path, "-wal")
}

/// Creates a file under another name and renames it when it is complete: a crash leaves no partial checkpoint.
fn make(path: &Path, directory: &File) -> Result<(), OpenError> {
    let io = |source| OpenError::Io {
        path: path.to_owned(),
        doing: "make",
        source,
    };
    // A log without its file would be taken for the new file's.
    let log = log_of(path);
    if is_log_filled(&log) {
        set_aside(&log, directory, "a log without its checkpoint".to_owned())?;
    }
    let new = sibling(path, ".new");
    for left in [log, new.clone(), log_of(&new)] {
        match std::fs::remove_file(&left) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io(error)),
            _ => {}
        }
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&new)
        .map_err(io)?;
    Database::create(&new, None, format::sign_new).map_err(|source| OpenError::Store {
        path: path.to_owned(),
        doing: "make",
        source,
    })?;
    file.sync_all().map_err(io)?;
    rename_to_free(&new, path).map_err(io)?;
    directory.sync_all().map_err(io)
}

fn rename_to_free(from: &Path, to: &Path) -> io::Result<()> {
    let here = rustix::fs::CWD;
    Ok(rustix::fs::renameat_with(
        here,
        from,
        here,
        to,
        RenameFlags::NOREPLACE,
    )?)
}

fn sibling(path: &Path, more: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(more);
    name.into()
}

/// Renames the file to `NAME.damaged-DATE`, or `NAME.damaged-DATE-N` if that name exists, then its log to the log of that name. After a crash
/// between the two the log is alone, and set aside before a new file is made.
fn set_aside(path: &Path, directory: &File, reason: String) -> Result<SetAside, OpenError> {
    let date = jiff::Timestamp::now()
        .strftime("%Y%m%dT%H%M%SZ")
        .to_string();
    let failed = |reason, source| OpenError::SetAside {
        path: path.to_owned(),
        reason,
        source,
    };
    for attempt in 1..=NAMES_MAX {
        let more = if attempt == 1 {
            String::new()
        } else {
            format!("-{attempt}")
        };
        let name = sibling(path, &format!(".damaged-{date}{more}"));
        match rename_to_free(path, &name) {
            Ok(()) => {
                let log = log_of(path);
                if is_log_filled(&log)
                    && let Err(error) = rename_to_free(&log, &log_of(&name))
                {
                    return Err(failed(reason, error));
                }
                directory
                    .sync_all()
                    .map_err(|source| failed(reason.clone(), source))?;
                return Ok(SetAside { path: name, reason });
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(source) => return Err(failed(reason, source)),
        }
    }
    Err(failed(reason, io::ErrorKind::AlreadyExists.into()))
}
