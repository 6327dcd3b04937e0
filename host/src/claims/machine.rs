//! What is decided about claims: state and event in, next state and what to do out. No clock, no IO, no task.
//!
//! The table is the memory of the claim manager. It changes before the checkpoint does, so that two requests cannot both take
//! a device, and is put back when the commit fails; nothing of it is answered before it is durable.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, btree_map};
use std::sync::Arc;

use crate::model::{
    Allocation, Claim, ClaimRecord, ClaimState, DriverName, DriverPart, Hold, Inventory, ObjectName, ObjectRef,
    PodRecord, PreparedBy, PreparedClaim, Problem, ProblemKind, Transition, Uid,
};

/// Every claim and pod that this node knows, with the indexes that decisions need: none of them looks at every claim.
#[derive(Debug, Default)]
pub struct Table {
    claims: BTreeMap<Uid, Arc<ClaimRecord>>,
    pods: BTreeMap<Uid, Arc<PodRecord>>,
    by_name: HashMap<(ObjectName, ObjectName), Uid>,
    /// By what is held, claims that keep out everybody and claims that keep out those who want it alone.
    holders: HashMap<String, Holders>,
    /// By `driver/pool/device`; claims with admin access, which hold nothing, are among them.
    users: BTreeMap<String, BTreeSet<Uid>>,
    claims_of_pods: HashMap<Uid, BTreeSet<Uid>>,
    /// By namespace and name, every pod that has a record or a claim.
    known_pods: BTreeSet<ObjectRef>,
}

#[derive(Debug, Default)]
struct Holders {
    exclusive: BTreeSet<Uid>,
    shared: BTreeSet<Uid>,
}

impl Holders {
    fn kind(&mut self, shared: bool) -> &mut BTreeSet<Uid> {
        if shared { &mut self.shared } else { &mut self.exclusive }
    }

    /// A holder other than `uid` that keeps it from somebody who would share it, or would not.
    fn in_the_way(&self, uid: &Uid, shared: bool) -> Option<&Uid> {
        let sharers = (!shared).then_some(&self.shared);
        self.exclusive.iter().chain(sharers.into_iter().flatten()).find(|other| *other != uid)
    }
}

impl Table {
    pub fn new(claims: Vec<ClaimRecord>, pods: Vec<PodRecord>) -> Self {
        let mut table = Self::default();
        claims.into_iter().for_each(|claim| drop(table.put(Arc::new(claim))));
        pods.into_iter().for_each(|pod| drop(table.put_pod(Arc::new(pod))));
        table
    }

    pub fn claim(&self, uid: &str) -> Option<&Arc<ClaimRecord>> {
        self.claims.get(uid)
    }

    pub fn claims(&self) -> impl Iterator<Item = &Arc<ClaimRecord>> {
        self.claims.values()
    }

    pub fn claim_named(&self, namespace: &ObjectName, name: &ObjectName) -> Option<&Arc<ClaimRecord>> {
        self.claims.get(self.by_name.get(&(namespace.clone(), name.clone()))?)
    }

    pub fn pod(&self, uid: &str) -> Option<&Arc<PodRecord>> {
        self.pods.get(uid)
    }

    pub fn pods(&self) -> impl Iterator<Item = &Arc<PodRecord>> {
        self.pods.values()
    }

    /// Pods of a name that have a record or a claim: several, where one replaced another.
    pub fn pods_named(&self, namespace: &ObjectName, name: &ObjectName) -> Vec<ObjectRef> {
        let Ok(first) = Uid::new("0") else { return Vec::new() };
        let from = ObjectRef { namespace: namespace.clone(), name: name.clone(), uid: first };
        let named = |pod: &&ObjectRef| pod.namespace == *namespace && pod.name == *name;
        // No UID sorts before "0".
        self.known_pods.range(from..).take_while(named).cloned().collect()
    }

    /// The pod of a UID, if it has a record or a claim.
    pub fn pod_ref(&self, uid: &Uid) -> Option<ObjectRef> {
        let of_record = self.pods.get(uid).map(|record| &record.pod);
        let claim = || self.claims.get(self.claims_of_pods.get(uid)?.first()?);
        of_record.or_else(|| claim()?.pods.get(uid)).cloned()
    }

    /// Claims that a pod holds, in the order in which operations take them.
    pub fn claims_of_pod(&self, pod: &str) -> Vec<Arc<ClaimRecord>> {
        self.found(self.claims_of_pods.get(pod)).cloned().collect()
    }

    /// Claims that have a device of a driver, each once.
    pub fn claims_of_driver(&self, driver: &DriverName) -> impl Iterator<Item = &Arc<ClaimRecord>> {
        let (from, to) = (format!("{driver}/"), format!("{driver}0"));
        let uids: BTreeSet<_> = self.users.range(from..to).flat_map(|(_, uids)| uids).collect();
        uids.into_iter().filter_map(|uid| self.claims.get(uid))
    }

    /// Claims that have a device, by UID.
    pub fn users_of(
        &self,
        driver: &DriverName,
        pool: &str,
        device: &str,
    ) -> impl Iterator<Item = &Arc<ClaimRecord>> {
        self.found(self.users.get(&device_key(driver, pool, device)))
    }

    fn found<'a>(&'a self, uids: Option<&'a BTreeSet<Uid>>) -> impl Iterator<Item = &'a Arc<ClaimRecord>> {
        uids.into_iter().flatten().filter_map(|uid| self.claims.get(uid))
    }

    /// Sets a claim's record and returns the one before.
    pub fn put(&mut self, record: Arc<ClaimRecord>) -> Option<Arc<ClaimRecord>> {
        let uid = &record.id.uid;
        let before = self.remove(uid);
        let name = (record.id.namespace.clone(), record.id.name.clone());
        self.by_name.insert(name, uid.clone());
        for hold in &record.holds {
            self.holders.entry(hold.key.clone()).or_default().kind(hold.shared).insert(uid.clone());
        }
        for key in device_keys(&record) {
            self.users.entry(key).or_default().insert(uid.clone());
        }
        for pod in record.pods.values() {
            self.claims_of_pods.entry(pod.uid.clone()).or_default().insert(uid.clone());
            self.known_pods.insert(pod.clone());
        }
        self.claims.insert(uid.clone(), record);
        before
    }

    pub fn remove(&mut self, uid: &Uid) -> Option<Arc<ClaimRecord>> {
        let record = self.claims.remove(uid)?;
        self.by_name.remove(&(record.id.namespace.clone(), record.id.name.clone()));
        for hold in &record.holds {
            if let Entry::Occupied(mut holders) = self.holders.entry(hold.key.clone()) {
                holders.get_mut().kind(hold.shared).remove(uid);
                if holders.get().exclusive.is_empty() && holders.get().shared.is_empty() {
                    holders.remove();
                }
            }
        }
        for key in device_keys(&record) {
            if let btree_map::Entry::Occupied(mut users) = self.users.entry(key) {
                users.get_mut().remove(uid);
                if users.get().is_empty() {
                    users.remove();
                }
            }
        }
        for pod in record.pods.values() {
            if let Entry::Occupied(mut claims) = self.claims_of_pods.entry(pod.uid.clone()) {
                claims.get_mut().remove(uid);
                if claims.get().is_empty() {
                    claims.remove();
                }
            }
            self.forget_pod(pod);
        }
        Some(record)
    }

    /// Puts back what stood before a change that did not become durable.
    pub fn restore(&mut self, uid: &Uid, before: Option<Arc<ClaimRecord>>) {
        match before {
            Some(record) => drop(self.put(record)),
            None => drop(self.remove(uid)),
        }
    }

    pub fn put_pod(&mut self, record: Arc<PodRecord>) -> Option<Arc<PodRecord>> {
        self.known_pods.insert(record.pod.clone());
        self.pods.insert(record.pod.uid.clone(), record)
    }

    pub fn remove_pod(&mut self, uid: &str) -> Option<Arc<PodRecord>> {
        let record = self.pods.remove(uid)?;
        self.forget_pod(&record.pod);
        Some(record)
    }

    fn forget_pod(&mut self, pod: &ObjectRef) {
        if !self.pods.contains_key(&pod.uid) && !self.claims_of_pods.contains_key(&pod.uid) {
            self.known_pods.remove(pod);
        }
    }

    pub fn restore_pod(&mut self, uid: &Uid, before: Option<Arc<PodRecord>>) {
        match before {
            Some(record) => drop(self.put_pod(record)),
            None => drop(self.remove_pod(uid.as_str())),
        }
    }

    /// The claim that keeps one of `holds` from the claim `uid`, and which.
    fn conflict(&self, uid: &Uid, holds: &[Hold]) -> Option<(&Arc<ClaimRecord>, String)> {
        holds.iter().find_map(|hold| {
            let holder = self.holders.get(&hold.key)?.in_the_way(uid, hold.shared)?;
            Some((self.claims.get(holder)?, hold.key.clone()))
        })
    }
}

fn device_keys(record: &ClaimRecord) -> impl Iterator<Item = String> {
    let devices = record.allocation.devices.iter();
    devices.map(|device| device_key(&device.driver, device.pool.as_str(), device.device.as_str()))
}

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

fn device_key(driver: &DriverName, pool: &str, device: &str) -> String {
    format!("{driver}/{pool}/{device}")
}

/// A pod that asks for a claim, and when.
#[derive(Debug, Clone)]
pub struct PrepareRequest<'a> {
    pub claim: &'a Claim,
    pub allocation: &'a Allocation,
    pub pod: &'a ObjectRef,
    pub holds: Vec<Hold>,
    pub boot_id: &'a str,
    pub now_ms: u64,
    pub cause: &'a str,
}

/// What a prepare comes to.
#[derive(Debug, Clone, PartialEq)]
pub enum PrepareStep {
    /// Prepared in this boot. `changed`: the pod is new to it, so the record must be committed.
    Known { record: Arc<ClaimRecord>, changed: bool },
    /// The intent to commit, and the drivers to call then.
    Call { record: Arc<ClaimRecord>, drivers: Vec<DriverName> },
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
        Some(known) if known.state == ClaimState::Prepared && known.boot_id == request.boot_id => {
            join(known, request)
        }
        Some(known) => begin(table, request, Some(known)),
    }
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
    if let Some((holder, key)) = table.conflict(&id.uid, &request.holds) {
        return PrepareStep::Wait(held(id, holder, &key));
    }
    let mut record = known.map_or_else(|| new_record(request), |known| ClaimRecord::clone(known));
    let new_boot = record.boot_id != request.boot_id;
    if new_boot {
        // What lived in the kernel is gone: every driver is asked again. Its memo stays, for the unprepare.
        record.boot_id = request.boot_id.to_owned();
        record.drivers.values_mut().for_each(|part| part.stale = part.prepared.is_some());
    }
    record.state = ClaimState::Preparing;
    record.holds = request.holds.clone();
    record.pods.insert(request.pod.uid.clone(), request.pod.clone());
    let open = record.drivers.iter().filter(|(_, part)| part.current().is_none());
    let drivers: Vec<_> = open.map(|(name, _)| name.clone()).collect();
    let what = if new_boot && known.is_some() { "preparing after a new boot" } else { "preparing" };
    record.note(transition(request.now_ms, what, &format!("{} pod {}", request.cause, request.pod)));
    PrepareStep::Call { record: Arc::new(record), drivers }
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

/// The problem that a person should see first: a permanent one before one that passes.
fn worst<'a>(open: impl Iterator<Item = &'a DriverPart>) -> Option<Problem> {
    let unknown = || Problem::unavailable("driver-not-asked", "the driver was not asked yet");
    let problems: Vec<_> = open.map(|part| part.problem.clone().unwrap_or_else(unknown)).collect();
    problems.iter().find(|p| p.kind.is_permanent()).or(problems.first()).cloned()
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
        record.note(entry);
    }
    match worst(record.drivers.values()) {
        None => UnprepareEnd::Gone,
        Some(problem) => UnprepareEnd::Kept(Arc::new(record), problem),
    }
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
    Transition { at_ms, what: what.to_owned(), cause: cause.to_owned(), duration_us: 0, problem: None }
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
    let message =
        format!("claim {id} is known here with another allocation: an allocation is final until the claim is given up");
    Problem::new(ProblemKind::Invalid, "allocation-changed", message)
}

fn held(id: &ObjectRef, holder: &ClaimRecord, key: &str) -> Problem {
    let pods: Vec<_> = holder.pods.values().map(ToString::to_string).collect();
    let message = format!(
        "claim {id} wants {key}, which claim {} (UID {}, pods {}) holds",
        holder.id,
        holder.id.uid,
        pods.join(", ")
    );
    Problem::conflict("device-held", message).with("holder", &holder.id).with("device", key)
}
