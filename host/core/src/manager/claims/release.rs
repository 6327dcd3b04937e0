//! Release by force: an operator removes a claim that its driver cannot unprepare. Drivers that serve are called once more; a durable
//! record says which drivers did not unprepare the claim.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::calls::DriverCalls;
use super::files::SpecFiles;
use super::machine;
use super::retries::Retries;
use super::unprepare::{Unprepares, is_without_writes};
use crate::checkpoint::Change;
use crate::driver::Call;
use crate::manager::claims::handles::Handles;
use crate::manager::request::complete;
use crate::records::RecordStore;
use crate::records::table::Undo;
use crate::records::values::{RecordedValues, RestoreRequest, Restored};
use crate::registry::Registry;
use nodedock_base::clock::now_ms;
use nodedock_base::failpoint::{self, Point};
use nodedock_base::tasks::Tasks;
use nodedock_model::{
    Caller, ClaimRecord, DriverName, ObjectName, ObjectRef, Problem, ProblemCode, PutBack,
    ReleaseRecord, Uid,
};

/// Claim to release, and the caller that requests it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReleaseRequest {
    pub namespace: ObjectName,
    pub name: ObjectName,
    /// None: the only claim of that name.
    pub uid: Option<Uid>,
    pub by: Caller,
}

/// The effect that a release would have: on the claim, and whether each of its drivers serves.
#[derive(Debug, Clone, PartialEq)]
pub struct ReleasePreview {
    pub record: Arc<ClaimRecord>,
    pub drivers: BTreeMap<DriverName, Result<(), Problem>>,
    /// Outcome of a release for the sysfs values that drivers changed, unless the drivers restore them.
    pub values: Vec<PutBack>,
}

/// Releases claims by force.
pub struct Releases {
    records: Arc<RecordStore>,
    files: Arc<SpecFiles>,
    retries: Arc<Retries>,
    calls: Arc<DriverCalls>,
    unprepares: Arc<Unprepares>,
    values: Arc<RecordedValues>,
    registry: Registry,
    tasks: Tasks,
}

impl Releases {
    pub(in crate::manager) fn new(handles: &Handles, unprepares: Arc<Unprepares>) -> Self {
        Self {
            records: handles.records.clone(),
            files: handles.files.clone(),
            retries: handles.retries.clone(),
            calls: handles.calls.clone(),
            unprepares,
            values: handles.values.clone(),
            registry: handles.registry.clone(),
            tasks: handles.tasks.clone(),
        }
    }

    /// Returns the effects that a release would have.
    pub async fn preview(&self, request: &ReleaseRequest) -> Result<ReleasePreview, Problem> {
        let record = self.find_claim(request)?;
        machine::check_release(&record)?;
        let drivers = record
            .drivers
            .keys()
            .map(|driver| (driver.clone(), self.registry.serving(driver).map(drop)))
            .collect();
        let call = self.calls.driver_call("look".into());
        let restored = self
            .values
            .preview_release(&record, &RestoreRequest::preview(&call))
            .await;
        Ok(ReleasePreview {
            record,
            drivers,
            values: restored.values,
        })
    }

    /// Releases a claim by force. Not cancelled when the future is dropped.
    pub async fn release(
        self: &Arc<Self>,
        request: ReleaseRequest,
        request_id: Arc<str>,
    ) -> Result<Arc<ReleaseRecord>, Problem> {
        let releases = self.clone();
        complete(&self.tasks, "release", async move {
            releases.carry_out(request, request_id).await
        })
        .await
    }

    async fn carry_out(
        &self,
        request: ReleaseRequest,
        request_id: Arc<str>,
    ) -> Result<Arc<ReleaseRecord>, Problem> {
        let found = self.find_claim(&request)?;
        let uid = &found.id.uid;
        // Pods are locked before claims. If another pod comes meanwhile, the check below fails.
        let _pods = self.records.lock_pods(found.pods.keys().cloned()).await;
        let _claim = self.records.lock_claims([uid.clone()]).await;
        let record = self
            .records
            .table()
            .claim(uid.as_str())
            .cloned()
            .ok_or_else(|| no_claim(&request))?;
        machine::check_release(&record)?;
        if record.pods.keys().any(|pod| !found.pods.contains_key(pod)) {
            let message = format!("claim {} was just prepared for another pod", record.id);
            return Err(Problem::conflict(ProblemCode::ClaimInUse, message));
        }
        let released = self
            .release_locked(&record, &request.by, &self.calls.driver_call(request_id))
            .await;
        // The intent may be durable: then the release is finished without a request.
        released.inspect_err(|_| self.retries.wake())
    }

    /// Finishes a release that was begun, in the name of its caller.
    pub(super) async fn finish_release(&self, claim: &ObjectRef, by: Caller) {
        let (namespace, name, uid) = (
            claim.namespace.clone(),
            claim.name.clone(),
            claim.uid.clone(),
        );
        let request_id = format!("resume-{uid}").into();
        let request = ReleaseRequest {
            namespace,
            name,
            uid: Some(uid),
            by,
        };
        let Err(problem) = self.carry_out(request, request_id).await else {
            tracing::info!(%claim, "finished an interrupted release");
            return;
        };
        // Another request may have finished it meanwhile.
        let record = self.records.table().claim(claim.uid.as_str()).cloned();
        if let Some(record) = record {
            tracing::warn!(%claim, %problem, "an interrupted release is still open");
            self.retries
                .retry_unprepare(&record, &[], is_without_writes(&problem));
        }
    }

    /// Commits the intent, calls the drivers, removes the CDI files, and replaces the claim's record by a release record in one commit.
    async fn release_locked(
        &self,
        record: &ClaimRecord,
        by: &Caller,
        call: &Call,
    ) -> Result<Arc<ReleaseRecord>, Problem> {
        let (record, drivers) = machine::release(record, now_ms(), by);
        self.records.commit_claims(vec![record.clone()]).await?;
        let work = [(record.clone(), drivers)];
        let results = self
            .calls
            .call_unprepare(&work, call)
            .await
            .pop()
            .unwrap_or_default();
        // The locks of the values' paths are kept until the end is durable.
        let Restored {
            values: put_back,
            locks: _locks,
        } = self
            .values
            .restore_released(&record, &results, &RestoreRequest::of(call))
            .await;
        failpoint::pass(Point::ReleasePutBack);
        self.files
            .remove_files(std::slice::from_ref(&record))
            .await?;
        let released = machine::released(&record, results, now_ms(), by);
        let released = Arc::new(ReleaseRecord {
            put_back,
            ..released
        });
        self.forget_released(&record, &released).await?;
        audit(&released, call);
        Ok(released)
    }

    async fn forget_released(
        &self,
        record: &ClaimRecord,
        released: &Arc<ReleaseRecord>,
    ) -> Result<(), Problem> {
        let uid = &record.id.uid;
        let outdated = self.records.table().outdated_releases(uid);
        let mut changes = vec![Change::PutReleased(released.clone())];
        changes.extend(outdated.iter().cloned().map(Change::DeleteReleased));
        let pods: BTreeSet<_> = record.pods.keys().cloned().collect();
        self.unprepares
            .forget(std::slice::from_ref(uid), &pods, changes, Undo::default())
            .await?;
        self.records
            .table()
            .put_released(released.clone(), &outdated);
        self.retries.forget_claim(uid);
        Ok(())
    }

    fn find_claim(&self, request: &ReleaseRequest) -> Result<Arc<ClaimRecord>, Problem> {
        let table = self.records.table();
        let is_named = |record: &&Arc<ClaimRecord>| {
            record.id.namespace == request.namespace && record.id.name == request.name
        };
        if let Some(uid) = &request.uid {
            return table
                .claim(uid.as_str())
                .filter(is_named)
                .cloned()
                .ok_or_else(|| no_claim(request));
        }
        let found: Vec<_> = table.claims().filter(is_named).collect();
        match found.as_slice() {
            [] => Err(no_claim(request)),
            [one] => Ok(Arc::clone(one)),
            several => Err(ambiguous(several)),
        }
    }
}

/// Writes the line that an auditor looks for in the log.
fn audit(released: &ReleaseRecord, call: &Call) {
    let untold = released
        .untold
        .iter()
        .map(|(driver, left)| format!("{driver}: {}", left.devices.join(", ")));
    let not_notified = untold.collect::<Vec<_>>().join("; ");
    let (claim, claim_uid, by, request) = (
        &released.id,
        &released.id.uid,
        &released.by,
        &call.request_id,
    );
    tracing::warn!(%claim, %claim_uid, %by, %request, not_notified, "claim released by force");
}

fn no_claim(request: &ReleaseRequest) -> Problem {
    let uid = request
        .uid
        .as_ref()
        .map(|uid| format!(" with UID {uid}"))
        .unwrap_or_default();
    let message = format!(
        "there is no claim {}/{}{uid} here",
        request.namespace, request.name
    );
    Problem::not_found(ProblemCode::NoSuchClaim, message)
}

fn ambiguous(claims: &[&Arc<ClaimRecord>]) -> Problem {
    let uids: Vec<_> = claims
        .iter()
        .map(|claim| format!("{} ({})", claim.id.uid, claim.state.as_str()))
        .collect();
    let (name, uids) = (&claims[0].id, uids.join(", "));
    let message = format!("several claims are called {name}; name one by its UID: {uids}");
    Problem::conflict(ProblemCode::ClaimAmbiguous, message)
}
