//! The claim manager: what pods hold of claims.
//!
//! Is given pods' requests and the claims' allocations; calls drivers through the registry; keeps every step in the checkpoint
//! (intent before the call, result before the answer) and CDI files in step with it. Never reads a driver's socket or file, and
//! never decides: decisions are in `machine`.

mod answer;
mod locks;
pub mod machine;
pub mod manifest;
mod prepare;
pub mod source;
mod unprepare;

#[cfg(test)]
mod machine_tests;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::base::changes::Changes;
use crate::base::error::chain;
use crate::base::tasks::Tasks;
use crate::cdi::{self, CdiDir, SpecFile};
use crate::checkpoint::{Change, Checkpoint, CommitError};
use crate::driver::{Ledger, NodeFacts};
use crate::model::{
    ChangedKind, Claim, ClaimRecord, ClaimState, DriverName, LiveClaim, ObjectName, ObjectRef, PodRecord, PodRequest,
    Problem, Uid,
};
use crate::registry::Registry;

pub use answer::ContainerAnswer;
use locks::Locks;
use machine::Table;
use source::ClaimSource;

/// The table, where the manager and the drivers' ledgers both see it.
#[derive(Clone, Default)]
pub struct SharedTable(Arc<Mutex<Table>>);

impl SharedTable {
    pub fn new(claims: Vec<ClaimRecord>, pods: Vec<PodRecord>) -> Self {
        Self(Arc::new(Mutex::new(Table::new(claims, pods))))
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
    locks: Locks,
    checkpoint: Checkpoint,
    cdi: CdiDir,
    registry: Registry,
    source: Arc<dyn ClaimSource>,
    settings: ClaimSettings,
    changes: Changes,
    tasks: Tasks,
    /// Counts claims that were given up: whoever waits for a device looks again.
    freed: watch::Sender<u64>,
}

/// What the manager stands on.
pub struct ClaimParts {
    pub table: SharedTable,
    pub checkpoint: Checkpoint,
    pub cdi: CdiDir,
    pub registry: Registry,
    pub source: Arc<dyn ClaimSource>,
    pub settings: ClaimSettings,
    pub changes: Changes,
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
    /// Other pods hold it.
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

/// A pod and what it holds.
pub struct PodView {
    pub pod: Arc<PodRecord>,
    pub claims: Vec<Arc<ClaimRecord>>,
    pub containers: Vec<ContainerAnswer>,
}

impl Claims {
    pub fn new(parts: ClaimParts) -> Self {
        let ClaimParts { table, checkpoint, cdi, registry, source, settings, changes, tasks } = parts;
        let freed = watch::Sender::new(0);
        let locks = Locks::default();
        Self(Arc::new(Inner { table, locks, checkpoint, cdi, registry, source, settings, changes, tasks, freed }))
    }

    /// Starts what goes on without requests: CDI files made right, interrupted unprepares finished as drivers come.
    pub fn start(&self) {
        let inner = self.0.clone();
        self.0.tasks.spawn("cdi-reconcile", async move { inner.reconcile_files().await });
        let inner = self.0.clone();
        self.0.tasks.spawn("resume-unprepare", async move { inner.resume_unprepares().await });
    }

    /// Makes a pod's claims ready. Goes on when the caller goes away.
    pub async fn prepare_pod(&self, request: PodRequest, inline: Vec<Claim>, request_id: Arc<str>) -> PodOutcome {
        let pod = request.pod.clone();
        let inner = self.0.clone();
        let work = async move { inner.prepare_pod(request, inline, request_id).await };
        self.detached(work).await.unwrap_or_else(|| PodOutcome { pod, claims: vec![], containers: vec![] })
    }

    /// Gives up what a pod holds. Goes on when the caller goes away.
    pub async fn unprepare_pod(&self, selector: PodSelector, request_id: Arc<str>) -> Vec<PodOutcome> {
        let inner = self.0.clone();
        let work = async move { inner.unprepare_pod(selector, request_id).await };
        self.detached(work).await.unwrap_or_default()
    }

    /// Runs an operation to its end whatever becomes of the caller. None: the runtime is going down.
    async fn detached<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Option<T> {
        let (done, outcome) = tokio::sync::oneshot::channel();
        self.0.tasks.spawn("pod", async move {
            // The caller may have gone away.
            let _ = done.send(work.await);
        });
        outcome.await.ok()
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

    /// Every pod that holds something, by namespace and name.
    pub fn pods(&self) -> Vec<PodView> {
        let table = self.0.table.lock();
        let mut pods: Vec<_> = table.pods().map(|pod| view(&table, pod)).collect();
        pods.sort_by(|a, b| {
            (&a.pod.pod.namespace, &a.pod.pod.name).cmp(&(&b.pod.pod.namespace, &b.pod.pod.name))
        });
        pods
    }

    /// What a pod was answered, from the checkpoint.
    pub fn pod(&self, uid: &str) -> Option<PodView> {
        let table = self.0.table.lock();
        table.pod(uid).map(|pod| view(&table, pod))
    }

    pub fn might_need_unprepare(&self, pod: &str) -> bool {
        let table = self.0.table.lock();
        table.pod(pod).is_some() || !table.claims_of_pod(pod).is_empty()
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

/// What stood in the table before changes that are not durable yet.
#[derive(Default)]
struct Undo {
    claims: Vec<(Uid, Option<Arc<ClaimRecord>>)>,
    pods: Vec<(Uid, Option<Arc<PodRecord>>)>,
}

impl Undo {
    fn put(&mut self, table: &mut Table, record: &Arc<ClaimRecord>) {
        self.claims.push((record.id.uid.clone(), table.put(record.clone())));
    }

    fn remove(&mut self, table: &mut Table, uid: &Uid) {
        self.claims.push((uid.clone(), table.remove(uid)));
    }

    fn put_pod(&mut self, table: &mut Table, record: &Arc<PodRecord>) {
        self.pods.push((record.pod.uid.clone(), table.put_pod(record.clone())));
    }

    fn remove_pod(&mut self, table: &mut Table, uid: &Uid) {
        self.pods.push((uid.clone(), table.remove_pod(uid.as_str())));
    }

    /// The newest change is taken back first.
    fn restore(self, table: &mut Table) {
        self.claims.into_iter().rev().for_each(|(uid, before)| table.restore(&uid, before));
        self.pods.into_iter().rev().for_each(|(uid, before)| table.restore_pod(&uid, before));
    }
}

impl Inner {
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
        let Err(error) = self.checkpoint.commit(changes).await else { return Ok(()) };
        undo.restore(&mut self.table.lock());
        tracing::error!(error = chain(&error), "commit to the checkpoint failed");
        Err(not_durable(&error))
    }

    fn tell(&self, records: &[Arc<ClaimRecord>]) {
        for record in records {
            self.changes.tell(ChangedKind::Claim, &record.id, record.state.as_str());
        }
    }

    /// Removes claims, and pods that hold nothing any more, durably.
    async fn forget(&self, uids: &[Uid], pods: &BTreeSet<Uid>) -> Result<(), Problem> {
        let mut undo = Undo::default();
        let mut changes = Vec::new();
        {
            let mut table = self.table.lock();
            for uid in uids {
                undo.remove(&mut table, uid);
                changes.push(Change::DeleteClaim(uid.clone()));
            }
            for pod in pods.iter().filter(|pod| table.claims_of_pod(pod.as_str()).is_empty()).collect::<Vec<_>>() {
                undo.remove_pod(&mut table, pod);
                changes.push(Change::DeletePod(pod.clone()));
            }
        }
        let gone: Vec<_> = undo.claims.iter().filter_map(|(_, record)| record.clone()).collect();
        self.commit(changes, undo).await?;
        gone.iter().for_each(|record| self.changes.tell(ChangedKind::Claim, &record.id, "gone"));
        self.freed.send_modify(|count| *count += 1);
        Ok(())
    }

    /// Writes the CDI files of claims that lack one, or have another than the checkpoint says.
    async fn write_files(&self, records: &[Arc<ClaimRecord>]) -> Result<(), Problem> {
        let mut stale: Vec<SpecFile> = Vec::new();
        for record in records {
            let files = cdi::render(record).map_err(|error| unrendered(record, &chain(&error)))?;
            stale.extend(files.into_iter().filter(|file| !self.cdi.is_current(file)));
        }
        if stale.is_empty() {
            return Ok(());
        }
        self.cdi.write(stale).await.map_err(|error| {
            Problem::unavailable("cdi-not-written", format!("write CDI files: {}", chain(&error)))
        })
    }

    /// At start: files of claims that are gone are removed, and missing ones rendered. Answers do not wait for it, because each
    /// checks its own files.
    async fn reconcile_files(&self) {
        let prepared: Vec<_> = {
            let table = self.table.lock();
            let boot_id = self.settings.node.boot_id.as_str();
            let stands = |c: &&Arc<ClaimRecord>| c.boot_id == boot_id && c.state != ClaimState::Unpreparing;
            table.claims().filter(stands).cloned().collect()
        };
        let known: BTreeSet<Uid> = self.table.lock().claims().map(|record| record.id.uid.clone()).collect();
        let mut orphans = Vec::new();
        let cdi = self.cdi.clone();
        // Reads every file of ours: not for a thread that serves.
        let ours = tokio::task::spawn_blocking(move || cdi.list_ours()).await;
        match ours {
            Ok(Ok(files)) => {
                // A file whose identity a newer release wrote is not ours to judge.
                let orphan = |identity: &cdi::Identity| !known.contains(identity.claim.uid.as_str());
                let files = files.into_iter().filter(|file| file.identity.as_ref().is_some_and(orphan));
                orphans.extend(files.map(|file| file.name));
            }
            Ok(Err(error)) => tracing::warn!(error = chain(&error), "cdi files not looked through"),
            Err(error) => tracing::warn!(error = chain(&error), "cdi files not looked through"),
        }
        if !orphans.is_empty() {
            tracing::info!(count = orphans.len(), "removing cdi files that no claim owns");
            if let Err(error) = self.cdi.remove(orphans).await {
                tracing::warn!(error = chain(&error), "cdi files without an owner stay");
            }
        }
        for record in prepared {
            let _held = self.locks.take([record.id.uid.clone()]).await;
            let now = self.table.lock().claim(record.id.uid.as_str()).cloned();
            let Some(now) = now.filter(|now| now.state != ClaimState::Unpreparing) else { continue };
            if let Err(problem) = self.write_files(std::slice::from_ref(&now)).await {
                tracing::warn!(claim = %now.id, problem = %problem, "cdi files of a claim not rendered");
            }
        }
    }

    /// Finishes unprepares that a crash or an absent driver interrupted: at start, and whenever a driver begins to serve.
    async fn resume_unprepares(&self) {
        let mut serving = self.registry.serving_changes();
        loop {
            let open: Vec<_> = {
                let table = self.table.lock();
                let unpreparing = |record: &&Arc<ClaimRecord>| record.state == ClaimState::Unpreparing;
                table.claims().filter(unpreparing).map(|record| record.id.uid.clone()).collect()
            };
            self.finish_unprepares(open).await;
            tokio::select! {
                // Nothing is lost by stopping: the intents are durable.
                () = self.tasks.stopped() => return,
                changed = serving.changed() => if changed.is_err() { return },
            }
        }
    }
}

fn not_durable(error: &CommitError) -> Problem {
    let code = if error.is_full() {
        "checkpoint-disk-full"
    } else if error.is_read_only() {
        "checkpoint-read-only"
    } else {
        "checkpoint-unavailable"
    };
    Problem::unavailable(code, format!("nothing new is taken on: {}", chain(error)))
        .retry_after(Duration::from_secs(5))
}

fn unrendered(record: &ClaimRecord, why: &str) -> Problem {
    Problem::internal("cdi-not-valid", format!("claim {} makes no valid CDI file: {why}", record.id))
}

