//! Values below `/sys` that drivers changed for claims: the host's record, from which it can restore them without the driver, and the
//! outcome of a restore. Beside them the progress that drivers saved in the middle of a prepare.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

use super::{DriverName, ObjectRef, Problem};

/// Changes of drivers for one claim, in one boot: the kernel resets them at the next one. Progress outlives a boot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClaimValues {
    pub id: ObjectRef,
    /// Boot in which they were written. They are invalid in any other.
    pub boot_id: String,
    /// Sorted by the first write of each path.
    pub drivers: BTreeMap<DriverName, Vec<KeptValue>>,
    /// Progress that drivers saved in the middle of a prepare.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub progress: BTreeMap<DriverName, Progress>,
    /// Fields of a newer version, preserved unchanged.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, serde_json::Value>,
}

/// Bytes that a driver saved; in JSON hexadecimal text.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Progress(#[serde(with = "super::claim::memo_text")] pub Vec<u8>);

impl ClaimValues {
    pub fn is_empty(&self) -> bool {
        self.drivers.is_empty() && self.progress.is_empty()
    }

    /// Returns the values with the newest first: the order in which the host restores them.
    pub fn newest_first(&self) -> Vec<(&DriverName, &KeptValue)> {
        let drivers = self.drivers.iter();
        let mut values: Vec<_> = drivers
            .flat_map(|(driver, kept)| kept.iter().map(move |kept| (driver, kept)))
            .collect();
        // The sort is stable: values of equal order keep their order of writing, which is then reversed.
        values.sort_by_key(|(_, kept)| kept.order);
        values.reverse();
        values
    }
}

/// A value that a driver changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptValue {
    /// Relative to `/sys`, without links.
    pub path: String,
    /// Inode of the file: a device that was plugged in again has other inodes under the same paths.
    pub inode: u64,
    /// Later first writes have larger numbers, over all claims; claims that were prepared in one call share one.
    pub order: u64,
    /// Value before the driver's first write. `None`: it cannot be read, or cannot be written back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// Value after the last completed write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// A write that may or may not have happened; durable before each write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<String>,
    /// The host is restoring it: the previous value may be in place again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub putting_back: bool,
    /// Value that the host may have restored before it inherited another one; treated like the value that the driver left.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also_left: Vec<String>,
    /// Value that the driver had left before it wrote the previous value again: a later claim may have found it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored_from: Option<String>,
}

impl KeptValue {
    /// Inherits the value that an earlier claim had found.
    pub fn inherit(&mut self, before: Option<String>) {
        let found = std::mem::replace(&mut self.before, before);
        let new = found.filter(|found| self.putting_back && !self.also_left.contains(found));
        self.also_left.extend(new);
    }

    /// Records the value after a completed write.
    pub fn leave(&mut self, value: &str) {
        let earlier = self.after.replace(value.to_owned());
        let is_restored = self.before.as_deref() == Some(value);
        if let Some(earlier) = earlier.filter(|earlier| is_restored && earlier != value) {
            self.restored_from = Some(earlier);
        }
    }

    /// Returns whether a value that a later claim found was the work of this one.
    pub fn may_have_been_found(&self, value: &str) -> bool {
        self.may_have_left(value) || self.restored_from.as_deref() == Some(value)
    }

    /// Returns whether a value may be the driver's, or a restored one.
    pub fn may_have_left(&self, value: &str) -> bool {
        let left =
            self.after.as_deref() == Some(value) || self.also_left.iter().any(|left| left == value);
        left || self
            .pending
            .as_deref()
            .is_some_and(|pending| pending.trim_end() == value)
    }

    /// Returns the value that the driver left, if known.
    pub fn left(&self) -> Option<&str> {
        self.after.as_deref().or(self.pending.as_deref())
    }

    /// Returns its approximate size in bytes.
    pub fn bytes(&self) -> usize {
        let texts = [
            &self.before,
            &self.after,
            &self.pending,
            &self.restored_from,
        ]
        .into_iter()
        .flatten();
        self.path.len() + texts.chain(&self.also_left).map(String::len).sum::<usize>()
    }
}

/// Outcome for a value that the host should restore, or the expected outcome in a dry run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PutBack {
    pub driver: DriverName,
    /// Relative to `/sys`.
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// Value that was found there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
    pub end: PutBackEnd,
    /// Why it is left unchanged, or a remark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum PutBackEnd {
    /// The value is as the driver left it and can be restored.
    Possible,
    PutBack,
    /// The value was already the previous one.
    AsBefore,
    /// The host wrote nothing; the problem has the reason.
    Left,
}

impl PutBackEnd {
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}
