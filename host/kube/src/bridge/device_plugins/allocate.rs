//! Allocate: prepares claims for devices, and releases first those of pods that are gone.
//!
//! One operation at a time for a device; two Allocates of other devices do not wait for each other.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::device_id;
use super::plan::{self, Existing};
use super::{IN_USE_DEADLINE_SHORT, OfferedResource, in_use};
use crate::bridge::claims::{DeviceClaim, DeviceIds};
use crate::bridge::plugin_claim::{self, Ids};
use crate::bridge::{Context, Patience, convert};
use nodedock_base::locks::Locks;
use nodedock_base::request::new_id;
use nodedock_base::woken;
use nodedock_model::{
    ContainerAllocation, DriverKind, DriverName, ObjectRef, PreparedForKubelet, Problem,
    ProblemCode, ProblemKind, Uid,
};

/// Time that an Allocate waits for the release of devices of an earlier one.
const UNPREPARE_WAIT: Duration = Duration::from_secs(15);

/// Shared state of the Allocates of all resources.
#[derive(Default)]
pub(in crate::bridge) struct Allocations {
    /// Locks by driver and device.
    locks: Locks<(DriverName, String)>,
    /// Time of a kubelet's last request for each claim.
    requested: Mutex<HashMap<Uid, Instant>>,
    /// Notified when a claim is prepared.
    pub(super) begun: Notify,
}

impl Allocations {
    /// Devices for which an Allocate or a release is under way.
    pub(in crate::bridge) fn devices_under_way(&self) -> DeviceIds {
        self.locks.keys().into_iter().collect()
    }
}

/// An Allocate for one container.
pub(super) struct Allocate {
    pub(super) resource: Arc<OfferedResource>,
    /// Has the pools of the offer.
    pub(super) driver: DriverName,
    pub(super) ids: Ids,
    pub(super) request_id: Arc<str>,
}

impl Allocate {
    /// Returns the CDI names and annotations that the container needs for its devices. Not cancelled when the future is dropped: the
    /// kubelet repeats the call.
    pub(super) async fn run(self) -> Result<ContainerAllocation, Problem> {
        if self.ids.is_empty() {
            return Ok(ContainerAllocation::default());
        }
        let context = self.resource.context.clone();

        let work = async move { self.allocate_when_served().await };
        let tasks = &context.parts.tasks;
        tasks
            .complete("device-plugin-allocate", work)
            .await
            .unwrap_or_else(|| {
                let message = "the allocation ended before its time; retry it";
                Err(Problem::internal(ProblemCode::Interrupted, message))
            })
    }

    fn context(&self) -> &Arc<Context> {
        &self.resource.context
    }

    /// Waits for a driver that does not serve yet, and retries once: its devices are listed from the start on, a kubelet sets no deadline
    /// for this call, and it rejects the pod for good if it fails.
    async fn allocate_when_served(&self) -> Result<ContainerAllocation, Problem> {
        let (context, driver) = (self.context(), &self.driver);
        // Before the first attempt: a driver that begins to serve meanwhile is worth the second.
        let did_serve = context.serves(driver);
        let first = self.attempt().await;
        let is_unavailable = first
            .as_ref()
            .is_err_and(|problem| problem.kind == ProblemKind::Unavailable);
        if is_unavailable && !did_serve && context.serves_within(driver, Patience::MAX).await {
            return self.attempt().await;
        }
        first
    }

    async fn attempt(&self) -> Result<ContainerAllocation, Problem> {
        let (context, driver, ids) = (self.context(), &self.driver, &self.ids);
        let devices = ids.iter().map(|id| (driver.clone(), id.clone()));
        let _devices = context.allocations.locks.take(devices).await;
        let mut existing = self.existing();
        self.check_known(&existing)?;
        if plan::depends_on_pods(ids, &existing) {
            // Without an answer it stays unknown, and the claims serve again.
            match in_use::list(context, IN_USE_DEADLINE_SHORT).await {
                Ok(pods) => existing
                    .iter_mut()
                    .for_each(|claim| claim.is_used = Some(pods.use_any(&claim.claim))),
                Err(error) => tracing::debug!(error, "which devices pods use is not known"),
            }
        }
        let plan = plan::plan(ids, &existing);
        for unused in &plan.release {
            self.release(unused).await?;
        }
        let mut answer = ContainerAllocation::default();
        for (existing, requested) in &plan.join {
            // A device plugin's answer is for all devices of the claim together.
            let is_whole = context.parts.registry.kind(&self.driver) == Some(DriverKind::Adapter);
            let requested = if is_whole {
                &existing.devices
            } else {
                requested
            };
            add(
                &mut answer,
                self.prepare(existing.claim.clone(), &existing.devices)
                    .await?,
                requested,
            );
        }
        for devices in plugin_claim::portions(&plan.new) {
            let id = plugin_claim::id(driver, &self.resource.name, &devices)?;
            add(&mut answer, self.prepare(id, &devices).await?, &devices);
        }
        Ok(answer)
    }

    fn existing(&self) -> Vec<Existing> {
        let (now, admission) = (Instant::now(), self.context().parts.times.admission);
        let claims = self.context().device_claims_with(&self.driver, &self.ids);
        claims
            .into_iter()
            .map(|claim| Existing {
                is_fresh: now < claim.requested + admission,
                claim,
                is_used: None,
            })
            .collect()
    }

    /// A device that is not listed any more may still be requested by the pod that has it. The list counts as it is once the devices are
    /// locked: a pool that is withdrawn from the kubelet is offered by slices when no Allocate can take its devices any more.
    fn check_known(&self, existing: &[Existing]) -> Result<(), Problem> {
        let offer = self.resource.offer.borrow().clone();
        let mut unknown: BTreeSet<&String> = self.ids.iter().collect();
        for known in existing {
            unknown.retain(|id| !known.claim.devices.contains(*id));
        }
        let mut listed = offer.devices.iter();
        while !unknown.is_empty()
            && let Some(device) = listed.next()
        {
            unknown.remove(&device.id);
        }
        let unknown = unknown.first().copied();
        let Some(unknown) = unknown else {
            return Ok(());
        };
        let (unknown, resource, driver) =
            (convert::shown(unknown), &self.resource.name, &self.driver);
        let message = format!("{unknown} is no device of {resource} by the driver {driver}");
        Err(Problem::not_found(ProblemCode::DeviceUnknown, message))
    }

    async fn release(&self, unused: &DeviceClaim) -> Result<(), Problem> {
        let (
            DeviceClaim {
                claim,
                driver,
                devices,
                ..
            },
            request,
        ) = (unused, &self.request_id);
        let unprepare = self
            .context()
            .kubelet_claims()?
            .unprepare(driver, claim, request.clone());
        let why = match tokio::time::timeout(UNPREPARE_WAIT, unprepare).await {
            Ok(Ok(())) => {
                tracing::info!(%driver, %claim, %request, "released devices of a pod that is gone");
                self.context()
                    .allocations
                    .requested
                    .lock()
                    .remove(&claim.uid);
                return Ok(());
            }
            Ok(Err(problem)) => problem.message,
            Err(_) => format!("no answer within {} s", UNPREPARE_WAIT.as_secs()),
        };
        let devices: Vec<_> = devices.iter().map(String::as_str).collect();
        let message = format!(
            "driver {driver} has not unprepared {} of a pod that is gone: {why}",
            devices.join(", ")
        );
        Err(Problem::unavailable(ProblemCode::DevicesNotGivenUp, message).with("claim", claim))
    }

    async fn prepare(&self, id: ObjectRef, devices: &Ids) -> Result<PreparedForKubelet, Problem> {
        let (context, driver, uid) = (self.context(), &self.driver, id.uid.clone());
        // Before the call: the search for unused claims must not take it for an old one.
        context
            .allocations
            .requested
            .lock()
            .insert(uid.clone(), Instant::now());
        woken::note();
        context.allocations.begun.notify_one();
        let claim = plugin_claim::claim(id, driver, devices)?;
        let prepared = match context.kubelet_claims() {
            Ok(kubelet) => {
                kubelet
                    .prepare_given(driver, claim, self.request_id.clone())
                    .await
            }
            Err(problem) => Err(problem),
        };
        if prepared.is_ok() {
            context
                .allocations
                .requested
                .lock()
                .insert(uid, Instant::now());
        } else if context.parts.manager.records.claim(&uid).is_none() {
            context.allocations.requested.lock().remove(&uid);
        }
        prepared
    }
}

impl Context {
    /// Releases a claim that no pod uses. False: a kubelet requested it meanwhile, or requests its devices now.
    pub(super) async fn release(&self, unused: &DeviceClaim) -> Result<bool, Problem> {
        let DeviceClaim {
            claim,
            driver,
            devices,
            requested,
        } = unused;
        let locks = devices.iter().map(|id| {
            self.allocations
                .locks
                .try_take(&(driver.clone(), id.clone()))
        });
        let Some(_devices) = locks.collect::<Option<Vec<_>>>() else {
            return Ok(false);
        };
        if self.requested_at(&claim.uid) != *requested {
            return Ok(false);
        }
        self.kubelet_claims()?
            .unprepare(driver, claim, new_id())
            .await?;
        self.allocations.requested.lock().remove(&claim.uid);
        Ok(true)
    }

    /// Returns the time at which a kubelet last requested a claim; for a claim from before a restart, the time of the start.
    pub(in crate::bridge) fn requested_at(&self, claim: &Uid) -> Instant {
        self.allocations
            .requested
            .lock()
            .get(claim)
            .copied()
            .unwrap_or(self.started)
    }

    /// Forgets claims that are gone, unless they were requested after `since`.
    pub(super) fn forget_all_but(&self, claims: &[DeviceClaim], since: Instant) {
        let known: HashSet<_> = claims.iter().map(|known| &known.claim.uid).collect();
        let mut requested = self.allocations.requested.lock();
        requested.retain(|uid, requested| *requested > since || known.contains(uid));
    }
}

/// Adds CDI names of the requested devices, each once, and annotations, of which the first of a key counts.
fn add(answer: &mut ContainerAllocation, prepared: PreparedForKubelet, requested: &Ids) {
    for name in prepared
        .devices
        .into_iter()
        .filter(|device| requested.contains(&device_id(&device.pool, &device.device)))
        .flat_map(|device| device.cdi)
    {
        if !answer.cdi_devices.contains(&name) {
            answer.cdi_devices.push(name);
        }
    }
    for (key, value) in prepared.annotations {
        answer.annotations.entry(key).or_insert(value);
    }
}
