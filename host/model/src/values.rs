//! Values below `/sys` that drivers changed for claims: what the host keeps so that it can put them back without the driver, and what
//! came of that.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Caller, DriverName, ObjectRef, Problem};

/// What drivers changed for one claim, in one boot: the kernel forgets all of it at the next.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClaimValues {
    pub id: ObjectRef,
    /// Boot in which they were written. In any other they mean nothing.
    pub boot_id: String,
    /// In the order in which each path was written first.
    pub drivers: BTreeMap<DriverName, Vec<KeptValue>>,
    /// Who began to release the claim by hand, where an older release noted it: it stands in the claim's record now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub releasing: Option<Caller>,
    /// Fields of a newer version; kept as they are.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, serde_json::Value>,
}

impl ClaimValues {
    /// The newest first: the order in which they are put back.
    pub fn newest_first(&self) -> Vec<(&DriverName, &KeptValue)> {
        let drivers = self.drivers.iter();
        let mut values: Vec<_> =
            drivers.flat_map(|(driver, kept)| kept.iter().map(move |kept| (driver, kept))).collect();
        // Stable: those of one order stay as they were written, and are then turned round.
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
    /// Of the file: a device that was plugged in again has others under the same paths.
    pub inode: u64,
    /// Later first writes have larger numbers, over all claims; claims that were prepared in one call share one.
    pub order: u64,
    /// What it read as before the driver's first write. None: it cannot be read, or is nothing that could be written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// What it read as after the last write that is known to have ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// A write that may or may not have happened: that is durable before each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<String>,
    /// It is being put back: what it was before may stand again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub putting_back: bool,
    /// What it may have been put back to before it inherited another value: as good as what the driver left.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also_left: Vec<String>,
}

impl KeptValue {
    /// Takes over what an earlier claim had found.
    pub fn inherit(&mut self, before: Option<String>) {
        let found = std::mem::replace(&mut self.before, before);
        let new = found.filter(|found| self.putting_back && !self.also_left.contains(found));
        self.also_left.extend(new);
    }

    /// Whether a value may be the driver's own work, or what it was put back to.
    pub fn may_have_left(&self, value: &str) -> bool {
        let left = self.after.as_deref() == Some(value) || self.also_left.iter().any(|left| left == value);
        left || self.pending.as_deref().is_some_and(|pending| pending.trim_end() == value)
    }

    /// What the driver left there, as far as it is known.
    pub fn left(&self) -> Option<&str> {
        self.after.as_deref().or(self.pending.as_deref())
    }

    /// Bytes that it takes up, about.
    pub fn bytes(&self) -> usize {
        let texts = [&self.before, &self.after, &self.pending].into_iter().flatten();
        self.path.len() + texts.chain(&self.also_left).map(String::len).sum::<usize>()
    }
}

/// What became of a value that was to be put back, or (of a question) would become of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PutBack {
    pub driver: DriverName,
    /// Relative to `/sys`.
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// What stood there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
    pub end: PutBackEnd,
    /// Why it is left as it is, or what is odd about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PutBackEnd {
    /// It stands as the driver left it, and nothing is in the way.
    Possible,
    PutBack,
    /// It was what it had been before.
    AsBefore,
    /// Nothing was written; the problem says why.
    Left,
}

impl PutBackEnd {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Possible => "possible",
            Self::PutBack => "put-back",
            Self::AsBefore => "as-before",
            Self::Left => "left",
        }
    }
}
