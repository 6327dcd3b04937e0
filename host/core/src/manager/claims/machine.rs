//! The state machine of claims: a state and a request in, the next state and the steps to take out. Pure: no clock, no IO, no task.

mod holds;
mod kubelet;
mod unprepare;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use tokio::time::Instant;

use super::{name_few, overlap};
use crate::records::table::ClaimTable;
use nodedock_model::{
    Allocation, Claim, ClaimRecord, ClaimState, DriverName, DriverPart, Hold, Inventory,
    KubeletHold, ObjectName, ObjectRef, PodContainer, PodRecord, PreparedBy, PreparedClaim,
    Problem, ProblemCode, ProblemKind, SmallMap, Transition, Uid,
};

pub(super) use holds::holds_of;
pub use holds::{CounterFacts, DerivedKey, DeviceFacts, holds};
pub use kubelet::{admit_for_kubelet, end_of_part, known_claim};
pub use unprepare::{
    UnprepareEnd, UnprepareRequest, UnprepareResult, check_release, ended, finish_unprepare,
    release, released, roll_back, unprepare,
};

/// Requester of a claim.
#[derive(Debug, Clone, Copy)]
pub enum Holder<'a> {
    /// All of it.
    Pod(&'a ObjectRef),
    /// The part of one driver. `given`: the claim is no object of the API server.
    Kubelet { driver: &'a DriverName, given: bool },
    /// The part of one driver, for a kubelet that does not know the claim yet: a scheduler waits for the device.
    Early { driver: &'a DriverName },
}

impl<'a> Holder<'a> {
    pub fn pod(self) -> Option<&'a ObjectRef> {
        if let Self::Pod(pod) = self {
            Some(pod)
        } else {
            None
        }
    }

    /// The driver whose part is requested. None: all parts.
    pub fn part(self) -> Option<&'a DriverName> {
        match self {
            Self::Pod(_) => None,
            Self::Kubelet { driver, .. } | Self::Early { driver } => Some(driver),
        }
    }
}

impl fmt::Display for Holder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(pod) => write!(f, "pod {pod}"),
            Self::Kubelet { driver, .. } => write!(f, "kubelet, driver {driver}"),
            Self::Early { driver } => write!(f, "before the pod is bound, driver {driver}"),
        }
    }
}

/// A request for a claim, and its time.
#[derive(Clone)]
pub struct PrepareRequest<'a> {
    pub claim: &'a Claim,
    pub allocation: &'a Allocation,
    pub holder: Holder<'a>,
    /// The facts of a device now.
    pub facts: &'a dyn Fn(&DriverName, &str, &str) -> DeviceFacts,
    /// Drivers whose device nodes are no longer those of the time when the claim was prepared.
    pub moved: &'a [DriverName],
    pub boot_id: &'a str,
    pub now_ms: u64,
}

impl PrepareRequest<'_> {
    fn drivers(&self) -> BTreeSet<&DriverName> {
        match self.holder {
            Holder::Pod(_) => self.allocation.drivers(),
            Holder::Kubelet { driver, .. } | Holder::Early { driver } => BTreeSet::from([driver]),
        }
    }

    fn transition(&self, what: &str) -> Transition {
        transition(self.now_ms, what, &format!("prepare {}", self.holder))
    }
}

/// The decision about a prepare.
#[derive(Debug, Clone, PartialEq)]
pub enum PrepareStep {
    /// Prepared in this boot. `changed`: the record differs, as by a new holder, and must be committed.
    Known {
        record: Arc<ClaimRecord>,
        changed: bool,
    },
    /// The intent to commit, and the drivers to call then.
    Call {
        record: Arc<ClaimRecord>,
        drivers: Vec<DriverName>,
    },
    /// Another claim is in the way: decide again when one was unprepared. Or a driver may be called at a later time.
    Wait {
        at: Option<Instant>,
        problem: Problem,
    },
    Refuse(Problem),
}

/// The decision about an unprepare.
#[derive(Debug, Clone, PartialEq)]
pub enum UnprepareStep {
    /// Nothing to do: the claim is unknown, or the pod or kubelet does not hold it.
    Nothing,
    /// Others hold all of it: commit and answer.
    Left(Arc<ClaimRecord>),
    /// The intent to commit, and the drivers to call then.
    Call {
        record: Arc<ClaimRecord>,
        drivers: Vec<DriverName>,
    },
}

impl PrepareStep {
    fn wait(problem: Problem) -> Self {
        Self::Wait { at: None, problem }
    }
}

/// Checks of a claim that need nothing but the claim, the pod and the node.
pub fn admit<'a>(
    claim: &'a Claim,
    pod: &ObjectRef,
    pod_group: Option<&ObjectName>,
    node_name: &str,
) -> Result<&'a Allocation, Problem> {
    let name = &claim.id;
    if let Some(owner) = claim.owner_pod.as_ref().filter(|owner| **owner != pod.uid) {
        let message =
            format!("claim {name} was made for another pod than {pod} (its owner has UID {owner})");
        return Err(Problem::denied(ProblemCode::ClaimOfAnotherPod, message));
    }
    let allocation = allocated(claim)?;
    let admin_only =
        !allocation.devices.is_empty() && allocation.devices.iter().all(|d| d.admin_access);
    if !claim.is_reserved_for(&pod.uid, pod_group) && !admin_only {
        let group = pod_group
            .map(|group| format!(", nor for its group {group}"))
            .unwrap_or_default();
        let message = format!(
            "claim {name} is not reserved for pod {pod} (UID {}){group}",
            pod.uid
        );
        return Err(Problem::denied(ProblemCode::ClaimNotReserved, message));
    }
    check_node(claim, allocation, node_name)?;
    Ok(allocation)
}

fn allocated(claim: &Claim) -> Result<&Allocation, Problem> {
    claim.allocation.as_ref().ok_or_else(|| {
        Problem::unavailable(
            ProblemCode::ClaimNotAllocated,
            format!("claim {} is not allocated", claim.id),
        )
    })
}

fn check_node(claim: &Claim, allocation: &Allocation, node_name: &str) -> Result<(), Problem> {
    let other = allocation
        .node_name
        .as_ref()
        .filter(|other| *other != node_name);
    other.map_or(Ok(()), |other| {
        let message = format!(
            "claim {} is allocated on node {other}, and this is {node_name}",
            claim.id
        );
        Err(Problem::denied(ProblemCode::ClaimOnAnotherNode, message))
    })
}

/// Decides a prepare. The table is not changed.
pub fn prepare(table: &ClaimTable, request: &PrepareRequest<'_>) -> PrepareStep {
    let id = &request.claim.id;
    if let Some(old) = table
        .claim_named(&id.namespace, &id.name)
        .filter(|old| old.id.uid != id.uid)
    {
        return PrepareStep::wait(replaced(id, old));
    }
    match table.claim(id.uid.as_str()) {
        None => begin(table, request, None),
        Some(known) if is_leaving(known, request) => PrepareStep::wait(being_unprepared(known)),
        Some(known) if !is_same(&known.allocation, request.allocation) => {
            PrepareStep::Refuse(changed_allocation(id))
        }
        Some(known) if is_good(known, request) => join(known, request),
        Some(known) => begin(table, request, Some(known)),
    }
}

/// Returns whether the allocation is unchanged. A record that was rebuilt from CDI files has only the devices of the drivers that had
/// files.
fn is_same(known: &Allocation, wanted: &Allocation) -> bool {
    let is_rest = || {
        let is_same = |driver: &DriverName| known.of_driver(driver).eq(wanted.of_driver(driver));
        known.configs.is_empty()
            && known.node_name.is_none()
            && known.drivers().into_iter().all(is_same)
    };
    known == wanted || is_rest()
}

/// Completes a record that was rebuilt, from the claim's source.
fn complete(record: &mut ClaimRecord, request: &PrepareRequest<'_>) {
    if record.allocation != *request.allocation {
        record.allocation = request.allocation.clone();
        record.annotations = request.claim.annotations.clone();
    }
}

fn is_leaving(known: &ClaimRecord, request: &PrepareRequest<'_>) -> bool {
    let wanted = request.drivers();
    known.state == ClaimState::Unpreparing
        || known.leaving().any(|(driver, _)| wanted.contains(driver))
}

/// Returns whether all requested parts were prepared in this boot, and their device nodes are unchanged.
fn is_good(known: &ClaimRecord, request: &PrepareRequest<'_>) -> bool {
    let is_current = |driver: &DriverName| {
        known
            .drivers
            .get(driver)
            .is_some_and(|p| p.current().is_some())
    };
    let is_whole = match request.holder {
        Holder::Pod(_) => known.state == ClaimState::Prepared,
        Holder::Kubelet { .. } | Holder::Early { .. } => true,
    };
    let mut wanted = request.drivers().into_iter();
    is_whole
        && known.boot_id == request.boot_id
        && wanted.all(|driver| is_current(driver) && !request.moved.contains(driver))
}

fn join(known: &Arc<ClaimRecord>, request: &PrepareRequest<'_>) -> PrepareStep {
    let mut record = ClaimRecord::clone(known);
    complete(&mut record, request);
    if hold(&mut record, request) {
        record.note(request.transition("joined"));
    }
    match record == **known {
        true => PrepareStep::Known {
            record: known.clone(),
            changed: false,
        },
        false => PrepareStep::Known {
            record: Arc::new(record),
            changed: true,
        },
    }
}

/// Notes the holder. True: it is new.
fn hold(record: &mut ClaimRecord, request: &PrepareRequest<'_>) -> bool {
    match request.holder {
        Holder::Pod(pod) => record.pods.insert(pod.uid.clone(), pod.clone()).is_none(),
        Holder::Kubelet { driver, given } => {
            let first = || KubeletHold {
                since_ms: request.now_ms,
                ..KubeletHold::default()
            };
            let held = record.kubelet.get_or_insert_with(first);
            held.consumers.clone_from(&request.claim.reserved_for);
            held.given = given;
            let was_early = std::mem::replace(&mut held.early, false);
            let part = record.drivers.entry(driver.clone()).or_default();
            !std::mem::replace(&mut part.kubelet, true) || was_early
        }
        Holder::Early { driver } => {
            if !record.is_held_by_kubelet() {
                record.kubelet = None;
            }
            let first = || KubeletHold {
                since_ms: request.now_ms,
                early: true,
                ..KubeletHold::default()
            };
            let held = record.kubelet.get_or_insert_with(first);
            held.consumers.clone_from(&request.claim.reserved_for);
            let part = record.drivers.entry(driver.clone()).or_default();
            !std::mem::replace(&mut part.kubelet, true)
        }
    }
}

fn begin(
    table: &ClaimTable,
    request: &PrepareRequest<'_>,
    known: Option<&Arc<ClaimRecord>>,
) -> PrepareStep {
    let id = &request.claim.id;
    // In one boot a claim keeps its holds: the facts of a device are not known while its driver is absent.
    let holds = holds_for(known, request);
    let made_for = request.claim.resource.as_ref().zip(request.holder.pod());
    let made_for = made_for.map(|(of, pod)| (&of.resource, &pod.uid));
    if let Some((holder, key)) = table.conflict(&id.uid, made_for, &holds) {
        return PrepareStep::wait(held(id, holder, key));
    }
    if let Err(overlap) = overlap::check(table, id, &holds) {
        let problem = overlap.problem;
        return match overlap.others {
            true => PrepareStep::Wait { at: None, problem },
            false => PrepareStep::Refuse(problem),
        };
    }
    let mut record = known.map_or_else(|| new_record(request), |known| ClaimRecord::clone(known));
    complete(&mut record, request);
    let wanted = request.drivers();
    for driver in &wanted {
        record.drivers.entry(DriverName::clone(driver)).or_default();
    }
    let new_boot = record.boot_id != request.boot_id;
    if new_boot {
        // The kernel's state is gone: every driver is called again. Its memo stays, for the unprepare.
        let old_boot = std::mem::replace(&mut record.boot_id, request.boot_id.to_owned());
        for (driver, part) in &mut record.drivers {
            make_stale(part, &old_boot);
            // Its driver is called later, and its holds are those of the earlier boot.
            if part.prepared.is_none() && !wanted.contains(driver) {
                (part.stale, part.prepared_in) = (true, old_boot.clone());
            }
        }
    }
    let called_again = record
        .drivers
        .iter_mut()
        .filter(|(driver, _)| wanted.contains(driver));
    for (_, part) in called_again.filter(|(_, part)| part.prepared.is_none()) {
        (part.stale, part.prepared_in) = (false, String::new());
    }
    let is_moved = |driver: &DriverName| wanted.contains(driver) && request.moved.contains(driver);
    let moved = record
        .drivers
        .iter_mut()
        .filter(|(driver, _)| is_moved(driver));
    let any_moved = moved
        .map(|(_, part)| make_stale(part, request.boot_id))
        .count()
        > 0;
    record.state = ClaimState::Preparing;
    record.holds = holds;
    hold(&mut record, request);
    let open = record
        .drivers
        .iter()
        .filter(|(name, part)| wanted.contains(name) && part.current().is_none());
    let drivers: Vec<_> = open.map(|(name, _)| name.clone()).collect();
    let what = match known {
        Some(_) if new_boot => "preparing after a new boot",
        Some(_) if any_moved => "preparing after device nodes changed",
        _ => "preparing",
    };
    record.note(request.transition(what));
    PrepareStep::Call {
        record: Arc::new(record),
        drivers,
    }
}

/// The holds of a claim with the requested parts. Holds of this boot stay, as do those of drivers that are not requested; the others are
/// computed again.
fn holds_for(known: Option<&Arc<ClaimRecord>>, request: &PrepareRequest<'_>) -> Vec<Hold> {
    let wanted = request.drivers();
    let standing = known.filter(|known| !known.holds.is_empty());
    let Some(standing) = standing else {
        let has_part =
            |driver: &DriverName| known.is_some_and(|known| known.drivers.contains_key(driver));
        let is_held = |driver: &DriverName| wanted.contains(driver) || has_part(driver);
        return holds_of(request.allocation, is_held, request.facts);
    };
    let is_of_this_boot = |part: &DriverPart| {
        standing.boot_id == request.boot_id && !(part.stale && part.prepared_in != request.boot_id)
    };
    let is_new = |driver: &DriverName| {
        wanted.contains(driver)
            && !standing
                .drivers
                .get(driver)
                .is_some_and(|part| is_of_this_boot(part))
    };
    // A part that was unprepared leaves its holds while the claim exists: requested again, it must not get them twice.
    let stays = |hold: &&Hold| {
        let mut new = wanted.iter().filter(|driver| is_new(driver));
        !new.any(|driver| hold.is_of(driver))
    };
    let mut holds: Vec<_> = standing.holds.iter().filter(stays).cloned().collect();
    holds.extend(holds_of(request.allocation, is_new, request.facts));
    holds
}

/// Notes the problems of drivers that are not called now.
pub fn postpone(
    record: Arc<ClaimRecord>,
    postponed: Vec<(DriverName, Problem)>,
) -> Arc<ClaimRecord> {
    if postponed.is_empty() {
        return record;
    }
    let mut record = Arc::unwrap_or_clone(record);
    for (driver, problem) in postponed {
        record.drivers.entry(driver).or_default().problem = Some(problem);
    }
    Arc::new(record)
}

/// Notes in an intent which versions are about to be called: after a crash they may have begun.
pub fn note_called(
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

/// Marks a part as stale that was prepared in the boot of that ID: the boot has ended, or the part's device nodes changed.
fn make_stale(part: &mut DriverPart, old_boot: &str) {
    if part.prepared.is_some() && !part.stale {
        part.stale = true;
        part.prepared_in = old_boot.to_owned();
    }
}

fn new_record(request: &PrepareRequest<'_>) -> ClaimRecord {
    ClaimRecord {
        allocation: request.allocation.clone(),
        annotations: request.claim.annotations.clone(),
        resource: request.claim.resource.clone(),
        ..ClaimRecord::new(
            request.claim.id.clone(),
            ClaimState::Preparing,
            request.boot_id,
        )
    }
}

/// The result of one driver for one claim.
#[derive(Debug, Clone, PartialEq)]
pub struct DriverResult {
    pub driver: DriverName,
    pub by: Option<PreparedBy>,
    pub outcome: Result<PreparedClaim, Problem>,
    pub duration_us: u64,
}

/// The decision about a prepare after its drivers answered.
#[derive(Debug, Clone, PartialEq)]
pub enum PrepareEnd {
    Prepared(Arc<ClaimRecord>),
    /// Kept: some driver has done something, or may have. A retry calls only the missing drivers.
    Open(Arc<ClaimRecord>, Problem),
    /// Refused for good by every driver that was called: to be unprepared at once.
    RolledBack(Arc<ClaimRecord>, Problem),
}

/// Notes the results of the drivers that were called in a claim's record. `part`: a kubelet requested this driver's part; other open parts
/// do not matter to it.
pub fn finish_prepare(
    record: &ClaimRecord,
    part: Option<&DriverName>,
    results: Vec<DriverResult>,
    now_ms: u64,
) -> PrepareEnd {
    let mut record = record.clone();
    take_results(&mut record, results, now_ms);
    let drivers = record
        .drivers
        .iter()
        .filter(|(driver, _)| part.is_none_or(|part| part == *driver));
    let requested: Vec<_> = drivers.map(|(_, part)| &**part).collect();
    let Some(problem) = worst(requested.iter().copied().filter(|part| is_open(part))) else {
        return PrepareEnd::Prepared(Arc::new(record));
    };
    // A device plugin has no call that ends an allocation, and the next try chooses again. What a pod had before a boot it keeps.
    let is_over = |part: &DriverPart| {
        (record.is_of_plugin() && part.prepared.is_none()) || is_refused_for_good(part)
    };
    if !has_other_users(&record, part) && requested.iter().all(|part| is_over(part)) {
        return PrepareEnd::RolledBack(Arc::new(record), problem);
    }
    PrepareEnd::Open(Arc::new(record), problem)
}

/// Returns whether an intent has nothing but what its request began: no other user, and no requested part that was prepared before.
pub fn is_begun_by_request(intent: &ClaimRecord, part: Option<&DriverName>) -> bool {
    let mut drivers = intent.drivers.iter();
    !has_other_users(intent, part)
        && drivers.all(|(driver, state)| {
            part.is_some_and(|part| part != driver) || state.prepared.is_none()
        })
}

fn has_other_users(record: &ClaimRecord, part: Option<&DriverName>) -> bool {
    match part {
        Some(_) => !record.pods.is_empty(),
        None => record.pods.len() > 1 || record.is_held_by_kubelet(),
    }
}

/// Returns whether a part is requested, and not prepared in this boot.
fn is_open(part: &DriverPart) -> bool {
    !part.leaving && part.current().is_none()
}

/// Returns whether the driver has refused the part for good and left nothing prepared.
fn is_refused_for_good(part: &DriverPart) -> bool {
    // What it prepared is another claim's: the claim must not keep it while it waits.
    let is_final =
        |problem: &Problem| problem.kind.is_permanent() || problem.code == ProblemCode::DeviceHeld;
    part.prepared.is_none() && part.problem.as_ref().is_some_and(is_final)
}

fn take_results(record: &mut ClaimRecord, results: Vec<DriverResult>, now_ms: u64) {
    for result in results {
        let part = record.drivers.entry(result.driver.clone()).or_default();
        let what = if result.outcome.is_ok() {
            "prepared by driver"
        } else {
            "refused by driver"
        };
        let mut entry = transition(now_ms, what, result.driver.as_str());
        entry.duration_us = result.duration_us;
        match result.outcome {
            Ok(prepared) => {
                part.prepared = Some(Arc::new(prepared));
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
    settle(record);
    if record.state == ClaimState::Prepared {
        record.note(transition(now_ms, PREPARED, ""));
    }
}

/// Sets the state of a claim that is in use, by its parts that are not being unprepared.
fn settle(record: &mut ClaimRecord) {
    let is_open = record.drivers.values().any(|part| is_open(part));
    record.state = if is_open {
        ClaimState::Preparing
    } else {
        ClaimState::Prepared
    };
}

/// The problem that a person should see first: a permanent one before one that passes.
fn worst<'a>(open: impl Iterator<Item = &'a DriverPart>) -> Option<Problem> {
    let problems: Vec<_> = open
        .map(|part| part.problem.clone().unwrap_or_else(not_called))
        .collect();
    problems
        .iter()
        .find(|p| p.kind.is_permanent())
        .or(problems.first())
        .cloned()
}

/// The entry of a claim's history when all of it is prepared.
const PREPARED: &str = "prepared";
/// The entry of a claim's history when a prepare is undone.
const ROLLED_BACK: &str = "rolled back";

/// The entries of a claim's history when files of a plugin are missing, and when they are back.
const FILES_MISSING: &str = "without CDI files of its plugin";
const FILES_THERE: &str = "with CDI files of its plugin";

/// Notes in a claim's history that files which its plugins have to write are missing, or are back. None: its history says so already.
pub fn note_files(
    record: &ClaimRecord,
    missing: Option<Problem>,
    now_ms: u64,
) -> Option<Arc<ClaimRecord>> {
    let about_files =
        |entry: &&Transition| entry.what == FILES_MISSING || entry.what == FILES_THERE;
    let noted = record
        .timeline
        .iter()
        .rev()
        .find(about_files)
        .and_then(|entry| entry.problem.as_ref());
    if noted == missing.as_ref() {
        return None;
    }
    let what = if missing.is_some() {
        FILES_MISSING
    } else {
        FILES_THERE
    };
    let mut record = record.clone();
    record.note(Transition {
        problem: missing,
        ..transition(now_ms, what, "")
    });
    Some(Arc::new(record))
}

fn not_called() -> Problem {
    Problem::unavailable(ProblemCode::DriverNotAsked, "the driver was not called yet")
}

/// A pod's record after a request whose `accepted` claims are given by the pod's own names for them. Claims that it still holds stay, also
/// if they are refused now.
pub fn pod_record(
    table: &ClaimTable,
    pod: &ObjectRef,
    containers: &[PodContainer],
    accepted: impl IntoIterator<Item = (String, ObjectRef)>,
) -> PodRecord {
    let known = table.pod(pod.uid.as_str());
    let held = |id: &ObjectRef| {
        table
            .claim(id.uid.as_str())
            .is_some_and(|c| c.pods.contains_key(&pod.uid))
    };
    let before = known
        .iter()
        .flat_map(|known| &known.claims)
        .filter(|(_, id)| held(id));
    let mut claims: SmallMap<_, _> = before
        .map(|(name, id)| (name.clone(), id.clone()))
        .collect();
    claims.extend(accepted);
    let unknown = known.map(|known| known.unknown.clone()).unwrap_or_default();
    PodRecord {
        pod: pod.clone(),
        claims,
        containers: containers.to_vec(),
        unknown,
    }
}

/// Refuses devices that the driver does not have.
pub fn check_devices(
    allocation: &Allocation,
    driver: &DriverName,
    inventory: &Inventory,
) -> Result<(), Problem> {
    for device in allocation.of_driver(driver) {
        let Some(pool) = inventory.pools.get(&device.pool) else {
            let message = format!("driver {driver} has no pool {}", device.pool);
            return Err(Problem::not_found(ProblemCode::NoSuchPool, message));
        };
        if !pool.devices.contains_key(&device.device) {
            let message = format!(
                "pool {} of driver {driver} has no device {}",
                device.pool, device.device
            );
            return Err(Problem::not_found(ProblemCode::NoSuchDevice, message));
        }
    }
    Ok(())
}

fn transition(at_ms: u64, what: &str, cause: &str) -> Transition {
    let (what, cause) = (what.to_owned(), cause.to_owned());
    Transition {
        at_ms,
        what,
        cause,
        duration_us: 0,
        problem: None,
        again: None,
    }
}

/// The problem of a claim that has another UID than the one that is wanted.
pub fn other_uid(claim: &ObjectRef, uid: &Uid, wanted: &Uid) -> Problem {
    let message = format!("claim {claim} has UID {uid}, and {wanted} is wanted: it was replaced");
    Problem::conflict(ProblemCode::ClaimReplaced, message)
}

fn replaced(id: &ObjectRef, old: &ClaimRecord) -> Problem {
    let message = format!(
        "an older claim {id} with UID {} is still {} here, and this one has UID {}: unprepare the pods of the older one first",
        old.id.uid,
        old.state.as_str(),
        id.uid
    );
    Problem::conflict(ProblemCode::ClaimReplaced, message).with("old-uid", &old.id.uid)
}

fn being_unprepared(known: &ClaimRecord) -> Problem {
    let id = &known.id;
    let last = known.timeline.back();
    let rolled_back = last.filter(|entry| entry.what == ROLLED_BACK);
    match rolled_back.and_then(|entry| entry.problem.clone()) {
        // The host could not store the results, and removes the record as soon as it can.
        Some(failure) => Problem {
            message: format!(
                "claim {id} is being unprepared after a prepare that failed: {}",
                failure.message
            ),
            ..failure
        },
        None => Problem::conflict(
            ProblemCode::ClaimUnpreparing,
            format!("claim {id} is being unprepared"),
        ),
    }
}

fn changed_allocation(id: &ObjectRef) -> Problem {
    let message = format!(
        "claim {id} is known here with another allocation: an allocation is final until the claim is unprepared"
    );
    Problem::new(
        ProblemKind::Invalid,
        ProblemCode::AllocationChanged,
        message,
    )
}

/// Pods that a problem names: its message is one line.
const PODS_NAMED_MAX: usize = 3;

fn pods_named(claim: &ClaimRecord) -> String {
    name_few(claim.pods.values(), PODS_NAMED_MAX)
}

pub(super) fn held(id: &ObjectRef, holder: &ClaimRecord, key: &str) -> Problem {
    let (of, by) = (&holder.id, kubelet::holders_named(holder));
    let message = format!(
        "claim {id} wants {key}, which claim {of} (UID {}, {by}) holds",
        of.uid
    );
    Problem::conflict(ProblemCode::DeviceHeld, message)
        .with("holder", &holder.id)
        .with("device", key)
}
