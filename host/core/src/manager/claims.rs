//! Claims: the requests about them, and what keeps their drivers, files and retries in step. Their records are in `crate::records`.
//!
//! # Life of a claim
//!
//! ```text
//! absent ──prepare──► preparing ──results durable──► prepared ──last pod gone──► unpreparing ──► absent
//!                        │ ▲                            │  ▲                          │
//!                        │ └── crash: completed         │  └─ new boot: prepare again │ crash: completed
//!                        └── refused: rolled back       └─ CDI file gone: rendered again
//! ```
//!
//! - `preparing`: the intent is durable; drivers may or may not have acted. A retry calls only the drivers without a result; an unprepare calls
//!   all of them. A claim that every driver refused permanently is rolled back at once,
//!   as is one that no request had before and whose results cannot be stored, or its files written.
//! - `prepared`: every driver's result is durable. Another pod joins without a driver call. A claim whose device nodes have other numbers than at
//!   its prepare is prepared again, as after a boot.
//! - `unpreparing`: the last pod is gone; the record stays until every driver has unprepared the claim.
//!
//! Retries. A permanent refusal of a WASM driver stands until the request or the driver changes: version, grant, config, devices. A temporary
//! refusal, and every refusal of a native plugin, is retried at the driver's own time (`retry-after-ms`), or once at once and then with delays that
//! double. The request itself waits up to half a second; for a longer delay it returns the same problem with the remaining time. An unprepare is
//! retried for each claim in the same way, and at once when a driver begins to serve. All retry state is in memory. The manager ends a call
//! itself shortly after the deadline that it passed.

pub(crate) mod calls;
pub(crate) mod driver_changes;
pub(crate) mod files;
pub mod gone_devices;
pub(in crate::manager) mod handles;
pub(crate) mod hardware;
mod held_hardware;
pub(crate) mod kubelet;
mod log;
pub mod machine;
pub(crate) mod metrics;
mod overlap;
pub(crate) mod prepare;
pub(crate) mod prepare_retry;
mod previous_versions;
mod release;
mod restore;
pub(crate) mod retries;
pub mod source;
mod timed_calls;
pub(crate) mod unprepare;
pub(crate) mod unprepare_retry;
pub(crate) mod upkeep;

#[cfg(test)]
pub(crate) mod fixtures;
#[cfg(test)]
mod machine_tests;
#[cfg(test)]
pub(crate) mod tests;

use std::time::Duration;

use strum::IntoStaticStr;

use nodedock_base::error::chain;
use nodedock_model::{ClaimRecord, ObjectName, ObjectRef, Problem, ProblemCode, Uid};

pub use files::SpecFiles;
pub use hardware::{HardwareHolds, Holds};
pub use kubelet::KubeletClaims;
pub use metrics::ClaimMetrics;
pub use release::{ReleasePreview, ReleaseRequest, Releases};
pub use retries::{ClaimView, RefusedClaim, Retries, Retry, RetryStatus};

/// Maximum of a driver's `retry-after-ms`: a wrong number must not block a claim for days.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);

/// The outcome of a request for one claim.
#[derive(Debug, Clone, PartialEq)]
pub struct ClaimOutcome {
    pub namespace: ObjectName,
    pub name: ObjectName,
    /// None: the claim was not found.
    pub uid: Option<Uid>,
    pub end: Result<ClaimEnd, Problem>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum ClaimEnd {
    Prepared,
    Unprepared,
    /// Other pods, or a kubelet, hold it.
    Kept,
}

impl ClaimEnd {
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Selector of the pods of an unprepare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodSelector {
    Uid(Uid),
    /// The pod with that UID if it is of that namespace.
    UidIn(ObjectName, Uid),
    /// Every pod of that namespace and name that holds something.
    Name(ObjectName, ObjectName),
}

impl PodSelector {
    pub(crate) fn is(&self, pod: &ObjectRef) -> bool {
        match self {
            Self::Uid(uid) => pod.uid == *uid,
            Self::UidIn(namespace, uid) => pod.namespace == *namespace && pod.uid == *uid,
            Self::Name(namespace, name) => pod.namespace == *namespace && pod.name == *name,
        }
    }
}

/// The first few names of a list, and the number of the others: a message is one line.
pub(in crate::manager) fn name_few<T: ToString>(
    names: impl ExactSizeIterator<Item = T>,
    max: usize,
) -> String {
    let others = names.len().saturating_sub(max);
    let mut named: Vec<_> = names.take(max).map(|name| name.to_string()).collect();
    if others > 0 {
        named.push(format!("and {others} more"));
    }
    named.join(", ")
}

fn unrendered(record: &ClaimRecord, error: &crate::cdi::RenderError) -> Problem {
    let message = format!(
        "claim {} makes no valid CDI file: {}",
        record.id,
        chain(error)
    );
    Problem::internal(ProblemCode::CdiNotValid, message)
}
