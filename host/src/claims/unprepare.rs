//! Unprepare: from the checkpoint alone. Intent, driver calls, removal of the CDI files, removal of the record, in that order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::time::Instant;

use super::files::Nodes;
use super::machine::{self, UnprepareEnd, UnprepareStep};
use super::prepare::Work;
use super::values::Errand;
use super::{ClaimEnd, ClaimOutcome, Inner, PodOutcome, PodSelector, Undo};
use crate::base::clock::now_ms;
use crate::base::failpoint::{self, Point};
use crate::cdi::{self, CdiError};
use crate::checkpoint::Change;
use crate::driver::Call;
use crate::model::{ClaimRecord, DriverName, ObjectRef, Problem, Uid};

/// What each driver said of a claim, and how long it took.
pub(super) type Results = Vec<(DriverName, Result<(), Problem>, u64)>;
type Ends = BTreeMap<Uid, Result<ClaimEnd, Problem>>;

/// Whether the caller has the locks of the pods that hold its claims.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PodLocks {
    Held,
    Free,
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
        self.refusals().forget(|pod, _| selector.is(pod));
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
        let ends = self.give_up(claims, Some(pod), &call).await;
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
        let mut ends = self.give_up(&uids, Some(&pod.uid), call).await;
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

    /// Takes back claims that every driver refused for good.
    pub(super) async fn roll_back(&self, records: Vec<Arc<ClaimRecord>>, call: &Call) {
        let mut undo = Undo::default();
        let mut work = Vec::new();
        {
            let mut table = self.table.lock();
            for record in records {
                let (record, drivers) = machine::roll_back(&record, now_ms());
                undo.put(&mut table, &record);
                work.push((record, drivers));
            }
        }
        let changes = work.iter().map(|(record, _)| Change::PutClaim(Arc::clone(record))).collect();
        if self.commit(changes, undo).await.is_ok() {
            failpoint::pass(Point::RollbackIntended);
            self.call_and_forget(work, PodLocks::Held, call, &mut BTreeMap::new()).await;
            failpoint::pass(Point::RollbackDone);
        }
    }

    /// Gives up claims that are held by the caller: for a pod that leaves, or (`pod` none) for good.
    pub(super) async fn give_up(&self, uids: &[Uid], pod: Option<&Uid>, call: &Call) -> Ends {
        let mut ends = BTreeMap::new();
        let mut undo = Undo::default();
        let mut work = Vec::new();
        let mut left = Vec::new();
        let leaves = {
            let mut table = self.table.lock();
            for uid in uids {
                match machine::unprepare(&table, uid, pod, now_ms(), "unprepare") {
                    UnprepareStep::Nothing => drop(ends.insert(uid.clone(), Ok(ClaimEnd::Unprepared))),
                    UnprepareStep::Left(record) => {
                        undo.put(&mut table, &record);
                        left.push(record);
                    }
                    UnprepareStep::Call { record, drivers } => {
                        undo.put(&mut table, &record);
                        // A pod that leaves is no reason to wait; what is tried again waits for its drivers.
                        let drivers = if pod.is_some() { drivers } else { self.due_drivers(&record) };
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
        // What is tried again is tried for nobody.
        let locks = if pod.is_some() { PodLocks::Held } else { PodLocks::Free };
        self.call_and_forget(work, locks, call, &mut ends).await;
        ends
    }

    async fn call_and_forget(&self, work: Vec<Work>, locks: PodLocks, call: &Call, ends: &mut Ends) {
        if work.is_empty() {
            return;
        }
        let results = self.call_unprepare(&work, call).await;
        let mut gone = Vec::new();
        let mut kept = Vec::new();
        let errand = Errand::of(call);
        for ((record, _), results) in work.iter().zip(&results) {
            let put_back = self.put_back_unfinished(record, results, &errand).await;
            // Before the next claim is looked at: the last of those that share a value gives it back.
            self.end_values(record, results).await;
            drop(put_back);
            match machine::finish_unprepare(record, results.clone(), now_ms()) {
                UnprepareEnd::Gone => gone.push(record.clone()),
                UnprepareEnd::Kept(record, problem) => {
                    ends.insert(record.id.uid.clone(), Err(problem));
                    kept.push(record);
                }
            }
        }
        if let Err(problem) = self.commit_claims(kept).await {
            tracing::warn!(%problem, "an unprepare's refusal is not in the checkpoint");
        }
        let end = self.remove(&gone, locks).await.map(|()| ClaimEnd::Unprepared);
        ends.extend(gone.iter().map(|record| (record.id.uid.clone(), end.clone())));
        for ((record, _), results) in work.iter().zip(&results) {
            match ends.get(&record.id.uid) {
                Some(Err(_)) => self.tried_in_vain(record, results),
                _ => self.waits().over(&record.id.uid),
            }
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
        let names = gone.iter().flat_map(driver_names).collect();
        match self.cdi.remove(names).await {
            // What stands under our name is somebody else's: ours is gone.
            Ok(()) | Err(CdiError::Foreign(_)) => {}
            Err(error) => {
                let why = crate::base::error::chain(&error);
                return Err(Problem::unavailable("cdi-not-removed", format!("remove CDI files: {why}")));
            }
        }
        failpoint::pass(Point::UnprepareFilesRemoved);
        Ok(())
    }
}
