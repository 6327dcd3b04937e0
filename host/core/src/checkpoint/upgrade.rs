//! Upgrades of files and records of earlier releases. A step leads from one version to the next.

use rusqlite::Connection;
use serde_json::Value;

/// The steps, each with its source version.
#[derive(Clone, Copy)]
pub(super) struct Upgrades {
    /// Changes of tables and keys, in the transaction that writes the metadata.
    pub(super) formats: &'static [(u32, FormatStep)],
    /// Changes of a record's JSON, when it is read. The value in the file stays until it is written.
    pub(super) records: &'static [(u8, RecordStep)],
}

pub(super) type FormatStep = fn(&Connection) -> rusqlite::Result<()>;
pub(super) type RecordStep = fn(Value) -> Result<Value, String>;

/// Empty: no format and no record is older than its first version.
pub(super) const UPGRADES: Upgrades = Upgrades {
    formats: &[],
    records: &[],
};

/// Returns the steps between two versions, in order. `None`: there is no path.
pub(super) fn path<V: Copy + Ord + Into<u64>, S: Copy>(
    steps: &[(V, S)],
    from: V,
    to: V,
) -> Option<Vec<S>> {
    (from.into()..to.into())
        .map(|version| {
            steps
                .iter()
                .find(|(at, _)| Into::<u64>::into(*at) == version)
                .map(|(_, step)| *step)
        })
        .collect()
}
