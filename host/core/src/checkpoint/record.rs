//! One record in the file: its kind, its JSON in each version, and what a write of it carries over.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::carry;
use super::upgrade::{self, RecordStep, UPGRADES};
use nodedock_base::worded;
use nodedock_model::{
    AdapterRecord, ApiObject, ClaimRecord, ClaimValues, DriverOffer, EndedRecord, MechanismsRecord,
    NameRecord, NodeRecord, PodRecord, ReleaseRecord, ResourceOffer,
};

/// Version of the JSON of a record.
pub(super) const RECORD_VERSION: u8 = 1;

worded! {
    /// A kind of records. A release that does not know a kind leaves its records unchanged.
    #[derive(Serialize)]
    #[serde(rename_all = "kebab-case")]
    Table {
        Claims = "claims",
        Pods = "pods",
        Released = "released",
        Values = "values",
        Objects = "objects",
        Names = "names",
        Machine = "machine",
        Adapters = "adapters",
        Mechanisms = "mechanisms",
        DriverOffers = "driver-offers",
        ResourceOffers = "resource-offers",
        Ended = "ended",
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A record in the file: the version and the bytes of its JSON.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stored<'a> {
    pub(super) version: i64,
    pub(super) record: &'a [u8],
}

impl<'a> Stored<'a> {
    pub(super) fn of_this_release(json: &'a str) -> Self {
        Self {
            version: RECORD_VERSION.into(),
            record: json.as_bytes(),
        }
    }

    /// CRC-32 of a record with its place: what SQLite does not check.
    pub(super) fn checksum(self, kind: &str, key: &str) -> i64 {
        let mut crc = crc32fast::Hasher::new();
        for part in [
            kind.as_bytes(),
            &[0],
            key.as_bytes(),
            &[0],
            &self.version.to_be_bytes(),
            self.record,
        ] {
            crc.update(part);
        }
        crc.finalize().into()
    }
}

pub(super) fn value_of(record: &impl Serialize) -> Result<String, serde_json::Error> {
    serde_json::to_string(record)
}

/// Parses a record, or returns the reason as text. A field whose name is not a text is invalid JSON, although a reader that skips the
/// field does not notice: it may be a damaged known field.
pub(super) fn decode<R: DeserializeOwned>(
    stored: Stored<'_>,
    steps: &[(u8, RecordStep)],
) -> Result<R, String> {
    let read = if stored.version == i64::from(RECORD_VERSION) {
        serde_json::from_str(std::str::from_utf8(stored.record).map_err(|error| error.to_string())?)
    } else {
        serde_json::from_value(json_of(stored, steps)?)
    };
    read.map_err(|error| error.to_string())
}

/// Returns a record's JSON in this release's version.
fn json_of(stored: Stored<'_>, steps: &[(u8, RecordStep)]) -> Result<Value, String> {
    let version = u8::try_from(stored.version)
        .ok()
        .filter(|version| *version <= RECORD_VERSION);
    let path = version
        .and_then(|version| upgrade::path(steps, version, RECORD_VERSION))
        .ok_or_else(|| {
            let version = stored.version;
            format!("the record has version {version}, and this release knows {RECORD_VERSION}")
        })?;
    let json = serde_json::from_slice(stored.record).map_err(|error| error.to_string())?;
    path.into_iter().try_fold(json, |json, step| step(json))
}

/// Returns whether a stored record has fields that the one that was read lacks.
pub(super) fn says_more(
    stored: Stored<'_>,
    record: &impl Serialize,
    steps: &[(u8, RecordStep)],
) -> bool {
    let says_more = || -> Option<bool> {
        if value_of(record).ok()?.as_bytes() == stored.record {
            return Some(false);
        }
        Some(carry::says_more(
            &json_of(stored, steps).ok()?,
            &serde_json::to_value(record).ok()?,
        ))
    };
    says_more().unwrap_or(false)
}

/// Returns a new record with the unknown fields of the stored one.
pub(super) fn carry_over(table: Table, before: Stored<'_>, new: &str) -> Result<String, String> {
    let words = |error: serde_json::Error| error.to_string();
    let stored = json_of(before, UPGRADES.records)?;
    let known = match table {
        Table::Claims => as_known::<ClaimRecord>(&stored),
        Table::Pods => as_known::<PodRecord>(&stored),
        Table::Released => as_known::<ReleaseRecord>(&stored),
        Table::Values => as_known::<ClaimValues>(&stored),
        Table::Objects => as_known::<ApiObject>(&stored),
        Table::Names => as_known::<NameRecord>(&stored),
        Table::Machine => as_known::<NodeRecord>(&stored),
        Table::Adapters => as_known::<AdapterRecord>(&stored),
        Table::Mechanisms => as_known::<MechanismsRecord>(&stored),
        Table::DriverOffers => as_known::<DriverOffer>(&stored),
        Table::ResourceOffers => as_known::<ResourceOffer>(&stored),
        Table::Ended => as_known::<EndedRecord>(&stored),
    };
    let mut new = json_of(Stored::of_this_release(new), &[])?;
    carry::carry_over(&stored, &known.map_err(words)?, &mut new);
    value_of(&new).map_err(words)
}

/// Returns a record as this release writes it after reading it.
fn as_known<R: DeserializeOwned + Serialize>(stored: &Value) -> serde_json::Result<Value> {
    serde_json::to_value(R::deserialize(stored)?)
}
