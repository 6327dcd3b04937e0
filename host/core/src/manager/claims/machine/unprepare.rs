//! Decisions about claims that pods unprepare, and about retries of unprepares.

use std::sync::Arc;

use super::{ClaimTable, kubelet, transition, worst};
use nodedock_model::{ClaimRecord, ClaimState, DriverName, Problem, Uid};

/// The decision about an unprepare.
#[derive(Debug, Clone, PartialEq)]
pub enum UnprepareStep {
    /// Nothing to do: the claim is unknown, or the pod or kubelet does not hold it.
    Nothing,
    /// Others hold all of it: commit and answer.
    Left(Arc<ClaimRecord>),
    /// The intent to commit, and the drivers to call then.
    Call { record: Arc<ClaimRecord>, drivers: Vec<DriverName> },
}

/// Decides an unprepare for a pod, or (`pod` none) a retry.
pub fn unprepare(
    table: &ClaimTable,
    uid: &Uid,
    pod: Option<&Uid>,
    now_ms: u64,
    cause: &str,
) -> UnprepareStep {
    let Some(known) = table.claim(uid.as_str()) else { return UnprepareStep::Nothing };
    let resumes = pod.is_none() && known.is_leaving();
    let holds = pod.is_some_and(|pod| known.pods.contains_key(pod));
    if !holds && !resumes {
        return UnprepareStep::Nothing;
    }
    let mut record = ClaimRecord::clone(known);
    if let Some(pod) = pod.filter(|_| record.pods.len() > 1) {
        record.pods.remove(pod);
        record.note(transition(now_ms, "left", &format!("{cause} pod {pod}")));
        return UnprepareStep::Left(Arc::new(record));
    }
    if let Some(pod) = pod.filter(|_| record.is_held_by_kubelet()) {
        return kubelet::leave_to_kubelet(record, pod, now_ms, cause);
    }
    if pod.is_some() && record.state != ClaimState::Unpreparing {
        record.state = ClaimState::Unpreparing;
        record.note(transition(now_ms, "unpreparing", cause));
    }
    let drivers = record.leaving().map(|(driver, _)| driver.clone()).collect();
    UnprepareStep::Call { record: Arc::new(record), drivers }
}

/// A driver's result of an unprepare, and its duration in microseconds.
pub type UnprepareResult = (DriverName, Result<(), Problem>, u64);

/// The decision about an unprepare after its drivers answered.
#[derive(Debug, Clone, PartialEq)]
pub enum UnprepareEnd {
    /// Every driver unprepared it: remove its CDI files, then its record.
    Gone,
    /// Some did not: commit, keep, and retry.
    Kept(Arc<ClaimRecord>, Problem),
    /// The parts are unprepared, and the rest is held: commit.
    Stays(Arc<ClaimRecord>),
}

/// Notes the drivers' results of an unprepare in a claim's record.
pub fn finish_unprepare(record: &ClaimRecord, results: Vec<UnprepareResult>, now_ms: u64) -> UnprepareEnd {
    let mut record = record.clone();
    for (driver, outcome, duration_us) in results {
        let what = if outcome.is_ok() { "given up by driver" } else { "not given up by driver" };
        let mut entry = transition(now_ms, what, driver.as_str());
        entry.duration_us = duration_us;
        match outcome {
            Ok(()) => drop(record.drivers.remove(&driver)),
            Err(problem) => {
                entry.problem = Some(problem.clone());
                record.drivers.entry(driver).or_default().problem = Some(problem);
            }
        }
        record.note_repeated(entry);
    }
    let problem = worst(record.leaving().map(|(_, part)| part));
    match problem {
        Some(problem) => UnprepareEnd::Kept(Arc::new(record), problem),
        None if record.state == ClaimState::Unpreparing => UnprepareEnd::Gone,
        None => UnprepareEnd::Stays(Arc::new(record)),
    }
}

/// The intent to unprepare a claim that every driver refused for good. They are called all the same: they may have begun.
pub fn roll_back(record: &ClaimRecord, now_ms: u64) -> (Arc<ClaimRecord>, Vec<DriverName>) {
    let mut record = record.clone();
    record.state = ClaimState::Unpreparing;
    record.note(transition(now_ms, "rolled back", "refused by every driver"));
    let drivers = record.drivers.keys().cloned().collect();
    (Arc::new(record), drivers)
}
