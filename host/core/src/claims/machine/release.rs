//! What is decided where an operator gives claims up by hand.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::unprepare::{UnprepareEnd, finish_unprepare};
use super::{kubelet, not_asked, pods_named, transition};
use nodedock_model::{Caller, ClaimRecord, ClaimState, DriverName, Problem, ReleaseRecord, Untold};

/// Whether an operator may give a claim up by hand: nobody else would.
pub fn check_release(record: &ClaimRecord) -> Result<(), Problem> {
    let is_held = !record.pods.is_empty() || record.is_held_by_kubelet();
    if record.state == ClaimState::Unpreparing || !is_held {
        return Ok(());
    }
    if record.is_held_by_kubelet() {
        return Err(kubelet::in_use(record));
    }
    let message = format!(
        "claim {} (UID {}) is {} for pods {}: give it up with `nodedock unprepare`, which tells its drivers",
        record.id,
        record.id.uid,
        record.state.as_str(),
        pods_named(record)
    );
    Err(Problem::conflict("claim-in-use", message))
}

/// The intent to give up a claim by hand.
pub fn release(record: &ClaimRecord, now_ms: u64, by: &Caller) -> (Arc<ClaimRecord>, Vec<DriverName>) {
    let mut record = record.clone();
    record.state = ClaimState::Unpreparing;
    record.releasing = Some(by.clone());
    record.note_repeated(transition(now_ms, "releasing", &by.to_string()));
    let drivers = record.drivers.keys().cloned().collect();
    (Arc::new(record), drivers)
}

/// What stays of a claim that was given up by hand: what its drivers answered says which of them do not know.
pub fn released(
    record: &ClaimRecord,
    results: Vec<(DriverName, Result<(), Problem>, u64)>,
    now_ms: u64,
    by: &Caller,
) -> ReleaseRecord {
    let mut left = match finish_unprepare(record, results, now_ms) {
        UnprepareEnd::Gone => ClaimRecord { drivers: BTreeMap::new(), ..record.clone() },
        UnprepareEnd::Kept(left, _) | UnprepareEnd::Stays(left) => Arc::unwrap_or_clone(left),
    };
    left.note(transition(now_ms, "released", &by.to_string()));
    let untold = left.drivers.iter().map(|(driver, part)| {
        let devices = left.device_names(driver).collect();
        (driver.clone(), Untold { devices, problem: part.problem.clone().unwrap_or_else(not_asked) })
    });
    ReleaseRecord {
        untold: untold.collect(),
        put_back: Vec::new(),
        id: left.id,
        at_ms: now_ms,
        by: by.clone(),
        pods: left.pods,
        timeline: left.timeline,
        unknown: BTreeMap::new(),
    }
}
