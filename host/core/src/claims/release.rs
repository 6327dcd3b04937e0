//! An operator's way out: gives up a claim whose driver does not. Drivers that serve are asked once more; the others are not told, and
//! a durable entry says so.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, MutexGuard, PoisonError};

use super::Inner;
use super::machine;
use super::values::{Doing, Errand, PutBacks};
use crate::checkpoint::Change;
use crate::driver::Call;
use nodedock_base::clock::now_ms;
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{
    Caller, ClaimRecord, DriverName, ObjectName, ObjectRef, Problem, PutBack, ReleaseRecord, Uid, limit,
};

/// Which claim, by whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReleaseRequest {
    pub namespace: ObjectName,
    pub name: ObjectName,
    /// None: the only claim of that name.
    pub uid: Option<Uid>,
    pub by: Caller,
}

/// What a release would come to, or came to.
#[derive(Debug, Clone, PartialEq)]
pub enum ReleaseOutcome {
    /// Nothing was done: the claim, and whether each of its drivers serves.
    Looked {
        record: Arc<ClaimRecord>,
        drivers: BTreeMap<DriverName, Result<(), Problem>>,
        /// What would become of the values that drivers changed, unless they put them back themselves.
        values: Vec<PutBack>,
    },
    Released(Arc<ReleaseRecord>),
}

/// The newest claims that were given up by hand.
#[derive(Debug, Default)]
pub(super) struct Released(BTreeMap<Uid, Arc<ReleaseRecord>>);

impl Released {
    pub(super) fn new(records: Vec<ReleaseRecord>) -> Self {
        Self(records.into_iter().map(|record| (record.id.uid.clone(), Arc::new(record))).collect())
    }

    /// Those that make room for one more.
    fn outdated(&self, new: &Uid) -> Vec<Uid> {
        let mut others: Vec<_> = self.0.values().filter(|record| record.id.uid != *new).collect();
        others.sort_by_key(|record| std::cmp::Reverse(record.at_ms));
        others.into_iter().skip(limit::RELEASED_MAX - 1).map(|record| record.id.uid.clone()).collect()
    }

    fn put(&mut self, record: Arc<ReleaseRecord>, outdated: &[Uid]) {
        outdated.iter().for_each(|uid| drop(self.0.remove(uid)));
        self.0.insert(record.id.uid.clone(), record);
    }
}

impl Inner {
    /// Claims that were given up by hand, the oldest first.
    pub(super) fn list_released(&self) -> Vec<Arc<ReleaseRecord>> {
        let mut records: Vec<_> = self.released_claims().0.values().cloned().collect();
        records.sort_by_key(|record| record.at_ms);
        records
    }

    /// What a release would come to.
    pub(super) async fn look_at_release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome, Problem> {
        let record = self.find(request)?;
        machine::check_release(&record)?;
        let serves = |driver: &DriverName| (driver.clone(), self.registry.serving(driver).map(drop));
        let drivers = record.drivers.keys().map(serves).collect();
        let call = Call { request_id: "look".into(), deadline: self.settings.call_deadline };
        let errand = Errand::of(&call);
        let looked = self.values.put_back(&record.id, |_| true, |_| false, Doing::Look, &errand).await;
        Ok(ReleaseOutcome::Looked { record, drivers, values: looked.ends })
    }

    pub(super) async fn release_claim(
        &self,
        request: ReleaseRequest,
        request_id: Arc<str>,
    ) -> Result<ReleaseOutcome, Problem> {
        let uid = self.find(&request)?.id.uid.clone();
        let pods: BTreeSet<_> = self.pods_of(&uid);
        // Pods are locked before claims. A pod that comes meanwhile makes the check below fail.
        let _pods = self.pod_locks.take(pods.iter().cloned()).await;
        let _claim = self.claim_locks.take([uid.clone()]).await;
        let record = self.table.lock().claim(uid.as_str()).cloned().ok_or_else(|| no_claim(&request))?;
        machine::check_release(&record)?;
        if record.pods.keys().any(|pod| !pods.contains(pod)) {
            let message = format!("claim {} was taken by another pod just now", record.id);
            return Err(Problem::conflict("claim-in-use", message));
        }
        let call = Call { request_id, deadline: self.settings.call_deadline };
        let released = self.release(&record, &request.by, &call).await;
        // The intent may stand: then it is finished like any other.
        released.inspect_err(|_| self.kept.notify_one()).map(ReleaseOutcome::Released)
    }

    /// Finishes a release that was begun, for whoever began it.
    pub(super) async fn finish_release(&self, claim: &ObjectRef, by: Caller) {
        let (namespace, name, uid) = (claim.namespace.clone(), claim.name.clone(), claim.uid.clone());
        let request_id = format!("resume-{uid}").into();
        let request = ReleaseRequest { namespace, name, uid: Some(uid), by };
        let Err(problem) = self.release_claim(request, request_id).await else {
            tracing::info!(%claim, "finished an interrupted release");
            return;
        };
        // Somebody else may have finished it meanwhile.
        let record = self.table.lock().claim(claim.uid.as_str()).cloned();
        if let Some(record) = record {
            tracing::warn!(%claim, %problem, "an interrupted release is still open");
            self.tried_in_vain(&record, &Vec::new());
        }
    }

    /// The intent, the calls, the CDI files, and in one commit the end of the record and the entry that tells of it.
    async fn release(
        &self,
        record: &ClaimRecord,
        by: &Caller,
        call: &Call,
    ) -> Result<Arc<ReleaseRecord>, Problem> {
        let (record, drivers) = machine::release(record, now_ms(), by);
        self.commit_claims(vec![record.clone()]).await?;
        let work = [(record.clone(), drivers)];
        let results = self.call_unprepare(&work, call).await.pop().unwrap_or_default();
        // The turns are kept until the end is durable.
        let PutBacks { ends: put_back, turns: _turns } =
            self.put_back_released(&record, &results, &Errand::of(call)).await;
        failpoint::pass(Point::ReleasePutBack);
        self.remove_files(std::slice::from_ref(&record)).await?;
        let released = machine::released(&record, results, now_ms(), by);
        let released = Arc::new(ReleaseRecord { put_back, ..released });
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
        let outdated = self.released_claims().outdated(uid);
        let mut changes = vec![Change::PutReleased(released.clone())];
        changes.extend(outdated.iter().cloned().map(Change::DeleteReleased));
        self.forget_with(std::slice::from_ref(uid), &record.pods.keys().cloned().collect(), changes).await?;
        self.released_claims().put(released.clone(), &outdated);
        self.waits().over(uid);
        self.refusals().forget(|_, claim| claim.uid == *uid);
        Ok(())
    }

    fn find(&self, request: &ReleaseRequest) -> Result<Arc<ClaimRecord>, Problem> {
        let table = self.table.lock();
        let named = |record: &&Arc<ClaimRecord>| {
            record.id.namespace == request.namespace && record.id.name == request.name
        };
        if let Some(uid) = &request.uid {
            return table.claim(uid.as_str()).filter(named).cloned().ok_or_else(|| no_claim(request));
        }
        let found: Vec<_> = table.claims().filter(named).collect();
        match found.as_slice() {
            [] => Err(no_claim(request)),
            [one] => Ok(Arc::clone(one)),
            several => Err(ambiguous(several)),
        }
    }

    fn pods_of(&self, claim: &Uid) -> BTreeSet<Uid> {
        let table = self.table.lock();
        table.claim(claim.as_str()).map(|record| record.pods.keys().cloned().collect()).unwrap_or_default()
    }

    fn released_claims(&self) -> MutexGuard<'_, Released> {
        self.released.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What an auditor looks for in the log.
fn audit(released: &ReleaseRecord, call: &Call) {
    let untold: Vec<_> = released
        .untold
        .iter()
        .map(|(driver, untold)| format!("{driver}: {}", untold.devices.join(", ")))
        .collect();
    let (claim, claim_uid, by, request) = (&released.id, &released.id.uid, &released.by, &call.request_id);
    tracing::warn!(%claim, %claim_uid, %by, %request, not_told = untold.join("; "), "claim released by hand");
}

fn no_claim(request: &ReleaseRequest) -> Problem {
    let uid = request.uid.as_ref().map(|uid| format!(" with UID {uid}")).unwrap_or_default();
    let message = format!("there is no claim {}/{}{uid} here", request.namespace, request.name);
    Problem::not_found("no-such-claim", message)
}

fn ambiguous(claims: &[&Arc<ClaimRecord>]) -> Problem {
    let uids: Vec<_> =
        claims.iter().map(|claim| format!("{} ({})", claim.id.uid, claim.state.as_str())).collect();
    let name: &ObjectRef = &claims[0].id;
    Problem::conflict(
        "claim-ambiguous",
        format!("several claims are called {name}; name one by its UID: {}", uids.join(", ")),
    )
}
