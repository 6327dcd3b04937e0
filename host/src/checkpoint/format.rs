//! Tables, keys and values. The page is `docs/checkpoint-format.md`; what is written here and there is the same.

use std::fmt;
use std::sync::Arc;

use redb::{ReadTransaction, ReadableDatabase, ReadableTable, TableDefinition, TableError, TableHandle};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::writer::Write;
use super::{Change, CommitError};
use crate::base::clock;
use crate::model::{ClaimRecord, PodAllocation, PodRecord, Uid};

/// Version of the tables and of what their keys mean.
pub const FORMAT_VERSION: u32 = 1;
/// First byte of each value: version of its JSON.
pub(super) const VALUE_VERSION: u8 = 1;

pub(super) const META: TableDefinition<'_, &str, &str> = TableDefinition::new("meta");
const CLAIMS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("claims");
const PODS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("pods");
const ALLOCATIONS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("allocations");
pub(super) const UNREADABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("unreadable");

const META_FORMAT: &str = "format";
const META_WRITTEN_BY: &str = "written-by";
const META_CREATED: &str = "created";
pub(super) const META_PROBED: &str = "probed";

/// A table of records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Table {
    Claims,
    Pods,
    Allocations,
}

impl Table {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Claims => "claims",
            Self::Pods => "pods",
            Self::Allocations => "allocations",
        }
    }

    pub(super) fn definition(self) -> TableDefinition<'static, &'static str, &'static [u8]> {
        match self {
            Self::Claims => CLAIMS,
            Self::Pods => PODS,
            Self::Allocations => ALLOCATIONS,
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A record that could not be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Skipped {
    pub table: Table,
    /// As it stands in the file.
    pub key: String,
    pub reason: String,
    /// Bytes of its value.
    pub bytes: usize,
}

/// What a file says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Meta {
    pub format: u32,
    /// Program and release that wrote last.
    pub written_by: String,
    /// RFC 3339.
    pub created: String,
}

/// All that a file holds.
#[derive(Debug, Default)]
pub(super) struct Contents {
    pub(super) meta: Meta,
    pub(super) claims: Vec<ClaimRecord>,
    pub(super) pods: Vec<PodRecord>,
    pub(super) allocations: Vec<PodAllocation>,
    pub(super) skipped: Vec<Skipped>,
    /// Values that were moved to the table `unreadable`.
    pub(super) unreadable: u64,
}

/// Why a file's contents are not ours to read.
#[derive(Debug)]
pub(super) enum LoadError {
    Newer { found: u32, written_by: String },
    Foreign(String),
    Storage(redb::Error),
}

impl<E: Into<redb::Error>> From<E> for LoadError {
    fn from(error: E) -> Self {
        Self::Storage(error.into())
    }
}

/// This program and release, for `written-by`.
pub(super) fn writer_name() -> &'static str {
    concat!("nodedock ", env!("CARGO_PKG_VERSION"))
}

/// Serialises a change; done by the caller, so that the writer thread only moves bytes.
pub(super) fn encode(change: Change) -> Result<Write, CommitError> {
    match change {
        Change::PutClaim(record) => put(Table::Claims, &record.id.uid, &*record),
        Change::PutPod(record) => put(Table::Pods, &record.pod.uid, &record),
        Change::DeleteClaim(uid) => Ok(Write { table: Table::Claims, key: uid, value: None }),
        Change::DeletePod(uid) => Ok(Write { table: Table::Pods, key: uid, value: None }),
        Change::PutAllocation(record) => put(Table::Allocations, record.uid(), &*record),
        Change::DeleteAllocation(uid) => Ok(Write { table: Table::Allocations, key: uid, value: None }),
    }
}

fn put(table: Table, uid: &Uid, record: &impl Serialize) -> Result<Write, CommitError> {
    let mut value = Vec::with_capacity(1024);
    value.push(VALUE_VERSION);
    serde_json::to_writer(&mut value, record)
        .map_err(|source| CommitError::Encode { uid: uid.clone(), source: Arc::new(source) })?;
    Ok(Write { table, key: uid.clone(), value: Some(value) })
}

/// Reads a value, or says in words why not.
fn decode<R: DeserializeOwned>(value: &[u8]) -> Result<R, String> {
    match value.split_first() {
        Some((&VALUE_VERSION, json)) => serde_json::from_slice(json).map_err(|error| error.to_string()),
        Some((version, _)) => {
            Err(format!("the record has version {version}, and this release knows {VALUE_VERSION}"))
        }
        None => Err("the record is empty".to_owned()),
    }
}

/// A record that knows its own key.
trait Keyed {
    fn key(&self) -> &Uid;
}

impl Keyed for ClaimRecord {
    fn key(&self) -> &Uid {
        &self.id.uid
    }
}

impl Keyed for PodRecord {
    fn key(&self) -> &Uid {
        &self.pod.uid
    }
}

impl Keyed for PodAllocation {
    fn key(&self) -> &Uid {
        self.uid()
    }
}

fn decode_under<R: DeserializeOwned + Keyed>(key: &str, value: &[u8]) -> Result<R, String> {
    let record: R = decode(value)?;
    if record.key().as_str() == key {
        return Ok(record);
    }
    Err(format!("the record calls itself {}", record.key()))
}

/// Reads everything. None: the file is new, without a table.
pub(super) fn load(database: &impl ReadableDatabase) -> Result<Option<Contents>, LoadError> {
    let read = database.begin_read()?;
    let Some(meta) = load_meta(&read)? else { return Ok(None) };
    let mut contents = Contents { meta, ..Contents::default() };
    contents.claims = load_table(&read, Table::Claims, &mut contents.skipped)?;
    contents.pods = load_table(&read, Table::Pods, &mut contents.skipped)?;
    contents.allocations = load_table(&read, Table::Allocations, &mut contents.skipped)?;
    contents.unreadable = count(&read)?;
    Ok(Some(contents))
}

fn load_meta(read: &ReadTransaction) -> Result<Option<Meta>, LoadError> {
    let names: Vec<String> = read.list_tables()?.map(|table| table.name().to_owned()).collect();
    if names.is_empty() {
        return Ok(None);
    }
    if !names.iter().any(|name| name == META.name()) {
        return Err(LoadError::Foreign(format!("it has the tables {} and no table meta", names.join(", "))));
    }
    let table = read.open_table(META)?;
    let text = |key| -> Result<String, LoadError> {
        Ok(table.get(key)?.map(|value| value.value().to_owned()).unwrap_or_default())
    };
    let (written_by, created, format) = (text(META_WRITTEN_BY)?, text(META_CREATED)?, text(META_FORMAT)?);
    let Ok(format) = format.parse::<u32>() else {
        return Err(LoadError::Foreign(format!("its format version is {format:?}")));
    };
    if format > FORMAT_VERSION {
        return Err(LoadError::Newer { found: format, written_by });
    }
    Ok(Some(Meta { format, written_by, created }))
}

fn load_table<R: DeserializeOwned + Keyed>(
    read: &ReadTransaction,
    table: Table,
    skipped: &mut Vec<Skipped>,
) -> Result<Vec<R>, LoadError> {
    let open = match read.open_table(table.definition()) {
        Err(TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
        open => open?,
    };
    let mut records = Vec::new();
    for entry in open.iter()? {
        let (key, value) = entry?;
        match decode_under(key.value(), value.value()) {
            Ok(record) => records.push(record),
            Err(reason) => skipped.push(Skipped {
                table,
                key: key.value().to_owned(),
                reason,
                bytes: value.value().len(),
            }),
        }
    }
    Ok(records)
}

fn count(read: &ReadTransaction) -> Result<u64, LoadError> {
    use redb::ReadableTableMetadata;
    match read.open_table(UNREADABLE) {
        Err(TableError::TableDoesNotExist(_)) => Ok(0),
        open => Ok(open?.len()?),
    }
}

/// Makes the tables of a new file, or notes that this release writes an older one. Durable when it returns.
pub(super) fn sign(database: &redb::Database, found: Option<&Meta>) -> Result<(), redb::Error> {
    if found.is_some_and(|meta| meta.written_by == writer_name() && meta.format == FORMAT_VERSION) {
        return Ok(());
    }
    let write = database.begin_write()?;
    {
        let mut meta = write.open_table(META)?;
        meta.insert(META_FORMAT, FORMAT_VERSION.to_string().as_str())?;
        meta.insert(META_WRITTEN_BY, writer_name())?;
        if found.is_none() {
            meta.insert(META_CREATED, clock::rfc3339(clock::now_ms()).as_str())?;
        }
        write.open_table(CLAIMS)?;
        write.open_table(PODS)?;
    }
    write.commit()?;
    Ok(())
}
