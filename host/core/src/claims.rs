//! The claim manager: what pods, and kubelets for them, hold of claims.
//!
//! Is given their requests and the claims' allocations; calls drivers through the registry; keeps every step in the checkpoint
//! (intent before the call, result before the answer) and CDI files in step with it. Never reads a driver's socket or file, and
//! never decides: decisions are in `machine`.

mod answer;
mod calls;
mod files;
mod kubelet;
pub mod machine;
pub mod manifest;
mod metrics;
mod outlook;
mod predecessors;
mod prepare;
mod put_back;
mod reconcile;
mod refusals;
mod release;
pub mod source;
mod swaps;
mod table;
mod unprepare;
mod upkeep;
pub mod values;

#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod machine_tests;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, mpsc, watch};

use crate::cdi::{self, CdiDir};
use crate::cdi_watch::SpecEvent;
use crate::checkpoint::Change;
use crate::driver::{Ledger, NodeFacts};
use crate::registry::Registry;
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_base::locks::Locks;
use nodedock_base::tasks::Tasks;
use nodedock_model::{
    ChangedKind, Claim, ClaimRecord, DriverName, LiveClaim, ObjectName, ObjectRef, PodRecord, PodRequest,
    Problem, ReleaseRecord, Uid,
};

pub use answer::ContainerAnswer;
pub use metrics::ClaimStats;
pub use outlook::{ClaimView, DriverOutlook, RefusedClaim, Retry};
use reconcile::Waits;
use refusals::Refusals;
use release::Released;
pub use release::{ReleaseOutcome, ReleaseRequest};
use source::ClaimSource;
use table::{Table, Undo};
pub use values::Values;

/// The table, where the manager and the drivers' ledgers both see it.
#[derive(Clone, Default)]
pub struct SharedTable(Arc<Mutex<Table>>);

impl SharedTable {
    pub fn new(claims: Vec<ClaimRecord>, pods: Vec<PodRecord>) -> Self {
        Self(Arc::new(Mutex::new(Table::new(claims, pods))))
    }

    /// Claims of which the checkpoint has records that this release cannot read: another may, so what is theirs stays.
    pub fn with_unreadable(self, claims: BTreeSet<String>) -> Self {
        self.lock().set_unreadable(claims);
        self
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ledger for SharedTable {
    fn claims(&self, driver: &DriverName) -> Vec<LiveClaim> {
        self.lock().claims_of_driver(driver).filter_map(|record| live(record, driver)).collect()
    }

    fn holders(&self, driver: &DriverName, pool: &str, device: &str) -> Vec<LiveClaim> {
        self.lock().users_of(driver, pool, device).filter_map(|record| live(record, driver)).collect()
    }

    fn claim(&self, driver: &DriverName, uid: &str) -> Option<LiveClaim> {
        self.lock().claim(uid).and_then(|record| live(record, driver))
    }
}

/// A claim that the driver holds prepared; one that it was only asked for is not live yet.
fn live(record: &ClaimRecord, driver: &DriverName) -> Option<LiveClaim> {
    record.drivers.get(driver)?.prepared.as_ref()?;
    record.live_claim(driver)
}

/// How the manager behaves where that is a matter of choice.
#[derive(Debug, Clone)]
pub struct ClaimSettings {
    pub node: NodeFacts,
    /// How long a prepare waits for what is in its way.
    pub exclusive_wait: Duration,
    /// Deadline of one driver call.
    pub call_deadline: Duration,
}

/// Handle to the claim manager.
#[derive(Clone)]
pub struct Claims(Arc<Inner>);

struct Inner {
    table: SharedTable,
    /// One request at a time for a pod, so that an unprepare finds what a prepare before it took. Taken before `claim_locks`.
    pod_locks: Locks<Uid>,
    /// One request of a kubelet at a time for a driver's part of a claim, for the same reason. Taken before `claim_locks`, and never
    /// with `pod_locks`.
    kubelet_locks: Locks<(Uid, DriverName)>,
    /// One operation at a time for a claim.
    claim_locks: Locks<Uid>,
    values: Values,
    cdi: CdiDir,
    registry: Registry,
    source: Arc<dyn ClaimSource>,
    settings: ClaimSettings,
    changes: Changes,
    conditions: Conditions,
    troubled: files::Troubled,
    tasks: Tasks,
    /// Counts claims that were given up: whoever waits for a device looks again.
    freed: watch::Sender<u64>,
    /// Counts changes of what drivers tell of devices that a kubelet holds.
    statuses: watch::Sender<u64>,
    /// Wakes the task that comes again for claims that a driver did not give up.
    kept: Notify,
    /// What drivers refused of prepares.
    refusals: Mutex<Refusals>,
    /// When unprepares are tried again.
    waits: Mutex<Waits>,
    /// Claims that were given up by hand.
    released: Mutex<Released>,
    metrics: metrics::Metrics,
    started: tokio::time::Instant,
}

/// What the manager stands on.
pub struct ClaimParts {
    pub table: SharedTable,
    /// Claims that were given up by hand.
    pub released: Vec<ReleaseRecord>,
    /// What drivers changed below `/sys`; writes the checkpoint for all of it.
    pub values: Values,
    pub cdi: CdiDir,
    pub registry: Registry,
    pub source: Arc<dyn ClaimSource>,
    pub settings: ClaimSettings,
    pub changes: Changes,
    pub conditions: Conditions,
    pub tasks: Tasks,
}

/// What became of one claim of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct ClaimOutcome {
    pub namespace: ObjectName,
    pub name: ObjectName,
    /// None: the claim was not found.
    pub uid: Option<Uid>,
    pub end: Result<ClaimEnd, Problem>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimEnd {
    Prepared,
    Unprepared,
    /// Others hold it.
    Kept,
}

impl ClaimEnd {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prepared => "prepared",
            Self::Unprepared => "unprepared",
            Self::Kept => "kept",
        }
    }
}

/// The answer to a pod.
#[derive(Debug, Clone, PartialEq)]
pub struct PodOutcome {
    pub pod: ObjectRef,
    pub claims: Vec<ClaimOutcome>,
    /// Empty unless every claim is prepared.
    pub containers: Vec<ContainerAnswer>,
}

/// Which pod an unprepare is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodSelector {
    Uid(Uid),
    /// Every pod of that name that holds something.
    Name(ObjectName, ObjectName),
}

impl PodSelector {
    fn is(&self, pod: &ObjectRef) -> bool {
        match self {
            Self::Uid(uid) => pod.uid == *uid,
            Self::Name(namespace, name) => pod.namespace == *namespace && pod.name == *name,
        }
    }
}

/// A pod and what it holds.
pub struct PodView {
    pub pod: Arc<PodRecord>,
    pub claims: Vec<Arc<ClaimRecord>>,
    pub containers: Vec<ContainerAnswer>,
}

impl Claims {
    pub fn new(parts: ClaimParts) -> Self {
        let ClaimParts { table, released, values, cdi, registry, .. } = parts;
        let ClaimParts { source, settings, changes, conditions, tasks, .. } = parts;
        Self(Arc::new(Inner {
            table,
            pod_locks: Locks::default(),
            kubelet_locks: Locks::default(),
            claim_locks: Locks::default(),
            values,
            cdi,
            registry,
            source,
            settings,
            changes,
            conditions,
            troubled: files::Troubled::default(),
            tasks,
            freed: watch::Sender::new(0),
            statuses: watch::Sender::new(0),
            kept: Notify::new(),
            refusals: Mutex::default(),
            waits: Mutex::default(),
            released: Mutex::new(Released::new(released)),
            metrics: metrics::Metrics::default(),
            started: tokio::time::Instant::now(),
        }))
    }

    /// Starts what goes on without requests: CDI files kept right as `files` tells of them, interrupted unprepares finished as
    /// drivers come, what swapped drivers leave behind cleared away.
    pub fn start(&self, files: mpsc::Receiver<SpecEvent>) {
        let inner = self.0.clone();
        self.0.tasks.spawn("cdi-files", async move { inner.keep_files(files).await });
        let inner = self.0.clone();
        self.0.tasks.spawn("resume-unprepare", async move { inner.resume_unprepares().await });
        let inner = self.0.clone();
        self.0.tasks.spawn("driver-swaps", async move { inner.follow_swaps().await });
    }

    /// Makes a pod's claims ready. Goes on when the caller goes away.
    pub async fn prepare_pod(
        &self,
        request: PodRequest,
        inline: Vec<Claim>,
        request_id: Arc<str>,
    ) -> PodOutcome {
        let (inner, asked) = (self.0.clone(), request.clone());
        let work = async move {
            let started = Instant::now();
            let outcome = inner.prepare_pod(request, inline, request_id).await;
            inner.metrics.prepared(started.elapsed(), metrics::has_failed(&outcome));
            outcome
        };
        self.0.tasks.complete("pod", work).await.unwrap_or_else(|| prepare::interrupted_pod(asked))
    }

    /// Gives up what a pod holds. Goes on when the caller goes away.
    pub async fn unprepare_pod(
        &self,
        selector: PodSelector,
        request_id: Arc<str>,
    ) -> Result<Vec<PodOutcome>, Problem> {
        let inner = self.0.clone();
        let work = async move {
            let started = Instant::now();
            let outcomes = inner.unprepare_pod(selector, request_id).await;
            inner.metrics.unprepared(started.elapsed(), outcomes.iter().any(metrics::has_failed));
            outcomes
        };
        self.0.tasks.complete("pod", work).await.ok_or_else(interrupted)
    }

    /// Gives up a claim by hand. Goes on when the caller goes away.
    pub async fn release_claim(
        &self,
        request: ReleaseRequest,
        request_id: Arc<str>,
    ) -> Result<ReleaseOutcome, Problem> {
        let inner = self.0.clone();
        let work = async move { inner.release_claim(request, request_id).await };
        self.0.tasks.complete("release", work).await.unwrap_or_else(|| Err(interrupted()))
    }

    /// What a release would come to.
    pub async fn look_at_release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome, Problem> {
        self.0.look_at_release(request).await
    }

    /// Claims that were given up by hand, the oldest first.
    pub fn released(&self) -> Vec<Arc<ReleaseRecord>> {
        self.0.list_released()
    }

    /// Claims that drivers refused and of which no record is left, by UID.
    pub fn refused(&self) -> Vec<RefusedClaim> {
        self.0.refused()
    }

    /// A claim with what comes next of it.
    pub fn view(&self, record: Arc<ClaimRecord>) -> ClaimView {
        let (outlook, values) = (self.0.outlook(&record), self.0.values.of(&record.id.uid));
        ClaimView { record, outlook, values }
    }

    /// Gives up some of a pod's claims, and keeps the pod's others. Goes on when the caller goes away.
    pub async fn give_up_claims(
        &self,
        pod: &Uid,
        claims: Vec<Uid>,
        request_id: Arc<str>,
    ) -> Result<(), Problem> {
        let (inner, pod) = (self.0.clone(), pod.clone());
        let work = async move { inner.give_up_claims(&pod, &claims, request_id).await };
        self.0.tasks.complete("pod", work).await.unwrap_or_else(|| Err(interrupted()))
    }

    /// Pods that an unprepare would be about.
    pub fn select(&self, selector: &PodSelector) -> Vec<ObjectRef> {
        self.0.select(selector)
    }

    /// Every claim, by namespace and name.
    pub fn list(&self) -> Vec<Arc<ClaimRecord>> {
        let mut claims: Vec<_> = self.0.table.lock().claims().cloned().collect();
        claims.sort_by(|a, b| (&a.id.namespace, &a.id.name).cmp(&(&b.id.namespace, &b.id.name)));
        claims
    }

    /// Claims that hold a device.
    pub fn holders_of(&self, driver: &DriverName, pool: &str, device: &str) -> Vec<ObjectRef> {
        let table = self.0.table.lock();
        table.users_of(driver, pool, device).map(|record| record.id.clone()).collect()
    }

    /// Claims that keep a device from being held alone; `identity`: the hardware behind it.
    pub fn keepers_of(
        &self,
        driver: &DriverName,
        pool: &str,
        device: &str,
        identity: &[String],
    ) -> Vec<ObjectRef> {
        self.0.table.lock().keepers(driver, pool, device, identity)
    }

    /// Every pod that holds something, by namespace and name.
    pub fn pods(&self) -> Vec<PodView> {
        let table = self.0.table.lock();
        let mut pods: Vec<_> = table.pods().map(|pod| view(&table, pod)).collect();
        pods.sort_by(|a, b| {
            (&a.pod.pod.namespace, &a.pod.pod.name).cmp(&(&b.pod.pod.namespace, &b.pod.pod.name))
        });
        pods
    }

    pub fn pods_count(&self) -> usize {
        self.0.table.lock().pods().count()
    }

    /// What a pod was answered, from the checkpoint.
    pub fn pod(&self, uid: &str) -> Option<PodView> {
        let table = self.0.table.lock();
        table.pod(uid).map(|pod| view(&table, pod))
    }

    /// Makes the CDI files of a pod's claims right before they are told of; the problem of the first that cannot be. Claims that
    /// somebody is at work on are left to them.
    pub async fn check_files_of(&self, pod: &str) -> Result<(), Problem> {
        let claims = self.0.table.lock().claims_of_pod(pod);
        let refused = self.0.check_at_rest(claims.iter().map(|claim| &claim.id.uid)).await;
        refused.into_values().next().map_or(Ok(()), Err)
    }

    pub fn might_need_unprepare(&self, pod: &str) -> bool {
        let table = self.0.table.lock();
        table.pod(pod).is_some() || !table.claims_of_pod(pod).is_empty()
    }

    /// What was counted since the start.
    pub fn stats(&self) -> ClaimStats {
        self.0.metrics.view()
    }

    pub fn boot_id(&self) -> &str {
        &self.0.settings.node.boot_id
    }
}

fn view(table: &Table, pod: &Arc<PodRecord>) -> PodView {
    let claims = table.claims_of_pod(pod.pod.uid.as_str());
    let containers = answer::containers(pod, |uid| table.claim(uid).cloned());
    PodView { pod: pod.clone(), claims, containers }
}

impl Inner {
    fn refusals(&self) -> MutexGuard<'_, Refusals> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waits(&self) -> MutexGuard<'_, Waits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts records into the table, then makes them durable; puts the table back if that fails.
    async fn commit_claims(&self, records: Vec<Arc<ClaimRecord>>) -> Result<(), Problem> {
        let mut undo = Undo::default();
        {
            let mut table = self.table.lock();
            records.iter().for_each(|record| undo.put(&mut table, record));
        }
        self.commit(records.iter().cloned().map(Change::PutClaim).collect(), undo).await?;
        self.tell(&records);
        Ok(())
    }

    /// Makes changes durable that the table has already; puts the table back if that fails.
    async fn commit(&self, changes: Vec<Change>, undo: Undo) -> Result<(), Problem> {
        if changes.is_empty() {
            return Ok(());
        }
        let Err(error) = self.values.commit_changes(changes).await else { return Ok(()) };
        undo.restore(&mut self.table.lock());
        // Whoever found something held by what is taken back looks again.
        self.freed.send_modify(|count| *count += 1);
        tracing::error!(error = chain(&error), "commit to the checkpoint failed");
        Err(error.problem())
    }

    fn tell(&self, records: &[Arc<ClaimRecord>]) {
        for record in records {
            self.changes.tell(ChangedKind::Claim, &record.id, record.state.as_str());
        }
        self.tell_statuses(records.iter());
    }

    /// Removes claims, and those of `pods` that hold nothing else, durably. They leave the table after the commit: a device
    /// that somebody else took before would be in two claims if it failed. The pods' locks are held by the caller.
    async fn forget(&self, uids: &[Uid], pods: &BTreeSet<Uid>) -> Result<(), Problem> {
        self.forget_with(uids, pods, Vec::new()).await
    }

    /// The same, with more changes in the same commit.
    async fn forget_with(
        &self,
        uids: &[Uid],
        pods: &BTreeSet<Uid>,
        mut changes: Vec<Change>,
    ) -> Result<(), Problem> {
        let pods = self.table.lock().pods_with_nothing_but(pods, uids);
        changes.extend(uids.iter().cloned().map(Change::DeleteClaim));
        changes.extend(pods.iter().map(|pod| Change::DeletePod((*pod).clone())));
        self.commit(changes, Undo::default()).await?;
        let gone: Vec<_> = {
            let mut table = self.table.lock();
            pods.iter().for_each(|pod| drop(table.remove_pod(pod.as_str())));
            uids.iter().filter_map(|uid| table.remove(uid)).collect()
        };
        gone.iter().for_each(|record| self.forget_files(record));
        gone.iter().for_each(|record| self.changes.tell(ChangedKind::Claim, &record.id, "gone"));
        self.tell_statuses(gone.iter());
        self.freed.send_modify(|count| *count += 1);
        Ok(())
    }
}

fn interrupted() -> Problem {
    Problem::unavailable("interrupted", "the daemon is stopping")
}

fn unrendered(record: &ClaimRecord, error: &cdi::RenderError) -> Problem {
    Problem::internal(
        "cdi-not-valid",
        format!("claim {} makes no valid CDI file: {}", record.id, chain(error)),
    )
}
