//! Takes over a checkpoint of format 1, a redb file beside the one of today: its records go into the new file, and then it is marked with
//! a newer format, so that the release that wrote it refuses it instead of starting with what it says. The file stays.

use std::fs::OpenOptions;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use redb::backends::InMemoryBackend;
use redb::{
    Builder, Database, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition,
    TableError, TableHandle,
};

use super::database::{self, StoreError};
use super::format::{self, FORMAT_VERSION, LoadError, META_FORMAT, META_WRITTEN_BY, Meta, Stored};

const META: TableDefinition<'_, &str, &str> = TableDefinition::new("meta");
const UNREADABLE: &str = "unreadable";

/// First bytes of a redb file.
pub(super) const MAGIC: &[u8] = b"redb";

/// Its content.
pub(super) struct Contents {
    pub(super) meta: Meta,
    records: Vec<Record>,
}

struct Record {
    table: String,
    key: String,
    /// Its version is the first byte.
    value: Vec<u8>,
}

/// Returns the path of the file of format 1 beside the one of today.
pub(super) fn beside(path: &Path) -> PathBuf {
    path.with_extension("redb")
}

/// Reads a file from a copy of its bytes, which stay as they are.
pub(super) fn read(bytes: &[u8]) -> Result<Contents, LoadError> {
    let read = || {
        let memory = InMemoryBackend::new();
        memory.set_len(bytes.len() as u64)?;
        memory.write(0, bytes)?;
        let mut database = Builder::new().create_with_backend(memory)?;
        if !database.check_integrity()? {
            return Err(redb::Error::Corrupted(
                "the pages in use are not those that were recorded".to_owned(),
            ));
        }
        contents(&database)
    };
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => Err(LoadError::Foreign(error.to_string())),
        Err(panic) => Err(LoadError::Foreign(panic_text(&*panic))),
    }
}

fn contents(database: &Database) -> Result<Result<Contents, LoadError>, redb::Error> {
    let read = database.begin_read()?;
    let names: Vec<String> = read
        .list_tables()?
        .map(|table| table.name().to_owned())
        .collect();
    if !names.iter().any(|name| name == META.name()) {
        let names = names.join(", ");
        return Ok(Err(LoadError::Foreign(format!(
            "it has the tables {names:?} and no table meta"
        ))));
    }
    let meta = read.open_table(META)?;
    let text = |key: &str| {
        let value = meta
            .get(key)
            .map_err(|error| LoadError::Foreign(error.to_string()))?;
        Ok(value.map(|value| value.value().to_owned()))
    };
    let meta = match format::meta_of(text, FORMAT_VERSION) {
        Ok(meta) => meta,
        Err(error) => return Ok(Err(error)),
    };
    let mut records = Vec::new();
    // With those of newer releases, if they are tables of records.
    for name in names.into_iter().filter(|name| name != META.name()) {
        let open = match read.open_table(TableDefinition::<&str, &[u8]>::new(&name)) {
            Err(TableError::TableTypeMismatch { .. } | TableError::TableIsMultimap(_)) => continue,
            open => open?,
        };
        for entry in open.iter()? {
            let (key, value) = entry?;
            let (table, key) = (name.clone(), key.value().to_owned());
            records.push(Record {
                table,
                key,
                value: value.value().to_vec(),
            });
        }
    }
    Ok(Ok(Contents { meta, records }))
}

impl Contents {
    /// Writes the records into a new file.
    pub(super) fn write(&self, database: &database::Database) -> Result<(), StoreError> {
        format::sign_taken_over(database, &self.meta)?;
        for Record { table, key, value } in &self.records {
            // An empty value was no record; a version of 0 says so.
            let (version, record) = value
                .split_first()
                .map_or((0, &[][..]), |(version, json)| (*version, json));
            let stored = Stored {
                version: version.into(),
                record,
            };
            if table == UNREADABLE {
                database.keep_unreadable(key, stored)?;
            } else {
                database.insert(table, key, stored)?;
            }
        }
        Ok(())
    }
}

/// Marks a file as taken over: a release of format 1 refuses it. `Err` with `DatabaseAlreadyOpen`: such a release runs.
pub(super) fn mark(path: &Path) -> Result<(), redb::Error> {
    let database = open(path)?;
    let write = database.begin_write()?;
    {
        let mut meta = write.open_table(META)?;
        meta.insert(META_FORMAT, FORMAT_VERSION.to_string().as_str())?;
        meta.insert(META_WRITTEN_BY, format::writer_name())?;
    }
    Ok(write.commit()?)
}

/// Opens a file, and holds its lock.
pub(super) fn open(path: &Path) -> Result<Database, redb::Error> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    if file.metadata()?.len() == 0 {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok(Builder::new().create_file(file)?)
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "panic without a message".to_owned())
}
