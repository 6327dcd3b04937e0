//! Unprepare, from the checkpoint alone: commit the intent, call the drivers, remove the CDI files, then remove the record. The intents of
//! drivers that cannot change the node are not committed: see decision 0013.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use super::calls::{DriverCalls, Outcomes, Work, are_pure};
use super::files::{Nodes, SpecFiles};
use super::log::{EndedRequest, User};
use super::machine::{self, UnprepareEnd, UnprepareRequest, UnprepareResult, UnprepareStep};
use super::retries::Retries;
use super::{ClaimEnd, ClaimOutcome};
use crate::adapters::Adapters;
use crate::checkpoint::Change;
use crate::driver::Call;
use crate::manager::claims::handles::Handles;
use crate::records::RecordStore;
use crate::records::table::Undo;
use crate::records::values::{RecordedValues, RestoreRequest};
use crate::registry::Registry;
use nodedock_base::clock::now_ms;
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{ClaimRecord, ClaimState, DriverName, ObjectRef, Problem, ProblemCode, Uid};

impl<'a> UnprepareRequest<'a> {
    fn pod(self) -> Option<&'a Uid> {
        if let Self::Pod(pod) = self {
            Some(pod)
        } else {
            None
        }
    }

    /// The driver whose part the answer is about.
    fn part(self) -> Option<&'a DriverName> {
        if let Self::Kubelet { driver, .. } = self {
            driver
        } else {
            None
        }
    }
}

/// Unprepares claims, and removes the records of those that are unprepared.
pub(crate) struct Unprepares {
    records: Arc<RecordStore>,
    files: Arc<SpecFiles>,
    retries: Arc<Retries>,
    calls: Arc<DriverCalls>,
    values: Arc<RecordedValues>,
    registry: Registry,
    /// They have to know what pods have by the plugins' IDs.
    adapters: Option<Adapters>,
}

impl Unprepares {
    pub(in crate::manager) fn new(handles: &Handles) -> Self {
        Self {
            records: handles.records.clone(),
            files: handles.files.clone(),
            retries: handles.retries.clone(),
            calls: handles.calls.clone(),
            values: handles.values.clone(),
            registry: handles.registry.clone(),
            adapters: handles.adapters.clone(),
        }
    }

    /// Unprepares the claims of a pod whose lock the caller has.
    pub(crate) async fn unprepare_claims_of(
        &self,
        pod: &ObjectRef,
        request_id: Arc<str>,
    ) -> Vec<ClaimOutcome> {
        let call = self.calls.driver_call(request_id);
        let claims = self.records.table().claims_of_pod(pod.uid.as_str());
        let uids: Vec<_> = claims.iter().map(|claim| claim.id.uid.clone()).collect();
        let _claims = self.records.lock_claims(uids.iter().cloned()).await;
        let mut ends = self
            .unprepare_claims(&uids, UnprepareRequest::Pod(&pod.uid), &call)
            .await;
        if claims.is_empty()
            && let Err(problem) = self
                .forget(
                    &[],
                    &BTreeSet::from([pod.uid.clone()]),
                    Vec::new(),
                    Undo::default(),
                )
                .await
        {
            tracing::warn!(%pod, %problem, "a pod without claims stays in the checkpoint");
        }
        let outcomes = claims.into_iter().map(|claim| ClaimOutcome {
            namespace: claim.id.namespace.clone(),
            name: claim.id.name.clone(),
            uid: Some(claim.id.uid.clone()),
            // A claim that is gone since the list was made was unprepared by another request.
            end: ends
                .remove(&claim.id.uid)
                .unwrap_or(Ok(ClaimEnd::Unprepared)),
        });
        outcomes.collect()
    }

    /// Unprepares one claim. The caller has the lock of the pod that requests it.
    pub(crate) async fn unprepare_one_claim(
        &self,
        uid: &Uid,
        by: UnprepareRequest<'_>,
        request_id: Arc<str>,
    ) -> Result<(), Problem> {
        let _claim = self.records.lock_claims([uid.clone()]).await;
        self.unprepare_locked_claim(uid, by, request_id).await
    }

    pub(super) async fn unprepare_locked_claim(
        &self,
        uid: &Uid,
        by: UnprepareRequest<'_>,
        request_id: Arc<str>,
    ) -> Result<(), Problem> {
        let call = self.calls.driver_call(request_id);
        let end = self
            .unprepare_claims(std::slice::from_ref(uid), by, &call)
            .await
            .remove(uid);
        end.map_or(Ok(()), |end| end.map(drop))
    }

    /// Rolls back claims that every driver refused for good, or (`part`) that one driver refused, or with whose results the host failed. If
    /// the checkpoint takes no writes, that is retried.
    pub(super) async fn roll_back(
        &self,
        records: Vec<(Arc<ClaimRecord>, Option<Problem>)>,
        part: Option<&DriverName>,
        call: &Call,
    ) {
        let work: Vec<Work> = records
            .into_iter()
            .map(|(record, failure)| machine::roll_back(&record, part, failure.as_ref(), now_ms()))
            .collect();
        let mut undo = Undo::default();
        {
            let mut table = self.records.table();
            work.iter()
                .for_each(|(record, _)| undo.put(&mut table, record));
        }
        let changes = work
            .iter()
            .map(|(record, _)| Change::PutClaim(Arc::clone(record)))
            .collect();
        match self.records.commit(changes, undo).await {
            Ok(()) => failpoint::pass(Point::RollbackIntended),
            Err(problem) if is_without_writes(&problem) => {
                // The next start may find the claims as prepared, so no driver may undo them before the intent is durable.
                for (record, _) in &work {
                    drop(self.records.table().put(record.clone()));
                    self.retries.retry_unprepare(record, &[], true);
                }
                return;
            }
            // A closed or damaged checkpoint: the next instance finds the intent of the prepare.
            Err(_) => return,
        }
        let results = self.calls.call_unprepare(&work, call).await;
        self.remove_unprepared(
            work,
            results,
            part.is_none(),
            part,
            call,
            &mut Outcomes::new(),
        )
        .await;
        failpoint::pass(Point::RollbackDone);
    }

    /// Unprepares claims whose locks the caller has.
    async fn unprepare_claims(
        &self,
        uids: &[Uid],
        by: UnprepareRequest<'_>,
        call: &Call,
    ) -> Outcomes {
        let started = Instant::now();
        let records: Vec<_> = {
            let table = self.records.table();
            uids.iter()
                .filter_map(|uid| table.claim(uid.as_str()).cloned())
                .collect()
        };
        let ends = self.carry_out(uids, by, call).await;
        for record in records {
            let Some(end) = ends.get(&record.id.uid) else {
                continue;
            };
            // The first failure has a line; a claim that stays open has a condition.
            if matches!(by, UnprepareRequest::Retry) && end.is_err() {
                continue;
            }
            let pod = by.pod().and_then(|pod| record.pods.get(pod));
            let ended = EndedRequest {
                claim: &record.id,
                user: pod.map_or(User::Consumers(Some(&*record)), User::Pod),
                allocation: Some(&record.allocation),
                part: by.part(),
                started,
                request: &call.request_id,
            };
            ended.log_unprepare(end.as_ref().copied());
        }
        ends
    }

    async fn carry_out(&self, uids: &[Uid], by: UnprepareRequest<'_>, call: &Call) -> Outcomes {
        let pod = by.pod();
        let (mut ends, mut undo) = (Outcomes::new(), Undo::default());
        let (mut work, mut left): (Vec<Work>, Vec<Arc<ClaimRecord>>) = Default::default();
        let removed_pod = {
            let mut table = self.records.table();
            for uid in uids {
                match machine::unprepare(&table, uid, by, now_ms()) {
                    UnprepareStep::Nothing => {
                        drop(ends.insert(uid.clone(), Ok(ClaimEnd::Unprepared)))
                    }
                    UnprepareStep::Left(record) => {
                        undo.put(&mut table, &record);
                        left.push(record);
                    }
                    UnprepareStep::Call { record, drivers } => {
                        undo.put(&mut table, &record);
                        // A request calls all drivers; a retry calls those whose backoff has ended.
                        let is_retry = matches!(by, UnprepareRequest::Retry);
                        let drivers = if is_retry {
                            self.retries.due_drivers(&record)
                        } else {
                            drivers
                        };
                        work.push((record, drivers));
                    }
                }
            }
            let without_claims = pod.filter(|pod| table.claims_of_pod(pod.as_str()).is_empty());
            without_claims.inspect(|pod| undo.remove_pod(&mut table, pod))
        };
        let records: Vec<_> = left
            .iter()
            .chain(work.iter().map(|(record, _)| record))
            .cloned()
            .collect();
        let mut changes: Vec<_> = removed_pod
            .map(|pod| Change::DeletePod(pod.clone()))
            .into_iter()
            .collect();
        let mut results = None;
        if left.is_empty() && !matches!(by, UnprepareRequest::Retry) && self.needs_no_intent(&work)
        {
            self.records.report_claims(&records);
            let called = self.calls.call_unprepare(&work, call).await;
            if all_gone(&work, &called) {
                ends.extend(
                    self.remove_at_once(&work, &called, pod.is_some(), changes, undo)
                        .await,
                );
                return ends;
            }
            // What stays is retried, so it is durable before anything else is done.
            results = Some(called);
        }
        changes.extend(records.iter().cloned().map(Change::PutClaim));
        if let Err(problem) = self.records.commit(changes, undo).await {
            ends.extend(
                records
                    .iter()
                    .map(|record| (record.id.uid.clone(), Err(problem.clone()))),
            );
            work.iter().for_each(|(record, _)| {
                self.retries
                    .retry_unprepare(record, &[], is_without_writes(&problem));
            });
            return ends;
        }
        failpoint::pass(Point::UnprepareIntended);
        if results.is_none() {
            self.records.report_claims(&records);
        }
        // A file names the pods of its claim: one that left must not come back with a claim that is rebuilt from it.
        self.files.check_files(&left, Nodes::Checked).await;
        ends.extend(
            left.into_iter()
                .map(|record| (record.id.uid.clone(), Ok(ClaimEnd::Kept))),
        );
        let results = match results {
            Some(results) => results,
            None => self.calls.call_unprepare(&work, call).await,
        };
        self.remove_unprepared(work, results, pod.is_some(), by.part(), call, &mut ends)
            .await;
        ends
    }

    /// Returns whether no driver can change the node for these claims, and no code of an earlier version has to be called.
    fn needs_no_intent(&self, work: &[Work]) -> bool {
        are_pure(&self.calls.callees(work))
            && work.iter().all(|(record, drivers)| {
                record.state == ClaimState::Unpreparing
                    && self.values.of(&record.id.uid).is_none()
                    && drivers.iter().all(|name| self.is_as_prepared(record, name))
            })
    }

    fn is_as_prepared(&self, record: &ClaimRecord, driver: &DriverName) -> bool {
        let by = record.drivers.get(driver).and_then(|part| part.by.as_ref());
        let serving = self.registry.serving(driver);
        serving.is_ok_and(|driver| by.is_none_or(|by| by.digest == driver.identity.digest))
    }

    /// Removes claims that are unprepared and of which the checkpoint has no intent. If that fails, they are as before the request.
    async fn remove_at_once(
        &self,
        work: &[Work],
        results: &[Vec<UnprepareResult>],
        pods_locked: bool,
        mut changes: Vec<Change>,
        undo: Undo,
    ) -> Outcomes {
        let gone: Vec<_> = work.iter().map(|(record, _)| record.clone()).collect();
        let ends = gone.iter().zip(results);
        changes.extend(ends.filter_map(|(record, results)| end_of(record, results)));
        let end = self
            .remove(&gone, pods_locked, changes, undo)
            .await
            .map(|()| ClaimEnd::Unprepared);
        if end.is_err() {
            let restored: Vec<_> = gone
                .iter()
                .filter_map(|record| self.records.table().claim(record.id.uid.as_str()).cloned())
                .collect();
            self.files.check_files(&restored, Nodes::Checked).await;
            self.records.report_claims(&restored);
        }
        gone.iter()
            .map(|record| {
                self.retries.clear_unprepare(&record.id.uid);
                (record.id.uid.clone(), end.clone())
            })
            .collect()
    }

    /// Removes what the drivers unprepared. `pods_locked`: the caller has the locks of the claims' pods. `part`: the driver whose outcome
    /// is reported; none: that of the whole claim.
    async fn remove_unprepared(
        &self,
        work: Vec<Work>,
        mut results: Vec<Vec<UnprepareResult>>,
        pods_locked: bool,
        part: Option<&DriverName>,
        call: &Call,
        ends: &mut Outcomes,
    ) {
        if work.is_empty() {
            return;
        }
        let (mut gone, mut stay, mut ended) = (Vec::new(), Vec::new(), Vec::new());
        let restore = RestoreRequest::of(call);
        for ((record, _), results) in work.iter().zip(&mut results) {
            let restored = self
                .values
                .restore_unprepared(record, results, &restore)
                .await;
            // Before the next claim: the last of the claims that share a value restores it.
            self.values.end_values(record, results).await;
            drop(restored);
            self.remove_files_of_parts(record, results).await;
            let uid = record.id.uid.clone();
            match machine::finish_unprepare(record, results.clone(), now_ms()) {
                UnprepareEnd::Gone => {
                    ended.extend(end_of(record, results));
                    gone.push(record.clone());
                }
                UnprepareEnd::Stays(record, problem) => {
                    let end = match part {
                        Some(driver) => machine::end_of_part(&record, driver),
                        None => problem.map_or(Ok(()), Err),
                    };
                    ends.insert(uid, end.map(|()| ClaimEnd::Unprepared));
                    stay.push(record);
                }
            }
        }
        let mut open: BTreeSet<Uid> = stay
            .iter()
            .filter(|record| record.is_leaving())
            .map(|record| record.id.uid.clone())
            .collect();
        open.extend(self.commit_rest(stay, ends).await);
        let end = self
            .remove(&gone, pods_locked, ended, Undo::default())
            .await
            .map(|()| ClaimEnd::Unprepared);
        ends.extend(
            gone.iter()
                .map(|record| (record.id.uid.clone(), end.clone())),
        );
        for ((record, _), results) in work.iter().zip(&results) {
            let uid = &record.id.uid;
            let failure = ends.get(uid).and_then(|end| end.as_ref().err());
            if open.contains(uid) || failure.is_some() {
                let is_disk = failure.is_some_and(is_without_writes);
                self.retries.retry_unprepare(record, results, is_disk);
            } else {
                self.retries.clear_unprepare(uid);
            }
        }
    }

    /// Makes durable what is left of claims. Returns those for which that failed: their drivers have to unprepare them again.
    async fn commit_rest(&self, rest: Vec<Arc<ClaimRecord>>, ends: &mut Outcomes) -> Vec<Uid> {
        if rest.is_empty() {
            return Vec::new();
        }
        let uids: Vec<_> = rest.iter().map(|record| record.id.uid.clone()).collect();
        let Err(problem) = self.records.commit_claims(rest).await else {
            // A prepare that waits for a part that was unprepared decides again.
            self.records.report_freed();
            return Vec::new();
        };
        // The checkpoint reports that it takes no writes.
        tracing::debug!(%problem, "the outcome of an unprepare is not in the checkpoint");
        for uid in &uids {
            if let Some(end) = ends.get_mut(uid).filter(|end| end.is_ok()) {
                *end = Err(problem.clone());
            }
        }
        uids
    }

    /// Removes the CDI files of parts that were unprepared while the rest of their claim is held. If that fails, the parts are kept.
    async fn remove_files_of_parts(&self, record: &ClaimRecord, results: &mut [UnprepareResult]) {
        if record.state == ClaimState::Unpreparing {
            return;
        }
        let unprepared: Vec<_> = results
            .iter()
            .filter(|(_, outcome, _)| outcome.is_ok())
            .map(|(driver, _, _)| driver.clone())
            .collect();
        if let Err(problem) = self.files.remove_files_of(record, &unprepared).await {
            let outcomes = results.iter_mut().map(|(_, outcome, _)| outcome);
            outcomes
                .filter(|outcome| outcome.is_ok())
                .for_each(|outcome| *outcome = Err(problem.clone()));
        }
    }

    /// Removes the CDI files of claims, then their records, with those of pods that hold nothing else, and makes `changes` that are in
    /// the table already in the same commit; `undo`: of these, if that fails.
    async fn remove(
        &self,
        gone: &[Arc<ClaimRecord>],
        pods_locked: bool,
        changes: Vec<Change>,
        undo: Undo,
    ) -> Result<(), Problem> {
        if gone.is_empty() {
            return Ok(());
        }
        if let Err(problem) = self.files.remove_files(gone).await {
            undo.restore(&mut self.records.table());
            return Err(problem);
        }
        let uids: Vec<_> = gone.iter().map(|record| record.id.uid.clone()).collect();
        let mut pods: BTreeSet<_> = gone
            .iter()
            .flat_map(|record| record.pods.keys().cloned())
            .collect();
        let mut locks = Vec::new();
        if !pods_locked {
            // Pods are locked before claims, so none is waited for here: one with a request under way is removed later.
            pods.retain(|pod| {
                let lock = self.records.try_lock_pod(pod);
                lock.map(|lock| locks.push(lock)).is_some()
            });
        }
        self.forget(&uids, &pods, changes, undo).await?;
        failpoint::pass(Point::UnprepareForgotten);
        Ok(())
    }

    /// Removes claims and pods from the records (`RecordStore::remove`), with all that follows.
    pub(super) async fn forget(
        &self,
        uids: &[Uid],
        pods: &BTreeSet<Uid>,
        changes: Vec<Change>,
        undo: Undo,
    ) -> Result<(), Problem> {
        let gone = self.records.remove(uids, pods, changes, undo).await?;
        self.report_gone(&gone);
        self.report_taken();
        self.records.report_freed();
        Ok(())
    }

    /// Reports claims that are not in the table any more.
    pub(super) fn report_gone(&self, gone: &[Arc<ClaimRecord>]) {
        for record in gone {
            self.files.set_file_conditions(record, Vec::new());
            self.records.report_gone(&record.id);
        }
        self.records.report_statuses(gone);
    }

    /// Reports to the adapters what pods have by the plugins' IDs, from the time before them.
    fn report_taken(&self) {
        if let Some(adapters) = self
            .adapters
            .as_ref()
            .filter(|adapters| adapters.has_taken())
        {
            let taken = self.records.table().taken_of_plugins();
            adapters.set_taken(&taken);
        }
    }
}

/// The change that lists a claim as ended, if it was prepared.
fn end_of(record: &ClaimRecord, results: &[UnprepareResult]) -> Option<Change> {
    let ended = machine::ended(record, results, now_ms())?;
    Some(Change::PutEnded(Arc::new(ended)))
}

/// Returns whether a commit failed because the disk takes no writes, so that nothing of it is there and a later one may succeed.
pub(super) fn is_without_writes(problem: &Problem) -> bool {
    problem.code == ProblemCode::CheckpointDiskFull
        || problem.code == ProblemCode::CheckpointReadOnly
}

/// Returns whether every driver has unprepared its part, so that the claims are gone.
fn all_gone(work: &[Work], results: &[Vec<UnprepareResult>]) -> bool {
    work.iter().zip(results).all(|((record, _), results)| {
        results.iter().all(|(_, outcome, _)| outcome.is_ok())
            && machine::finish_unprepare(record, results.clone(), now_ms()) == UnprepareEnd::Gone
    })
}
