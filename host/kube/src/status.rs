//! The status of devices in claims: what drivers report, applied to `status.devices` of their claims.
//!
//! Given what drivers report (`Statuses::report`), claim by claim; of each claim and driver the newest report counts. Emits a
//! server-side apply of the driver's entries, under a field manager of the driver, where the claim has others. Never touches the entries
//! of other drivers, nor removes entries when a claim is unprepared: they go with its allocation. A claim whose stored parameters
//! differ from what any JSON client can send refuses every apply (`docs/decisions/0010`): that is a condition.

mod entry;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use kube::api::{Api, DynamicObject, Patch, PatchParams};
use prometheus_client::metrics::counter::Counter;
use serde_json::json;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use self::plan::{DriverStatus, Plan, plan};
use super::client::{ApiError, DraResource, DraVersion, ErrorKind, KubeClient};
use crate::events::KUBE_FORBIDDEN_PAUSE;
use nodedock_base::backoff::Backoff;
use nodedock_base::clock::now_ms;
use nodedock_base::conditions::Conditions;
use nodedock_base::locks::lock;
use nodedock_base::tasks::Tasks;
use nodedock_model::{DriverName, ObjectRef, Problem, ProblemCode, ReportedDevice, Uid, limit};

/// Attempts to change an object that other clients change as well.
const KUBE_CONFLICTS_MAX: u32 = 5;

/// Claims whose status waits for a write: many times the claims of a node.
const STATUSES_WAITING_MAX: usize = 1024;

/// Handle to the writer of statuses.
#[derive(Clone)]
pub struct Statuses {
    queue: Arc<Queue>,
}

/// Statuses written, and those that were not.
#[derive(Debug, Default)]
pub struct StatusCounts {
    pub written: Counter,
    /// The claim had them.
    pub unchanged: Counter,
    /// The API server refuses them for good.
    pub refused: Counter,
    /// The queue was full.
    pub dropped: Counter,
}

#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    reported: Notify,
    counts: StatusCounts,
    conditions: Conditions,
}

#[derive(Default)]
struct Waiting {
    /// In the order in which they are written, one of each driver and claim. It stays while it is written.
    statuses: VecDeque<DriverStatus>,
    /// Until when statuses of these drivers wait, since one was forbidden: rights are given by driver.
    held_back: BTreeMap<DriverName, Instant>,
}

impl Statuses {
    /// Starts the task that writes.
    pub fn start(tasks: &Tasks, client: &KubeClient, conditions: Conditions) -> Self {
        let queue = Arc::new(Queue { conditions, ..Queue::default() });
        let writer = Writer { client: client.clone(), queue: Arc::clone(&queue) };
        // After the next start drivers report again.
        tasks.spawn_until_stopped("claim-statuses", async move { writer.run().await });
        Self { queue }
    }

    /// Takes what drivers report of a claim, of each driver all that it reports, in place of what waits for it. The entries of a driver
    /// without reports are removed; those of a driver that is not named stay. False: the queue has no room for all of it.
    pub fn report(&self, claim: &ObjectRef, drivers: BTreeMap<DriverName, Vec<ReportedDevice>>) -> bool {
        let mut all = true;
        for (driver, devices) in drivers {
            all &= self.queue.push(DriverStatus { claim: claim.clone(), driver, devices });
        }
        self.queue.reported.notify_one();
        all
    }

    /// The claim was unprepared: what waits for it is not written any more.
    pub fn forget(&self, claim: &ObjectRef) {
        self.queue.waiting().forget(&claim.uid);
        self.queue.conditions.clear(ProblemCode::ClaimStatusUnwritable, &claim.to_string());
    }

    pub fn counts(&self) -> &StatusCounts {
        &self.queue.counts
    }
}

impl Queue {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        lock(&self.waiting)
    }

    fn push(&self, status: DriverStatus) -> bool {
        let taken = self.waiting().push(status);
        if !taken {
            self.counts.dropped.inc();
        }
        taken
    }

    fn hold_back(&self, status: &DriverStatus, error: &ApiError) {
        let driver = &status.driver;
        let words = format!("the status of devices of {driver} cannot be written into claims: {error}");
        self.conditions.set(driver.as_str(), Problem::denied(ProblemCode::ClaimStatusForbidden, words));
        let mut waiting = self.waiting();
        waiting.held_back.insert(driver.clone(), Instant::now() + KUBE_FORBIDDEN_PAUSE);
        waiting.postpone(status);
    }

    /// Where nothing waits any more, or something was written, nothing is known to be forbidden.
    fn clear_conditions(&self) {
        let held_back: BTreeSet<String> = self.waiting().held_back.keys().map(ToString::to_string).collect();
        self.conditions.retain(ProblemCode::ClaimStatusForbidden, |driver| held_back.contains(driver));
    }
}

impl Waiting {
    fn push(&mut self, status: DriverStatus) -> bool {
        if let Some(known) = self.statuses.iter_mut().find(|known| known.is_same_part(&status)) {
            *known = status;
            return true;
        }
        if self.statuses.len() >= STATUSES_WAITING_MAX {
            return false;
        }
        self.statuses.push_back(status);
        true
    }

    /// What could not be written is written after the others.
    fn postpone(&mut self, status: &DriverStatus) {
        let at = self.statuses.iter().position(|known| known.is_same_part(status));
        let newest = at.and_then(|at| self.statuses.remove(at));
        self.statuses.extend(newest);
    }

    /// A newer status of the same driver and claim stays.
    fn done(&mut self, status: &DriverStatus) {
        self.statuses.retain(|known| known != status);
    }

    /// The status that waits longest of those that may be written; otherwise until when there is none.
    fn next(&mut self, now: Instant) -> Result<DriverStatus, Option<Instant>> {
        self.held_back.retain(|driver, _| self.statuses.iter().any(|waiting| waiting.driver == *driver));
        let may_be_written =
            |status: &DriverStatus| self.held_back.get(&status.driver).is_none_or(|until| *until <= now);
        let first = self.statuses.iter().find(|status| may_be_written(status));
        first.cloned().ok_or_else(|| self.held_back.values().min().copied())
    }

    fn forget(&mut self, claim: &Uid) {
        self.statuses.retain(|status| status.claim.uid != *claim);
    }
}

struct Writer {
    client: KubeClient,
    queue: Arc<Queue>,
}

impl Writer {
    async fn run(&self) {
        let mut backoff = Backoff::new(limit::KUBE_RETRY_MIN, limit::KUBE_RETRY_MAX);
        let mut logged = false;
        loop {
            let next = self.queue.waiting().next(Instant::now());
            let status = match next {
                Ok(status) => status,
                Err(until) => {
                    self.queue.clear_conditions();
                    tokio::select! {
                        // A report that comes between is kept as a permit.
                        () = self.queue.reported.notified() => {}
                        () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {}
                    }
                    continue;
                }
            };
            let error = match self.write(&status).await {
                Ok(was_written) => {
                    backoff.reset();
                    logged = false;
                    let mut waiting = self.queue.waiting();
                    waiting.done(&status);
                    if was_written {
                        waiting.held_back.remove(&status.driver);
                    }
                    continue;
                }
                Err(error) if error.kind == ErrorKind::Forbidden => {
                    self.queue.hold_back(&status, &error);
                    continue;
                }
                Err(error) => error,
            };
            if !std::mem::replace(&mut logged, true) {
                tracing::warn!(claim = %status.claim, driver = %status.driver, %error, "a claim's status is not written yet");
            }
            let delay = backoff.delay().max(error.retry_after.unwrap_or_default().min(limit::KUBE_RETRY_MAX));
            self.queue.waiting().postpone(&status);
            tokio::time::sleep(delay).await;
        }
    }

    /// Returns whether the claim was written. An error is worth a retry.
    async fn write(&self, status: &DriverStatus) -> Result<bool, ApiError> {
        let mut conflicts = 0;
        loop {
            let error = match self.client.versioned(|version| self.write_once(status, version)).await {
                Ok(was_written) => return Ok(was_written),
                Err(error) => error,
            };
            match error.kind {
                ErrorKind::Conflict if conflicts < KUBE_CONFLICTS_MAX => conflicts += 1,
                // The claim is gone, and its status with it.
                ErrorKind::NotFound => return Ok(false),
                ErrorKind::Conflict | ErrorKind::NotServed | ErrorKind::Forbidden => return Err(error),
                _ if error.is_retryable() => return Err(error),
                _ => {
                    self.refused(status, &error);
                    return Ok(false);
                }
            }
        }
    }

    async fn write_once(&self, status: &DriverStatus, version: DraVersion) -> Result<bool, ApiError> {
        let (claim, resource) = (&status.claim, version.resource(DraResource::Claims));
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.client(), claim.namespace.as_str(), &resource);
        let object = api.get(claim.name.as_str()).await?;
        let mut left_out = Vec::new();
        let entries = match plan(status, &object, &now(), &mut left_out) {
            Plan::Past => return Ok(false),
            Plan::Unchanged => {
                self.queue.counts.unchanged.inc();
                return Ok(false);
            }
            Plan::Apply(entries) => entries,
        };
        if !left_out.is_empty() {
            let left_out = left_out.join("; ");
            tracing::warn!(%claim, left_out, "part of a device's status does not fit into the claim");
        }
        let applied = json!({
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            // Another claim of this name is a conflict.
            "metadata": { "name": claim.name, "namespace": claim.namespace, "uid": claim.uid },
            "status": if entries.is_empty() { json!({}) } else { json!({ "devices": entries }) },
        });
        let parameters = PatchParams::apply(&field_manager(&status.driver)).force();
        api.patch_status(claim.name.as_str(), &parameters, &Patch::Apply(applied)).await?;
        self.queue.counts.written.inc();
        self.queue.conditions.clear(ProblemCode::ClaimStatusUnwritable, &claim.to_string());
        Ok(true)
    }

    fn refused(&self, status: &DriverStatus, error: &ApiError) {
        self.queue.counts.refused.inc();
        let (claim, driver) = (&status.claim, &status.driver);
        tracing::warn!(%claim, %driver, %error, "a claim's status is refused");
        if is_of_allocation(error) {
            let words = format!(
                "the API server refuses every status of devices of claim {claim}: its parameters were stored in a form that no \
                 client can send again, such as with spaces between them; create the claim without them"
            );
            self.queue
                .conditions
                .set(&claim.to_string(), Problem::invalid(ProblemCode::ClaimStatusUnwritable, words));
        }
    }
}

/// One for each driver, so that an apply removes the entries of no other one.
fn field_manager(driver: &DriverName) -> String {
    format!("nodedock/{driver}")
}

fn is_of_allocation(error: &ApiError) -> bool {
    error.kind == ErrorKind::Invalid
        && !error.fields.is_empty()
        && error.fields.iter().all(|field| field == "status.allocation")
}

/// Kubernetes' times have seconds.
fn now() -> String {
    let seconds = i64::try_from(now_ms() / 1000).unwrap_or(0);
    jiff::Timestamp::from_second(seconds).unwrap_or_default().to_string()
}
