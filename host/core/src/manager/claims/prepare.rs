//! Prepare: resolve, decide, have parameters checked, commit the intents, call the drivers, commit the results. The intents of drivers that cannot change the node
//! are not committed: see decision 0013.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use tokio::time::Instant;

use super::calls::{Callees, DriverCalls, Outcomes, Work, are_pure, prepared_by};
use super::files::{Nodes, SpecFiles};
use super::hardware::Holds;
use super::held_hardware;
use super::log::{EndedRequest, User};
use super::machine::{self, DriverResult, Holder, PrepareEnd, PrepareRequest, PrepareStep};
use super::retries::Retries;
use super::source::{ClaimSource, check_bounds};
use super::unprepare::Unprepares;
use super::{ClaimEnd, ClaimOutcome, unrendered};
use crate::adapters::Adapters;
use crate::cdi;
use crate::checkpoint::Change;
use crate::driver::{Call, NodeFacts};
use crate::manager::claims::handles::Handles;
use crate::manager::request::{interrupted, is_in_use};
use crate::records::RecordStore;
use crate::records::table::Undo;
use crate::registry::{DRIVER_POLL_PERIOD, Registry};
use crate::shares;
use nodedock_base::clock::now_ms;
use nodedock_base::failpoint::{self, Point};
use nodedock_base::locks::LockGuard;
use nodedock_base::tasks::Tasks;
use nodedock_model::{
    AllocatedDevice, Claim, ClaimRecord, ClaimReference, DeviceName, DriverName, ObjectRef,
    PodRequest, PoolName, Problem, ProblemCode, Uid, limit,
};

/// A claim of a request, as its source has it.
struct ResolvedClaim {
    reference: ClaimReference,
    claim: Result<Arc<Claim>, Problem>,
}

/// The request of a pod, and its claims.
type PodClaims<'a> = (&'a PodRequest, &'a [ResolvedClaim]);

/// Changes that a request has made in the table and not committed yet, because its drivers are pure: the results are committed with them.
#[derive(Default)]
struct Uncommitted {
    /// Prepared claims that the request has joined.
    joined: Vec<Uid>,
    /// Changes of the pod's record.
    changes: Vec<Change>,
    undo: Undo,
}

/// The decisions about every claim of a request. Intents are in the table already, so that no other request takes the same devices;
/// `undo` removes them again.
#[derive(Default)]
struct Plan {
    /// Prepared already, and unchanged.
    known: Vec<Arc<ClaimRecord>>,
    /// Prepared already, with a changed record, as by a new holder.
    joined: Vec<Arc<ClaimRecord>>,
    work: Vec<Work>,
    refused: BTreeMap<Uid, Problem>,
    waiting: BTreeMap<Uid, Problem>,
    /// The earliest time at which a driver of a waiting claim may be called.
    wake: Option<Instant>,
    /// True if one of them waits for a driver that is being loaded.
    is_loading: bool,
    undo: Undo,
}

/// Prepares claims.
pub(crate) struct Prepares {
    records: Arc<RecordStore>,
    files: Arc<SpecFiles>,
    holds: Arc<Holds>,
    retries: Arc<Retries>,
    calls: Arc<DriverCalls>,
    unprepares: Arc<Unprepares>,
    registry: Registry,
    adapters: Option<Adapters>,
    source: Arc<dyn ClaimSource>,
    node: NodeFacts,
    /// Time for which a prepare waits for a device that another claim holds.
    exclusive_wait: Duration,
    tasks: Tasks,
}

impl Prepares {
    pub(in crate::manager) fn new(
        handles: &Handles,
        holds: Arc<Holds>,
        unprepares: Arc<Unprepares>,
        source: Arc<dyn ClaimSource>,
        node: NodeFacts,
        exclusive_wait: Duration,
    ) -> Self {
        Self {
            records: handles.records.clone(),
            files: handles.files.clone(),
            holds,
            retries: handles.retries.clone(),
            calls: handles.calls.clone(),
            unprepares,
            registry: handles.registry.clone(),
            adapters: handles.adapters.clone(),
            source,
            node,
            exclusive_wait,
            tasks: handles.tasks.clone(),
        }
    }

    /// Prepares a claim for a holder that is no pod. Returns its record, as it was before another operation could change it.
    pub(super) async fn prepare_one(
        &self,
        holder: Holder<'_>,
        claim: Claim,
        request_id: Arc<str>,
    ) -> Result<Arc<ClaimRecord>, Problem> {
        let uid = claim.id.uid.clone();
        let (locks, plan) = self
            .plan(holder, &BTreeMap::from([(uid.clone(), Arc::new(claim))]))
            .await;
        let end = self
            .carry_out(holder, None, plan, &self.calls.driver_call(request_id))
            .await
            .remove(&uid);
        end.unwrap_or_else(|| Err(interrupted()))?;
        let record = self.records.table().claim(uid.as_str()).cloned();
        drop(locks);
        record.ok_or_else(interrupted)
    }

    /// Prepares the claims of a pod whose lock the caller has; the outcomes in the order of the request.
    pub(crate) async fn prepare_claims(
        &self,
        request: &PodRequest,
        inline: &[&Claim],
        request_id: Arc<str>,
    ) -> Vec<ClaimOutcome> {
        let started = std::time::Instant::now();
        let mut resolved = Vec::with_capacity(request.claims.len());
        for reference in &request.claims {
            let claim = self.resolve(inline, request, reference).await;
            resolved.push(ResolvedClaim {
                reference: reference.clone(),
                claim: claim.map(Arc::new),
            });
        }
        let claims = resolved
            .iter()
            .filter_map(|resolved| resolved.claim.as_ref().ok());
        let claims: BTreeMap<Uid, Arc<Claim>> = claims
            .map(|claim| (claim.id.uid.clone(), claim.clone()))
            .collect();
        let holder = Holder::Pod(&request.pod);
        let (locks, plan) = self.plan(holder, &claims).await;
        let ends = self
            .carry_out(
                holder,
                Some((request, &resolved)),
                plan,
                &self.calls.driver_call(request_id.clone()),
            )
            .await;
        drop(locks);
        let mut outcomes = Vec::with_capacity(resolved.len());
        for resolved in resolved {
            let outcome = outcome(request, &resolved, &ends);
            log_outcome(request, &resolved, &outcome, started, &request_id);
            outcomes.push(outcome);
        }
        outcomes
    }

    async fn resolve(
        &self,
        inline: &[&Claim],
        request: &PodRequest,
        reference: &ClaimReference,
    ) -> Result<Claim, Problem> {
        let (pod, name) = (&request.pod, &reference.claim_name);
        // Claims of the request come first; of two with one name the later counts.
        let claim = match inline
            .iter()
            .rev()
            .find(|claim| claim.id.namespace == pod.namespace && claim.id.name == *name)
        {
            Some(claim) => Some(self.with_shares(Claim::clone(claim))?),
            None => self.source.claim(&pod.namespace, name).await?,
        };
        let claim = claim.ok_or_else(|| {
            let message = format!("claim {}/{name} does not exist", pod.namespace);
            Problem::not_found(ProblemCode::NoSuchClaim, message)
        })?;
        if let Some(uid) = reference
            .claim_uid
            .as_ref()
            .filter(|uid| **uid != claim.id.uid)
        {
            return Err(machine::other_uid(&claim.id, &claim.id.uid, uid));
        }
        check_bounds(&claim)?;
        machine::admit(&claim, pod, request.pod_group.as_ref(), &self.node.name)?;
        Ok(claim)
    }

    /// A claim that came with its request, with the shares that a scheduler would have written: of each device that allows several allocations
    /// a share of its own, with the amounts that the request names, and else those that a request without any gets.
    fn with_shares(&self, mut claim: Claim) -> Result<Claim, Problem> {
        let known = self.records.table().claim(claim.id.uid.as_str()).cloned();
        let devices = claim
            .allocation
            .iter_mut()
            .flat_map(|allocation| &mut allocation.devices);
        for (place, device) in devices
            .enumerate()
            .filter(|(_, device)| device.share_id.is_none() && !device.admin_access)
        {
            let before = known
                .iter()
                .flat_map(|known| &known.allocation.devices)
                .nth(place);
            if let Some(before) = before.filter(|before| device_of(before) == device_of(device)) {
                // As when it was prepared, even if the driver has published other values since.
                (device.share_id, device.consumed) =
                    (before.share_id.clone(), before.consumed.clone());
                continue;
            }
            let found = self.registry.instances.device(
                &device.driver,
                device.pool.as_str(),
                device.device.as_str(),
            );
            if let Some(found) = found {
                shares::give(device, &found, &claim.id.uid, place)?;
            }
        }
        Ok(claim)
    }

    /// Decides about every claim, and waits a bounded time for what is in the way. Returns the locks of the claims.
    async fn plan(
        &self,
        holder: Holder<'_>,
        claims: &BTreeMap<Uid, Arc<Claim>>,
    ) -> (Vec<LockGuard<Uid>>, Plan) {
        let started = Instant::now();
        let mut freed = self.records.freed();
        let mut serving = self.registry.instances.changes();
        let mut may_wait = true;
        loop {
            let locks = self.records.lock_claims(claims.keys().cloned()).await;
            freed.mark_unchanged();
            serving.mark_unchanged();
            let mut plan = self.decide(holder, claims, may_wait);
            // Who allocated such a claim may have another device for it.
            let is_allocated_again = plan.waiting.iter().any(|(uid, problem)| {
                let claim = claims.get(uid);
                is_in_use(problem) && claim.is_some_and(|claim| self.source.allocates(&claim.id))
            });
            if may_wait && is_allocated_again {
                may_wait = false;
                plan = self.decide(holder, claims, may_wait);
            }
            if !may_wait {
                plan.refused.append(&mut plan.waiting);
            }
            if plan.waiting.is_empty() {
                return (locks, plan);
            }
            drop(locks);
            let wait = if plan.is_loading {
                limit::DRIVER_WAIT
            } else {
                self.exclusive_wait
            };
            let deadline = started + wait;
            let wake = plan.wake.filter(|wake| *wake < deadline);
            tokio::select! {
                // The intents are not in the table meanwhile: there is nothing to undo.
                () = self.tasks.stopped() => may_wait = false,
                // A claim that is unprepared meanwhile is seen by the next decision.
                () = tokio::time::sleep_until(wake.unwrap_or(deadline)) => may_wait = wake.is_some(),
                woken = freed.changed() => may_wait = woken.is_ok(),
                woken = serving.changed() => may_wait = woken.is_ok(),
            }
        }
    }

    /// Decides. If a claim has to wait, and may, the table is left as it was.
    fn decide(
        &self,
        holder: Holder<'_>,
        claims: &BTreeMap<Uid, Arc<Claim>>,
        may_wait: bool,
    ) -> Plan {
        let mut plan = Plan::default();
        let moved = self.holds.moved(claims.keys());
        let facts =
            |driver: &DriverName, pool: &str, device: &str| self.holds.facts(driver, pool, device);
        let mut table = self.records.table();
        for (uid, claim) in claims {
            let Some(allocation) = &claim.allocation else {
                continue;
            };
            let request = PrepareRequest {
                claim,
                allocation,
                holder,
                facts: &facts,
                moved: moved.get(uid).map_or(&[], Vec::as_slice),
                boot_id: &self.node.boot_id,
                now_ms: now_ms(),
            };
            let step = match machine::prepare(&table, &request) {
                PrepareStep::Call { record, drivers } => {
                    match self.check_drivers(&record, &drivers) {
                        Ok(()) => self.retries.admit_calls(record, drivers),
                        // A kubelet's calls wait in the bridge, which knows the kubelet's deadline.
                        Err(problem) if holder.pod().is_some() && self.is_loading(&drivers) => {
                            plan.is_loading = true;
                            PrepareStep::Wait {
                                at: Some(Instant::now() + DRIVER_POLL_PERIOD),
                                problem,
                            }
                        }
                        Err(problem) => PrepareStep::Refuse(problem),
                    }
                }
                step => step,
            };
            match step {
                PrepareStep::Known {
                    record,
                    changed: false,
                } => plan.known.push(record),
                PrepareStep::Known {
                    record,
                    changed: true,
                } => {
                    plan.undo.put(&mut table, &record);
                    plan.joined.push(record);
                }
                PrepareStep::Call { record, drivers } => {
                    let record = machine::note_called(record, &drivers, |driver| {
                        Some(prepared_by(&self.registry.serving(driver).ok()?))
                    });
                    plan.undo.put(&mut table, &record);
                    plan.work.push((record, drivers));
                }
                PrepareStep::Wait { at, problem } => {
                    plan.wake = plan.wake.into_iter().chain(at).min();
                    plan.waiting.insert(uid.clone(), problem);
                }
                PrepareStep::Refuse(problem) => drop(plan.refused.insert(uid.clone(), problem)),
            }
        }
        if may_wait && !plan.waiting.is_empty() {
            std::mem::take(&mut plan.undo).restore(&mut table);
        }
        plan
    }

    /// Returns whether a driver that does not serve may do so soon.
    fn is_loading(&self, drivers: &[DriverName]) -> bool {
        let registry = &self.registry;
        drivers
            .iter()
            .any(|driver| registry.serving(driver).is_err() && registry.is_under_way(driver))
    }

    /// Checks that the drivers serve, and have the devices.
    fn check_drivers(&self, record: &ClaimRecord, drivers: &[DriverName]) -> Result<(), Problem> {
        for name in drivers {
            let driver = self.registry.serving(name)?;
            if let Some(inventory) = &driver.inventory {
                machine::check_devices(&record.allocation, name, &inventory.borrow().inventory)?;
            }
        }
        let held = self
            .adapters
            .as_ref()
            .map(Adapters::held_identities)
            .unwrap_or_default();
        held_hardware::check(record, drivers, &held)?;
        let unread = self
            .adapters
            .as_ref()
            .map(Adapters::unread_identities)
            .unwrap_or_default();
        held_hardware::check_read(record, drivers, &unread)
    }

    /// Has the drivers check the parameters of the claims that they are to be called for. A claim that one of them refuses is as before the
    /// request, and no driver is called for it.
    async fn refuse_invalid(
        &self,
        holder: Holder<'_>,
        plan: &mut Plan,
        callees: &Callees,
        call: &Call,
    ) {
        let refused = self.calls.call_validate(&plan.work, callees, call).await;
        if refused.is_empty() {
            return;
        }
        for (record, _) in &plan.work {
            let Some(results) = refused.get(&record.id.uid) else {
                continue;
            };
            let (results, drivers): (Vec<_>, Vec<_>) = results.iter().cloned().unzip();
            self.retries
                .note_results(holder.pod(), record, &results, &drivers);
            let problem = results.into_iter().find_map(|result| result.outcome.err());
            plan.refused
                .extend(problem.map(|problem| (record.id.uid.clone(), problem)));
        }
        let uids = refused.into_keys().collect();
        plan.work
            .retain(|(record, _)| !plan.refused.contains_key(&record.id.uid));
        plan.undo.restore_claims(&mut self.records.table(), &uids);
        // A request that waits for a device of such a claim decides again.
        self.records.report_freed();
    }

    /// Has the parameters checked, commits the intents, unless the drivers are pure, calls the drivers and commits the results. `pod`: its
    /// record is updated.
    async fn carry_out(
        &self,
        holder: Holder<'_>,
        pod: Option<PodClaims<'_>>,
        mut plan: Plan,
        call: &Call,
    ) -> Outcomes {
        let callees = self.calls.callees(&plan.work);
        self.refuse_invalid(holder, &mut plan, &callees, call).await;
        let refused = std::mem::take(&mut plan.refused).into_iter();
        let mut ends: Outcomes = refused.map(|(uid, problem)| (uid, Err(problem))).collect();
        let to_call = plan.work.iter().map(|(record, _)| record);
        let intents: Vec<_> = plan.joined.iter().chain(to_call).cloned().collect();
        let accepted: Vec<_> = plan
            .known
            .iter()
            .chain(&intents)
            .map(|record| record.id.uid.clone())
            .collect();
        if accepted.is_empty() {
            return ends;
        }
        failpoint::pass(Point::PrepareDecided);
        let (pod, mut undo) = (
            pod.map(|(request, claims)| (request, names_of(claims, &accepted))),
            plan.undo,
        );
        let changes = self.put_pod(pod, &mut undo);
        let uncommitted = if are_pure(&callees) {
            self.records.report_claims(&intents);
            let joined = plan
                .joined
                .iter()
                .map(|record| record.id.uid.clone())
                .collect();
            Some(Uncommitted {
                joined,
                changes,
                undo,
            })
        } else if let Err(problem) = self.commit_intents(&intents, changes, undo).await {
            ends.extend(accepted.into_iter().map(|uid| (uid, Err(problem.clone()))));
            return ends;
        } else {
            failpoint::pass(Point::PrepareIntended);
            None
        };
        plan.known.append(&mut plan.joined);
        let mut failed = self
            .files
            .check_prepared_files(&plan.known, Nodes::Checked)
            .await;
        ends.extend(plan.known.iter().map(|record| {
            let uid = &record.id.uid;
            let end = failed.remove(uid).map_or(Ok(ClaimEnd::Prepared), Err);
            (uid.clone(), end)
        }));
        if !plan.work.is_empty() {
            self.call_and_finish(holder, plan.work, &callees, uncommitted, call, &mut ends)
                .await;
        }
        ends
    }

    /// Updates a pod's record in the table. Returns the change, if there is one.
    fn put_pod(
        &self,
        pod: Option<(&PodRequest, BTreeMap<String, ObjectRef>)>,
        undo: &mut Undo,
    ) -> Vec<Change> {
        let Some((request, accepted)) = pod else {
            return Vec::new();
        };
        let mut table = self.records.table();
        let pod = machine::pod_record(&table, &request.pod, &request.containers, accepted);
        if table
            .pod(pod.pod.uid.as_str())
            .is_some_and(|known| **known == pod)
        {
            return Vec::new();
        }
        let pod = Arc::new(pod);
        undo.put_pod(&mut table, &pod);
        vec![Change::PutPod(pod)]
    }

    /// Makes the intents durable, with the pod's record if that changes.
    async fn commit_intents(
        &self,
        intents: &[Arc<ClaimRecord>],
        mut changes: Vec<Change>,
        undo: Undo,
    ) -> Result<(), Problem> {
        changes.extend(intents.iter().cloned().map(Change::PutClaim));
        self.records.commit(changes, undo).await?;
        self.records.report_claims(intents);
        Ok(())
    }

    async fn call_and_finish(
        &self,
        holder: Holder<'_>,
        work: Vec<Work>,
        callees: &Callees,
        uncommitted: Option<Uncommitted>,
        call: &Call,
        ends: &mut Outcomes,
    ) {
        let results = self.calls.call_prepare(&work, callees, call).await;
        let (mut open, mut prepared, mut rolled_back) = (Vec::new(), Vec::new(), Vec::new());
        // A driver's file is kept as long as its identity: until the result that names it is durable.
        let mut kept_until_durable = Vec::new();
        let begun: BTreeSet<Uid> = work
            .iter()
            .filter(|(intent, _)| machine::is_begun_by_request(intent, holder.part()))
            .map(|(intent, _)| intent.id.uid.clone())
            .collect();
        for ((record, _), results) in work.iter().zip(results) {
            let uid = record.id.uid.clone();
            let (results, drivers): (Vec<_>, Vec<_>) = results.into_iter().unzip();
            let results = renderable(
                record,
                self.files.with_metadata(&self.registry, record, results),
            );
            let (record, results) = self.holds.hold_hardware(record, results).await;
            self.retries
                .note_results(holder.pod(), &record, &results, &drivers);
            kept_until_durable.push(drivers);
            let end = machine::finish_prepare(&record, holder.part(), results, now_ms());
            let (records, record, end) = match end {
                PrepareEnd::Prepared(record) => (&mut prepared, record, Ok(ClaimEnd::Prepared)),
                PrepareEnd::Open(record, problem) => (&mut open, record, Err(problem)),
                PrepareEnd::RolledBack(record, problem) => (&mut rolled_back, record, Err(problem)),
            };
            ends.insert(uid, end);
            records.push(record);
        }
        let prepared = self.files.with_file_notes(prepared).await;
        // Files are derived from the records, so the order of the two does not matter: both are there before the answer.
        let files = self
            .files
            .check_files(&prepared, Nodes::Checked)
            .inspect(|_| failpoint::pass(Point::PrepareFilesWritten));
        let had_intents = uncommitted.is_none();
        let Uncommitted {
            joined,
            changes,
            undo,
        } = uncommitted.unwrap_or_default();
        // As they are now: the check of their files may have added a note.
        let joined = joined
            .iter()
            .filter_map(|uid| self.records.table().claim(uid.as_str()).cloned());
        let mut records: Vec<_> = joined
            .chain(prepared.iter().chain(&open).cloned())
            .collect();
        if !had_intents {
            records.extend(rolled_back.iter().cloned());
        }
        let records = self
            .records
            .commit_with(records, changes, undo)
            .inspect(|_| failpoint::pass(Point::PrepareCommitted));
        let (committed, files) = tokio::join!(records, files);
        drop(kept_until_durable);
        failpoint::pass(Point::PrepareDone);
        let mut failed: BTreeMap<_, _> = files
            .iter()
            .filter(|(_, problem)| is_failed_write(problem))
            .map(|(uid, problem)| (uid.clone(), problem.clone()))
            .collect();
        ends.extend(files.into_iter().map(|(uid, problem)| (uid, Err(problem))));
        if let Err(problem) = committed {
            if !had_intents {
                // Nothing of the request is in the checkpoint, and so nothing of it is left.
                ends.values_mut()
                    .filter(|end| end.is_ok())
                    .for_each(|end| *end = Err(problem.clone()));
                return self
                    .forget_undone(work.into_iter().map(|(record, _)| record))
                    .await;
            }
            for record in &prepared {
                let uid = &record.id.uid;
                ends.insert(uid.clone(), Err(problem.clone()));
                failed.insert(uid.clone(), problem.clone());
            }
        }
        self.files.remove_stale_files(&open).await;
        // A prepare that is refused holds no device: what this request began ends with it.
        let failed = prepared.into_iter().filter_map(|record| {
            let failure = failed.remove(&record.id.uid)?;
            begun
                .contains(&record.id.uid)
                .then_some((record, Some(failure)))
        });
        let undone: Vec<_> = rolled_back
            .into_iter()
            .map(|record| (record, None))
            .chain(failed)
            .collect();
        if !undone.is_empty() {
            self.unprepares.roll_back(undone, holder.part(), call).await;
        }
    }

    /// Removes the files of claims that are in the table no more, and reports that they are gone.
    async fn forget_undone(&self, records: impl Iterator<Item = Arc<ClaimRecord>>) {
        let gone: Vec<_> = records
            .filter(|record| self.records.table().claim(record.id.uid.as_str()).is_none())
            .collect();
        if let Err(problem) = self.files.remove_files(&gone).await {
            tracing::warn!(%problem, "files of claims that are not in the checkpoint stay");
        }
        self.unprepares.report_gone(&gone);
    }
}

/// Returns whether files of a claim could not be written, as on a full disk.
fn is_failed_write(problem: &Problem) -> bool {
    problem.code == ProblemCode::CdiNotWritten || problem.code == ProblemCode::MetadataNotWritten
}

fn device_of(allocated: &AllocatedDevice) -> (&DriverName, &PoolName, &DeviceName) {
    (&allocated.driver, &allocated.pool, &allocated.device)
}

fn outcome(request: &PodRequest, resolved: &ResolvedClaim, ends: &Outcomes) -> ClaimOutcome {
    let (uid, end) = match &resolved.claim {
        Err(problem) => (resolved.reference.claim_uid.clone(), Err(problem.clone())),
        Ok(claim) => {
            let end = ends
                .get(&claim.id.uid)
                .cloned()
                .unwrap_or_else(|| Err(interrupted()));
            (Some(claim.id.uid.clone()), end)
        }
    };
    let namespace = request.pod.namespace.clone();
    ClaimOutcome {
        namespace,
        name: resolved.reference.claim_name.clone(),
        uid,
        end,
    }
}

fn log_outcome(
    request: &PodRequest,
    resolved: &ResolvedClaim,
    outcome: &ClaimOutcome,
    started: std::time::Instant,
    request_id: &str,
) {
    let claim = resolved.claim.as_ref();
    let name = format!("{}/{}", outcome.namespace, outcome.name);
    let ended = EndedRequest {
        claim: &name,
        user: User::Pod(&request.pod),
        allocation: claim.ok().and_then(|claim| claim.allocation.as_ref()),
        part: None,
        started,
        request: request_id,
    };
    ended.log_prepare(outcome.end.as_ref().map(|_| ()));
}

/// The accepted claims, by the pod's own names for them.
fn names_of(claims: &[ResolvedClaim], accepted: &[Uid]) -> BTreeMap<String, ObjectRef> {
    let claims = claims.iter().filter_map(|resolved| {
        let id = &resolved.claim.as_ref().ok()?.id;
        accepted
            .contains(&id.uid)
            .then(|| (resolved.reference.pod_claim_name.clone(), id.clone()))
    });
    claims.collect()
}

/// A result that makes no valid CDI file is a refusal of that claim, not of the others of the request.
fn renderable(record: &ClaimRecord, mut results: Vec<DriverResult>) -> Vec<DriverResult> {
    for result in &mut results {
        let Ok(prepared) = &result.outcome else {
            continue;
        };
        if let Err(error) = cdi::check(record, &result.driver, prepared) {
            result.outcome = Err(unrendered(record, &error));
        }
    }
    results
}
