//! The file of the record, as JSON beside the checkpoint. Without it nothing is known, and both mechanisms are read before either offers.

use std::collections::BTreeMap;
use std::io;

use serde::{Deserialize, Serialize};

use super::decide::Mechanism;
use super::switch::{LocalPool, POOLS_MAX, PoolRecord, Record};
use crate::bridge::state_file::{Stored, check_version};

const VERSION: u32 = 1;

/// Bytes of a pool without claimed devices, at most: three names and some JSON.
const POOL_BYTES_MAX: usize = 1024;
/// Bytes of all claimed devices: sixteen thousand.
const CLAIMED_BYTES_MAX: usize = 1 << 20;

#[derive(Serialize, Deserialize)]
struct RecordFile {
    version: u32,
    #[serde(default)]
    decided: Option<Mechanism>,
    #[serde(default)]
    pools: Vec<PoolEntry>,
}

#[derive(Serialize, Deserialize)]
struct PoolEntry {
    #[serde(flatten)]
    key: LocalPool,
    #[serde(flatten)]
    record: PoolRecord,
}

impl Stored for Record {
    const BYTES_MAX: usize = POOLS_MAX * POOL_BYTES_MAX + CLAIMED_BYTES_MAX;
    const CONSEQUENCE: &'static str =
        "pools with an extended-resource name are not offered by another mechanism than before";

    fn decode(bytes: &[u8]) -> io::Result<Self> {
        let file: RecordFile = serde_json::from_slice(bytes)?;
        check_version(file.version)?;
        let pools = file
            .pools
            .into_iter()
            .take(POOLS_MAX)
            .map(|entry| (entry.key, entry.record));
        Ok(Self {
            decided: file.decided,
            pools: pools.collect::<BTreeMap<_, _>>(),
        })
    }

    fn encode(&self) -> io::Result<Vec<u8>> {
        let pools = self.pools.iter();
        let pools = pools.map(|(key, record)| PoolEntry {
            key: key.clone(),
            record: record.clone(),
        });
        Ok(serde_json::to_vec(&RecordFile {
            version: VERSION,
            decided: self.decided,
            pools: pools.collect(),
        })?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written_and_another_version_is_refused() {
        let key = |pool: &str| LocalPool {
            driver: "gpu.example.com".parse().unwrap(),
            pool: pool.parse().unwrap(),
        };
        let record = |mechanism, claimed: &[&str]| PoolRecord {
            resource: "example.com/gpu".parse().unwrap(),
            mechanism,
            claimed: claimed.iter().map(|name| name.parse().unwrap()).collect(),
        };
        let pools = [
            (key("a"), record(Mechanism::Dra, &[])),
            (key("b/c"), record(Mechanism::DevicePlugin, &["0", "1"])),
        ];
        let written = Record {
            decided: Some(Mechanism::Dra),
            pools: pools.into(),
        };
        let bytes = written.encode().unwrap();
        assert_eq!(Record::decode(&bytes).unwrap(), written);
        let text = String::from_utf8(bytes).unwrap();
        for (bad, why) in [
            (text.replace("\"version\":1", "\"version\":2"), "version 2"),
            (text.replace("\"dra\"", "\"both\""), "both"),
            (text.replace("example.com/gpu", "gpu"), "gpu"),
            (String::new(), "EOF"),
        ] {
            let error = Record::decode(bad.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
