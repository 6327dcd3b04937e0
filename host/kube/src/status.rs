//! The status of devices in claims: what drivers report, applied to `status.devices` of their claims.
//!
//! Given all that drivers report now (`Statuses::set`), it writes what changed, claim by claim and driver by driver. Emits a server-side
//! apply of the driver's entries, under a field manager of the driver, where the claim has others. Never touches the entries of other
//! drivers, nor removes entries when a claim is unprepared: they go with its allocation. A claim whose stored parameters differ from what
//! any JSON client can send refuses every apply (`docs/decisions/0010`): that is a condition, and a refusal for an Event.

mod entry;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::api::{Api, DynamicObject, Patch, PatchParams};
use prometheus_client::metrics::counter::Counter;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use self::plan::{DriverStatus, Plan, plan};
use super::client::{ApiError, DraResource, DraVersion, ErrorKind, KubeClient};
use crate::events::{KUBE_FORBIDDEN_PAUSE, OnRefused, Refusal};
use crate::reconcile::observe::consumers_of;
use nodedock_base::backoff::Backoff;
use nodedock_base::clock::now_ms;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::{
    ClaimStatuses, Consumer, DriverName, ObjectRef, Problem, ProblemCode, Uid, limit,
};

/// Attempts to change an object that other clients change as well.
const KUBE_CONFLICTS_MAX: u32 = 5;

/// Statuses that drivers report for the devices of each claim.
pub type Reported = BTreeMap<Uid, ClaimStatuses>;

/// Handle to the writer of statuses.
#[derive(Clone)]
pub struct Statuses {
    reported: watch::Sender<Reported>,
    pub counts: Arc<StatusCounts>,
}

/// Statuses written, and those that were not.
#[derive(Debug, Default)]
pub struct StatusCounts {
    pub written: Counter,
    /// The claim had them.
    pub unchanged: Counter,
    /// The API server refuses them for good.
    pub refused: Counter,
    /// There were too many.
    pub dropped: Counter,
}

impl Statuses {
    /// Starts the task that writes. `max`: statuses that wait to be written, one of each claim and driver; [`limit::STATUSES_MAX`] for a node.
    pub fn start(
        tasks: &Tasks,
        client: &KubeClient,
        conditions: Conditions,
        on_refused: OnRefused,
        max: usize,
    ) -> Self {
        let (reported, counts) = (watch::Sender::default(), Arc::<StatusCounts>::default());
        let writer = Writer {
            client: client.clone(),
            counts: counts.clone(),
            conditions,
            on_refused,
            max,
            parts: BTreeMap::new(),
            held_back: BTreeMap::new(),
        };
        // After the next start drivers report again.
        tasks.spawn_until_stopped("claim-statuses", writer.run(reported.subscribe()));
        Self { reported, counts }
    }

    /// Takes what drivers report now of all claims that are prepared. The entries of a driver that reports nothing any more are removed;
    /// those of a driver that has not reported anything so far stay. Nothing is written any more of a claim that is not named.
    pub fn set(&self, reported: Reported) {
        self.reported.send_replace(reported);
    }
}

struct Writer {
    client: KubeClient,
    counts: Arc<StatusCounts>,
    conditions: Conditions,
    on_refused: OnRefused,
    max: usize,
    parts: BTreeMap<(Uid, DriverName), Part>,
    /// Time until which statuses of these drivers wait, since one was forbidden: rights are given by driver.
    held_back: BTreeMap<DriverName, Instant>,
}

/// Report of one driver for a claim.
struct Part {
    status: DriverStatus,
    is_written: bool,
    /// Failed attempts to write this status; the one with the fewest is written first.
    failures: u32,
}

impl Writer {
    async fn run(mut self, mut reported: watch::Receiver<Reported>) {
        let mut backoff = Backoff::new(limit::KUBE_RETRY_MIN, limit::KUBE_RETRY_MAX);
        let mut logged = false;
        loop {
            if matches!(reported.has_changed(), Ok(true)) {
                self.update(&reported.borrow_and_update());
            }
            let status = match self.next(Instant::now()) {
                Ok(status) => status,
                Err(until) => {
                    self.clear_conditions();
                    tokio::select! {
                        changed = reported.changed() => match changed {
                            Ok(()) => reported.mark_changed(),
                            Err(_) => return,
                        },
                        () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {}
                    }
                    continue;
                }
            };
            let error = match self.write(&status).await {
                Ok(was_written) => {
                    backoff.reset();
                    logged = false;
                    self.done(&status, was_written);
                    continue;
                }
                Err(error) => error,
            };
            self.part(&status).failures += 1;
            if error.kind == ErrorKind::Forbidden {
                self.hold_back(&status.driver, &error);
                continue;
            }
            if !std::mem::replace(&mut logged, true) {
                tracing::warn!(claim = %status.claim, driver = %status.driver, %error, "a claim's status is not written yet");
            }
            let delay = backoff.delay().max(
                error
                    .retry_after
                    .unwrap_or_default()
                    .min(limit::KUBE_RETRY_MAX),
            );
            tokio::time::sleep(delay).await;
        }
    }

    fn update(&mut self, reported: &Reported) {
        let mut known = std::mem::take(&mut self.parts);
        let mut statuses = BTreeMap::new();
        for (key, part) in &known {
            let Some(claim) = reported.get(&key.0) else {
                continue;
            };
            // A time that is not known any more is no other allocation.
            let allocated_ms = Some(claim.allocated_ms).filter(|time| *time > 0);
            let allocated_ms = allocated_ms.unwrap_or(part.status.allocated_ms);
            let status = DriverStatus {
                devices: Vec::new(),
                allocated_ms,
                ..part.status.clone()
            };
            statuses.insert(key.clone(), status);
        }
        for (
            uid,
            ClaimStatuses {
                claim,
                allocated_ms,
                devices,
            },
        ) in reported
        {
            for device in devices {
                let driver = device.driver.clone();
                let new = || DriverStatus {
                    claim: claim.clone(),
                    allocated_ms: *allocated_ms,
                    driver: driver.clone(),
                    devices: Vec::new(),
                };
                let status = statuses
                    .entry((uid.clone(), driver.clone()))
                    .or_insert_with(new);
                status.devices.push(device.clone());
            }
        }
        let mut unwritten = 0;
        for (key, status) in statuses {
            let unchanged = known
                .remove(&key)
                .filter(|part: &Part| part.status == status);
            let part = unchanged.unwrap_or(Part {
                status,
                is_written: false,
                failures: 0,
            });
            unwritten += usize::from(!part.is_written);
            if part.is_written || unwritten <= self.max {
                self.parts.insert(key, part);
            } else {
                self.counts.dropped.inc();
            }
        }
        let claims: BTreeSet<String> = reported
            .values()
            .map(|known| known.claim.to_string())
            .collect();
        self.conditions
            .retain(ProblemCode::ClaimStatusUnwritable, |claim| {
                claims.contains(claim)
            });
    }

    /// The status that failed least of those that may be written; otherwise until when there is none.
    fn next(&mut self, now: Instant) -> Result<DriverStatus, Option<Instant>> {
        let mut unwritten: Vec<&Part> = self
            .parts
            .values()
            .filter(|part| !part.is_written)
            .collect();
        self.held_back
            .retain(|driver, _| unwritten.iter().any(|part| part.status.driver == *driver));
        unwritten.retain(|part| {
            self.held_back
                .get(&part.status.driver)
                .is_none_or(|until| *until <= now)
        });
        let first = unwritten.into_iter().min_by_key(|part| part.failures);
        first
            .map(|part| part.status.clone())
            .ok_or_else(|| self.held_back.values().min().copied())
    }

    fn part(&mut self, status: &DriverStatus) -> &mut Part {
        let key = (status.claim.uid.clone(), status.driver.clone());
        self.parts
            .get_mut(&key)
            .expect("only `update` removes parts")
    }

    fn done(&mut self, status: &DriverStatus, was_written: bool) {
        let part = self.part(status);
        (part.is_written, part.failures) = (true, 0);
        if was_written {
            self.held_back.remove(&status.driver);
        }
    }

    fn hold_back(&mut self, driver: &DriverName, error: &ApiError) {
        let words =
            format!("the status of devices of {driver} cannot be written into claims: {error}");
        self.conditions.set(
            driver.as_str(),
            Problem::denied(ProblemCode::ClaimStatusForbidden, words),
        );
        self.held_back
            .insert(driver.clone(), Instant::now() + KUBE_FORBIDDEN_PAUSE);
    }

    /// Clears the condition of every driver that is not held back: nothing of it waits any more, or a write succeeded.
    fn clear_conditions(&self) {
        let held_back: BTreeSet<&str> = self.held_back.keys().map(DriverName::as_str).collect();
        self.conditions
            .retain(ProblemCode::ClaimStatusForbidden, |driver| {
                held_back.contains(driver)
            });
    }

    /// Returns whether the claim was written. An error is worth a retry.
    async fn write(&self, status: &DriverStatus) -> Result<bool, ApiError> {
        let mut conflicts = 0;
        loop {
            let error = match self
                .client
                .versioned(|version| self.write_once(status, version))
                .await
            {
                Ok(was_written) => return Ok(was_written),
                Err(error) => error,
            };
            match error.kind {
                ErrorKind::Conflict if conflicts < KUBE_CONFLICTS_MAX => conflicts += 1,
                // The next read shows it.
                ErrorKind::Invalid
                    if is_of_another_claim(&error) && conflicts < KUBE_CONFLICTS_MAX =>
                {
                    conflicts += 1;
                }
                // The claim is gone, and its status with it.
                ErrorKind::NotFound => return Ok(false),
                ErrorKind::Conflict | ErrorKind::NotServed | ErrorKind::Forbidden => {
                    return Err(error);
                }
                _ if error.is_retryable() => return Err(error),
                _ => {
                    self.refused(status, &error).await;
                    return Ok(false);
                }
            }
        }
    }

    async fn write_once(
        &self,
        status: &DriverStatus,
        version: DraVersion,
    ) -> Result<bool, ApiError> {
        let (claim, resource) = (&status.claim, version.resource(DraResource::Claims));
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.client(), claim.namespace.as_str(), &resource);
        let object = api.get(claim.name.as_str()).await?;
        let mut left_out = Vec::new();
        let entries = match plan(status, &object, &now(), &mut left_out) {
            Plan::Past => return Ok(false),
            Plan::Unchanged => {
                self.counts.unchanged.inc();
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
            // An apply to another claim of this name is refused.
            "metadata": { "name": claim.name, "namespace": claim.namespace, "uid": claim.uid },
            "status": if entries.is_empty() { json!({}) } else { json!({ "devices": entries }) },
        });
        let parameters = PatchParams::apply(&field_manager(&status.driver)).force();
        api.patch_status(claim.name.as_str(), &parameters, &Patch::Apply(applied))
            .await?;
        self.counts.written.inc();
        self.conditions
            .clear(ProblemCode::ClaimStatusUnwritable, &claim.to_string());
        Ok(true)
    }

    async fn refused(&self, status: &DriverStatus, error: &ApiError) {
        self.counts.refused.inc();
        let (claim, driver) = (&status.claim, &status.driver);
        tracing::warn!(%claim, %driver, %error, "a claim's status is refused");
        if is_of_allocation(error) {
            let words = format!(
                "the API server refuses every status of devices of claim {claim}: its parameters were stored in a form that no \
                 client can send again, such as with spaces between them; create the claim without them. A pod that waits for a \
                 condition of its devices is not bound until then"
            );
            let problem = Problem::invalid(ProblemCode::ClaimStatusUnwritable, words);
            self.conditions.set(&claim.to_string(), problem.clone());
            // no error: the event is on the claim then, and not on its pods
            let consumers = self.consumers(claim).await.unwrap_or_default();
            (self.on_refused)(&Refusal {
                action: "Report",
                claim,
                consumers: &consumers,
                problem: &problem,
            });
        }
    }

    async fn consumers(&self, claim: &ObjectRef) -> Result<Vec<Consumer>, ApiError> {
        let read = self.client.versioned(|version| {
            let resource = version.resource(DraResource::Claims);
            let api: Api<DynamicObject> =
                Api::namespaced_with(self.client.client(), claim.namespace.as_str(), &resource);
            async move { Ok(api.get(claim.name.as_str()).await?) }
        });
        consumers_of(&read.await?)
    }
}

/// One for each driver, so that an apply removes the entries of no other one.
fn field_manager(driver: &DriverName) -> String {
    format!("nodedock/{driver}")
}

fn is_of_allocation(error: &ApiError) -> bool {
    error.kind == ErrorKind::Invalid
        && !error.fields.is_empty()
        && error
            .fields
            .iter()
            .all(|field| field == "status.allocation")
}

fn is_of_another_claim(error: &ApiError) -> bool {
    !error.fields.is_empty() && error.fields.iter().all(|field| field == "metadata.uid")
}

/// Kubernetes' times have seconds.
fn now() -> String {
    let seconds = i64::try_from(now_ms() / 1000).unwrap_or(0);
    jiff::Timestamp::from_second(seconds)
        .unwrap_or_default()
        .to_string()
}
