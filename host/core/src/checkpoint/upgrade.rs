//! How files and records of earlier releases become what this one writes. A step leads from one version to the next.

use redb::WriteTransaction;
use serde_json::Value;

/// The steps, each with the version that it begins at.
#[derive(Clone, Copy)]
pub(super) struct Upgrades {
    /// Changes of tables and keys; in the transaction that signs the file.
    pub(super) formats: &'static [(u32, FormatStep)],
    /// Changes of a record's JSON; when it is read. The value in the file stays until it is written.
    pub(super) records: &'static [(u8, RecordStep)],
}

pub(super) type FormatStep = fn(&WriteTransaction) -> Result<(), redb::Error>;
pub(super) type RecordStep = fn(Value) -> Result<Value, String>;

/// Nothing is older than the first.
pub(super) const UPGRADES: Upgrades = Upgrades { formats: &[], records: &[] };

/// The steps from a version to another, in order. None: they do not lead there.
pub(super) fn path<V: Copy + Ord + Into<u64>, S: Copy>(steps: &[(V, S)], from: V, to: V) -> Option<Vec<S>> {
    let step =
        |version| steps.iter().find(|(at, _)| Into::<u64>::into(*at) == version).map(|(_, step)| *step);
    (from.into()..to.into()).map(step).collect()
}
