//! Decisions about claims that an operator releases by force.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::unprepare::{UnprepareEnd, UnprepareResult, finish_unprepare};
use super::{kubelet, not_called, pods_named, transition};
use nodedock_model::{
    Caller, ClaimRecord, ClaimState, DriverName, Problem, ProblemCode, ReleaseRecord, Untold,
};

/// Whether an operator may release a claim: only if no pod and no kubelet holds it.
pub fn check_release(record: &ClaimRecord) -> Result<(), Problem> {
    let is_held = !record.pods.is_empty() || record.is_held_by_kubelet();
    if record.state == ClaimState::Unpreparing || !is_held {
        return Ok(());
    }
    if record.is_held_by_kubelet() {
        return Err(kubelet::in_use(record));
    }
    let message = format!(
        "claim {} (UID {}) is {} for pods {}: use `nodedock unprepare`, which calls its drivers",
        record.id,
        record.id.uid,
        record.state.as_str(),
        pods_named(record)
    );
    Err(Problem::conflict(ProblemCode::ClaimInUse, message))
}

/// The intent to release a claim.
pub fn release(record: &ClaimRecord, now_ms: u64, by: &Caller) -> (Arc<ClaimRecord>, Vec<DriverName>) {
    let mut record = record.clone();
    record.state = ClaimState::Unpreparing;
    record.releasing = Some(by.clone());
    record.note_repeated(transition(now_ms, "releasing", &by.to_string()));
    let drivers = record.drivers.keys().cloned().collect();
    (Arc::new(record), drivers)
}

/// The record of a released claim. The drivers' results say which of them did not unprepare it.
pub fn released(
    record: &ClaimRecord,
    results: Vec<UnprepareResult>,
    now_ms: u64,
    by: &Caller,
) -> ReleaseRecord {
    let mut left = match finish_unprepare(record, results, now_ms) {
        UnprepareEnd::Gone => ClaimRecord { drivers: BTreeMap::new(), ..record.clone() },
        UnprepareEnd::Stays(left, _) => Arc::unwrap_or_clone(left),
    };
    left.note(transition(now_ms, "released", &by.to_string()));
    let untold = left.drivers.iter().map(|(driver, part)| {
        let devices = left.device_names(driver).collect();
        (driver.clone(), Untold { devices, problem: part.problem.clone().unwrap_or_else(not_called) })
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
