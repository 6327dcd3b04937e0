//! Unprepare: from the checkpoint alone. Intent, driver calls, removal of the CDI files, removal of the record, in that order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::time::Instant;

use super::files::Nodes;
use super::machine::{self, UnprepareEnd, UnprepareStep};
use super::prepare::Work;
use super::values::Errand;
use super::{ClaimEnd, ClaimOutcome, Inner, PodOutcome, PodSelector, Table, Undo};
use crate::cdi::{self, CdiError};
use crate::checkpoint::Change;
use crate::driver::Call;
use nodedock_base::clock::now_ms;
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{ClaimRecord, ClaimState, DriverName, ObjectRef, Problem, Uid};

/// What each driver said of a claim, and how long it took.
pub(super) type Results = Vec<(DriverName, Result<(), Problem>, u64)>;
type Ends = BTreeMap<Uid, Result<ClaimEnd, Problem>>;

/// Whether the caller has the locks of the pods that hold its claims.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PodLocks {
    Held,
    Free,
}

/// Who gives up claims.
#[derive(Clone, Copy)]
pub(super) enum Leaver<'a> {
    Pod(&'a Uid),
    /// A kubelet: one driver's part, or (`driver` none) every part that it holds.
    Kubelet {
        driver: Option<&'a DriverName>,
        cause: &'a str,
    },
    /// Nobody: what was being given up is tried again.
    Nobody,
}

impl<'a> Leaver<'a> {
    fn step(self, table: &Table, uid: &Uid) -> UnprepareStep {
        match self {
            Self::Pod(pod) => machine::unprepare(table, uid, Some(pod), now_ms(), "unprepare"),
            Self::Kubelet { driver, cause } => {
                machine::unprepare_by_kubelet(table, uid, driver, now_ms(), cause)
            }
            Self::Nobody => machine::unprepare(table, uid, None, now_ms(), "unprepare"),
        }
    }

    fn pod(self) -> Option<&'a Uid> {
        if let Self::Pod(pod) = self { Some(pod) } else { None }
    }

    /// The driver whose part the answer is about.
    fn part(self) -> Option<&'a DriverName> {
        if let Self::Kubelet { driver, .. } = self { driver } else { None }
    }
}

impl Inner {
    pub(super) async fn unprepare_pod(&self, selector: PodSelector, request_id: Arc<str>) -> Vec<PodOutcome> {
        let call = Call { request_id, deadline: self.settings.call_deadline };
        let mut outcomes = Vec::new();
        for pod in self.select(&selector) {
            let _held = self.pod_locks.take([pod.uid.clone()]).await;
            let claims = self.unprepare_claims_of(&pod, &call).await;
            outcomes.push(PodOutcome { pod, claims, containers: Vec::new() });
        }
        // Also what was refused to a pod that holds nothing.
        self.refusals().forget(|pod, _| pod.is_some_and(|pod| selector.is(pod)));
        outcomes
    }

    /// Gives up some of a pod's claims.
    pub(super) async fn give_up_claims(
        &self,
        pod: &Uid,
        claims: &[Uid],
        request_id: Arc<str>,
    ) -> Result<(), Problem> {
        let call = Call { request_id, deadline: self.settings.call_deadline };
        let _pod = self.pod_locks.take([pod.clone()]).await;
        let _held = self.claim_locks.take(claims.iter().cloned()).await;
        let ends = self.give_up(claims, Leaver::Pod(pod), &call).await;
        ends.into_values().find_map(Result::err).map_or(Ok(()), Err)
    }

    pub(super) fn select(&self, selector: &PodSelector) -> Vec<ObjectRef> {
        let table = self.table.lock();
        match selector {
            PodSelector::Uid(uid) => table.pod_ref(uid).into_iter().collect(),
            PodSelector::Name(namespace, name) => table.pods_named(namespace, name),
        }
    }

    async fn unprepare_claims_of(&self, pod: &ObjectRef, call: &Call) -> Vec<ClaimOutcome> {
        let claims = self.table.lock().claims_of_pod(pod.uid.as_str());
        let uids: Vec<_> = claims.iter().map(|claim| claim.id.uid.clone()).collect();
        let _held = self.claim_locks.take(uids.iter().cloned()).await;
        let mut ends = self.give_up(&uids, Leaver::Pod(&pod.uid), call).await;
        if claims.is_empty()
            && let Err(problem) = self.forget(&[], &BTreeSet::from([pod.uid.clone()])).await
        {
            tracing::warn!(%pod, %problem, "a pod without claims stays in the checkpoint");
        }
        let outcome = |claim: Arc<ClaimRecord>| ClaimOutcome {
            namespace: claim.id.namespace.clone(),
            name: claim.id.name.clone(),
            uid: Some(claim.id.uid.clone()),
            // What is gone since the list was made was given up by somebody else.
            end: ends.remove(&claim.id.uid).unwrap_or(Ok(ClaimEnd::Unprepared)),
        };
        claims.into_iter().map(outcome).collect()
    }

    /// Takes back claims that every driver refused for good, or (`part`) what one driver refused of them.
    pub(super) async fn roll_back(
        &self,
        records: Vec<Arc<ClaimRecord>>,
        part: Option<&DriverName>,
        call: &Call,
    ) {
        let mut undo = Undo::default();
        let mut work = Vec::new();
        {
            let mut table = self.table.lock();
            for record in records {
                let (record, drivers) = match part {
                    Some(driver) => machine::roll_back_part(&record, driver, now_ms()),
                    None => machine::roll_back(&record, now_ms()),
                };
                undo.put(&mut table, &record);
                work.push((record, drivers));
            }
        }
        let changes = work.iter().map(|(record, _)| Change::PutClaim(Arc::clone(record))).collect();
        if self.commit(changes, undo).await.is_ok() {
            failpoint::pass(Point::RollbackIntended);
            let locks = if part.is_some() { PodLocks::Free } else { PodLocks::Held };
            self.call_and_forget(work, locks, part, call, &mut BTreeMap::new()).await;
            failpoint::pass(Point::RollbackDone);
        }
    }

    /// Gives up claims whose locks the caller has.
    pub(super) async fn give_up(&self, uids: &[Uid], leaver: Leaver<'_>, call: &Call) -> Ends {
        let pod = leaver.pod();
        let mut ends = BTreeMap::new();
        let mut undo = Undo::default();
        let mut work = Vec::new();
        let mut left = Vec::new();
        let leaves = {
            let mut table = self.table.lock();
            for uid in uids {
                match leaver.step(&table, uid) {
                    UnprepareStep::Nothing => drop(ends.insert(uid.clone(), Ok(ClaimEnd::Unprepared))),
                    UnprepareStep::Left(record) => {
                        undo.put(&mut table, &record);
                        left.push(record);
                    }
                    UnprepareStep::Call { record, drivers } => {
                        undo.put(&mut table, &record);
                        // Who leaves is no reason to wait; what is tried again waits for its drivers.
                        let is_retry = matches!(leaver, Leaver::Nobody);
                        let drivers = if is_retry { self.due_drivers(&record) } else { drivers };
                        work.push((record, drivers));
                    }
                }
            }
            let leaves = pod.filter(|pod| table.claims_of_pod(pod.as_str()).is_empty());
            leaves.inspect(|pod| undo.remove_pod(&mut table, pod))
        };
        let records: Vec<_> = left.iter().chain(work.iter().map(|(record, _)| record)).cloned().collect();
        let mut changes: Vec<_> = records.iter().cloned().map(Change::PutClaim).collect();
        changes.extend(leaves.map(|pod| Change::DeletePod(pod.clone())));
        if let Err(problem) = self.commit(changes, undo).await {
            ends.extend(records.iter().map(|record| (record.id.uid.clone(), Err(problem.clone()))));
            work.iter().for_each(|(record, _)| self.tried_in_vain(record, &Vec::new()));
            return ends;
        }
        failpoint::pass(Point::UnprepareIntended);
        self.tell(&records);
        // A file names the pods of its claim: one that left must not come back with a claim that is rebuilt from it.
        self.check_files(&left, Nodes::Right).await;
        ends.extend(left.into_iter().map(|record| (record.id.uid.clone(), Ok(ClaimEnd::Kept))));
        let locks = if pod.is_some() { PodLocks::Held } else { PodLocks::Free };
        self.call_and_forget(work, locks, leaver.part(), call, &mut ends).await;
        ends
    }

    /// `part`: the driver whose end is told; none: that of the whole claim.
    async fn call_and_forget(
        &self,
        work: Vec<Work>,
        locks: PodLocks,
        part: Option<&DriverName>,
        call: &Call,
        ends: &mut Ends,
    ) {
        if work.is_empty() {
            return;
        }
        let mut results = self.call_unprepare(&work, call).await;
        let mut gone = Vec::new();
        let mut kept = Vec::new();
        let errand = Errand::of(call);
        for ((record, _), results) in work.iter().zip(&mut results) {
            let put_back = self.put_back_unfinished(record, results, &errand).await;
            // Before the next claim is looked at: the last of those that share a value gives it back.
            self.end_values(record, results).await;
            drop(put_back);
            self.remove_files_of_parts(record, results).await;
            let uid = record.id.uid.clone();
            match machine::finish_unprepare(record, results.clone(), now_ms()) {
                UnprepareEnd::Gone => gone.push(record.clone()),
                UnprepareEnd::Kept(record, problem) => {
                    let end = part.map_or(Err(problem), |driver| machine::end_of_part(&record, driver));
                    ends.insert(uid, end.map(|()| ClaimEnd::Unprepared));
                    kept.push(record);
                }
                UnprepareEnd::Stays(record) => {
                    ends.insert(uid, Ok(ClaimEnd::Unprepared));
                    kept.push(record);
                }
            }
        }
        let mut open: BTreeSet<Uid> =
            kept.iter().filter(|record| record.is_leaving()).map(|record| record.id.uid.clone()).collect();
        open.extend(self.keep(kept, ends).await);
        let end = self.remove(&gone, locks).await.map(|()| ClaimEnd::Unprepared);
        ends.extend(gone.iter().map(|record| (record.id.uid.clone(), end.clone())));
        for ((record, _), results) in work.iter().zip(&results) {
            let uid = &record.id.uid;
            if open.contains(uid) || matches!(ends.get(uid), Some(Err(_))) {
                self.tried_in_vain(record, results);
            } else {
                self.waits().over(uid);
            }
        }
    }

    /// Makes durable what is left of claims. Gives those of which it is not: what their drivers gave up they have to give up again.
    async fn keep(&self, kept: Vec<Arc<ClaimRecord>>, ends: &mut Ends) -> Vec<Uid> {
        if kept.is_empty() {
            return Vec::new();
        }
        let uids: Vec<_> = kept.iter().map(|record| record.id.uid.clone()).collect();
        let Err(problem) = self.commit_claims(kept).await else {
            // Who waits for a part that left looks again.
            self.freed.send_modify(|count| *count += 1);
            return Vec::new();
        };
        tracing::warn!(%problem, "what became of an unprepare is not in the checkpoint");
        for uid in &uids {
            if let Some(end) = ends.get_mut(uid).filter(|end| end.is_ok()) {
                *end = Err(problem.clone());
            }
        }
        uids
    }

    /// Removes the CDI files of parts that are given up while the rest of their claim stands. A part whose file stays is kept.
    async fn remove_files_of_parts(&self, record: &ClaimRecord, results: &mut Results) {
        if record.state == ClaimState::Unpreparing {
            return;
        }
        let given_up = results.iter().filter(|(_, outcome, _)| outcome.is_ok());
        let names = given_up.map(|(driver, _, _)| cdi::file_name(driver, &record.id.uid)).collect();
        if let Err(problem) = self.remove_files_named(names).await {
            let outcomes = results.iter_mut().map(|(_, outcome, _)| outcome);
            outcomes.filter(|outcome| outcome.is_ok()).for_each(|outcome| *outcome = Err(problem.clone()));
        }
    }

    /// Has the claim tried again when its drivers may be asked.
    pub(super) fn tried_in_vain(&self, record: &ClaimRecord, results: &Results) {
        let refused =
            results.iter().filter_map(|(driver, outcome, _)| Some((driver.clone(), outcome.clone().err()?)));
        let serving = self.serving_of(record);
        self.waits().failed(&record.id.uid, serving, &refused.collect(), Instant::now());
        self.kept.notify_one();
    }

    /// Removes the CDI files of claims, then their records, with those of pods that are left with nothing.
    async fn remove(&self, gone: &[Arc<ClaimRecord>], locks: PodLocks) -> Result<(), Problem> {
        if gone.is_empty() {
            return Ok(());
        }
        self.remove_files(gone).await?;
        let uids: Vec<_> = gone.iter().map(|record| record.id.uid.clone()).collect();
        let mut pods: BTreeSet<_> = gone.iter().flat_map(|record| record.pods.keys().cloned()).collect();
        let mut taken = Vec::new();
        if locks == PodLocks::Free {
            // Pods are locked before claims, so none is waited for here: one that somebody is at work on is forgotten later.
            let mut take = |pod: &Uid| self.pod_locks.try_take(pod).map(|held| taken.push(held)).is_some();
            pods.retain(|pod| take(pod));
        }
        self.forget(&uids, &pods).await?;
        failpoint::pass(Point::UnprepareForgotten);
        Ok(())
    }

    pub(super) async fn remove_files(&self, gone: &[Arc<ClaimRecord>]) -> Result<(), Problem> {
        let driver_names = |record: &Arc<ClaimRecord>| {
            let drivers: BTreeSet<_> =
                record.allocation.devices.iter().map(|device| &device.driver).collect();
            drivers.into_iter().map(|driver| cdi::file_name(driver, &record.id.uid)).collect::<Vec<_>>()
        };
        self.remove_files_named(gone.iter().flat_map(driver_names).collect()).await
    }

    async fn remove_files_named(&self, names: Vec<String>) -> Result<(), Problem> {
        match self.cdi.remove(names).await {
            // What stands under our name is somebody else's: ours is gone.
            Ok(()) | Err(CdiError::Foreign(_)) => {}
            Err(error) => {
                let why = nodedock_base::error::chain(&error);
                return Err(Problem::unavailable("cdi-not-removed", format!("remove CDI files: {why}")));
            }
        }
        failpoint::pass(Point::UnprepareFilesRemoved);
        Ok(())
    }
}
