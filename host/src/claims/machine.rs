//! What is decided about claims: state and event in, next state and what to do out. No clock, no IO, no task.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::table::{Table, device_key};
use crate::model::{
    Allocation, Caller, Claim, ClaimRecord, ClaimState, DriverName, DriverPart, Hold, Inventory, ObjectRef,
    PodContainer, PodRecord, PreparedBy, PreparedClaim, Problem, ProblemKind, ReleaseRecord, Transition, Uid,
    Untold,
};

/// What the host knows of a device that decides whether others may have it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceFacts {
    pub allow_multiple_allocations: bool,
    pub identity: Vec<String>,
}

/// What a claim keeps from others. Devices with admin access keep nothing; shares and devices that allow several allocations
/// keep out those who want them alone.
pub fn holds(allocation: &Allocation, facts: impl Fn(&DriverName, &str, &str) -> DeviceFacts) -> Vec<Hold> {
    let mut holds: BTreeMap<String, bool> = BTreeMap::new();
    for device in allocation.devices.iter().filter(|device| !device.admin_access) {
        let facts = facts(&device.driver, device.pool.as_str(), device.device.as_str());
        let shared = device.share_id.is_some() || facts.allow_multiple_allocations;
        let key = device_key(&device.driver, device.pool.as_str(), device.device.as_str());
        for key in std::iter::once(key).chain(facts.identity) {
            holds.entry(key).and_modify(|known| *known &= shared).or_insert(shared);
        }
    }
    holds.into_iter().map(|(key, shared)| Hold { key, shared }).collect()
}

/// A pod that asks for a claim, and when.
#[derive(Debug, Clone)]
pub struct PrepareRequest<'a> {
    pub claim: &'a Claim,
    pub allocation: &'a Allocation,
    pub pod: &'a ObjectRef,
    pub holds: Vec<Hold>,
    /// Drivers whose device nodes are no longer what they were when the claim was prepared.
    pub moved: &'a [DriverName],
    pub boot_id: &'a str,
    pub now_ms: u64,
    pub cause: &'a str,
}

/// What a prepare comes to.
#[derive(Debug, Clone, PartialEq)]
pub enum PrepareStep {
    /// Prepared in this boot. `changed`: the pod is new to it, so the record must be committed.
    Known {
        record: Arc<ClaimRecord>,
        changed: bool,
    },
    /// The intent to commit, and the drivers to call then.
    Call {
        record: Arc<ClaimRecord>,
        drivers: Vec<DriverName>,
    },
    /// Something is in the way that may go: ask again when a claim was given up.
    Wait(Problem),
    Refuse(Problem),
}

/// Checks of a claim that need nothing but the claim, the pod and the node.
pub fn admit<'a>(claim: &'a Claim, pod: &ObjectRef, node_name: &str) -> Result<&'a Allocation, Problem> {
    let name = &claim.id;
    if let Some(owner) = claim.owner_pod.as_ref().filter(|owner| **owner != pod.uid) {
        let message = format!("claim {name} was made for another pod than {pod} (its owner has UID {owner})");
        return Err(Problem::denied("claim-of-another-pod", message));
    }
    let Some(allocation) = &claim.allocation else {
        return Err(Problem::unavailable("claim-not-allocated", format!("claim {name} is not allocated")));
    };
    let admin_only = !allocation.devices.is_empty() && allocation.devices.iter().all(|d| d.admin_access);
    if !claim.reserved_for.contains(&pod.uid) && !admin_only {
        let message = format!("claim {name} is not reserved for pod {pod} (UID {})", pod.uid);
        return Err(Problem::denied("claim-not-reserved", message));
    }
    if let Some(other) = allocation.node_name.as_ref().filter(|other| *other != node_name) {
        let message = format!("claim {name} is allocated on node {other}, and this is {node_name}");
        return Err(Problem::denied("claim-on-another-node", message));
    }
    Ok(allocation)
}

/// Decides a prepare. The table is not changed.
pub fn prepare(table: &Table, request: &PrepareRequest<'_>) -> PrepareStep {
    let id = &request.claim.id;
    if let Some(old) = table.claim_named(&id.namespace, &id.name).filter(|old| old.id.uid != id.uid) {
        return PrepareStep::Wait(replaced(id, old));
    }
    match table.claim(id.uid.as_str()) {
        None => begin(table, request, None),
        Some(known) if known.state == ClaimState::Unpreparing => PrepareStep::Wait(being_given_up(id)),
        Some(known) if known.allocation != *request.allocation => PrepareStep::Refuse(changed_allocation(id)),
        Some(known) if is_good(known, request) => join(known, request),
        Some(known) => begin(table, request, Some(known)),
    }
}

/// Prepared in this boot, with the node as it was then.
fn is_good(known: &ClaimRecord, request: &PrepareRequest<'_>) -> bool {
    known.state == ClaimState::Prepared && known.boot_id == request.boot_id && request.moved.is_empty()
}

fn join(known: &Arc<ClaimRecord>, request: &PrepareRequest<'_>) -> PrepareStep {
    if known.pods.contains_key(&request.pod.uid) {
        return PrepareStep::Known { record: known.clone(), changed: false };
    }
    let mut record = ClaimRecord::clone(known);
    record.pods.insert(request.pod.uid.clone(), request.pod.clone());
    record.note(transition(request.now_ms, "joined", &format!("{} pod {}", request.cause, request.pod)));
    PrepareStep::Known { record: Arc::new(record), changed: true }
}

fn begin(table: &Table, request: &PrepareRequest<'_>, known: Option<&Arc<ClaimRecord>>) -> PrepareStep {
    let id = &request.claim.id;
    // In one boot a claim keeps what it kept from others when it began: what is known of a device goes when its driver does.
    let standing = known.filter(|known| known.boot_id == request.boot_id && !known.holds.is_empty());
    let holds = standing.map_or(&request.holds, |known| &known.holds);
    if let Some((holder, key)) = table.conflict(&id.uid, holds) {
        return PrepareStep::Wait(held(id, holder, key));
    }
    let mut record = known.map_or_else(|| new_record(request), |known| ClaimRecord::clone(known));
    let new_boot = record.boot_id != request.boot_id;
    if new_boot {
        // What lived in the kernel is gone: every driver is asked again. Its memo stays, for the unprepare.
        let old_boot = std::mem::replace(&mut record.boot_id, request.boot_id.to_owned());
        record.drivers.values_mut().for_each(|part| outlive(part, &old_boot));
    }
    let moved = record.drivers.iter_mut().filter(|(driver, _)| request.moved.contains(driver));
    moved.for_each(|(_, part)| outlive(part, request.boot_id));
    record.state = ClaimState::Preparing;
    record.holds = holds.clone();
    record.pods.insert(request.pod.uid.clone(), request.pod.clone());
    let open = record.drivers.iter().filter(|(_, part)| part.current().is_none());
    let drivers: Vec<_> = open.map(|(name, _)| name.clone()).collect();
    let what = match known {
        Some(_) if new_boot => "preparing after a new boot",
        Some(_) if !request.moved.is_empty() => "preparing after device nodes changed",
        _ => "preparing",
    };
    record.note(transition(request.now_ms, what, &format!("{} pod {}", request.cause, request.pod)));
    PrepareStep::Call { record: Arc::new(record), drivers }
}

/// Leaves the drivers that are not asked now with the problem that they had.
pub fn hold_back(record: Arc<ClaimRecord>, held_back: Vec<(DriverName, Problem)>) -> Arc<ClaimRecord> {
    if held_back.is_empty() {
        return record;
    }
    let mut record = Arc::unwrap_or_clone(record);
    for (driver, problem) in held_back {
        record.drivers.entry(driver).or_default().problem = Some(problem);
    }
    Arc::new(record)
}

/// Notes in an intent which versions are about to be asked: after a crash they may have begun. A result says who prepared it.
pub fn ask(
    record: Arc<ClaimRecord>,
    drivers: &[DriverName],
    by: impl Fn(&DriverName) -> Option<PreparedBy>,
) -> Arc<ClaimRecord> {
    let mut record = Arc::unwrap_or_clone(record);
    for driver in drivers {
        let part = record.drivers.entry(driver.clone()).or_default();
        if part.prepared.is_none() {
            part.by = by(driver).or(part.by.take());
        }
    }
    Arc::new(record)
}

/// Marks what a driver prepared, in the boot of that ID, and what holds no more: the boot is over, or its device nodes are others.
fn outlive(part: &mut DriverPart, old_boot: &str) {
    if part.prepared.is_some() && !part.stale {
        part.stale = true;
        part.prepared_in = old_boot.to_owned();
    }
}

fn new_record(request: &PrepareRequest<'_>) -> ClaimRecord {
    let drivers: BTreeSet<_> = request.allocation.devices.iter().map(|d| d.driver.clone()).collect();
    ClaimRecord {
        id: request.claim.id.clone(),
        state: ClaimState::Preparing,
        boot_id: request.boot_id.to_owned(),
        pods: BTreeMap::new(),
        allocation: request.allocation.clone(),
        annotations: request.claim.annotations.clone(),
        drivers: drivers.into_iter().map(|name| (name, DriverPart::default())).collect(),
        holds: Vec::new(),
        releasing: None,
        timeline: Default::default(),
        unknown: BTreeMap::new(),
    }
}

/// What one driver came to for one claim.
#[derive(Debug, Clone, PartialEq)]
pub struct DriverResult {
    pub driver: DriverName,
    pub by: Option<PreparedBy>,
    pub outcome: Result<PreparedClaim, Problem>,
    pub duration_us: u64,
}

/// What a prepare came to after its drivers answered.
#[derive(Debug, Clone, PartialEq)]
pub enum PrepareEnd {
    Prepared(Arc<ClaimRecord>),
    /// Kept: some driver has, or may have, done something. A retry calls only what is missing.
    Open(Arc<ClaimRecord>, Problem),
    /// Refused for good by every driver that was asked: to be given up at once.
    RolledBack(Arc<ClaimRecord>, Problem),
}

/// Takes the drivers' results into a claim's record.
pub fn finish_prepare(record: &ClaimRecord, results: Vec<DriverResult>, now_ms: u64) -> PrepareEnd {
    let mut record = record.clone();
    for result in results {
        let part = record.drivers.entry(result.driver.clone()).or_default();
        let what = if result.outcome.is_ok() { "prepared by driver" } else { "refused by driver" };
        let mut entry = transition(now_ms, what, result.driver.as_str());
        entry.duration_us = result.duration_us;
        match result.outcome {
            Ok(prepared) => {
                part.prepared = Some(prepared);
                part.stale = false;
                part.prepared_in = String::new();
                part.by = result.by;
                part.problem = None;
            }
            Err(problem) => {
                entry.problem = Some(problem.clone());
                part.problem = Some(problem);
            }
        }
        record.note(entry);
    }
    let Some(problem) = worst(record.drivers.values().filter(|part| part.current().is_none())) else {
        record.state = ClaimState::Prepared;
        record.note(transition(now_ms, "prepared", ""));
        return PrepareEnd::Prepared(Arc::new(record));
    };
    let nothing_done = record.drivers.values().all(|part| {
        part.prepared.is_none() && part.problem.as_ref().is_some_and(|problem| problem.kind.is_permanent())
    });
    if nothing_done && record.pods.len() <= 1 {
        return PrepareEnd::RolledBack(Arc::new(record), problem);
    }
    PrepareEnd::Open(Arc::new(record), problem)
}

/// Whether an operator may give a claim up by hand: nobody else would.
pub fn check_release(record: &ClaimRecord) -> Result<(), Problem> {
    if record.state == ClaimState::Unpreparing || record.pods.is_empty() {
        return Ok(());
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
        UnprepareEnd::Kept(left, _) => Arc::unwrap_or_clone(left),
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

/// The problem that a person should see first: a permanent one before one that passes.
fn worst<'a>(open: impl Iterator<Item = &'a DriverPart>) -> Option<Problem> {
    let problems: Vec<_> = open.map(|part| part.problem.clone().unwrap_or_else(not_asked)).collect();
    problems.iter().find(|p| p.kind.is_permanent()).or(problems.first()).cloned()
}

/// What a claim's history says when files of a plugin are missing, and when they are there again.
const FILES_MISSING: &str = "without CDI files of its plugin";
const FILES_THERE: &str = "with CDI files of its plugin";

/// Writes into a claim's history what is missing of the files that its plugins have to write, or that nothing is any more. None:
/// its history says so already.
pub fn note_files(record: &ClaimRecord, missing: Option<Problem>, now_ms: u64) -> Option<Arc<ClaimRecord>> {
    let about_files = |entry: &&Transition| entry.what == FILES_MISSING || entry.what == FILES_THERE;
    let said = record.timeline.iter().rev().find(about_files).and_then(|entry| entry.problem.as_ref());
    if said == missing.as_ref() {
        return None;
    }
    let what = if missing.is_some() { FILES_MISSING } else { FILES_THERE };
    let mut record = record.clone();
    record.note(Transition { problem: missing, ..transition(now_ms, what, "") });
    Some(Arc::new(record))
}

fn not_asked() -> Problem {
    Problem::unavailable("driver-not-asked", "the driver was not asked yet")
}

/// What an unprepare comes to.
#[derive(Debug, Clone, PartialEq)]
pub enum UnprepareStep {
    /// Nothing to do: the claim is unknown, or the pod does not hold it.
    Nothing,
    /// Other pods hold it: commit and answer.
    Left(Arc<ClaimRecord>),
    /// The intent to commit, and the drivers to call then.
    Call { record: Arc<ClaimRecord>, drivers: Vec<DriverName> },
}

/// Decides an unprepare by a pod that leaves, or (`pod` none) of a claim that was being given up already.
pub fn unprepare(table: &Table, uid: &Uid, pod: Option<&Uid>, now_ms: u64, cause: &str) -> UnprepareStep {
    let Some(known) = table.claim(uid.as_str()) else { return UnprepareStep::Nothing };
    let resumes = pod.is_none() && known.state == ClaimState::Unpreparing;
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
    if record.state != ClaimState::Unpreparing {
        record.state = ClaimState::Unpreparing;
        record.note(transition(now_ms, "unpreparing", cause));
    }
    let drivers = record.drivers.keys().cloned().collect();
    UnprepareStep::Call { record: Arc::new(record), drivers }
}

/// What an unprepare came to after its drivers answered.
#[derive(Debug, Clone, PartialEq)]
pub enum UnprepareEnd {
    /// Every driver gave it up: remove its CDI files, then its record.
    Gone,
    /// Some did not: commit, keep, and come again.
    Kept(Arc<ClaimRecord>, Problem),
}

/// Takes the drivers' answers to an unprepare into a claim's record.
pub fn finish_unprepare(
    record: &ClaimRecord,
    results: Vec<(DriverName, Result<(), Problem>, u64)>,
    now_ms: u64,
) -> UnprepareEnd {
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
    match worst(record.drivers.values()) {
        None => UnprepareEnd::Gone,
        Some(problem) => UnprepareEnd::Kept(Arc::new(record), problem),
    }
}

/// The intent to give up a claim that every driver refused for good. They are told all the same: they may have begun.
pub fn roll_back(record: &ClaimRecord, now_ms: u64) -> (Arc<ClaimRecord>, Vec<DriverName>) {
    let mut record = record.clone();
    record.state = ClaimState::Unpreparing;
    record.note(transition(now_ms, "rolled back", "refused by every driver"));
    let drivers = record.drivers.keys().cloned().collect();
    (Arc::new(record), drivers)
}

/// A pod's record after a request of which `accepted` were taken on, by the pod's own names for them. What it held before and
/// still holds stays: a claim that is refused today was not taken from it.
pub fn pod_record(
    table: &Table,
    pod: &ObjectRef,
    containers: &[PodContainer],
    accepted: BTreeMap<String, ObjectRef>,
) -> PodRecord {
    let known = table.pod(pod.uid.as_str());
    let held = |id: &ObjectRef| table.claim(id.uid.as_str()).is_some_and(|c| c.pods.contains_key(&pod.uid));
    let before = known.iter().flat_map(|known| &known.claims).filter(|(_, id)| held(id));
    let mut claims: BTreeMap<_, _> = before.map(|(name, id)| (name.clone(), id.clone())).collect();
    claims.extend(accepted);
    let unknown = known.map(|known| known.unknown.clone()).unwrap_or_default();
    PodRecord { pod: pod.clone(), claims, containers: containers.to_vec(), unknown }
}

/// Refuses devices that the driver does not have. A driver that publishes nothing here is trusted to know.
pub fn check_devices(
    allocation: &Allocation,
    driver: &DriverName,
    inventory: &Inventory,
) -> Result<(), Problem> {
    for device in allocation.devices.iter().filter(|device| device.driver == *driver) {
        let Some(pool) = inventory.pools.get(&device.pool) else {
            let message = format!("driver {driver} has no pool {}", device.pool);
            return Err(Problem::not_found("no-such-pool", message));
        };
        if !pool.devices.contains_key(&device.device) {
            let message = format!("pool {} of driver {driver} has no device {}", device.pool, device.device);
            return Err(Problem::not_found("no-such-device", message));
        }
    }
    Ok(())
}

fn transition(at_ms: u64, what: &str, cause: &str) -> Transition {
    let (what, cause) = (what.to_owned(), cause.to_owned());
    Transition { at_ms, what, cause, duration_us: 0, problem: None, again: None }
}

fn replaced(id: &ObjectRef, old: &ClaimRecord) -> Problem {
    let message = format!(
        "an older claim {id} with UID {} is still {} here, and this one has UID {}: unprepare the pods of the older one first",
        old.id.uid,
        old.state.as_str(),
        id.uid
    );
    Problem::conflict("claim-replaced", message).with("old-uid", &old.id.uid)
}

fn being_given_up(id: &ObjectRef) -> Problem {
    Problem::conflict("claim-unpreparing", format!("claim {id} is being given up"))
}

fn changed_allocation(id: &ObjectRef) -> Problem {
    let message = format!(
        "claim {id} is known here with another allocation: an allocation is final until the claim is given up"
    );
    Problem::new(ProblemKind::Invalid, "allocation-changed", message)
}

/// Pods that a problem names: its message is one line.
const PODS_NAMED_MAX: usize = 3;

fn pods_named(claim: &ClaimRecord) -> String {
    let mut pods: Vec<_> = claim.pods.values().take(PODS_NAMED_MAX).map(ToString::to_string).collect();
    if claim.pods.len() > PODS_NAMED_MAX {
        pods.push(format!("and {} more", claim.pods.len() - PODS_NAMED_MAX));
    }
    pods.join(", ")
}

fn held(id: &ObjectRef, holder: &ClaimRecord, key: &str) -> Problem {
    let (of, pods) = (&holder.id, pods_named(holder));
    let message = format!("claim {id} wants {key}, which claim {of} (UID {}, pods {pods}) holds", of.uid);
    Problem::conflict("device-held", message).with("holder", &holder.id).with("device", key)
}
