//! Prepare: resolve, decide, commit the intents, call the drivers, commit the results, answer.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::FutureExt as _;
use tokio::time::Instant;

use super::calls::{Marks, prepared_by};
use super::files::Nodes;
use super::machine::{self, DeviceFacts, DriverResult, Holder, PrepareEnd, PrepareRequest, PrepareStep};
use super::refusals::{self, Admission, DriverMark, Refused, Verdict};
use super::source::{ClaimSource, InlineClaims, check_bounds};
use super::{ClaimEnd, ClaimOutcome, Inner, PodOutcome, Undo, answer, interrupted, unrendered};
use crate::cdi;
use crate::checkpoint::Change;
use crate::driver::Call;
use crate::driver::moved::have_moved;
use nodedock_base::clock::now_ms;
use nodedock_base::failpoint::{self, Point};
use nodedock_base::locks::Held;
use nodedock_model::{
    Claim, ClaimRecord, ClaimReference, DriverName, DriverPart, ObjectRef, PodRequest, Problem, Uid,
};

/// A claim on its way through a prepare.
pub(super) struct Wanted {
    reference: ClaimReference,
    claim: Result<Claim, Problem>,
}

/// A claim whose drivers must be called, with the drivers.
pub(super) type Work = (Arc<ClaimRecord>, Vec<DriverName>);
pub(super) type Ends = BTreeMap<Uid, Result<ClaimEnd, Problem>>;

/// Who asks for claims.
#[derive(Clone, Copy)]
pub(super) enum Asker<'a> {
    Pod { request: &'a PodRequest, wanted: &'a [Wanted] },
    Kubelet { driver: &'a DriverName, given: bool },
}

impl<'a> Asker<'a> {
    fn pod(self) -> Option<&'a ObjectRef> {
        if let Self::Pod { request, .. } = self { Some(&request.pod) } else { None }
    }

    /// The driver whose part is asked for; none: all of them.
    fn part(self) -> Option<&'a DriverName> {
        if let Self::Kubelet { driver, .. } = self { Some(driver) } else { None }
    }

    fn holder(self) -> Holder<'a> {
        match self {
            Self::Pod { request, .. } => Holder::Pod(&request.pod),
            Self::Kubelet { driver, given } => Holder::Kubelet { driver, given },
        }
    }
}

/// What was decided about every claim of a request. Intents are in the table already, so that nobody else takes the same
/// devices; `undo` takes them out again.
#[derive(Default)]
pub(super) struct Plan {
    /// Prepared already, and in need of no change.
    known: Vec<Arc<ClaimRecord>>,
    /// Prepared already, with the holder new to it.
    joined: Vec<Arc<ClaimRecord>>,
    work: Vec<Work>,
    refused: BTreeMap<Uid, Problem>,
    waiting: BTreeMap<Uid, Problem>,
    /// When the first of those that wait for a driver may go on.
    wake: Option<Instant>,
    undo: Undo,
}

/// Whether the drivers of an intent may be called.
enum May {
    Call(Work),
    Wait(Instant, Problem),
    Refuse(Problem),
}

impl Inner {
    pub(super) async fn prepare_pod(
        &self,
        request: PodRequest,
        inline: Vec<Claim>,
        request_id: Arc<str>,
    ) -> PodOutcome {
        // Also while it waits: an unprepare that comes meanwhile has to find what this will have taken.
        let _pod = self.pod_locks.take([request.pod.uid.clone()]).await;
        let wanted = self.resolve(&request, inline).await;
        let claims = wanted.iter().filter_map(|w| w.claim.as_ref().ok());
        let claims: BTreeMap<Uid, Claim> =
            claims.map(|claim| (claim.id.uid.clone(), claim.clone())).collect();
        let call = Call { request_id, deadline: self.settings.call_deadline };
        let asker = Asker::Pod { request: &request, wanted: &wanted };
        let (held, plan) = self.plan(asker, &claims).await;
        let ends = self.carry_out(asker, plan, &call).await;
        drop(held);
        self.answer(&request, wanted, &ends)
    }

    async fn resolve(&self, request: &PodRequest, inline: Vec<Claim>) -> Vec<Wanted> {
        let source = InlineClaims::new(inline, self.source.as_ref());
        let mut wanted = Vec::with_capacity(request.claims.len());
        for reference in &request.claims {
            let claim = self.resolve_one(&source, &request.pod, reference).await;
            wanted.push(Wanted { reference: reference.clone(), claim });
        }
        wanted
    }

    async fn resolve_one(
        &self,
        source: &InlineClaims<'_>,
        pod: &ObjectRef,
        reference: &ClaimReference,
    ) -> Result<Claim, Problem> {
        let name = &reference.claim_name;
        let claim = source.claim(&pod.namespace, name).await?.ok_or_else(|| {
            let message = format!("claim {}/{name} does not exist", pod.namespace);
            Problem::not_found("no-such-claim", message)
        })?;
        if let Some(uid) = reference.claim_uid.as_ref().filter(|uid| **uid != claim.id.uid) {
            let message =
                format!("claim {} has UID {}, and {uid} is wanted: it was replaced", claim.id, claim.id.uid);
            return Err(Problem::conflict("claim-replaced", message));
        }
        check_bounds(&claim)?;
        machine::admit(&claim, pod, &self.settings.node.name)?;
        Ok(claim)
    }

    /// Decides about every claim, waiting a bounded time for what is in the way. The claims are held when it returns.
    pub(super) async fn plan(
        &self,
        asker: Asker<'_>,
        claims: &BTreeMap<Uid, Claim>,
    ) -> (Vec<Held<Uid>>, Plan) {
        let deadline = Instant::now() + self.settings.exclusive_wait;
        let mut freed = self.freed.subscribe();
        let mut patient = true;
        loop {
            let held = self.claim_locks.take(claims.keys().cloned()).await;
            freed.mark_unchanged();
            let mut plan = self.decide(asker, claims, patient);
            if !patient {
                plan.refused.append(&mut plan.waiting);
            }
            if plan.waiting.is_empty() {
                return (held, plan);
            }
            drop(held);
            let wake = plan.wake.filter(|wake| *wake < deadline);
            tokio::select! {
                // The intents are not in the table while we wait: there is nothing to take back.
                () = self.tasks.stopped() => patient = false,
                // What is given up meanwhile is seen at the next turn, or is not waited for any more.
                () = tokio::time::sleep_until(wake.unwrap_or(deadline)) => patient = wake.is_some(),
                woken = freed.changed() => patient = woken.is_ok(),
            }
        }
    }

    /// Decides. Where a claim has to wait and there is patience for it, the table is left as it was.
    fn decide(&self, asker: Asker<'_>, claims: &BTreeMap<Uid, Claim>, patient: bool) -> Plan {
        let mut plan = Plan::default();
        let moved = self.moved(claims.keys());
        let facts = |driver: &DriverName, pool: &str, device: &str| self.facts(driver, pool, device);
        let mut table = self.table.lock();
        for (uid, claim) in claims {
            let Some(allocation) = &claim.allocation else { continue };
            let request = PrepareRequest {
                claim,
                allocation,
                holder: asker.holder(),
                facts: &facts,
                moved: moved.get(uid).map_or(&[], Vec::as_slice),
                boot_id: &self.settings.node.boot_id,
                now_ms: now_ms(),
                cause: "prepare",
            };
            let refused = match machine::prepare(&table, &request) {
                PrepareStep::Known { record, changed: false } => {
                    plan.known.push(record);
                    continue;
                }
                PrepareStep::Known { record, changed: true } => {
                    plan.undo.put(&mut table, &record);
                    plan.joined.push(record);
                    continue;
                }
                PrepareStep::Call { record, drivers } => match self.may_call(record, drivers) {
                    May::Call((record, drivers)) => {
                        let by = |driver: &DriverName| {
                            self.registry.serving(driver).ok().map(|driver| prepared_by(&driver))
                        };
                        let record = machine::ask(record, &drivers, by);
                        plan.undo.put(&mut table, &record);
                        plan.work.push((record, drivers));
                        continue;
                    }
                    May::Wait(at, problem) => {
                        plan.wake = Some(plan.wake.map_or(at, |known| known.min(at)));
                        plan.waiting.insert(uid.clone(), problem);
                        continue;
                    }
                    May::Refuse(problem) => problem,
                },
                PrepareStep::Wait(problem) => {
                    plan.waiting.insert(uid.clone(), problem);
                    continue;
                }
                PrepareStep::Refuse(problem) => problem,
            };
            plan.refused.insert(uid.clone(), refused);
        }
        if patient && !plan.waiting.is_empty() {
            std::mem::take(&mut plan.undo).restore(&mut table);
        }
        plan
    }

    /// Drivers whose device nodes are no longer what they were when the claim was prepared.
    fn moved<'a>(&self, uids: impl Iterator<Item = &'a Uid>) -> BTreeMap<Uid, Vec<DriverName>> {
        let known: Vec<_> = {
            let table = self.table.lock();
            uids.filter_map(|uid| table.claim(uid.as_str()).cloned()).collect()
        };
        let mut moved = BTreeMap::new();
        for record in known {
            let parts = record.drivers.iter();
            let parts = parts.filter(|(_, part)| part.current().is_some_and(have_moved));
            let drivers: Vec<_> = parts.map(|(driver, _)| driver.clone()).collect();
            if !drivers.is_empty() {
                moved.insert(record.id.uid.clone(), drivers);
            }
        }
        moved
    }

    fn facts(&self, driver: &DriverName, pool: &str, device: &str) -> DeviceFacts {
        let facts = self.registry.device(driver, pool, device).map(|device| DeviceFacts {
            allow_multiple_allocations: device.allow_multiple_allocations,
            identity: device.identity,
        });
        facts.unwrap_or_default()
    }

    /// Whether the drivers serve and have the devices, and none of them is asked too often.
    fn may_call(&self, record: Arc<ClaimRecord>, drivers: Vec<DriverName>) -> May {
        if let Err(problem) = self.check_drivers(&record, &drivers) {
            return May::Refuse(problem);
        }
        let refusals = self.refusals();
        if refusals.is_empty() {
            return May::Call((record, drivers));
        }
        let now = Instant::now();
        let verdict = |name: DriverName| {
            let Ok(driver) = self.registry.serving(&name) else { return (name, Verdict::Ask) };
            let (uid, mark, request) =
                (&record.id.uid, DriverMark::of(&driver), || record.driver_claim(&name));
            let verdict = refusals.verdict(uid, &name, &mark, request, now);
            (name, verdict)
        };
        match refusals::admission(drivers.into_iter().map(verdict).collect(), now) {
            Admission::Ask { drivers, held_back } => {
                May::Call((machine::hold_back(record, held_back), drivers))
            }
            Admission::Wait { at, problem } => May::Wait(at, problem),
            Admission::Refuse(problem) => May::Refuse(problem),
        }
    }

    /// Every driver to be called serves, and has the devices.
    fn check_drivers(&self, record: &ClaimRecord, drivers: &[DriverName]) -> Result<(), Problem> {
        for name in drivers {
            let driver = self.registry.serving(name)?;
            if let Some(inventory) = &driver.inventory {
                machine::check_devices(&record.allocation, name, &inventory.borrow().inventory)?;
            }
        }
        Ok(())
    }

    pub(super) async fn carry_out(&self, asker: Asker<'_>, mut plan: Plan, call: &Call) -> Ends {
        let mut ends: Ends =
            std::mem::take(&mut plan.refused).into_iter().map(|(u, p)| (u, Err(p))).collect();
        let standing: Vec<_> = plan.known.iter().chain(&plan.joined).cloned().collect();
        let accepted: Vec<Uid> = standing
            .iter()
            .chain(plan.work.iter().map(|(record, _)| record))
            .map(|r| r.id.uid.clone())
            .collect();
        if accepted.is_empty() {
            return ends;
        }
        let intents: Vec<_> =
            plan.joined.iter().chain(plan.work.iter().map(|(record, _)| record)).cloned().collect();
        let undo = std::mem::take(&mut plan.undo);
        failpoint::pass(Point::PrepareDecided);
        if let Err(problem) = self.commit_intents(intents, asker, &accepted, undo).await {
            ends.extend(accepted.into_iter().map(|uid| (uid, Err(problem.clone()))));
            return ends;
        }
        failpoint::pass(Point::PrepareIntended);
        let mut failed = self.check_standing_files(&standing, Nodes::Right).await;
        let mut end = |uid: &Uid| failed.remove(uid).map_or(Ok(ClaimEnd::Prepared), Err);
        ends.extend(standing.iter().map(|r| &r.id.uid).map(|uid| (uid.clone(), end(uid))));
        if !plan.work.is_empty() {
            self.call_and_finish(asker, plan.work, call, &mut ends).await;
        }
        ends
    }

    /// Makes the intents durable, with the pod's record where that is new.
    async fn commit_intents(
        &self,
        intents: Vec<Arc<ClaimRecord>>,
        asker: Asker<'_>,
        accepted: &[Uid],
        mut undo: Undo,
    ) -> Result<(), Problem> {
        let mut changes: Vec<_> = intents.iter().cloned().map(Change::PutClaim).collect();
        if let Asker::Pod { request, wanted } = asker {
            let accepted = taken_on(wanted, accepted);
            let mut table = self.table.lock();
            let pod = machine::pod_record(&table, &request.pod, &request.containers, accepted);
            if table.pod(pod.pod.uid.as_str()).is_none_or(|known| **known != pod) {
                let pod = Arc::new(pod);
                undo.put_pod(&mut table, &pod);
                changes.push(Change::PutPod(pod));
            }
        }
        self.commit(changes, undo).await?;
        self.tell(&intents);
        Ok(())
    }

    async fn call_and_finish(&self, asker: Asker<'_>, work: Vec<Work>, call: &Call, ends: &mut Ends) {
        let (results, marks) = self.call_drivers(&work, call).await;
        let mut kept = Vec::new();
        let mut prepared = Vec::new();
        let mut rolled_back = Vec::new();
        for ((record, _), results) in work.iter().zip(results) {
            let uid = record.id.uid.clone();
            let results = renderable(record, results);
            self.remember(asker.pod(), record, &results, &marks);
            let end = match asker.part() {
                Some(driver) => machine::finish_prepare_part(record, driver, results, now_ms()),
                None => machine::finish_prepare(record, results, now_ms()),
            };
            match end {
                PrepareEnd::Prepared(record) => {
                    ends.insert(uid, Ok(ClaimEnd::Prepared));
                    prepared.push(record);
                }
                PrepareEnd::Open(record, problem) => {
                    ends.insert(uid, Err(problem));
                    kept.push(record);
                }
                PrepareEnd::RolledBack(record, problem) => {
                    ends.insert(uid, Err(problem));
                    rolled_back.push(record);
                }
            }
        }
        let prepared = self.with_notes(prepared).await;
        let uids: Vec<_> = prepared.iter().map(|record| record.id.uid.clone()).collect();
        // Files are derived from the records, so the order of the two does not matter: both are there before the answer.
        let files = self
            .check_files(&prepared, Nodes::Right)
            .inspect(|_| failpoint::pass(Point::PrepareFilesWritten));
        let records = self
            .commit_claims(prepared.iter().chain(&kept).cloned().collect())
            .inspect(|_| failpoint::pass(Point::PrepareCommitted));
        let (files, records) = tokio::join!(files, records);
        failpoint::pass(Point::PrepareDone);
        ends.extend(files.into_iter().map(|(uid, problem)| (uid, Err(problem))));
        if let Err(problem) = records {
            ends.extend(uids.into_iter().map(|uid| (uid, Err(problem.clone()))));
        }
        self.remove_void_files(&kept).await;
        if !rolled_back.is_empty() {
            self.roll_back(rolled_back, asker.part(), call).await;
        }
    }

    /// Notes what drivers refused, for those who ask again.
    fn remember(
        &self,
        pod: Option<&ObjectRef>,
        record: &ClaimRecord,
        results: &[DriverResult],
        marks: &Marks,
    ) {
        let mut refusals = self.refusals();
        for DriverResult { driver, outcome, .. } in results {
            match (outcome, marks.get(driver)) {
                (Ok(_), _) => refusals.taken(&record.id.uid, driver),
                (Err(problem), Some((mark, _))) => {
                    let request = &record.driver_claim(driver);
                    refusals.note(&Refused { pod, request, driver, mark, problem }, Instant::now(), now_ms());
                }
                // It was not there to be asked.
                (Err(_), None) => {}
            }
        }
    }

    fn answer(&self, request: &PodRequest, wanted: Vec<Wanted>, ends: &Ends) -> PodOutcome {
        let claims: Vec<_> = wanted.into_iter().map(|wanted| outcome(request, wanted, ends)).collect();
        let all_prepared = claims.iter().all(|claim| claim.end.is_ok());
        let containers = if all_prepared { self.containers(request) } else { Vec::new() };
        PodOutcome { pod: request.pod.clone(), claims, containers }
    }

    fn containers(&self, request: &PodRequest) -> Vec<super::ContainerAnswer> {
        let table = self.table.lock();
        match table.pod(request.pod.uid.as_str()) {
            Some(pod) => answer::containers(pod, |uid| table.claim(uid).cloned()),
            // A pod without claims has no record: its containers need nothing.
            None => request.containers.iter().map(|c| answer::nothing(&c.name)).collect(),
        }
    }
}

fn outcome(request: &PodRequest, wanted: Wanted, ends: &Ends) -> ClaimOutcome {
    let (uid, end) = match wanted.claim {
        Err(problem) => (wanted.reference.claim_uid, Err(problem)),
        Ok(claim) => {
            let end = ends.get(&claim.id.uid).cloned().unwrap_or_else(|| Err(interrupted()));
            (Some(claim.id.uid), end)
        }
    };
    let namespace = request.pod.namespace.clone();
    ClaimOutcome { namespace, name: wanted.reference.claim_name, uid, end }
}

/// The claims that were taken on, by the pod's own names for them.
fn taken_on(wanted: &[Wanted], accepted: &[Uid]) -> BTreeMap<String, ObjectRef> {
    let accepted: BTreeSet<_> = accepted.iter().collect();
    let claims = wanted.iter().filter_map(|wanted| {
        let id = &wanted.claim.as_ref().ok()?.id;
        accepted.contains(&id.uid).then(|| (wanted.reference.pod_claim_name.clone(), id.clone()))
    });
    claims.collect()
}

/// What makes no valid CDI file is a refusal of that claim, not of those that came with it.
fn renderable(record: &ClaimRecord, mut results: Vec<DriverResult>) -> Vec<DriverResult> {
    for result in &mut results {
        let Ok(prepared) = &result.outcome else { continue };
        let part =
            DriverPart { prepared: Some(prepared.clone()), by: result.by.clone(), ..Default::default() };
        let mut alone = record.clone();
        alone.drivers = BTreeMap::from([(result.driver.clone(), part)]);
        if let Err(error) = cdi::render(&alone) {
            result.outcome = Err(unrendered(record, &error));
        }
    }
    results
}

/// The answer to a pod whose request came to no end.
pub(super) fn interrupted_pod(request: PodRequest) -> PodOutcome {
    let claim = |wanted: ClaimReference| ClaimOutcome {
        namespace: request.pod.namespace.clone(),
        name: wanted.claim_name,
        uid: wanted.claim_uid,
        end: Err(interrupted()),
    };
    let claims = request.claims.into_iter().map(claim).collect();
    PodOutcome { pod: request.pod, claims, containers: Vec::new() }
}
