//! What is durable of adapters, as JSON in a file beside the checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};

use nodedock_base::conditions::Conditions;
use nodedock_base::file;
use nodedock_model::{AttributeRule, DriverName, ExtendedResource, PoolName, Problem, ProblemCode};

const VERSION: u32 = 1;
/// Bytes of the file: ten thousand devices of each of a hundred resources.
const BYTES_MAX: u64 = 16 << 20;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    version: u32,
    #[serde(default)]
    pub(super) adapters: BTreeMap<ExtendedResource, AdapterRecord>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AdapterRecord {
    pub(super) driver: DriverName,
    pub(super) pool: PoolName,
    /// What an operator decided; otherwise the adapter says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) enabled: Option<bool>,
    /// The paths that the adapter allows, for a start at which its file cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) paths: Option<Vec<String>>,
    /// The rules of the adapter, for such a start: without them other drivers could have the same hardware.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) rules: Vec<AttributeRule>,
    /// It is disabled, and the kubelet's device manager alone offers its devices.
    #[serde(default)]
    pub(super) is_returned: bool,
    /// The devices that pods of the kubelet had before the adapter are known.
    pub(super) is_taken_over: bool,
    /// Of those, the ones that are not free yet.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) held: BTreeSet<String>,
}

impl Record {
    pub(super) fn of(adapters: BTreeMap<ExtendedResource, AdapterRecord>) -> Self {
        Self {
            version: VERSION,
            adapters,
        }
    }
}

impl AdapterRecord {
    pub(super) fn new(driver: DriverName, pool: PoolName) -> Self {
        Self {
            driver,
            pool,
            enabled: None,
            paths: None,
            rules: Vec::new(),
            is_returned: false,
            is_taken_over: false,
            held: BTreeSet::new(),
        }
    }
}

/// Reads the record; one that cannot be read is as none, with a condition: what operators decided has to be decided again.
pub(super) fn read(path: &Path, conditions: &Conditions) -> Record {
    match decoded(path) {
        Ok(record) => record,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Record::default(),
        Err(error) => {
            let message = format!(
                "{} cannot be read ({error}): adapters are enabled or disabled as their files say; decide with `nodedock adapter` again",
                path.display()
            );
            conditions.set(
                &path.display().to_string(),
                Problem::internal(ProblemCode::AdapterNotStored, message),
            );
            Record::default()
        }
    }
}

fn decoded(path: &Path) -> io::Result<Record> {
    let mut bytes = Vec::new();
    File::open(path)?
        .take(BYTES_MAX + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > BYTES_MAX {
        return Err(io::Error::other(format!(
            "it has more than {BYTES_MAX} bytes"
        )));
    }
    let record: Record = serde_json::from_slice(&bytes)?;
    if record.version != VERSION {
        return Err(io::Error::other(format!(
            "it has version {}, not {VERSION}",
            record.version
        )));
    }
    Ok(record)
}

pub(super) fn write(path: &Path, record: &Record) -> io::Result<()> {
    file::replace(path, &serde_json::to_vec(record)?)
}
