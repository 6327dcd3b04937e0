//! Decisions about claims that pods unprepare, about retries of unprepares, and about claims that an operator releases by force.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{
    ClaimTable, PREPARED, ROLLED_BACK, UnprepareStep, kubelet, not_called, transition, worst,
};
use nodedock_model::{
    Caller, ClaimRecord, ClaimState, DriverName, EndedRecord, ObjectRef, Problem, ReleaseRecord,
    Transition, Uid, Untold,
};

/// Requester of an unprepare.
#[derive(Debug, Clone, Copy)]
pub enum UnprepareRequest<'a> {
    Pod(&'a Uid),
    /// A kubelet: one driver's part, or (`driver` none) every part that it uses.
    Kubelet {
        driver: Option<&'a DriverName>,
        cause: &'a str,
    },
    /// Every part that was prepared for a scheduler; nothing once a kubelet has requested the claim.
    Early {
        cause: &'a str,
    },
    /// A retry of an unprepare that was begun.
    Retry,
}

pub fn unprepare(
    table: &ClaimTable,
    uid: &Uid,
    request: UnprepareRequest<'_>,
    now_ms: u64,
) -> UnprepareStep {
    let Some(known) = table.claim(uid.as_str()) else {
        return UnprepareStep::Nothing;
    };
    match request {
        UnprepareRequest::Pod(pod) if known.pods.contains_key(pod) => {
            unprepare_for_pod(ClaimRecord::clone(known), pod, now_ms)
        }
        UnprepareRequest::Kubelet { driver, cause } => {
            kubelet::unprepare(known, driver, now_ms, cause)
        }
        UnprepareRequest::Early { cause } if known.is_held_early() => {
            kubelet::unprepare(known, None, now_ms, cause)
        }
        UnprepareRequest::Retry if known.is_leaving() => call_leaving(known.clone()),
        UnprepareRequest::Pod(_) | UnprepareRequest::Early { .. } | UnprepareRequest::Retry => {
            UnprepareStep::Nothing
        }
    }
}

fn unprepare_for_pod(mut record: ClaimRecord, pod: &Uid, now_ms: u64) -> UnprepareStep {
    let is_last = record.pods.len() == 1;
    if is_last && !record.is_held_by_kubelet() {
        if record.state != ClaimState::Unpreparing {
            record.state = ClaimState::Unpreparing;
            record.note(transition(now_ms, "unpreparing", "unprepare"));
        }
        // The pod stays in the record until the claim is unprepared: it may repeat its request.
        return call_leaving(Arc::new(record));
    }
    record.pods.remove(pod);
    record.note(transition(now_ms, "left", &format!("unprepare pod {pod}")));
    let mut drivers = Vec::new();
    if is_last {
        // The kubelet uses some parts; the others are unprepared.
        let unused = record.drivers.iter().filter(|(_, part)| !part.kubelet);
        drivers.extend(unused.map(|(driver, _)| driver.clone()));
        kubelet::release_parts(&mut record, &drivers);
    }
    let record = Arc::new(record);
    if drivers.is_empty() {
        UnprepareStep::Left(record)
    } else {
        UnprepareStep::Call { record, drivers }
    }
}

fn call_leaving(record: Arc<ClaimRecord>) -> UnprepareStep {
    let drivers = record.leaving().map(|(driver, _)| driver.clone()).collect();
    UnprepareStep::Call { record, drivers }
}

/// The entry of a claim's history when a driver has unprepared its part.
const UNPREPARED_BY_DRIVER: &str = "given up by driver";

/// A driver's result of an unprepare, and its duration in microseconds.
pub type UnprepareResult = (DriverName, Result<(), Problem>, u64);

/// The decision about an unprepare after its drivers answered.
#[derive(Debug, Clone, PartialEq)]
pub enum UnprepareEnd {
    /// Every driver unprepared it: remove its CDI files, then its record.
    Gone,
    /// Commit: a problem of a driver that did not unprepare its part, which is retried, or else the parts that are in use.
    Stays(Arc<ClaimRecord>, Option<Problem>),
}

/// Notes the drivers' results of an unprepare in a claim's record.
pub fn finish_unprepare(
    record: &ClaimRecord,
    results: Vec<UnprepareResult>,
    now_ms: u64,
) -> UnprepareEnd {
    let mut record = record.clone();
    for (driver, outcome, duration_us) in results {
        let what = if outcome.is_ok() {
            UNPREPARED_BY_DRIVER
        } else {
            "not given up by driver"
        };
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
    if problem.is_none() && record.state == ClaimState::Unpreparing {
        return UnprepareEnd::Gone;
    }
    UnprepareEnd::Stays(Arc::new(record), problem)
}

/// The intent to unprepare a claim that every driver refused for good, or (`part`) the part of one that did. The drivers are called all
/// the same: they may have begun. `failure`: the drivers prepared it, and the host could not store their results or write its files.
pub fn roll_back(
    record: &ClaimRecord,
    part: Option<&DriverName>,
    failure: Option<&Problem>,
    now_ms: u64,
) -> (Arc<ClaimRecord>, Vec<DriverName>) {
    let mut record = record.clone();
    let cause = match (failure, part) {
        (Some(_), _) => "its results are not stored".to_owned(),
        (None, None) => "refused by every driver".to_owned(),
        (None, Some(driver)) => format!("refused by driver {driver}"),
    };
    let mut entry = transition(now_ms, ROLLED_BACK, &cause);
    entry.problem = failure.cloned();
    record.note(entry);
    let drivers = part.map_or_else(
        || record.drivers.keys().cloned().collect(),
        |driver| vec![driver.clone()],
    );
    match part {
        Some(_) => kubelet::release_parts(&mut record, &drivers),
        None => record.state = ClaimState::Unpreparing,
    }
    (Arc::new(record), drivers)
}

/// The record of a claim that its drivers unprepared now. None: it was not prepared before, or its prepare was undone.
pub fn ended(
    record: &ClaimRecord,
    results: &[UnprepareResult],
    now_ms: u64,
) -> Option<EndedRecord> {
    let mut timeline = record.timeline.iter().rev();
    let last = timeline.find(|entry| entry.what == PREPARED || entry.what == ROLLED_BACK);
    let was_prepared = match last {
        Some(entry) => entry.what == PREPARED,
        // A longer history than the record keeps.
        None => record.drivers.values().any(|part| part.prepared.is_some()),
    };
    if !was_prepared {
        return None;
    }
    let mut left = record.clone();
    for (driver, _, duration_us) in results {
        left.note_repeated(Transition {
            duration_us: *duration_us,
            ..transition(now_ms, UNPREPARED_BY_DRIVER, driver.as_str())
        });
    }
    left.note(transition(now_ms, "unprepared", ""));
    let devices = record.allocation.drivers().into_iter().map(|driver| {
        let devices = record.device_names(driver).collect();
        (driver.clone(), devices)
    });
    let consumers = record.kubelet.iter().flat_map(|hold| &hold.consumers);
    let of_kubelet = consumers.filter(|consumer| consumer.is_pod()).map(|pod| {
        let pod = ObjectRef {
            namespace: record.id.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
        };
        (pod.uid.clone(), pod)
    });
    Some(EndedRecord {
        id: record.id.clone(),
        at_ms: now_ms,
        devices: devices.collect(),
        pods: left.pods.into_iter().chain(of_kubelet).collect(),
        timeline: left.timeline,
        unknown: BTreeMap::new(),
    })
}

/// Fails if an operator may not release a claim: a pod or a kubelet holds it, and it is not being unprepared.
pub fn check_release(record: &ClaimRecord) -> Result<(), Problem> {
    let is_held = !record.pods.is_empty() || record.is_held_by_kubelet();
    if record.state == ClaimState::Unpreparing || !is_held {
        return Ok(());
    }
    Err(kubelet::in_use(record))
}

pub fn release(
    record: &ClaimRecord,
    now_ms: u64,
    by: &Caller,
) -> (Arc<ClaimRecord>, Vec<DriverName>) {
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
        UnprepareEnd::Gone => ClaimRecord {
            drivers: BTreeMap::new(),
            ..record.clone()
        },
        UnprepareEnd::Stays(left, _) => Arc::unwrap_or_clone(left),
    };
    left.note(transition(now_ms, "released", &by.to_string()));
    let untold = left.drivers.iter().map(|(driver, part)| {
        let devices = left.device_names(driver).collect();
        (
            driver.clone(),
            Untold {
                devices,
                problem: part.problem.clone().unwrap_or_else(not_called),
            },
        )
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
