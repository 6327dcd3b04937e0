//! Tables, keys and values, as in `docs/checkpoint-format.md`.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::sync::Arc;

use redb::{ReadTransaction, ReadableDatabase, ReadableTable, TableDefinition, TableError, TableHandle};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::upgrade::{self, RecordStep, UPGRADES, Upgrades};
use super::writer::Write;
use super::{Change, CommitError, carry};
use nodedock_base::{clock, worded};
use nodedock_model::{ClaimRecord, ClaimValues, PodAllocation, PodRecord, ReleaseRecord, Uid};

/// Version of the tables and of the meaning of their keys.
pub const FORMAT_VERSION: u32 = 1;
/// First byte of each value: version of its JSON.
pub(super) const VALUE_VERSION: u8 = 1;

pub(super) const META: TableDefinition<'_, &str, &str> = TableDefinition::new("meta");
pub(super) const UNREADABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("unreadable");

const META_FORMAT: &str = "format";
const META_WRITTEN_BY: &str = "written-by";
const META_CREATED: &str = "created";
pub(super) const META_PROBED: &str = "probed";
pub(super) const META_RECOVERED: &str = "recovered";

worded! {
    /// A table of records. The first two exist in every file, the others from their first write; a release that does not know a table leaves
    /// it unchanged.
    #[derive(Serialize)]
    #[serde(rename_all = "lowercase")]
    Table {
        Claims = "claims",
        Pods = "pods",
        Released = "released",
        Allocations = "allocations",
        Values = "values",
    }
}

impl Table {
    pub(super) fn definition(self) -> TableDefinition<'static, &'static str, &'static [u8]> {
        TableDefinition::new(self.as_str())
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An unreadable record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Skipped {
    pub table: Table,
    /// Key in the file.
    pub key: String,
    pub reason: String,
    /// Bytes of its value.
    pub bytes: usize,
}

/// Metadata of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Meta {
    pub format: u32,
    /// Program and release of the last write.
    pub written_by: String,
    /// RFC 3339.
    pub created: String,
    /// Whether a start has recovered what there was to recover.
    #[serde(skip)]
    pub(super) is_recovered: bool,
}

/// The content of a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Dump {
    pub meta: Meta,
    /// By UID, ascending.
    pub claims: Vec<ClaimRecord>,
    pub pods: Vec<PodRecord>,
    /// Claims that an operator released.
    pub released: Vec<ReleaseRecord>,
    pub allocations: Vec<PodAllocation>,
    /// Values below `/sys` that drivers changed for claims.
    pub values: Vec<ClaimValues>,
    pub skipped: Vec<Skipped>,
    /// Unreadable values whose key was written again.
    pub unreadable: u64,
    /// Records with fields that this release does not know.
    #[serde(skip)]
    pub(super) partly: HashSet<(Table, String)>,
}

/// Keys whose values a write must preserve.
#[derive(Debug, Default)]
pub(super) struct Precious {
    /// Unreadable to this release: preserved in the table `unreadable`.
    pub(super) unreadable: HashSet<(Table, String)>,
    /// Readable in part: the rest is carried over.
    pub(super) partly: HashSet<(Table, String)>,
}

impl Dump {
    /// Returns whether there is no record: the checkpoint is new, or every claim was released.
    pub fn is_empty(&self) -> bool {
        self.claims.is_empty()
            && self.pods.is_empty()
            && self.allocations.is_empty()
            && self.skipped.is_empty()
    }

    /// Returns the UIDs of claims with unreadable records.
    pub fn unreadable_claims(&self) -> BTreeSet<String> {
        let claims = self.skipped.iter().filter(|skipped| skipped.table == Table::Claims);
        claims.map(|skipped| skipped.key.clone()).collect()
    }

    pub(super) fn precious(&self) -> Precious {
        let unreadable = self.skipped.iter().map(|skipped| (skipped.table, skipped.key.clone())).collect();
        Precious { unreadable, partly: self.partly.clone() }
    }
}

/// Why the content of a file cannot be read.
#[derive(Debug)]
pub(super) enum LoadError {
    Newer {
        found: u32,
        written_by: String,
    },
    /// Of a format without an upgrade.
    Older {
        found: u32,
        written_by: String,
    },
    /// Of another program, or damaged.
    Foreign(String),
    Storage(redb::Error),
}

impl<E: Into<redb::Error>> From<E> for LoadError {
    fn from(error: E) -> Self {
        Self::Storage(error.into())
    }
}

/// Returns this program and release, for `written-by`.
pub(super) fn writer_name() -> &'static str {
    concat!("nodedock ", env!("CARGO_PKG_VERSION"))
}

/// Serializes a change, on the caller's thread, so that the writer thread only copies bytes.
pub(super) fn encode(change: Change) -> Result<Write, CommitError> {
    match change {
        Change::PutClaim(record) => put(Table::Claims, &record.id.uid, &*record),
        Change::PutPod(record) => put(Table::Pods, &record.pod.uid, &record),
        Change::DeleteClaim(uid) => Ok(Write { table: Table::Claims, key: uid, value: None }),
        Change::DeletePod(uid) => Ok(Write { table: Table::Pods, key: uid, value: None }),
        Change::PutReleased(record) => put(Table::Released, &record.id.uid, &record),
        Change::DeleteReleased(uid) => Ok(Write { table: Table::Released, key: uid, value: None }),
        Change::PutAllocation(record) => put(Table::Allocations, record.uid(), &*record),
        Change::DeleteAllocation(uid) => Ok(Write { table: Table::Allocations, key: uid, value: None }),
        Change::PutValues(record) => put(Table::Values, &record.id.uid, &*record),
        Change::DeleteValues(uid) => Ok(Write { table: Table::Values, key: uid, value: None }),
    }
}

fn put(table: Table, uid: &Uid, record: &impl Serialize) -> Result<Write, CommitError> {
    let value = value_of(record)
        .map_err(|source| CommitError::Encode { uid: uid.clone(), source: Arc::new(source) })?;
    Ok(Write { table, key: uid.clone(), value: Some(value) })
}

pub(super) fn value_of(record: &impl Serialize) -> Result<Vec<u8>, serde_json::Error> {
    let mut value = Vec::with_capacity(1024);
    value.push(VALUE_VERSION);
    serde_json::to_writer(&mut value, record)?;
    Ok(value)
}

/// Parses a value, or returns the reason as text. A field whose name is not a text is invalid JSON, although a reader that skips the
/// field does not notice: it may be a damaged known field.
pub(super) fn decode<R: DeserializeOwned>(value: &[u8], steps: &[(u8, RecordStep)]) -> Result<R, String> {
    let read = match value.split_first() {
        Some((&VALUE_VERSION, json)) => {
            serde_json::from_str(std::str::from_utf8(json).map_err(|error| error.to_string())?)
        }
        _ => serde_json::from_value(json_of(value, steps)?),
    };
    read.map_err(|error| error.to_string())
}

/// Returns a value's JSON in this release's version.
fn json_of(value: &[u8], steps: &[(u8, RecordStep)]) -> Result<Value, String> {
    let (version, json) = value.split_first().ok_or("the record is empty")?;
    let path = upgrade::path(steps, *version, VALUE_VERSION).filter(|_| *version <= VALUE_VERSION);
    let path = path
        .ok_or_else(|| format!("the record has version {version}, and this release knows {VALUE_VERSION}"))?;
    let json = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    path.into_iter().try_fold(json, |json, step| step(json))
}

/// Returns whether a value has fields that its record lacks.
fn says_more(value: &[u8], record: &impl Serialize, steps: &[(u8, RecordStep)]) -> bool {
    let says_more = || -> Option<bool> {
        if value_of(record).ok()? == value {
            return Some(false);
        }
        Some(carry::says_more(&json_of(value, steps).ok()?, &serde_json::to_value(record).ok()?))
    };
    says_more().unwrap_or(false)
}

/// Returns a new value with the unknown fields of the previous one.
pub(super) fn carry_over(table: Table, before: &[u8], new: &[u8]) -> Result<Vec<u8>, String> {
    let words = |error: serde_json::Error| error.to_string();
    let stored = json_of(before, UPGRADES.records)?;
    let known = match table {
        Table::Claims => as_known::<ClaimRecord>(&stored),
        Table::Pods => as_known::<PodRecord>(&stored),
        Table::Released => as_known::<ReleaseRecord>(&stored),
        Table::Allocations => as_known::<PodAllocation>(&stored),
        Table::Values => as_known::<ClaimValues>(&stored),
    };
    let mut new = json_of(new, &[])?;
    carry::carry_over(&stored, &known.map_err(words)?, &mut new);
    value_of(&new).map_err(words)
}

/// Returns a record as this release writes it after reading it.
fn as_known<R: DeserializeOwned + Serialize>(stored: &Value) -> serde_json::Result<Value> {
    serde_json::to_value(R::deserialize(stored)?)
}

/// Reads everything. `None`: the file is new, without a table.
pub(super) fn load(
    database: &impl ReadableDatabase,
    steps: &[(u8, RecordStep)],
) -> Result<Option<Dump>, LoadError> {
    let Some(meta) = load_meta(database)? else { return Ok(None) };
    let read = database.begin_read()?;
    let mut dump = Dump { meta, unreadable: count(&read)?, ..Dump::default() };
    let found = &mut dump;
    found.claims = load_table(&read, Table::Claims, |claim: &ClaimRecord| &claim.id.uid, steps, found)?;
    found.pods = load_table(&read, Table::Pods, |pod: &PodRecord| &pod.pod.uid, steps, found)?;
    found.released = load_table(&read, Table::Released, |claim: &ReleaseRecord| &claim.id.uid, steps, found)?;
    found.allocations = load_table(&read, Table::Allocations, PodAllocation::uid, steps, found)?;
    found.values = load_table(&read, Table::Values, |values: &ClaimValues| &values.id.uid, steps, found)?;
    Ok(Some(dump))
}

/// Reads the metadata of a file. `None`: it is new, without a table.
pub(super) fn load_meta(database: &impl ReadableDatabase) -> Result<Option<Meta>, LoadError> {
    let read = database.begin_read()?;
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
    let is_recovered = table.get(META_RECOVERED)?.is_some();
    Ok(Some(Meta { format, written_by, created, is_recovered }))
}

/// Reads a table. `key_of` returns the key that a record must have.
fn load_table<R: DeserializeOwned + Serialize>(
    read: &ReadTransaction,
    table: Table,
    key_of: impl Fn(&R) -> &Uid,
    steps: &[(u8, RecordStep)],
    dump: &mut Dump,
) -> Result<Vec<R>, LoadError> {
    let open = match read.open_table(table.definition()) {
        Err(TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
        open => open?,
    };
    let mut records = Vec::new();
    for entry in open.iter()? {
        let (key, value) = entry?;
        let (key, value) = (key.value(), value.value());
        let own_key = |record: R| {
            if key_of(&record).as_str() == key {
                return Ok(record);
            }
            Err(format!("the record has the key {}", key_of(&record)))
        };
        match decode(value, steps).and_then(own_key) {
            Ok(record) => {
                if says_more(value, &record, steps) {
                    dump.partly.insert((table, key.to_owned()));
                }
                records.push(record);
            }
            Err(reason) => {
                let bytes = value.len();
                dump.skipped.push(Skipped { table, key: key.to_owned(), reason, bytes });
            }
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

/// Creates the tables of a new file, or upgrades those of an older one to this release's format. Durable when it returns.
pub(super) fn sign(
    database: &redb::Database,
    found: Option<&Meta>,
    upgrades: &Upgrades,
) -> Result<(), LoadError> {
    if found.is_some_and(|meta| meta.written_by == writer_name() && meta.format == FORMAT_VERSION) {
        return Ok(());
    }
    let format = found.map_or(FORMAT_VERSION, |meta| meta.format);
    let Some(path) = upgrade::path(upgrades.formats, format, FORMAT_VERSION) else {
        let written_by = found.map(|meta| meta.written_by.clone()).unwrap_or_default();
        return Err(LoadError::Older { found: format, written_by });
    };
    let write = database.begin_write()?;
    for step in path {
        step(&write)?;
    }
    {
        let mut meta = write.open_table(META)?;
        meta.insert(META_FORMAT, FORMAT_VERSION.to_string().as_str())?;
        meta.insert(META_WRITTEN_BY, writer_name())?;
        if found.is_none() {
            meta.insert(META_CREATED, clock::rfc3339(clock::now_ms()).as_str())?;
        }
        write.open_table(Table::Claims.definition())?;
        write.open_table(Table::Pods.definition())?;
    }
    write.commit()?;
    Ok(())
}
