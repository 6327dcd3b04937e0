//! The database: a SQLite file with a write-ahead log beside it. Owns its settings, its tables, and where each record is.
//!
//! A commit appends the changed pages to the log and syncs it once, so it changes as few pages as it can. `copy_log` copies the log into
//! the file from time to time, so that the next commits overwrite it from its beginning. The lock on the file is held as long as the
//! database is open.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::c_int;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rusqlite::hooks::Wal;
use rusqlite::types::{ToSqlOutput, ValueRef};
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, params};

use super::record::{self, Stored, Table};
use super::upgrade::FormatStep;
use nodedock_base::clock;
use nodedock_base::failpoint::{self, Point};
use nodedock_model::Uid;

/// SQLite's `application_id` of our files: `ndck`.
pub(super) const APPLICATION_ID: u32 = u32::from_be_bytes(*b"ndck");

/// Key in `meta` of the time when a commit without records tested the disk.
pub(super) const META_PROBED: &str = "probed";

/// Pages for which the log has room from the start: few enough that a start reads them in milliseconds.
const LOG_PAGES: usize = 1000;
/// Pages in the log at which it is copied into the file. The commit that reaches them still has room.
const LOG_PAGES_COPIED: usize = LOG_PAGES / 4 * 3;
/// Bytes of the log's pages, each with its header (sqlite.org/fileformat2.html, 4.1). A log of this size is written without another change
/// of the file system than its bytes, which takes half the time.
pub(super) const LOG_BYTES: u64 = 32 + LOG_PAGES as u64 * (24 + 4096);
/// Bytes of the header of a log. A log whose header is zero is empty.
pub(super) const LOG_HEADER: usize = 32;

/// Memory for pages, in KiB: a commit needs the pages on the way to its records, which the kernel caches as well.
const CACHE_KIB: i64 = 1024;

const TABLES: &str = "
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE records (
        id INTEGER PRIMARY KEY,
        kind TEXT NOT NULL,
        key TEXT NOT NULL,
        version INTEGER NOT NULL,
        checksum INTEGER NOT NULL,
        record NOT NULL
    );
    CREATE TABLE unreadable (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        version INTEGER NOT NULL,
        record NOT NULL
    );
";

/// A failure of SQLite, with the system's error behind it.
#[derive(Debug, thiserror::Error)]
#[error("{sqlite}")]
pub struct StoreError {
    sqlite: rusqlite::Error,
    #[source]
    system: Option<io::Error>,
}

impl StoreError {
    fn new(connection: &Connection, sqlite: rusqlite::Error) -> Self {
        // SAFETY: the handle is valid while the connection is borrowed, and the call only reads a number in it.
        let errno = unsafe { rusqlite::ffi::sqlite3_system_errno(connection.handle()) };
        let is_system = matches!(
            sqlite.sqlite_error_code(),
            Some(ErrorCode::SystemIoFailure | ErrorCode::CannotOpen | ErrorCode::ReadOnly)
        );
        let system = (is_system && errno != 0).then(|| io::Error::from_raw_os_error(errno));
        Self { sqlite, system }
    }

    #[cfg(test)]
    pub(super) fn of_system(kind: io::ErrorKind) -> Self {
        Self {
            sqlite: rusqlite::Error::InvalidQuery,
            system: Some(kind.into()),
        }
    }

    pub(super) fn kind(&self) -> Option<io::ErrorKind> {
        match (&self.system, self.sqlite.sqlite_error_code()) {
            (Some(system), _) => Some(system.kind()),
            (None, Some(ErrorCode::DiskFull)) => Some(io::ErrorKind::StorageFull),
            (None, Some(ErrorCode::ReadOnly)) => Some(io::ErrorKind::ReadOnlyFilesystem),
            (None, Some(ErrorCode::PermissionDenied)) => Some(io::ErrorKind::PermissionDenied),
            _ => None,
        }
    }

    /// Returns whether the file itself is damaged or another program's: opening it again would not help.
    pub(super) fn is_damage(&self) -> bool {
        match self.sqlite.sqlite_error_code() {
            Some(
                ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase | ErrorCode::TypeMismatch,
            ) => true,
            Some(ErrorCode::SystemIoFailure) => self.system.as_ref().is_none_or(|error| {
                error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error())
            }),
            // A table or a column that is not there.
            Some(ErrorCode::Unknown) => true,
            None => true,
            _ => false,
        }
    }

    pub(super) fn is_busy(&self) -> bool {
        matches!(
            self.sqlite.sqlite_error_code(),
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked)
        )
    }
}

/// A put (with a value) or a delete of one record.
pub(super) struct Write {
    pub(super) table: Table,
    pub(super) key: Uid,
    /// JSON of this release's version.
    pub(super) value: Option<String>,
}

/// Row ID of a record, and the data that a write of it must preserve.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    pub(super) id: i64,
    pub(super) keep: Keep,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    Nothing,
    /// Fields that this release does not know: they are carried over.
    Fields,
    /// Unreadable to this release: copied to the table `unreadable`.
    Value,
}

pub(super) type Rows = HashMap<(Table, Uid), Row>;

/// A row whose record a transaction has deleted, with its key. A record that gets the same key takes the row, and so changes no other page.
struct FreedRow {
    id: i64,
    key: Uid,
}

pub(super) struct Database {
    connection: Connection,
    pub(super) rows: Rows,
    /// Pages in the log, as SQLite reports them after each commit.
    log_pages: Arc<AtomicUsize>,
    /// Pages in the log at which it is copied.
    copy_at: AtomicUsize,
    /// The log, if it is a file of the system that stays allocated.
    log: Option<PathBuf>,
    /// True if the last commit failed: it may still be in the log, until another one is written over it.
    is_doubtful: bool,
    _lock: Option<File>,
}

impl Database {
    /// Opens an existing file. `vfs`: SQLite's name of another file system than the real one. `kept`: the lock and the path of the log,
    /// which stay as long as the database and longer.
    pub(super) fn open(
        path: &Path,
        vfs: Option<&str>,
        kept: Option<(File, PathBuf)>,
    ) -> Result<Self, StoreError> {
        let (lock, log) = kept.unzip();
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = connect(path, flags, vfs)?;
        let mut database = Self {
            connection,
            rows: Rows::new(),
            log_pages: Arc::default(),
            copy_at: AtomicUsize::new(LOG_PAGES_COPIED),
            log,
            is_doubtful: false,
            _lock: lock,
        };
        database.sqlite(|connection| {
            use rusqlite::config::DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE;
            // A file that is refused stays as it is, with its log.
            connection.set_db_config(SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
            // Without shared memory, and with no other process between two commits.
            connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
            connection.pragma_update(None, "trusted_schema", false)?;
            connection.pragma_update(None, "cell_size_check", true)?;
            connection.pragma_update(None, "temp_store", "MEMORY")?;
            connection.pragma_update(None, "cache_size", -CACHE_KIB)?;
            // Pages of a transaction go to the log when it is committed, and not before.
            connection.pragma_update(None, "cache_spill", false)?;
            let mode: String =
                connection
                    .pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0))?;
            debug_assert!(mode == "wal", "{mode}");
            // Every commit is synced before it returns.
            connection.pragma_update(None, "synchronous", "FULL")?;
            connection.pragma_update(None, "wal_autocheckpoint", 0)
        })?;
        database.count_log_pages()?;
        Ok(database)
    }

    /// Creates the tables in an empty file, and fills them. The file is durable when its owner has synced it.
    pub(super) fn create(
        path: &Path,
        vfs: Option<&str>,
        fill: impl FnOnce(&Self) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = connect(path, flags, vfs)?;
        let database = Self {
            connection,
            rows: Rows::new(),
            log_pages: Arc::default(),
            copy_at: AtomicUsize::new(LOG_PAGES_COPIED),
            log: None,
            is_doubtful: false,
            _lock: None,
        };
        database.sqlite(|connection| {
            // A crash leaves a file that is made again.
            connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
            connection.pragma_update(None, "journal_mode", "MEMORY")?;
            connection.pragma_update(None, "application_id", APPLICATION_ID)?;
            connection.execute_batch("BEGIN")?;
            connection.execute_batch(TABLES)
        })?;
        fill(&database)?;
        database.sqlite(|connection| {
            connection.execute_batch("COMMIT")?;
            connection.pragma_update(None, "journal_mode", "WAL")
        })
    }

    /// Has SQLite report the pages in the log. Replaces its own reaction to them, which `wal_autocheckpoint` sets.
    fn count_log_pages(&mut self) -> Result<(), StoreError> {
        let counted = self.log_pages.clone();
        let count = move |_: &mut Wal, pages: c_int| {
            counted.store(
                usize::try_from(pages).unwrap_or(usize::MAX),
                Ordering::Relaxed,
            );
            Ok(())
        };
        let set = self.connection.wal_hook(Some(count));
        set.map_err(|error| StoreError::new(&self.connection, error))
    }

    fn sqlite<T>(
        &self,
        act: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        act(&self.connection).map_err(|error| StoreError::new(&self.connection, error))
    }

    /// Runs steps in one transaction, durable when it returns. After an error nothing has changed.
    pub(super) fn transaction<T, E: From<StoreError>>(
        &mut self,
        act: impl FnOnce(&mut Self) -> Result<T, E>,
    ) -> Result<T, E> {
        self.roll_back();
        self.execute("BEGIN IMMEDIATE")?;
        let outcome = act(self).and_then(|done| {
            failpoint::pass(Point::CheckpointCommit);
            self.execute("COMMIT")?;
            failpoint::pass(Point::CheckpointCommitted);
            Ok(done)
        });
        if outcome.is_err() {
            self.roll_back();
        }
        outcome
    }

    fn execute(&self, statement: &'static str) -> Result<(), StoreError> {
        self.sqlite(|connection| connection.prepare_cached(statement)?.execute([]))
            .map(drop)
    }

    /// Runs a step of an upgrade.
    pub(super) fn upgrade(&self, step: FormatStep) -> Result<(), StoreError> {
        self.sqlite(step)
    }

    /// Ends an open transaction. One that cannot be rolled back now is rolled back before the next.
    fn roll_back(&self) {
        if !self.connection.is_autocommit()
            && let Err(error) = self.execute("ROLLBACK")
        {
            tracing::warn!(%error, "a transaction of the checkpoint is not rolled back yet");
        }
    }

    /// Makes the writes, and sets a time of `meta`, in one transaction. After an error, or a crash in it, the file has all of it or nothing.
    /// After a success it has nothing of earlier commits that failed: without a change SQLite writes nothing, so there is always one then.
    pub(super) fn commit(
        &mut self,
        writes: &[Write],
        time: Option<&'static str>,
    ) -> Result<(), StoreError> {
        let mut replaced = Vec::with_capacity(writes.len());
        let outcome = self.transaction(|database| {
            let mut freed = Vec::new();
            for write in writes {
                let before = database.write(write, &mut freed)?;
                replaced.push(((write.table, write.key.clone()), before));
            }
            freed.iter().try_for_each(|row| database.delete(row.id))?;
            let time = time.or_else(|| database.is_doubtful.then_some(META_PROBED));
            // Nanoseconds: another value each time.
            time.map_or(Ok(()), |time| {
                database.set_meta(time, &jiff::Timestamp::now().to_string())
            })
        });
        self.is_doubtful = outcome.is_err();
        if outcome.is_err() {
            for (key, before) in replaced.into_iter().rev() {
                match before {
                    Some(row) => drop(self.rows.insert(key, row)),
                    None => drop(self.rows.remove(&key)),
                }
            }
        }
        outcome
    }

    /// Makes one write. Returns the row of the key before it. `freed`: the rows of records that the transaction has deleted so far, which
    /// are deleted at its end.
    fn write(
        &mut self,
        write: &Write,
        freed: &mut Vec<FreedRow>,
    ) -> Result<Option<Row>, StoreError> {
        let key = (write.table, write.key.clone());
        let before = self.rows.get(&key).copied();
        let mut value = write.value.as_deref().map(Cow::Borrowed);
        if let Some(row) = before.filter(|row| row.keep != Keep::Nothing) {
            self.preserve(write, row, &mut value)?;
        }
        let keep = match before {
            Some(row) if row.keep == Keep::Fields => Keep::Fields,
            _ => Keep::Nothing,
        };
        match (before, value) {
            (Some(row), Some(value)) => {
                self.update(
                    row.id,
                    Stored::of_this_release(&value),
                    write.table,
                    &write.key,
                )?;
                self.rows.insert(key, Row { id: row.id, keep });
            }
            (None, Some(value)) => {
                let stored = Stored::of_this_release(&value);
                let id = match freed.iter().position(|row| row.key == write.key) {
                    Some(at) => {
                        let id = freed.remove(at).id;
                        self.update(id, stored, write.table, &write.key)?;
                        id
                    }
                    None => self.insert(write.table.as_str(), write.key.as_str(), stored)?,
                };
                self.rows.insert(key, Row { id, keep });
            }
            (Some(row), None) => {
                freed.push(FreedRow {
                    id: row.id,
                    key: write.key.clone(),
                });
                self.rows.remove(&key);
            }
            (None, None) => {}
        }
        Ok(before)
    }

    /// Preserves what a write would lose of the value before it.
    fn preserve(
        &self,
        write: &Write,
        row: Row,
        value: &mut Option<Cow<'_, str>>,
    ) -> Result<(), StoreError> {
        let before = self.sqlite(|connection| {
            let mut query =
                connection.prepare_cached("SELECT version, record FROM records WHERE id = ?1")?;
            query
                .query_row([row.id], |found| {
                    Ok((found.get(0)?, bytes(found.get_ref(1)?).to_owned()))
                })
                .optional()
        })?;
        let Some((version, record)) = before else {
            return Ok(());
        };
        match (row.keep, value) {
            (Keep::Nothing, _) | (Keep::Fields, None) => {}
            (Keep::Fields, Some(new)) => {
                match record::carry_over(
                    write.table,
                    Stored {
                        version,
                        record: &record,
                    },
                    new,
                ) {
                    Ok(whole) => *new = whole.into(),
                    Err(error) => {
                        tracing::warn!(key = %write.key, error, "lost fields of a newer release in a record");
                    }
                }
            }
            (Keep::Value, _) => {
                let name = format!("{}/{}/{}", write.table, write.key, clock::now_ms());
                self.keep_unreadable(
                    &name,
                    Stored {
                        version,
                        record: &record,
                    },
                )?;
            }
        }
        Ok(())
    }

    fn delete(&self, id: i64) -> Result<(), StoreError> {
        let delete = "DELETE FROM records WHERE id = ?1";
        self.sqlite(|connection| connection.prepare_cached(delete)?.execute([id]))
            .map(drop)
    }

    /// Makes a row the record of a key.
    fn update(
        &self,
        id: i64,
        stored: Stored<'_>,
        table: Table,
        key: &Uid,
    ) -> Result<(), StoreError> {
        let update = "UPDATE records SET kind = ?2, key = ?3, version = ?4, checksum = ?5, record = ?6 WHERE id = ?1";
        let (table, key) = (table.as_str(), key.as_str());
        let checksum = stored.checksum(table, key);
        let values = params![
            id,
            table,
            key,
            stored.version,
            checksum,
            as_stored(stored.record)
        ];
        self.sqlite(|connection| connection.prepare_cached(update)?.execute(values))
            .map(drop)
    }

    /// Adds a record, and returns its row.
    pub(super) fn insert(
        &self,
        table: &str,
        key: &str,
        stored: Stored<'_>,
    ) -> Result<i64, StoreError> {
        let insert = "INSERT INTO records (kind, key, version, checksum, record) VALUES (?1, ?2, ?3, ?4, ?5)";
        let checksum = stored.checksum(table, key);
        let values = params![
            table,
            key,
            stored.version,
            checksum,
            as_stored(stored.record)
        ];
        self.sqlite(|connection| {
            connection.prepare_cached(insert)?.execute(values)?;
            Ok(connection.last_insert_rowid())
        })
    }

    /// Keeps an unreadable value, whose key was written again. `name`: its table, its key and the time.
    pub(super) fn keep_unreadable(&self, name: &str, stored: Stored<'_>) -> Result<(), StoreError> {
        let insert = "INSERT INTO unreadable (name, version, record) VALUES (?1, ?2, ?3)";
        let values = params![name, stored.version, as_stored(stored.record)];
        self.sqlite(|connection| connection.prepare_cached(insert)?.execute(values))
            .map(drop)
    }

    /// Returns a text of `meta`. `None`: it has none, or there is no such table.
    pub(super) fn meta(&self, key: &str) -> Result<Option<String>, StoreError> {
        let select = "SELECT value FROM meta WHERE key = ?1";
        self.sqlite(|connection| {
            connection
                .prepare_cached(select)?
                .query_row([key], |row| row.get(0))
                .optional()
        })
    }

    pub(super) fn set_meta(&self, key: &str, value: &str) -> Result<(), StoreError> {
        let put = "INSERT INTO meta (key, value) VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET value = ?2";
        self.sqlite(|connection| connection.prepare_cached(put)?.execute([key, value]))
            .map(drop)
    }

    /// Passes every record: its row, its table, its key, its value and its checksum.
    pub(super) fn each_record(
        &self,
        mut each: impl FnMut(i64, &str, &str, Stored<'_>, i64),
    ) -> Result<(), StoreError> {
        self.sqlite(|connection| {
            let mut query = connection
                .prepare("SELECT id, kind, key, version, checksum, record FROM records")?;
            let mut rows = query.query([])?;
            while let Some(row) = rows.next()? {
                let stored = Stored {
                    version: number(row, 3)?,
                    record: bytes(row.get_ref(5)?),
                };
                let [kind, key] = [row.get_ref(1)?, row.get_ref(2)?]
                    .map(|text| String::from_utf8_lossy(bytes(text)));
                each(number(row, 0)?, &kind, &key, stored, number(row, 4)?);
            }
            Ok(())
        })
    }

    pub(super) fn unreadable(&self) -> Result<u64, StoreError> {
        let count: i64 = self.sqlite(|connection| {
            connection.query_row("SELECT count(*) FROM unreadable", [], |row| row.get(0))
        })?;
        Ok(count.unsigned_abs())
    }

    /// Returns the names of tables, if `meta` is not among them.
    pub(super) fn foreign_tables(&self) -> Result<Option<Vec<String>>, StoreError> {
        let names: Vec<String> = self.sqlite(|connection| {
            let mut query =
                connection.prepare("SELECT name FROM sqlite_schema WHERE type = 'table'")?;
            query.query_map([], |row| row.get(0))?.collect()
        })?;
        Ok(names.iter().all(|name| name != "meta").then_some(names))
    }

    /// Checks the structure of the whole file. `Err`: what is wrong, the first of it.
    pub(super) fn check(&self) -> Result<Result<(), String>, StoreError> {
        let found: String = self.sqlite(|connection| {
            connection.query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))
        })?;
        Ok(if found == "ok" { Ok(()) } else { Err(found) })
    }

    /// Notes that the database was opened with a log, which may have any length.
    pub(super) fn has_log(&self) {
        self.log_pages.store(LOG_PAGES_COPIED, Ordering::Relaxed);
    }

    /// Returns whether the log is long enough to be copied into the file.
    pub(super) fn is_log_long(&self) -> bool {
        self.log_pages.load(Ordering::Relaxed) >= self.copy_at.load(Ordering::Relaxed)
    }

    /// Copies the log into the file; the next commit writes the log from its beginning. After an error the log has everything still.
    pub(super) fn copy_log(&self) -> Result<(), StoreError> {
        let copied = self.wal_checkpoint("PASSIVE").map(drop);
        let pages = self.log_pages.swap(0, Ordering::Relaxed);
        // Not at once again: a disk that takes no writes is probed by commits.
        let copy_at = match copied {
            Ok(()) => LOG_PAGES_COPIED,
            Err(_) => pages + LOG_PAGES,
        };
        self.copy_at.store(copy_at, Ordering::Relaxed);
        copied
    }

    /// Returns whether the file has everything now.
    fn wal_checkpoint(&self, mode: &str) -> Result<bool, StoreError> {
        let statement = format!("PRAGMA wal_checkpoint({mode})");
        // Whether another connection was in the way, the pages in the log, and those that are copied.
        self.sqlite(|connection| {
            connection.query_row(&statement, [], |row| {
                Ok(row.get::<_, i64>(0)? == 0 && row.get::<_, i64>(1)? == row.get::<_, i64>(2)?)
            })
        })
    }

    /// Copies the log into the file, empties it, and closes both. After an error the next open does the same.
    pub(super) fn close(self) -> Result<(), StoreError> {
        let Some(log) = &self.log else {
            return self.wal_checkpoint("TRUNCATE").map(drop);
        };
        if !self.wal_checkpoint("PASSIVE")? {
            return Ok(());
        }
        // The copy is synced. With its header the log would be copied once more.
        let opened = OpenOptions::new().write(true).open(log);
        if let Err(error) = opened.and_then(|log| log.write_all_at(&[0; LOG_HEADER], 0)) {
            tracing::warn!(%error, "the checkpoint is closed with a log, which the next start reads");
        }
        Ok(())
    }
}

fn connect(path: &Path, flags: OpenFlags, vfs: Option<&str>) -> Result<Connection, StoreError> {
    let opened = match vfs {
        Some(vfs) => Connection::open_with_flags_and_vfs(path, flags, vfs),
        None => Connection::open_with_flags(path, flags),
    };
    opened.map_err(|sqlite| StoreError {
        sqlite,
        system: None,
    })
}

fn bytes(value: ValueRef<'_>) -> &[u8] {
    match value {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => bytes,
        ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) => &[],
    }
}

/// A record as SQLite stores it: a text, so that its functions for JSON read it, unless it is none.
fn as_stored(record: &[u8]) -> ToSqlOutput<'_> {
    let is_text = std::str::from_utf8(record).is_ok();
    ToSqlOutput::Borrowed(if is_text {
        ValueRef::Text(record)
    } else {
        ValueRef::Blob(record)
    })
}

impl Drop for Database {
    fn drop(&mut self) {
        self.roll_back();
    }
}

fn number(row: &rusqlite::Row<'_>, column: usize) -> rusqlite::Result<i64> {
    Ok(row.get_ref(column)?.as_i64().unwrap_or(-1))
}
