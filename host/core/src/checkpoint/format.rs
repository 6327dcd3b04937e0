//! Tables, keys and values, as in `docs/checkpoint-format.md`.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, VecDeque};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread::ScopedJoinHandle;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::database::{Database, Keep, Row, Rows, StoreError, Write};
use super::record::{Stored, Table, decode, says_more, value_of};
use super::upgrade::{self, RecordStep, Upgrades};
use super::{Change, CommitError};
use nodedock_base::clock;
use nodedock_model::{
    AdapterRecord, ApiObject, ClaimRecord, ClaimValues, DriverOffer, EndedRecord, MechanismsRecord,
    NameError, NameRecord, NodeRecord, PodRecord, ReleaseRecord, ResourceOffer, Uid,
};

/// Version of the tables and of the meaning of their keys.
pub const FORMAT_VERSION: u32 = 1;
pub(super) const META_FORMAT: &str = "format";
pub(super) const META_WRITTEN_BY: &str = "written-by";
pub(super) const META_CREATED: &str = "created";
pub(super) const META_RECOVERED: &str = "recovered";

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
    /// True if a start has recovered everything that there was to recover.
    #[serde(skip)]
    pub(super) is_recovered: bool,
}

/// The content of a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Dump {
    pub meta: Meta,
    /// Claims by UID, ascending.
    pub claims: Vec<ClaimRecord>,
    pub pods: Vec<PodRecord>,
    /// Claims that an operator released.
    pub released: Vec<ReleaseRecord>,
    /// Claims that were unprepared, the newest of a day.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ended: Vec<EndedRecord>,
    /// Values below `/sys` that drivers changed for claims.
    pub values: Vec<ClaimValues>,
    /// Objects of the local API.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub objects: Vec<ApiObject>,
    /// Names of drivers and extended resources, with the sources to which they belong.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<NameRecord>,
    /// The name of this node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeRecord>,
    /// Adapters of device plugins, by resource.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<AdapterRecord>,
    /// `None`: no slices of pools with an extended-resource name were ever written, or the record is unreadable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mechanisms: Option<MechanismsRecord>,
    /// Drivers that were offered to the kubelet last.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub driver_offers: Vec<DriverOffer>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub resource_offers: Vec<ResourceOffer>,
    pub skipped: Vec<Skipped>,
    /// Unreadable values whose key was written again.
    pub unreadable: u64,
}

impl Dump {
    pub(super) fn sort(&mut self) {
        self.claims.sort_by(|a, b| a.id.uid.cmp(&b.id.uid));
        self.pods.sort_by(|a, b| a.pod.uid.cmp(&b.pod.uid));
        self.released.sort_by(|a, b| a.id.uid.cmp(&b.id.uid));
        self.ended.sort_by(|a, b| a.id.uid.cmp(&b.id.uid));
        self.values.sort_by(|a, b| a.id.uid.cmp(&b.id.uid));
        self.objects.sort_by(|a, b| a.uid.cmp(&b.uid));
        self.names
            .sort_by(|a, b| a.name.as_str().cmp(b.name.as_str()));
        self.adapters.sort_by(|a, b| a.resource.cmp(&b.resource));
        self.driver_offers.sort_by(|a, b| a.driver.cmp(&b.driver));
        self.resource_offers
            .sort_by(|a, b| a.resource.cmp(&b.resource));
        self.skipped
            .sort_by(|a, b| (a.table, &a.key).cmp(&(b.table, &b.key)));
    }

    /// Returns whether there is no record: the checkpoint is new, or every claim was released.
    pub fn is_empty(&self) -> bool {
        self.claims.is_empty() && self.pods.is_empty() && self.skipped.is_empty()
    }

    /// Returns the names whose records are unreadable.
    pub fn unreadable_names(&self) -> Vec<String> {
        self.unreadable_of(Table::Names).collect()
    }

    /// Returns the UIDs of claims with unreadable records.
    pub fn unreadable_claims(&self) -> BTreeSet<String> {
        self.unreadable_of(Table::Claims).collect()
    }

    /// Returns the keys of a kind's unreadable records.
    pub fn unreadable_of(&self, table: Table) -> impl Iterator<Item = String> {
        self.skipped
            .iter()
            .filter(move |skipped| skipped.table == table)
            .map(|skipped| skipped.key.clone())
    }
}

/// Why the content of a file cannot be read.
#[derive(Debug)]
pub(super) enum LoadError {
    Newer {
        found: u32,
        written_by: String,
    },
    /// The file has a format without an upgrade.
    Older {
        found: u32,
        written_by: String,
    },
    /// The file belongs to another program, or is damaged.
    Foreign(String),
    Store(StoreError),
}

impl From<StoreError> for LoadError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// Returns this program and release, for `written-by`.
pub(super) fn writer_name() -> &'static str {
    concat!("nodedock ", env!("CARGO_PKG_VERSION"))
}

/// Serializes a change, on the caller's thread, so that the commit only copies bytes.
pub(super) fn encode(change: Change) -> Result<Write, CommitError> {
    match change {
        Change::PutClaim(record) => put(Table::Claims, record.id.uid.clone(), &*record),
        Change::DeleteClaim(uid) => Ok(delete(Table::Claims, uid)),
        Change::PutPod(record) => put(Table::Pods, record.pod.uid.clone(), &*record),
        Change::DeletePod(uid) => Ok(delete(Table::Pods, uid)),
        Change::PutReleased(record) => put(Table::Released, record.id.uid.clone(), &*record),
        Change::DeleteReleased(uid) => Ok(delete(Table::Released, uid)),
        Change::PutEnded(record) => put(Table::Ended, record.id.uid.clone(), &*record),
        Change::DeleteEnded(uid) => Ok(delete(Table::Ended, uid)),
        Change::PutValues(record) => put(Table::Values, record.id.uid.clone(), &*record),
        Change::DeleteValues(uid) => Ok(delete(Table::Values, uid)),
        Change::PutObject(record) => put(Table::Objects, record.uid.clone(), &*record),
        Change::DeleteObject(uid) => Ok(delete(Table::Objects, uid)),
        Change::PutName(record) => put(Table::Names, record.uid.clone(), &*record),
        Change::DeleteName(uid) => Ok(delete(Table::Names, uid)),
        Change::PutNode(record) => put(Table::Machine, record.uid.clone(), &*record),
        Change::PutAdapter(record) => put(Table::Adapters, record.key(), &*record),
        Change::DeleteAdapter(key) => Ok(delete(Table::Adapters, key)),
        Change::PutMechanisms(record) => put(Table::Mechanisms, MechanismsRecord::key(), &*record),
        Change::PutDriverOffer(record) => put(Table::DriverOffers, record.key(), &*record),
        Change::DeleteDriverOffer(key) => Ok(delete(Table::DriverOffers, key)),
        Change::PutResourceOffer(record) => put(Table::ResourceOffers, record.key(), &*record),
        Change::DeleteResourceOffer(key) => Ok(delete(Table::ResourceOffers, key)),
    }
}

fn put(table: Table, key: Uid, record: &impl Serialize) -> Result<Write, CommitError> {
    match value_of(record) {
        Ok(value) => Ok(Write {
            table,
            key,
            value: Some(value),
        }),
        Err(source) => Err(CommitError::Encode {
            uid: key,
            source: Arc::new(source),
        }),
    }
}

fn delete(table: Table, key: Uid) -> Write {
    Write {
        table,
        key,
        value: None,
    }
}

/// Reads everything, and notes where each record is and what a write of it must preserve.
pub(super) fn load(database: &mut Database, steps: &[(u8, RecordStep)]) -> Result<Dump, LoadError> {
    let meta = load_meta(database)?;
    let mut loading = Loading {
        rows: Rows::new(),
        dump: Dump {
            meta,
            ..Dump::default()
        },
    };
    let parallel = std::thread::available_parallelism()
        .map_or(1, NonZeroUsize::get)
        .min(PARSERS_MAX);
    std::thread::scope(|scope| {
        let mut parsing = VecDeque::with_capacity(parallel);
        let mut batch = Vec::new();
        database.each_record(|id, kind, key, stored, checksum| {
            // Records of a kind that a newer release has added stay unchanged.
            let Some(table) = Table::ALL
                .iter()
                .copied()
                .find(|table| table.as_str() == kind)
            else {
                return;
            };
            let (version, record) = (stored.version, stored.record.to_vec());
            batch.push(Unparsed {
                id,
                table,
                key: key.to_owned(),
                version,
                record,
                checksum,
            });
            if batch.len() == BATCH {
                if parsing.len() == parallel {
                    parsing
                        .pop_front()
                        .into_iter()
                        .for_each(|batch| loading.take(joined(batch)));
                }
                let batch = std::mem::take(&mut batch);
                parsing.push_back(scope.spawn(move || parse(batch, steps)));
            }
        })?;
        parsing
            .into_iter()
            .for_each(|batch| loading.take(joined(batch)));
        loading.take(parse(batch, steps));
        Ok::<_, StoreError>(())
    })?;
    let Loading { rows, mut dump } = loading;
    database.rows = rows;
    dump.unreadable = database.unreadable()?;
    dump.sort();
    Ok(dump)
}

/// Reads the metadata of a file.
pub(super) fn load_meta(database: &Database) -> Result<Meta, LoadError> {
    if let Some(names) = database.foreign_tables()? {
        return Err(LoadError::Foreign(format!(
            "it has the tables {} and no table meta",
            names.join(", ")
        )));
    }
    let text = |key| database.meta(key);
    let (written_by, created) = (
        text(META_WRITTEN_BY)?.unwrap_or_default(),
        text(META_CREATED)?.unwrap_or_default(),
    );
    let format = text(META_FORMAT)?.unwrap_or_default();
    let Ok(format) = format.parse::<u32>() else {
        return Err(LoadError::Foreign(format!(
            "its format version is {format:?}"
        )));
    };
    if format > FORMAT_VERSION {
        return Err(LoadError::Newer {
            found: format,
            written_by,
        });
    }
    Ok(Meta {
        format,
        written_by,
        created,
        is_recovered: text(META_RECOVERED)?.is_some(),
    })
}

/// Records that one thread parses at a time, and the threads that parse at once: with thousands of claims, a start waits for that.
pub(super) const BATCH: usize = 1024;
const PARSERS_MAX: usize = 4;

/// A record as it is in the file.
struct Unparsed {
    id: i64,
    table: Table,
    key: String,
    version: i64,
    record: Vec<u8>,
    checksum: i64,
}

/// A record, and what a write of it must preserve, or why it is unreadable.
struct Parsed {
    id: i64,
    table: Table,
    key: String,
    /// The record's own, if it is readable. `None`: a key that no record of ours can have.
    uid: Option<Uid>,
    bytes: usize,
    read: Result<(Record, Keep), String>,
}

enum Record {
    Claim(ClaimRecord),
    Pod(PodRecord),
    Released(ReleaseRecord),
    Ended(EndedRecord),
    Values(ClaimValues),
    Object(ApiObject),
    Name(NameRecord),
    Node(NodeRecord),
    Adapter(AdapterRecord),
    Mechanisms(MechanismsRecord),
    DriverOffer(DriverOffer),
    ResourceOffer(ResourceOffer),
}

fn joined(batch: ScopedJoinHandle<'_, Vec<Parsed>>) -> Vec<Parsed> {
    batch
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn parse(batch: Vec<Unparsed>, steps: &[(u8, RecordStep)]) -> Vec<Parsed> {
    let parsed = batch.into_iter().map(|unparsed| {
        let uid = Uid::new(&unparsed.key);
        let read = unparsed.parse(uid.as_ref(), steps);
        let Unparsed {
            id,
            table,
            key,
            record,
            ..
        } = unparsed;
        let bytes = record.len();
        match read {
            Ok((uid, record, keep)) => Parsed {
                id,
                table,
                key,
                uid: Some(uid),
                bytes,
                read: Ok((record, keep)),
            },
            Err(reason) => Parsed {
                id,
                table,
                key,
                uid: uid.ok(),
                bytes,
                read: Err(reason),
            },
        }
    });
    parsed.collect()
}

impl Unparsed {
    fn parse(
        &self,
        uid: Result<&Uid, &NameError>,
        steps: &[(u8, RecordStep)],
    ) -> Result<(Uid, Record, Keep), String> {
        let stored = Stored {
            version: self.version,
            record: &self.record,
        };
        if self.checksum != stored.checksum(self.table.as_str(), &self.key) {
            return Err("its checksum does not match: it is damaged".to_owned());
        }
        let uid = uid.map_err(ToString::to_string)?;
        match self.table {
            Table::Claims => parse_as(Record::Claim, |it| it.id.uid.clone(), uid, stored, steps),
            Table::Pods => parse_as(Record::Pod, |it| it.pod.uid.clone(), uid, stored, steps),
            Table::Released => {
                parse_as(Record::Released, |it| it.id.uid.clone(), uid, stored, steps)
            }
            Table::Ended => parse_as(Record::Ended, |it| it.id.uid.clone(), uid, stored, steps),
            Table::Values => parse_as(Record::Values, |it| it.id.uid.clone(), uid, stored, steps),
            Table::Objects => parse_as(Record::Object, |it| it.uid.clone(), uid, stored, steps),
            Table::Names => parse_as(Record::Name, |it| it.uid.clone(), uid, stored, steps),
            Table::Machine => parse_as(Record::Node, |it| it.uid.clone(), uid, stored, steps),
            Table::Adapters => parse_as(Record::Adapter, AdapterRecord::key, uid, stored, steps),
            Table::Mechanisms => parse_as(
                Record::Mechanisms,
                |_| MechanismsRecord::key(),
                uid,
                stored,
                steps,
            ),
            Table::DriverOffers => {
                parse_as(Record::DriverOffer, DriverOffer::key, uid, stored, steps)
            }
            Table::ResourceOffers => parse_as(
                Record::ResourceOffer,
                ResourceOffer::key,
                uid,
                stored,
                steps,
            ),
        }
    }
}

/// Parses a record, and returns its key with it. `key_of` returns it from the record; it must be that of its row.
fn parse_as<R: DeserializeOwned + Serialize>(
    of_table: impl Fn(R) -> Record,
    key_of: impl Fn(&R) -> Uid,
    key: &Uid,
    stored: Stored<'_>,
    steps: &[(u8, RecordStep)],
) -> Result<(Uid, Record, Keep), String> {
    let record: R = decode(stored, steps)?;
    let found = key_of(&record);
    if found != *key {
        return Err(format!("the record has the key {found}"));
    }
    let keep = if says_more(stored, &record, steps) {
        Keep::Fields
    } else {
        Keep::Nothing
    };
    Ok((found, of_table(record), keep))
}

/// Rows and records that a load has read so far.
struct Loading {
    rows: Rows,
    dump: Dump,
}

impl Loading {
    /// Takes records in the order of the file.
    fn take(&mut self, parsed: Vec<Parsed>) {
        for Parsed {
            id,
            table,
            key,
            uid,
            bytes,
            read,
        } in parsed
        {
            let row = uid.map(|uid| self.rows.entry((table, uid)));
            let read = match &row {
                Some(Entry::Occupied(_)) => Err("another record has the same key".to_owned()),
                _ => read,
            };
            let keep = read.as_ref().map_or(Keep::Value, |(_, keep)| *keep);
            row.map(|row| row.or_insert(Row { id, keep }));
            let dump = &mut self.dump;
            match read.map(|(record, _)| record) {
                Ok(Record::Claim(claim)) => dump.claims.push(claim),
                Ok(Record::Pod(pod)) => dump.pods.push(pod),
                Ok(Record::Released(claim)) => dump.released.push(claim),
                Ok(Record::Ended(claim)) => dump.ended.push(claim),
                Ok(Record::Values(values)) => dump.values.push(values),
                Ok(Record::Object(object)) => dump.objects.push(object),
                Ok(Record::Name(name)) => dump.names.push(name),
                Ok(Record::Node(node)) => dump.node = Some(node),
                Ok(Record::Adapter(adapter)) => dump.adapters.push(adapter),
                Ok(Record::Mechanisms(mechanisms)) => dump.mechanisms = Some(mechanisms),
                Ok(Record::DriverOffer(offer)) => dump.driver_offers.push(offer),
                Ok(Record::ResourceOffer(offer)) => dump.resource_offers.push(offer),
                Err(reason) => dump.skipped.push(Skipped {
                    table,
                    key,
                    reason,
                    bytes,
                }),
            }
        }
    }
}

/// Returns whether this release has signed the file.
pub(super) fn is_current(found: &Meta) -> bool {
    found.written_by == writer_name() && found.format == FORMAT_VERSION
}

/// Brings the tables of an older file to this release's format, and signs it. Belongs into a transaction.
pub(super) fn sign(
    database: &Database,
    found: &Meta,
    upgrades: &Upgrades,
) -> Result<(), LoadError> {
    let Some(path) = upgrade::path(upgrades.formats, found.format, FORMAT_VERSION) else {
        return Err(LoadError::Older {
            found: found.format,
            written_by: found.written_by.clone(),
        });
    };
    for step in path {
        database.upgrade(step)?;
    }
    database.set_meta(META_FORMAT, &FORMAT_VERSION.to_string())?;
    Ok(database.set_meta(META_WRITTEN_BY, writer_name())?)
}

/// Signs a new file.
pub(super) fn sign_new(database: &Database) -> Result<(), StoreError> {
    database.set_meta(META_FORMAT, &FORMAT_VERSION.to_string())?;
    database.set_meta(META_WRITTEN_BY, writer_name())?;
    database.set_meta(META_CREATED, &clock::rfc3339(clock::now_ms()))
}
